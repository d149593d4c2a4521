"""Comparison of whole runs: their ranks, ends, settings and levels."""

import ctypes
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchrepro
from torchrepro import TraceError
from torchrepro.seeding.nondeterministic_calls import ENTROPY, EXPLICIT_SEED
from torchrepro.verdict.comparison import compare
from torchrepro.verdict.value import Kind, Program, Setting

from .traces import Op, Run, Step, chain, compared, computed, diverged, first_of, value, write


def _run(steps: int = 3) -> Run:
    return [Step(chain(4, step=step), losses=(0.5, 1.5)) for step in range(steps)]


OTHER = [*_run()[:2], Step(chain(4, step=2, weights="v"), losses=(0.5, 1.5))]
"""A run that differs in its last step."""


def _rank(number: int, *, batch: object = "batch", other: object = "batch") -> Run:
    run = []
    for step in range(3):
        mine, theirs = (
            computed(Op("aten::mm", "fc", "backward"), value(which, rank, step))
            for which, rank in ((batch, number), (other, 1 - number))
        )
        both = sorted(mine.outputs + theirs.outputs)
        collective = Op("c10d::allreduce_", phase="collective")
        reduced = replace(collective, inputs=mine.outputs, outputs=(value(both),))
        run.append(Step((mine, reduced), parameters=value(both)))
    return run


def _ranks(folder: Path, *runs: Run) -> Path:
    for rank, run in enumerate(runs):
        write(folder, run, {"rank": rank})
    return folder


def test_an_op_of_a_rank_comes_before_results_of_collectives(tmp_path: Path) -> None:
    """The rank with a different batch is named, not a rank that received its gradients."""
    a = _ranks(tmp_path / "a", _rank(0), _rank(1))
    b = _ranks(tmp_path / "b", _rank(0, other="another"), _rank(1, batch="another"))

    verdict = compare(a, b)

    assert (first_of(verdict).rank, first_of(verdict).op) == (1, "aten::mm")
    assert verdict.compared.ranks == 2
    assert (verdict.propagated, verdict.independent) == (8, 0)


def test_reads_of_the_diverging_rank_come_first(tmp_path: Path) -> None:
    """Its reads come before those of other ranks; a differing seed counts on any rank."""

    def source(name: str, where: str, value: str | None = None) -> dict[str, Any]:
        what = EXPLICIT_SEED if value else ENTROPY
        read = {"name": name, "what": what, "where": where, "times": 1, "value": value}
        return {**read, "step": 0, "record": 0, "instead": "", "in_sample": False}

    folders = []
    for name, batch, seed in (("a", "batch", "1"), ("b", "another", "2")):
        runs = _rank(0, other=batch), _rank(1, batch=batch)
        sources = (
            [source("secrets.randbits", "train.py:3"), source("random.seed", "train.py:9", seed)],
            [source("os.urandom", "train.py:7"), source("random.seed", "train.py:9", "5")],
        )
        for rank, run in enumerate(runs):
            write(tmp_path / name, run, {"rank": rank, "sources": sources[rank]})
        folders.append(tmp_path / name)

    reads = compare(*folders).program.reads

    assert [read.name for read in reads] == ["os.urandom", "random.seed", "secrets.randbits"]
    assert reads[1].is_differing_seed


def test_a_collective_with_equal_inputs_and_unequal_outputs_is_named(tmp_path: Path) -> None:
    """A collective is the first difference if all ranks sent equal values and results differ."""
    runs = [_rank(0), _rank(1)]
    lasts = [replace(run[2].ops[1], outputs=(value("another order"),)) for run in runs]
    others = [
        [*run[:2], Step((run[2].ops[0], last))] for run, last in zip(runs, lasts, strict=True)
    ]

    first = first_of(compare(_ranks(tmp_path / "a", *runs), _ranks(tmp_path / "b", *others)))

    assert (first.step, first.op, first.kind) == (2, "c10d::allreduce_", Kind.OUTPUTS)


def test_a_missing_rank_is_reported(tmp_path: Path) -> None:
    """Ranks of both runs are compared; a rank that only one run has makes them differ."""
    a, b = _ranks(tmp_path / "a", _rank(0), _rank(1)), _ranks(tmp_path / "b", _rank(0))

    verdict = compare(a, b)

    assert (first_of(verdict).kind, first_of(verdict).rank) == (Kind.ENDED, 1)
    assert (verdict.compared.ranks, verdict.compared.steps) == (1, 3)


def test_processes_of_a_rank_are_paired_in_order(tmp_path: Path) -> None:
    """The second process of a rank is compared with the second process of the other run."""
    for folder, second in (("a", _run(2)), ("b", [Step(chain(4, weights="v")), *_run(2)[1:]])):
        write(tmp_path / folder, _run(), {"ordinal": 0})
        write(tmp_path / folder, second, {"ordinal": 1})

    verdict = compare(tmp_path / "a", tmp_path / "b")

    assert first_of(verdict).step == 0
    assert verdict.compared.ops == 12 + 8


@pytest.mark.parametrize("agreed", [True, False])
def test_replicas_that_stop_agreeing_are_reported(tmp_path: Path, *, agreed: bool) -> None:
    """Ranks whose parameters never agreed have parts of a model, and are not reported."""
    well = [_rank(0), _rank(1)] if agreed else [_run(), _run()]
    ill = [
        [
            replace(step, parameters=value(rank, at) if at == 2 or not agreed else step.parameters)
            for at, step in enumerate(run)
        ]
        for rank, run in enumerate(well)
    ]

    verdict = compare(_ranks(tmp_path / "a", *well), _ranks(tmp_path / "b", *ill))

    said = "B: the parameters of ranks 0 and 1 agree at step 1 and no longer at step 2"
    assert verdict.across_ranks == ((said,) if agreed else ())


def test_steps_that_one_recording_lacks_are_reported(tmp_path: Path) -> None:
    """A partial recording is compared with the same steps of a full one, and a note says so."""
    whole = write(tmp_path / "whole", _run(5))
    end = write(tmp_path / "end", _run(5)[3:], first=3)
    beginning = write(tmp_path / "beginning", _run(2), {"steps": (0, 1)})
    middle = write(tmp_path / "middle", _run(5)[1:3], {"steps": (1, 2)}, first=1)

    for part, left_out in ((end, "0 to 2"), (beginning, "2 to 4"), (middle, "0 and 3 to 4")):
        verdict = compare(whole, part)

        assert verdict.same
        assert verdict.compared.steps == 2
        assert verdict.notes == (f"3 steps are recorded in A only: {left_out}",)


def test_a_divergence_comes_with_advice() -> None:
    """Advice uses the metadata of the left trace; equal runs get no advice."""
    meta = {"profile": "mine", "command_hint": "python train.py"}
    found = compared(_run(), OTHER, meta, {}).advice

    assert found is not None
    assert found.closer.startswith("torchrepro run mine")
    assert found.closer.endswith("--steps 1:3 --keep layers.0 -- python train.py")
    assert compared(_run(), _run(), meta).advice is None


def test_differing_settings_are_listed() -> None:
    """The verdict has exactly the knobs, versions and hardware that differ."""
    left = {"knobs": {"seed.torch": "1", "env.OMP_NUM_THREADS": "2"}, "versions": {"torch": "2.6"}}
    right = {"knobs": {"seed.torch": "1", "env.OMP_NUM_THREADS": "8"}, "hardware": {"cpu": "x"}}
    profile = {"profile": "mine"}
    verdict = compared(_run(), _run(), left | profile, right | profile)

    assert verdict.same
    assert set(verdict.settings) == {
        Setting("env.OMP_NUM_THREADS", "2", "8"),
        Setting("version of torch", "2.6", None),
        Setting("hardware: cpu", None, "x"),
    }


def test_a_loss_of_several_passes_is_their_mean() -> None:
    """A step that accumulates gradients has the mean loss; with a NaN among them it has none."""
    run = [*_run(1), Step(chain(4, step=1), losses=(0.5, float("nan")))]

    assert compared(run, _run(1)).losses == ((0, 1.0, 1.0), (1, None, None))


def test_recordings_of_different_levels_are_compared_by_steps() -> None:
    """They are compared by parameters, and the verdict says so."""
    fine = [
        replace(step, parameters=value(at), gradients=value("view"))
        for at, step in enumerate(_run())
    ]
    coarse = [
        Step((Op("parameter", outputs=(value(at),)),), value(at), losses=(0.5, 1.5))
        for at in range(3)
    ]
    other = [*coarse[:2], replace(coarse[2], parameters=value("other"))]
    level = {"level": "step"}

    same = compared(fine, coarse, {}, level)
    first = diverged(fine, other, {}, level)

    assert same.same
    assert same.compared.level == "step"
    assert any("levels op and step" in note for note in same.notes)
    assert (first.step, first.phase, first.op) == (2, "optimizer", "parameters")


def _on(device: str, run: Run) -> Run:
    return [
        Step(tuple(replace(op, shapes=f"float32[2] {device}") for op in step.ops)) for step in run
    ]


def test_bits_of_different_types_of_device_are_not_compared() -> None:
    """Fingerprints of different algorithms are not comparable; device indices are ignored."""
    with pytest.raises(TraceError, match="--statistics"):
        compared(_run(), _on("cuda:0", _run()))
    assert compared(_on("cuda:0", _run()), _on("cuda:1", _run())).same


def test_ops_on_different_types_of_device_are_not_the_same() -> None:
    """An op on the CPU in one run and the GPU in the other cannot be compared; a note says so."""
    ops = [replace(op, shapes="float32[2] cuda:0") for op in chain(8)]
    left = [*ops[:7], replace(ops[7], shapes="float32[2]")]
    moved = replace(ops[2], shapes="float32[2]", outputs=(value("taken in another way"),))
    first = diverged([Step(tuple(left))], [Step((*left[:2], moved, *left[3:]))])

    assert first.kind is Kind.INCOMPARABLE
    assert "1 op ran on another type of device" in first.what
    assert "--statistics" in first.what


def test_a_differing_state_of_a_seeded_generator_is_a_difference() -> None:
    """Runs whose profiles seed a generator are the same only if its states are equal."""
    seeded = {"knobs": {"seed.python": "7", "seed.torch": "7", "seed.cuda": "null"}}
    states = [{"python": str(at), "torch": str(at), "cuda:0": "a"} for at in range(3)]
    run = [replace(step, random=its) for step, its in zip(_run(), states, strict=True)]
    other = [*run[:1], *(replace(step, random={"torch": "x", "cuda:0": "b"}) for step in run[1:])]
    first = diverged(run, other, seeded)

    assert compared(run, run, seeded).same
    assert (first.kind, first.step) == (Kind.RANDOM, 1)
    assert "torch" in first.what
    assert "cuda" not in first.what
    assert compared(run, other, seeded, {}).same, "the profile of one of them seeded nothing"


def test_differing_generator_states_are_noted_only_if_a_run_drew_from_it() -> None:
    """Runs with equal results are the same; a note names a generator that one of them used."""
    still = [[replace(step, random={"numpy": n}) for step in _run()] for n in "ab"]
    began: list[dict[str, Any]] = [{"generators": {"numpy": n}} for n in "ab"]
    drew_later = [*still[1][:-1], replace(still[1][-1], random={"numpy": "c"})]
    note = "the states of numpy differ from the end of step 0 on"

    assert compared(*still, *began).notes == compared(*still).notes == ()
    assert compared(still[0], drew_later).notes == (note,)
    assert compared(*still, *began[::-1]).notes == (note,), "they drew in the first step"
    assert compared(still[0], drew_later).same


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("drawn", ["torch", "python", "numpy"])
def test_an_unused_generator_is_not_named(tmp_path: Path, drawn: str, steps: int) -> None:
    """Real runs, none of whose generators is seeded, name the one that the program draws from."""
    draw: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.rand(2),
        "python": random.random,
        "numpy": np.random.rand,
    }
    with torchrepro.isolated_rng():
        for run in "ab":
            random.seed(), np.random.seed(), torch.seed()
            with torchrepro.record(tmp_path / run) as recording:
                draw[drawn]()
                for _ in range(steps):
                    torch.ones(2) + 1
                    recording.end_step()
                torch.ones(2) + 1
    when = "from the end of step 0 on" if steps else "when the runs end"

    notes = compare(tmp_path / "a", tmp_path / "b").notes
    assert [note for note in notes if "states" in note] == [f"the states of {drawn} differ {when}"]


def test_levels_without_common_digests_cannot_be_compared() -> None:
    """If no loss or parameters were recorded at both levels, nothing can be compared."""
    run = [Step(chain(4))]

    with pytest.raises(TraceError, match="nothing was recorded that could be compared"):
        compared(run, run, {}, {"level": "module"})


def _with_end(steps: int, weights: object = "w", ops: int = 4) -> Run:
    return [*_run(steps), Step(chain(4, step=steps, weights=weights)[:ops], finished=False)]


KILLED, SEEDED, ASKED = {"finished": None}, {"knobs": {"seed.torch": "1"}}, {"steps": (0, 1)}
EARLIER, CUT = "one run ended earlier", "both runs were cut off"
AT_END = [[*_run(2), Step(chain(4), random={"torch": n}, finished=False)] for n in "ab"]
ENDS: dict[str, tuple[Run, Run, list[dict[str, Any]], int, str, str]] = {
    "B earlier": (_run(5), _run(3), [{}, {}], 3, f"{EARLIER}, at step 3", "B ended after step 2; "),
    "A earlier": (_run(3), _run(5), [{}, {}], 3, f"{EARLIER}, at step 3", "A ended after step 2; "),
    "B killed": (
        *(_run(5), _run(3), [{}, KILLED], 3),
        *(f"{EARLIER}, at step 3", "B ended after step 2 (killed"),
    ),
    "A killed": (
        *(_run(3), _run(5), [KILLED, {}], 3),
        *(f"{EARLIER}, at step 3", "A ended after step 2 (killed"),
    ),
    "both killed": (
        *(_run(5), _run(5), [KILLED, KILLED], 5),
        *(f"{CUT}, at step 5", "still running): A after step 4 and B after step 4"),
    ),
    "both killed, one earlier": (
        *(_run(5), _run(2), [KILLED, KILLED], 2),
        *(f"{CUT}, at step 2", "still running): A after step 4 and B after step 1"),
    ),
    "within a step": (
        *(_run(), [*_run(2), replace(_run()[2], ops=_run()[2].ops[:2], finished=False)], [{}, {}]),
        *(2, f"{EARLIER}, at step 2, in the forward pass of layers.2", "B ended in the middle of"),
    ),
    "within the first step that the other one ended": (
        *(_run(4), _with_end(2, ops=3), [{}, {}]),
        *(2, f"{EARLIER}, at step 2, in the forward pass of layers.3", "B ended in the middle of"),
    ),
    "after a difference": (
        *(_run(), [_run()[0], Step(chain(4, step=1, weights="v"))], [{}, {}]),
        *(2, "diverged at step 1, in the forward pass of layers.0", ""),
    ),
    "nothing was recorded": ([], [], [{}, {}], 0, EARLIER, "nothing was recorded in A and B"),
    "nothing was recorded of one": ([], _run(2), [{}, {}], 0, EARLIER, "nothing was recorded in A"),
    "less after the last step": (
        *(_with_end(3), _with_end(3, ops=2), [{}, {}]),
        *(3, f"{EARLIER}, after the last step", "B ended before this op"),
    ),
    "nothing after the last step": (
        *(_with_end(3), _run(3), [{}, {}], 3),
        *(f"{EARLIER}, after the last step", "B ended after step 2; A continues after it"),
    ),
    "killed after the last step": (
        *(_with_end(3), _run(3), [{}, KILLED], 3),
        *(f"{EARLIER}, after the last step", "B ended after step 2 (killed"),
    ),
    "a generator after the last step": (
        *(*AT_END, [SEEDED, SEEDED], 2),
        *("diverged after the last step", "the states of torch differ when the runs end"),
    ),
    "killed where no more was to be recorded": (
        *([Step(), Step()], [Step(), Step()], [ASKED, {**ASKED, **KILLED}], 2),
        *(f"{EARLIER}, at step 2", "B ended after step 1 (killed"),
    ),
}
"""Two runs, the metas of their traces, the steps that both ended, the headline, and why."""


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_run_is_described(case: str) -> None:
    """Runs are compared up to the end of the shorter one; ops after it do not count as missing."""
    left, right, metas, steps, said, what = ENDS[case]
    verdict = compared(left, right, *metas)

    assert str(verdict).startswith(f"not the same: {said}")
    assert what in first_of(verdict).what
    assert verdict.compared.steps == steps
    assert verdict.advice is not None
    assert verdict.advice.cause.startswith("Both runs were cut off") == (CUT in said)


@pytest.mark.parametrize("steps", [0, 1, 20])
@pytest.mark.parametrize("level", ["op", "step"])
def test_records_after_the_last_step_are_compared_and_are_not_a_step(
    steps: int, level: str
) -> None:
    """Only steps that ended count; a difference outside of them is described as such."""
    meta = {"level": level}
    same = compared(_with_end(steps), _with_end(steps), meta)
    verdict = compared(_with_end(steps), _with_end(steps, "v"), meta)

    assert same.same
    assert ("outside of any step" in str(same)) == (steps == 0)
    for each in (same, verdict):
        assert (each.compared.steps, each.compared.after_last) == (steps, True)
        assert " 0 steps" not in str(each)
    assert (first_of(verdict).step, first_of(verdict).after_last) == (steps, True)
    place = "after the last step, in" if steps else "in"
    assert str(verdict).startswith(f"not the same: diverged {place} the forward pass of layers.0")


@pytest.mark.parametrize("before", [True, False])
def test_data_built_before_any_model_is_before_the_first_step(tmp_path: Path, before: bool) -> None:
    """Ops before the first model belong to no step, ops after it do."""
    for name, seed in (("one", 1), ("two", 2)):
        with torchrepro.record(tmp_path / name):
            torch.manual_seed(seed if before else 1)
            data = torch.randn(4, 3)
            net = torch.nn.Linear(3, 2)
            torch.manual_seed(seed)
            net(data + torch.rand(4, 3)).sum().backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
    place = "before the first step" if before else "at step 0"

    verdict = compare(tmp_path / "one", tmp_path / "two")
    assert str(verdict).splitlines()[0] == f"not the same: diverged {place}"


def test_records_after_the_last_step_that_one_run_lacks_are_not_a_step() -> None:
    """A note names the additional steps and the records after the last step separately."""
    assert compared(_with_end(5), _run(2), {}, {"steps": (0, 1)}).notes == (
        "3 steps are recorded in A only: 2 to 4",
        "records after the last step are in A only",
    )


@pytest.mark.parametrize(
    ("left", "right", "shown"),
    [
        ({"Net": "actor"}, {"Net#2": "actor"}, []),
        ({"Net": "actor", "Net#2": "critic"}, {"Net": "actor"}, ["actor", "critic"]),
        ({"Net": "Net#2", "Net#2": "critic"}, {}, ["critic"]),
        ({"Net": "head", "Net#2": "critic"}, {}, ["critic"]),
    ],
)
def test_the_name_of_a_model_means_one_module_in_both_runs(
    left: dict[str, str], right: dict[str, str], shown: list[str]
) -> None:
    """A name that two models have, or that is the path of a module, is not shown."""
    run = [Step((computed(Op(module="head"), value("x")),))]
    verdict = compared(run, run, {"models": left}, {"models": right})

    assert sorted(name for _, name in verdict.program.models) == shown


def test_naming_modules_takes_linear_time() -> None:
    """With very many models, naming each module does not get slower."""
    program = Program(models=tuple((f"Net#{n}", f"net{n}") for n in range(20_000)))
    begin = time.process_time()
    names = [program.name_of(f"Net#{n}:head") for n in range(20_000)]

    assert names[-1] == "net19999:head"
    assert time.process_time() - begin < 2


class _OutsideTorch(torch.optim.SGD):
    """Writes parameters without an op, like compiled code of some optimizers."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                memory = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
                for place, gradient in enumerate(parameter.grad.flatten().tolist()):
                    memory[place] -= group["lr"] * gradient


def _record(folder: Path, kind: str, level: str) -> Path:
    with torchrepro.record(folder, level=level):
        model, copied = torch.nn.Conv1d(1, 2, 2), torch.nn.Conv1d(1, 2, 2)
        sgd = _OutsideTorch if kind.startswith("outside") else torch.optim.SGD
        lr = 0.0 if kind == "no learning rate" else 0.1
        optimizer = sgd((copied if kind == "another model" else model).parameters(), lr=lr)
        second = torch.optim.SGD(copied.parameters(), lr=0.0)
        for step in range(1 if kind == "outside torch, once" else 3):
            loss = model(torch.ones(1, 1, 4)).sum() + (copied.weight.sum() if kind == "two" else 0)
            loss.backward()
            if kind == "one step of three" and step != 1:
                model.zero_grad()
            if kind == "two":
                second.step()
            if kind == "an evaluation":
                torchrepro.end_step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return folder


TRAINED = (
    *("as it should", "one step of three", "two", "an evaluation"),
    *("outside torch", "outside torch, once"),
)


@pytest.mark.parametrize("level", ["op", "module", "step"])
def test_a_run_without_a_changed_parameter_is_reported(tmp_path: Path, level: str) -> None:
    """It is not reported if any step changes a parameter in any way, nor for an evaluation."""
    # Of an evaluation the level step records nothing that could be compared.
    trained = TRAINED if level != "step" else [each for each in TRAINED if "eval" not in each]
    kinds = ("no learning rate", "another model", *trained)
    folders = {kind: _record(tmp_path / kind, kind, level) for kind in kinds}

    notes = {kind: compare(folder, folder).notes for kind, folder in folders.items()}
    one = compare(folders["as it should"], folders["no learning rate"]).notes

    said = "no parameter changed in any of 3 steps"
    of_parameters = {
        kind: [each for each in lines if "parameter" in each] for kind, lines in notes.items()
    }
    assert of_parameters == {kind: [said] * (kind in kinds[:2]) for kind in kinds}
    assert f"B: {said}" in one
