"""Verifying a command: its runs are the same, or diverge at a line, or the reason for no answer."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from torchrepro.ground.console import as_text
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError
from torchrepro.seeding.nondeterministic_calls import EXISTING_FILE
from torchrepro.trace.reader import read_run
from torchrepro.verdict.value import Kind
from torchrepro.verification.leftovers import CarriedFile, carried
from torchrepro.verification.result import verification_json, verification_parts
from torchrepro.verification.verifier import verify

ANOTHER_EACH_TIME = "batch[0, 0] = __import__('random').SystemRandom().random() if step == 1 else 1"
WORKERS_THAT_VARY = """import os, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, at):
        inside = torch.utils.data.get_worker_info()
        return torch.full((16, 4), float(os.getpid() if inside else 1))
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=2))"""


def test_a_reproducible_program_is_the_same_and_leaves_no_file(
    training, plain, tmp_path, monkeypatch
):
    """Equal runs, NaN included, are reported as the same, and their recordings are removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = []
    verification = verify(
        plain, training("batch[0, 0] = float('nan') if step == 2 else 0"), say=said.append
    )

    assert verification.same
    assert verification.verdict.compared.ops > 50
    assert [run.status for run in verification.runs] == [0, 0]
    assert (verification.folder, list(tmp_path.glob("torchrepro-*"))) == ("", [])
    assert "".join(said).count("3 steps\n") == 2
    assert verification_json(verification)["same"] is True


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("closer", [True, False])
def test_a_divergence_is_recorded_in_detail_unless_disabled(closer, training, verified, tmp_path):
    """The first divergence has its line and all recordings, and tensor elements from two more runs
    unless these are disabled.
    """
    verification = verified(training(ANOTHER_EACH_TIME), closer=closer)
    first = verification.verdict.first
    recorded = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}

    assert not verification.same
    assert (first.step, first.phase) == (1, "forward")
    assert first.kind in (Kind.DATA, Kind.ARGUMENT)  # torch 2.15 fills by a number
    assert Path(first.source.rpartition(":")[0]).name == "train.py"
    assert (bool(first.elements), bool(first.distances)) == (closer, closer)
    assert [len(read_run(run.folder)) for run in verification.runs] == [1, 1]
    closely = {"closer-1", "closer-2"} if closer else set()
    assert {name for name in recorded if "trial" not in name} == {"run-1", "run-2"} | closely
    if closer:
        assert set(read_run(tmp_path / "out" / "closer-1")[0].steps) == {0, 1, 2}


@pytest.mark.usefixtures("forked")
def test_without_the_package_of_trials_a_divergence_has_its_line(training, verified, monkeypatch):
    """The verdict has the first divergence and a cause from evidence, and no trial is run."""
    monkeypatch.setitem(sys.modules, "torchrepro.advice", None)

    verification = verified(training(ANOTHER_EACH_TIME))

    assert verification.verdict.first.step == 1
    assert verification.verdict.advice.cause
    assert verification.verdict.advice.command == ""
    assert verification.tried == ()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_divergence_that_varies_between_runs_is_reported_as_such(training, verified):
    """If the closer look diverges elsewhere, the verdict stays, with a note."""
    chance = "batch[0, 0] = __import__('random').SystemRandom().random() if once(step) else 1"
    before = (
        "import os\n"
        "def once(step):\n"
        "    if step != 1 or os.path.exists('done'): return False\n"
        "    os.path.exists('first') and open('done', 'w')\n"
        "    open('first', 'w')\n"
        "    return True"
    )
    verification = verified(training(chance, before))

    assert not verification.same
    assert verification.verdict.first.step == 1
    assert not verification.verdict.first.elements
    assert "it varies from run to run" in verification.verdict.notes[0]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('gone wrong'); raise SystemExit(7)", ["exit status 7", "gone wrong"]),
        ("import os; os.kill(os.getpid(), 9)", ["signal SIGKILL", "printed nothing"]),
        ("print(1)", ["nothing was recorded"]),
        ("import torch", ["nothing was recorded"]),
    ],
)
def test_a_command_that_fails_or_computes_nothing_gets_no_answer(verified, program, words):
    """The same failure in all runs is an error with its last lines; so is a missing record."""
    with pytest.raises(TraceError) as raised:
        verified([sys.executable, "-c", program])

    assert raised.value.exit_status == 2
    assert all(each in str(raised.value) for each in words)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("before", "end", "what"),
    [
        (
            "import os\ncount = len(os.listdir())\nopen('x', 'w')",
            "import sys; sys.exit(count - 2)",
            ["run-1 with exit status 0 and run-2 with exit status 1"],
        ),
        (
            "import os, sys\nos.path.exists('x') and sys.exit(4)\nopen('x', 'w')",
            "",
            ["run-2 ended before anything was recorded", "exit status 4"],
        ),
    ],
    ids=["at the end", "at the start"],
)
def test_runs_with_different_exit_statuses_are_not_the_same(before, end, what, training, verified):
    """Even if their records are the same."""
    command = training(before=before)
    with Path("train.py").open("a", encoding="utf-8") as file:
        file.write(end)
    verification = verified(command)

    assert not verification.same
    assert verification.verdict.first.kind is Kind.ENDED
    assert all(words in verification.verdict.first.what for words in what)
    json.dumps(verification_json(verification), allow_nan=False)


def test_a_wrong_request_runs_nothing(plain, training, tmp_path, monkeypatch):
    """One run, an unknown perturbation, command or guarantee, a full folder: errors at once.

    So are overrides without a profile, and commands that cannot be recorded.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = training("open('ran', 'w')")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for profile, words, options in (
        (plain, command, {"runs": 1}),
        (plain, command, {"stress": ["hash sed"]}),
        (plain, command, {"folder": tmp_path / "full"}),
        (plain, command, {"level": "atom"}),
        (plain, command, {"every": 0}),
        (plain, command, {"max_size": "much"}),
        (plain, command, {"ignore": ["train.py"]}),
        (plain, command, {"overrides": ["guarantee=sure"]}),
        (plain, ["no-such-command-here"], {}),
        (plain, [sys.executable, "-S", "-c", "print(1)"], {}),
        (None, command, {"overrides": ["seed=7"]}),
        (None, ["no-such-command-here"], {}),
        (None, [sys.executable, "-S", "train.py"], {}),
    ):
        with pytest.raises((ProfileError, TraceError, ApplyError)) as raised:
            verify(profile, words, **options)
        assert profile or raised.value.exit_status == 2

    assert not Path("ran").exists()
    assert list(tmp_path.glob("torchrepro-*")) == []


@pytest.mark.usefixtures("forked")
def test_the_run_that_differs_is_found_among_several(training, verified):
    """Runs 1 and 2 agree, and run 3 differs: the answer is no, and it names run 3."""
    third = "import os\nruns = len(os.listdir())\nopen(f'ran-{runs}', 'w')"
    verification = verified(training("batch[0, 0] = float(runs == 4)", third), runs=3, closer=False)

    assert [verdict.same for verdict in verification.verdicts] == [True, False]
    assert [run["same"] for run in verification_json(verification)["runs"]] == [True, True, False]
    assert not verification.same


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("options", "asked", "same"),
    [
        ({}, "bits", False),
        ({"overrides": ["guarantee=seeded"]}, "bits", False),
        ({"overrides": ["guarantee=aligned"]}, "tolerance", True),
        ({"rtol": 1e-2, "atol": 1e-2}, "tolerance", True),
    ],
    ids=["bits", "seeded", "aligned", "given"],
)
def test_a_tolerance_applies_only_if_requested(options, asked, same, training, verified):
    """Nearly equal results are the same under `aligned`, or by rtol and atol, and only then.

    Differences that the guarantee `seeded` allows are not called equal either.
    """
    near = "batch[0, 0] += 1e-8 * (int.from_bytes(__import__('os').urandom(4)) % 9973)"
    answer = verification_json(verified(training(near), closer=False, **options))

    assert (answer["asked"], answer["same"]) == (asked, same)
    assert (answer["tolerance"] is None) == (asked == "bits")


@pytest.mark.sampled
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("profile", "program", "helps"),
    [
        ("./plain.yaml", ("batch = next(batches)", WORKERS_THAT_VARY), "dataloader.num_workers=0"),
        ("./bare.yaml", (), "seed=1234"),
        (None, ("batch += __import__('random').random()",), "--"),
        ("./plain.yaml", (ANOTHER_EACH_TIME,), None),
    ],
    ids=["loader workers", "no seed", "no profile", "none helps"],
)
def test_escalation_stops_at_the_first_settings_that_make_runs_equal(
    profile, program, helps, training, plain, tmp_path
):
    """Settings are tried one after another."""
    Path("bare.yaml").write_text("schema: 1\nname: bare\nguarantee: repeatable\n")
    command = training(*program)
    verification = verify(profile, command, escalate=True, closer=False, folder=tmp_path / "out")
    answer = verification_json(verification)
    *before, last = [trial["same"] for trial in answer["tried"]]

    assert not verification.same
    assert not any(before)
    assert last == (helps is not None)
    assert bool(answer["advice"]["command"]) == last
    if helps:
        named = f"torchrepro verify {profile or 'seed-only'} "
        assert answer["advice"]["command"].startswith(named)
        assert f" {helps} " in answer["advice"]["command"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_proposed_command_has_the_criteria_of_the_user(training, tmp_path):
    """It has the tolerance and the level with which it was tried, and its runs agree with them."""
    command = training("batch += __import__('random').random()")
    asked = {"rtol": 1e-9, "atol": 0.0, "level": "module"}
    verification = verify(None, command, folder=tmp_path / "out", **asked)
    proposed = verification.verdict.advice.command

    assert proposed.startswith(
        "torchrepro verify seed-only --level module --rtol 1e-09 --atol 0.0 "
    )
    assert verify("seed-only", command, folder=tmp_path / "again", **asked).same


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_no_change_is_proposed_if_runs_agree_without_it_too(training, verified):
    """A difference in the first run only is not due to a setting."""
    before = "import os\nfirst = not os.path.isdir('seen')\nos.makedirs('seen', exist_ok=True)"
    verification = verified(training("batch = batch + first", before))
    advice = verification.verdict.advice

    assert not verification.same
    assert (advice.command, advice.edit, advice.tried) == ("", None, "")
    assert "most runs of it are the same: it differs too seldom to show what helps" in str(
        verification
    )
    assert not any(
        trial.same for trial in verification.tried if trial.what != "the command as it is"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_leftover_file_exists_after_the_trials(training, verified):
    """Trials run without it in copies, and the original stays."""
    cached = "np.load('cache.npy') if os.path.exists('cache.npy') else np.full(1, 0.25)"
    before = f"import os, numpy as np\nscale = {cached}\nnp.save('cache.npy', scale * 2)"
    verification = verified(training("batch *= float(scale[0])", before))

    assert not verification.same
    assert "cache.npy" in verification.verdict.advice.cause
    assert 'cd "$(mktemp -d)" && exec ' in verification.verdict.advice.command
    assert Path("cache.npy").exists()


@pytest.mark.usefixtures("forked")
def test_a_divergence_after_the_last_step_is_recorded_in_detail(training, verified):
    """Steps are numbered as in the program, and the closer look finds what follows them."""
    command = training()
    with Path("train.py").open("a", encoding="utf-8") as file:
        file.write("model(torch.full((2, 4), __import__('random').SystemRandom().random()))\n")
    said = []
    verification = verified(command, say=said.append)
    first, progress = verification.verdict.first, "".join(said)

    assert progress.count(" 3 steps\n") == 2
    assert progress.count("a closer look after the last step, run") == 2
    assert [run.steps for run in verification.runs] == [3, 3]
    assert (first.step, first.after_last, verification.verdict.compared.steps) == (3, True, 3)
    assert first.elements


@pytest.mark.usefixtures("forked")
def test_a_program_without_steps_is_verified(verified):
    """All its ops are outside of any step, and no number of steps is reported."""
    program = "import random, torch; torch.full((2,), random.SystemRandom().random()).sin()"
    said = []
    verification = verified([sys.executable, "-c", program], say=said.append)
    text = "".join(said) + as_text(*verification_parts(verification))

    assert not verification.same
    assert verification.verdict.first.elements
    assert all(run.recorded and not run.steps for run in verification.runs)
    assert "2 records outside of any step" in text
    assert "diverged outside of any step" in text
    assert not re.search(r"\d steps?\b|step \d", text)


IMPORTS = "import os, sqlite3, subprocess, numpy as np"
CACHE = """
if not os.path.exists("cache.npy"):
    np.save("cache.npy", np.ones((16, 4), "float16"))  # written
    batch = batch + 1
else:
    batch = torch.from_numpy(np.load("cache.npy")).float()  # read
subprocess.run(["cp", "cache.npy", "copy.npy"], check=True) if step == 2 else None
np.load("copy.npy") if step == 0 and os.path.exists("copy.npy") else None  # copied
np.load("data.npy") if step == 0 else None
with sqlite3.connect("kept.db") as database:  # kept
    database.execute("create table if not exists seen (step int)")
np.save("result.npy", batch), np.load("result.npy")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_reads_of_files_that_an_earlier_run_left_are_known(training, verified, tmp_path):
    """Older data and the run's own files do not count, and the writer may be unknown.

    If the runs agree, the file is one of their reads.
    """
    np.save("data.npy", np.ones(1))
    time.sleep(0.05)
    command = training("\n    ".join(CACHE.strip().splitlines()), IMPORTS)
    program = Path("train.py").absolute()
    lines = {
        mark: f"{program}:{number}"
        for number, line in enumerate(program.read_text().splitlines(), 1)
        for mark in ("written", "read", "copied", "kept")
        if line.endswith(f"# {mark}")
    }

    differ = verified(command, closer=False)
    agree = verified(command, folder=tmp_path / "again")

    assert not differ.same
    assert carried(*differ.runs) == (
        CarriedFile(f"{program.parent}/cache.npy", lines["written"], lines["read"]),
        CarriedFile(f"{program.parent}/copy.npy", "", lines["copied"]),
        CarriedFile(f"{program.parent}/kept.db", lines["kept"], lines["kept"]),
    )
    assert agree.same
    assert {
        (read.name, read.where)
        for read in agree.verdict.program.reads
        if read.what == EXISTING_FILE
    } == {("cache.npy", lines["read"]), ("copy.npy", lines["copied"])}


METER = "seconds = torch.tensor(__import__('time').time_ns() % 16777213).mul(2)"
ANOTHER = "batch[0, 0] = __import__('time').time_ns() % 16777213"


def _line_of(text: str) -> str:
    lines = Path("train.py").read_text(encoding="utf-8").splitlines()
    return f"train.py:{next(n for n, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.usefixtures("forked")
def test_a_meter_can_be_ignored(training, verified, tmp_path):
    """Runs differ by it, but not in training; without its line they are the same."""
    command = training(METER)
    differs = verified(command, closer=False)
    verification = verified(command, ignore=[_line_of("time_ns")], folder=tmp_path / "again")

    assert not differs.same
    assert verification_json(differs)["reaches"] is False
    assert verification.same
    assert verification.verdict.notes[0] == f"ignored: 6 records of {_line_of('time_ns')}"
    assert verification_json(verification)["left_out"][0]["records"] == 6


@pytest.mark.usefixtures("forked")
def test_a_line_that_reaches_the_loss_cannot_be_ignored(training, verified):
    """A difference that reaches the loss is found, whatever is ignored."""
    command = training(ANOTHER)
    verification = verified(command, closer=False, ignore=[_line_of("time_ns")])

    assert not verification.same
    assert verification.verdict.reaches


@pytest.mark.usefixtures("forked")
def test_a_line_without_a_record_is_refused(training, verified):
    """A line that computes nothing is refused, with lines that do."""
    with pytest.raises(TraceError, match=r"nothing was recorded for this line") as refused:
        verified(training(), ignore=["train.py:1"])

    assert "legal: train.py:4" in str(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_only_some_steps_are_recorded_in_full(training, verified):
    """`every` and `max_size` work as in a recording; a closer look still follows a divergence."""
    verification = verified(training(ANOTHER), every=2, max_size="50MB")

    levels = [row.level for row in read_run(verification.runs[0].folder)[0].steps.values()]
    assert levels[:3] == ["op", "step", "op"]
    assert read_run(verification.runs[0].folder)[0].meta["max_size"] == 50_000_000
    assert not verification.same
    assert verification.verdict.first is not None
    assert verification.verdict.first.elements
