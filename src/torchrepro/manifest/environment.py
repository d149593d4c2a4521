"""Read the hardware, the software and the commit that the results of a run depend on.

Hardware and software are tables. Add a row to record another fact. Reading a row does not import a
library, initialize a device or raise, since a manifest is written at the start of a user's job.
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

UNKNOWN = "unknown: "  # prefix of a value that could not be read; the reason follows


class NotKnownYetError(Exception):
    """The library that reports the fact is not loaded yet, or the device is not in use yet."""


def read_rows(rows: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    facts = {}
    for name, read in rows.items():
        try:
            facts[name] = read()
        except NotKnownYetError:
            continue
        except Exception as error:  # noqa: BLE001 - an unusual machine must not stop the run
            words = str(error).partition("\n")[0]
            facts[name] = f"{UNKNOWN}{type(error).__name__}{f': {words}' if words else ''}"
    return facts


def _loaded(name: str) -> Any:
    module = sys.modules.get(name)
    if module is None:
        raise NotKnownYetError(name)
    return module


def hardware() -> dict[str, Any]:
    """Return the fact of each row of `HARDWARE`. None means that this machine does not have it.

    GPUs are listed as the driver reports them. A fact that only torch reports is missing until the
    program has imported torch. If a row fails, its value is ``unknown: `` and the reason.
    """
    return read_rows(HARDWARE)


_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = "/proc/driver/nvidia/gpus/*/information"
_OTHER_GPUS = "/dev/[dk][xf][gd]"  # dxg is Windows' GPU in WSL, kfd is AMD's driver
_ASCEND = "/dev/davinci[0-9]*"
_ENOUGH = 8192  # characters of cpuinfo, enough for the first CPU
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
    parts = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): fact.strip() for name, _, fact in parts}


def _cpu_model() -> str | None:
    cpu = _first_cpu()
    numbers = " ".join(cpu[name] for name in _OF_ARM if name in cpu)
    return cpu.get("model name") or numbers or platform.processor() or None


def _cpu_features() -> str | None:
    cpu = _first_cpu()
    flags = cpu.get("flags") or cpu.get("Features") or ""
    return " ".join(sorted(filter(_FEATURE.fullmatch, flags.split()))) or None


def _gpus() -> list[str]:
    files = [Path(file) for file in sorted(glob(_NVIDIA))]  # noqa: PTH207 - of a pattern
    named = [re.search(r"Model:\s*(.+)", file.read_text(encoding="utf-8")) for file in files]
    return [match[1].strip() for match in named if match] or _in_use("cuda", _OTHER_GPUS)


def _in_use(backend: str, device_files: str) -> list[str]:
    """Return the names of torch's devices. Raises `NotKnownYetError` before torch uses them."""
    module = getattr(sys.modules.get("torch"), backend, None)
    if module is not None and module.is_initialized():
        return [module.get_device_name(index) for index in range(module.device_count())]
    if glob(device_files):  # noqa: PTH207 - of a pattern
        raise NotKnownYetError(backend)
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
"""Vector extension of a CPU -> the flags that indicate it, the widest first."""


def platform_name() -> str:
    """Return the model of the GPU or NPU, or else the CPU's vendor and vector extension.

    Versions, variables and numbers of threads are not part of the platform, because two runs on
    one platform can differ in them. Imports torch if the driver of a GPU does not report the model.
    """
    for name in ("gpu", "npu"):
        try:
            model = HARDWARE[name]()
        except NotKnownYetError:  # only torch reports it
            module: Any = getattr(import_module("torch"), "cuda" if name == "gpu" else name, None)
            count = module.device_count() if module is not None and module.is_available() else 0
            model = ", ".join(sorted({str(module.get_device_name(at)) for at in range(count)}))
        if model:
            return str(model)
    cpu = _first_cpu()
    vendor = cpu.get("vendor_id") or cpu.get("CPU implementer") or platform.processor()
    flags = {*(cpu.get("flags") or cpu.get("Features") or "").split()}
    widest = next((name for name, signs in _VECTORS.items() if flags.intersection(signs)), "")
    return " ".join(filter(None, [vendor or platform.machine(), widest]))


def compiler_settings() -> dict[str, Any] | None:
    """Return the settings of torch's compiler that differ from the defaults.

    Returns None before the compiler is loaded. A string may be a path, so four hex digits of its
    digest replace it. The defaults are private attributes. If a torch lacks them, returns None.
    """
    settings = None
    for module in map(sys.modules.get, ("torch._inductor.config", "torch._dynamo.config")):
        if module is None or not hasattr(module, "_is_default"):
            continue
        settings = settings or {}
        prefix = module.__name__.split(".")[1].removeprefix("_")
        for name, value in module.get_config_copy().items():
            # `_is_default` is also false for a setting that was changed and restored.
            is_default = module._is_default(name) or value == module._config[name].default  # noqa: SLF001 - see above
            ours = name == "wrap_inductor_compiled_regions"  # a recording sets it; code is the same
            if not is_default and not ours:
                plain = value is None or isinstance(value, int | float)
                settings[f"{prefix}.{name}"] = value if plain else digest_of_text(repr(value))
    return settings


PACKAGES = ("torchrepro", "torch", "torch_npu", "numpy", "hydra-core", "omegaconf", "pydantic")
"""The packages that determine the effect of a profile."""

LIBRARIES = (
    *("triton", "torchvision", "torchaudio", "torchdata", "scipy", "scikit-learn", "pandas"),
    *("mkl", "transformers", "tokenizers", "datasets", "accelerate", "peft", "safetensors"),
    *("lightning", "pytorch-lightning", "deepspeed", "megatron-core", "flash-attn", "xformers"),
    *("transformer-engine", "apex", "timm", "bitsandbytes", "cupy-cuda12x", "tensorflow", "jax"),
)
"""Libraries that often take part in computing results."""


def software() -> dict[str, Any]:
    """Return the fact of each row of `VERSIONS`. For missing facts, see `hardware`."""
    return read_rows(VERSIONS)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the `PACKAGES` that are installed."""
    installed = {name: VERSIONS[name]() for name in ("python", *PACKAGES)}
    return {name: version for name, version in installed.items() if version is not None}


_installed = cache(installed_version)


def _built_for(name: str) -> Any:
    return getattr(_loaded("torch").version, name, None)


def _nccl() -> str | None:
    # `torch.cuda.nccl.version` raises in a torch without NCCL, so this calls the C function.
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


TIMEOUT = 2.0  # seconds for a call of git, since a manifest is written at the start of a job

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
_RUN_NOTHING = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--ignore-submodules")


def commit() -> dict[str, Any]:
    """Return the commit and the number of changed files of the working tree.

    The working tree contains the program's script, or else the current folder. Untracked
    files do not count as changes, because runs write such files. If git fails, the only key is
    ``unknown``, with the reason. git runs once per process and folder. It writes no file, and runs
    no hook, file monitor or external diff (https://git-scm.com/docs/git#_environment_variables).
    """
    return dict(_answer(_status, _folder()))


def repository(folder: str = "") -> dict[str, Any]:
    """Return the keys of `commit`, plus the remotes and a digest of the changes.

    The default folder is the same as in `commit`.
    """
    return dict(_answer(_changes, folder or _folder()))


def _folder() -> str:
    return source_folder(getattr(sys.modules.get("__main__"), "__file__", None))


def source_folder(script: str | Path | None) -> str:
    """Return the folder whose commit is recorded for a program that runs `script`.

    This is the folder of the script. It is the current folder if there is no script, or if the
    script is installed in this environment.
    """
    if script and not Path(script).absolute().is_relative_to(sys.prefix):
        return str(Path(script).absolute().parent)
    try:
        return str(Path.cwd())
    except OSError:  # the current folder was deleted
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
        stderr = getattr(error, "stderr", b"") or b""  # not quoted, as it may contain secrets
        if b"not a git repository" in stderr:
            return {"unknown": "not in a git repository"}
        if b"dubious ownership" in stderr:
            return {"unknown": "git does not trust the repository: another user owns it"}
        return {"unknown": f"git failed ({type(error).__name__})"}


def _status(folder: str) -> Mapping[str, Any]:
    status = git(folder, *_STATUS).decode(errors="replace").splitlines()
    heads = dict(line[2:].partition(" ")[::2] for line in status if line.startswith("# "))
    changed = sum(not line.startswith("#") for line in status)
    return {"commit": heads.get("branch.oid", ""), "changed_files": changed}


def _changes(folder: str) -> Mapping[str, Any]:
    facts = {**_answer(_status, folder)}
    if "unknown" in facts:
        return facts
    if facts["changed_files"]:
        facts["changes"] = hashlib.sha256(git(folder, *_DIFF)).hexdigest()[:16]
    lines = git(folder, "remote", "-v").decode(errors="replace").splitlines()
    urls = {line.split("\t")[1].removesuffix(" (fetch)") for line in lines if "(fetch)" in line}
    remotes = []
    for url in urls:
        if "://" in url:
            remotes.append(url_without_login(url))
            continue
        host_and_path = url.rpartition("@")[2]  # as in user@host:path
        remotes.append(host_and_path if ordinary(host_and_path) else HIDDEN)
    return {**facts, "remotes": sorted(remotes)}


def git(
    folder: str | Path,
    *words: str,
    given: bytes = b"",
    timeout: float | None = TIMEOUT,
    variables: Mapping[str, str] | None = None,
) -> bytes:
    """Run git with the arguments `words` in `folder`, and return the output.

    git reads `given` as input, gets `variables` in the environment, and runs no hook. Raises
    `OSError` or `subprocess.SubprocessError` if git fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(  # noqa: S603 - this package passes only its own words
        ["git", *_RUN_NOTHING, "-C", str(folder), *words],  # noqa: S607 - the user's git on PATH
        cwd=os.sep,  # the current folder may be deleted
        env={**environment, **_QUIET, **(variables or {})},
        input=given,
        capture_output=True,
        timeout=timeout,
        check=True,
    ).stdout
