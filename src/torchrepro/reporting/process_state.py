"""What this process has come to, found out without importing or initialising anything.

That is the one-way doors that are closed, the kinds of device that are present, the threads that
use torch, who has started it and with which environment, and the profile that came with it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from glob import glob
from pathlib import Path
from types import FrameType
from typing import Any

from torchrepro.ground.callers import frames, package
from torchrepro.ground.errors import ApplyError, SeedingError
from torchrepro.ground.imports import installed_version
from torchrepro.ground.messages import shown, some
from torchrepro.knobs.torch_state import npu_with_devices
from torchrepro.knobs.variables import openmp_of_torch
from torchrepro.profile.resolved import NOT_INHERITED, ResolvedProfile, flatten
from torchrepro.seeding.streams import world

PROFILE = "TORCHREPRO_PROFILE"
"""Variable that carries the resolved profile and its origins to every process below `run`."""

REPEATED = "TORCHREPRO_REPEATED"
"""Variable in which `torchrepro rerun` says which run is repeated below it: the original's profile
and what asked for it, the folder of its manifest, and that of the new one."""


try:
    FOLDER = os.getcwd()  # noqa: PTH109 - half the time of Path.cwd at every start
except OSError:  # it is gone
    FOLDER = ""
"""The folder in which the program was started, unless it left it before it used torchrepro."""


TESTED_TORCH = "2.6", "2.15"
"""The oldest and the newest release of torch with which the tests of torchrepro pass."""


def untested_torch() -> str:
    """Return a sentence where torch is newer than any release that was tested; else an empty one.

    The version is that of the imported torch, or of the installed one. Changes nothing.
    """
    version = getattr(sys.modules.get("torch"), "__version__", "") or installed_version("torch")
    release = str(version).split(".")[:2]
    newest = [int(part) for part in TESTED_TORCH[1].split(".")]
    if not all(part.isdecimal() for part in release) or [*map(int, release)] <= newest:
        return ""
    return f"torch {version} is newer than {TESTED_TORCH[1]}, the newest that was tested"


def _loaded(module: str) -> bool:
    return module in sys.modules


def _initialised(part: str) -> bool:
    module = getattr(sys.modules.get("torch"), part, None)
    check = getattr(module, "is_initialized", None)
    return bool(check and check())


DOORS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "interpreter": (lambda: True, "Python has started"),
    "torch": (lambda: _loaded("torch"), "torch is loaded"),
    "openmp": (lambda: _loaded("torch") or bool(openmp_of_torch()), "OpenMP is loaded"),
    "torch_npu": (lambda: _loaded("torch_npu"), "torch_npu is loaded"),
    "cuda": (lambda: _initialised("cuda"), "CUDA is initialised"),
    "npu": (lambda: _initialised("npu"), "the NPU is initialised"),
    "communicator": (lambda: _initialised("distributed"), "a communicator has been made"),
    "transformer_engine": (lambda: _loaded("transformer_engine"), "Transformer Engine is loaded"),
}
"""Every one-way door: whether it is closed, and how to say so."""


def closed_doors() -> dict[str, str]:
    """Return the doors that are closed in this process now, each with the words for it."""
    return {door: words for door, (closed, words) in DOORS.items() if closed()}


NOT_HERE = "not on this machine"
_NOT_BUILT = "this torch is not built for it"
_WSL = "/dev/dxg"  # the driver of Linux in WSL 2, which does not say whose GPU it is

_DRIVERS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("/dev/nvidia[0-9]*", "/dev/nvmap", _WSL),
    "hip": ("/dev/kfd", _WSL),
    "npu": ("/dev/davinci[0-9]*",),
    "xpu": ("/dev/dri/renderD*", _WSL),
}
"""What torch is built for -> the files by which its driver shows; no device is asked.

The names are those of `torch.version`, but for that of `npu`, which is a package of its own.
"""


def _has_driver(build: str) -> bool:
    return any(map(glob, _DRIVERS[build]))


def _is_built_for(build: str) -> bool:
    version = getattr(sys.modules.get("torch"), "version", None)
    return version is None or bool(getattr(version, build, None))  # as far as torch is loaded


def _no_gpu() -> str:
    if _initialised("cuda"):
        return ""
    with_driver = [build for build in ("cuda", "hip") if _has_driver(build)]  # both are `cuda`
    if not with_driver:
        return NOT_HERE
    if not any(map(_is_built_for, with_driver)):
        return _NOT_BUILT
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "hidden by CUDA_VISIBLE_DEVICES" if hidden else ""


def _no_mps() -> str:
    mps = getattr(getattr(sys.modules.get("torch"), "backends", None), "mps", None)
    here = sys.platform == "darwin" if mps is None else mps.is_available()
    return "" if here else NOT_HERE


def _no_xpu() -> str:
    if _initialised("xpu"):
        return ""
    # Every GPU has such a file, so a torch that is not built for this one says nothing of it.
    return "" if _has_driver("xpu") and _is_built_for("xpu") else NOT_HERE


_ABSENCES: Mapping[str, Callable[[], str]] = {
    "cuda": _no_gpu,
    "npu": lambda: "" if npu_with_devices() is not None or _has_driver("npu") else NOT_HERE,
    "mps": _no_mps,
    "xpu": _no_xpu,
}
"""Kind of device -> why this process has none, an empty string if it has. None is initialised."""

HARDWARE: Mapping[str, str] = {
    "CUDA": "cuda",
    "NCCL": "cuda",
    "Ascend": "npu",
    "MPS": "mps",
    "XPU": "xpu",
}
"""What a knob can be for, by its name in a message, and the kind of device that makes it here."""


def absent_hardware() -> dict[str, str]:
    """Return the `HARDWARE` that this process does not have, each with the reason in words."""
    absences = {kind: absence() for kind, absence in _ABSENCES.items()}
    return {name: absences[kind] for name, kind in HARDWARE.items() if absences[kind]}


def _onednn_present() -> bool:
    backends = getattr(sys.modules.get("torch"), "backends", None)
    mkldnn = getattr(backends, "mkldnn", None)  # torch may be in the middle of its import
    return mkldnn is None or bool(mkldnn.is_available())


def _several_ranks() -> bool:
    try:
        return world().size > 1
    except SeedingError:  # the variable with the number of this process holds none
        return True


KINDS: Mapping[str, Callable[[], bool]] = {
    "numpy": lambda: _loaded("numpy"),
    "onednn": _onednn_present,
    "cuda": lambda: not _no_gpu(),
    "npu": lambda: npu_with_devices() is not None,
    "several": _several_ranks,
    "transformer_engine": lambda: _loaded("transformer_engine"),
}
"""Kind of device, library or run on which a guarantee may depend -> whether it is present."""


def present_kinds() -> frozenset[str]:
    """Return the `KINDS` that are present."""
    return frozenset(kind for kind, present in KINDS.items() if present())


def other_threads_in_torch() -> list[str]:
    """Return the names of the other Python threads whose code uses torch at this moment."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []

    def uses_torch(innermost: FrameType) -> bool:  # and is not a thread of torch's own
        stack = [(package(frame), frame) for frame in frames(innermost)]
        own = [each for of, each in stack if of != "torch" and of not in sys.stdlib_module_names]
        in_torch = any(of == "torch" for of, _ in stack)
        return bool(own) and (in_torch or any(it.f_globals.get("torch") is torch for it in own))

    # Private by its name only: documented, and the one road to what a thread is doing.
    running = sys._current_frames()  # noqa: SLF001 - see above
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
        and (frame := running.get(thread.ident or 0)) is not None
        and uses_torch(frame)
    ]


_MPI = ("OMPI_COMM_", "PMI_", "PMIX_RANK", "MV2_COMM_", "MPI_LOCAL")
"""How the variables begin that an MPI gives to its processes.

Images of containers set parameters (`OMPI_MCA_*`, `PMIX_MCA_*`) for whatever is started in them.
"""


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


@cache
def _starting_environment() -> Mapping[str, str]:
    """Return the environment that this process was started with, where the system tells (Linux).

    Elsewhere it is empty: then nobody can tell when a variable was set.
    """
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def set_before_start(name: str) -> bool:
    """Return whether the variable `name` is known to have been set before Python started."""
    return name in os.environ and _starting_environment().get(name) == os.environ[name]


def inherited() -> ResolvedProfile | None:
    """Return the profile under which `torchrepro run` started this process, if it did."""
    text = os.environ.get(PROFILE)
    return _parsed(text) if text else None


@lru_cache(maxsize=4)
def _parsed(text: str) -> ResolvedProfile:
    try:
        return ResolvedProfile.from_json(json.loads(text))
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ApplyError(f"{PROFILE} does not hold what `torchrepro run` writes there") from None


def _original() -> dict[str, Any] | None:
    text = os.environ.get(REPEATED)
    return dict(json.loads(text)) if text else None


def original_profile(name: Any, overrides: Sequence[str] = ()) -> ResolvedProfile | None:
    """Return the profile of the run that is repeated here, if it was asked for in these words.

    None where nothing is repeated. The files of a profile may have changed since then, or be gone.
    """
    original = _original()
    if original is None or [str(name), *overrides] != original["asked"]:
        return None
    return ResolvedProfile.from_json(original["profile"])


def original_meaning(name: str) -> ResolvedProfile | None:
    """Return the profile that `name` meant in the run that is repeated here, or None.

    Below `torchrepro run` every name that was accepted meant the profile of that run. Any other
    name means what its files say.
    """
    original = _original()
    if original is None:
        return None
    outer = inherited()
    if outer is not None:
        return outer if name in original["named"] else None
    asked = original["asked"][:1] == [name]
    return ResolvedProfile.from_json(original["profile"]) if asked else None


def changed_files(name: str, now: str) -> str:
    """Return a line on the profile `name`, whose files give something else `now`."""
    what = now[:_DIGEST] if now.startswith("sha256:") else now
    return f"the files of profile {name} have changed since ({what}): the run has it as it was then"


_DIGEST = 19  # characters by which people tell digests apart


def other_than_original(resolved: ResolvedProfile) -> str:
    """Return a line if the run that is repeated here had another profile than `resolved`."""
    original = _original()
    its = ResolvedProfile.from_json(original["profile"]) if original else resolved
    if its.digest == resolved.digest:
        return ""
    return (
        f"this run has another profile than the one that it repeats: {resolved.digest}, and the "
        f"original {its.digest}"
    )


def manifest_folder(folder: Path) -> Path:
    """Return where a manifest for `folder` goes: a repeated run leaves the original's alone."""
    original = _original()
    if original and same_file(folder, Path(original["folder"])):
        return Path(original["into"])
    return folder


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder, which is there."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def other_than_started(resolved: ResolvedProfile) -> str:
    """Return a line if `resolved` replaces values under which this process was started.

    Keys that it leaves out keep the value with which the process was started.
    """
    outer = inherited()
    if outer is None or outer.digest == resolved.digest:
        return ""
    changes, added = [], 0
    for key, ours, theirs in _differing(outer, resolved):
        if theirs is not None and ours is not None:
            changes.append(f"{key} is {shown(theirs)} instead of {shown(ours)}")
        added += theirs is not None and ours is None
    changes += [f"{added} keys more are set"] * bool(added)
    return (
        f"torchrepro.apply of {resolved.name} goes before `torchrepro run {outer.name}`, while it "
        f"is in force: {some(changes)}"
    ) * bool(changes)


def _differing(
    ours: ResolvedProfile, theirs: ResolvedProfile
) -> Iterator[tuple[str, object, object]]:
    left, right = flatten(ours.values), flatten(theirs.values)
    for key in sorted(left.keys() | right.keys()):
        if key not in NOT_INHERITED and left.get(key) != right.get(key):
            yield key, left.get(key), right.get(key)


def outer_run(resolved: ResolvedProfile, asker: str) -> ResolvedProfile | None:
    """Return the profile under which `torchrepro run` started this process, which must agree.

    Raises `ApplyError` if it is another than `resolved`, for which `asker` asks.
    """
    outer = inherited()
    if outer is None or outer.digest == resolved.digest:
        return outer
    lines = [
        f"  {key}: run {ours!r}, {asker} {theirs!r}"
        for key, ours, theirs in _differing(outer, resolved)
    ]
    head = (
        f"this process was started by `torchrepro run {outer.name}`, and {asker} asks for "
        f"'{resolved.name}', which differs in:"
    )
    raise ApplyError("\n".join([head, *lines, "  to do: use the same profile in both places"]))
