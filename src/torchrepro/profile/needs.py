"""The needs of each guarantee: one row per knob, with the devices where the need applies.

A profile with a value that contradicts its guarantee is refused. If a need is not met in a run,
the report lowers the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torchrepro.knobs.variables import ENOUGH
from torchrepro.profile.resolved import STRICT

ALL = ("seeded", *STRICT)

WEAKER = {"aligned": ("repeatable", "seeded"), "repeatable": ("seeded",), "seeded": ()}
"""Guarantee -> the weaker guarantees that may still be satisfied, the strongest first."""


class Need(NamedTuple):
    """A knob, the values that some guarantees require, and the values that break a guarantee."""

    guarantees: tuple[str, ...]
    knob: str
    met_by: Callable[[Any], bool] | None = None  # None: any value that is not in `broken_by`
    left_open: str = ""  # the results that may differ between two runs if the need is not met
    kinds: tuple[str, ...] = ()  # the need applies only if all of these are present
    broken_by: tuple[Any, ...] = ()  # the values that contradict the guarantee
    because: str = ""  # the consequence of a value in `broken_by`
    if_there: bool = False  # whether the need counts as met if torch lacks the knob
    calls: tuple[str, ...] = ()  # functions that a program can call to meet the need itself


_repeatable = partial(Need, ("repeatable",))
_aligned = partial(Need, ("aligned",))
_strict = partial(Need, STRICT)


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: folded(value) in values


def folded(value: Any) -> Any:
    """Return `value`, in lower case if it is a word, for comparisons that ignore case."""
    return value.lower() if isinstance(value, str) and value.isalpha() else value


SEED_TORCH = ("torch.manual_seed", "torch.random.manual_seed")
TIMING = "compiled code then chooses kernels by timing"

_ON, _OFF = _is(True), _is(False)  # noqa: FBT003 - values that meet a need
_IN_FULL = _is("ieee", "none")  # torch reduces precision only for tf32 and bf16


def _seed(generator: str, left_open: str, device: str, *calls: str) -> Need:
    devices = (device,) if device else ()
    return Need(ALL, f"seed.{generator}", lambda _: True, left_open, devices, calls=calls)


def _precision(
    knob: str,
    ops: str,
    device: str,
    met_by: Callable[[Any], bool] = _IN_FULL,
    lower: Any = None,
    **fields: Any,
) -> Need:
    if lower is not None:
        because = "float32 then has fewer bits on this device than on the device compared with"
        fields = {"broken_by": (lower,), "because": because}
    left_open = f"the precision of {ops}"
    return _aligned(f"backends.{knob}", met_by, left_open, (device,), **fields)


NEEDS: tuple[Need, ...] = (
    _seed("python", "Python's random numbers", "", "random.seed"),
    _seed("numpy", "numpy's random numbers", "numpy", "numpy.random.seed"),
    _seed("torch", "torch's random numbers", "", *SEED_TORCH),
    *(
        _seed(
            device,
            f"the random numbers of {device.replace('cuda', 'gpu').upper()}s",
            device,
            *(*SEED_TORCH, f"torch.{device}.manual_seed", f"torch.{device}.manual_seed_all"),
        )
        for device in ("cuda", "npu")
    ),
    _strict(
        "env.PYTHONHASHSEED",
        str.isdecimal,
        "the order of sets",
        broken_by=("random",),
        because="sets of strings then iterate in another order in each process",
    ),
    _repeatable(
        "backends.torch.deterministic_algorithms",
        _is("error"),
        "ops without a deterministic kernel",
        broken_by=("warn", "none"),
        because="ops without a deterministic kernel then run, and with warn also some that `error` "
        "would replace",
    ),
    _repeatable(
        "backends.torch.fill_uninitialized_memory",
        _ON,
        "the contents of uninitialized memory",
        if_there=True,
    ),
    _repeatable(
        "backends.torch.inductor_deterministic",
        _ON,
        "the kernels of compiled code",
        broken_by=(False,),
        because=TIMING,
    ),
    _repeatable("env.TORCHINDUCTOR_DETERMINISTIC", broken_by=("0",), because=TIMING),
    *(
        _repeatable(f"env.TORCHINDUCTOR_{option}", broken_by=("1",), because=TIMING)
        for option in ("MAX_AUTOTUNE", "COORDINATE_DESCENT_TUNING")
    ),
    _repeatable(
        "backends.cpu.mkldnn_deterministic",
        _ON,
        "oneDNN's primitives on the CPU",
        ("onednn",),
        if_there=True,
    ),
    _repeatable(
        "env.CUBLAS_WORKSPACE_CONFIG",
        ENOUGH["of_fixed_size"],
        "the sums of cuBLAS",
        ("cuda",),
    ),
    _strict(
        "backends.cudnn.benchmark",
        _OFF,
        "the kernels that cuDNN chooses",
        ("cuda",),
        broken_by=(True,),
        because="cuDNN then chooses kernels by timing, and another kernel rounds differently",
    ),
    _repeatable(
        "backends.cudnn.deterministic",
        _ON,
        "the sums of cuDNN",
        ("cuda",),
        broken_by=(False,),
        because="cuDNN may then choose kernels whose sums vary",
    ),
    _strict(
        "env.NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        _is("0"),
        "Transformer Engine's attention",
        ("transformer_engine", "cuda"),
        broken_by=("1",),
        because="Transformer Engine may then choose attention kernels whose sums vary",
    ),
    *(
        _repeatable(
            f"env.{name}",
            ENOUGH["pinned"],
            "the sums of NCCL's collectives",
            ("cuda", "several"),
        )
        for name in ("NCCL_ALGO", "NCCL_PROTO")
    ),
    _strict(
        "env.HCCL_DETERMINISTIC",
        ENOUGH["in_fixed_order"],
        "the sums of HCCL's collectives",
        ("npu", "several"),
        broken_by=("false",),
        because="Ascend's collectives then add up in any order",
    ),
    _strict(
        "env.LCCL_DETERMINISTIC",
        ENOUGH["switched_on"],
        "the sums of ATB's collectives",
        ("npu", "several"),
        broken_by=("0", "false"),
        because="the collectives of ATB then add up in any order",
    ),
    _repeatable(
        "env.CLOSE_MATMUL_K_SHIFT",
        _is("1"),
        "the sums of the NPU's matrix products",
        ("npu",),
    ),
    _repeatable(
        "env.ATB_MATMUL_SHUFFLE_K_ENABLE",
        _is("0"),
        "the sums of ATB's matrix products",
        ("npu",),
    ),
    _repeatable(
        "backends.npu.jit_compile",
        _OFF,
        "ops that the NPU compiles when first called",
        ("npu",),
        if_there=True,
    ),
    _strict(
        "backends.npu.deterministic_level",
        broken_by=(0,),
        because="level 0 switches determinism off on the NPU, and torch's own flag with it",
    ),
    _aligned("dropout", _is("zero"), "the masks of dropout"),
    _aligned("device.rng", _is("host"), "random numbers drawn on GPUs", ("cuda",)),
    _aligned("device.rng", _is("host"), "random numbers drawn on NPUs", ("npu",)),
    _precision("cuda.matmul_fp32_precision", "CUDA's matrix products", "cuda", lower="tf32"),
    _precision("cudnn.conv_fp32_precision", "cuDNN's convolutions", "cuda", lower="tf32"),
    _precision("cudnn.rnn_fp32_precision", "cuDNN's recurrent layers", "cuda", lower="tf32"),
    *(
        _aligned(
            f"backends.cuda.allow_{dtype}_reduced_precision_reduction",
            _OFF,
            f"the precision of {dtype} sums on CUDA",
            ("cuda",),
        )
        for dtype in ("fp16", "bf16")
    ),
    _precision("npu.conv_allow_hf32", "the NPU's convolutions", "npu", _OFF, lower=True),
    _precision("npu.matmul_allow_hf32", "the NPU's matrix products", "npu", _OFF, lower=True),
    *(
        _precision(
            f"cpu.mkldnn_{operation}_fp32_precision",
            f"oneDNN's {operation} on the CPU",
            "onednn",
            if_there=True,
        )
        for operation in ("matmul", "conv", "rnn")
    ),
)
"""Add a row for another need of a guarantee."""
