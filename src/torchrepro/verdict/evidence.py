"""What is known of a divergence: the facts that the rules of diagnosis test.

Names are those of `torch.ops.aten` without overload. Which ops draw is what torch tags as
`nondeterministic_seeded` (https://docs.pytorch.org/docs/stable/torch.compiler_ir.html).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.seeding.uncontrolled import SUSPECTS, THREADS
from torchrepro.trace.format import PARTLY, UNINITIALISED
from torchrepro.verdict.value import UNKNOWN_PROGRAM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.trace.format import Site
    from torchrepro.verdict.value import (
        Divergence,
        Loader,
        Program,
        Setting,
        Side,
        UncontrolledRead,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


DROPPING = _names(
    "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_"
    " feature_alpha_dropout feature_alpha_dropout_ native_dropout _fused_dropout"
    " _cudnn_init_dropout_state _fill_mem_eff_dropout_mask_ rrelu rrelu_ rrelu_with_noise"
    " rrelu_with_noise_ rrelu_with_noise_functional"
)
"""Ops that drop or vary a slope. `dropout: zero` turns them off."""

MASKING = frozenset({"bernoulli", "bernoulli_"})
"""Ops that draw masks. Dropout on the CPU is one of them and a product."""

DRAWING = _names(
    "_sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy cauchy_ exponential"
    " exponential_ geometric geometric_ log_normal log_normal_ multinomial normal normal_"
    " normal_functional poisson rand rand_like randint randint_like randn randn_like random"
    " random_ randperm uniform uniform_ philox_rand"
)
"""Ops whose result is random numbers."""

DROPPING_INSIDE = _names(
    "_cudnn_attention_backward _cudnn_attention_forward _cudnn_rnn _efficient_attention_forward"
    " _flash_attention_forward _flash_attention_forward_no_dropout_inplace _fused_sdp_choice"
    " _lstm_mps _nested_tensor_softmax_with_shape _scaled_dot_product_attention_math"
    " _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention"
    " _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention"
    " scaled_dot_product_attention gru lstm miopen_rnn rnn_relu rnn_tanh"
)
"""Larger kernels that drop only if they are given a probability."""

FIXED_BY_THE_FLAG = _names(
    "index_add index_add_ index_copy index_copy_ index_put index_put_ _index_put_impl_"
    " _unsafe_index_put repeat_interleave"
)
"""Ops that write in the order of their threads unless torch's deterministic flag is on.

https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
"""

MATMUL = re.compile(
    r"_?(mm|addmm|addmm_activation|bmm|baddbmm|addbmm|mv|addmv|addr|dot|vdot|matmul|linear|einsum"
    r"|scaled_mm|int_mm|addmm_relu|mkl_linear|tensordot|linear_pointwise|linalg_\w+)_?"
)
CONVOLUTION = re.compile(r"\w*conv\w*")
RECURRENT = re.compile(r"\w*(rnn|lstm|gru)\w*")
ATTENTION = re.compile(r"\w*(attention|sdp)\w*")
REDUCTION = re.compile(
    r"(nan)?(sum|mean)(_to_size)?|prod|var|std|var_mean|std_mean|norm|dist|trace|logsumexp|cumsum_?"
    r"|cumprod_?|_?foreach_norm|linalg_vector_norm|\w*softmax\w*|\w*(layer|batch|group|rms)_norm\w*"
    r"|\w*_loss\w*|\w*avg_pool\w*|\w*upsample\w*|\w*cdist\w*|_embedding_bag\w*"
)
SUMMING = re.compile(
    "|".join(
        f"(?:{family.pattern})" for family in (MATMUL, CONVOLUTION, RECURRENT, ATTENTION, REDUCTION)
    )
)
"""Ops whose result depends on the order in which they add."""

OVERWRITING = _names("copy_ fill_ zero_ set_ resize_")
"""Ops that may be given unwritten memory, because they do not read it."""


def short(where: str) -> str:
    """Return ``file:line`` without the folders: the same program may run in another one."""
    return where.replace("\\", "/").rpartition("/")[2]


def op_name(op: str) -> str:
    """Return the name of an op without namespace and overload, as in ``add``."""
    return op.rpartition("::")[2].partition(".")[0]


LOADER, WORKERS, DROPOUT, RANDOM_OPS = "loader", "loader workers", "dropout", "random ops"
FEATURES: Mapping[str, Callable[[Site], bool]] = {
    LOADER: lambda site: site.op == "DataLoader",
    DROPOUT: lambda site: op_name(site.op) in DROPPING | MASKING | DROPPING_INSIDE,
    RANDOM_OPS: lambda site: op_name(site.op) in DRAWING | DROPPING | DROPPING_INSIDE,
    "collectives": lambda site: site.phase == "collective",
}
"""What a program may use, and how the records of its ops show it. `WORKERS` are known from what
the trace says of loaders."""

DEVICE = "device"
DEVICES = (DEVICE, "cuda", "npu")
"""Any accelerator, and the types of them that settings are about."""


def uses(program: Program, feature: str) -> bool:
    """Whether a program uses a feature, or may; an empty name stands for what all have."""
    if feature in DEVICES:
        return feature == program.accelerator or (feature == DEVICE and bool(program.accelerator))
    return not feature or program.features is None or feature in program.features


MAIN_THREADS = ("", "MainThread", "main")
PROGRAM_TEXT, RESUMED = "program_text", "resumed"
NOT_ALIKE = (PROGRAM_TEXT, RESUMED)
"""Settings that no profile makes equal: the runs are of other programs, or begin elsewhere."""

DECLARED = ("guarantee", "profile", "digest", "program", "level", *NOT_ALIKE)
"""Settings that say what was run and requested. Their effects are other settings."""

SET_BY = {"hardware: threads": "env.OMP_NUM_THREADS"}
"""Observed settings that a knob decides, with that knob."""

_NOT_SET, _PARTLY_SET = UNINITIALISED.hex(), PARTLY.hex()
_PROBABILITY = re.compile(r"(?<![=\w.])0?\.\d*[1-9]\d*")
NO_VALUE = (None, "", "-", "null", "None")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first divergence and what is known of the two runs."""

    first: Divergence
    settings: tuple[Setting, ...] = ()
    """The settings in which the runs differ."""

    knobs: Mapping[str, str] = field(default_factory=dict)
    """The knobs that were in force, as text."""

    accelerator: str = ""
    """The type of device that computed besides the CPU; empty if there was none."""

    tolerance: bool = False
    """Whether statistics were compared rather than bits."""

    program: Program = UNKNOWN_PROGRAM
    file: str = ""
    """The program's own file, as it was started."""

    @property
    def op(self) -> str:
        """The op's name without namespace and overload, as in ``add``."""
        return op_name(self.first.op)

    @property
    def earlier_reads(self) -> tuple[UncontrolledRead, ...]:
        """What the program had read until the divergence, the last read first."""
        place = self.first.step, self.first.record
        earlier = [each for each in self.program.reads if (each.step, each.record) <= place]
        return tuple(reversed(earlier))

    @property
    def other_seeds(self) -> tuple[UncontrolledRead, ...]:
        """The places at which the runs had given a generator different seeds."""
        return tuple(each for each in self.earlier_reads if each.is_other_seed)

    @property
    def suspects(self) -> tuple[UncontrolledRead, ...]:
        """What the program had read that no seed decides: what it reads at the line first."""
        found = [each for each in self.earlier_reads if each.what in SUSPECTS]
        return tuple(
            sorted(found, key=lambda each: (not self.is_at(each), SUSPECTS.index(each.what)))
        )

    def is_at(self, read: UncontrolledRead) -> bool:
        """Whether the line of the divergence reads it."""
        return short(read.where) in {short(side.source) for side in self.sides}

    @property
    def started_threads(self) -> UncontrolledRead | None:
        """Where the program had started a thread."""
        return next((each for each in self.earlier_reads if each.what == THREADS), None)

    @property
    def own_worker_init(self) -> Loader | None:
        """The loader of the batch, if its workers have a `worker_init_fn` of the program."""
        return next(
            (
                each
                for each in self.program.loaders
                if each.workers and each.worker_init_fn and each.where == self.first.source
            ),
            None,
        )

    @property
    def some_outputs_agree(self) -> bool:
        """Whether the record has outputs that agree besides those that differ."""
        if len(self.sides) < 2:  # noqa: PLR2004 - both runs have the op
            return False
        pairs = zip(*(side.output_fingerprints for side in self.sides), strict=False)
        return any(one == other for one, other in pairs)

    @property
    def of_threads(self) -> bool:
        """Whether several threads computed, and one beside the main one what differs."""
        writers = set(self.first.writers)
        others = self.on_another_thread or bool(writers - set(MAIN_THREADS))
        return others and (len(self.program.threads) != 1 or len({self.first.thread, *writers}) > 1)

    @property
    def namespace(self) -> str:
        """``aten`` in ``aten::add.Tensor``; empty for records that are not ops of torch."""
        return self.first.op.rpartition("::")[0]

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides of the runs that have the op."""
        return tuple(side for side in (self.first.left, self.first.right) if side is not None)

    @property
    def writes_in_place(self) -> bool:
        """Whether the op writes into one of its inputs."""
        return self.op.endswith("_") and not self.op.startswith("__")

    @property
    def on_another_thread(self) -> bool:
        """Whether the op ran neither on the main thread nor on one of autograd's."""
        return self.first.thread not in MAIN_THREADS and self.first.phase != "backward"

    @property
    def reads_unwritten_memory(self) -> bool:
        """Whether an input of the op is memory that nothing, or not all, has been written of."""
        if self.op in OVERWRITING or self.first.op.endswith("out"):
            return False
        return any(
            text.startswith((_NOT_SET, _PARTLY_SET))
            for side in self.sides
            for text in side.input_fingerprints
        )

    @property
    def reads_written_memory(self) -> bool:
        """Whether the op has an input that something has written."""
        return any(text != _NOT_SET for side in self.sides for text in side.input_fingerprints)

    @property
    def drops_with_a_probability(self) -> bool:
        """Whether a positional argument lies between 0 and 1, as a probability does."""
        return any(_PROBABILITY.search(side.argument) for side in self.sides)

    @property
    def has_other_dtypes(self) -> bool:
        """Whether the two runs computed in other types."""
        return len({_dtypes(side.outputs) for side in self.sides}) > 1

    @property
    def differing_knobs(self) -> tuple[Setting, ...]:
        """The settings that are knobs of the catalogue, or that one of them sets."""
        keys = {name for knob in CATALOGUE for name in (knob.name, knob.profile_key)}
        named = [replace(each, name=SET_BY.get(each.name, each.name)) for each in self.settings]
        return tuple({each.name: each for each in named if each.name in keys}.values())

    @property
    def differing_platform(self) -> tuple[Setting, ...]:
        """The settings that differ and that no profile sets: versions and hardware."""
        known = {each.name for each in self.differing_knobs}
        return tuple(
            each
            for each in self.settings
            if each.name not in DECLARED and SET_BY.get(each.name, each.name) not in known
        )

    def differs_in(self, *names: str) -> bool:
        """Whether the runs differ in one of the settings `names`."""
        return any(each.name in names for each in self.settings)

    def value(self, key: str) -> str | None:
        """Return the value in force of a knob, or of a key of a profile; None if there is none.

        ``True`` and ``true`` count as one value.
        """
        names = [key, *(knob.name for knob in CATALOGUE if knob.profile_key == key)]
        texts = [str(self.knobs[name]) for name in names if name in self.knobs]
        given = [text for text in texts if text not in NO_VALUE]
        return {"True": "true", "False": "false"}.get(given[0], given[0]) if given else None


def accelerator(meta: Mapping[str, Any]) -> str:
    """Return the type of device that a recorded process had besides the CPU, or nothing."""
    hardware = meta.get("hardware") or {}
    return str(hardware.get("accelerator", "")).partition(" ")[0]


def _dtypes(outputs: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(\w+)\[", outputs))
