"""What the libraries made of the environment variables that they have read, as far as it shows."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Calls, Effect, MissingState
from torchrepro.knobs.linked_state import Fp32Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.knobs.linked_state import InductorVariable

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")
_MAPPED = Path("/proc/self/maps")


def _of_torch(read: Callable[[], Any]) -> Callable[[], Any]:
    """Return `read` for a process that has loaded torch; elsewhere nothing shows."""

    def read_once_loaded() -> Any:
        if "torch" not in sys.modules:
            raise MissingState("torch is not loaded")
        return read()

    return read_once_loaded


def _hash_secret() -> bytes:
    """Return the secret of Python's hashes of text, from a private variable of CPython.

    `sys.flags` shows only whether the seed is 0.
    """
    import ctypes

    try:
        return bytes((ctypes.c_ubyte * 16).in_dll(ctypes.pythonapi, "_Py_HashSecret"))
    except ValueError:
        raise MissingState("this Python does not show its hash secret") from None


def _secret_of(text: str) -> bytes:
    """Return the secret that a numeric PYTHONHASHSEED comes to (CPython's `lcg_urandom`)."""
    if not text.isdigit():
        raise MissingState("a random secret is any")
    state, secret = int(text), bytearray()
    for _ in range(16 if state else 0):
        state = (state * 214013 + 2531011) % 2**32
        secret.append(state >> 16 & 0xFF)
    return bytes(secret) or bytes(16)


def openmp_loaded() -> bool:
    """Whether a runtime of OpenMP that torch computes with is loaded, where the system tells."""
    return bool(_openmp_of_torch())


def _openmp_of_torch() -> set[str]:
    """Return the paths of the loaded OpenMP runtimes that torch computes with, or will.

    A library brings its own runtime under another name, or shares the one that is loaded. So the
    runtimes of torch are those with the names of the files that torch installs.
    """
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in _MAPPED.read_text().splitlines()}
    except OSError:
        return set()
    loaded = {path for path in mapped if _OPENMP.match(Path(path).name)}
    own = _runtimes_of_torch() if loaded else frozenset()
    return {path for path in loaded if not own or Path(path).name.partition(".so")[0] in own}


@cache
def _runtimes_of_torch() -> frozenset[str]:  # none where the system's is used
    spec = find_spec("torch")
    folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    places = [place for each in folders for place in (each / "lib", each.parent / "torch.libs")]
    names = [file.name for place in places if place.is_dir() for file in place.iterdir()]
    return frozenset(name.partition(".so")[0] for name in names if _OPENMP.match(name))


def _from_openmp(function: str) -> int:
    import ctypes

    mode = os.RTLD_NOW | os.RTLD_NOLOAD
    runtimes = [ctypes.CDLL(path, mode=mode) for path in _openmp_of_torch()]
    answers = {int(getattr(runtime, function)()) for runtime in runtimes}
    if len(answers) != 1:
        raise MissingState("no OpenMP runtime is loaded, or several that disagree")
    return answers.pop()


def _threads() -> int:
    if "torch" in sys.modules:
        return int(import_module("torch").get_num_threads())
    return _from_openmp("omp_get_max_threads")


def _threads_of_mkl() -> int:
    info = str(import_module("torch.__config__").parallel_info())
    found = re.search(r"mkl_get_max_threads\(\) : (\d+)", info)
    if found is None:
        raise MissingState("this torch has no MKL")
    return int(found[1])


def _capability() -> str:
    found = str(Calls("torch.backends.cpu", "get_cpu_capability", "get_cpu_capability").read())
    return {"NO AVX": "DEFAULT"}.get(found, found)  # as older torch calls it


def inductor_option(access: InductorVariable) -> Effect:
    """Return what inductor made of the variable behind `access`."""

    def read() -> bool:
        option = access.present()
        if option is None:
            raise MissingState("inductor is not loaded")
        return option

    return Effect(read, lambda text: text == "1", f"inductor's {access.option} is {{}}")


HASHES = Effect(_hash_secret, _secret_of, "its hashes are not those of this seed")
OPENMP_THREADS = Effect(_threads, int, "OpenMP has {} threads for torch")
OPENMP_DYNAMIC = Effect(
    lambda: bool(_from_openmp("omp_get_dynamic")),
    lambda text: text.lower() == "true",
    "dynamic is {} in OpenMP",
)
MKL_THREADS = Effect(_of_torch(_threads_of_mkl), int, "MKL has {} threads")
CAPABILITY = Effect(_of_torch(_capability), str.upper, "torch computes with {} instructions")
TF32 = Effect(
    _of_torch(lambda: Fp32Precision("cuda.matmul").read() == "tf32"),
    lambda text: text == "1",
    "TF32 is {} for torch's matrix products",
)
NPU_TASK_QUEUE = Effect(
    _of_torch(Calls("torch:npu", "get_task_queue_enable", "get_task_queue_enable").read),
    lambda text: int(text) if text.isdecimal() else 0,
    "torch_npu's task queue is {}",
)
NPU_COMPATIBLE_IMPL = Effect(
    _of_torch(
        Calls("torch:npu", "are_compatible_impl_enabled", "are_compatible_impl_enabled").read
    ),
    lambda text: text == "1",
    "torch_npu's compatible_impl is {}",
)
