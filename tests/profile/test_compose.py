"""Defaults lists and overrides follow Hydra's rules, and every value has an origin."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import torchrepro
from torchrepro.ground.errors import printable
from torchrepro.profile.load import compose, in_hydras_grammar, parsed
from torchrepro.profile.resolved import NOT_INHERITED, flatten
from torchrepro.profile.search_path import SHIPPED

SHIPPED_NAMES = ("debug-strict", "npu-align", "seed-only", "train-fast")
KEYS = {  # a few keys at several depths, with values that differ from each other
    "name": st.sampled_from(["a", "b", "c"]),
    "description": st.sampled_from(["one", "two", "three"]),
    "seed": st.integers(0, 9),
    "dropout": st.sampled_from(["keep", "zero", None]),
    "device.rng": st.sampled_from(["native", "host", None]),
    "device.fallback": st.sampled_from(["error", "cpu"]),
    "env.OMP_NUM_THREADS": st.sampled_from(["1", "2", "3"]),
    "env_extra.WANDB_NAME": st.sampled_from(["x", "y"]),
    "backends.cudnn.enabled": st.booleans(),
    "backends.cudnn.benchmark_limit": st.integers(0, 9),
    "backends.torch.default_dtype": st.sampled_from(["float32", "float64"]),
    "requires.numpy": st.just(">=1"),
}


def _nested(leaves):
    values = {}
    for key, value in leaves.items():
        section = values
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return values


@st.composite
def chains(draw):
    """Draw files by name; each inherits from some earlier files, `_self_` is in any position."""
    files = {}
    for position in range(draw(st.integers(1, 5))):
        leaves = draw(st.fixed_dictionaries({}, optional=KEYS))
        bases = draw(st.lists(st.sampled_from(sorted(files)), max_size=3)) if files else []
        at = draw(st.none() | st.integers(0, len(bases)))
        entries = bases if at is None else [*bases[:at], "_self_", *bases[at:]]
        values = _nested(leaves)
        if bases or draw(st.booleans()):
            values = {"defaults": entries, **values}
        files[f"file{position}"] = values or {"seed": 0}
    return files


def _accepted(path, overrides=()):
    try:
        return compose(path, overrides)
    except torchrepro.ProfileError as error:
        assume("is inherited again and overwrites it" not in str(error))
        raise


def _written(folder, files):
    for name, values in files.items():
        text = yaml.safe_dump(values, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return str(folder / f"{list(files)[-1]}.yaml")


def _asked(values):
    return {key: value for key, value in flatten(values).items() if key not in NOT_INHERITED}


def _by_hydra(folder, group, name):
    with initialize_config_dir(str(folder), version_base=None):
        config = hydra_compose(overrides=[f"+{group}={name}"])
    return OmegaConf.to_container(config[group])


@pytest.mark.parametrize("group", ["repro", "other"])
@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_hydra_composes_a_shipped_profile_to_the_same_values(tmp_path, group, name):
    """Hydra composes the same values, with our config source and with its own rules alone."""
    (tmp_path / group).mkdir()
    for path in SHIPPED.glob("*.yaml"):
        (tmp_path / group / path.name).write_bytes(path.read_bytes())

    assert _asked(compose(name).values) == _asked(_by_hydra(tmp_path, group, name))


@pytest.mark.slow
@pytest.mark.parametrize("group", ["repro", "other"])
@settings(max_examples=40)
@given(files=chains())
def test_hydra_composes_a_chain_to_the_same_values(tmp_path_factory, group, files):
    """For any accepted chain, Hydra composes the same values, also with its own rules alone."""
    folder = tmp_path_factory.mktemp("chain")
    (folder / group).mkdir()
    path = _written(folder / group, files)

    assert _asked(_accepted(path).values) == _asked(_by_hydra(folder, group, list(files)[-1]))


@given(files=chains())
def test_the_origin_of_every_value_is_its_line(tmp_path_factory, files):
    """The origin of every leaf is a file and the line in it with the key and the value."""
    path = _written(tmp_path_factory.mktemp("chain"), files)
    composition = _accepted(path)

    for key, value in flatten(composition.values).items():
        file, _, line = composition.origin_of(key).rpartition(":")
        if key == "name" and not file:  # the file's own name
            assert Path(path).stem == value
            continue
        text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert {key.rpartition(".")[2]: value} == yaml.safe_load(text)


@given(files=chains())
def test_name_and_description_are_not_inherited(tmp_path_factory, files):
    """Name and description are the last file's own, in any position of its `_self_`."""
    path = _written(tmp_path_factory.mktemp("chain"), files)
    own = list(files.values())[-1]
    values = _accepted(path).values

    assert own.get("name", Path(path).stem) == values["name"]
    assert own.get("description") == values.get("description")


@given(files=chains(), overrides=st.lists(st.sampled_from(["seed=71", "~seed", "++seed=72"])))
def test_the_last_override_wins(tmp_path_factory, files, overrides):
    """The last override of a key sets its value, or null for a deletion, and is its origin."""
    composition = _accepted(_written(tmp_path_factory.mktemp("chain"), files), overrides)

    if overrides:
        meant = {"seed=71": 71, "++seed=72": 72, "~seed": None}
        assert meant[overrides[-1]] == composition.values["seed"]
        assert f"override {overrides[-1]}" == composition.origin_of("seed")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("+seed=7", "seed", 7),
        ("++seed=7", "seed", 7),
        ("seed=null", "seed", None),
        ("~seed", "seed", None),
        ("~seed=1234", "seed", None),
        ("backends.cudnn.benchmark=true", "backends.cudnn.benchmark", True),
        ("backends/cudnn={benchmark: true}", "backends.cudnn.benchmark", True),
        ("backends={cudnn: {benchmark: true}}", "backends.cudnn.benchmark", True),
        ('env.OMP_NUM_THREADS="4"', "env.OMP_NUM_THREADS", "4"),
        ("name='two words'", "name", "two words"),
        ("device.modules={enc.*: cpu}", "device.modules", {"enc.*": "cpu"}),
    ],
)
def test_an_override_is_read_in_hydras_grammar(override, key, value):
    """An override sets one value, typed as Hydra types it, and is that value's origin."""
    composition = compose("seed-only", [override])

    assert value == flatten(composition.values)[key]
    assert f"override {override}" == composition.origin_of(key)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"))
TEXTS |= st.sampled_from(
    ["true", "Null", "1e3", "a:b", "/x:y", "-x", "'", "a\\", "\\'", "/a b", "\u00fc"]
)
NAMES = ["a", "b_1", "Dc", "encoder.layer.*", "*", "ns::op", "two words", "a\\b(c)=[d],{e}\tf"]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)


@given(
    value=st.recursive(
        LEAVES | TEXTS.filter(lambda text: "${" not in text and text != "???"),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_a_value_written_as_an_override_is_read_back(value):
    """Hydra's grammar reads back any value that we write, also the name of any folder."""
    assert parsed(f"key={in_hydras_grammar(value)}") == {"key": value}


@pytest.mark.parametrize(
    "override",
    [
        *("seed=1,2", "seed=range(1,3)", "seed=choice(1,2)", "seed=interval(0,1)", "seed=glob(*)"),
        *(
            "seed",
            "=7",
            "",
            " ",
            "seed=[1",
            "seed@here=7",
            "~",
            "debug-strict",
            "seed==7",
            "seed 7",
        ),
        *("seed=${oc.env:SECRET}", "seed=${nope}", "seed=???", "env_extra.A='x${b}'"),
        *("_target_=os.system", "env._target_=x", "sede=7", "hydra.run.dir=x"),
        pytest.param(f"seed={'[' * 1500}{']' * 1500}", id="lists in lists"),
        pytest.param(f"{'a.' * 1500}a=1", id="keys in keys"),
        pytest.param(f"seed={'9' * 5000}", id="thousands of digits"),
    ],
)
def test_a_text_that_sets_no_value_is_refused(override):
    """An override that sets no one value of a profile is refused and shown."""
    with pytest.raises(torchrepro.ProfileError) as caught:
        torchrepro.load("seed-only", overrides=[override])

    assert str(caught.value).startswith(f"override {override}"[:60])


@given(st.text(max_size=40) | st.from_regex(r"[+~]{0,2}[a-z_.]{1,9}=[\[\]{}a-z0-9$:,'() ]{0,9}"))
def test_any_override_gives_a_profile_or_a_refusal(attempt, text):
    """Any text after a profile's name gives a profile or a `ProfileError`."""
    outcome = attempt(torchrepro.load, "seed-only", overrides=[text])

    assert isinstance(outcome, torchrepro.Profile) or "override" in str(outcome)


def test_a_deletion_removes_a_value_of_the_base():
    """`~key` removes any value of a base: the profile then does not set that knob."""
    base = torchrepro.load("debug-strict", ["requires.numpy='>=1'", "env_extra.A=b"])
    keys = [key for key in flatten(base.resolved.values) if key != "name"]

    for key in keys:
        deleted = ["requires.numpy='>=1'", "env_extra.A=b", f"~{key}"]
        assert key not in flatten(torchrepro.load("debug-strict", deleted).resolved.values)


def test_a_defaults_list_finds_files_in_its_own_folder_first(write):
    """A name in a defaults list is a file in the same folder before a shipped profile."""
    write("seed: 5\n", "seed-only.yaml")
    write("defaults: [root]\nseed: 6\n", "team/base.yaml")
    write("dropout: zero\n", "team/root.yaml")

    assert compose(str(write("defaults: [seed-only]\n", "mine.yaml"))).values["seed"] == 5
    own = compose(str(write("defaults: [base]\n", "team/mine.yaml"))).values
    assert (own["seed"], own["dropout"]) == (6, "zero")


REFUSED_DEFAULTS = {
    "itself": ("bad", "inherits from itself"),
    "a loop": ("loop", "bad -> loop -> bad"),
    "an unknown base": ("debug-strikt", "did you mean: debug-strict"),
    "a path": ("./other.yaml", "unknown profile"),
    "an absolute path": ("/etc/hostname", "unknown profile"),
    "a home": ("~/other.yaml", "unknown profile"),
    "a way up": ("../other", "unknown profile"),
    "a way up inside": ("team/../other", "unknown profile"),
    "an unknown package": ("pkg://no.such.package/strict", "no such package"),
    "a package that has no such profile": ("pkg://torchrepro.conf.repro/nope", "unknown profile"),
    "nothing": ("''", "unknown profile"),
    "a stranger's home": ("~no-such-user/strict", "unknown profile"),
    "a name longer than names are": ("a" * 300, "unknown profile"),
    "a URL": ("'file:///etc/hostname'", "unknown profile"),
    "a Windows path": ("C:\\Windows\\x", "unknown profile"),
    "a backslash": ("..\\x", "unknown profile"),
    "a package without files": ("'pkg://os/..'", "no such package"),
    "a package with a root": ("'pkg:///etc/hostname'", "no such package"),
}


@pytest.mark.parametrize(
    "name",
    [
        *("debug-strikt", "", "[a]", "a b", "~no-such-user/strict.yaml", "a\0b", "\udcff"),
        *("pkg://", "pkg://__main__/a", "pkg://torchrepro/../a", "pkg://no.such/a"),
        pytest.param("a" * 300, id="longer than names are"),
        pytest.param(f"/{'a' * 300}.yaml", id="longer than files are called"),
        pytest.param(f"pkg://torchrepro.{'a' * 300}/a", id="longer than packages are called"),
    ],
)
def test_a_name_without_a_file_is_refused(name):
    """A request for anything that is no profile is refused with its name."""
    with pytest.raises(torchrepro.ProfileError) as caught:
        torchrepro.load(name)

    assert printable(name.rpartition("/")[2])[:40] in str(caught.value)


@pytest.mark.parametrize("case", REFUSED_DEFAULTS.values(), ids=REFUSED_DEFAULTS)
def test_a_wrong_entry_of_a_defaults_list_is_refused(write, refusal, case):
    """A defaults list has names of profiles; any other entry is refused with its line."""
    entry, words = case
    write("defaults: [bad]\n", "loop.yaml")
    write("seed: 7\n", "other.yaml")

    said = refusal(f"name: bad\ndefaults: [{entry}]\n")

    assert words in said
    assert ".yaml:" in said


def test_a_defaults_list_may_name_an_installed_package(write):
    """`pkg://package.path/name` is the file of that package; nothing is imported."""
    path = write("defaults: ['pkg://torchrepro.conf.repro/seed-only']\n")

    assert _asked(compose("seed-only").values) == _asked(compose(str(path)).values)
