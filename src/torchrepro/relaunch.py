"""Start the same command line again in the same process, unless something stands in the way."""

from __future__ import annotations

import os
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.patching import variables_put_back
from torchrepro.process_state import DOORS, same_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

RELAUNCHED = "TORCHREPRO_RELAUNCHED"
"""Variable that marks a process as relaunched: its id, which exec keeps."""

_MPI = ("OMPI_COMM_", "PMI_", "PMIX_", "MV2_COMM_", "MPI_LOCAL")
"""How the variables begin that an MPI gives to its processes."""

_PROFILERS = (
    *("cProfile", "profile", "line_profiler", "kernprof", "memory_profiler", "mprof", "scalene"),
    *("viztracer", "pyinstrument", "yappi", "austin"),
)
_DEBUGGER_TOOL, _COVERAGE_TOOL = 0, 1
_TOOLS = 6
"""Identifiers of `sys.monitoring`; see https://docs.python.org/3/library/sys.monitoring.html."""


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

    `insists` says that the profile asks for it by name: then only what makes it impossible counts.
    """
    obstacles = IMPOSSIBLE if insists else (*IMPOSSIBLE, *UNSAFE)
    return next((words for is_there, words in obstacles if is_there()), "")


def interpreter_line(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the options of one letter that a Python is started with, and what it is to run.

    `words` is its command line without the first word. What it is to run begins with ``-c``,
    ``-m`` or the path of a script. See https://docs.python.org/3/using/cmdline.html.
    """
    letters, position = "", 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word = words[position]
        position += 1
        if word == "--":
            break
        if word.startswith("--"):
            position += word == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(word[1:], start=2):
            rest = [word[place:]] if word[place:] else []
            if letter in "cm":
                return letters, [f"-{letter}", *rest, *words[position:]]
            letters += letter
            if letter in "WX":
                position += not rest
                break
    return letters, words[position:]


def _in_pytest() -> bool:
    # The variables alone are inherited by every process that a test starts.
    return "_pytest" in sys.modules and bool(
        {"PYTEST_VERSION", "PYTEST_CURRENT_TEST"} & os.environ.keys()
    )


def is_interactive() -> bool:
    """Whether somebody types this program line by line, in a shell or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _in_ipython() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and shell() is not None


def _is_worker() -> bool:
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return "--multiprocessing-fork" in sys.orig_argv
    return multiprocessing.parent_process() is not None


def _script_out_of_reach() -> bool:
    """Whether the path of the script, as the command line has it, no longer leads to it."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    named = [word for word in sys.orig_argv[1:] if script and Path(word).name == Path(script).name]
    return bool(named) and not any(Path(word).exists() for word in named)


def _script_read_once() -> bool:
    """Whether the script came from where it can be read only once: `- < FILE`, `<(COMMAND)`."""
    if sys.argv[:1] in ([""], ["-"]) or not sys.orig_argv[1:]:
        return True
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or os.devnull)
    return script.is_fifo() or script.is_socket()


def _another_program() -> bool:
    """Whether the command line, started here, begins another program than the one that runs.

    A tool that runs a program for somebody replaces `__main__`; a program that has changed its
    folder would begin elsewhere.
    """
    _, program = interpreter_line(sys.orig_argv[1:])
    main: Any = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not program:
        return True
    if program[0] == "-c":
        return file is not None
    if file is None:
        return True
    if program[0] == "-m":
        if spec is None or spec.name.removesuffix(".__main__") != program[1]:
            return True
        return not _found_at_every_start(Path(file).absolute().parents[spec.name.count(".")])
    named = Path(program[0])
    return not any(same_file(named, here) for here in (Path(file), Path(file).parent))


def _found_at_every_start(folder: Path) -> bool:
    """Whether a new Python that begins in the present folder looks for modules in `folder`."""
    entries = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(":")))]
    installed = any(folder.is_relative_to(root) for root in (sys.prefix, sys.base_prefix))
    return installed or any(same_file(entry, folder) for entry in entries)


def _debugged() -> bool:
    traced = sys.gettrace() is not None or _monitored(_DEBUGGER_TOOL)
    return traced or not sys.modules.keys().isdisjoint({"pydevd", "debugpy", "_pydevd_bundle"})


def _covered() -> bool:
    coverage: Any = getattr(sys.modules.get("coverage"), "Coverage", None)
    current = getattr(coverage, "current", None)  # since coverage 5.0
    return _monitored(_COVERAGE_TOOL) or (current is not None and current() is not None)


def _profiled() -> bool:
    _, program = interpreter_line(sys.orig_argv[1:])
    runner = program[1:2] if program[:1] == ["-m"] else [Path(word).name for word in program[:1]]
    others = range(_COVERAGE_TOOL + 1, _TOOLS)
    measured = sys.getprofile() is not None or any(map(_monitored, others))
    return measured or any(word.partition(".")[0] in _PROFILERS for word in runner)


def _monitored(tool: int) -> bool:
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return monitoring is not None and monitoring.get_tool(tool) is not None


def launcher() -> str:
    """Return what has started this process, perhaps as one of several, or an empty string."""
    rows = (("MPI", _in_mpi), ("Slurm", _task_of_slurm), ("a launcher", _launched))
    return next((words for words, is_so in rows if is_so()), "")


def _in_mpi() -> bool:
    return "mpi4py.MPI" in sys.modules or any(name.startswith(_MPI) for name in os.environ)


def _task_of_slurm() -> bool:
    # The shell of a job has a number too, but is no task of a step.
    several = os.environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in os.environ
    return several or "SLURM_STEP_ID" in os.environ


def _launched() -> bool:
    """Whether joblib, submitit, Ray or torchrun has started this process."""
    ranked = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    variables = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "SUBMITIT_EXECUTOR")
    words = ("loky", "submitit", "default_worker.py", "torch.distributed", "torchrun")
    started_by = " ".join(interpreter_line(sys.orig_argv[1:])[1][:2])
    named = any(name in os.environ for name in variables)
    return ranked or named or any(word in started_by for word in words)


def _stdin_may_be_used_up() -> bool:
    """Whether the program may have read from standard input what the next one cannot read again.

    Nothing tells whether a pipe was read from. One in which something waits, and of which no line
    was read, is taken for untouched; an empty one is not.
    """
    import fcntl
    import termios

    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False  # it is closed
    if stat.S_ISREG(mode):
        return os.lseek(0, 0, os.SEEK_CUR) > 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False  # a terminal, or the null device
    waiting = bytearray(4)
    with suppress(OSError):
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    return bool(getattr(sys.stdin, "newlines", None)) or not any(waiting)


IMPOSSIBLE: tuple[tuple[Callable[[], bool], str], ...] = (
    (lambda: os.environ.get(RELAUNCHED) == str(os.getpid()), "it was relaunched once already"),
    (_in_pytest, "it runs under pytest"),
    (is_interactive, "it is interactive or a notebook"),
    (_is_worker, "it is a worker of another process"),
    (_script_read_once, "its script came on standard input or by a pipe"),
    (_script_out_of_reach, "it has left the folder in which its script was named"),
    (
        lambda: os.name != "posix" or not sys.executable,
        "its Python cannot be started again in place",
    ),
)
"""What stops a relaunch that the profile insists on, too; the first that applies is shown."""

UNSAFE: tuple[tuple[Callable[[], bool], str], ...] = (
    (lambda: bool(sys.flags.ignore_environment), "its Python ignores variables (-E or -I)"),
    (_covered, "coverage measures it"),
    (_profiled, "a profiler measures it"),
    (_debugged, "a debugger or a tracer follows it"),
    (_in_ipython, "it runs in IPython"),
    (_in_mpi, "it is a process of MPI"),
    (_task_of_slurm, "it is a task of Slurm"),
    (_launched, "a launcher has started it"),
    (_another_program, "its command line begins another program, or in another folder"),
    (
        _stdin_may_be_used_up,
        "standard input may have been read already (an empty pipe: start it with `< /dev/null`)",
    ),
    DOORS["cuda"],
    DOORS["npu"],
    DOORS["communicator"],
    (lambda: threading.active_count() > 1, "it has started threads"),
    (
        lambda: bool(getattr(sys.modules.get("multiprocessing"), "active_children", list)()),
        "it has started processes",
    ),
)
"""What stops a relaunch that happens by itself: it might do more than start the program anew."""
