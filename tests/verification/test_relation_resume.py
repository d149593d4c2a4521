"""A resumed run continues as the whole run does, or the state that was not restored is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from torchrepro.ground.errors import TorchreproError
from torchrepro.verification.copies import temporary_folder
from torchrepro.verification.relations.relation import relate
from torchrepro.verification.runner import RunRequest

from .repositories import commit, write
from .resumable import FORGOTTEN, PROGRAM

pytestmark = pytest.mark.usefixtures("own_temporary")

LOOP = """
import sys
import torch
torch.manual_seed(0)
data = torch.randn(4, 8, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(data[step]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {line}
"""


def _program(forgotten: str, saves: str = "(6,)") -> list[str]:
    Path("train.py").write_text(PROGRAM.replace("{saves}", saves), encoding="utf-8")
    return [sys.executable, "train.py", forgotten]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_state_that_is_not_restored_is_named(forgotten: str) -> None:
    """Only the state that the program omits is named."""
    kind, name = FORGOTTEN[forgotten]

    related = relate("resume", RunRequest(_program(forgotten)))

    lost = related.variants[0].not_restored
    assert related.status == 1
    assert related.verdict.first.step >= 6
    assert related.verdict.first.source in ("", *(f"{Path.cwd()}/train.py:{n}" for n in range(99)))
    assert {each.kind for each in lost} == {kind}
    assert all(each.name.partition(":")[0] in name for each in lost)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_program_that_restores_all_agrees() -> None:
    """Killed after its first and its last checkpoint, it continues bit for bit.

    Recordings in a folder of the user do not count as files that the program wrote.
    """
    related = relate("resume", RunRequest(_program("nothing", "(3, 6, 9)"), folder="recorded"))

    assert related.status == 0
    assert [variant.name for variant in related.variants] == [
        "resumed after step 2",
        "resumed after step 8",
    ]
    assert [variant.verdict.compared.steps for variant in related.variants] == [9, 3]


@pytest.mark.slow
def test_a_relative_program_is_the_one_of_the_users_folder() -> None:
    """Each run starts it from its own folder, and the answer has the command as typed."""
    python, *words = _program("nothing", "(6,)")
    relative = os.path.relpath(python)

    related = relate("resume", RunRequest([relative, *words]))

    assert relative.startswith("..")
    assert (related.status, related.command) == (0, f"{relative} train.py nothing")


@pytest.mark.sampled
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("pass", "never saved a checkpoint"),
        ("if step == 3: torch.save(model.state_dict(), 'state.pt')", "saves too late"),
        ("torch.save(model.state_dict(), 'state.pt')", "it started from scratch"),
        (
            "if step == 1: torch.save(model.state_dict(), '{place}/state.pt')",
            "state.pt in your own folder; write to a path in the folder where the command starts",
        ),
    ],
)
def test_if_no_answer_is_possible_advice_is_given(line: str, why: str) -> None:
    """A program that never saves, saves at its end, does not resume, or writes elsewhere."""
    place = Path.cwd()
    Path("train.py").write_text(LOOP.replace("{line}", line.format(place=place)), encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    assert related.status == 4
    assert why in related.unknown


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("words", [["./missing"], ["{folder}/missing"], ["{python}", "missing"]])
def test_a_mistyped_program_is_named_by_the_users_path(words: list[str]) -> None:
    """The missing file is named in the user's folder, not in the copy."""
    names = {"folder": str(Path.cwd()), "python": sys.executable}

    with pytest.raises(TorchreproError) as raised:
        relate("resume", RunRequest([word.format(**names) for word in words]))

    assert "torchrepro-copy" not in str(raised.value)
    assert ("./missing" if words == ["./missing"] else f"{Path.cwd()}/missing") in str(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_resumed_run_may_be_another_command() -> None:
    """{checkpoint} is the file in the copy that the killed run wrote."""
    text = LOOP.replace("{line}", "torch.save((step + 1, model.state_dict()), f'at-{step}.pt')")
    head = "first, kept = torch.load(sys.argv[1]) if sys.argv[1:] else (0, None)"
    text = text.replace("range(4)", "range(first, 7)").replace("randn(4", "randn(7")
    text = text.replace("optimizer =", f"{head}\nif kept: model.load_state_dict(kept)\noptimizer =")
    Path("train.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "train.py"]

    related = relate(
        "resume", RunRequest(command), resume_command=f"{sys.executable} train.py {{checkpoint}}"
    )

    assert related.status == 0
    assert [variant.verdict.compared.steps for variant in related.variants] == [3, 1]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("line", "pattern", "killed"),
    [
        # One name in every step: it has settled a step later.
        ("torch.save(step + 1, 'state.pt')", "", 1),
        # A new name in every step: three steps later.
        ("torch.save(step + 1, f'at-{step}.pt')", "", 3),
        # Written for three steps: once it is closed.
        ("file = file or open('state.pt', 'wb'); step == 4 and file.close()\n"
         "    if step < 4: file.write(pickle.dumps(step)); file.flush()", "", 4),
        ("open('state.txt', 'w').write(str(step))", "*.txt", 1),
    ],
)  # fmt: skip
def test_a_run_is_killed_once_its_checkpoint_is_complete(
    line: str, pattern: str, killed: int
) -> None:
    """After a step without a new name, or after three steps, and with no checkpoint open."""
    text = LOOP.replace("range(4)", "range(9)").replace("randn(4", "randn(9")
    text = text.replace("import sys", "import glob, pickle, sys")
    text = text.replace("optimizer =", "file = None\noptimizer =").replace("{line}", line)
    Path("train.py").write_text(text, encoding="utf-8")
    # The resumed run only has to open it, to make a step after the first one, and to differ.
    resume = f'{sys.executable} -c "import sys, torch; open(sys.argv[1]); '
    resume += "exec(open('train.py').read().replace('range(9)', 'range(1, 9)'))\" {checkpoint}"

    related = relate(
        "resume",
        RunRequest([sys.executable, "train.py"]),
        checkpoint=pattern,
        resume_command=resume,
    )

    assert f"killed after step {killed}, " in related.variants[0].note


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_no_run_finds_results_of_another_run_or_of_the_user() -> None:
    """Copies have ignored data, but not ignored results; the user's files are unchanged."""
    text = PROGRAM.replace("{saves}", "(6,)").replace(
        'if os.path.exists("state.pt"):',
        'if os.path.exists("state.pt") and os.path.getsize("state.pt") > 99:',
    )
    text = f"open('data/part.txt').read(); open('data/new.txt', 'w').close()\n{text}"
    commit(Path.cwd(), {"train.py": text, ".gitignore": "*.pt\ndata\n"})
    write(Path.cwd(), {"state.pt": "too short to be one", "data/part.txt": "1"})
    before = _files()

    related = relate("resume", RunRequest([sys.executable, "train.py", "nothing"]))

    assert related.status == 0
    assert _files() == before


def _files() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_copy_remains_however_verify_ends(number: int) -> None:
    """The folder is unchanged and copies are removed; after a kill, by the next command.

    A copy that another process uses stays.
    """
    command = _program("nothing")
    text = Path("train.py").read_text(encoding="utf-8")
    Path("train.py").write_text(f"import time; time.sleep(9)\n{text}", encoding="utf-8")
    before = _files()
    place = Path.cwd().parent / "temporary"
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(place)}
    line = [sys.executable, "-m", "torchrepro", "verify", "--relation", "resume", "--", *command]
    with subprocess.Popen(line, env=environment) as process:
        while not list(place.glob("torchrepro-copy-*/tree/*/train.py")):
            assert process.poll() is None
            time.sleep(0.1)

        process.send_signal(number)
        status = process.wait(60)
    left = list(place.glob("torchrepro-copy-*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        deadline = time.monotonic() + 30  # its run ends soon after it, if it was killed
        there: set[Path] = set()
        while not (len(there) == 2 or time.monotonic() > deadline):
            with temporary_folder() as in_use, temporary_folder() as other:
                there = {*place.glob("torchrepro-copy-*")}

    assert there == {in_use, other}
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    assert bool(left) == (number == signal.SIGKILL)
    assert list(place.glob("torchrepro-copy-*")) == []
    assert _files() == before
