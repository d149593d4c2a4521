"""What a cause is, and the settings that help against more than one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.verdict.case import Case

ANY_VALUE = ("*",)


@dataclass(frozen=True, slots=True)
class Fix:
    """A key of a profile and the value that helps."""

    key: str
    value: str
    """As an override writes it: a word that YAML takes for a boolean is in quotes."""

    enough: tuple[str, ...] = ()
    """Other values that are as good."""

    def is_met_by(self, value: str | None, *otherwise: str) -> bool:
        """Whether `value` is the one that helps, or as good, or one of `otherwise`."""
        if value is None:
            return False
        return self.enough == ANY_VALUE or value in (self.value, *self.enough, *otherwise)


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason for two runs to part."""

    because: str
    """The sentence; ``{op}``, ``{module}``, ``{thread}``, ``{settings}``, ``{instead}``."""

    kinds: tuple[Kind, ...] = tuple(Kind)
    fits: Callable[[Case], bool] = lambda case: True
    fixes: tuple[Fix, ...] = ()
    """What helps, the first to try first; one that is in force already is passed over."""

    alike: tuple[str, ...] = ()
    """Patterns of knobs: the row fits only if the runs differ in one, and a common value helps."""

    closer: bool = True
    """Whether recording the steps around it in full would show more."""


SEED = Fix("seed", "1234", ANY_VALUE)
LOADER = Fix("dataloader.seeding", "auto")
NO_WORKERS = Fix("dataloader.num_workers", "0")
HASHES = Fix("env.PYTHONHASHSEED", "0", tuple(map(str, range(1, 10))))
NO_DROPOUT = Fix("dropout", "zero")
HOST = Fix("device.rng", "host")
DETERMINISTIC = Fix("backends.torch.deterministic_algorithms", "error")
ON_CPU = Fix("device.fallback", "cpu")
FILLED = Fix("backends.torch.fill_uninitialized_memory", "true")
COMPILED = Fix("backends.torch.inductor_deterministic", "true")
ONE_THREAD = Fix("env.OMP_NUM_THREADS", "1", ANY_VALUE)
MKL_PATH = Fix("env.MKL_CBWR", "COMPATIBLE", ANY_VALUE)

PRECISION = (
    *("*fp32_precision", "*hf32", "*cube_math_type", "*reduced_precision_reduction"),
    *("*fp16_accumulation", "*TF32*", "*FPMATH_MODE", "*float32_matmul_precision"),
)
CPU_PATH = ("*num_threads", "*NUM_THREADS", "*_DYNAMIC", "*MKL_CBWR", "*ATEN_CPU_CAPABILITY")
RANDOM_NUMBERS = ("seed", "seed.*", "streams", "ranks", "dataloader.*", "env.PYTHONHASHSEED")
PATHS = (
    *(*RANDOM_NUMBERS, "dropout", "device.*", "backends.torch.*", "*enabled", "*_sdp"),
    *("env.TORCHINDUCTOR_*", "env.NVTE_*"),
)
PROGRAM = (Kind.ARGUMENT, Kind.ONLY_ONE)
COARSE = ("parameter", "gradient", "module", "parameters", "gradients", "loss")
"""What recordings of a level above ops hold in their place."""

COMPUTED = (Kind.OUTPUTS,)
