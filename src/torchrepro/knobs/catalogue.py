"""All rows, in the order in which they are set: environment, then flags, then seeds.

Those of torch and its back ends, and of variables, have modules of their own. The rows of policies
and of the seed are here, and what all rows say about a knob, in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torchrepro.errors import ProfileError
from torchrepro.knobs.knob import (
    SEED,
    Integer,
    Knob,
    LazyAccess,
    MappingOf,
    OneOf,
    Phase,
    Scope,
    Text,
    WordOrMapping,
)
from torchrepro.knobs.torch_rows import CPU, CUDA, CUDNN, DOCS, NPU, RANDOMNESS, TORCH
from torchrepro.knobs.variables import ENV, WITHOUT_EFFECT, allowed
from torchrepro.messages import near

_DEVICE = Text(r"[a-z_][a-z0-9_]*(:[0-9]{1,4})?", "cpu, cuda, npu, xpu, mps", variable=False)
DEVICES_OF_MODULES = MappingOf(
    _DEVICE,
    "a mapping such as {encoder.layer.*: cpu}, of devices such as cpu, cuda or cuda:1",
    no_mapping="not a mapping of patterns to devices",
    is_name=lambda name: isinstance(name, str) and name != "",
    no_name="a key is not the name of a module",
    wrong="not the name of a device",
    nested="not a device: write the whole name of a module as one key",
)
SEEDS_OF_STREAMS = MappingOf(
    SEED,
    "a mapping such as {split: 3}, each a whole number, 0 to 4294967295",
    no_mapping="not a mapping of streams to seeds",
    no_name="not a mapping of streams to seeds",
    wrong="{name}: {why}",
    located=False,
)
_RANK_POLICY = OneOf(("distinct", "same"))
RANK_POLICIES = WordOrMapping(
    _RANK_POLICY,
    MappingOf(
        _RANK_POLICY,
        "one of them per mesh dimension as in {dp: distinct}",
        is_name=lambda _: True,
        located=False,
    ),
)
_FALLBACK_OF_OP = OneOf(("cpu", "error", "native"))
FALLBACK = WordOrMapping(
    OneOf(("error", "cpu")),
    MappingOf(
        _FALLBACK_OF_OP,
        f"per op as in {{ops: {{cumsum: cpu}}}}: {_FALLBACK_OF_OP.words}",
        no_mapping="not a mapping of ops to words",
        no_name="not the name of an op",
    ),
    under="ops",
)


@dataclass(slots=True)
class StoredValue:
    """A value that is state of torchrepro alone: whoever acts on it reads it here."""

    value: Any

    def read(self) -> Any:
        return self.value

    def write(self, value: Any) -> None:
        self.value = value

    save = read
    restore = write


def _policy(
    name: str,
    legal: Any,
    access: Any,
    summary: str,
    cost: str = "none",
    source: str = f"{DOCS}/library.html",
    **more: Any,
) -> Knob:
    columns = {"library": "torch", "warn_if_unsupported": True, **more}
    return Knob(name, legal, access, summary, cost, source, **columns)


_SEED_PLAN: dict[str, Any] = {
    "source": RANDOMNESS,
    "library": "",
    "set_on_import": "",
    "warn_if_unsupported": False,
}

POLICIES = (
    _policy(
        "dropout",
        OneOf(("keep", "zero")),
        LazyAccess("policies.dropout:policy", at_rest="keep", inherited=True),
        "zero turns torch's dropout into the identity, and rrelu into what it is in evaluation: "
        "in modules and functions, in compiled, scripted and exported code, inside of attention "
        "and recurrent kernels, and in known modules that write masks of their own. Which random "
        "ops still ran is in the report.",
        "zero: less than dropout, one copy instead of a random mask (a step of a small transformer "
        "took 0.6 times as long); 5 us for every other op that draws, which is counted",
        scope=Scope.EVERY_THREAD,
    ),
    _policy(
        "device.rng",
        OneOf(("native", "host")),
        LazyAccess("policies.host_rng:policy", at_rest="native", inherited=True),
        "host draws every random number from the CPU's generator, the same on every device.",
        "host: 16 us per op that draws, 2 ns per uniform number (a million: 2.2 ms, measured on "
        "2 cores), and the copy to the device; without an accelerator nothing",
        scope=Scope.EVERY_THREAD,
    ),
    _policy(
        "device.fallback",
        FALLBACK,
        LazyAccess("policies.fallback:policy", at_rest=None),
        "What an op does of which torch has no deterministic kernel here: raise and say what to do "
        "instead, or run on the CPU, that op alone. `{ops: {cumsum: cpu, put_: error, "
        "median: native}}` decides for every call of an op, on devices that raise nothing too; "
        "native lets it vary; a pattern such as `*` decides for those that would raise. Kernels "
        "that inductor writes itself are no calls of an op.",
        "5 us per call of an op that torch may refuse, nothing for any other op; cpu: a copy to "
        "the CPU and one back for each call that runs there",
        "https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
        scope=Scope.EVERY_THREAD,
        needs="backends.torch.deterministic_algorithms",
        needing=("cpu",),
        needed=("error",),
    ),
    _policy(
        "device.modules",
        DEVICES_OF_MODULES,
        LazyAccess("policies.placement:policy", at_rest={}),
        "Parts of a model that run elsewhere, to find out whether a device is the culprit. Such a "
        "part draws random numbers from the generator of the device that it runs on, and runs "
        "uncompiled; gradients, buffers and checkpoints are those of the model as it is.",
        "copies of its inputs, outputs and weights per call of such a part; 3 us per call of any "
        "module",
        "https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html",
        scope=Scope.EVERY_THREAD,
    ),
    _policy(
        "streams",
        SEEDS_OF_STREAMS,
        LazyAccess("seeding.global_seeds:streams_field"),
        "Streams with a seed of their own, so that one source of variation can be swept alone.",
        **_SEED_PLAN,
    ),
    _policy(
        "ranks",
        RANK_POLICIES,
        LazyAccess("seeding.global_seeds:ranks_field"),
        "Whether the ranks of a distributed run draw the same numbers or each its own. Left "
        "alone, named streams differ and the global generators start from one seed. The order of "
        "samples is what torch gives: the same on ranks whose generators are, and a "
        "DistributedSampler divides one.",
        **_SEED_PLAN,
    ),
    _policy(
        "dataloader.seeding",
        OneOf(("auto", "none")),
        LazyAccess("seeding.loader_hook:seeding_policy"),
        "auto follows torch's own protocol. The order of samples is what torch gives. Each sample "
        "draws from the base seed that torch draws for the iteration, its index and the program's "
        "own seeds, whatever the number of workers. A loader with a worker_init_fn of its author's "
        "is left alone; that of Lightning, transformers, timm and detectron2 is replaced.",
        "auto: 14 us per sample; per batch 40 us more in a worker, 160 us in the main process",
        source=RANDOMNESS,
        needs="seed.streams",
        needing=("auto",),
    ),
    _policy(
        "dataloader.num_workers",
        Integer(0, 64),
        LazyAccess("seeding.loader_hook:workers_policy"),
        "How many worker processes every loader has, whatever its author said. 0 loads data in the "
        "main process, to find out whether the workers are the culprit.",
        "0: loading no longer overlaps with training",
        source="https://docs.pytorch.org/docs/stable/data.html",
    ),
    _policy(
        "guard",
        OneOf(("none", "warn", "error")),
        StoredValue("none"),
        "Whether knobs are read again before every optimizer step, when the profile is taken back "
        "and at exit, to catch code that changes them. warn names the knob with its old and new "
        "value, and the line that wrote it, on standard error; error stops the run with status 1, "
        "whatever status the program itself leaves with at exit. A change that is put back before "
        "the next step is none.",
        "22 us before every optimizer step for the 23 knobs that debug-strict sets; as much again "
        "per write of a flag or a variable, and such a write in compiled code ends the graph",
        "https://docs.pytorch.org/docs/stable/generated/"
        "torch.optim.optimizer.register_optimizer_step_pre_hook.html",
        guarded=False,
    ),
)

_seed = partial(Knob, key="seed", legal=SEED, moves_on=True, guarded=False)


def _accelerator(device: str, hardware: str, source: str, since: str) -> Knob:
    return _seed(
        name=f"seed.{device}",
        hardware=hardware,
        access=LazyAccess(f"seeding.global_seeds:{device}_seed"),
        library="torch",
        summary=f"Seed of the default generator of every {device.upper()} device.",
        cost="none; before device init the seed waits in torch's queue",
        source=source,
        since=since,
        aliases=(f"torch.{device}.manual_seed_all", f"torch.{device}.manual_seed"),
    )


SEEDS = (
    _seed(
        name="seed.streams",
        set_on_import="",
        access=LazyAccess("seeding.global_seeds:root_seed"),
        summary="Root of every named stream: torchrepro.stream, seeded, dataloader_kwargs.",
        cost="none; deriving a stream takes about 5 microseconds",
        source="https://www.rfc-editor.org/rfc/rfc7693",
    ),
    _seed(
        name="seed.libraries",
        access=LazyAccess("seeding.global_seeds:library_seeds"),
        library="torch",
        summary="Seed of other libraries that draw numbers (cupy, tensorflow, gymnasium, "
        "registered ones), given when they are loaded.",
        cost="none",
        source="https://docs.cupy.dev/en/stable/reference/random.html",
    ),
    _seed(
        name="seed.python",
        set_on_import="random",
        access=LazyAccess("seeding.global_seeds:python_seed"),
        summary="Seed of the generator behind the functions of Python's `random`.",
        cost="none",
        source="https://docs.python.org/3/library/random.html#random.seed",
        aliases=("random.seed",),
    ),
    _seed(
        name="seed.numpy",
        set_on_import="numpy.random",
        access=LazyAccess("seeding.global_seeds:numpy_seed"),
        library="numpy",
        summary="Seed of numpy's legacy global generator; a Generator of your own is not reached.",
        cost="about 6 ms the first time: numpy loads numpy.random",
        source="https://numpy.org/doc/stable/reference/random/legacy.html",
        aliases=("numpy.random.seed", "np.random.seed"),
    ),
    _seed(
        name="seed.torch",
        access=LazyAccess("seeding.global_seeds:torch_seed"),
        library="torch",
        summary="Seed of torch's default CPU generator, of which only the low 32 bits count.",
        cost="none",
        source=RANDOMNESS,
        aliases=("torch.manual_seed",),
    ),
    _seed(
        name="seed.calls",
        access=LazyAccess("seeding.global_seeds:seeding_calls"),
        library="torch",
        summary="Later calls of the program that seed a generator are honoured and recorded, each "
        "with its line.",
        cost="about a microsecond per such call",
        source=RANDOMNESS,
    ),
    _accelerator("cuda", "CUDA", RANDOMNESS, ""),
    _accelerator("npu", "Ascend", "https://pypi.org/project/torch-npu/", "torch_npu 2.1"),
    _accelerator("mps", "MPS", "https://docs.pytorch.org/docs/stable/mps.html", "1.12"),
    _accelerator("xpu", "XPU", "https://docs.pytorch.org/docs/stable/xpu.html", "2.3"),
)

# Inside torch, the NPU's level comes after the flag that its setter also moves. The seeds are
# last: whatever an earlier write draws from a generator must not show in the numbers of the run.
CATALOGUE: tuple[Knob, ...] = (
    *ENV,
    *(*TORCH, *CUDA, *CUDNN, *CPU, *NPU),
    *POLICIES,
    *SEEDS,
)


@cache
def knobs_by_name() -> dict[str, Knob]:
    """Return every row under its name."""
    return {knob.name: knob for knob in CATALOGUE}


@cache
def other_names() -> dict[str, tuple[Knob, ...]]:
    """Return, for every alias that is not itself a row, the rows it means."""
    names: dict[str, tuple[Knob, ...]] = {}
    for knob in CATALOGUE:
        for alias in knob.aliases:
            if alias not in knobs_by_name():
                names[alias] = (*names.get(alias, ()), knob)
    return names


def rows_for_key(key: str) -> tuple[Knob, ...]:
    """Return the rows that the dotted `key` of a profile sets."""
    if key in knobs_by_name():
        return (knobs_by_name()[key],)
    obeying = tuple(knob for knob in CATALOGUE if knob.profile_key == key)
    return obeying or other_names().get(key, ())


def explanations(name: str) -> list[dict[str, str]]:
    """Return an explanation of every row that `name` means.

    `name` is a row's name, a key of a profile, an alias, a variable, or the last word of a name.
    Raises `ProfileError` with a near match for anything else.
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
        does, values = f"{row.why}.", row.legal.words
        return [{"knob": f"env_extra.{variable}", "does": does, "values": values}]
    if not rows:
        keys = [
            *(knob.profile_key for knob in CATALOGUE),
            *(f"env_extra.{row}" for row in allowed()),
        ]
        words = {key.rpartition(".")[2]: key for key in reversed(keys)}
        close = words.get(near(name, words), "") or near(name, keys)
        raise ProfileError.about(
            f"unknown knob '{name}'",
            near=close,
            todo="`torchrepro plan PROFILE` shows the knobs that a profile sets",
        )
    return [
        {
            "knob": knob.name,
            "does": knob.summary,
            "values": knob.legal.words,
            "latches": "never: it takes effect at any time"
            if knob.phase is Phase.ANY_TIME
            else str(knob.phase),
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
