"""Verifying a command: the same, or where its runs diverge, or an honest word on why neither."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from torchrepro.console import as_text
from torchrepro.errors import ApplyError, ProfileError, TraceError
from torchrepro.trace.reader import read_run
from torchrepro.verdict.value import Kind
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


def test_a_reproducible_program_is_the_same_and_leaves_nothing_behind(
    training, plain, tmp_path, monkeypatch
):
    """Runs that are the same, NaN included, are said to be, and their recordings are removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = []
    found = verify(
        plain, training("batch[0, 0] = float('nan') if step == 2 else 0"), say=said.append
    )

    assert found.same
    assert found.verdict.compared.ops > 50
    assert [run.status for run in found.runs] == [0, 0]
    assert (found.folder, list(tmp_path.glob("torchrepro-*"))) == ("", [])
    assert "".join(said).count("3 steps\n") == 2
    assert verification_json(found)["same"] is True


@pytest.mark.usefixtures("forked")
def test_runs_that_diverge_are_looked_at_more_closely(training, verified, tmp_path):
    """The first divergence comes with its place, elements of the tensors, and all recordings."""
    found = verified(training(ANOTHER_EACH_TIME))
    first = found.verdict.first

    assert not found.same
    assert (first.step, first.phase, first.kind) == (1, "forward", Kind.DATA)
    assert Path(first.source.rpartition(":")[0]).name == "train.py"
    assert first.elements
    assert first.distances
    assert [len(read_run(run.folder)) for run in found.runs] == [1, 1]
    assert set(read_run(tmp_path / "out" / "closer-1")[0].steps) == {0, 1, 2}
    assert found.next_level is not None


@pytest.mark.usefixtures("forked")
def test_a_divergence_that_does_not_come_back_is_said_to_vary(training, verified):
    """Where a closer look shows the runs diverge elsewhere the verdict stays, and says that."""
    chance = "batch[0, 0] = __import__('random').SystemRandom().random() if once(step) else 1"
    before = (
        "import os\n"
        "def once(step):\n"
        "    if step != 1 or os.path.exists('done'): return False\n"
        "    os.path.exists('first') and open('done', 'w')\n"
        "    open('first', 'w')\n"
        "    return True"
    )
    found = verified(training(chance, before))

    assert not found.same
    assert found.verdict.first.step == 1
    assert not found.verdict.first.elements
    assert "it varies from run to run" in found.verdict.notes[0]


@pytest.mark.usefixtures("forked")
def test_without_a_closer_look_there_are_no_more_runs(training, verified, tmp_path):
    """A closer look that is not wanted is not taken; the answer is the same."""
    found = verified(training(ANOTHER_EACH_TIME), closer=False)

    assert found.verdict.first.step == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "run-1",
        "run-1.log",
        "run-2",
        "run-2.log",
    ]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("print('gone wrong'); raise SystemExit(7)", ["exit status 7", "gone wrong"]),
        ("import os; os.kill(os.getpid(), 9)", ["signal SIGKILL", "printed nothing"]),
    ],
)
def test_a_command_that_fails_every_time_is_told_with_its_last_lines(verified, program, told):
    """A command that fails alike in every run is an error, and no answer."""
    with pytest.raises(TraceError) as raised:
        verified([sys.executable, "-c", program])

    assert raised.value.exit_status == 2
    assert all(words in str(raised.value) for words in told)


@pytest.mark.usefixtures("forked")
def test_runs_that_end_differently_are_not_the_same(training, verified):
    """Another exit status is a difference, whatever was recorded."""
    command = training(before="import atexit, os\ncount = len(os.listdir())\nopen('x', 'w')")
    text = Path("train.py").read_text()
    Path("train.py").write_text(f"{text}\nimport sys; sys.exit(count - 2)")
    found = verified(command)

    assert not found.same
    assert found.verdict.first.kind is Kind.ENDED
    assert "run-1 with exit status 0 and run-2 with exit status 1" in found.verdict.first.what
    json.dumps(verification_json(found), allow_nan=False)


@pytest.mark.usefixtures("forked")
def test_a_run_that_ends_before_its_first_step_is_not_the_same(training, verified):
    """A run that crashed at once differs from one that trained, and both statuses are told."""
    before = "import os, sys\nos.path.exists('x') and sys.exit(4)\nopen('x', 'w')"
    found = verified(training(before=before))

    assert not found.same
    assert "run-2 ended before anything was recorded of it" in found.verdict.first.what
    assert "exit status 4" in found.verdict.first.what


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("program", ["print(1)", "import torch"])
def test_a_command_of_which_nothing_is_recorded_is_never_the_same(verified, program):
    """Without torch, or without anything computed by it, there is an error and no answer."""
    with pytest.raises(TraceError, match="nothing was recorded") as raised:
        verified([sys.executable, "-c", program])

    assert raised.value.exit_status == 2


def test_a_wrong_request_runs_nothing(plain, training, tmp_path, monkeypatch):
    """One run, an unknown perturbation, command or guarantee, a full folder: errors at once."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = training("open('ran', 'w')")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, options in (
        (command, {"runs": 1}),
        (command, {"stress": ["hash sed"]}),
        (command, {"folder": tmp_path / "full"}),
        (command, {"level": "atom"}),
        (command, {"overrides": ["guarantee=sure"]}),
        (["no-such-command-here"], {}),
        ([sys.executable, "-S", "-c", "print(1)"], {}),
    ):
        with pytest.raises((ProfileError, TraceError, ApplyError)):
            verify(plain, words, **options)

    assert not Path("ran").exists()
    assert list(tmp_path.glob("torchrepro-*")) == []


DIVERGING = {
    "data from the clock": "batch[0, 0] = __import__('time').time_ns() % 16777213",
    "an unseeded generator": "batch += __import__('numpy').random.default_rng().random()",
    "a seed from the clock": "torch.manual_seed(__import__('time').time_ns())",
}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("what", DIVERGING)
def test_numbers_that_differ_are_never_the_same_whatever_the_guarantee(
    what, training, plain, tmp_path
):
    """What `seeded` leaves open is said, and not called equal."""
    options = {"overrides": ["guarantee=seeded"], "folder": tmp_path / "out", "closer": False}
    found = verify(plain, training(DIVERGING[what]), **options)
    answer = verification_json(found)

    assert (answer["same"], answer["asked"]) == (False, "bits")
    assert "debug-strict" in answer["advice"]["promise"]


@pytest.mark.usefixtures("forked")
def test_of_several_runs_the_one_that_differs_is_found(training, plain, tmp_path):
    """Runs 1 and 2 agree, and run 3 does not: the answer is no, and it names run 3."""
    third = "import os\nruns = len(os.listdir())\nopen(f'ran-{runs}', 'w')"
    command = training("batch[0, 0] = float(runs == 4)", third)
    found = verify(plain, command, runs=3, closer=False, folder=tmp_path / "out")

    assert [verdict.same for verdict in found.verdicts] == [True, False]
    assert [run["same"] for run in verification_json(found)["runs"]] == [True, True, False]
    assert not found.same


@pytest.mark.usefixtures("forked")
def test_only_a_tolerance_that_was_asked_for_is_granted(training, plain, tmp_path):
    """Nearly the same numbers are the same under `aligned`, or by rtol and atol, and only then."""
    near = "batch[0, 0] += 1e-8 * (int.from_bytes(__import__('os').urandom(4)) % 9973)"
    command = training(near)
    for name, options, asked, same in (
        ("bits", {}, "bits", False),
        ("aligned", {"overrides": ["guarantee=aligned"]}, "tolerance", True),
        ("given", {"rtol": 1e-2, "atol": 1e-2}, "tolerance", True),
    ):
        found = verify(plain, command, closer=False, folder=tmp_path / name, **options)
        answer = verification_json(found)

        assert (answer["asked"], answer["same"]) == (asked, same), name
        assert (answer["tolerance"] is None) == (asked == "bits")


@pytest.mark.usefixtures("forked")
def test_escalation_starts_from_what_a_guarantee_leaves_open(training, tmp_path):
    """`seed-only` over a program that needs more escalates to the level that makes runs equal."""
    command = training("batch = next(batches)", WORKERS_THAT_VARY)
    found = verify("seed-only", command, escalate=True, closer=False, folder=tmp_path / "out")

    assert not found.same
    assert found.equal_on.name == "no loader workers"


@pytest.mark.usefixtures("forked")
def test_where_no_level_helps_that_is_said(training, verified):
    """A command whose runs diverge on every level has none named, and each was tried."""
    found = verified(training(ANOTHER_EACH_TIME), escalate=True, closer=False)
    answer = verification_json(found)["escalation"]

    assert found.equal_on is None
    assert answer["equal_on"] is None
    assert [tried["name"] for tried in answer["tried"]] == ["seeds"]
    assert not any(tried["same"] for tried in answer["tried"])
    assert "no level of escalation" in as_text(*verification_parts(found))


@pytest.mark.usefixtures("forked")
def test_an_unseeded_program_is_the_same_on_the_level_of_seeds(training, tmp_path):
    """A profile without a seed, over a program without one, becomes equal on the first level."""
    Path("bare.yaml").write_text("schema: 1\nname: bare\nguarantee: repeatable\n")
    found = verify("./bare.yaml", training(), escalate=True, closer=False, folder=tmp_path / "out")

    assert not found.same
    assert found.equal_on.name == "seeds"
    assert [tried.same for tried in found.escalation] == [True]


@pytest.mark.usefixtures("forked")
def test_loader_workers_that_vary_are_found_on_their_level(training, verified):
    """Workers that give other data each time are equal on the level without workers."""
    found = verified(
        training("batch = next(batches)", WORKERS_THAT_VARY), escalate=True, closer=False
    )

    assert not found.same
    assert found.equal_on.name == "no loader workers"
    assert [tried.same for tried in found.escalation][-1:] == [True]
    assert len(found.escalation) > 1


@pytest.mark.usefixtures("forked")
def test_what_follows_the_last_step_is_looked_at_more_closely(training, verified):
    """Steps are counted as the program counts them, and the closer look finds what follows them."""
    command = training()
    with open("train.py", "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write("model(torch.full((2, 4), __import__('random').SystemRandom().random()))\n")
    said = []
    found = verified(command, say=said.append)
    first, told = found.verdict.first, "".join(said)

    assert told.count(" 3 steps\n") == 2
    assert told.count("a closer look after the last step, run") == 2
    assert [run.steps for run in found.runs] == [3, 3]
    assert (first.step, first.after_last, found.verdict.compared.steps) == (3, True, 3)
    assert first.elements


@pytest.mark.usefixtures("forked")
def test_a_program_without_steps_is_verified(verified):
    """All that it computes is outside of any step, and nothing tells of a number of steps."""
    program = "import random, torch; torch.full((2,), random.SystemRandom().random()).sin()"
    said = []
    found = verified([sys.executable, "-c", program], say=said.append)
    told = "".join(said) + as_text(*verification_parts(found))

    assert not found.same
    assert found.verdict.first.elements
    assert all(run.recorded and not run.steps for run in found.runs)
    assert "2 records outside of any step" in told
    assert "2 ops outside of any step" in told
    assert not re.search(r"\d steps?\b|step \d", told)
