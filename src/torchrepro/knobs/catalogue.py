"""All knobs, in the order in which they are set: environment, then flags, then seeds.

The module `variables` defines the knobs of environment variables, and `VENDORS` names the modules
with the knobs of one vendor's devices. This module defines the knobs of torch, the policies and the
seed, and explains any knob in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import chain
from typing import Any

from torchrepro.ground.errors import ProfileError, near
from torchrepro.ground.imports import named
from torchrepro.knobs.knob import (
    PHASES,
    SEED,
    Attribute,
    Calls,
    Integer,
    Knob,
    LazyAccess,
    MappingOf,
    OneOf,
    Scope,
    Switch,
    Text,
    WordOrMapping,
    acts_only_on_refusal,
)
from torchrepro.knobs.torch_state import (
    DETERMINISTIC_ALGORITHMS,
    MODES,
    FillUninitializedMemory,
    Fp32Precision,
    InductorSwitch,
    OptEinsum,
    ReducedPrecision,
)
from torchrepro.knobs.variables import ENV, WITHOUT_EFFECT, allowed

DOCS = "https://docs.pytorch.org/docs/stable"
BACKENDS = f"{DOCS}/backends.html#torch-backends"
GENERATED = f"{DOCS}/generated/torch"
NUMERICS = f"{DOCS}/notes/cuda.html"
RANDOMNESS = f"{DOCS}/notes/randomness.html"

_torch = partial(Knob, library="torch")
_cuda = partial(_torch, hardware="CUDA", source=f"{BACKENDS}-cuda", setters=("_set_cublas*",))
_cudnn = partial(
    _torch,
    hardware="CUDA",
    source=f"{BACKENDS}-cudnn",
    setters=("_set_cudnn_*", "_cuda_set_cudnn_*"),
)
_cpu = partial(_torch, source=f"{BACKENDS}-mkldnn", setters=("_set_mkldnn_*", "_set_onednn_*"))


def _flag(section: partial[Knob], name: str, access: Attribute, **columns: Any) -> Knob:
    alias = f"{access.owner.replace(':', '.')}.{access.name}"
    columns = {"legal": Switch(), "aliases": (alias,), **columns}
    return section(name=f"backends.{name}", access=access, **columns)


def _matmul_flag(name: str, access: type[Attribute] = Attribute, **columns: Any) -> Knob:
    return _flag(_cuda, f"cuda.{name}", access("torch.backends.cuda:matmul", name), **columns)


def _cudnn_flag(name: str, **columns: Any) -> Knob:
    return _flag(_cudnn, f"cudnn.{name}", Attribute("torch.backends.cudnn", name), **columns)


def _precision(owner: str, summary: str, since: str, *aliases: str, **columns: Any) -> Knob:
    device, _, operation = owner.partition(".")
    return _cuda(
        name=f"backends.{device}.{operation}_fp32_precision",
        legal=OneOf(("ieee", "tf32")),
        access=Fp32Precision(owner),
        summary=summary,
        cost="ieee is up to several times slower than tf32 on tensor cores",
        source=f"{NUMERICS}#tf32-on-ampere",
        since=f"2.9; before that {since}",
        aliases=(f"torch.backends.{owner}.fp32_precision", *aliases, "allow_tf32"),
        decides_results=True,
        setters=(
            *("_set_fp32_precision_setter", "_set_float32_matmul_precision"),
            *("_set_cublas*", "_set_cudnn_*", "_cuda_set_cudnn_*"),
        ),
        **columns,
    )


TORCH = (
    _torch(
        name="backends.torch.deterministic_algorithms",
        legal=OneOf(MODES),
        access=DETERMINISTIC_ALGORITHMS,
        summary="Every op uses a deterministic kernel. An op without one raises an error "
        "(error) or warns and runs (warn). none does not require deterministic kernels.",
        cost="some kernels are slower: a few per cent on most models, several times on some ops; "
        "new memory is filled, see backends.torch.fill_uninitialized_memory",
        source=f"{GENERATED}.use_deterministic_algorithms.html",
        since="1.8",
        aliases=("torch.use_deterministic_algorithms", "torch.set_deterministic_debug_mode"),
        setters=("_set_deterministic_*",),
    ),
    _flag(
        _torch,
        "torch.fill_uninitialized_memory",
        FillUninitializedMemory("torch.utils.deterministic", "fill_uninitialized_memory"),
        summary="With deterministic algorithms, torch.empty and similar functions fill their "
        "result with NaN or the largest integer, which makes a read of uninitialized memory "
        "visible.",
        cost="about 15 % of a step on large models "
        "(https://github.com/NVIDIA/Megatron-LM/pull/7093); accelerate's init_empty_weights fills "
        "each weight before it drops it: 0.4 s for a Linear(10000, 10000), 0 s with false or with "
        "include_buffers=True",
        source=f"{DOCS}/deterministic.html",
        since="2.2",
        setters=("_set_deterministic_*",),
    ),
    _torch(
        name="backends.torch.inductor_deterministic",
        legal=Switch(),
        access=InductorSwitch("TORCHINDUCTOR_DETERMINISTIC", "deterministic"),
        scope=Scope.PROCESS_AND_CHILDREN,
        summary="The compiler makes no choice by timing: no autotuning, no benchmarked fusion.",
        cost="compiled code can be much slower (https://github.com/pytorch/pytorch/issues/174711)",
        source="https://github.com/pytorch/pytorch/pull/165950",
        since="2.10",
        aliases=("env.TORCHINDUCTOR_DETERMINISTIC", "torch._inductor.config.deterministic"),
    ),
    _flag(
        _torch,
        "torch.opt_einsum_enabled",
        OptEinsum("torch.backends.opt_einsum", "enabled"),
        summary="torch.einsum lets opt_einsum choose the order of contraction.",
        cost="negligible; another order rounds differently",
        source=f"{BACKENDS}-opt-einsum",
        since="1.13",
    ),
    _flag(
        _torch,
        "torch.opt_einsum_strategy",
        OptEinsum("torch.backends.opt_einsum", "strategy"),
        legal=OneOf(("auto", "greedy", "optimal")),
        summary="How opt_einsum searches for the order of contraction.",
        cost="optimal takes long for many operands",
        source=f"{BACKENDS}-opt-einsum",
        since="1.13",
    ),
    _torch(
        name="backends.torch.default_dtype",
        legal=OneOf(("float32", "float64", "float16", "bfloat16")),
        access=Calls(
            "torch",
            "get_default_dtype",
            "set_default_dtype",
            to_profile=lambda dtype: str(dtype).removeprefix("torch."),
            to_library=lambda name: getattr(import_module("torch"), name),
        ),
        summary="The dtype of new floating-point tensors that do not specify a dtype.",
        cost="float64 doubles memory and is slow on GPUs",
        source=f"{GENERATED}.set_default_dtype.html",
        since="1.0",
        aliases=("torch.set_default_dtype",),
        decides_results=True,
        setters=("_set_default_dtype",),
    ),
)

CUDA = (
    _precision(
        "cuda.matmul",
        "float32 matrix products on CUDA: all 23 mantissa bits (ieee) or 10 (tf32).",
        "through allow_tf32",
        "torch.backends.cuda.matmul.allow_tf32",
        "torch.set_float32_matmul_precision",
        "env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
    *(
        _matmul_flag(
            f"allow_{dtype}_reduced_precision_reduction",
            ReducedPrecision,
            summary=f"{dtype} matrix products may add up partial sums in {dtype}.",
            cost="off: slower products with a long inner dimension on some GPUs",
            source=f"{NUMERICS}#reduced-precision-reduction-in-{dtype}-gemms",
            since=since,
            decides_results=True,
        )
        for dtype, since in (("fp16", "1.10"), ("bf16", "1.12"))
    ),
    _matmul_flag(
        "allow_fp16_accumulation",
        summary="fp16 matrix products may accumulate in fp16.",
        cost="on: faster on some GPUs, with larger errors",
        source=f"{NUMERICS}#full-fp16-accmumulation-in-fp16-gemms",
        since="2.7",
        decides_results=True,
    ),
    _matmul_flag(
        "prefer_cublaslt_grouped_gemm",
        summary="cuBLASLt computes grouped matrix products if it supports them.",
        cost="on: kernels of cuBLASLt, which may round differently from the kernels of torch",
        since="2.14",
    ),
    *(
        _flag(
            _cuda,
            f"cuda.python_native_{language}",
            Attribute(f"torch.backends.python_native:{language}", "enabled"),
            summary=f"Ops may use kernels that torch implements in {words}.",
            cost="off: other kernels, which may be slower and may round differently",
            source=f"{DOCS}/backends.html#torch-backends-python-native",
            since=since,
        )
        for language, words, since in (
            ("triton", "Triton", "2.14"),
            ("cutedsl", "CuTe DSL", "2.14"),
            ("flydsl", "FlyDSL", "2.15"),
            ("helion", "Helion", "2.14"),
        )
    ),
    *(
        _cuda(
            name=f"backends.cuda.{kernel}_sdp",
            legal=Switch(),
            access=Calls("torch.backends.cuda", f"{kernel}_sdp_enabled", f"enable_{kernel}_sdp"),
            summary=f"scaled_dot_product_attention may use its {kernel} kernel.",
            cost=cost,
            since=since,
            aliases=(f"torch.backends.cuda.enable_{kernel}_sdp",),
            setters=("_set_sdp_use_*",),
        )
        for kernel, since, cost in (
            ("flash", "2.0", "its backward is not deterministic unless algorithms are `error`"),
            ("mem_efficient", "2.0", "its backward is deterministic only under `error`"),
            ("math", "2.0", "the reference: slow, and stores the whole attention matrix"),
            ("cudnn", "2.5", "fast on recent GPUs; cuDNN chooses the kernel"),
        )
    ),
    *(
        _cuda(
            name=f"backends.cuda.preferred_{domain}_library",
            legal=OneOf(choices),
            access=Calls(
                "torch.backends.cuda",
                f"preferred_{domain}_library",
                f"preferred_{domain}_library",
                to_profile=lambda backend: backend.name.lower(),
            ),
            summary=f"The library that computes {domain} operations on CUDA tensors.",
            cost="which library is fastest depends on the shapes",
            since=since,
            aliases=(f"torch.backends.cuda.preferred_{domain}_library",),
            setters=("_set_*_preferred_backend",),
        )
        for domain, choices, since in (
            ("linalg", ("default", "cusolver", "magma"), "1.11"),
            # Not `default`: torch reads it back as the name of the default library.
            ("blas", ("cublas", "cublaslt", "ck"), "2.4"),
        )
    ),
)

CUDNN = (
    _cudnn_flag(
        "enabled",
        summary="torch uses cuDNN. (`cudnn.enable`, often found in code, does nothing.)",
        cost="off: convolutions and RNNs are much slower; a last resort when debugging",
        since="0.3",
        aliases=("torch.backends.cudnn.enabled", "cudnn.enable"),
    ),
    _cudnn_flag(
        "benchmark",
        summary="cuDNN times its algorithms for every new shape and uses the fastest, so timing "
        "noise decides which algorithm computes.",
        cost="on: faster with constant shapes; changing shapes are tuned again and again "
        "(measured 23.75 s against 0.74 s for 50 forward passes)",
        source=RANDOMNESS,
        since="0.3",
    ),
    _cudnn_flag(
        "benchmark_limit",
        legal=Integer(0),
        summary="How many algorithms cuDNN's benchmark tries; 0 tries all.",
        cost="more candidates make the first call with a shape slower",
        since="1.13",
    ),
    _cudnn_flag(
        "depthwise_kernel",
        legal=OneOf(("auto", "cudnn", "native")),
        summary="Which kernel computes depthwise convolutions; auto lets torch choose by shape.",
        cost="the other kernel may be slower, and rounds differently",
        since="2.15",
    ),
    _cudnn_flag(
        "deterministic",
        summary="cuDNN uses only deterministic algorithms.",
        cost="some convolutions are several times slower "
        "(https://github.com/pytorch/pytorch/issues/28777)",
        source=RANDOMNESS,
        since="0.4",
    ),
    *(
        _precision(
            f"cudnn.{operation}",
            f"float32 {operation} in cuDNN: all 23 mantissa bits (ieee) or 10 (tf32, torch's "
            "default).",
            "one switch for both, allow_tf32",
            "torch.backends.cudnn.allow_tf32",
            reread=True,  # before torch 2.9 conv and rnn share one switch
        )
        for operation in ("conv", "rnn")
    ),
)

CPU = (
    _flag(
        _cpu,
        "cpu.mkldnn_enabled",
        Attribute("torch.backends.mkldnn", "enabled"),
        summary="torch uses oneDNN.",
        cost="off: convolutions on the CPU are much slower; a last resort when debugging",
        since="2.6",
    ),
    _flag(
        _cpu,
        "cpu.mkldnn_deterministic",
        Attribute("torch.backends.mkldnn", "deterministic"),
        summary="oneDNN uses only deterministic primitives. No other setting of torch does this.",
        cost="some primitives are slower",
        since="2.6",
    ),
    *(
        _cpu(
            name=f"backends.cpu.mkldnn_{operation}_fp32_precision",
            legal=OneOf(("ieee", "tf32", "bf16")),
            access=Fp32Precision(f"mkldnn.{operation}"),
            summary=f"float32 {operation} in oneDNN: full precision (ieee), or tf32 or bf16 "
            "products.",
            cost="ieee does not use the fast bf16 units of the CPU, if it has them",
            source=f"{DOCS}/notes/mkldnn.html",
            since="2.9",
            aliases=(f"torch.backends.mkldnn.{operation}.fp32_precision",),
            decides_results=True,
            setters=("_set_fp32_precision_setter", "_set_onednn_*"),
        )
        for operation in ("matmul", "conv", "rnn")
    ),
    _cpu(
        name="backends.cpu.num_threads",
        legal=Integer(1, 4096),
        access=Calls("torch", "get_num_threads", "set_num_threads"),
        summary="Threads inside one CPU op. Another number of threads sums in another order.",
        cost="fewer threads, less speed",
        source=f"{GENERATED}.set_num_threads.html",
        since="1.0",
        aliases=("torch.set_num_threads",),
        decides_results=True,
        setters=("set_num_threads",),
    ),
)


_DEVICE = Text(
    r"[a-z_][a-z0-9_]*(:[0-9]{1,4})?",
    "cpu, cuda, npu, xpu, mps",
    "not the name of a device",
    variable=False,
)
DEVICES_OF_MODULES = MappingOf(
    _DEVICE,
    "patterns to devices",
    "a mapping such as {encoder.layer.*: cpu}, of devices such as cpu, cuda or cuda:1",
    nested="not a device: write the whole name of a module as one key",
)
SEEDS_OF_STREAMS = MappingOf(
    SEED,
    "streams to seeds",
    "a mapping such as {split: 3}, each a whole number, 0 to 4294967295",
)
_RANK_POLICY = OneOf(("distinct", "same"))
RANK_POLICIES = WordOrMapping(
    _RANK_POLICY,
    MappingOf(
        _RANK_POLICY,
        "mesh dimensions to words",
        "one of them per mesh dimension as in {dp: distinct}",
    ),
)
_FALLBACK_OF_OP = OneOf(("cpu", "error", "native"))
FALLBACK = WordOrMapping(
    OneOf(("error", "cpu")),
    MappingOf(
        _FALLBACK_OF_OP,
        "ops to words",
        f"per op as in {{ops: {{cumsum: cpu}}}}: {_FALLBACK_OF_OP.words}",
    ),
    under="ops",
)


@dataclass(slots=True)
class StoredValue:
    """A setting of torchrepro itself. The code that depends on the setting calls `read`."""

    value: Any

    def read(self) -> Any:
        return self.value

    def write(self, value: Any) -> None:
        self.value = value

    save = read
    restore = write


_policy = partial(_torch, warn_if_unsupported=True, cost="none", source=f"{DOCS}/library.html")
_op_policy = partial(_policy, scope=Scope.EVERY_THREAD)
_seed_plan = partial(
    _policy,
    source=RANDOMNESS,
    library="",
    set_on_import="",
    warn_if_unsupported=False,
    decides_results=True,
)

POLICIES = (
    _op_policy(
        "dropout",
        OneOf(("keep", "zero")),
        LazyAccess("policies.dropout:policy", at_rest="keep", inherited=True),
        "zero turns the dropout of torch into the identity, and makes rrelu compute as in "
        "evaluation. This covers modules and functions, compiled, scripted and exported code, "
        "attention and recurrent kernels, and known modules that draw their own masks. The "
        "report names the random ops that still ran.",
        cost="zero: less than dropout, a copy instead of a random mask (a step of a small "
        "transformer took 0.6 times as long); 5 us per call of any other random op, to count it",
        decides_results=True,
    ),
    _op_policy(
        "device.rng",
        OneOf(("native", "host")),
        LazyAccess("policies.host_rng:policy", at_rest="native", inherited=True),
        "host draws every random number from the generator of the CPU, so the numbers are the "
        "same on all devices.",
        cost="host: 16 us per random op, 2 ns per uniform number (a million: 2.2 ms, measured on "
        "2 cores), and the copy to the device; none without an accelerator",
        decides_results=True,
    ),
    _op_policy(
        "device.fallback",
        FALLBACK,
        LazyAccess("policies.fallback:policy", at_rest=None),
        "For ops without a deterministic kernel on this device: error raises and suggests a "
        "replacement, cpu runs that op alone on the CPU. `{ops: {cumsum: cpu, put_: error, "
        "median: native}}` applies to every call of an op by name, also on devices where torch "
        "would not raise; native lets the op vary. A pattern such as `*` applies only to ops "
        "that would raise. Kernels that inductor generates are not covered.",
        cost="5 us per call of an op that torch may refuse, none for other ops; cpu: a copy to the "
        "CPU and a copy back for each call that runs there",
        source=f"{GENERATED}.use_deterministic_algorithms.html",
        needs="backends.torch.deterministic_algorithms",
        needing=acts_only_on_refusal,
        needed=("error",),
    ),
    _op_policy(
        "device.modules",
        DEVICES_OF_MODULES,
        LazyAccess("policies.placement:policy", at_rest={}),
        "Submodules to run on another device, to find out whether a device causes a difference. A "
        "moved submodule runs uncompiled and draws random numbers from the generator of its new "
        "device. Parameters, gradients, buffers and checkpoints stay on the original device.",
        cost="copies of inputs, outputs and weights per call of a moved submodule; 3 us per call "
        "of any module",
        source=f"{GENERATED}.func.functional_call.html",
        decides_results=True,
    ),
    _seed_plan(
        "streams",
        SEEDS_OF_STREAMS,
        LazyAccess("seeding.global_seeds:streams_field"),
        "Explicit seeds for single streams, to vary one source of randomness at a time.",
    ),
    _seed_plan(
        "ranks",
        RANK_POLICIES,
        LazyAccess("seeding.global_seeds:ranks_field"),
        "same or distinct: whether the ranks of a distributed run draw the same random numbers. "
        "By default, named streams differ per rank and the global generators start from one "
        "seed. The order of samples comes from torch: ranks with equal generators get the same "
        "order, and a DistributedSampler divides one order among the ranks.",
    ),
    _policy(
        "dataloader.seeding",
        OneOf(("auto", "none")),
        LazyAccess("seeding.loader_hook:seeding_policy"),
        "auto follows the protocol of torch and keeps its order of samples. Random numbers for a "
        "sample depend on the base seed that torch draws per iteration, on the index of the "
        "sample and on the seeds of the program, but not on the number of workers. A loader with "
        "a custom worker_init_fn is not changed; the worker_init_fn of Lightning, transformers, "
        "timm and detectron2 is replaced.",
        cost="auto: 14 us per sample; per batch 40 us more in a worker, 160 us in the main process",
        source=RANDOMNESS,
        needs="seed.streams",
        needing=lambda value: value == "auto",
        decides_results=True,
    ),
    _policy(
        "dataloader.num_workers",
        Integer(0, 64),
        LazyAccess("seeding.loader_hook:workers_policy"),
        "The number of worker processes of every loader; overrides the argument in the code. 0 "
        "loads data in the main process, to find out whether the workers cause a difference.",
        cost="0: loading no longer overlaps with training",
        source="https://docs.pytorch.org/docs/stable/data.html",
    ),
    _policy(
        "guard",
        OneOf(("none", "warn", "error")),
        StoredValue("none"),
        "Reads the knobs again before every optimizer step, when the profile is undone and at "
        "exit, to catch code that changes them. warn names the knob, its old and new value and "
        "the line that wrote it on standard error. error stops the run with status 1, and "
        "replaces the exit status of the program. A change that is reverted before the next step "
        "goes unnoticed.",
        cost="22 us before every optimizer step for the 23 knobs that debug-strict sets, and about "
        "as much per write of a flag or a variable; such a write in compiled code breaks the graph",
        source=f"{GENERATED}.optim.optimizer.register_optimizer_step_pre_hook.html",
        guarded=False,
    ),
)


def _seed(of: str, summary: str, source: str, access: str = "", **columns: Any) -> Knob:
    access = access or f"global_seeds:{of}_seed"
    columns = {"library": "torch", "changes_with_use": True, "cost": "none", **columns}
    return Knob(
        f"seed.{of}",
        SEED,
        LazyAccess(f"seeding.{access}"),
        summary,
        source=source,
        key="seed",
        guarded=False,
        decides_results=True,
        **columns,
    )


SEEDS = (
    _seed(
        "streams",
        "Root seed of all named streams: torchrepro.stream, seeded, dataloader_kwargs.",
        "https://www.rfc-editor.org/rfc/rfc7693",
        access="global_seeds:root_seed",
        cost="none; deriving a stream takes about 5 microseconds",
        set_on_import="",
        library="",
    ),
    _seed(
        "libraries",
        "Seed of other libraries that draw random numbers (cupy, tensorflow, gymnasium, "
        "registered libraries), set when they are loaded.",
        "https://docs.cupy.dev/en/stable/reference/random.html",
        access="global_seeds:library_seeds",
    ),
    _seed(
        "python",
        "Seed of the global generator of Python's `random`.",
        "https://docs.python.org/3/library/random.html#random.seed",
        set_on_import="random",
        library="",
        aliases=("random.seed",),
    ),
    _seed(
        "numpy",
        "Seed of the legacy global generator of numpy; a numpy.random.Generator is not affected.",
        "https://numpy.org/doc/stable/reference/random/legacy.html",
        cost="about 6 ms the first time, to load numpy.random",
        set_on_import="numpy.random",
        library="numpy",
        aliases=("numpy.random.seed", "np.random.seed"),
    ),
    _seed(
        "torch",
        "Seed of the default CPU generator of torch, which uses only the low 32 bits.",
        RANDOMNESS,
        aliases=("torch.manual_seed",),
    ),
    _seed(
        "calls",
        "Later calls of the program that seed a generator take effect, and are recorded with "
        "their lines.",
        RANDOMNESS,
        access="seeding_calls:seeding_calls",
        cost="about a microsecond per such call",
    ),
    *(
        _seed(
            device,
            f"Seed of the default generator of every {device.upper()} device.",
            source,
            cost="none; before device init the seed waits in torch's queue",
            hardware=hardware,
            since=since,
            aliases=(f"torch.{device}.manual_seed_all", f"torch.{device}.manual_seed"),
        )
        for device, hardware, since, source in (
            ("cuda", "CUDA", "", RANDOMNESS),
            ("npu", "Ascend", "torch_npu 2.1", "https://pypi.org/project/torch-npu/"),
            ("mps", "MPS", "1.12", f"{DOCS}/mps.html"),
            ("xpu", "XPU", "2.3", f"{DOCS}/xpu.html"),
        )
    ),
)

VENDORS = ("knobs.ascend:ROWS",)
"""The rows for the devices of one vendor each, by the name of a module and its tuple of rows."""

# The determinism level of the NPU comes after torch's flag, because the setter of the level changes
# the flag too. Seeds come last, because the write of another knob may draw from a generator.
CATALOGUE: tuple[Knob, ...] = (
    *ENV,
    *(*TORCH, *CUDA, *CUDNN, *CPU),
    *chain.from_iterable(map(named, VENDORS)),
    *POLICIES,
    *SEEDS,
)


@cache
def knobs_by_name() -> dict[str, Knob]:
    """Return a dict from the name of each knob to the knob."""
    return {knob.name: knob for knob in CATALOGUE}


@cache
def other_names() -> dict[str, tuple[Knob, ...]]:
    """Return a dict from each alias to its knobs, without aliases that are also names of knobs."""
    names: dict[str, tuple[Knob, ...]] = {}
    for knob in CATALOGUE:
        for alias in knob.aliases:
            if alias not in knobs_by_name():
                names[alias] = (*names.get(alias, ()), knob)
    return names


def rows_for_key(key: str) -> tuple[Knob, ...]:
    """Return the knobs that the dotted `key` of a profile sets."""
    if key in knobs_by_name():
        return (knobs_by_name()[key],)
    obeying = tuple(knob for knob in CATALOGUE if knob.profile_key == key)
    return obeying or other_names().get(key, ())


def explanations(name: str, causes: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Return an explanation of every knob that matches `name`.

    `name` is the name of a knob, a key of a profile, an alias, a variable, or the last part of a
    name. Raises `ProfileError` if no knob matches, and suggests a similar name, also of `causes`.
    """
    if name in WITHOUT_EFFECT:
        raise ProfileError.about(f"{name} does nothing: {WITHOUT_EFFECT[name]}")
    sections = (f"{name}.", f"backends.{name}.")
    rows = (
        rows_for_key(name)
        or rows_for_key(f"env.{name}")
        or tuple(
            knob
            for knob in CATALOGUE
            if knob.name.endswith(f".{name}") or knob.name.startswith(sections)
        )
    )
    variable = name.removeprefix("env_extra.")
    if not rows and variable in allowed():
        row = allowed()[variable]
        does, values = f"{row.summary}.", row.legal.words
        return [{"knob": row.name, "does": does, "values": values}]
    if not rows:
        keys = [knob.profile_key for knob in (*CATALOGUE, *allowed().values())] + [*causes]
        words = {key.rpartition(".")[2]: key for key in reversed(keys)}
        close = words.get(near(name, words), "") or near(name, keys)
        raise ProfileError.about(
            f"unknown knob or cause '{name}'",
            near=close,
            todo="`torchrepro explain` lists the causes, `torchrepro plan PROFILE` the knobs",
        )
    return [
        {
            "knob": knob.name,
            "does": knob.summary,
            "values": knob.legal.words,
            "latches": PHASES[knob.door] if knob.door else "never: it takes effect at any time",
            "reaches": str(knob.scope),
            "for": knob.hardware,
            "costs": knob.cost,
            "profile key": knob.profile_key if knob.profile_key != knob.name else "",
            "also called": ", ".join(knob.aliases),
            "since": f"torch {knob.since}" if knob.since[:1].isdigit() else knob.since,
            "source": knob.source,
        }
        for knob in rows
    ]
