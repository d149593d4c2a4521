"""Numbers where an op takes a tensor, as in ``x * 2``, made tensors again.

Torch hands such a number to C++ as a tensor that does not take part in type promotion
(https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc), and to a function
in Python as a plain number, which the kernels then refuse.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def with_tensors(op: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    """Return `around`, a function in front of the overload `op`, with tensors where `op` has them.

    A number is given the type that makes the result what torch's own promotion makes it.
    """
    schema = op._schema.arguments  # noqa: SLF001 - a schema has no public reader
    places = [place for place, argument in enumerate(schema) if str(argument.type) == "Tensor"]
    if len(places) < 2:  # noqa: PLR2004 - a number stands beside a tensor
        return around

    @wraps(around)
    def changed(proceed: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        found = [args[place] for place in places if place < len(args)]
        if any(isinstance(value, int | float | complex) for value in found):
            tensors = [value for value in found if hasattr(value, "dtype")]
            args = tuple(
                _tensor(value, tensors) if place in places else value
                for place, value in enumerate(args)
            )
        return around(proceed, *args, **kwargs)

    return changed


def _tensor(value: Any, tensors: list[Any]) -> Any:
    """Return the number `value`, which stands beside `tensors`, as one; anything else as it is."""
    if not isinstance(value, int | float | complex):
        return value
    torch = import_module("torch")
    wide = torch.tensor(value, dtype=_widest(torch)[type(value)])
    if not tensors:
        return wide
    beside = max(tensors, key=lambda tensor: bool(tensor.dim()))
    together = torch.result_type(beside, value)
    return wide if together == beside.dtype and beside.dim() else wide.to(together)


def _widest(torch: Any) -> dict[type, Any]:
    return {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
