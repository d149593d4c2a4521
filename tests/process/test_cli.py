"""The command line, in this process: what each command prints, where, and how it ends."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import torchrepro as library
from torchrepro.cli.profile_commands import WRITERS, EnvFormat
from torchrepro.knobs.catalogue import CATALOGUE, explanations, knobs_by_name

CONSOLE_SCRIPT = Path(sysconfig.get_path("scripts")) / "torchrepro"
SHIPPED = ["debug-strict", "npu-align", "seed-only", "train-fast"]
ANSWERING = (
    ("list",),
    ("show", "debug-strict"),
    ("show", "debug-strict", "--origin"),
    ("plan", "debug-strict"),
    ("explain", "seed"),
    ("doctor", "seed-only"),
    ("diff", "seed-only", "seed-only"),
)

pytestmark = pytest.mark.usefixtures("clean_process")


def test_list_names_the_shipped_profiles(command, answer):
    """list shows every profile with its guarantee and origin, as a table and as JSON."""
    status, out, err = command("list")
    code, entries = answer("list")

    assert (status, err, code) == (0, "", 0)
    assert [entry["name"] for entry in entries] == SHIPPED
    assert {"name", "guarantee", "origin", "description"} == set(entries[0])
    for entry in entries:
        assert all(text in out for text in entry.values())


def test_show_origin_says_who_set_each_value(answer, command, tmp_path):
    """show --origin names the file and line, or the override, that set each value."""
    path = tmp_path / "team.yaml"
    path.write_text("defaults: [debug-strict, _self_]\ndropout: zero\n", encoding="utf-8")
    _, rows = answer("show", path, "seed=7", "--origin")
    origins = {row["key"]: row["origin"] for row in rows}

    assert origins["seed"] == "override seed=7"
    assert origins["dropout"].endswith("team.yaml:2")
    assert origins["backends.cudnn.benchmark"].rpartition(":")[0] == "torchrepro:debug-strict.yaml"
    assert origins["env.PYTHONHASHSEED"].rpartition(":")[0] == "torchrepro:seed-only.yaml"
    assert "override seed=7" in command("show", path, "seed=7", "--origin")[1]


def test_plan_changes_nothing(answer, command, world):
    """plan names every knob of the profile and leaves the process exactly as it was."""
    before = world()
    status, document = answer("plan", "debug-strict")
    _, table, _ = command("plan", "train-fast", "seed=9")

    assert before == world()
    assert status == 0
    assert [k.name for k, _ in library.load("debug-strict").resolved.settings()] == [
        row["knob"] for row in document["knobs"]
    ]
    assert sum(document["counts"].values()) == len(document["knobs"])
    assert "would be active" in table


def _by_shell(text, names):
    script = text + "".join(f'printf "%s\\0" "${name}"\n' for name in names)
    done = subprocess.run(
        ["sh", "-c", script], env={}, capture_output=True, text=True, timeout=60, check=True
    )
    return dict(zip(names, done.stdout.split("\0"), strict=False))


def _by_docker(text, names):
    """Read an --env-file as docker documents it: everything after the first = is the value."""
    return dict(line.split("=", 1) for line in text.splitlines())


def _by_k8s(text, names):
    """Read a container's list as Kubernetes documents it: two dollars stand for one."""
    entries = yaml.safe_load(text)["env"]
    return {entry["name"]: entry["value"].replace("$$", "$") for entry in entries}


READERS = {
    "sh": _by_shell,
    "slurm": _by_shell,
    "dotenv": _by_shell,
    "json": lambda text, names: json.loads(text),
    "docker": _by_docker,
    "k8s": _by_k8s,
}


@pytest.mark.parametrize("form", EnvFormat)
@pytest.mark.parametrize(
    "value",
    ['a b"$HOME`;', "$(id) `id` $$X", '"; id; "', "a,b=c#d", "0", "yes: no", "é \U0001f680"],
)
def test_env_formats_hold_the_same_variables(command, form, value):
    """What reads a format finds the variables of the profile, whatever is in their values."""
    words = ["env", "debug-strict", f"env_extra.TEAM='{value}'"]
    wanted = library.load("debug-strict", words[2:]).resolved.environment()
    text = command(*words, "--format", form)[1]

    assert wanted["TEAM"] == value
    assert READERS[form](text, list(wanted)) == wanted
    # What srun starts gets what the script sets, which --export=NONE would keep back.
    assert ("export SLURM_EXPORT_ENV=ALL\n" in text) == (form == "slurm")


@given(value=st.text(st.characters(exclude_categories=["Cs"])))
@example("\x7f\x85\u2028\u2029\ufeff\uffff\U0001f680\U000e0001")
def test_a_pod_gets_any_text_as_it_is(value):
    """YAML's readers find every character of a value, those that JSON writes otherwise included."""
    assert _by_k8s(WRITERS[EnvFormat.K8S]({"TEAM": value}), ()) == {"TEAM": value}


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("backends.cudnn.benchmark", "backends.cudnn.benchmark"),
        ("CUBLAS_WORKSPACE_CONFIG", "env.CUBLAS_WORKSPACE_CONFIG"),
        ("env.PYTHONHASHSEED", "env.PYTHONHASHSEED"),
        ("seed", "seed.torch"),
        ("benchmark", "backends.cudnn.benchmark"),
    ],
)
def test_explain_finds_a_knob_by_any_of_its_names(answer, command, name, means):
    """explain says what a knob does, when it latches, what it costs and who says so."""
    status, found = answer("explain", name)
    entry = next(entry for entry in found if entry["knob"] == means)

    assert status == 0
    assert all(entry[label] for label in ("does", "values", "latches", "costs", "source"))
    assert all(entry["knob"] in command("explain", name)[1] for entry in found)


def test_explain_knows_every_row_and_every_alias():
    """Every name that a row carries, and no other row, leads explain to that row."""
    for knob in CATALOGUE:
        others = [alias for alias in knob.aliases if alias not in knobs_by_name()]
        for name in filter(None, (knob.name, knob.variable, knob.key, *others)):
            assert knob.name in [entry["knob"] for entry in explanations(name)], name


def test_doctor_names_what_would_make_a_profile_ineffective(command, answer, monkeypatch):
    """It ends with 1 and the exported value, whose control characters are escaped; else with 0."""
    fine = answer("doctor", "npu-align")
    monkeypatch.setenv("HCCL_DETERMINISTIC", "\x1b[31m")
    status, out, err = command("doctor", "npu-align")
    code, document = answer("doctor", "npu-align")
    serious = [finding["what"] for finding in document["findings"] if finding["serious"]]

    assert (fine[0], fine[1]["effective"]) == (0, True)
    assert (status, err, code, document["effective"]) == (1, "", 1, False)
    assert r"HCCL_DETERMINISTIC=\x1b[31m is exported" in out
    assert serious
    assert all("HCCL_DETERMINISTIC" in what for what in serious)
    assert "\x1b" not in out


@pytest.mark.parametrize("words", ANSWERING, ids=" ".join)
def test_answers_go_to_stdout_without_colours(command, words):
    """Off a terminal an answer is plain text on stdout, and stderr stays empty."""
    status, out, err = command(*words)

    assert (status, err) == (0, "")
    assert out.strip()
    assert "\x1b" not in out


def test_looking_imports_no_torch(answer_of):
    """list, show, env, explain and schema answer without importing torch."""
    source = """
import contextlib, io, json, sys
from torchrepro.cli import main
loaded = {}
for line in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(line.split())
    loaded[line] = [bool(out.getvalue()), "torch" in sys.modules]
print(json.dumps(loaded))
"""
    lines = ["list", "list --json", "show debug-strict", "show npu-align seed=3 --origin"]
    lines += ["env debug-strict", "explain seed", "schema"]

    assert {line: [True, False] for line in lines} == answer_of("-c", source, *lines)


@pytest.mark.slow
def test_printing_a_report_draws_no_random_number(answer_of):
    """A report can be printed without moving a generator that the profile has seeded."""
    source = """
import json, random, torchrepro
applied = torchrepro.apply("seed-only")
before = random.getstate()
text = str(applied.report)
print(json.dumps([len(text) > 100, before == random.getstate()]))
"""

    assert answer_of("-c", source) == [True, True]


def test_a_reader_that_leaves_early_hears_no_traceback(execute):
    """A closed pipe on stdout ends the command without a word."""
    result = execute("sh", "-c", '"$0" schema | head -c 1', CONSOLE_SCRIPT)

    assert (result.stdout, result.stderr) == ("{", "")
