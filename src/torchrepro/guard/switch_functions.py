"""The functions by which frameworks switch determinism on or off, with what users call them.

Nothing depends on a row but the name. What a switch writes is judged as any other write is.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class SwitchFunction(NamedTuple):
    """One function of a framework that switches determinism on or off."""

    module: str
    function: str
    name: str
    """What its users call it."""

    variables: Mapping[str, str] = {}
    """What it sets in the environment, where that tells it from others."""


_FULL_DETERMINISM = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
}
_HUGGING_FACE = "transformers.trainer_utils"
_LIGHTNING = "trainer.connectors.accelerator_connector"
_RAY_TRAIN = "train_loop_utils"

SWITCH_FUNCTIONS = (
    SwitchFunction(
        _HUGGING_FACE,
        "enable_full_determinism",
        "transformers' enable_full_determinism",
        _FULL_DETERMINISM,
    ),
    SwitchFunction(_HUGGING_FACE, "set_seed", "transformers' set_seed(deterministic)"),
    SwitchFunction("accelerate.utils.random", "set_seed", "accelerate's set_seed(deterministic)"),
    *(
        SwitchFunction(module, "_set_torch_flags", "Lightning's Trainer(deterministic)")
        for module in (f"lightning.pytorch.{_LIGHTNING}", f"pytorch_lightning.{_LIGHTNING}")
    ),
    *(
        SwitchFunction(module, "enable_reproducibility", "Ray Train's enable_reproducibility")
        for module in (f"ray.train.torch.{_RAY_TRAIN}", f"ray.train.v2.torch.{_RAY_TRAIN}")
    ),
)
"""What a framework's switch is further is a further row."""

_NAMES = {(row.module, row.function): row.name for row in SWITCH_FUNCTIONS}


def switch_of(module: object, function: str) -> str:
    """Return the name of the switch that this function is, or an empty string."""
    return _NAMES.get((str(module), function), "")


def switch_that_writes(variable: str, text: str) -> str:
    """Return the switch all of whose variables now read as it sets them, or an empty string.

    Its module is loaded, and `variable` with this `text` is among them.
    """
    for row in SWITCH_FUNCTIONS:
        as_set = (os.environ.get(name) == its for name, its in row.variables.items())
        if row.variables.get(variable) == text and row.module in sys.modules and all(as_set):
            return row.name
    return ""
