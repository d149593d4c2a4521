"""Programs that compute the same bits in every run, but might look nondeterministic."""

import contextlib
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from typing import Any

from . import reproducible_loading, reproducible_tensors, reproducible_training
from .programs import Training, conv_net, transformer
from .small_models import Tensors


def _of(program: Callable[..., Any]) -> Tensors:
    """Run a program of the planted faults without a fault; return its model's parameters."""
    seen: list[Training] = []

    @contextlib.contextmanager
    def nothing(training: Training):
        seen.append(training)
        yield

    program(nothing, False)
    return [*seen[0].model.parameters(), *seen[0].model.buffers()]


PROGRAMS: dict[str, Callable[[], Tensors]] = {
    "transformer, AdamW foreach": partial(_of, transformer("foreach")),
    "transformer, AdamW fused": partial(_of, transformer("fused")),
    "convolutions, SGD": partial(_of, conv_net(foreach=False)),
    "convolutions, SGD foreach": partial(_of, conv_net(foreach=True)),
} | {
    name.replace("_", " "): program
    for module in (reproducible_training, reproducible_tensors, reproducible_loading)
    for name, program in vars(module).items()
    if isfunction(program) and program.__module__ == module.__name__ and name[0] != "_"
}
"""By name: every public function of these modules is a program."""
