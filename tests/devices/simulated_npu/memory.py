"""Tensors of the device share the memory of the host; only the name of the device differs."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

DEVICE = "npu"
HOST_KIND = 1  # kDLCPU, https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h
DEVICE_KIND = 12  # kDLExtDev, which torch takes for its private-use device

_open_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_open_capsule.restype = ctypes.c_void_p
_open_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _Place(ctypes.Structure):
    """The first fields of every DLTensor: the address of its memory, and its device."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("index", ctypes.c_int32),
    )


def _renamed(tensor: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    capsule = to_dlpack(tensor)
    place = _Place.from_address(_open_capsule(capsule, b"dltensor"))
    place.kind, place.index = kind, index
    return from_dlpack(capsule)


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return _renamed(tensor, DEVICE_KIND, index)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    host = _renamed(tensor, HOST_KIND, 0)
    host = host.conj() if tensor.is_conj() else host  # DLPack knows no such views
    return torch._neg_view(host) if tensor.is_neg() else host


def is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def on_cpu_kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a function that runs the CPU kernel of `op`, below all other dispatch keys."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for_tensors = [str(argument.type) == "Tensor" for argument in op._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        # The number in `x + 1` is a tensor to C++ and a plain number here; only `op` turns it back.
        if any(map(_is_number_for_tensor, for_tensors, args)):
            return op(*args, **kwargs)
        return op.redispatch(keys, *args, **kwargs)

    return call


def _is_number_for_tensor(for_tensor: bool, value: Any) -> bool:
    return for_tensor and isinstance(value, int | float | complex)


def give_memory(tensor: torch.Tensor, host: torch.Tensor) -> None:
    source = on_device(host, tensor.device.index)
    set_ = on_cpu_kernel(torch.ops.aten.set_.source_Storage_storage_offset)
    set_(tensor, source.untyped_storage(), 0, source.shape, source.stride())
