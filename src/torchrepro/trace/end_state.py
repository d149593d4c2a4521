"""What a program still holds as its recording ends: parameters, buffers, and optimizers.

What is written from outside torch, or to an optimizer after its last step, shows in no op.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrepro.trace.buffer import joined
from torchrepro.trace.fingerprint_cache import fingerprint_of
from torchrepro.trace.format import ARGUMENTS, OTHERS, OUTPUT
from torchrepro.trace.levels import arguments_of
from torchrepro.trace.op_facts import value_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchrepro.trace.buffer import RecordingState

    Held = Iterator[tuple[str, str, Any]]

PARAMETERS, BUFFERS, OPTIMIZERS = "parameters", "buffers", "optimizers"

MOST = 500
"""Values of one kind that have a digest each; the others have one together."""


def end_state(
    state: RecordingState, optimizers: Iterable[Any], *, knows_ops: bool
) -> dict[str, dict[str, str]]:
    """Return a digest of each value that is left, by its kind and name; waits for devices.

    Left out is memory that nothing has written. Which memory that is only ops tell: without them
    (`knows_ops`) buffers are those that a checkpoint would hold of a model that is trained.
    """
    living = list(optimizers)
    held = [each for at, one in enumerate(living) for each in _of_optimizer(at, one)]
    held += _of_modules(state) if knows_ops else _buffers_of_trained(living)
    tensors = [each for each in held if isinstance(each[2], torch.Tensor)]
    tensors = [each for each in tensors if not state.cache.is_never_written(each[2])]
    marks = joined([fingerprint_of(tensor) for _, _, tensor in tensors], OUTPUT)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, name, value in held:
        if not isinstance(value, torch.Tensor):
            found[kind][name] = xxhash.xxh3_64_hexdigest(value_text(value).encode())
    for number, (kind, name, _) in enumerate(tensors):
        found[kind][name] = marks[number * OUTPUT : (number + 1) * OUTPUT].hex()[:OUTPUT]
    for its in found.values():
        others = [its.pop(name) for name in [*its][MOST:]]
        if others:
            its[OTHERS] = xxhash.xxh3_64_hexdigest("".join(others).encode())
    return dict(found)


def _of_modules(state: RecordingState) -> Held:
    for path, module in state.names.living():
        for kind, values in (
            (PARAMETERS, module.named_parameters(recurse=False)),
            (BUFFERS, module.named_buffers(recurse=False)),
        ):
            for name, value in values:
                yield kind, f"{path}.{name}", value


def _buffers_of_trained(optimizers: Iterable[Any]) -> Held:
    """Find models by what the program still holds, as nothing has followed their calls."""
    places: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            places.setdefault(id(parameter), len(places))
    # `isinstance` would ask objects of the program for their `__class__`, and wake lazy ones.
    every = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    built = [each for each in every if "_modules" in vars(each)]  # its `__init__` was called
    inner = {id(child) for module in built for child in module.children()}
    roots = [
        (min((places[id(its)] for its in root.parameters() if id(its) in places), default=-1), root)
        for root in built
        if id(root) not in inner
    ]
    trained = sorted(((at, root) for at, root in roots if at >= 0), key=lambda pair: pair[0])
    for number, (_, root) in enumerate(trained):
        for path, module in root.named_modules():
            # No public API says which buffers are left out of a checkpoint. Without this name
            # all are compared, those whose memory nothing has written as well.
            left_out = getattr(module, "_non_persistent_buffers_set", ())
            for name, value in module.named_buffers(recurse=False):
                if name not in left_out:
                    own = f"{path}.{name}" if path else name
                    yield BUFFERS, f"{own} of model {number}" if number else own, value


def _of_optimizer(number: int, optimizer: Any) -> Held:
    kind = type(optimizer).__name__
    own = f"{kind} {number}" if number else kind
    arguments, _ = arguments_of(optimizer)
    yield OPTIMIZERS, f"{ARGUMENTS}{own}", arguments
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for place, parameter in enumerate(parameters):
        yield PARAMETERS, f"parameter {place} of {own}", parameter
        its = optimizer.state.get(parameter, {})
        if isinstance(its, dict):
            for name, value in its.items():
                yield OPTIMIZERS, f"{name} of parameter {place} of {own}", value
