"""Rules of diagnosis: why two runs diverge, one row per cause, the surest first."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchrepro.policies.deterministic_ops import row_of
from torchrepro.trace.format import NEW_TENSOR, OPTIMIZER_STEP
from torchrepro.verdict.evidence import (
    ATTENTION,
    CONVOLUTION,
    DRAWING,
    DROPOUT,
    DROPPING,
    DROPPING_INSIDE,
    FIXED_BY_THE_FLAG,
    LOADER,
    MASKING,
    MATMUL,
    PROGRAM_TEXT,
    RECURRENT,
    RESUMED,
    SUMMING,
    WORKERS,
)
from torchrepro.verdict.sample_difference import is_returned
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from torchrepro.verdict.evidence import Evidence
    from torchrepro.verdict.value import Setting


ANY_VALUE = ("*",)


@dataclass(frozen=True, slots=True)
class Fix:
    """A key of a profile and the value that helps."""

    key: str
    value: str
    """As an override writes it: a word that YAML takes for a boolean is in quotes."""

    enough: tuple[str, ...] = ()
    """Other values that are as good."""

    needs: str = ""
    """The feature without which the program cannot feel it (see `evidence.FEATURES`)."""

    def is_met_by(self, value: str | None) -> bool:
        """Whether `value` is the one that helps, or as good."""
        return value is not None and (
            self.enough == ANY_VALUE or value in (self.value, *self.enough)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason for two runs to diverge, and when it applies."""

    cause: str
    """The sentence; `diagnosis` says which names in braces it may have."""

    kinds: tuple[Kind, ...] = tuple(Kind)
    fits: Callable[[Evidence], bool] = lambda e: True
    fixes: tuple[Fix, ...] = ()
    """What helps, in the order in which to try it. What is set already is skipped."""

    knobs: tuple[str, ...] = ()
    """Patterns of knobs. The rule applies only if the runs differ in one; a common value helps."""

    edit: str = ""
    """A change of the program that helps, with the same names in braces as the cause."""

    by_program: bool = False
    """Whether the program itself brings the difference in: what it reads may then explain it."""

    rerecord: bool = True
    """Whether recording the steps around it in full would show more."""

    def differing_knobs(self, evidence: Evidence) -> list[Setting]:
        """Return the knobs of this rule in which the runs differ."""
        return [each for each in evidence.differing_knobs if _one_of(each.name, self.knobs)]

    def applies(self, evidence: Evidence) -> bool:
        """Whether this may be why the runs diverge."""
        return (
            evidence.first.kind in self.kinds
            and (not self.knobs or bool(self.differing_knobs(evidence)))
            and self.fits(evidence)
        )


def _one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


SEED = Fix("seed", "1234", ANY_VALUE)
LOADER_SEEDS = Fix("dataloader.seeding", "auto", needs=LOADER)
NO_WORKERS = Fix("dataloader.num_workers", "0", needs=WORKERS)
HASHES = Fix("env.PYTHONHASHSEED", "0", tuple(map(str, range(1, 10))))
NO_DROPOUT = Fix("dropout", "zero", needs=DROPOUT)
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
CPU_PATH = (
    "*num_threads",
    "*NUM_THREADS",
    "*_DYNAMIC",
    "*MKL_CBWR",
    "*ATEN_CPU_CAPABILITY",
    "*MAX_CPU_ISA",
)
RANDOM_NUMBERS = ("seed", "seed.*", "streams", "ranks", "dataloader.*", "env.PYTHONHASHSEED")
PATHS = (
    *(*RANDOM_NUMBERS, "dropout", "device.*", "backends.torch.*", "*enabled", "*_sdp"),
    *("env.TORCHINDUCTOR_*", "env.NVTE_*"),
)
PROGRAM = (Kind.ARGUMENT, Kind.ONLY_ONE)
COARSE = {
    "parameter": "parameters",
    "gradient": "gradients",
    "module": "outputs of modules",
    "parameters": "parameters",
    "gradients": "gradients",
    "loss": "losses",
}
"""What recordings of a level above ops hold in their place, and what several of it are called."""

DATALOADER = "DataLoader"
COMPUTED = (Kind.OUTPUTS,)
PROCESSOR = ("hardware: instruction set",)
"""Settings that decide which kernels a CPU takes."""


def _family(pattern: re.Pattern[str]) -> Callable[[Evidence], bool]:
    return lambda e: pattern.fullmatch(e.op) is not None


def _on(accelerator: str, *patterns: re.Pattern[str]) -> Callable[[Evidence], bool]:
    """Return a test for ops of some patterns on a type of device; an empty one is the CPU."""
    families = [_family(pattern) for pattern in patterns]
    return lambda e: e.accelerator == accelerator and any(fits(e) for fits in families)


KERNEL_RULES: tuple[Rule, ...] = (
    Rule(
        "The runs computed in other types: autocast or the default type differs.",
        fits=lambda e: e.has_other_dtypes and not e.tolerance,
        kinds=COMPUTED,
        fixes=(Fix("backends.torch.default_dtype", "float32", ANY_VALUE),),
    ),
    Rule(
        "{op} adds up in an order that depends on threads and processor ({settings}).",
        COMPUTED,
        _family(SUMMING),
        knobs=CPU_PATH,
    ),
    Rule(
        "{op} was computed in another precision ({settings}).",
        COMPUTED,
        _family(SUMMING),
        knobs=PRECISION,
    ),
    Rule(
        "The runs were under other settings ({settings}).",
        COMPUTED,
        lambda e: any(not _one_of(each.name, RANDOM_NUMBERS) for each in e.differing_knobs),
        knobs=("backends.*", "device.*", "env.*", "dropout"),
    ),
    Rule(
        "{op} is out of tolerance: a faster, less exact precision on one device, or a wrong "
        "kernel.",
        COMPUTED,
        lambda e: e.tolerance and e.accelerator == "cuda",
        (
            Fix("backends.cuda.matmul_fp32_precision", "ieee"),
            Fix("backends.cudnn.conv_fp32_precision", "ieee"),
        ),
    ),
    Rule(
        "{op} is out of tolerance: a faster, less exact precision on one device, or a wrong "
        "kernel.",
        COMPUTED,
        lambda e: e.tolerance and e.accelerator == "npu",
        (
            Fix("backends.npu.cube_math_type", "KEEP_DTYPE"),
            Fix("backends.npu.conv_allow_hf32", "false"),
        ),
    ),
    Rule(
        "oneDNN takes another kernel for {op} on another processor ({settings}).",
        COMPUTED,
        lambda e: _on("", CONVOLUTION)(e) and e.differs_in(*PROCESSOR),
        (Fix("env.ONEDNN_MAX_CPU_ISA", "AVX2"),),
    ),
    Rule(
        "{op} adds up in an order that depends on the processor ({settings}).",
        COMPUTED,
        lambda e: _family(SUMMING)(e) and e.differs_in(*PROCESSOR),
        (Fix("env.ATEN_CPU_CAPABILITY", "default"), MKL_PATH),
    ),
    Rule(
        "Other software or hardware ({settings}): its kernels may add up in another order.",
        COMPUTED,
        lambda e: bool(e.differing_platform),
    ),
    Rule(
        "{op} is on torch's list of ops without a deterministic kernel. Instead: {instead}.",
        COMPUTED,
        lambda e: row_of(e.op) is not None,
        (DETERMINISTIC, ON_CPU),
    ),
    Rule(
        "{op} adds with atomics, in the order in which its threads arrive, unless torch is asked "
        "for deterministic kernels.",
        COMPUTED,
        lambda e: e.op in FIXED_BY_THE_FLAG,
        (DETERMINISTIC,),
    ),
    Rule(
        "Compiled code took another kernel: inductor chooses some by timing.",
        COMPUTED,
        lambda e: e.op == "compiled region" or e.namespace == "inductor",
        (COMPILED,),
    ),
    Rule(
        "cuDNN chose another algorithm, by timing or one that adds with atomics.",
        COMPUTED,
        _on("cuda", CONVOLUTION, RECURRENT),
        (
            Fix("backends.cudnn.benchmark", "false"),
            Fix("backends.cudnn.deterministic", "true"),
            DETERMINISTIC,
        ),
    ),
    Rule(
        "Fused attention adds up in varying order, above all backward.",
        COMPUTED,
        lambda e: bool(e.accelerator) and _family(ATTENTION)(e),
        (DETERMINISTIC, Fix("backends.cuda.mem_efficient_sdp", "false")),
    ),
    Rule(
        "cuBLAS adds up in varying order unless its workspace is fixed.",
        COMPUTED,
        _on("cuda", MATMUL),
        (Fix("env.CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":16:8",)), DETERMINISTIC),
    ),
    Rule(
        "Ascend's matrix products shift their inner dimension between cores.",
        COMPUTED,
        _on("npu", MATMUL),
        (
            DETERMINISTIC,
            Fix("env.CLOSE_MATMUL_K_SHIFT", "1"),
            Fix("backends.npu.deterministic_level", "2", ("3",)),
        ),
    ),
    Rule(
        "oneDNN took another primitive, or other threads added up in another order.",
        COMPUTED,
        _on("", CONVOLUTION, RECURRENT),
        (Fix("backends.cpu.mkldnn_deterministic", "true"), ONE_THREAD),
    ),
    Rule(
        "The rounding of MKL depends on the alignment of memory and on the number of threads.",
        COMPUTED,
        _on("", MATMUL),
        (MKL_PATH, ONE_THREAD),
    ),
    Rule(
        "{op} adds up in an order that depends on the number of threads.",
        COMPUTED,
        _on("", SUMMING),
        (ONE_THREAD, Fix("env.OMP_DYNAMIC", '"false"', ("false",))),
    ),
    Rule(
        "{op} is a custom kernel, which torch's deterministic flag does not reach.",
        COMPUTED,
        lambda e: e.namespace not in ("", "aten", "prims"),
        edit="have the kernel of {op} add up in one fixed order, or put another function in its "
        'place: torchrepro.register_replacement("{op}", function) and device.fallback=error',
    ),
    Rule(
        "{op} has no known cause; on {accelerator} many kernels add with atomics unless torch is "
        "asked for deterministic ones.",
        COMPUTED,
        lambda e: bool(e.accelerator),
        (DETERMINISTIC,),
    ),
    Rule(
        "No known cause fits: {op} gave two results for the same inputs. What remains is a race "
        "in the program, memory written from outside, or faulty hardware.",
        COMPUTED,
        edit="`torchrepro verify --stress` names what makes it vary, if it is the program",
    ),
)


WRITTEN_BEFORE = (Kind.INPUT, Kind.DATA)
"""How records differ that read what was written otherwise, by whom is not known."""


def _is_made_outside(e: Evidence) -> bool:
    """Whether the record is of values that the program gave to torch."""
    return e.first.op in (NEW_TENSOR, DATALOADER) or is_returned(e.first.op)


def _is_collective(e: Evidence) -> bool:
    return e.first.phase == "collective" or "c10d" in e.namespace


RULES: tuple[Rule, ...] = (
    Rule(
        "Both runs were cut off; as far as both go they are the same.",
        (Kind.ENDED,),
        lambda e: e.first.both_were_cut,
        rerecord=False,
    ),
    Rule(
        "One run is shorter than the other; as far as both go they are the same.",
        (Kind.ENDED,),
        rerecord=False,
    ),
    Rule(
        "All that can be compared agrees. The rest cannot be compared.",
        (Kind.INCOMPARABLE,),
        rerecord=False,
    ),
    Rule(
        "The recordings are of different programs: {programs}.",
        fits=lambda e: e.differs_in(PROGRAM_TEXT),
        edit="compare their texts, first around the line above",
        rerecord=False,
    ),
    Rule(
        "One run went on from a checkpoint, the other did not. Each counts its steps from 0, so a "
        "step of one is not that step of the other. A note says whether they end with the same "
        "parameters.",
        fits=lambda e: e.differs_in(RESUMED),
        rerecord=False,
    ),
    Rule(
        "The runs were not seeded alike ({settings}).",
        (Kind.RANDOM,),
        knobs=RANDOM_NUMBERS,
    ),
    Rule(
        "A random generator was not in the same state: nothing seeded it, or one run drew more "
        "numbers from it than the other.",
        (Kind.RANDOM,),
        fixes=(SEED, LOADER_SEEDS, NO_WORKERS),
    ),
    Rule(
        "The recordings show that {values} differ, but not which op computed them. Runs that are "
        "recorded op by op show it.",
        fits=lambda e: e.first.op in COARSE or e.first.is_at_the_latest,
    ),
    Rule(
        "{op} draws random numbers, and the runs were not seeded alike ({settings}).",
        COMPUTED,
        fits=lambda e: e.op in DRAWING | DROPPING,
        knobs=RANDOM_NUMBERS,
    ),
    Rule(
        "{op} draws a mask from a generator that was not in the same state: nothing seeded it, or "
        "one run drew more numbers before.",
        COMPUTED,
        lambda e: (
            e.op in DROPPING | MASKING or (e.op in DROPPING_INSIDE and e.drops_with_a_probability)
        ),
        (SEED, NO_DROPOUT),
    ),
    Rule(
        "{op} draws random numbers from a generator that was not in the same state; devices also "
        "draw other numbers from one seed.",
        COMPUTED,
        lambda e: e.op in DRAWING and bool(e.accelerator),
        (SEED, HOST),
    ),
    Rule(
        "{op} draws random numbers from a generator that was not in the same state: nothing "
        "seeded it, it is one of the program's own, or one run drew more numbers before.",
        COMPUTED,
        lambda e: e.op in DRAWING,
        (SEED, LOADER_SEEDS),
    ),
    Rule(
        "{op} reads memory that nothing has written: it holds whatever was there before.",
        COMPUTED,
        lambda e: e.reads_unwritten_memory,
        (DETERMINISTIC, FILLED),
        edit="write all of it before it is read: torch.zeros in place of torch.empty",
    ),
    Rule(
        "The batches differ. {worker_init}",
        (Kind.DATA,),
        lambda e: e.first.op == DATALOADER and e.own_worker_init is not None,
        (NO_WORKERS,),
        edit="{worker_init_edit}",
    ),
    Rule(
        "The DataLoader gave other values in some tensors of the batch, and others agree: random "
        "numbers of its dataset or transforms, or other samples.",
        (Kind.DATA,),
        lambda e: e.first.op == DATALOADER and e.some_outputs_agree,
        (SEED, LOADER_SEEDS, NO_WORKERS),
        by_program=True,
    ),
    Rule(
        "The DataLoader gave another batch: another order of samples, random numbers of its "
        "workers or of the dataset, or other files.",
        (Kind.DATA,),
        lambda e: e.first.op == DATALOADER,
        (SEED, LOADER_SEEDS, NO_WORKERS),
        by_program=True,
    ),
    Rule(
        "Another rank sent other data, or the ranks took part in another order.",
        (Kind.DATA,),
        _is_collective,
    ),
    Rule(
        "A race: threads reach one tensor in varying order, here {op} on {threads}. A lock keeps "
        "them apart, not in order.",
        fits=lambda e: (
            e.of_threads
            and (e.writes_in_place or bool(e.first.writers) or e.first.kind in WRITTEN_BEFORE)
            and not _is_made_outside(e)
        ),
        edit="give each thread a tensor of its own, and add these up in a fixed order once the "
        "threads have joined",
    ),
    Rule(
        "The program made this tensor from other values{generic}.",
        (Kind.DATA,),
        _is_made_outside,
        (SEED, HASHES),
        by_program=True,
    ),
    Rule(
        "{op} reads a tensor in which the runs differ since before this step, and the ops of the "
        "steps before it were not recorded. Runs that are recorded op by op from there show it.",
        (Kind.UNSEEN,),
    ),
    Rule(
        "The program made a tensor from other data{generic}.",
        (Kind.DATA,),
        fixes=(SEED, HASHES),
        by_program=True,
    ),
    Rule(
        "Something outside of torch wrote into a tensor after torch had: a numpy view of it, "
        "another thread, a C extension, or memory shared with another process.",
        (Kind.INPUT,),
        lambda e: not _is_collective(e),
        edit="give torch a copy of memory that others write: torch.tensor(array) in place of "
        "torch.from_numpy(array)",
    ),
    Rule(
        "Another rank contributed something else, or Ascend's collectives added up in another "
        "order.",
        (Kind.OUTPUTS, Kind.INPUT),
        lambda e: _is_collective(e) and e.accelerator == "npu",
        (Fix("env.HCCL_DETERMINISTIC", '"true"', ("true", "strict")),),
    ),
    Rule(
        "Another rank contributed something else, or NCCL added up in another order.",
        (Kind.OUTPUTS, Kind.INPUT),
        lambda e: _is_collective(e) and bool(e.accelerator),
        (Fix("env.NCCL_ALGO", "Ring", ANY_VALUE), Fix("env.NCCL_PROTO", "Simple", ANY_VALUE)),
    ),
    Rule(
        "Another rank contributed something else: this rank gave the same and got another result.",
        (Kind.OUTPUTS, Kind.INPUT),
        _is_collective,
    ),
    Rule("The runs were under other settings ({settings}).", PROGRAM, knobs=PATHS),
    Rule(
        "The runs had other software or hardware ({settings}), which may take another path.",
        PROGRAM,
        lambda e: bool(e.differing_platform),
    ),
    Rule(
        "The program gave its optimizer other arguments, {what}{generic}.",
        (Kind.ARGUMENT,),
        lambda e: e.first.phase == "optimizer" and e.first.op.endswith(OPTIMIZER_STEP),
        (SEED, HASHES),
        edit="compute them from the number of the step alone",
        by_program=True,
    ),
    Rule(
        "The program itself passed something else{generic}.",
        (Kind.ARGUMENT,),
        fixes=(HASHES, SEED),
        by_program=True,
    ),
    Rule(
        "The program took another path{generic}.",
        (Kind.ONLY_ONE,),
        fixes=(HASHES, SEED),
        by_program=True,
    ),
    *KERNEL_RULES,
)
