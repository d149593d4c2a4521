"""Start the same command line again in the same process, unless something stands in the way.

By itself, that happens to a plain program only: `python script` or `python -m module`, in its main
process, before it has started anything, with nobody else in charge. When in doubt it does not.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.patching import variables_put_back
from torchrepro.process_state import closed_doors, same_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

RELAUNCHED = "TORCHREPRO_RELAUNCHED"
"""Variable that marks a process as relaunched: its id, which exec keeps."""

_MPI = ("OMPI_COMM_", "PMI_", "PMIX_", "MV2_COMM_", "MPI_LOCAL")
"""How the variables begin that an MPI gives to its processes."""


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


def is_interactive() -> bool:
    """Whether somebody types this program line by line, in a shell or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def launcher() -> str:
    """Return what has started this process, perhaps as one of several, or an empty string."""
    variables = os.environ
    if "mpi4py.MPI" in sys.modules or any(name.startswith(_MPI) for name in variables):
        return "MPI"
    # The shell of a Slurm job has a number too, without being a task of a step.
    several = variables.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in variables
    if several or "SLURM_STEP_ID" in variables:
        return "Slurm"
    # joblib, submitit, Ray or torchrun
    ranked = "RANK" in variables and "WORLD_SIZE" in variables
    marks = {"TORCHELASTIC_RUN_ID", "LOCAL_RANK", "SUBMITIT_EXECUTOR"} & variables.keys()
    words = ("loky", "submitit", "default_worker.py", "torch.distributed", "torchrun")
    started_by = " ".join(interpreter_line(sys.orig_argv[1:])[1][:2])
    launched = ranked or marks or any(word in started_by for word in words)
    return "a launcher" if launched else ""


def _in_pytest() -> bool:
    # The variables alone are inherited by every process that a test starts.
    return "_pytest" in sys.modules and bool(
        {"PYTEST_VERSION", "PYTEST_CURRENT_TEST"} & os.environ.keys()
    )


def _is_worker() -> bool:
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return "--multiprocessing-fork" in sys.orig_argv
    return multiprocessing.parent_process() is not None


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
