"""The legal values of every key, contradictions between keys, and the JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import torchrepro
from torchrepro.knobs.catalogue import CATALOGUE, other_names
from torchrepro.knobs.knob import SCHEMA_VERSION, Integer, OneOf, Switch
from torchrepro.profile.schema import json_schema
from torchrepro.profile.search_path import SHIPPED

LEGAL_TEXTS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HCCL_ALGO": "level0:NA;level1:ring",
    "HCCL_DETERMINISTIC": "strict",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NTHREADS": "64",
    "OMP_NUM_THREADS": "4",
}


def _by_key():
    knobs = {knob.profile_key: knob for knob in CATALOGUE}
    fields = ("backends.", "env.")
    return knobs | {k: rows[0] for k, rows in other_names().items() if k.startswith(fields)}


KNOBS = _by_key()
NEWEST = SCHEMA_VERSION.high


MAPPINGS = {
    "device.modules": [{}, {"encoder.*": "cpu"}],
    "device.fallback": ["error", "cpu", {"ops": {"cumsum": "cpu", "median": "native"}}],
    "streams": [{}, {"split": 0, "a b": 2**32 - 1}],
    "ranks": ["distinct", "same", {"dp": "distinct", "tp": "same"}],
}


def _legal(knob):
    """Return legal values of a knob: both switches, both ends, every word."""
    match knob.legal:
        case Switch():
            return [True, False]
        case OneOf(values):
            return list(values)
        case Integer(low, high):
            return [low, low if high is None else high]
    if not knob.variable:
        return MAPPINGS[knob.name]
    words = [word.strip('"') for word in knob.legal.words.split(", ")]
    legal = [word for word in words if knob.legal.complaint(word) == ""]
    return legal or [LEGAL_TEXTS.get(knob.variable, "1")]


def _text(key, value):
    *sections, last = key.split(".")
    values = {last: value}
    for section in reversed(sections):
        values = {section: values}
    return yaml.safe_dump(values)


def _at(values, key):
    for part in key.split("."):
        values = values[part]
    return values


@pytest.fixture(scope="module")
def in_an_editor():
    """Return whether an editor with the JSON Schema accepts a text."""
    validator = jsonschema.Draft7Validator(json_schema())

    return lambda text: validator.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("key", KNOBS)
def test_a_knob_accepts_its_legal_values(load_text, in_an_editor, key):
    """Every legal value of every knob is accepted under the knob's key and kept unchanged."""
    for value in _legal(KNOBS[key]):
        resolved = load_text(_text(key, value)).resolved

        assert value in ({}, _at(resolved.values, key) if value != {} else {})
        assert in_an_editor(_text(key, value))


OTHER_VALUES = ("nonsense value", 1.5, ["a"], {"a": [1]})
WRONG = [(key, value) for key in KNOBS for value in OTHER_VALUES]
WRONG += [(key, -1) for key, knob in KNOBS.items() if not knob.variable]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_a_knob_refuses_every_other_value(refusal, in_an_editor, key, value):
    """An illegal value is underlined, and refused with line, key and legal values."""
    text = _text(key, value)
    said = refusal(f"name: a\n{text}")

    assert "bad.yaml:" in said
    assert key in said
    assert KNOBS[key].legal.words in said
    assert not in_an_editor(text)


@pytest.mark.parametrize("key", [*KNOBS, *("backends", "env", "env_extra", "device", "requires")])
def test_null_is_the_same_as_no_key(load_text, key):
    """A profile with a null key requests the same as a profile without the key."""
    assert load_text("name: a\n").digest == load_text(_text(key, None)).digest


CONTRADICTIONS = [  # what the text says, words of the reason
    ("repeatable", "backends: {cudnn: {benchmark: true}}", "timing"),
    ("aligned", "backends: {cudnn: {benchmark: true}}", "timing"),
    ("repeatable", "backends: {torch: {deterministic_algorithms: warn}}", "warn"),
    ("repeatable", "backends: {torch: {deterministic_algorithms: none}}", "none"),
    ("repeatable", "backends: {cudnn: {deterministic: false}}", "cuDNN"),
    ("repeatable", "env: {HCCL_DETERMINISTIC: 'FALSE'}", "any order"),
    ("repeatable", "env: {LCCL_DETERMINISTIC: '0'}", "any order"),
    ("repeatable", "env: {PYTHONHASHSEED: random}", "another order"),
    ("repeatable", "backends: {distributed: {hccl_deterministic: 'false'}}", "any order"),
    ("aligned", "backends: {distributed: {lccl_deterministic: 0}}", "any order"),
    (
        "seeded",
        "env: {NCCL_ALGO: Ring}\nbackends: {distributed: {nccl_algo: Tree}}",
        "another name",
    ),
    (
        "seeded",
        "env: {TORCHINDUCTOR_DETERMINISTIC: 1}\nbackends: {torch: {inductor_deterministic: true}}",
        "another name",
    ),
    ("seeded", "env: {TASK_QUEUE_ENABLE: 1}\nbackends: {npu: {task_queue: 1}}", "another name"),
    (
        "seeded",
        "backends: {npu: {deterministic_level: 1}, torch: {deterministic_algorithms: none}}",
        "undo each other",
    ),
]


@pytest.mark.parametrize(("guarantee", "text", "words"), CONTRADICTIONS)
def test_a_contradiction_is_refused(refusal, guarantee, text, words):
    """A contradiction is refused when the profile is loaded, with its line and the reason."""
    said = refusal(f"guarantee: {guarantee}\n{text}\n")

    assert "bad.yaml:" in said
    assert words in said


ILLEGAL = {
    **{
        f"seed {seed[:12]}": (f"seed: {seed}", "0 to 4294967295")
        for seed in (
            *("-1", str(2**32), "9" * 4000, f"0x{'f' * 4000}", "1.5", ".inf", ".nan", "1.0e+400"),
            *("true", "yes", "010", "0o10", "0b1", "1:30:00", "2026-11-20"),  # some, in YAML 1.1
        )
    },
    "a key that is nearly one": ("sede: 7", "did you mean: seed"),
    "a knob without its sections": ("benchmark: true", "did you mean: backends.cudnn.benchmark"),
    "a word that is nearly one": ("dropout: zeor", "did you mean: zero"),
    "seed in quotes": ('seed: "7"', "0 to 4294967295"),
    "seeds": ("seed: [1, 2]", "0 to 4294967295"),
    "cublas": ("env: {CUBLAS_WORKSPACE_CONFIG: ':8:8'}", ":4096:8, :16:8"),
    "hccl": ('env: {HCCL_DETERMINISTIC: "1"}', '"false", "true", "strict"'),
    "a truth unquoted": ("env: {HCCL_DETERMINISTIC: true}", '"true" in quotes'),
    "another truth unquoted": ("env_extra: {A: false}", '"false" in quotes'),
    "python's hashes": ("env: {PYTHONHASHSEED: '4294967296'}", "4294967295"),
    "nothing reads it": ("env: {NCCL_DETERMINISTIC: 1}", "does nothing"),
    "nothing reads it either": ("env_extra: {NCCL_DETERMINISTIC: 1}", "does nothing"),
    "known to the catalogue": ("env_extra: {OMP_NUM_THREADS: 1}", "set it in `env`"),
    "unknown to the catalogue": ("env: {OMP_NUM_THREAD: 1}", "did you mean: OMP_NUM_THREADS"),
    "no name": ("env_extra: {'A B': x}", "not the name of a variable"),
    "no name either": ("env_extra: {'A[0]': x}", "env_extra.A[0] = x: not the name"),
    "a zero byte": ('env_extra: {A: "a\\0b"}', "invisible control character"),
    "an absent package": ("requires: {no-such-package: '>=1'}", "not installed"),
    "a package without a name": ("requires: {'': '>=1'}", ">=1"),
    "an old package": ("requires: {torch: '<1'}", "is installed"),
    "no range": ("requires: {torch: newest}", "not a version range"),
}


@pytest.mark.parametrize("name", ["x is in force\\ny", "x (repeatable)", "x\\u202ey", " ", ""])
def test_a_name_cannot_imitate_the_text_of_a_report(refusal, name):
    """A name is one line without parentheses, so that it cannot look like a report's words."""
    said = refusal(f'schema: 1\nname: "{name}"\n')
    why = "invisible control character" if "u202e" in name else "one line of printable characters"

    assert "bad.yaml:2: name = " in said
    assert why in said
    assert len(said.splitlines()) < 6


@pytest.mark.parametrize("case", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_value_is_refused_with_the_legal_values(refusal, case):
    """An illegal value is refused with its line and the legal values, or the reason."""
    text, words = case

    said = refusal(f"name: a\n{text}\n")

    assert "bad.yaml:2:" in said
    assert words in said


DANGEROUS = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME"),
    *("BASH_ENV", "ENV", "IFS", "HTTPS_PROXY", "https_proxy", "HOME", "GIT_SSH_COMMAND"),
    *("AWS_SECRET_KEY", "HF_TOKEN", "MY_PASSWORD", "TORCHREPRO_ACTIVE", "CUDA_INJECTION64_PATH"),
    *("MPLBACKEND", "LOKY_PICKLER", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "OPENSSL_ENGINES"),
    *("NVCC_PREPEND_FLAGS", "HF_ENDPOINT", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URL"),
    *("MASTER_ADDR", "ld_preload"),
)


@pytest.mark.parametrize("name", DANGEROUS)
@pytest.mark.parametrize("section", ["env", "env_extra"])
def test_a_dangerous_variable_is_refused(refusal, section, name):
    """No profile names code, a path for code, or a credential."""
    said = refusal(f"name: a\n{section}: {{{name}: x}}\n")

    assert f"bad.yaml:2: {section}.{name} = " in said
    assert ": the variable is dangerous" in said


@given(number=st.integers(1, 9999))
def test_an_unquoted_number_in_a_variable_is_its_digits(load_text, number):
    """An integer for a variable means its digits, both in `env` and in `env_extra`."""
    resolved = load_text(
        f"env: {{OMP_NUM_THREADS: {number}}}\nenv_extra: {{TQDM_MINITERS: {number}}}\n"
    ).resolved

    assert {"OMP_NUM_THREADS": str(number), "TQDM_MINITERS": str(number)} == resolved.environment()


def _models(value):
    yield value
    for name in type(value).model_fields if hasattr(value, "model_dump") else ():
        yield from _models(getattr(value, name))


def test_a_value_is_an_attribute_or_an_item(load_text):
    """A section has its values under the names of the keys, and no other attributes."""
    env = load_text("env: {OMP_NUM_THREADS: 3}\n").env

    assert env["OMP_NUM_THREADS"] == env.OMP_NUM_THREADS == "3"
    assert [name in env for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "X")] == [
        True,
        False,
        False,
    ]
    with pytest.raises(KeyError):
        env["X"]


def test_a_profile_is_frozen_at_every_depth(load_text):
    """No attribute and no mapping of a profile can be changed, at any depth."""
    profile = load_text(
        "env_extra: {WANDB_NAME: x}\ndevice: {modules: {enc.*: cpu}}\nrequires: {numpy: '>=1'}\n"
    )
    digest = profile.digest

    for part in _models(profile):
        if hasattr(part, "model_dump"):
            for name in type(part).model_fields:
                with pytest.raises(ValueError, match="frozen"):
                    setattr(part, name, None)
        elif isinstance(part, Mapping):
            with pytest.raises(TypeError):
                part["x"] = "y"
    assert digest == profile.digest


def _entries(schema, prefix=""):
    for key, entry in schema["properties"].items():
        yield f"{prefix}{key}", entry
        if "properties" in entry:
            yield from _entries(entry, f"{prefix}{key}.")


def test_every_editor_can_read_the_json_schema():
    """It is valid in the old draft and in the new one, and has no references."""
    schema = json_schema()

    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert '"$ref"' not in json.dumps(schema)


def test_an_editor_accepts_shipped_profiles_and_pieces(in_an_editor):
    """Every shipped profile and every shipped piece is valid."""
    files = sorted(SHIPPED.rglob("*.yaml"))

    assert len(files) > 10
    assert [file for file in files if not in_an_editor(file.read_text(encoding="utf-8"))] == []


@pytest.fixture(scope="module")
def entries():
    """Return the entry of every key in the JSON Schema."""
    return dict(_entries(json_schema()))


def test_an_editor_completes_every_key_and_shows_its_cost(entries):
    """Each key of a profile has a description; each knob has its cost and its values."""
    assert KNOBS.keys() <= entries.keys()
    for key, entry in entries.items():
        assert len(entry["description"]) > 10, key
    for key, knob in KNOBS.items():
        assert f"Cost: {knob.cost}" in entries[key]["description"] or key == "seed"
        assert f"Cost: {knob.cost}" in entries[key]["markdownDescription"] or key == "seed"
        assert knob.legal.words in entries[key]["markdownDescription"]


def _words(entry):
    return [word for part in (entry, *entry.get("anyOf", ())) for word in part.get("enum", ())]


@pytest.mark.parametrize("key", KNOBS)
def test_an_editor_offers_only_legal_words(load_text, entries, key):
    """Each completion is accepted, and each word that messages call legal is offered."""
    offered = _words(entries[key])

    for word in offered:
        load_text(_text(key, word))
    if isinstance(KNOBS[key].legal, OneOf) or KNOBS[key].variable:
        words = [word.strip('"') for word in KNOBS[key].legal.choices()]
        assert {word for word in words if not KNOBS[key].legal.complaint(word)} <= {*offered}


VARIABLES = {key: knob for key, knob in KNOBS.items() if hasattr(knob.legal, "pattern")}


@given(data=st.data(), key=st.sampled_from(sorted(VARIABLES)))
def test_an_editor_underlines_no_text_that_loading_accepts(load_text, in_an_editor, data, key):
    """Any legal text of a variable is valid, also in capitals if case does not matter."""
    legal = VARIABLES[key].legal
    ascii_only = st.characters(codec="ascii")
    value = data.draw(st.from_regex(legal.pattern, fullmatch=True, alphabet=ascii_only))
    value = data.draw(st.sampled_from((value, value.upper()))) if legal.ignore_case else value

    assert load_text(_text(key, value)).resolved
    assert in_an_editor(_text(key, value))


UNDERLINED = (
    *("sede: 7", "seed: -1", "seed: 4294967296", "dropout: zer", "ranks: {dp: some}"),
    *("env: {NOPE: x}", "env: {CUBLAS_WORKSPACE_CONFIG: ':8:8'}", "env: {NCCL_NTHREADS: 65}"),
    *("env: {HCCL_DETERMINISTIC: '1'}", "env: {OMP_DYNAMIC: true}", "env: {OMP_NUM_THREADS: many}"),
    *("backends: {cudnn: {bench: true}}", "backends: {cudnn: {benchmark: 1}}", "backends: [cudnn]"),
    *("requires: {torch: 2}", "schema: 2", "guard: maybe", "defaults: debug-strict"),
    *("device: {fallback: {ops: {a: b}}}", "device: {modules: {a: CPU}}", "streams: {a: x}"),
)


FINE = (
    *("schema: 1", "defaults: [seed-only, with/dropout-zero, _self_]", "requires: null"),
    *(
        "requires: {torch: '>=2.6', numpy: null}",
        "env_extra: {TQDM_MINITERS: 1, WANDB_NAME: x, C: null}",
        "env: null",
    ),
    *("ranks: {dp: same}", "streams: {split: 3}", "device: {fallback: {ops: {cumsum: cpu}}}"),
    *("backends: {cudnn: null}", "description: some words", "env_extra: null", "streams: null"),
)


@pytest.mark.parametrize("text", [*UNDERLINED, *FINE])
def test_an_editor_underlines_every_refused_value(attempt, load_text, in_an_editor, text):
    """A wrong key or value is invalid at any depth; lists, mappings, and null are valid."""
    refused = isinstance(attempt(load_text, text), torchrepro.ProfileError)

    assert refused == (text in UNDERLINED)
    assert in_an_editor(text) != refused


@pytest.mark.parametrize("key", KNOBS)
def test_the_digest_depends_on_every_value(load_text, key):
    """Profiles that differ in any value, or in whether it is set, have different digests."""
    texts = ["name: a\n", *(_text(key, value) for value in _legal(KNOBS[key]) if value != {})]

    digests = {load_text(text).digest for text in texts}

    assert len({*map(str, _legal(KNOBS[key]))} - {"{}"}) + 1 == len(digests)


def test_a_newer_schema_is_refused_with_the_upgrade(write, refusal):
    """A profile, or its base, for a later torchrepro gives one message: the upgrade.

    Its keys may be new, too, so they are not reported as unknown.
    """
    newer = NEWEST + 1
    content = f"schema: {newer}\nseed: 1\nsomething: new\n"
    write(content, "base.yaml")
    for said, file in (
        (refusal(content), "bad.yaml"),
        (refusal("schema: 1\ndefaults: [base, _self_]\nseed: 1\n"), "base.yaml"),
    ):
        assert f"{file}:1: schema = {newer}: written for a newer torchrepro" in said
        assert "to do: install a newer torchrepro" in said
        assert f"torchrepro {torchrepro.__version__}" in said
        assert "something" not in said


@pytest.mark.parametrize("schema", [0, -1, "true", "one", 1.5])
def test_an_invalid_version_of_the_schema_is_refused_like_other_values(refusal, schema):
    """A negative or meaningless version is refused together with other wrong values."""
    said = refusal(f"schema: {schema}\nsede: 1\n")

    assert re.search(rf"bad.yaml:1: schema = {schema}: (not a whole number|out of range)", said)
    assert "bad.yaml:2" in said


def test_pasted_names_of_torch_and_variables_lead_to_their_keys(load_text):
    """A pasted name of torch's, or a variable, is refused with the key of its knob."""
    pasted = {name: knobs[0].profile_key for name, knobs in other_names().items()}
    pasted |= {knob.variable: knob.name for knob in CATALOGUE if knob.variable}
    with pytest.raises(torchrepro.ProfileError) as caught:
        load_text("".join(f"{name}: [1]\n" for name in pasted))

    assert {problem.key: problem.near for problem in caught.value.problems} == pasted
