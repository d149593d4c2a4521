"""`torchrepro rerun`: the command of an earlier run again, under its profile."""

import json
from pathlib import Path

import pytest

import torchrepro as package
from torchrepro.ground.redaction import HIDDEN
from torchrepro.profile.resolved import ResolvedProfile

TRAIN = """
import sys, torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(2):
    optimizer.zero_grad()
    layer(torch.randn(3, 2)).sum().backward()
    optimizer.step()
print(sys.argv[1:], layer.weight.tolist())
sys.exit(5)
"""
IN_CODE = """
import sys, torch, torchrepro
torchrepro.apply("./ours.yaml", ["dropout=zero"])
torchrepro.log_to("runs/code")
print(sys.argv[1:], torch.initial_seed())
"""
OURS = "defaults: [seed-only, _self_]\nseed: {}\n"


def manifest_in(folder):
    return json.loads((folder / "repro.json").read_text(encoding="utf-8"))


def test_one_job_of_a_sweep_can_be_rerun_alone(little, fork_torchrepro, write, tmp_path):
    """The job has its original overrides, number and profile, though the profile file changed.

    The original run is unchanged, even if its folder was fixed in the config.
    """
    write({"conf/repro/ours.yaml": OURS.format(21)})
    config = "size: 0\nhydra: {run: {dir: fixed}}\n"
    words = ("-m", "+repro=ours", "repro.dropout=zero", "size=1,2", "hydra.sweep.dir=out")
    then = little(*words, config=config)
    before = (tmp_path / "out/1/.hydra/repro.json").read_bytes()
    write({"conf/repro/ours.yaml": OURS.format(22)})
    again = fork_torchrepro("rerun", "out/1")
    new = tmp_path / "out/1-rerun-1"
    hydra = manifest_in(new / ".hydra")["started"]["hydra"]

    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if line.startswith("task")] == then.tasks[1:]
    assert then.tasks[1:] == ["task False 21"]
    assert "the files of profile ours have changed" in again.stderr
    assert {"+repro=ours", "size=2"} <= set(hydra["task"])
    assert "hydra.job.num=1" in hydra["own"]
    assert manifest_in(new / ".hydra")["digest"] == json.loads(before)["digest"]
    assert (tmp_path / "out/1/.hydra/repro.json").read_bytes() == before
    assert not (tmp_path / "fixed").exists()


@pytest.mark.slow
def test_rerun_repeats_a_command_under_run(torchrepro, write, tmp_path):
    """A plain program computes the same results again, and its exit status is passed on."""
    program = write({"train.py": TRAIN})
    words = ("--log-to", "runs/a", "--", "python", program.name, "--lr", "0.1")
    then = torchrepro("run", "seed-only", "seed=9", *words)
    again = torchrepro("rerun", tmp_path / "runs/a", cwd="/")
    started = manifest_in(tmp_path / "runs/a")["started"]

    assert then.stdout.startswith("['--lr', '0.1'] ")
    assert (again.returncode, again.stdout) == (then.returncode, then.stdout) == (5, then.stdout)
    assert (started["by"], started["folder"]) == ("run", str(tmp_path))
    assert started["asked"] == ["seed-only", "seed=9"]
    digests = {manifest_in(tmp_path / "runs" / name)["digest"] for name in ("a", "a-rerun-1")}
    assert len(digests) == 1


@pytest.mark.slow
def test_only_original_names_mean_the_original_profile(little, fork_torchrepro, write, tmp_path):
    """Below a rerun, an original name means the original profile; another name has to agree.

    Original names are on the command line or in the app's config.
    """
    write({"conf/repro/ours.yaml": OURS.format(41)})
    run = ("run", "./conf/repro/ours.yaml", "--log-to", "a", "--", "python")
    config = "defaults: [{repro: ours}, _self_]\nhydra: {run: {dir: out}}\n"
    then = little(
        run=lambda *words, **options: fork_torchrepro(*run, *words, **options), config=config
    )
    write({"conf/repro/ours.yaml": OURS.format(42)})
    again = fork_torchrepro("rerun", "out")
    other = fork_torchrepro("rerun", "out", "--", "python", "app.py", "repro=seed-only")

    assert then.tasks == ["task False 41"], then.stderr
    assert "task False 41" in again.stdout, again.stderr
    assert (other.returncode, other.stdout) == (3, "")
    assert "asks for 'seed-only', which differs in" in other.stderr


def test_rerun_applies_the_original_profile_in_code(fork_torchrepro, fork_python, write, tmp_path):
    """`apply` of a deleted file applies its original contents; the old manifest stays."""
    write({"ours.yaml": OURS.format(31)})
    then = fork_python(write({"train.py": IN_CODE}), "--lr", "1")
    before = (tmp_path / "runs/code/repro.json").read_bytes()
    (tmp_path / "ours.yaml").unlink()
    again = fork_torchrepro("rerun", "runs/code")

    assert (again.returncode, again.stdout) == (0, then.stdout), again.stderr
    assert then.stdout == "['--lr', '1'] 31\n"
    assert "does not exist" in again.stderr
    assert (tmp_path / "runs/code/repro.json").read_bytes() == before
    assert manifest_in(tmp_path / "runs/code-rerun-1")["digest"] == json.loads(before)["digest"]


@pytest.fixture
def earlier(clean_process, tmp_path, monkeypatch):
    """The manifest of a run of train.py, with some values replaced."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    with package.apply("seed-only"):
        package.log_to(tmp_path / "run")
    written = manifest_in(tmp_path / "run")
    command = ["python", "train.py", "--lr", "1"]
    written["started"] |= {"folder": str(tmp_path), "command": command, "launcher": ""}

    def earlier(**parts):
        its = {**written, **parts}
        if isinstance(its["started"], dict):
            its["started"] = {**written["started"], **its["started"]}
        its = {key: value for key, value in its.items() if value is not None}
        (tmp_path / "run" / "repro.json").write_text(json.dumps(its), encoding="utf-8")
        return its

    earlier()
    return earlier


DANGEROUS = {"env_extra": {"LD_PRELOAD": "x"}}
BAD = {
    "another format": ({"manifest": 99}, "another format"),
    "edited": ({"profile": {"seed": 3}}, "digest"),
    "a profile that may run code": (
        {"profile": DANGEROUS, "digest": ResolvedProfile.of(DANGEROUS).digest},
        "LD_PRELOAD",
    ),
    "cut": ({"started": "x"}, "damaged"),
    "no command": ({"started": {"command": 5}}, "damaged"),
    "the folder is gone": ({"started": {"folder": "/nowhere/at/all"}}, "/nowhere/at/all"),
    "the program is gone": ({"started": {"command": ["python", "gone.py"]}}, "gone.py"),
    "a program of stdin": ({"started": {"command": ["python", "-"]}}, "standard input"),
    "a notebook": ({"started": {"command": []}}, "interactive"),
    "one of several": ({"started": {"launcher": "Slurm"}}, "-- torchrun ... train.py --lr 1"),
    "one that does not say how": ({"started": None}, "damaged"),
    "a lock": ({"lock": 1}, "parts are missing"),
    "overrides": ({}, "takes one folder and no overrides", "run", "seed=3"),
    "a program, not a folder": ({}, "name the folder of a run", "train.py"),
    "a program that never was": ({}, "there is no other.py in ", "run", "--", "python", "other.py"),
    "half a manifest": ({}, "not the manifest of a run: it is truncated or damaged", "half"),
}
"""Replaced values of a manifest, the expected message, and other arguments of the command."""


@pytest.mark.parametrize("case", BAD)
def test_a_run_that_cannot_be_repeated_is_refused(command, earlier, case):
    """A damaged, newer or incomplete manifest, or a wrong request, ends with status 2 and a hint.

    Messages mention locks only for locks.
    """
    parts, said, *words = BAD[case]
    text = json.dumps(earlier(**parts))
    Path("half").mkdir()
    Path("half/repro.json").write_text(text[:300], encoding="utf-8")
    status, out, err = command("rerun", *(words or ("run",)))

    assert (status, out) == (2, "")
    assert said in err
    assert "run" in err
    assert ("lock" in err) == ("lock" in parts)


def test_hidden_arguments_are_named(command, earlier):
    """A command with hidden arguments is refused and names them; the whole command would start.

    The explicit command is shown without its secret.
    """
    earlier(started={"command": ["python", "train.py", "--api-key", HIDDEN, f"name={HIDDEN}"]})
    status, _, err = command("rerun", "run")
    whole = ("python", "train.py", "--api-key", "abracadabra", "name=x")
    given, out, said = command("rerun", "run", "--json", "--", *whole)

    assert status == 2
    assert f"--api-key {HIDDEN}, name={HIDDEN}" in err
    assert "torchrepro rerun run -- python train.py --api-key VALUE name=VALUE\n" in err
    assert given == 0, said
    assert json.loads(out)["command"] == [*whole[:3], HIDDEN, HIDDEN]


def test_differences_are_reported_and_forbidden_with_strict(command, earlier):
    """A difference that may change results is reported; with --strict it forbids the start."""
    its = earlier()
    same = json.loads(command("rerun", "run", "--json")[1])
    earlier(versions={**its["versions"], "torch": "1.0.0"})
    answered, out, _ = command("rerun", "run", "--json")
    strict, shown, _ = command("rerun", "run", "--dry-run", "--strict")

    assert same["same"]
    assert same["into"].endswith("run-rerun-1")
    assert (answered, strict) == (0, 1)
    assert [row["key"] for row in json.loads(out)["differences"]] == ["torch"]
    assert "1.0.0" in shown
    assert shown.endswith("not started: --strict\n")
    assert "into " not in shown
    assert {path.name for path in Path().iterdir()} == {"train.py", "run"}
