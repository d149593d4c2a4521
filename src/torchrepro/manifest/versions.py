"""The versions of all software that numbers depend on: one row each, and how it is read."""

from __future__ import annotations

import platform
import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torchrepro.imports import installed_version
from torchrepro.manifest.rows import loaded, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PACKAGES = ("torchrepro", "torch", "torch_npu", "numpy", "hydra-core", "omegaconf", "pydantic")
"""Those on which the effect of a profile depends."""

LIBRARIES = (
    *("triton", "torchvision", "torchaudio", "torchdata", "scipy", "scikit-learn", "pandas"),
    *("mkl", "transformers", "tokenizers", "datasets", "accelerate", "peft", "safetensors"),
    *("lightning", "pytorch-lightning", "deepspeed", "megatron-core", "flash-attn", "xformers"),
    *("transformer-engine", "apex", "timm", "bitsandbytes", "cupy-cuda12x", "tensorflow", "jax"),
)
"""Libraries that often take part in computing numbers."""


_installed = cache(installed_version)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a profile's effect depends on."""
    found = {name: ROWS[name]() for name in ("python", *PACKAGES)}
    return {name: its for name, its in found.items() if its is not None}


def software() -> dict[str, Any]:
    """Return the version of everything in `ROWS` by its name, null where it is not installed.

    Imports nothing and initialises no device: what only a library can tell is left out until the
    program has loaded it. Reading goes as `read_rows` says.
    """
    return read_rows(ROWS)


def _built_for(name: str) -> Any:
    return getattr(loaded("torch").version, name, None)


def _cudnn() -> Any:
    number = loaded("torch").backends.cudnn.version()
    return number and str(number)


def _nccl() -> str | None:
    """Return the version of the NCCL that torch runs with.

    Private (``_nccl_version``), because the public `torch.cuda.nccl.version` is not there in a
    torch without NCCL and says so by an AttributeError; where it is gone there is no answer.
    """
    ask = getattr(getattr(loaded("torch"), "_C", None), "_nccl_version", None)
    if ask is None:
        return None
    number = int(ask())  # https://github.com/pytorch/pytorch, torch/cuda/nccl.py: three parts
    return f"{number >> 32}.{(number >> 16) & 65535}.{number & 65535}"


def _cann() -> Any:
    if _installed("torch_npu") is None:
        return None
    loaded("torch_npu")
    ask = getattr(getattr(loaded("torch").npu, "utils", None), "get_cann_version", None)
    return ask and ask("RUNTIME")


def _first_line_of(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - in /sys
            return file.readline(200).strip()
    except FileNotFoundError:
        return None


def _in_build(pattern: str) -> str | None:
    """Return what `pattern` finds in what torch says of its build."""
    match = re.search(pattern, loaded("torch").__config__.show())
    return match and match[1]


def _numpy_blas() -> str:
    blas = loaded("numpy").show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


ROWS: Mapping[str, Callable[[], Any]] = {
    "python": platform.python_version,
    "python implementation": platform.python_implementation,
    **{package: partial(_installed, package) for package in (*PACKAGES, *LIBRARIES)},
    "cuda": partial(_built_for, "cuda"),
    "hip": partial(_built_for, "hip"),
    "torch commit": partial(_built_for, "git_version"),
    "cudnn": _cudnn,
    "nccl": _nccl,
    "cuda driver": partial(_first_line_of, "/sys/module/nvidia/version"),
    "npu driver": partial(_first_line_of, "/usr/local/Ascend/driver/version.info"),
    "cann": _cann,
    "blas": partial(_in_build, r"BLAS_INFO=([^,\s]+)"),
    "blas of torch": partial(_in_build, r"Math Kernel Library Version ([\w.\-]+)"),
    "onednn": partial(_in_build, r"(?:MKL-DNN|oneDNN) (v[\w.]+)"),
    "blas of numpy": _numpy_blas,
    "libc": lambda: " ".join(platform.libc_ver()).strip(),
    "kernel": platform.release,
}
"""Name -> how it is read; a further piece of software is a further row."""
