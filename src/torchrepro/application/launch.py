"""Start a command with a profile in force from before it begins, or this process anew.

By itself, the latter happens to a plain program only: `python script` or `python -m module`, in its
main process, before it has started anything, with nobody else in charge. When in doubt it does not.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchrepro.application.planner import Plan, make_plan
from torchrepro.ground.console import say
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError
from torchrepro.ground.patching import variables_put_back
from torchrepro.ground.redaction import secret_values, shareable
from torchrepro.manifest.contents import COMMAND
from torchrepro.reporting.process_state import (
    PROFILE,
    closed_doors,
    interpreter_line,
    is_interactive,
    launcher,
    outer_run,
    same_file,
)

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile

FIRST = "TORCHREPRO_FIRST"
"""Variable that holds the process id of the command itself, which alone prints a summary."""

SEED = "TORCHREPRO_SEED"
"""Variable that holds what the generators of random and numpy start from: a number, nothing where
they are left alone, or `by rank` where a process has to work it out. The profile says it too, but
reading that takes half a second, which a program that never imports torch must not pay."""

UNTAKEN = "TORCHREPRO_UNTAKEN"
"""Variable that names an empty folder, which the first Python that finds `BOOT` removes."""

RELAUNCHED = "TORCHREPRO_RELAUNCHED"
"""Variable that marks a process as relaunched: its id, which exec keeps."""

BOOT = Path(__file__).parent.parent / "start" / "boot"
"""Folder whose sitecustomize puts the profile in force as a Python process starts."""

_PYTHON = re.compile(r"(python|pypy)[0-9.]*[dmtu]*")
_UNREACHABLE = {
    "I": "isolated mode ignores PYTHONPATH",
    "E": "PYTHON variables are ignored",
    "S": "sitecustomize is not loaded",
}
_WRAPPERS = (
    *("env", "ionice", "nice", "nohup", "numactl", "setsid", "srun", "stdbuf"),
    *("taskset", "time", "timeout", "xvfb-run"),
)
_WITHOUT_ENVIRONMENT = {"-", "-i", "--ignore-environment"}
_ANSWERED = "torchrepro here: "
_ASK = f"""
import sys
sys.path[:] = [entry for entry in sys.path if entry]
answer = "Python %d.%d" % sys.version_info[:2]
if sys.version_info >= (3, 11):
    try:
        import torchrepro.start.bootstrap
        answer = "yes"
    except ImportError:
        answer = "no"
sys.stdout.write({_ANSWERED!r} + answer)
"""  # the very import that sitecustomize tries, and not from the folder that it happens to be in
_PATIENCE = 20.0  # seconds that a Python has to answer; one that does not is started all the same


def environment_for(plan: Plan) -> dict[str, str]:
    """Return the environment with all that puts the plan's profile in force in a process below.

    Variables that the user exported are kept where the plan keeps them. Raises `ApplyError` if
    a strict profile meets one that contradicts it.
    """
    plan.refuse_if_stopping()
    seed, ranks = plan.resolved.values.get("seed"), plan.resolved.values.get("ranks", "same")
    return {
        **os.environ,
        **plan.variables,
        "PYTHONPATH": _python_path(),
        PROFILE: json.dumps(plan.resolved.to_json(), sort_keys=True),
        SEED: "" if seed is None else str(seed) if ranks == "same" else "by rank",
        FIRST: str(os.getpid()),
    }


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(BOOT), os.environ.get("PYTHONPATH", "")]))


def start(resolved: ResolvedProfile, command: Sequence[str], more: Mapping[str, str]) -> NoReturn:
    """Replace this process by `command` under `resolved`, with `more` variables; does not return.

    Raises `ProfileError` for a command that is not there, and `ApplyError` for one whose Python
    would not take the profile, for an exported variable that contradicts a strict one, or below a
    run under another profile.
    """
    program, environment = prepared(resolved, command)
    started = {"command": list(command), "folder": os.getcwd()}  # noqa: PTH109 - text for JSON
    environment |= {COMMAND: json.dumps(started), **more}
    untaken = ""
    if not any(map(is_python, (command[0], *_shebang(Path(program))))):
        untaken = environment[UNTAKEN] = _told_if_untaken(resolved, command)
    try:
        replace_process(program, command, environment)
    finally:  # it was not started, which is said
        if untaken:
            Path(untaken).rmdir()


def _told_if_untaken(resolved: ResolvedProfile, command: Sequence[str]) -> str:
    """Have a process of its own say at the end of this one that no Python took the profile, if so.

    Returns the folder that tells. Nothing where only a parent can wait for a process, as on macOS,
    or where the system has no room for it: the command is started all the same.
    """
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        this = os.pidfd_open(os.getpid())
        folder = Path(tempfile.mkdtemp(prefix="torchrepro-"))
        child = os.fork()
    except OSError:
        return ""
    if child:
        # Nobody's child by then: the command may wait for all of its own.
        os.waitpid(child, 0)
        return str(folder)
    try:
        os.setsid()  # ^C is for the command
        if not os.fork():
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1):  # whoever reads what the command prints sees its end
                os.dup2(nothing, stream)
            select.select([this], [], [])
            folder.rmdir()  # fails where one took it, and nothing is said
            say(
                f"{resolved.name} was in force in no Python: `{_shown(command)}` started none on "
                "this machine that takes a profile, and other programs have its variables alone"
            )
    finally:
        os._exit(0)


def replace_process(
    program: str, command: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Replace this process by `command`; raises `ProfileError` if the system refuses."""
    try:
        os.execve(program, list(command), environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise ProfileError.about(f"cannot be started: {error.strerror}", found=program) from None


def prepared(resolved: ResolvedProfile, command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the program that `command` names, and the environment that puts `resolved` in force.

    Raises as `start` does.
    """
    outer_run(resolved, "the run inside it")
    program = program_of(command)
    barrier = unreachable(program, command)
    if barrier:
        raise ApplyError(f"the profile cannot reach `{_shown(command)}`: {barrier}")
    before_python_starts = make_plan(resolved, closed={})
    return program, environment_for(before_python_starts)


def prepared_as_it_is(command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the program that `command` names, and the environment in which it can be recorded.

    No profile comes with it. Raises `ProfileError` for a command that is not there, and
    `TraceError` for one whose Python would not record.
    """
    program = program_of(command)
    barrier = unreachable(program, command)
    if barrier:
        raise TraceError.about(f"`{_shown(command)}` cannot be recorded: {barrier}")
    return program, {**os.environ, "PYTHONPATH": _python_path()}


def program_of(command: Sequence[str]) -> str:
    """Return the program that `command` names; raises `ProfileError` if there is none."""
    program = shutil.which(command[0])
    if program is None:
        raise ProfileError.about(
            "not an executable file" if Path(command[0]).exists() else "no such command",
            found=command[0],
            todo="check its name and PATH",
        )
    return program


def _shown(command: Sequence[str]) -> str:
    return " ".join(shareable(command, secret_values(os.environ)))


def unreachable(program: str, command: Sequence[str]) -> str:
    """Return why a Python started by `command` would not take a profile, or an empty string."""
    name = Path(command[0]).name
    options = takewhile(lambda word: word.startswith("-") or "=" in word, command[1:])
    if name == "env" and not _WITHOUT_ENVIRONMENT.isdisjoint(options):
        return "`env` drops the variables that carry it"
    if name in _WRAPPERS:
        for position, word in enumerate(command[1:], start=1):
            started = None if word.startswith("-") else shutil.which(word)
            if started:
                return unreachable(started, command[position:])
        return ""
    if is_python(command[0]):
        return _ignoring(command[1:]) or _lacking(program)
    shebang = _shebang(Path(program))
    for position, word in enumerate(shebang):
        if is_python(word):
            return _ignoring(shebang[position + 1 :]) or _lacking(shutil.which(word))
    return ""


def is_python(word: str) -> bool:
    """Whether the first word of a command names a Python."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def _ignoring(words: Sequence[str]) -> str:
    letters, _ = interpreter_line(words)
    found = next((letter for letter in letters if letter in _UNREACHABLE), "")
    return f"Python's option -{found}: {_UNREACHABLE[found]}" if found else ""


def _lacking(python: str | None) -> str:
    if python is None:
        return ""
    own, asked = Path(sys.executable), Path(python)
    # Both: a virtual environment is where the link lies, and one folder holds several versions.
    if asked.parent.resolve() == own.parent.resolve() and asked.resolve() == own.resolve():
        return ""
    # Whatever a run around this one asks of a Python that starts, it is not asked of this one.
    around = {name: its for name, its in os.environ.items() if not name.startswith("TORCHREPRO_")}
    try:
        done = subprocess.run(  # noqa: S603 - what the user has named
            [python, "-c", _ASK],
            env=around,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    answer = done.stdout.rpartition(_ANSWERED)[2] if _ANSWERED in done.stdout else "yes"
    if answer == "yes":
        return ""
    lacks = "has no torchrepro" if answer == "no" else f"is {answer}, and torchrepro needs 3.11"
    return (
        f"{python} {lacks}\n"
        f"  to do: install it there ({python} -m pip install torchrepro), or start the program "
        f"with a Python that has it, as {sys.executable}"
    )


def _shebang(program: Path) -> list[str]:
    try:
        with program.open("rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    return line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []


# Starting this process anew.


def relaunch(variables: Mapping[str, str]) -> None:
    """Replace this process by the same command line with `variables` set; does not return.

    The process id stays, and marks the environment so that it never happens twice. What was
    printed and is still buffered is dropped: the program prints it again.
    """
    environment = {**os.environ, **variables, RELAUNCHED: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


@contextmanager
def untouched() -> Iterator[None]:
    """Put variables and usable CPUs back to what they are now when the block ends.

    Libraries that torch loads may export variables, and OpenMP binds the thread that loads it if
    OMP_PROC_BIND says so: a command started in this process's place would inherit both.
    https://www.openmp.org/spec-html/5.2/openmpse57.html
    """
    get = getattr(os, "sched_getaffinity", None)
    cpus = get(0) if get else None
    try:
        with variables_put_back():
            yield
    finally:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)


def obstacle_to_relaunch(*, insists: bool) -> str:
    """Return why this process does not start its command line again, or an empty string.

    `insists` says that the profile asks for it by name: only what makes it impossible counts there.
    """
    obstacles = IMPOSSIBLE if insists else (*IMPOSSIBLE, *IN_DOUBT)
    return next((words for is_there, words in obstacles if is_there()), "")


def _in_pytest() -> bool:
    # The variables alone are inherited by every process that a test starts.
    return "_pytest" in sys.modules and bool(
        {"PYTEST_VERSION", "PYTEST_CURRENT_TEST"} & os.environ.keys()
    )


def _is_worker() -> bool:
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _main_file() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file) if file else None


def _script_read_once() -> bool:
    """Whether the script came from where it can be read only once: `- < FILE`, `<(COMMAND)`."""
    if sys.argv[:1] in ([""], ["-"]) or not sys.orig_argv[1:]:
        return True
    script = _main_file() or Path(os.devnull)
    return script.is_fifo() or script.is_socket()


def _script_out_of_reach() -> bool:
    """Whether the path of the script, as the command line has it, no longer leads to it."""
    script = _main_file()
    named = [word for word in sys.orig_argv[1:] if script and Path(word).name == script.name]
    return bool(named) and not any(Path(word).exists() for word in named)


def _is_plain() -> bool:
    """Whether the command line, begun here, begins the script or module that runs.

    A tool that runs a program for somebody replaces `__main__` or `sys.argv`; a program that has
    changed its folder would begin elsewhere.
    """
    _, program = interpreter_line(sys.orig_argv[1:])
    file = _main_file()
    if not program or program[0] == "-c" or file is None:
        return False

    def names_it(word: str) -> bool:  # a folder or an archive with a __main__.py is named itself
        return any(same_file(Path(word), here) for here in (file, file.parent))

    if not names_it(sys.argv[0]):
        return False
    if program[0] != "-m":
        return names_it(program[0])
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name.removesuffix(".__main__") != program[1]:
        return False
    # A new Python that begins here has to look for the module in the same folder.
    folder = file.absolute().parents[spec.name.count(".")]
    entries = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(":")))]
    installed = any(folder.is_relative_to(root) for root in (sys.prefix, sys.base_prefix))
    return installed or any(same_file(entry, folder) for entry in entries)


def _is_watched() -> bool:
    monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12, for six tools
    tools = (monitoring.get_tool(number) for number in range(6)) if monitoring else ()
    debuggers = sys.modules.keys() & {"pydevd", "debugpy", "_pydevd_bundle"}
    followed = sys.gettrace() is not None or sys.getprofile() is not None or bool(debuggers)
    return followed or any(tool is not None for tool in tools)


def _stdin_may_be_used_up() -> bool:
    """Whether standard input may hold less than at the start; of a pipe nobody knows."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False  # it is closed
    if stat.S_ISREG(mode):
        return os.lseek(0, 0, os.SEEK_CUR) > 0
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)  # else a terminal, or the null device


def _has_begun() -> bool:
    children = getattr(sys.modules.get("multiprocessing"), "active_children", list)
    used = {"cuda", "npu", "communicator"} & closed_doors().keys()
    return bool(used) or threading.active_count() > 1 or bool(children())


IMPOSSIBLE: tuple[tuple[Callable[[], bool], str], ...] = (
    (lambda: os.environ.get(RELAUNCHED) == str(os.getpid()), "it was relaunched once already"),
    (_in_pytest, "it runs under pytest"),
    (is_interactive, "it is interactive or a notebook"),
    (_is_worker, "it is a worker of another process"),
    (_script_read_once, "its script came on standard input or by a pipe"),
    (_script_out_of_reach, "it has left the folder in which its script was named"),
    (lambda: not sys.executable, "its Python cannot be started again"),
)
"""What stops a relaunch that the profile insists on, too; the first that applies is shown."""

IN_DOUBT: tuple[tuple[Callable[[], bool], str], ...] = (
    (lambda: bool(sys.flags.ignore_environment), "its Python ignores variables (-E or -I)"),
    (_is_watched, "a debugger, a profiler, coverage or another tracer follows it"),
    (lambda: bool(launcher()), "a launcher such as MPI, Slurm or torchrun has started it"),
    (
        lambda: not _is_plain(),
        "it was not started here as a plain `python script` or `python -m module`",
    ),
    (
        _stdin_may_be_used_up,
        "standard input is a pipe or was read (start it with `< /dev/null`)",
    ),
    (_has_begun, "it has used a device, made a communicator, or started threads or processes"),
)
"""What stops a relaunch that happens by itself: it might do more than start the program anew."""
