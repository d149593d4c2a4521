"""The content of a record: fingerprints of outputs, and digests of inputs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import torchrepro
from torchrepro.trace.fingerprint import fingerprint
from torchrepro.trace.format import UNINITIALIZED_INPUT

from ..planted.reproducible_training import averaged_and_clipped, lbfgs, two_models_in_turns
from ..planted.small_models import STEPS as ITERATIONS
from .conftest import Net, Recorder, seen, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3).add(1).mul_(2)


RESULTS: dict[str, Callable[[], torch.Tensor]] = {
    "no dimension": lambda: torch.ones(3).sum(),
    "no element": lambda: torch.ones(0, 3).mul(2),
    "integers": lambda: torch.arange(5).mul(3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64).mul(1j),
    "in place": lambda: torch.ones(3).mul_(2),
    "in place, with gaps": lambda: torch.arange(12.0).reshape(3, 4)[:, ::2].mul_(2),
    "in place, transposed": lambda: torch.arange(12.0).reshape(3, 4).t().mul_(2),
    "channels last": lambda: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last).mul(2),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)).data.mul_(2),
    "sparse": lambda: torch.eye(3).to_sparse().mul(2),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).mul(2),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8).relu(),
    "inference": _in_inference_mode,
}


@pytest.mark.parametrize("kind", RESULTS)
def test_the_recorded_fingerprint_is_that_of_the_result(recorded: Recorder, kind: str) -> None:
    """However the recorder reads an op's result, its fingerprint is that of the tensor."""
    results = []
    found = seen(recorded(lambda: results.append(RESULTS[kind]())))

    assert found[-1].outputs[-1] == fingerprint(results[0])


def test_all_types_of_views_are_recorded(recorded: Recorder) -> None:
    """Views of a subclass, of an argument that is not the first, and in a list are recorded."""
    library = torch.library.Library("torchrepro_views", "FRAGMENT")
    library.define("later(int row, Tensor(a) x) -> Tensor(a)")
    library.impl("later", lambda row, x: x[row], "CPU")
    library.define("listed(Tensor(a)[] x) -> Tensor(a)")
    library.impl("listed", lambda x: x[0].view(-1), "CPU")
    ops, x = torch.ops.torchrepro_views, torch.arange(6.0).reshape(2, 3)

    found = seen(recorded(lambda: (ops.later(1, x).cos(), ops.listed([x, x]).cos())))

    assert [one.op for one in found if "views" in one.op or "cos" in one.op] == [
        *("torchrepro_views::later", "aten::cos", "torchrepro_views::listed", "aten::cos")
    ]
    subclass = torch.ones(3, 2).as_subclass(Labelled)
    assert [one.op for one in seen(recorded(subclass.t))] == ["aten::t"]


class Labelled(torch.Tensor):
    """A subclass that does not change ops."""


def test_the_text_of_arguments_shows_which_are_none(recorded: Recorder) -> None:
    """The text of arguments has each tensor, and each None, in its position."""
    x, values = torch.ones(2, 4), torch.ones(4)
    normed = torch.native_layer_norm

    found = seen(
        recorded(lambda: [normed(x, [4], *it, 1e-5) for it in ((values, None), (None, values)) * 2])
    )

    with_weight, with_bias = "(_, [4], _, None, 1e-05)", "(_, [4], None, _, 1e-05)"
    assert [one.argument for one in found] == [with_weight, with_bias] * 2


def test_the_digest_of_an_input_is_that_of_its_last_writer(recorded: Recorder) -> None:
    """The digest of an input is the first half of the fingerprint of its last writer."""

    def program() -> None:
        x = torch.arange(4.0)
        x.mul_(3)
        x.cos()

    arange, mul, cos = seen(recorded(program))
    assert mul.inputs == (arange.outputs[0][:8],)
    assert cos.inputs == (mul.outputs[0][:8],)


WRITING = {
    "in place": lambda x, y: x.mul_(y),
    "out": lambda x, y: torch.add(x, y, out=torch.empty(4)),
    "foreach": lambda x, y: torch._foreach_add_([x, y], 1.0),
    "view": lambda x, y: x[1:3].add_(1),
    "index": lambda x, y: x.index_put_((torch.tensor([0]),), torch.tensor(9.0)),
    "sort": lambda x, y: torch.sort(x, out=(torch.empty(4), torch.empty(4, dtype=torch.long))),
}


@pytest.mark.parametrize("kind", WRITING)
def test_every_write_changes_a_fingerprint(recorded: Recorder, kind: str) -> None:
    """Writing another value, in any way, gives another fingerprint."""

    def outputs(value: float) -> list[bytes]:
        def program() -> None:
            x, y = torch.arange(4.0), torch.full((4,), value)
            WRITING[kind](x * value, y)

        return [one.outputs for one in seen(recorded(program))][-1]

    assert outputs(2.0) == outputs(2.0) != outputs(3.0)


def test_running_statistics_are_outputs_of_batch_norm(recorded: Recorder) -> None:
    """Tensors that an op writes without declaring it in its schema are outputs."""
    norm = torch.nn.BatchNorm1d(3)
    found = seen(recorded(lambda: norm(torch.randn(4, 3))))

    (one,) = [one for one in found if one.op == "aten::native_batch_norm"]
    assert {fingerprint(norm.running_mean), fingerprint(norm.running_var)} <= set(one.outputs)


def test_running_statistics_are_read_once(recorded: Recorder) -> None:
    """Running statistics are fingerprinted once, and not again when the next op reads them."""
    norm, x = torch.nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)

    def bytes_read(program: Callable[[], object]) -> int:
        return sum(step.bytes for step in recorded(program).steps.values())

    def read_after() -> None:
        norm(x)
        (norm.running_mean + norm.running_var).sin()  # two tensors of 12 bytes are made

    assert bytes_read(read_after) - bytes_read(lambda: norm(x)) == 2 * 12


def test_a_read_of_uninitialized_memory_is_recorded(recorded: Recorder) -> None:
    """The result of `empty` has no fingerprint; an op that reads it has a placeholder as input."""
    found = seen(recorded(lambda: torch.empty(3) + 1))
    empty = partial(torch._empty_affine_quantized, scale=0.1, zero_point=0, dtype=torch.qint8)
    (quantised,) = seen(recorded(lambda: empty([3])))

    assert found[0].outputs == quantised.outputs == ()
    assert found[1].inputs == (UNINITIALIZED_INPUT,)


def test_views_have_no_fingerprint_but_distinct_digests(recorded: Recorder) -> None:
    """Views are not read again; two views of one tensor have different digests."""

    def program() -> None:
        x = torch.arange(6.0).reshape(2, 3)
        x[0].sin()
        x[1].sin()

    found = seen(recorded(program))
    assert all(one.outputs == () for one in found if one.op == "aten::select.int")
    first, second = (one.inputs for one in found if one.op == "aten::sin")
    assert first != second


def test_scalar_arguments_are_recorded_exactly(recorded: Recorder) -> None:
    """A scalar is exact to the last bit; values that Python compares as equal stay distinct."""
    x, values = torch.ones(2), (0.0, -0.0, 1, 1.0, True, 0.1 + 0.2, -(2**60), 1e-300)
    found = seen(recorded(lambda: [x.add(value) for value in values]))

    assert [one.argument for one in found] == [f"(_, {value!r})" for value in values]


def test_states_of_generators_are_recorded_at_each_step(net: Net, recorded: Recorder) -> None:
    """A draw between two steps changes the recorded state of its generator, and no other."""

    def states(draw: bool) -> list[dict[str, str]]:
        torch.manual_seed(0)
        np.random.seed(0)
        model = Net()

        def program() -> None:
            train(model, steps=1)
            if draw:
                np.random.rand()
            train(model, steps=1)

        trace = recorded(program)
        return [dict(step.random) for step in trace.steps.values()]

    without, with_draw = states(draw=False), states(draw=True)
    assert without[0] == with_draw[0]
    assert {key for key, value in without[1].items() if value != with_draw[1][key]} == {"numpy"}


def test_statistics_are_recorded_on_request(recorded: Recorder) -> None:
    """With statistics, each output has its mean, norm and range."""
    trace = recorded(lambda: torch.arange(5.0).mul(2), statistics=True)

    ((_, count, mean, _, low, high),) = trace.statistics_of(range(2, 3))
    assert (count, mean, low, high) == (5, 4.0, 0.0, 8.0)


def test_tensors_of_named_modules_are_kept(net: Net, recorded: Recorder) -> None:
    """The inputs and outputs of a kept module can be read back; no other tensors are kept."""
    trace = recorded(lambda: train(net, steps=1), keep=("layers.1",))

    kept = {}
    for record in trace.records(0):
        for role, _, dtype, _, data in trace.tensors(record.id):
            kept.setdefault(trace.sites[record.site].module, []).append((role, dtype, len(data)))
    assert set(kept) == {"layers.1", "layers.1.linear"}
    assert ("output", "float32", 5 * 4 * 4) in kept["layers.1"]


def test_level_module_records_what_modules_return(net: Net, recorded: Recorder) -> None:
    """At level `module`, each call of a module is a record, and each gradient of its result."""
    trace = recorded(lambda: train(net, steps=1), level="module")

    found = [one for one in seen(trace) if one.op == "module"]
    forward = [one.module for one in found if one.phase == "forward"]
    backward = [one.module for one in found if one.phase == "backward"]
    assert forward == [f"layers.{n}{part}" for n in range(3) for part in (".linear", "")] + ["Net"]
    assert sorted(backward) == sorted(forward)


def _loss(net: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.ones(2, 4)).square().mean()
    return loss


def _accumulation() -> None:
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            _loss(net).backward()
        optimizer.step()


def _skipped_by_the_scaler() -> None:
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = _loss(net) * (float("inf") if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _without_an_optimizer() -> None:
    for _ in range(3):
        torch.ones(2).sin()
        torchrepro.end_step()


STEPS = {
    "gradients accumulated over four backward passes": (_accumulation, 3),
    "two optimizers in each iteration": (two_models_in_turns, 2 * ITERATIONS),
    "a closure that runs several times": (lbfgs, ITERATIONS),
    "one of four steps is skipped for its infinities": (_skipped_by_the_scaler, 3),
    "a scheduler": (averaged_and_clipped, ITERATIONS),
    "no optimizer": (_without_an_optimizer, 3),
    "no step": (lambda: _loss(torch.nn.Linear(4, 1)).backward(), 0),
}


@pytest.mark.parametrize("program", STEPS)
@pytest.mark.parametrize("after", [False, True])
def test_a_step_is_one_call_of_an_optimizers_step(
    recorded: Recorder, program: str, *, after: bool
) -> None:
    """The number of steps is right for every way to train; ops after the last are no step.

    Without a recording, ending a step does nothing.
    """
    torchrepro.end_step()
    train, steps = STEPS[program]

    def run() -> None:
        train()
        if after:
            torch.ones(2).sin()

    trace = recorded(run)

    assert trace.ended_steps == steps
    ended = [step for step, row in trace.steps.items() if row.finished]
    assert ended == list(range(steps))
    if after or not steps:
        assert list(trace.steps) == [*ended, steps]


def test_ops_after_the_last_step_can_be_requested(recorded: Recorder) -> None:
    """They are recorded if the step that would follow is requested."""

    def run() -> None:
        _accumulation()
        torch.ones(2).sin()

    assert [row.finished for row in recorded(run, steps=(2, 9)).steps.values()] == [True, False]
    assert [row.finished for row in recorded(run, steps=(3, 9)).steps.values()] == [False]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_accumulation, "the run had 3 steps, 0 to 2"),
        (torchrepro.end_step, "the run had 1 step, 0"),
        (lambda: torch.ones(2).sin(), "the run had no steps"),
    ],
)
def test_requested_steps_that_a_program_does_not_reach_are_reported(
    program: Callable[[], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a program ends before the requested steps, a message says that nothing was recorded."""
    with torchrepro.record(tmp_path / "run", steps=(7, 9)):
        program()

    assert f"{said}; steps 7 to 9 were not reached: nothing was" in capsys.readouterr().err


def test_the_option_of_inductor_is_restored(recorded: Recorder) -> None:
    """A recording changes the option to record compiled regions, and restores it afterwards."""
    from torch._inductor import config

    if not hasattr(config, "wrap_inductor_compiled_regions"):
        pytest.skip("this torch runs no compiled region as one op")
    options: list[bool] = []
    with config.patch(wrap_inductor_compiled_regions=False):
        recorded(lambda: (torch.ones(2) + 1, options.append(config.wrap_inductor_compiled_regions)))
        options.append(config.wrap_inductor_compiled_regions)
    assert options == [True, False]
