"""Starts a command under a profile, or relaunches this process with the variables of a profile.

Only the main process of `python script` or `python -m module` is relaunched automatically. It must
not have used a device or started threads or processes, and must not run under a launcher or a
debugger. In doubt the process is not relaunched.
"""

from __future__ import annotations

import json
import multiprocessing
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
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchrepro.application.planner import feasible_plan
from torchrepro.ground.console import say
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError
from torchrepro.ground.patching import variables_restored
from torchrepro.ground.redaction import secret_values, shareable
from torchrepro.manifest.contents import COMMAND
from torchrepro.reporting.process_state import (
    PROFILE,
    closed_latches,
    interpreter_line,
    is_interactive,
    launcher,
    outer_run,
    same_file,
)

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile

FIRST = "TORCHREPRO_FIRST"
"""Variable with the process id of the command itself; only this process prints a summary."""

SEED = "TORCHREPRO_SEED"
"""Variable with the seed of the generators of random and numpy: a number, an empty string if they
are not seeded, or `by rank` if each process derives it. The profile contains the seed too, but
reading the profile takes half a second, too long for a program that never imports torch."""

UNTAKEN = "TORCHREPRO_UNTAKEN"
"""Variable that names an empty folder, which the first Python that loads `BOOT` removes."""

RELAUNCHED = "TORCHREPRO_RELAUNCHED"
"""Variable that marks a process as relaunched: its process id, which exec does not change."""

BOOT = Path(__file__).parent.parent / "start" / "boot"
"""Folder whose sitecustomize applies the profile when a Python process starts."""

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
_PROBE_MARK = "torchrepro here: "
_PROBE = f"""
import sys
sys.path[:] = [entry for entry in sys.path if entry]
answer = "Python %d.%d" % sys.version_info[:2]
if sys.version_info >= (3, 11):
    try:
        import torchrepro.start.bootstrap
        answer = "yes"
    except ImportError:
        answer = "no"
sys.stdout.write({_PROBE_MARK!r} + answer)
"""  # the same import as in sitecustomize, but without the current folder on the path
_TIMEOUT = 20.0  # seconds to wait for a Python's answer; the command is then started without it


def environment_for(resolved: ResolvedProfile) -> dict[str, str]:
    """Return the environment that applies the profile `resolved` in a child process.

    A variable that the user exported keeps its value if the profile does not set it. Raises
    `ApplyError` if the profile is strict and an exported variable contradicts the profile.
    """
    plan = feasible_plan(resolved, closed={})  # Python has not started there
    seed, ranks = resolved.values.get("seed"), resolved.values.get("ranks", "same")
    return {
        **os.environ,
        **plan.variables,
        "PYTHONPATH": _python_path(),
        PROFILE: json.dumps(resolved.to_json(), sort_keys=True),
        SEED: "" if seed is None else str(seed) if ranks == "same" else "by rank",
        FIRST: str(os.getpid()),
    }


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(BOOT), os.environ.get("PYTHONPATH", "")]))


def start(
    resolved: ResolvedProfile, command: Sequence[str], variables: Mapping[str, str]
) -> NoReturn:
    """Replace this process by `command` under the profile `resolved`. Does not return.

    The command also gets the environment `variables`. Raises `ProfileError` if the command does not
    exist. Raises `ApplyError` if the command's Python would not apply the profile, if an exported
    variable contradicts a strict profile, or if this process runs under another profile.
    """
    program, environment = prepared(resolved, command)
    started = {"command": list(command), "folder": os.getcwd()}  # noqa: PTH109 - text for JSON
    environment |= {COMMAND: json.dumps(started), **variables}
    untaken = ""
    if not _python_line(program, command):
        untaken = environment[UNTAKEN] = _warn_if_untaken(resolved, command)
    try:
        replace_process(program, command, environment)
    finally:  # only reached if the start failed; removing the folder prevents the warning
        if untaken:
            Path(untaken).rmdir()


def _warn_if_untaken(resolved: ResolvedProfile, command: Sequence[str]) -> str:
    """Fork a process that prints a warning at the end of the command if no Python got the profile.

    Returns a folder. A Python that applies the profile removes the folder to prevent the warning.
    Returns an empty string if the command has to start without the warning. That happens if the
    system can wait for child processes only (macOS), or if it refuses the folder or the fork.
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
        # Only a grandchild can wait here, because the command may wait for all its children.
        os.waitpid(child, 0)
        return str(folder)
    try:
        os.setsid()  # ^C must stop only the command
        if not os.fork():
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1):  # an open pipe would delay the end of the command's output
                os.dup2(nothing, stream)
            select.select([this], [], [])
            folder.rmdir()  # raises if a Python has removed the folder, which prevents the warning
            say(
                f"{resolved.name} was applied in no Python: `{_redacted(command)}` started no "
                "Python with torchrepro on this machine; other programs only got the profile's "
                "variables"
            )
    finally:
        os._exit(0)


def replace_process(
    program: str, command: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Replace this process by `command`. Raises `ProfileError` if the system refuses."""
    try:
        os.execve(program, list(command), environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise ProfileError.about(f"cannot be started: {error.strerror}", found=program) from None


def prepared(resolved: ResolvedProfile, command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the program that `command` names, and the environment that applies `resolved`.

    Raises the same errors as `start`.
    """
    outer_run(resolved, "the run inside it")
    program = program_of(command)
    barrier = unreachable(program, command)
    if barrier:
        raise ApplyError(f"the profile cannot reach `{_redacted(command)}`: {barrier}")
    return program, environment_for(resolved)


def program_and_recording_environment(command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the program that `command` names, and an environment that records without a profile.

    Raises `ProfileError` if the command does not exist, and `TraceError` if it cannot be recorded.
    """
    program = program_of(command)
    barrier = unreachable(program, command)
    if barrier:
        raise TraceError.about(f"`{_redacted(command)}` cannot be recorded: {barrier}")
    return program, {**os.environ, "PYTHONPATH": _python_path()}


def program_of(command: Sequence[str]) -> str:
    """Return the program that `command` names. Raises `ProfileError` if it does not exist."""
    program = shutil.which(command[0])
    if program is None:
        raise ProfileError.about(
            "not an executable file" if Path(command[0]).exists() else "no such command",
            found=command[0],
            todo="check its name and PATH",
        )
    return program


def _redacted(command: Sequence[str]) -> str:
    return " ".join(shareable(command, secret_values(os.environ)))


def unreachable(program: str, command: Sequence[str]) -> str:
    """Return why a Python that `command` starts would not apply a profile, or an empty string."""
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
    python_line = _python_line(program, command)
    letters, _ = interpreter_line(python_line[1:])
    for letter in letters:
        if letter in _UNREACHABLE:
            return f"Python's option -{letter}: {_UNREACHABLE[letter]}"
    python = shutil.which(python_line[0]) if python_line else None
    return _why_unusable(python) if python else ""


def is_python(word: str) -> bool:
    """Return whether `word`, the first word of a command, names a Python interpreter."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def _python_line(program: str, command: Sequence[str]) -> Sequence[str]:
    """Return the command line of the Python that `program` is, or that its first line names.

    Returns an empty sequence if no Python runs the program.
    """
    if is_python(command[0]):
        return command
    try:
        with Path(program).open("rb") as file:
            line = file.readline(512)
    except OSError:
        return ()
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    return list(dropwhile(lambda word: not is_python(word), words))


def _why_unusable(python: str) -> str:
    ours, asked = Path(sys.executable), Path(python)
    # The folder identifies a virtual environment, and the link's target identifies the version.
    if asked.parent.resolve() == ours.parent.resolve() and asked.resolve() == ours.resolve():
        return ""
    # An outer `torchrepro run` must not apply a profile to this short check, or record the check.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TORCHREPRO_")}
    try:
        done = subprocess.run(  # noqa: S603 - the user named this Python
            [python, "-c", _PROBE],
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    answer = done.stdout.rpartition(_PROBE_MARK)[2] if _PROBE_MARK in done.stdout else "yes"
    if answer == "yes":
        return ""
    lacks = "has no torchrepro" if answer == "no" else f"is {answer}, and torchrepro needs 3.11"
    return (
        f"{python} {lacks}\n"
        "  to do: install torchrepro for that Python, or start the program "
        f"with a Python that has it, as {sys.executable}"
    )


# Relaunch of this process.


def relaunch(variables: Mapping[str, str]) -> None:
    """Start this process's command line again with `variables` set. Does not return.

    The process keeps its id, which is stored in the environment to prevent a second relaunch.
    Buffered output is dropped, because the new program prints it again.
    """
    environment = {**os.environ, **variables, RELAUNCHED: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


@contextmanager
def untouched() -> Iterator[None]:
    """Restore the environment variables and the CPU affinity when the block ends.

    Libraries that torch loads may export variables. With OMP_PROC_BIND, OpenMP binds the thread
    that loads it to a CPU. A command that replaces this process would inherit both changes.
    https://www.openmp.org/spec-html/5.2/openmpse57.html
    """
    get = getattr(os, "sched_getaffinity", None)
    cpus = get(0) if get else None
    try:
        with variables_restored():
            yield
    finally:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)


def obstacle_to_relaunch(*, insists: bool) -> str:
    """Return the reason not to relaunch this process, or an empty string.

    If `insists` is true, as with `on_late: relaunch`, only the obstacles to every relaunch count.
    """
    obstacles = OBSTACLES if insists else {**OBSTACLES, **AUTOMATIC_OBSTACLES}
    return next((words for words, is_present in obstacles.items() if is_present()), "")


def _in_pytest() -> bool:
    # The variables do not suffice, because every process that a test starts inherits them.
    variables = {"PYTEST_VERSION", "PYTEST_CURRENT_TEST"}
    return "_pytest" in sys.modules and not variables.isdisjoint(os.environ)


def _main_file() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file) if file else None


def _script_read_once() -> bool:
    """Whether the script's source can be read only once, as in `- < FILE` or `<(COMMAND)`."""
    if sys.argv[:1] in ([""], ["-"]) or not sys.orig_argv[1:]:
        return True
    script = _main_file() or Path(os.devnull)
    return script.is_fifo() or script.is_socket()


def _script_out_of_reach() -> bool:
    """Whether the script's path on the command line does not exist in the working directory."""
    script = _main_file()
    named = [word for word in sys.orig_argv[1:] if script and Path(word).name == script.name]
    return bool(named) and not any(Path(word).exists() for word in named)


def _is_plain() -> bool:
    """Whether the command line, in the working directory, would start this script or module again.

    It would not if a tool that runs programs has replaced `__main__` or `sys.argv`, or if the
    program has changed the working directory.
    """
    _, program = interpreter_line(sys.orig_argv[1:])
    file = _main_file()
    if not program or file is None:
        return False
    # A word may also name the folder or the archive with a __main__.py.
    named = [program[0], sys.argv[0]] if program[0] != "-m" else [sys.argv[0]]
    for word in named:
        if not any(same_file(Path(word), path) for path in (file, file.parent)):
            return False
    if program[0] != "-m":
        return True
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name.removesuffix(".__main__") != program[1]:
        return False
    # A relaunched Python must find the module in the same folder.
    folder = file.absolute().parents[spec.name.count(".")]
    entries = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(":")))]
    installed = any(folder.is_relative_to(root) for root in (sys.prefix, sys.base_prefix))
    return installed or any(same_file(entry, folder) for entry in entries)


def _is_watched() -> bool:
    monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12, for six tools
    tools = map(monitoring.get_tool, range(6)) if monitoring else ()
    debuggers = sys.modules.keys() & {"pydevd", "debugpy", "_pydevd_bundle"}
    return any((sys.gettrace(), sys.getprofile(), debuggers, *tools))


def _stdin_may_be_used_up() -> bool:
    """Whether part of standard input may have been read. For a pipe this is always possible."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False  # standard input is closed
    if stat.S_ISREG(mode):
        return os.lseek(0, 0, os.SEEK_CUR) > 0
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)  # otherwise a terminal or the null device


def _has_begun() -> bool:
    used = {"cuda", "npu", "communicator"} & closed_latches().keys()
    return any((used, threading.active_count() > 1, multiprocessing.active_children()))


OBSTACLES: Mapping[str, Callable[[], object]] = {
    "it was relaunched once already": lambda: os.environ.get(RELAUNCHED) == str(os.getpid()),
    "it runs under pytest": _in_pytest,
    "it is interactive or a notebook": is_interactive,
    "it is a worker of another process": multiprocessing.parent_process,
    "its script came on standard input or by a pipe": _script_read_once,
    "it has changed its folder, and its script's path is relative": _script_out_of_reach,
    "its Python cannot be started again": lambda: not sys.executable,
}
"""Obstacles to every relaunch, each with a function that returns a true value if it is present.

The first obstacle that is present is shown.
"""

AUTOMATIC_OBSTACLES: Mapping[str, Callable[[], object]] = {
    "its Python ignores variables (-E or -I)": lambda: sys.flags.ignore_environment,
    "a debugger, a profiler, coverage or another tracer follows it": _is_watched,
    "a launcher such as MPI, Slurm or torchrun has started it": launcher,
    "it was not started here as a plain `python script` or `python -m module`": (
        lambda: not _is_plain()
    ),
    "standard input is a pipe or was read (start it with `< /dev/null`)": _stdin_may_be_used_up,
    "it has used a device, made a communicator, or started threads or processes": _has_begun,
}
"""Further obstacles to an automatic relaunch, which may do more than a restart by the user."""
