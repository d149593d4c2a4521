"""Values that are legal one by one and cannot hold together, each pair a row with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.errors import shown
from torchrepro.knobs.catalogue import knobs_by_name, other_names
from torchrepro.policies.fallback.value import waits_for_refusal
from torchrepro.profile.composition import flatten
from torchrepro.profile.resolved import STRICT

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved

REPEATABLE = ("repeatable",)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A guarantee that a value of a key breaks."""

    guarantees: tuple[str, ...]
    key: str
    values: tuple[Any, ...]
    because: str


LOWERED = "float32 is then computed with fewer bits here and not on the other side"

BROKEN_GUARANTEES: tuple[Contradiction, ...] = (
    Contradiction(("aligned",), "backends.cuda.matmul_fp32_precision", ("tf32",), LOWERED),
    Contradiction(("aligned",), "backends.cudnn.conv_fp32_precision", ("tf32",), LOWERED),
    Contradiction(("aligned",), "backends.cudnn.rnn_fp32_precision", ("tf32",), LOWERED),
    Contradiction(("aligned",), "backends.npu.conv_allow_hf32", (True,), LOWERED),
    Contradiction(("aligned",), "backends.npu.matmul_allow_hf32", (True,), LOWERED),
    Contradiction(
        STRICT,
        "backends.cudnn.benchmark",
        (True,),
        "cuDNN then chooses kernels by timing, and another kernel rounds differently",
    ),
    Contradiction(
        REPEATABLE,
        "backends.torch.deterministic_algorithms",
        ("warn", "none"),
        "ops without a deterministic kernel then go on, and warn keeps some that `error` "
        "would replace",
    ),
    Contradiction(
        REPEATABLE,
        "backends.cudnn.deterministic",
        (False,),
        "cuDNN may then take kernels whose sums vary",
    ),
    Contradiction(
        REPEATABLE,
        "backends.torch.inductor_deterministic",
        (False,),
        "compiled code then chooses kernels by timing",
    ),
    Contradiction(
        REPEATABLE,
        "env.TORCHINDUCTOR_DETERMINISTIC",
        ("0",),
        "compiled code then chooses kernels by timing",
    ),
    Contradiction(
        REPEATABLE,
        "env.TORCHINDUCTOR_MAX_AUTOTUNE",
        ("1",),
        "compiled code then chooses kernels by timing",
    ),
    Contradiction(
        REPEATABLE,
        "env.TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
        ("1",),
        "compiled code then chooses kernels by timing",
    ),
    Contradiction(
        STRICT,
        "env.NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        ("1",),
        "Transformer Engine may then take attention kernels whose sums vary",
    ),
    Contradiction(
        STRICT,
        "env.HCCL_DETERMINISTIC",
        ("false",),
        "Ascend's collectives then add up in any order",
    ),
    Contradiction(
        STRICT,
        "env.LCCL_DETERMINISTIC",
        ("0", "false"),
        "the collectives of ATB then add up in any order",
    ),
    Contradiction(
        STRICT,
        "env.PYTHONHASHSEED",
        ("random",),
        "sets of strings then iterate in another order in each process",
    ),
    Contradiction(
        STRICT,
        "backends.npu.deterministic_level",
        (0,),
        "level 0 switches determinism off on the NPU, and torch's own flag with it",
    ),
)


def contradictions(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Return (key, value, reason) for everything in `resolved` that cannot hold together."""
    leaves = flatten(resolved.values)
    found = [
        (key, shown(leaves[key]), f"contradicts guarantee: {resolved.guarantee}; {row.because}")
        for row in BROKEN_GUARANTEES
        for key in leaves
        if resolved.guarantee in row.guarantees
        and row.key in (key, *(knob.name for knob in other_names().get(key, ())))
        and _folded(leaves[key]) in row.values
    ]
    found += _two_names(leaves)
    found += _npu_modes(leaves)
    found += _idle_fallback(leaves)
    return found


def _folded(value: Any) -> Any:
    return value.lower() if isinstance(value, str) and value.isalpha() else value


def _two_names(leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys of `leaves` that name a piece of state which another key names too."""
    found = []
    for key in leaves:
        knob = knobs_by_name().get(key)
        for alias in knob.aliases if knob else ():
            twice_listed = alias in knobs_by_name() and key < alias
            if alias in leaves and (twice_listed or alias not in knobs_by_name()):
                found.append((alias, shown(leaves[alias]), f"is another name of `{key}`; set one"))
    return found


def _idle_fallback(leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the fallback if the profile sees to it that no op ever falls back."""
    fallback = leaves.get("device.fallback")
    algorithms = leaves.get("backends.torch.deterministic_algorithms")
    if fallback is None or algorithms not in ("none", "warn") or not waits_for_refusal(fallback):
        return []
    return [
        (
            "device.fallback",
            shown(fallback),
            f"with deterministic_algorithms: {algorithms} no op raises, and none would fall back",
        )
    ]


def _npu_modes(leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
    level = leaves.get("backends.npu.deterministic_level")
    algorithms = leaves.get("backends.torch.deterministic_algorithms")
    if level is None or algorithms is None or (level > 0) == (algorithms != "none"):
        return []
    return [
        (
            "backends.npu.deterministic_level",
            shown(level),
            f"and deterministic_algorithms: {algorithms} undo each other: the level moves "
            "torch's own flag along",
        )
    ]
