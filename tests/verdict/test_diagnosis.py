"""Laws of advice: every part of it can be used, and it fits what is known of the runs."""

import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.knobs.catalogue import explanations, knobs_by_name
from torchrepro.profile.load import load
from torchrepro.seeding import uncontrolled
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.diagnosis import advice, evidence_of
from torchrepro.verdict.evidence import DRAWING, DROPPING, DROPPING_INSIDE, RULES
from torchrepro.verdict.value import (
    BOTH_CUT,
    Advice,
    Agreed,
    Kind,
    Loader,
    Program,
    Setting,
    UncontrolledRead,
    Verdict,
)

from .verdicts import divergence, equal, parted, side

CPU = {"hardware": {"instruction set": "AVX2"}, "profile": "seed-only"}
CUDA = {**CPU, "hardware": {"instruction set": "AVX2", "accelerator": "cuda x1"}}
NPU = {**CPU, "hardware": {"accelerator": "npu x8"}}
SEEDED = {"seed.torch": "1234", "dataloader.seeding": "auto"}
NOT_SET = {"input_fingerprints": (UNINITIALISED.hex(),)}
COLLECTIVE = {"op": "c10d::allreduce_", "phase": "collective", "thread": "MainThread"}
OTHER_TORCH = (Setting("version of torch", "2.6.0", "2.13.0"),)
THREADS = (Setting("env.OMP_NUM_THREADS", "2", "4"),)


def both(**values: Any) -> dict[str, Any]:
    """Return both sides of a divergence with the same values."""
    return {"left": side(**values), "right": side(**values)}


# What diverges, the settings in which the runs differ, what one trace's meta says.
CASES = {
    "shorter": (divergence("", Kind.ENDED), (), CPU),
    "both cut off": (divergence("", Kind.ENDED, what=BOTH_CUT), (), CPU),
    "not comparable": (divergence("", Kind.INCOMPARABLE), (), CPU),
    "resumed": (divergence("", Kind.RANDOM), (Setting("resumed", "no", "yes"),), CPU),
    "other seeds": (divergence("", Kind.RANDOM), (Setting("seed.torch", "1", "2"),), CPU),
    "generator": (divergence("", Kind.RANDOM), (), CPU),
    "generator, seeded": (
        divergence("", Kind.RANDOM),
        (),
        {**CPU, "knobs": {"seed.torch": "1234"}},
    ),
    "level step": (divergence("gradient", phase="backward"), (), CPU),
    "drawn from other seeds": (divergence("aten::normal_"), (Setting("seed", "1", "2"),), CPU),
    "dropout": (divergence("aten::native_dropout"), (), CPU),
    "dropout, seeded": (divergence("aten::native_dropout"), (), {**CPU, "knobs": SEEDED}),
    "dropout on the CPU": (divergence("aten::bernoulli_.float"), (), {**CPU, "knobs": SEEDED}),
    "dropout in attention": (
        divergence(
            "aten::_scaled_dot_product_flash_attention_for_cpu", **both(argument="(_, _, _, 0.1)")
        ),
        (),
        {**CPU, "knobs": SEEDED},
    ),
    "drawn on a device": (divergence("aten::uniform_"), (), {**CUDA, "knobs": SEEDED}),
    "drawn": (divergence("aten::randn", **both(**NOT_SET)), (), {**CPU, "knobs": {}}),
    "uninitialised": (divergence("aten::add.Tensor", **both(**NOT_SET)), (), CPU),
    "uninitialised, deterministic": (
        divergence("aten::add.Tensor", **both(**NOT_SET)),
        (),
        {**CPU, "knobs": {"backends.torch.deterministic_algorithms": "error"}},
    ),
    "batch": (divergence("DataLoader", Kind.DATA, phase="data"), (), {**CPU, "knobs": SEEDED}),
    "batch, unseeded": (
        divergence("DataLoader", Kind.DATA, phase="data"),
        (),
        {"knobs": {"seed.torch": "1"}},
    ),
    "data of another rank": (divergence(kind=Kind.DATA, **COLLECTIVE), (), CPU),
    "steps without ops": (divergence(kind=Kind.UNSEEN), (), CPU),
    "data of the program": (divergence(kind=Kind.DATA), (), CPU),
    "race": (divergence("aten::add_.Tensor", thread="Thread-3"), (), CPU),
    "race seen as a changed input": (
        divergence("aten::add_.Tensor", Kind.INPUT, thread="Thread-3"),
        (),
        CPU,
    ),
    "numpy": (divergence(kind=Kind.INPUT), (), CPU),
    "all-reduce on Ascend": (divergence(**COLLECTIVE), (), NPU),
    "all-reduce on CUDA": (divergence(**COLLECTIVE), (), CUDA),
    "all-reduce on CPUs": (divergence(**COLLECTIVE), (), CPU),
    "one op more under other settings": (
        divergence("aten::native_dropout", Kind.ONLY_ONE, right=None),
        (Setting("dropout", "zero", "keep"),),
        CPU,
    ),
    "one op more in another torch": (
        divergence("aten::gelu", Kind.ONLY_ONE, left=None),
        OTHER_TORCH,
        CPU,
    ),
    "argument": (divergence("aten::mul", Kind.ARGUMENT), (), CPU),
    "one op more": (divergence("aten::mul", Kind.ONLY_ONE, right=None), (), CPU),
    "other types": (divergence(right=side(outputs="bfloat16[16, 128, 1024]")), (), CPU),
    "threads": (divergence("aten::addmm"), THREADS, CPU),
    "threads, as found": (divergence("aten::sum"), (Setting("hardware: threads", "2", "1"),), CPU),
    "processor": (
        divergence("aten::sum"),
        (Setting("hardware: instruction set", "AVX2", "AVX512"),),
        CPU,
    ),
    "convolution on another processor": (
        divergence("aten::convolution"),
        (Setting("hardware: instruction set", "AVX2", "AVX512"),),
        CPU,
    ),
    "convolution with other instructions": (
        divergence("aten::convolution"),
        (Setting("env.ONEDNN_MAX_CPU_ISA", "AVX2", "DEFAULT"),),
        CPU,
    ),
    "another model of the same instruction set": (
        divergence("aten::sum"),
        (Setting("hardware: cpu", "A 7313", "A 7763"),),
        CPU,
    ),
    "precision": (
        divergence("aten::convolution"),
        (Setting("backends.cudnn.conv_fp32_precision", "tf32", "ieee"),),
        CUDA,
    ),
    "other settings": (
        divergence("aten::gelu"),
        (Setting("backends.cudnn.enabled", "true", "false"),),
        CPU,
    ),
    "another torch": (divergence("aten::gelu"), OTHER_TORCH, CPU),
    "torch's list": (divergence("aten::scatter_add_"), (), CUDA),
    "torch's list, under the flag": (
        divergence("aten::cumsum"),
        (),
        {**CUDA, "knobs": {"backends.torch.deterministic_algorithms": "error"}},
    ),
    "atomics": (divergence("aten::index_add_"), (), CUDA),
    "compiled": (divergence("compiled region"), (), CPU),
    "convolution on CUDA": (divergence("aten::cudnn_convolution"), (), CUDA),
    "attention on CUDA": (
        divergence("aten::_scaled_dot_product_efficient_attention_backward"),
        (),
        CUDA,
    ),
    "product on CUDA": (divergence("aten::mm"), (), CUDA),
    "product on Ascend": (
        divergence("aten::mm"),
        (),
        {**NPU, "knobs": {"backends.torch.deterministic_algorithms": "error"}},
    ),
    "convolution on the CPU": (divergence("aten::convolution"), (), CPU),
    "product on the CPU": (divergence("aten::addmm"), (), CPU),
    "sum on the CPU": (divergence("aten::sum.dim_IntList"), (), CPU),
    "custom op": (divergence("mylab::fused"), (), CPU),
    "anything on CUDA": (divergence("aten::gelu"), (), CUDA),
    "nothing known": (divergence("aten::gelu"), (), CPU),
}
CLOCK = UncontrolledRead(
    "time.time", uncontrolled.CLOCK, "a/train.py:5", "do not compute with it", 0
)
PROGRAM = {
    "another text": (divergence(), {"settings": (Setting("program_text", "1", "2"),)}),
    "worker_init_fn": (
        divergence("DataLoader", Kind.DATA, phase="data"),
        {"program": Program(loaders=(Loader("train.py:41", 2, "Noise", "by_pid at a/t.py:3"),))},
    ),
    "worker_init_fn of another loader": (
        divergence("DataLoader", Kind.DATA, phase="data"),
        {"program": Program(loaders=(Loader("train.py:9", 2, "Noise", "by_pid at a/t.py:3"),))},
    ),
    "labels agree": (
        divergence(
            *("DataLoader", Kind.DATA),
            left=side(output_fingerprints=("a", "b")),
            right=side(output_fingerprints=("c", "b")),
        ),
        {},
    ),
    "made from values": (divergence("new tensor", Kind.DATA), {}),
    "made from the clock at this line": (
        divergence("new tensor", Kind.DATA),
        {"program": Program(reads=(replace(CLOCK, where="b/train.py:41"),))},
    ),
    "a clock that may only measure": (
        divergence("new tensor", Kind.DATA),
        {"program": Program(reads=(CLOCK,))},
    ),
    "read later": (
        divergence("new tensor", Kind.DATA),
        {"program": Program(reads=(replace(CLOCK, step=8),))},
    ),
    "read later in this step": (
        divergence("new tensor", Kind.DATA, record=5),
        {"program": Program(reads=(replace(CLOCK, step=7, record=6),))},
    ),
    "a thread that started before": (
        divergence("aten::gelu"),
        {"program": Program(reads=(replace(CLOCK, what=uncontrolled.THREADS, where="t.py:4"),))},
    ),
    "one thread that computes": (
        divergence("aten::add_", Kind.ARGUMENT, thread="trainer"),
        {"program": Program(threads=("trainer",))},
    ),
    "a seed from the clock": (
        divergence("augment()", Kind.DATA),
        {"program": Program(reads=(CLOCK, replace(CLOCK, name="seed", left="1", right="2")))},
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

TOLERANCE = {
    "cuda": (CUDA, "backends.cuda.matmul_fp32_precision=ieee"),
    "npu": (NPU, "backends.npu.cube_math_type=KEEP_DTYPE"),
}


def verdict_on(first: Any, settings: tuple[Setting, ...] = (), **values: Any) -> Verdict:
    """Return the verdict of two runs that diverge at `first`."""
    return parted(first, settings=settings, advice=None, **values)


def told(found: Advice | None) -> str:
    """Return every part of an advice."""
    assert found is not None
    assert found.knob == found.setting.partition("=")[0]
    return "\n".join(f"{name}: {value}" for name, value in asdict(found).items() if value)


def test_each_kind_of_divergence_is_told_its_cause_and_the_knob_against_it(golden: Any) -> None:
    """The cause fits the divergence, and the setting is one that is not in force yet."""
    cases = {name: advice(verdict_on(one, two), meta) for name, (one, two, meta) in CASES.items()}

    golden("causes.txt", {name: told(found) for name, found in cases.items()})


def test_what_the_program_has_decides_on_the_cause_and_the_edit(golden: Any) -> None:
    """A cause is named where the program has what it takes, with the line and what to change."""
    meta = {**CPU, "knobs": SEEDED}
    cases = {
        name: advice(verdict_on(first, **{"settings": (), **known}), meta)
        for name, (first, known) in PROGRAM.items()
    }

    golden("causes_in_programs.txt", {name: told(found) for name, found in cases.items()})


@pytest.mark.parametrize("device", TOLERANCE)
def test_what_lies_beyond_a_tolerance_is_told_the_precision_of_the_device(device: str) -> None:
    """Where statistics are compared, precision is suspected before the order of sums."""
    meta, setting = TOLERANCE[device]

    found = advice(verdict_on(divergence("aten::mm"), (), tolerance=(1e-3, 1e-5)), meta)

    assert found is not None
    assert found.setting == setting


def test_no_cause_is_out_of_reach() -> None:
    """Every row is the first to fit for some divergence above."""
    told = [(verdict_on(case[0], case[1]), case[2]) for case in CASES.values()]
    told += [
        (verdict_on(divergence("aten::mm"), tolerance=(1.0, 1.0)), meta)
        for meta, _ in TOLERANCE.values()
    ]
    told += [(verdict_on(case[0], **case[1]), CPU) for case in PROGRAM.values()]

    first_to_fit = {
        next(number for number, row in enumerate(RULES) if evidence_of(verdict, meta).fits(row))
        for verdict, meta in told
    }

    assert first_to_fit == set(range(len(RULES)))


FIXES = sorted({(fix.key, fix.value) for row in RULES for fix in row.fixes})


@pytest.mark.parametrize(("key", "value"), FIXES)
def test_every_setting_proposed_is_one_that_a_profile_takes(key: str, value: str) -> None:
    """An override out of an advice is legal, and its knob can be explained."""
    assert load("seed-only", [f"{key}={value}"]).resolved.settings()
    assert explanations(key)


@pytest.mark.parametrize("name", knobs_by_name())
def test_a_knob_in_which_the_runs_differ_is_proposed_as_a_legal_override(name: str) -> None:
    """What follows from any knob that differs names that knob's key, or another cause."""
    settings = (Setting(name, "true", "false"),)

    found = advice(verdict_on(divergence("aten::addmm"), settings), CPU)

    assert found is not None
    assert not found.knob or explanations(found.knob)
    if found.setting.startswith("env.") and found.knob == name:
        assert found.setting == f'{name}="true"'


def test_a_knob_that_is_in_force_already_is_not_proposed_but_named() -> None:
    """When everything that usually helps is in force, the advice says so instead."""
    knobs = {"backends.torch.deterministic_algorithms": "error", "device.fallback": "cpu"}

    found = advice(verdict_on(divergence("aten::cumsum"), ()), {**CUDA, "knobs": knobs})

    assert found is not None
    assert not found.setting
    assert "Already set, without effect" in found.cause


def test_a_knob_with_two_values_is_in_force_in_neither_run() -> None:
    """A fix that only one of the runs had is proposed for both."""
    settings = (Setting("dropout", "zero", "keep"),)
    meta = {**CPU, "knobs": {**SEEDED, "dropout": "zero"}}

    found = advice(verdict_on(divergence("aten::native_dropout"), settings), meta)

    assert found is not None
    assert found.setting == "dropout=zero"


def test_runs_that_are_the_same_need_no_advice() -> None:
    """Without a divergence there is nothing to advise."""
    assert advice(equal()) is None


@given(
    op=st.text(max_size=12) | st.sampled_from(sorted(DRAWING | DROPPING_INSIDE)),
    kind=st.sampled_from(Kind),
    phase=st.sampled_from(["forward", "backward", "optimizer", "data", "collective", ""]),
    module=st.text(max_size=8),
    step=st.integers(0, 10**6),
    profile=st.text(min_size=1, max_size=8),
)
def test_every_divergence_gets_an_advice_that_a_shell_takes(
    op: str, kind: Kind, phase: str, module: str, step: int, profile: str
) -> None:
    """Whatever diverges, a cause is told, and the command to look closer names what it is about."""
    first = divergence(op, kind, phase=phase, module=module, step=step)
    agreed = Agreed(step - 1, "op by op", step - 1, then_in_full=True) if step else None
    seen = kind not in (Kind.VALUES, Kind.UNSEEN)

    found = advice(
        verdict_on(first, (), agreed=agreed), {"profile": profile}, "python train.py --lr 1"
    )

    assert found is not None
    assert found.cause
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
def test_what_a_recording_has_not_read_may_have_changed(
    op: str, meta: dict[str, Any], *, said: bool
) -> None:
    """Without detail, equal inputs are what torch last wrote: the command reads them anew."""
    found = advice(parted(divergence(op), settings=()), meta)

    assert found is not None
    assert ("an input was changed outside torch in mid-step" in found.cause) == said
    assert (" --detail -- " in found.closer) == said


def test_nothing_is_proposed_to_look_closer_at_where_all_is_seen() -> None:
    """With elements at hand, or a run that has ended, there is nothing more to record."""
    seen = verdict_on(replace(divergence(), elements=parted().first.elements), ())  # type: ignore[union-attr]
    ended = verdict_on(divergence("", Kind.ENDED), ())

    assert [advice(each, CPU).closer for each in (seen, ended)] == ["", ""]  # type: ignore[union-attr]


def test_every_op_that_torch_tags_as_random_is_known_by_name() -> None:
    """The names that are kept here, so as not to need torch, are those of this torch and more."""
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


def test_a_verdict_is_told_without_torch() -> None:
    """Advice, page and terminal work where torch is not loaded."""
    code = (
        "import sys, torchrepro.verdict.diagnosis, torchrepro.verdict.page,"
        " torchrepro.verdict.render; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )

    assert done.stdout.strip() == "False"
