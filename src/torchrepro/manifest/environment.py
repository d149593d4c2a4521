"""What numbers depend on beside the profile and variables: hardware, software and the commit.

Each is a table of rows, and a further fact is a further row. Reading them imports no library,
initialises no device and never fails: a manifest is written while somebody's job starts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any

from torchrepro.ground.imports import installed_version
from torchrepro.ground.redaction import HIDDEN, ordinary, url_without_login
from torchrepro.knobs.variables import digest_of_text

UNKNOWN = "unknown: "  # begins a value that could not be read; the reason follows


class NotKnownYetError(Exception):
    """The library that knows is not loaded yet, or the device is not in use yet."""


def read_rows(rows: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    found = {}
    for name, read in rows.items():
        try:
            found[name] = read()
        except NotKnownYetError:
            continue
        except Exception as error:  # noqa: BLE001 - an odd machine must not fail the run
            words = str(error).partition("\n")[0]
            found[name] = f"{UNKNOWN}{type(error).__name__}{f': {words}' if words else ''}"
    return found


def _loaded(module: str) -> Any:
    found = sys.modules.get(module)
    if found is None:
        raise NotKnownYetError(module)
    return found


def hardware() -> dict[str, Any]:
    """Return what each row of `HARDWARE` reads; None means that it is absent here.

    GPUs are those that the driver shows. What only torch can tell is left out until the program
    has loaded it. A row that fails reads ``unknown: `` and the reason.
    """
    return read_rows(HARDWARE)


_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = "/proc/driver/nvidia/gpus/*/information"
_OTHER_GPUS = "/dev/[dk][xf][gd]"  # dxg is Windows' GPU in WSL, kfd is AMD's driver
_ASCEND = "/dev/davinci[0-9]*"
_ENOUGH = 8192  # characters of cpuinfo that hold all of the first CPU
_OF_ARM = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
_FAMILY = ("vendor_id", "cpu family", "model", "stepping")
_FEATURE = re.compile(r"avx\w*|amx\w*|fma\w*|sve\w*|asimd\w*|bf16|i8mm|f16c")


@cache
def _first_cpu() -> Mapping[str, str]:
    # man 5 proc
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_ENOUGH)
    except OSError:
        return {}
    lines = text.partition("\n\n")[0].splitlines()
    return {name.strip(): its.strip() for name, _, its in (line.partition(":") for line in lines)}


def _cpu_model() -> str | None:
    its = _first_cpu()
    numbers = " ".join(its[name] for name in _OF_ARM if name in its)
    return its.get("model name") or numbers or platform.processor() or None


def _cpu_features() -> str | None:
    its = _first_cpu()
    flags = its.get("flags") or its.get("Features") or ""
    return " ".join(sorted(filter(_FEATURE.fullmatch, flags.split()))) or None


def _gpus() -> list[str]:
    files = [Path(file) for file in sorted(glob(_NVIDIA))]  # noqa: PTH207 - of a pattern
    named = [re.search(r"Model:\s*(.+)", file.read_text(encoding="utf-8")) for file in files]
    return [match[1].strip() for match in named if match] or _in_use("cuda", _OTHER_GPUS)


def _in_use(kind: str, signs: str) -> list[str]:
    # Torch may use none although files that match `signs` show some.
    module = getattr(sys.modules.get("torch"), kind, None)
    if module is not None and module.is_initialized():
        return [module.get_device_name(index) for index in range(module.device_count())]
    if glob(signs):  # noqa: PTH207 - of a pattern
        raise NotKnownYetError(kind)
    return []


HARDWARE: Mapping[str, Callable[[], Any]] = {
    "system": platform.system,
    "machine": platform.machine,
    "cpu": _cpu_model,
    "cpu family": lambda: " ".join(_first_cpu().get(name, "") for name in _FAMILY).strip() or None,
    "cpu features": _cpu_features,
    "instruction set": lambda: _loaded("torch").backends.cpu.get_cpu_capability(),  # noqa: PLW0108
    "cpus": os.cpu_count,
    "threads": lambda: _loaded("torch").get_num_threads(),
    "interop threads": lambda: _loaded("torch").get_num_interop_threads(),
    "gpu": lambda: ", ".join(sorted(set(_gpus()))) or None,
    "gpus": lambda: len(_gpus()),
    "npu": lambda: ", ".join(sorted(set(_in_use("npu", _ASCEND)))) or None,
    "npus": lambda: len(glob(_ASCEND)) or len(_in_use("npu", _ASCEND)),  # noqa: PTH207 - of a pattern
}


_VECTORS = {
    "AVX-512": ("avx512f",),
    "AVX2": ("avx2",),
    "AVX": ("avx",),
    "SVE": ("sve",),
    "NEON": ("asimd", "neon"),
}
"""Vector extensions of CPUs by the flags that show them, the widest first."""


def kind_of_machine() -> str:
    """Return the model of the GPU or NPU, or else vendor and widest vector extension of the CPU.

    What runs may be blamed on is no part of it: versions, variables, numbers of threads. Imports
    torch where the driver of a GPU does not tell.
    """
    for name in ("gpu", "npu"):
        try:
            model = HARDWARE[name]()
        except NotKnownYetError:  # torch alone can tell
            module: Any = getattr(import_module("torch"), "cuda" if name == "gpu" else name, None)
            count = module.device_count() if module is not None and module.is_available() else 0
            model = ", ".join(sorted({str(module.get_device_name(at)) for at in range(count)}))
        if model:
            return str(model)
    its = _first_cpu()
    vendor = its.get("vendor_id") or its.get("CPU implementer") or platform.processor()
    flags = {*(its.get("flags") or its.get("Features") or "").split()}
    widest = next((name for name, signs in _VECTORS.items() if flags.intersection(signs)), "")
    return " ".join(filter(None, [vendor or platform.machine(), widest]))


def compiler_settings() -> dict[str, Any] | None:
    """Return the settings of torch's compiler that are not its defaults; None before it is loaded.

    A text may be a path, and is there by four hex digits of its digest. What tells a default is
    private: where a torch lacks it, nothing is known.
    """
    found = None
    for module in map(sys.modules.get, ("torch._inductor.config", "torch._dynamo.config")):
        if module is None or not hasattr(module, "_is_default"):
            continue
        found = found or {}
        own = module.__name__.split(".")[1].removeprefix("_")
        for name, value in module.get_config_copy().items():
            # What was changed and put back is not among torch's own defaults.
            is_default = module._is_default(name) or value == module._config[name].default  # noqa: SLF001 - see above
            ours = name == "wrap_inductor_compiled_regions"  # a recording's, which changes no code
            if not is_default and not ours:
                plain = value is None or isinstance(value, int | float)
                found[f"{own}.{name}"] = value if plain else digest_of_text(repr(value))
    return found


PACKAGES = ("torchrepro", "torch", "torch_npu", "numpy", "hydra-core", "omegaconf", "pydantic")
"""Those on which the effect of a profile depends."""

LIBRARIES = (
    *("triton", "torchvision", "torchaudio", "torchdata", "scipy", "scikit-learn", "pandas"),
    *("mkl", "transformers", "tokenizers", "datasets", "accelerate", "peft", "safetensors"),
    *("lightning", "pytorch-lightning", "deepspeed", "megatron-core", "flash-attn", "xformers"),
    *("transformer-engine", "apex", "timm", "bitsandbytes", "cupy-cuda12x", "tensorflow", "jax"),
)
"""Libraries that often take part in computing numbers."""


def software() -> dict[str, Any]:
    """Return what each row of `VERSIONS` reads, as `hardware` does."""
    return read_rows(VERSIONS)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a profile's effect depends on."""
    found = {name: VERSIONS[name]() for name in ("python", *PACKAGES)}
    return {name: its for name, its in found.items() if its is not None}


_installed = cache(installed_version)


def _built_for(name: str) -> Any:
    return getattr(_loaded("torch").version, name, None)


def _nccl() -> str | None:
    # `torch.cuda.nccl.version` raises in a torch without NCCL, so this asks what it asks.
    version = getattr(getattr(_loaded("torch"), "_C", None), "_nccl_version", None)
    if version is None:
        return None
    number = int(version())  # https://github.com/pytorch/pytorch, torch/cuda/nccl.py: three parts
    return f"{number >> 32}.{(number >> 16) & 65535}.{number & 65535}"


def _cann() -> Any:
    if _installed("torch_npu") is None:
        return None
    _loaded("torch_npu")
    version = getattr(getattr(_loaded("torch").npu, "utils", None), "get_cann_version", None)
    return version and version("RUNTIME")


def _first_line_of(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - in /sys
            return file.readline(200).strip()
    except FileNotFoundError:
        return None


def _in_build(pattern: str) -> str | None:
    match = re.search(pattern, _loaded("torch").__config__.show())
    return match and match[1]


VERSIONS: Mapping[str, Callable[[], Any]] = {
    "python": platform.python_version,
    "python implementation": platform.python_implementation,
    **{package: partial(_installed, package) for package in (*PACKAGES, *LIBRARIES)},
    "cuda": partial(_built_for, "cuda"),
    "hip": partial(_built_for, "hip"),
    "torch commit": partial(_built_for, "git_version"),
    "cudnn": lambda: (number := _loaded("torch").backends.cudnn.version()) and str(number),
    "nccl": _nccl,
    "cuda driver": partial(_first_line_of, "/sys/module/nvidia/version"),
    "npu driver": partial(_first_line_of, "/usr/local/Ascend/driver/version.info"),
    "cann": _cann,
    "blas": partial(_in_build, r"BLAS_INFO=([^,\s]+)"),
    "blas of torch": partial(_in_build, r"Math Kernel Library Version ([\w.\-]+)"),
    "onednn": partial(_in_build, r"(?:MKL-DNN|oneDNN) (v[\w.]+)"),
    "blas of numpy": lambda: "{name} {version}".format_map(
        _loaded("numpy").show_config(mode="dicts")["Build Dependencies"]["blas"]
    ),
    "libc": lambda: " ".join(platform.libc_ver()).strip(),
    "kernel": platform.release,
}


TIMEOUT = 2.0  # seconds that git may take for an answer; a manifest is written while a job starts

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
_RUN_NOTHING = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--ignore-submodules")


def commit() -> dict[str, Any]:
    """Return the commit and the number of changed files of the working tree.

    It is that of the program's script, or else of the current folder. Untracked files count as no
    change, because runs write such files. Where git has no answer, the one key is ``unknown``, with
    the reason. git runs once per process and folder. It writes nothing and runs no hook, file
    monitor or external diff (https://git-scm.com/docs/git#_environment_variables).
    """
    return dict(_answer(_status, _folder()))


def repository(folder: str = "") -> dict[str, Any]:
    """Return what `commit` does, and the digest of the changes, and the remotes.

    `folder` takes the place of the program's own.
    """
    return dict(_answer(_changes, folder or _folder()))


def _folder() -> str:
    return source_folder(getattr(sys.modules.get("__main__"), "__file__", None))


def source_folder(script: str | Path | None) -> str:
    """Return the folder whose commit counts for a program that runs `script`, or no script.

    It is the script's, unless the script is installed in this environment, or else the current one.
    """
    if script and not Path(script).absolute().is_relative_to(sys.prefix):
        return str(Path(script).absolute().parent)
    try:
        return str(Path.cwd())
    except OSError:  # the current folder is gone
        return os.sep


@cache
def _answer(ask: Callable[[str], Mapping[str, Any]], folder: str) -> Mapping[str, Any]:
    try:
        return ask(folder)
    except subprocess.TimeoutExpired:
        return {"unknown": f"git took longer than {TIMEOUT:g} s"}
    except FileNotFoundError:
        return {"unknown": "git is not installed"}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", b"") or b""  # never quoted
        if b"not a git repository" in said:
            return {"unknown": "not in a git repository"}
        if b"dubious ownership" in said:
            return {"unknown": "git does not trust the repository: another user owns it"}
        return {"unknown": f"git failed ({type(error).__name__})"}


def _status(folder: str) -> Mapping[str, Any]:
    status = git(folder, *_STATUS).decode(errors="replace").splitlines()
    heads = dict(line[2:].partition(" ")[::2] for line in status if line.startswith("# "))
    changed = sum(not line.startswith("#") for line in status)
    return {"commit": heads.get("branch.oid", ""), "changed_files": changed}


def _changes(folder: str) -> Mapping[str, Any]:
    found = {**_answer(_status, folder)}
    if "unknown" in found:
        return found
    if found["changed_files"]:
        found["changes"] = hashlib.sha256(git(folder, *_DIFF)).hexdigest()[:16]
    lines = git(folder, "remote", "-v").decode(errors="replace").splitlines()
    urls = {line.split("\t")[1].removesuffix(" (fetch)") for line in lines if "(fetch)" in line}
    remotes = []
    for url in urls:
        place = url.rpartition("@")[2]  # as in user@host:path
        hidden = place if ordinary(place) else HIDDEN
        remotes.append(url_without_login(url) if "://" in url else hidden)
    return {**found, "remotes": sorted(remotes)}


def git(
    folder: str | Path,
    *words: str,
    given: bytes = b"",
    timeout: float | None = TIMEOUT,
    variables: Mapping[str, str] | None = None,
) -> bytes:
    """Return what git answers in `folder`, with `given` as its input and `variables` set.

    It runs no hook. Raises `OSError` and `subprocess.SubprocessError`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(  # noqa: S603 - the words are those of this package
        ["git", *_RUN_NOTHING, "-C", str(folder), *words],  # noqa: S607 - the git that the user has
        cwd=os.sep,  # ours may be gone
        env={**environment, **_QUIET, **(variables or {})},
        input=given,
        capture_output=True,
        timeout=timeout,
        check=True,
    ).stdout
