"""Reads the state of this process, without importing or initialising anything.

The state consists of the closed latches (events that end a phase), the devices, the threads that
use torch, the launcher, the environment at the start, and the profile from `torchrepro run`.
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
from torchrepro.ground.errors import ApplyError, SeedingError, shown, some
from torchrepro.ground.imports import installed_version
from torchrepro.knobs.torch_state import npu_with_devices
from torchrepro.knobs.variables import openmp_of_torch
from torchrepro.profile.resolved import NOT_INHERITED, ResolvedProfile, flatten
from torchrepro.seeding.streams import world

PROFILE = "TORCHREPRO_PROFILE"
"""Variable that passes the resolved profile and its origins to every process below `run`."""

REPEATED = "TORCHREPRO_REPEATED"
"""Variable that describes the original run to all processes below `torchrepro rerun`: its
profile, the names that requested it, the folder of its manifest, and the new folder."""


try:
    FOLDER = os.getcwd()  # noqa: PTH109 - half the time of Path.cwd at every start
except OSError:  # the folder has been removed
    FOLDER = ""
"""The folder of the program when it first used torchrepro: usually its start folder."""


TESTED_TORCH = "2.6", "2.15"
"""The oldest and the newest release of torch that pass the tests of torchrepro."""


def untested_torch() -> str:
    """Return a sentence if torch is newer than every tested release, else an empty string.

    Checks the imported torch. If torch is not imported, checks the installed torch.
    """
    version = getattr(sys.modules.get("torch"), "__version__", "") or installed_version("torch")
    release = str(version).split(".")[:2]
    newest = [int(number) for number in TESTED_TORCH[1].split(".")]
    if not all(number.isdecimal() for number in release) or [*map(int, release)] <= newest:
        return ""
    return f"torch {version} is newer than {TESTED_TORCH[1]}, the newest that was tested"


def _loaded(module: str) -> bool:
    return module in sys.modules


def _initialised(submodule: str) -> bool:
    module = getattr(sys.modules.get("torch"), submodule, None)
    check = getattr(module, "is_initialized", None)
    return bool(check and check())


LATCHES: Mapping[str, tuple[Callable[[], bool], str]] = {
    "interpreter": (lambda: True, "Python has started"),
    "torch": (lambda: _loaded("torch"), "torch is loaded"),
    "openmp": (lambda: _loaded("torch") or bool(openmp_of_torch()), "OpenMP is loaded"),
    "torch_npu": (lambda: _loaded("torch_npu"), "torch_npu is loaded"),
    "cuda": (lambda: _initialised("cuda"), "CUDA is initialised"),
    "npu": (lambda: _initialised("npu"), "the NPU is initialised"),
    "communicator": (lambda: _initialised("distributed"), "a communicator has been made"),
    "transformer_engine": (lambda: _loaded("transformer_engine"), "Transformer Engine is loaded"),
}
"""The latches: each is an event that ends a phase -> a check for it, and its description."""


def closed_latches() -> dict[str, str]:
    """Return the name and the description of each latch that is closed in this process."""
    return {latch: words for latch, (is_closed, words) in LATCHES.items() if is_closed()}


NOT_HERE = "not on this machine"
_NOT_BUILT = "this torch is not built for it"
_WSL = "/dev/dxg"  # the driver in WSL 2, for GPUs of every vendor

_DRIVERS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("/dev/nvidia[0-9]*", "/dev/nvmap", _WSL),
    "hip": ("/dev/kfd", _WSL),
    "npu": ("/dev/davinci[0-9]*",),
    "xpu": ("/dev/dri/renderD*", _WSL),
}
"""Build of torch -> device files of its driver; devices are never queried.

Builds have their names in `torch.version`, except `npu`, which is a separate package.
"""


def _has_driver(build: str) -> bool:
    return any(map(glob, _DRIVERS[build]))


def _is_built_for(build: str) -> bool:
    version = getattr(sys.modules.get("torch"), "version", None)
    return version is None or bool(getattr(version, build, None))  # None: not loaded yet


def _no_gpu() -> str:
    if _initialised("cuda"):
        return ""
    with_driver = [build for build in ("cuda", "hip") if _has_driver(build)]  # both are torch.cuda
    if not with_driver:
        return NOT_HERE
    if not any(map(_is_built_for, with_driver)):
        return _NOT_BUILT
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "hidden by CUDA_VISIBLE_DEVICES" if hidden else ""


def _no_mps() -> str:
    mps = getattr(getattr(sys.modules.get("torch"), "backends", None), "mps", None)
    is_present = sys.platform == "darwin" if mps is None else mps.is_available()
    return "" if is_present else NOT_HERE


def _no_xpu() -> str:
    if _initialised("xpu"):
        return ""
    # GPUs of other vendors have such a file too, so the file counts only if torch is built for XPU.
    return "" if _has_driver("xpu") and _is_built_for("xpu") else NOT_HERE


_ABSENCES: Mapping[str, Callable[[], str]] = {
    "cuda": _no_gpu,
    "npu": lambda: "" if npu_with_devices() is not None or _has_driver("npu") else NOT_HERE,
    "mps": _no_mps,
    "xpu": _no_xpu,
}
"""Device type -> why it is absent, or an empty string. Initialises no device."""

HARDWARE: Mapping[str, str] = {
    "CUDA": "cuda",
    "NCCL": "cuda",
    "Ascend": "npu",
    "MPS": "mps",
    "XPU": "xpu",
}
"""Hardware of knobs, by its name in messages -> the device type in `_ABSENCES` that it needs."""


def absent_hardware() -> dict[str, str]:
    """Return the types of `HARDWARE` that are absent in this process, each with the reason."""
    reasons = {device: reason() for device, reason in _ABSENCES.items()}
    return {name: reasons[device] for name, device in HARDWARE.items() if reasons[device]}


def _onednn_present() -> bool:
    backends = getattr(sys.modules.get("torch"), "backends", None)
    mkldnn = getattr(backends, "mkldnn", None)  # torch may be in the middle of its import
    return mkldnn is None or bool(mkldnn.is_available())


def _several_ranks() -> bool:
    try:
        return world().size > 1
    except SeedingError:  # RANK is not a number
        return True


KINDS: Mapping[str, Callable[[], bool]] = {
    "numpy": lambda: _loaded("numpy"),
    "onednn": _onednn_present,
    "cuda": lambda: not _no_gpu(),
    "npu": lambda: npu_with_devices() is not None,
    "several": _several_ranks,
    "transformer_engine": lambda: _loaded("transformer_engine"),
}
"""Device, library or type of run that a guarantee may depend on -> whether it is present."""


def present_kinds() -> frozenset[str]:
    """Return the names of the `KINDS` that are present in this process."""
    return frozenset(name for name, is_present in KINDS.items() if is_present())


def other_threads_in_torch() -> list[str]:
    """Return the names of the other Python threads that are using torch at this moment."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []

    def uses_torch(innermost: FrameType) -> bool:  # false for the internal threads of torch
        stack = [(package(frame), frame) for frame in frames(innermost)]
        not_program = {"torch", *sys.stdlib_module_names}
        program_frames = [frame for name, frame in stack if name not in not_program]
        if not program_frames:
            return False
        in_torch = any(name == "torch" for name, _ in stack)
        return in_torch or any(frame.f_globals.get("torch") is torch for frame in program_frames)

    # `_current_frames` is documented. It is the only way to the frames of another thread.
    running = sys._current_frames()  # noqa: SLF001 - see above
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
        and (frame := running.get(thread.ident or 0)) is not None
        and uses_torch(frame)
    ]


_MPI = ("OMPI_COMM_", "PMI_", "PMIX_RANK", "MV2_COMM_", "MPI_LOCAL")
"""Prefixes of the variables that MPI sets in its processes.

Parameters (`OMPI_MCA_*`, `PMIX_MCA_*`) do not count: container images set them for all processes.
"""


def is_interactive() -> bool:
    """Return whether this is an interactive session, in a shell or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def launcher() -> str:
    """Return the launcher that started this process, such as MPI, or an empty string."""
    variables = os.environ
    if "mpi4py.MPI" in sys.modules or any(name.startswith(_MPI) for name in variables):
        return "MPI"
    # The batch shell of a Slurm job has a SLURM_PROCID, too, but does not run a task of a step.
    several = variables.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in variables
    if several or "SLURM_STEP_ID" in variables:
        return "Slurm"
    # joblib, submitit, Ray or torchrun
    ranked = "RANK" in variables and "WORLD_SIZE" in variables
    marks = {"TORCHELASTIC_RUN_ID", "LOCAL_RANK", "SUBMITIT_EXECUTOR"} & variables.keys()
    programs = ("loky", "submitit", "default_worker.py", "torch.distributed", "torchrun")
    command = " ".join(interpreter_line(sys.orig_argv[1:])[1][:2])
    launched = ranked or marks or any(program in command for program in programs)
    return "a launcher" if launched else ""


def interpreter_line(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the one-letter options of a Python command line, and the program with its arguments.

    `words` is the command line without the interpreter. The program begins with ``-c``, ``-m`` or
    the path of a script. See https://docs.python.org/3/using/cmdline.html.
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
        for end, letter in enumerate(word[1:], start=2):
            rest = [word[end:]] if word[end:] else []
            if letter in "cm":
                return letters, [f"-{letter}", *rest, *words[position:]]
            letters += letter
            if letter in "WX":
                position += not rest
                break
    return letters, words[position:]


@cache
def _starting_environment() -> Mapping[str, str]:
    """Return the environment variables that this process had at its start, as Linux reports them.

    On other systems the result is empty, so it is unknown when a variable was set.
    """
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (line.partition(b"=") for line in raw.split(b"\0") if b"=" in line)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def set_before_start(name: str) -> bool:
    """Return whether the variable `name` is known to have been set before Python started."""
    return name in os.environ and _starting_environment().get(name) == os.environ[name]


def inherited() -> ResolvedProfile | None:
    """Return the profile that `torchrepro run` passed to this process, or None without one."""
    text = os.environ.get(PROFILE)
    return _parsed(text) if text else None


@lru_cache(maxsize=4)
def _parsed(text: str) -> ResolvedProfile:
    try:
        return ResolvedProfile.from_json(json.loads(text))
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ApplyError(f"{PROFILE} is damaged: not as `torchrepro run` writes it") from None


def _original() -> dict[str, Any] | None:
    text = os.environ.get(REPEATED)
    return dict(json.loads(text)) if text else None


def original_profile(name: Any, overrides: Sequence[str] = ()) -> ResolvedProfile | None:
    """Return the profile of the original run, if `name` and `overrides` requested it there.

    Returns None in other cases, and in a process that does not repeat a run. Profile files are not
    read, because they may have changed since the original run.
    """
    original = _original()
    if original is None or [str(name), *overrides] != original["asked"]:
        return None
    return ResolvedProfile.from_json(original["profile"])


def original_meaning(name: str) -> ResolvedProfile | None:
    """Return the profile that `name` meant in the original run.

    In a process below `torchrepro run`, each name that the original run accepted means the profile
    of `torchrepro run`. Returns None if the name had no meaning in the original run, or if this
    process does not repeat a run. The caller then reads the profile files.
    """
    original = _original()
    if original is None:
        return None
    outer = inherited()
    if outer is not None:
        return outer if name in original["named"] else None
    is_requested = original["asked"][:1] == [name]
    return ResolvedProfile.from_json(original["profile"]) if is_requested else None


def changed_files(name: str, now: str) -> str:
    """Return a message: the files of profile `name` have changed. `now` is a digest or an error."""
    state = now[:_DIGEST] if now.startswith("sha256:") else now
    return f"the files of profile {name} have changed since ({state}): the run uses the old profile"


_DIGEST = 19  # characters that are enough to distinguish two digests


def other_than_original(resolved: ResolvedProfile) -> str:
    """Return a message if the original run had another profile than `resolved`, else ""."""
    original = _original()
    profile = ResolvedProfile.from_json(original["profile"]) if original else resolved
    if profile.digest == resolved.digest:
        return ""
    return (
        f"this run has another profile than the run that it repeats: {resolved.digest} instead of "
        f"{profile.digest}"
    )


def manifest_folder(folder: Path) -> Path:
    """Return the folder for a manifest: a rerun replaces the original run's folder by its own."""
    original = _original()
    if original and same_file(folder, Path(original["folder"])):
        return Path(original["into"])
    return folder


def same_file(left: Path, right: Path) -> bool:
    """Return whether two paths lead to the same existing file or folder."""
    try:
        return left.samefile(right)
    except OSError:
        return False


def other_than_started(resolved: ResolvedProfile) -> str:
    """Return a message if `resolved` changes values of the profile that this process inherited.

    Keys that `resolved` does not set keep the inherited values.
    """
    outer = inherited()
    if outer is None or outer.digest == resolved.digest:
        return ""
    changes, added = [], 0
    for key, ours, theirs in _differing(outer, resolved):
        if theirs is not None and ours is not None:
            changes.append(f"{key} is {shown(theirs)} instead of {shown(ours)}")
        added += theirs is not None and ours is None
    changes += [f"{added} more keys are set"] * bool(added)
    return (
        f"torchrepro.apply of {resolved.name} overrides `torchrepro run {outer.name}` while it is "
        f"active: {some(changes)}"
    ) * bool(changes)


def _differing(
    ours: ResolvedProfile, theirs: ResolvedProfile
) -> Iterator[tuple[str, object, object]]:
    left, right = flatten(ours.values), flatten(theirs.values)
    for key in sorted(left.keys() | right.keys()):
        if key not in NOT_INHERITED and left.get(key) != right.get(key):
            yield key, left.get(key), right.get(key)


def outer_run(resolved: ResolvedProfile, asker: str) -> ResolvedProfile | None:
    """Return the profile that `torchrepro run` passed to this process, or None without one.

    Raises `ApplyError` if that profile differs from `resolved`, which `asker` requests.
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
