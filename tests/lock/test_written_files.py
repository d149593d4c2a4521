"""A lock is written where its name says, and through no link that somebody else has put there."""

import errno
import fcntl
import sys
from pathlib import Path

import pytest

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.writing import write_in_place
from torchrepro.seeding.state import save_rng_state, set_rng_state

NEW = "the new lock\n"


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Change to a hostile repository next to a file of the user; return that file."""
    own = tmp_path / "home" / "bashrc"
    own.parent.mkdir()
    own.write_text("the user's own\n")
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)
    (repository / "locks").mkdir()
    monkeypatch.chdir(repository)
    return own


@pytest.mark.parametrize("beside", [".repro.lock.new", ".repro.lock.tmp", ".repro.lock"])
def test_links_next_to_a_lock_are_not_followed(user, beside):
    """Only the lock itself is written, despite the links next to it."""
    Path(beside).symlink_to(user)
    write_in_place(Path("repro.lock"), NEW)

    assert Path("repro.lock").read_text() == NEW
    assert user.read_text() == "the user's own\n"
    assert sorted(path.name for path in Path().iterdir()) == sorted(
        [".git", "locks", "repro.lock", beside]
    )


def test_a_lock_that_is_a_link_out_of_its_repository_is_refused(user):
    """The message names the link and its target, and nothing is written."""
    Path("repro.lock").symlink_to(user)

    with pytest.raises(ProfileError, match=r"repro\.lock -> .*bashrc.*a link that leads out of"):
        write_in_place(Path("repro.lock"), NEW)
    assert user.read_text() == "the user's own\n"
    assert Path("repro.lock").is_symlink()


@pytest.mark.slow
def test_no_command_writes_through_a_link_of_a_hostile_repository(user, execute):
    """The page of a verdict is refused, and the manifest of a run replaces the link."""
    new = user.with_name("new")
    Path("repro.json").symlink_to(new)
    Path("page.html").symlink_to(user)
    Path("train.py").write_text("import torch; torch.ones(2) * 2")
    ours, program = [sys.executable, "-m", "torchrepro"], ["--", sys.executable, "train.py"]
    page = execute(*ours, "verify", "--report", "page.html", *program, cwd=Path.cwd())
    run = execute(*ours, "run", "--log-to", ".", "seed-only", *program, cwd=Path.cwd())

    assert "page.html -> " in page.stderr
    assert user.read_text() == "the user's own\n"
    assert (run.returncode, Path("repro.json").is_symlink(), new.exists()) == (0, False, False)


def test_a_lock_that_is_a_link_within_its_repository_stays_one(user):
    """Its target is written."""
    Path("repro.lock").symlink_to("locks/today.lock")
    write_in_place(Path("repro.lock"), NEW)

    assert Path("repro.lock").is_symlink()
    assert Path("locks/today.lock").read_text() == NEW


def test_a_lock_can_be_written_to_standard_output(user, execute, tmp_path):
    """To a pipe, and to a file that a shell has opened."""
    write = "from pathlib import Path; from torchrepro.ground.writing import write_in_place; "
    write += f"write_in_place(Path('/dev/stdout'), {NEW!r})"
    piped = execute(sys.executable, "-c", write)
    shell = 'exec "$0" -c "$1" > out.lock'
    redirected = execute("sh", "-c", shell, sys.executable, write)

    assert (piped.stdout, piped.stderr) == (NEW, "")
    assert redirected.stderr == ""
    assert (tmp_path / "out.lock").read_text() == NEW


def test_files_are_written_on_file_systems_without_file_locks(user, monkeypatch):
    """For example on a cluster file system that is mounted without locks."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_in_place(Path("repro.lock"), NEW)
    save_rng_state("rng.json")

    assert Path("repro.lock").read_text() == NEW
    set_rng_state("rng.json")
