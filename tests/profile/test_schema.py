"""What a profile may say: every knob's legal values, what cannot hold together, and the schema."""

from __future__ import annotations

from collections.abc import Mapping

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.knobs.catalogue import CATALOGUE, other_names
from torchrepro.knobs.legal import Fallback, OneOf, Patterns, RankPolicies, Seeds, Switch, Whole
from torchrepro.profile.json_schema import json_schema

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


MAPPINGS = {
    Patterns: [{}, {"encoder.*": "cpu"}],
    Fallback: ["error", "cpu", {"ops": {"cumsum": "cpu", "median": "native"}}],
    Seeds: [{}, {"split": 0, "a b": 2**32 - 1}],
    RankPolicies: ["distinct", "same", {"dp": "distinct", "tp": "same"}],
}


def _legal(knob):
    """Return legal values of a knob: both switches, both ends, every word."""
    match knob.legal:
        case Switch():
            return [True, False]
        case OneOf(values):
            return list(values)
        case Whole(low, high):
            return [low, low if high is None else high]
    if not knob.variable:
        return MAPPINGS[type(knob.legal)]
    words = [word.strip('"') for word in knob.legal.words.split(", ")]
    legal = [word for word in words if knob.legal.complaint(word) == ""]
    return legal or [LEGAL_TEXTS.get(knob.variable, "1")]


def _text(key, value):
    """Return the text of a profile that sets one dotted key."""
    *sections, last = key.split(".")
    values = {last: value}
    for section in reversed(sections):
        values = {section: values}
    return yaml.safe_dump(values)


def _at(values, key):
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("key", KNOBS)
def test_a_knob_takes_its_legal_values(load_text, key):
    """Every legal value of every knob is accepted under the knob's key and kept as it is."""
    for value in _legal(KNOBS[key]):
        resolved = load_text(_text(key, value)).resolved

        assert value in ({}, _at(resolved.values, key) if value != {} else {})
        assert (
            list(
                jsonschema.Draft202012Validator(json_schema()).iter_errors(
                    yaml.safe_load(_text(key, value))
                )
            )
            == []
        )


OTHER_VALUES = ("nonsense value", 1.5, ["a"], {"a": [1]})
WRONG = [(key, value) for key in KNOBS for value in OTHER_VALUES]
WRONG += [(key, -1) for key, knob in KNOBS.items() if not knob.variable]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_a_knob_refuses_every_other_value(refusal, key, value):
    """An illegal value is refused with the line, the key and what is legal."""
    said = refusal(f"name: a\n{_text(key, value)}")

    assert "bad.yaml:" in said
    assert key in said
    assert KNOBS[key].legal.words in said


@pytest.mark.parametrize("key", [*KNOBS, *("backends", "env", "env_extra", "device", "requires")])
def test_null_leaves_alone(load_text, key):
    """A profile that sets a key to null asks for exactly what one without the key asks for."""
    assert load_text("name: a\n").digest == load_text(_text(key, None)).digest


CONTRADICTIONS = {  # what the text says, words of the reason
    "timed kernels": ("backends: {cudnn: {benchmark: true}}", "repeatable", "timing"),
    "timed kernels, aligned": ("backends: {cudnn: {benchmark: true}}", "aligned", "timing"),
    "warnings": ("backends: {torch: {deterministic_algorithms: warn}}", "repeatable", "warn"),
    "none": ("backends: {torch: {deterministic_algorithms: none}}", "repeatable", "none"),
    "cudnn": ("backends: {cudnn: {deterministic: false}}", "repeatable", "cuDNN"),
    "hccl": ("env: {HCCL_DETERMINISTIC: 'FALSE'}", "repeatable", "any order"),
    "lccl": ("env: {LCCL_DETERMINISTIC: '0'}", "repeatable", "any order"),
    "hashes": ("env: {PYTHONHASHSEED: random}", "repeatable", "another order"),
    "hccl by its other name": (
        "backends: {distributed: {hccl_deterministic: 'false'}}",
        "repeatable",
        "any order",
    ),
    "lccl by its other name": (
        "backends: {distributed: {lccl_deterministic: 0}}",
        "aligned",
        "any order",
    ),
    "nccl twice": (
        "env: {NCCL_ALGO: Ring}\nbackends: {distributed: {nccl_algo: Tree}}",
        "seeded",
        "another name",
    ),
    "inductor twice": (
        "env: {TORCHINDUCTOR_DETERMINISTIC: 1}\nbackends: {torch: {inductor_deterministic: true}}",
        "seeded",
        "another name",
    ),
    "the task queue twice": (
        "env: {TASK_QUEUE_ENABLE: 1}\nbackends: {npu: {task_queue: 1}}",
        "seeded",
        "another name",
    ),
    "the npu's level": (
        "backends: {npu: {deterministic_level: 1}, torch: {deterministic_algorithms: none}}",
        "seeded",
        "undo each other",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_cannot_hold_together_is_refused(refusal, case):
    """A contradiction is refused when the profile is loaded, with its line and the reason."""
    text, guarantee, words = case

    said = refusal(f"guarantee: {guarantee}\n{text}\n")

    assert "bad.yaml:" in said
    assert words in said


ILLEGAL = {
    **{f"seed {seed}": (f"seed: {seed}", "0 to 4294967295") for seed in (-1, 2**32, 1.5, "true")},
    "seed in quotes": ('seed: "7"', "0 to 4294967295"),
    "seeds": ("seed: [1, 2]", "0 to 4294967295"),
    "cublas": ("env: {CUBLAS_WORKSPACE_CONFIG: ':8:8'}", ":4096:8, :16:8"),
    "hccl": ('env: {HCCL_DETERMINISTIC: "1"}', '"false", "true", "strict"'),
    "hccl unquoted": ("env: {HCCL_DETERMINISTIC: true}", '"true" in quotes'),
    "python's hashes": ("env: {PYTHONHASHSEED: '4294967296'}", "4294967295"),
    "nothing reads it": ("env: {NCCL_DETERMINISTIC: 1}", "does nothing"),
    "nothing reads it either": ("env_extra: {NCCL_DETERMINISTIC: 1}", "does nothing"),
    "known to the catalogue": ("env_extra: {OMP_NUM_THREADS: 1}", "set it in `env`"),
    "unknown to the catalogue": ("env: {OMP_NUM_THREAD: 1}", "did you mean: OMP_NUM_THREADS"),
    "no name": ("env_extra: {'A B': x}", "not the name of a variable"),
    "no name either": ("env_extra: {'A[0]': x}", "env_extra.A[0] = x: not the name"),
    "a zero byte": ('env_extra: {A: "a\\0b"}', "any text"),
    "a newer schema": ("schema: 2", "newer torchrepro"),
    "an absent package": ("requires: {no-such-package: '>=1'}", "not installed"),
    "a package without a name": ("requires: {'': '>=1'}", ">=1"),
    "an old package": ("requires: {torch: '<1'}", "is installed"),
    "no range": ("requires: {torch: newest}", "not a version range"),
}


@pytest.mark.parametrize("case", ILLEGAL.values(), ids=ILLEGAL)
def test_what_is_illegal_is_refused_with_what_is_legal(refusal, case):
    """An illegal value is refused with its line and what would be legal, or why not."""
    text, words = case

    said = refusal(f"name: a\n{text}\n")

    assert "bad.yaml:2:" in said
    assert words in said


DANGEROUS = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME"),
    *("BASH_ENV", "ENV", "IFS", "HTTPS_PROXY", "https_proxy", "HOME", "GIT_SSH_COMMAND"),
    *("AWS_SECRET_KEY", "HF_TOKEN", "MY_PASSWORD", "TORCHREPRO_ACTIVE", "CUDA_INJECTION64_PATH"),
)


@pytest.mark.parametrize("name", DANGEROUS)
@pytest.mark.parametrize("section", ["env", "env_extra"])
def test_a_dangerous_variable_is_refused(refusal, section, name):
    """No profile names code, a place where code is found, or a credential."""
    said = refusal(f"name: a\n{section}: {{{name}: x}}\n")

    assert f"bad.yaml:2: {section}.{name} = x: the variable is dangerous" in said


@given(number=st.integers(1, 9999))
def test_an_unquoted_number_in_a_variable_is_its_digits(load_text, number):
    """An integer for a variable means its digits, in `env` and in `env_extra` alike."""
    resolved = load_text(
        f"env: {{OMP_NUM_THREADS: {number}}}\nenv_extra: {{A: {number}}}\n"
    ).resolved

    assert {"OMP_NUM_THREADS": str(number), "A": str(number)} == resolved.environment()


@pytest.mark.parametrize("word", ["true", "false"])
@pytest.mark.parametrize("key", ["env.OMP_DYNAMIC", "env_extra.A"])
def test_an_unquoted_truth_in_a_variable_is_refused(refusal, key, word):
    """A boolean for a variable is refused, and the message shows the quoted form."""
    section, name = key.split(".")

    assert f'"{word}" in quotes' in refusal(f"{section}: {{{name}: {word}}}\n")


def _models(value):
    yield value
    for name in type(value).model_fields if hasattr(value, "model_dump") else ():
        yield from _models(getattr(value, name))


def test_a_profile_is_frozen_to_the_bottom(load_text):
    """No attribute and no mapping of a profile can be changed, at any depth."""
    profile = load_text(
        "env_extra: {A: x}\ndevice: {modules: {enc.*: cpu}}\nrequires: {numpy: '>=1'}\n"
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


@pytest.mark.parametrize(
    "text",
    ["sede: 7", "env: {NOPE: x}", "backends: {cudnn: {bench: true}}", "seed: -1", "dropout: zer"],
)
def test_the_json_schema_refuses_what_loading_refuses(refusal, text):
    """What the JSON Schema calls invalid is refused by `load`, and the other way round."""
    errors = jsonschema.Draft202012Validator(json_schema()).iter_errors(yaml.safe_load(text))

    assert refusal(text)
    assert list(errors) != []


@pytest.mark.parametrize("key", KNOBS)
def test_the_digest_tells_every_value_apart(load_text, key):
    """Profiles that differ in any one value have different digests, unset included."""
    texts = ["name: a\n", *(_text(key, value) for value in _legal(KNOBS[key]) if value != {})]

    digests = {load_text(text).digest for text in texts}

    assert len({*map(str, _legal(KNOBS[key]))} - {"{}"}) + 1 == len(digests)
