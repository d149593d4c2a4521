"""A recording never changes what a program does, also with unusual tensors and code."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torchrepro
from torchrepro import TraceError
from torchrepro.ground.errors import shown
from torchrepro.trace.fingerprint_cache import FingerprintCache
from torchrepro.trace.format import UNINITIALIZED_INPUT
from torchrepro.trace.reader import read_run

from .conftest import Net, Recorder, seen, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Silent(torch.Tensor):
    """A tensor that raises when its value is read."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "local_scalar" in str(func):
            raise RuntimeError("no number")
        given = [each.inner if isinstance(each, Silent) else each for each in args]
        made = func(*given, **(kwargs or {}))
        return cls(made) if isinstance(made, torch.Tensor) else made


def _step(parameter: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([parameter.requires_grad_()], 0.1)
    loss = (parameter * parameter).sum()
    loss.backward(torch.ones_like(loss.detach()))
    optimizer.step()


def _fake() -> None:
    with FakeTensorMode():
        _step(torch.ones(3))


def _lazy() -> None:
    model = torch.nn.LazyLinear(2)
    model(torch.ones(1, 3)).sum().backward()


DTYPES = (*(torch.float32, torch.float64, torch.bfloat16), *(torch.half, torch.complex64))
TRAINED: dict[str, Callable[[], object]] = {
    **{
        f"{kind} on {device}": partial(
            lambda kind, device: _step(torch.ones(3, dtype=kind, device=device)), kind, device
        )
        for device in ("cpu", "meta")
        for kind in DTYPES
    },
    "a subclass without numbers": lambda: _step(Silent(torch.ones(3))),
    "fake": _fake,
    "a parameter without a shape": _lazy,
    "zeros that autograd imagines": partial(torch._efficientzerotensor, (2,)),
    "forward-mode derivatives": lambda: torch.func.jacfwd(torch.nn.Linear(2, 2))(torch.ones(2)),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2,
    "sparse": lambda: torch.eye(3).to_sparse() + torch.eye(3).to_sparse(),
    "empty": lambda: torch.ones(0, 3).sum(),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag + 0,
}
"""Programs whose tensors the recorder cannot read, or only some of it."""

ASKED: tuple[dict[str, Any], ...] = (
    *({"level": "op"}, {"level": "module"}, {"level": "step"}),
    {"keep": ("*",), "statistics": True, "detail": True},
)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", TRAINED)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_program_with_unreadable_tensors_runs_as_without_a_recording(
    recorded: Recorder, program: str, asked: dict[str, Any]
) -> None:
    """A recording raises no error for any tensor with which the program runs."""
    TRAINED[program]()

    trace = recorded(lambda: (TRAINED[program](), torchrepro.end_step()), **asked)

    values = {type(loss.value) for loss in trace.losses}
    assert values <= {float, type(None)}


def test_a_recording_does_not_keep_the_root_of_a_backward_pass_alive(recorded: Recorder) -> None:
    """A large root of a backward pass is freed as without a recording; a loss keeps its value."""
    gone = []

    def program() -> None:
        root = torch.ones(1000, requires_grad=True) * 2
        root.backward(torch.ones(1000))
        gone.append(weakref.ref(root.untyped_storage()))
        del root
        assert gone[0]() is None
        (torch.ones(1, requires_grad=True) * 3).backward()

    assert [loss.value for loss in recorded(program).losses] == [None, 3.0]


def test_ending_a_step_after_the_recording_raises(tmp_path: Path) -> None:
    """The error of a step that ends after the block says so."""
    with torchrepro.record(tmp_path / "run") as recording:
        torch.ones(2).sin()

    with pytest.raises(TraceError, match="has ended"):
        recording.end_step()


NEVER_LEFT = """
import sys, torch, torchrepro

recording = torchrepro.record(sys.argv[1])
recording.__enter__()
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
torch.ones(3)
"""


def test_a_recording_that_is_never_left_ends_with_the_program(tmp_path: Path) -> None:
    """Its trace is complete, with the ops after the last step, and nothing is printed."""
    done = subprocess.run(
        [sys.executable, "-c", NEVER_LEFT, tmp_path / "trace"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    [trace] = read_run(tmp_path / "trace")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not trace.is_truncated
    assert trace.records(3)


def test_a_second_recording_is_refused(tmp_path: Path) -> None:
    """A process has one recording at a time; a second one raises and the first continues."""
    with torchrepro.record(tmp_path / "one"):
        with (
            pytest.raises(TraceError, match="recorded already"),
            torchrepro.record(tmp_path / "two"),
        ):
            pass
        torch.ones(2).sin()

    assert len(seen(read_run(tmp_path / "one")[0])) == 2


SIZES = {
    "as in 500MB": ("", "MB", "500X", "-5", True, "1e9", "5 apples"),
    "not a size": ("9" * 400, 10**400, math.nan, math.inf),
    "an empty trace needs up to 200 kB": (0, "0MB", "199kB"),
    "did you mean: 10MB": (10,),
    "did you mean: 0.5MB": (0.5,),
    "did you mean: 1MB": ("1",),
}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        *(
            ({"steps": wrong}, ("steps = ", "not a range of steps"))
            for wrong in ((5, 2), "3", (1,), (-1, 2), (0.5, 2))
        ),
        *(
            ({"every": wrong}, (f"every = {wrong!r}: ",))
            for wrong in (0, -2, 1.5, 2.0, True, "3", None)
        ),
        ({"every": 2, "level": "step"}, ("every = 2, with the level step: ",)),
        ({"every": 10, "steps": (11, 19)}, ("every = 10: ",)),
        *(
            ({"max_size": wrong}, ("max_size = ", shown(wrong)[:40], said))
            for said, each in SIZES.items()
            for wrong in each
        ),
    ],
)
def test_an_invalid_option_of_a_recording_is_refused(
    tmp_path: Path, asked: dict[str, Any], said: tuple[str, ...]
) -> None:
    """The error names the key, the given value and the legal values; no folder is created.

    A range of steps is two whole numbers; some step is to be recorded in full; a size has room.
    """
    with pytest.raises(TraceError) as refused, torchrepro.record(tmp_path / "run", **asked):
        pass

    assert [words for words in said if words not in str(refused.value)] == []
    assert not (tmp_path / "run").exists()


def test_a_folder_removed_during_a_recording_raises(net: Net, tmp_path: Path) -> None:
    """Removing the folder during a recording raises an error at its end."""

    def program() -> None:
        with torchrepro.record(tmp_path / "run"):
            train(net, steps=1)
            shutil.rmtree(tmp_path / "run")
            train(net, steps=1)

    with pytest.raises(TraceError, match="removed"):
        program()


def test_a_pattern_that_matches_no_module_is_reported(
    net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of the recording names a pattern that matches no module."""
    with torchrepro.record(tmp_path / "run", keep=("layers.9",)):
        train(net, steps=1)

    assert "no module matches `layers.9`" in capsys.readouterr().err


def test_a_program_that_records_itself_can_be_recorded(
    tmp_path: Path, fork_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Under `run --record`, a program's own recording works as without it."""
    (tmp_path / "program.py").write_text(
        "import torch, torchrepro\n"
        "with torchrepro.record('own'):\n"
        "    print(torch.ones(3).sin().sum().item())\n"
    )
    run = ("-m", "torchrepro", "run", "seed-only", "--record", "outer", "--", sys.executable)
    done = fork_python(*run, "program.py")

    assert done.stdout == "2.5244128704071045\n", done.stderr
    own, outer = (
        {one.op for one in seen(read_run(tmp_path / name)[0])} for name in ("own", "outer")
    )
    assert "aten::sin" in own & outer


@pytest.mark.parametrize(("level", "op"), [("op", "aten::sum"), ("module", "module")])
def test_a_recording_adds_no_graph_break(recorded: Recorder, level: str, op: str) -> None:
    """A function that compiles to one graph still does so while modules are observed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())

    @torch.compile(backend="eager", fullgraph=True)
    def chosen(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return model(one).sum() * 0 + (1 if id(one) == id(other) else 5)

    one, other, results = torch.ones(2, 4), torch.ones(2, 4), []
    trace = recorded(
        lambda: results.extend([chosen(one, one), chosen(one, other), model(one).sum(), id(one)]),
        level=level,
        detail=True,
    )

    assert [result.item() for result in results[:2]] == [1, 5]
    assert [read["name"] for read in trace.meta["sources"]] == ["builtins.id"]
    assert op in {one.op for one in seen(trace)}


class Init:
    """A `worker_init_fn` without a name."""

    def __call__(self, seed: int, worker: int) -> None: ...


class Unreadable(Init):
    """A `worker_init_fn` that raises when an attribute is read."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


@pytest.mark.parametrize("init", [Init, Unreadable])
def test_a_loader_is_iterated_as_without_a_recording(recorded: Recorder, init: type[Init]) -> None:
    """With any `worker_init_fn`, a loader yields its batches, and known facts are recorded."""
    loader = torch.utils.data.DataLoader(range(2), num_workers=1, worker_init_fn=partial(init(), 3))
    batches = []
    trace = recorded(lambda: batches.extend(loader))

    assert [batch.item() for batch in batches] == [0, 1]
    found = [its["worker_init_fn"] for its in trace.meta["loaders"]]
    line = Init.__call__.__code__.co_firstlineno
    assert found == ([f"Init at {__file__}:{line}"] if init is Init else [])


@pytest.mark.parametrize("forget", ["end_step", "forget_dead", "distrust"])
def test_entries_added_by_another_thread_survive_the_end_of_a_step(forget: str) -> None:
    """A cache that deletes entries keeps those that are added at the same time."""
    cache, added, forgotten = FingerprintCache(), [], []

    def add(_gone: object = None) -> None:
        added.append(torch.empty(2))
        cache.add(added[-1], UNINITIALIZED_INPUT)
        cache.expect(added[-1], lambda _tensor, _fingerprint: None)

    class Meanwhile(dict):  # type: ignore[type-arg]
        def get(self, key: int, default: object = None) -> object:
            forgotten.append(key)
            add()
            return super().get(key, default)

    for name in ("entries", "new"):
        setattr(cache, name, Meanwhile(getattr(cache, name)))
    for _ in range(9):
        tensor = torch.ones(2)
        cache.expect(tensor, lambda _tensor, _fingerprint: None)
        cache.add(tensor, b"0" * 16)
        del tensor
    getattr(cache, forget)()

    assert forgotten
    assert set(map(id, added)) <= cache.new.keys()
    assert set(map(id, added)) <= cache.entries.keys()


def test_the_arguments_of_an_optimizer_have_the_thread_of_its_step(recorded: Recorder) -> None:
    """Records of an optimizer's arguments have the thread of the surrounding ops."""

    def program() -> None:
        trainer = threading.Thread(target=train, args=(Net(), 1), name="trainer")
        trainer.start()
        trainer.join()

    trace = recorded(program)
    (thread,) = {one.thread for one in seen(trace) if one.op == "SGD.step()"}

    assert trace.threads[thread] == "trainer"


def test_recording_keeps_no_variable_of_the_program_alive(tmp_path: Path) -> None:
    """A tensor that a function releases is freed, also during a recording."""

    def train() -> Any:
        model, batch = torch.nn.Linear(2, 2), torch.ones(4, 2)
        gone = weakref.ref(batch)
        model(batch).sum().backward()
        del batch
        gc.collect()
        return gone()

    with torchrepro.record(tmp_path / "run"):
        left = train()

    assert left is None
