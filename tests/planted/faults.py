"""Faults to plant in a program: each acts once, in the faulty run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .programs import Plant, Training

aten = torch.ops.aten
Alter = Callable[[torch.Tensor], None]


def one_ulp(tensor: torch.Tensor, place: int = 5) -> None:
    """Move one element to the next float, without an op."""
    flat = tensor.detach().numpy().reshape(-1)
    flat[place] = np.nextafter(flat[place], np.float32(np.inf))


def halved(tensor: torch.Tensor) -> None:
    """Halve one element, without an op."""
    tensor.detach().numpy().reshape(-1)[5] /= 2


def another_sign(tensor: torch.Tensor) -> None:
    """Turn the sign of one element, without an op."""
    flat = tensor.detach().numpy().reshape(-1)
    flat[5] = -flat[5]


def zero_of_another_sign(tensor: torch.Tensor) -> None:
    """Turn the sign of one zero, without an op."""
    flat = tensor.detach().numpy().reshape(-1)
    place = int(np.flatnonzero(flat == 0.0)[0])
    flat[place] = -flat[place]


def permuted(tensor: torch.Tensor) -> None:
    """Swap two unequal elements, without an op."""
    flat = tensor.detach().numpy().reshape(-1)
    one, other = np.unique(flat, return_index=True)[1][:2]
    flat[[one, other]] = flat[[other, one]]


def swapped_rows(tensor: torch.Tensor, first: int = 0) -> None:
    """Swap two unequal rows, without an op."""
    rows = tensor.detach().numpy()
    assert (rows[first] != rows[first + 1]).any()
    rows[[first, first + 1]] = rows[[first + 1, first]]


def _gelu(hidden: Any, *, approximate: str = "none") -> Any:
    return aten.gelu.out(hidden, approximate=approximate, out=torch.empty_like(hidden))


def _gelu_backward(gradient: Any, hidden: Any, *, approximate: str = "none") -> Any:
    result = torch.empty_like(hidden)
    return aten.gelu_backward.grad_input(
        gradient, hidden, approximate=approximate, grad_input=result
    )


def _mean(items: Any, dim: Any, keepdim: Any = False, *, dtype: Any = None) -> Any:
    result = aten.sum.dim_IntList(items, dim, keepdim, dtype=dtype)
    return result.div_(items.numel() // result.numel())


def _threshold_backward(gradient: Any, hidden: Any, threshold: Any) -> Any:
    result = torch.empty_like(hidden)
    return aten.threshold_backward.grad_input(gradient, hidden, threshold, grad_input=result)


def _relu(hidden: Any) -> Any:
    return aten.clamp_min.out(hidden, 0, out=torch.empty_like(hidden))


def _foreach_addcdiv(tensors: Any, numbers: Any, others: Any, scalars: Any) -> None:
    for tensor, number, other, value in zip(tensors, numbers, others, scalars, strict=True):
        tensor.addcdiv_(number, other, value=value)


KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "gelu": ("CPU", _gelu),
    "gelu_backward": ("CPU", _gelu_backward),
    "mean.dim": ("CPU", _mean),
    "relu": ("CPU", _relu),
    "threshold_backward": ("CPU", _threshold_backward),
    "_foreach_addcdiv_.ScalarList": ("CPU", _foreach_addcdiv),
}
"""Op -> a kernel of our own for it, which computes what the op's own does, by other ops."""


def kernel(op: str, step: int, call: int, alter: Alter) -> Plant:
    """Return a fault: a kernel changes its output in one call of one step."""

    @contextmanager
    def plant(training: Training) -> Iterator[None]:
        key, computed = KERNELS[op]

        def altered(*args: Any, **kwargs: Any) -> Any:
            result = computed(*args, **kwargs)
            if training.harmful and (training.step, training.call) == (step, call):
                alter(args[0][1] if isinstance(args[0], tuple | list) else result)
            training.call += 1
            return result

        library = torch.library.Library("aten", "IMPL")
        library.impl(op, altered, key)
        try:
            yield
        finally:
            library._destroy()

    return plant


def in_memory(find: Callable[[Training], torch.Tensor], step: int, alter: Alter) -> Plant:
    """Return a fault: something outside torch writes to memory before a step."""
    return changed(lambda training: alter(find(training)), step)


def changed(change: Callable[[Training], object], step: int) -> Plant:
    """Return a fault: an attribute has a different value from a step on."""

    @contextmanager
    def plant(training: Training) -> Iterator[None]:
        training.before_step = lambda now: (
            change(training) if training.harmful and now == step else None
        )
        yield

    return plant


def in_batch(part: int | None, step: int, alter: Alter) -> Plant:
    """Return a fault: a batch is changed on its way to the model."""

    @contextmanager
    def plant(training: Training) -> Iterator[None]:
        def door(now: int, batch: Any) -> Any:
            if training.harmful and now == step:
                alter(batch if part is None else batch[part])
            return batch

        training.batch = door
        yield

    return plant


def in_dataset(first: int) -> Plant:
    """Return a fault: two samples of the dataset are swapped."""

    @contextmanager
    def plant(training: Training) -> Iterator[None]:
        if training.harmful:
            swapped_rows(training.data.tensors[0], first)
        yield

    return plant


def before_module(name: str, step: int, alter: Alter) -> Plant:
    """Return a fault: an input of a module is changed, without an additional op."""

    @contextmanager
    def plant(training: Training) -> Iterator[None]:
        def hook(_module: Any, args: Any) -> None:
            if training.harmful and training.step == step:
                alter(args[0])

        with training.model.get_submodule(name).register_forward_pre_hook(hook):
            yield

    return plant
