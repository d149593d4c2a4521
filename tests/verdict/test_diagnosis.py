"""Laws of advice: it fits the facts about the runs, it is usable, and escalation ends."""

import shlex
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.knobs.catalogue import explanations
from torchrepro.profile.load import load
from torchrepro.seeding import nondeterministic_calls
from torchrepro.trace.format import UNINITIALIZED_INPUT
from torchrepro.verdict.diagnosis import (
    DRAWING,
    DROPOUT,
    DROPPING,
    DROPPING_INSIDE,
    ESCALATION,
    LOADER,
    RULES,
    WORKERS,
    advice,
    evidence_of,
    levels_above,
    open_fixes,
)
from torchrepro.verdict.value import (
    BOTH_CUT,
    Advice,
    Agreed,
    Divergence,
    Kind,
    Loader,
    NondeterministicRead,
    Program,
    Setting,
    Verdict,
)

from .verdicts import divergence, side, unequal

CPU = {"hardware": {"instruction set": "AVX2"}, "profile": "seed-only"}
CUDA = {**CPU, "hardware": {"instruction set": "AVX2", "accelerator": "cuda x1"}}
NPU = {**CPU, "hardware": {"accelerator": "npu x8"}}
SEEDED = {"seed.torch": "1234", "dataloader.seeding": "auto"}
DETERMINISTIC = {"backends.torch.deterministic_algorithms": "error"}
Case = tuple[Divergence, tuple[Setting, ...], dict[str, Any], tuple[float, float] | None]
"""What diverges, the settings in which the runs differ, what one trace's meta says, a tolerance."""


def case(
    op: str = "",
    kind: Kind = Kind.OUTPUTS,
    meta: dict[str, Any] = CPU,
    *,
    knobs: dict[str, str] | None = None,
    differ: str = "",
    both: dict[str, Any] | None = None,
    tolerance: tuple[float, float] | None = None,
    **values: Any,
) -> Case:
    """Return a divergence; `differ` is ``setting: left, right``, `both` applies to both runs."""
    name, _, sides = differ.rpartition(": ")
    settings = (Setting(name, *sides.split(", ")),) if differ else ()
    sides_of = {"left": side(**both), "right": side(**both)} if both else {}
    meta = meta if knobs is None else {**meta, "knobs": knobs}
    return divergence(op, kind, **sides_of, **values), settings, meta, tolerance


OTHER_TORCH = {"differ": "version of torch: 2.6.0, 2.13.0"}
OTHER_PROCESSOR = {"differ": "hardware: instruction set: AVX2, AVX512"}
NOT_SET = {"both": {"input_fingerprints": (UNINITIALIZED_INPUT.hex(),)}}
COLLECTIVE = {"phase": "collective", "thread": "MainThread"}
ON_A_THREAD = {"thread": "Thread-3"}
ATTENTION = "aten::_scaled_dot_product_{}"

CASES: dict[str, Case] = {
    "shorter": case("", Kind.ENDED),
    "both cut off": case("", Kind.ENDED, what=BOTH_CUT),
    "not comparable": case("", Kind.INCOMPARABLE),
    "resumed": case("", Kind.RANDOM, differ="resumed: no, yes"),
    "other seeds": case("", Kind.RANDOM, differ="seed.torch: 1, 2"),
    "generator": case("", Kind.RANDOM),
    "generator, seeded": case("", Kind.RANDOM, knobs={"seed.torch": "1234"}),
    "level step": case("gradient", phase="backward"),
    "drawn from other seeds": case("aten::normal_", differ="seed: 1, 2"),
    "dropout": case("aten::native_dropout"),
    "dropout of a generator of its own": case("aten::native_dropout", knobs=SEEDED),
    "drawn from a generator of its own": case(
        "aten::randn", knobs=SEEDED, both={"argument": "([3], generator=Generator)"}
    ),
    "drawn, seeded": case("aten::randn", knobs=SEEDED),
    "dropout, seeded": case("aten::native_dropout", knobs=SEEDED),
    "dropout on the CPU": case("aten::bernoulli_.float", knobs=SEEDED),
    "dropout in attention": case(
        ATTENTION.format("flash_attention_for_cpu"),
        knobs=SEEDED,
        both={"argument": "(_, _, _, 0.1)"},
    ),
    "drawn on a device": case("aten::uniform_", meta=CUDA, knobs=SEEDED),
    "drawn": case("aten::randn", knobs={}, **NOT_SET),
    "uninitialised": case("aten::add.Tensor", **NOT_SET),
    "uninitialised, deterministic": case("aten::add.Tensor", knobs=DETERMINISTIC, **NOT_SET),
    "batch": case("DataLoader", Kind.DATA, knobs=SEEDED, phase="data"),
    "batch, unseeded": case("DataLoader", Kind.DATA, {"knobs": {"seed.torch": "1"}}, phase="data"),
    "data of another rank": case("c10d::allreduce_", Kind.DATA, **COLLECTIVE),
    "steps without ops": case("aten::gelu", Kind.UNSEEN),
    "data of the program": case("aten::gelu", Kind.DATA),
    "race": case("aten::add_.Tensor", **ON_A_THREAD),
    "race seen as a changed input": case("aten::add_.Tensor", Kind.INPUT, **ON_A_THREAD),
    "numpy": case("aten::gelu", Kind.INPUT),
    "a pickled object": case(
        "c10d::broadcast_", Kind.DATA, both={"outputs": "uint8[512]"}, **COLLECTIVE
    ),
    "all-reduce on Ascend": case("c10d::allreduce_", meta=NPU, **COLLECTIVE),
    "all-reduce on CUDA": case("c10d::allreduce_", meta=CUDA, **COLLECTIVE),
    "all-reduce on CPUs": case("c10d::allreduce_", **COLLECTIVE),
    "one op more under other settings": case(
        "aten::native_dropout", Kind.ONLY_ONE, differ="dropout: zero, keep", right=None
    ),
    "one op more in another torch": case("aten::gelu", Kind.ONLY_ONE, left=None, **OTHER_TORCH),
    "argument": case("aten::mul", Kind.ARGUMENT),
    "one op more": case("aten::mul", Kind.ONLY_ONE, right=None),
    "other types": case("aten::gelu", right=side(outputs="bfloat16[16, 128, 1024]")),
    "threads": case("aten::addmm", differ="env.OMP_NUM_THREADS: 2, 4"),
    "threads, as found": case("aten::sum", differ="hardware: threads: 2, 1"),
    "out of tolerance on CUDA": case("aten::mm", meta=CUDA, tolerance=(1e-3, 1e-5)),
    "out of tolerance on Ascend": case("aten::mm", meta=NPU, tolerance=(1e-3, 1e-5)),
    "processor": case("aten::sum", **OTHER_PROCESSOR),
    "convolution on another processor": case("aten::convolution", **OTHER_PROCESSOR),
    "convolution with other instructions": case(
        "aten::convolution", differ="env.ONEDNN_MAX_CPU_ISA: AVX2, DEFAULT"
    ),
    "another model of the same instruction set": case(
        "aten::sum", differ="hardware: cpu: A 7313, A 7763"
    ),
    "precision": case(
        "aten::convolution", meta=CUDA, differ="backends.cudnn.conv_fp32_precision: tf32, ieee"
    ),
    "other settings": case("aten::gelu", differ="backends.cudnn.enabled: true, false"),
    "another torch": case("aten::gelu", **OTHER_TORCH),
    "torch's list": case("aten::scatter_add_", meta=CUDA),
    "torch's list, under the flag": case("aten::cumsum", meta=CUDA, knobs=DETERMINISTIC),
    "torch's list, all in force": case(
        "aten::cumsum", meta=CUDA, knobs={**DETERMINISTIC, "device.fallback": "cpu"}
    ),
    "atomics": case("aten::index_add_", meta=CUDA),
    "compiled": case("compiled region"),
    "convolution on CUDA": case("aten::cudnn_convolution", meta=CUDA),
    "attention on CUDA": case(ATTENTION.format("efficient_attention_backward"), meta=CUDA),
    "product on CUDA": case("aten::mm", meta=CUDA),
    "product on Ascend": case("aten::mm", meta=NPU, knobs=DETERMINISTIC),
    "convolution on the CPU": case("aten::convolution"),
    "product on the CPU": case("aten::addmm"),
    "sum on the CPU": case("aten::sum.dim_IntList"),
    "custom op": case("mylab::fused"),
    "anything on CUDA": case("aten::gelu", meta=CUDA),
    "nothing known": case("aten::gelu"),
}
CLOCK = NondeterministicRead(
    "time.time", nondeterministic_calls.CLOCK, "a/train.py:5", "do not compute with it", 0
)
OTHER_SEED = replace(CLOCK, name="seed", left="1", right="2")
SURER = replace(CLOCK, name="os.urandom", what=nondeterministic_calls.ENTROPY)
A_THREAD = replace(CLOCK, what=nondeterministic_calls.THREADS, where="t.py:4")
MADE, BATCH = ("new tensor", Kind.DATA), ("DataLoader", Kind.DATA)


def loader(where: str) -> Program:
    """Return a program whose loader has a `worker_init_fn`."""
    return Program(loaders=(Loader(where, 2, "Noise", "by_pid at a/t.py:3"),))


PROGRAM: dict[str, tuple[Divergence, dict[str, Any]]] = {
    "another text": (divergence(), {"settings": (Setting("program_text", "1", "2"),)}),
    "worker_init_fn": (divergence(*BATCH, phase="data"), {"program": loader("train.py:41")}),
    "worker_init_fn of another loader": (
        divergence(*BATCH, phase="data"),
        {"program": loader("train.py:9")},
    ),
    "labels agree": (
        divergence(
            *BATCH,
            left=side(output_fingerprints=("a", "b")),
            right=side(output_fingerprints=("c", "b")),
        ),
        {},
    ),
    "made from values": (divergence(*MADE), {}),
    **{
        name: (divergence(*MADE, **values), {"program": Program(reads=(read,))})
        for name, read, values in (
            ("made from the clock at this line", replace(CLOCK, where="b/train.py:41"), {}),
            ("a clock that may only measure", CLOCK, {}),
            ("read later", replace(CLOCK, step=8), {}),
            ("read just before", replace(CLOCK, step=7, record=5), {"record": 5}),
            ("read later in this step", replace(CLOCK, step=7, record=6), {"record": 5}),
        )
    },
    "read at this line, and entropy elsewhere": (
        divergence(*MADE),
        {"program": Program(reads=(replace(CLOCK, where="b/train.py:41"), SURER))},
    ),
    "a thread that started before": (
        divergence("aten::gelu"),
        {"program": Program(reads=(A_THREAD,))},
    ),
    "one thread that computes": (
        divergence("aten::add_", Kind.ARGUMENT, thread="trainer"),
        {"program": Program(threads=("trainer",))},
    ),
    "a seed from the clock": (
        divergence("augment()", Kind.DATA),
        {"program": Program(reads=(CLOCK, OTHER_SEED))},
    ),
    "optimizer": (
        divergence("SGD.step()", Kind.ARGUMENT, phase="optimizer", what="lr: 0.1 and 0.2"),
        {},
    ),
    "written by threads": (
        divergence("aten::mul", Kind.ARGUMENT, writers=("Thread-1", "MainThread")),
        {},
    ),
    "no loader": (divergence("", Kind.RANDOM), {"program": Program(features=())}),
}
"""What diverges, and what is known besides."""


def verdict_on(first: Any, settings: tuple[Setting, ...] = (), **values: Any) -> Verdict:
    """Return the verdict of two runs that diverge at `first`."""
    return unequal(first, settings=settings, advice=None, **values)


def known(one: Case) -> tuple[Verdict, dict[str, Any]]:
    """Return the verdict of a case, and the meta of one trace."""
    first, settings, meta, tolerance = one
    return verdict_on(first, settings, tolerance=tolerance), meta


def advised(*args: Any, **values: Any) -> Advice:
    """Return the advice on a case, which must exist."""
    found = advice(*args, **values)
    assert found is not None
    assert found.cause
    return found


def helpful(verdict: Verdict, meta: dict[str, Any]) -> list[str]:
    """Return the settings to try, the likeliest first."""
    return [f"{fix.key}={fix.value}" for fix in open_fixes(evidence_of(verdict, meta))]


def text_of(verdict: Verdict, meta: dict[str, Any]) -> str:
    """Return all texts of an advice."""
    parts = {**asdict(advised(verdict, meta)), "may help": ", ".join(helpful(verdict, meta))}
    return "\n".join(f"{name}: {value}" for name, value in parts.items() if value)


def test_each_kind_of_divergence_gets_its_cause_and_the_settings_to_try(golden: Any) -> None:
    """The cause fits the divergence, and the proposed settings are not set yet."""
    golden("causes.txt", {name: text_of(*known(one)) for name, one in CASES.items()})


def test_facts_about_the_program_determine_cause_and_edit(golden: Any) -> None:
    """A cause is named only if the program can have it, with its line and an edit."""
    meta = {**CPU, "knobs": SEEDED}
    cases = {name: text_of(verdict_on(one, **more), meta) for name, (one, more) in PROGRAM.items()}

    golden("causes_in_programs.txt", cases)


def test_every_rule_is_reachable() -> None:
    """Every rule is the first that fits for some divergence above."""
    every = [*map(known, CASES.values())]
    every += [(verdict_on(case[0], **case[1]), CPU) for case in PROGRAM.values()]

    first_to_fit = {
        next(number for number, row in enumerate(RULES) if evidence_of(verdict, meta).fits(row))
        for verdict, meta in every
    }

    assert first_to_fit == set(range(len(RULES)))


FIXES = sorted({(fix.key, fix.value) for row in RULES for fix in row.fixes})


@pytest.mark.parametrize(("key", "value"), FIXES)
def test_every_proposed_setting_is_a_legal_override(key: str, value: str) -> None:
    """Its override is legal, and its knob can be explained."""
    assert load("seed-only", [f"{key}={value}"]).resolved.settings()
    assert explanations(key)


@given(
    op=st.text(max_size=12) | st.sampled_from(sorted(DRAWING | DROPPING_INSIDE)),
    kind=st.sampled_from(Kind),
    phase=st.sampled_from(["forward", "backward", "optimizer", "data", "collective", ""]),
    module=st.text(max_size=8),
    step=st.integers(0, 10**6),
    profile=st.text(min_size=1, max_size=8),
)
def test_the_commands_of_every_advice_are_valid_in_a_shell(
    op: str, kind: Kind, phase: str, module: str, step: int, profile: str
) -> None:
    """Whatever diverges, a cause is named, and the closer look names what it is about."""
    first = divergence(op, kind, phase=phase, module=module, step=step)
    agreed = Agreed(step - 1, "op by op", step - 1, then_in_full=True) if step else None
    seen = kind not in (Kind.VALUES, Kind.UNSEEN)

    verdict = verdict_on(first, agreed=agreed)
    found = advised(verdict, {"profile": profile}, "python train.py --lr 1")

    assert "{" not in found.cause.replace(op, "").replace(module, "")
    if found.closer:
        words = shlex.split(found.closer)
        assert words[:3] == ["torchrepro", "run", profile]
        assert words[words.index("--steps") + 1] == f"{max(step - 1, 0)}:{step + 1}"
        assert not (seen and module) or words[words.index("--keep") + 1] == module
        assert seen or "--keep" not in words
        assert words[-4:] == ["python", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("op", "meta", "said"),
    [
        ("aten::mm", {**CPU, "detail": False}, True),
        ("aten::mm", {**CPU, "detail": True}, False),
        ("aten::normal_", {**CPU, "detail": False}, False),
    ],
)
def test_an_input_that_was_not_fingerprinted_again_may_have_changed(
    op: str, meta: dict[str, Any], *, said: bool
) -> None:
    """Without detail, equal inputs are what torch last wrote: the command reads them anew."""
    found = advised(unequal(divergence(op), settings=()), meta)

    assert ("an input was changed outside torch within the step" in found.cause) == said
    assert (" --detail -- " in found.closer) == said


def test_no_closer_look_is_proposed_if_it_shows_nothing_new() -> None:
    """With elements, or for a run that ended early, there is nothing more to record."""
    seen = replace(divergence(), elements=unequal().first.elements)  # type: ignore[union-attr]
    ended = divergence("", Kind.ENDED)

    assert [advised(verdict_on(each), CPU).closer for each in (seen, ended)] == ["", ""]


def test_every_op_that_torch_tags_as_random_is_known_by_name() -> None:
    """The table, which avoids a dependency on torch, has all tagged ops of this torch."""
    tag = torch.Tag.nondeterministic_seeded
    tagged = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        found = getattr(getattr(torch.ops, namespace), name, None) if namespace == "aten" else None
        overloads = found.overloads() if hasattr(found, "overloads") else ()
        if any(tag in getattr(found, each).tags for each in overloads):
            tagged.add(name)

    assert len(tagged) > 50
    assert tagged <= DRAWING | DROPPING | DROPPING_INSIDE


NAMES = [step.name for step in ESCALATION]


def values(profile: str, *overrides: str) -> Any:
    """Return the values of a resolved profile."""
    return load(profile, overrides).resolved.values


@pytest.mark.parametrize("profile", ["seed-only", "train-fast", "debug-strict", "npu-align"])
@pytest.mark.parametrize("accelerator", ["", "cuda"])
def test_escalation_ends_at_the_top_and_repeats_no_level(profile: str, accelerator: str) -> None:
    """With a level's overrides in the profile, the next one is the next higher that acts here."""
    first = divergence("gradient", module="layers.2.mlp")  # any op may have computed it
    program = Program(accelerator=accelerator)
    passed: list[str] = []
    overrides: tuple[str, ...] = ()
    while level := next(levels_above(values(profile, *overrides), first, program), None):
        passed.append(level.name)
        overrides += level.overrides

    assert passed == [name for name in NAMES if name in passed]
    assert len(set(passed)) == len(passed)
    on_cpu = NAMES[3:5] if profile != "npu-align" else NAMES[3:4]
    assert set(on_cpu) <= set(passed)
    assert ("the suspect module on the CPU" in passed) == bool(accelerator)


def test_each_level_includes_all_lower_levels() -> None:
    """From an empty profile, all levels come in order, each with the settings of the last."""
    found = list(levels_above({}, divergence("gradient"), Program(accelerator="npu")))

    assert [level.name for level in found] == NAMES
    for below, above in pairwise(found):
        assert above.overrides[: len(below.overrides)] == below.overrides


@given(
    module=st.text(min_size=1, max_size=12)
    | st.sampled_from(["0", "0.", "1.5", "1e5", "null", "_a_"])
)
def test_every_module_name_gives_a_legal_override(module: str) -> None:
    """Names that the grammar of overrides does not allow become patterns that match them."""
    first, program = divergence("gradient", module=module), Program(accelerator="cuda")
    *_, top = levels_above({"seed": 1}, first, program)
    found = load("seed-only", top.overrides).resolved.values.get("device", {}).get("modules", {})

    assert all(fnmatchcase(module, pattern) for pattern in found)
    assert bool(found) == (top.name == NAMES[-1])


def test_the_whole_model_and_ops_outside_of_modules_have_no_module_level() -> None:
    """The level needs the path of a module within its model."""
    for module in ("", "Net"):
        first, program = divergence("gradient", module=module), Program(accelerator="cuda")
        assert list(levels_above({}, first, program))[-1].name == NAMES[-2]


def test_a_policy_per_op_is_not_replaced() -> None:
    """A policy for single ops is not replaced by a policy for all."""
    declared = values("debug-strict", "device.fallback={ops: {cumsum: native}}")
    *_, top = levels_above(declared, divergence("gradient"))

    assert not any("fallback" in each for each in top.overrides)
    assert top.overrides[:2] == ("env.OMP_NUM_THREADS=1", "dataloader.num_workers=0")


SEEDS, ONE_THREAD, KERNELS, NO_WORKERS, NO_DROPOUT, HOST, ON_CPU = NAMES


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (divergence("aten::mm", module="net.0"), [KERNELS, ON_CPU]),
        (divergence("aten::native_dropout", module="net.0"), [SEEDS, NO_DROPOUT, HOST]),
        (divergence("DataLoader", Kind.DATA, phase="data"), [SEEDS, ONE_THREAD, NO_WORKERS]),
        (divergence("new tensor", Kind.DATA), [SEEDS, ONE_THREAD]),
        (divergence("SGD.step()", Kind.ARGUMENT, phase="optimizer"), [SEEDS, ONE_THREAD]),
        (divergence("aten::mm", Kind.INPUT), []),
        (divergence("", Kind.RANDOM), [SEEDS, NO_WORKERS, NO_DROPOUT, HOST]),
    ],
)
def test_levels_depend_on_the_kind_of_divergence(first: Any, expected: list[str]) -> None:
    """Deterministic kernels do not help with different data, nor seeds with a kernel."""
    found = levels_above({}, first, Program(accelerator="cuda"))

    assert [level.name for level in found] == expected


def test_no_level_is_proposed_without_effect_on_the_program() -> None:
    """Without a loader, dropout and a device, no level and no setting applies to them."""
    nothing = list(levels_above({}, divergence("gradient"), Program(features=())))
    text = " ".join(nothing[-1].overrides)

    assert [level.name for level in nothing] == [SEEDS, ONE_THREAD, KERNELS]
    assert not any(word in text for word in ("dataloader", "dropout", "cudnn", "CUBLAS", "HCCL"))
    for feature, name in ((WORKERS, NO_WORKERS), (DROPOUT, NO_DROPOUT)):
        found = levels_above({}, divergence("gradient"), Program(features=(feature, LOADER)))
        assert [level.name for level in found] == [SEEDS, ONE_THREAD, KERNELS, name]


@pytest.mark.parametrize("level", ["step", "module"])
@pytest.mark.parametrize(
    ("workers", "expected"), [(None, set()), (0, {LOADER}), (2, {LOADER, WORKERS})]
)
def test_every_level_of_recording_has_the_loaders(
    tmp_path: Path, level: str, workers: int | None, expected: set[str]
) -> None:
    """Of what only ops show, such as dropout, anything may be there; loaders are known."""
    for name in ("one", "other"):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.ones(4, 2)
        batches = [data] if workers is None else DataLoader(data, num_workers=workers)
        with torchrepro.record(tmp_path / name, level=level):
            for batch in batches:
                model(batch).sum().backward()
                optimizer.step()
    found = torchrepro.compare(tmp_path / "one", tmp_path / "other").program.features

    assert set(found) & {LOADER, WORKERS} == expected
    assert DROPOUT in found
