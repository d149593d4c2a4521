"""`device.fallback`: what becomes of an op of which torch has no deterministic kernel."""

import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import torchrepro
from torchrepro.policies.deterministic_ops import OPS
from torchrepro.policies.interpose import interposed_ops
from torchrepro.policies.policy import effects

ERROR = {"torch": {"deterministic_algorithms": "error"}}
REFUSED = "does not have a deterministic implementation"


def deciding(value: Any, algorithms: str = "error") -> torchrepro.Applied:
    """Put a profile in force that asks for deterministic algorithms and decides so."""
    torch_flags = {"torch": {"deterministic_algorithms": algorithms}}
    return torchrepro.apply({"backends": torch_flags, "device": {"fallback": value}})


def put() -> torch.Tensor:
    """Write twice to one place: torch has no deterministic kernel for it on any device."""
    return torch.zeros(4).put_(torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0]))


def unpool() -> torch.Tensor:
    """Pool and unpool, forward and backward."""
    x = torch.arange(16.0).reshape(1, 1, 4, 4).requires_grad_()
    functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2).sum().backward()
    return x.grad


def counted(subject: str) -> dict[str, int]:
    """Return what the policy has done to an op, and how often."""
    done: dict[str, int] = {}
    for effect in effects():
        if effect.policy == "device.fallback" and effect.subject == subject:
            done[effect.what] = done.get(effect.what, 0) + effect.calls
    return done


def test_every_op_that_torch_lists_is_in_the_table() -> None:
    """Whatever torch's own documentation says raises has a row with what to do about it."""
    text = str(torch.use_deterministic_algorithms.__doc__)
    listed = text.partition(":class:`RuntimeError` when ``mode=True``")[2].partition("In addition")
    names = set(re.findall(r"\* :(?:class|func):`([^`]+)`", listed[0]))

    assert len(names) > 20
    assert names - {name for row in OPS for name in row.documented} == set()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in OPS])
def test_every_row_names_an_op_and_says_what_to_do(row: Any) -> None:
    """A row is about an op of the installed torch, once, and has advice."""
    assert row.instead
    assert [other.name for other in OPS].count(row.name) == 1
    assert getattr(torch.ops.aten, row.name).overloads()


@pytest.mark.parametrize("call", [put, unpool])
def test_cpu_lets_an_op_go_on_that_torch_refuses(call: Callable[[], torch.Tensor]) -> None:
    """Under `cpu` what raises without the policy gives the same result every time."""
    with torchrepro.apply({"backends": ERROR}), pytest.raises(RuntimeError, match=REFUSED):
        call()
    with deciding("cpu"):
        results = [call() for _ in range(3)]
    with torchrepro.apply({"backends": ERROR}), pytest.raises(RuntimeError, match=REFUSED):
        call()

    assert all(torch.equal(results[0], other) for other in results)


def test_calls_are_counted_with_the_line_they_came_from() -> None:
    """The report knows which op did not run natively, how often, and from where."""
    with deciding("cpu"):
        put()
        put()
    (effect,) = [effect for effect in effects() if effect.policy == "device.fallback"]

    assert effect.subject == "aten::put_"
    assert effect.calls == 2
    assert effect.where.startswith(f"{__file__}:")


def test_error_raises_what_torch_raises_and_what_to_do() -> None:
    """Under `error` the type and the text are torch's, and advice comes after them."""
    with torchrepro.apply({"backends": ERROR}), pytest.raises(RuntimeError) as plain:
        put()
    with deciding("error"), pytest.raises(RuntimeError) as advised:
        put()

    text = str(advised.value)
    assert type(advised.value) is RuntimeError
    assert text.startswith(str(plain.value))
    assert text.count("torchrepro:") == 1
    assert "device.fallback: cpu" in text
    assert "index_put" in text


def test_native_lets_one_op_vary_and_says_so() -> None:
    """Under `native` an op runs, torch's mode is what it was, and other ops still raise."""
    with deciding({"ops": {"put_": "native"}}):
        put()
        mode = torch.get_deterministic_debug_mode()
        with pytest.raises(RuntimeError, match=REFUSED):
            unpool()
    done = counted("aten::put_")

    assert mode == 2
    assert done == {"ran non-deterministically, as the profile allows": 1}


@pytest.mark.parametrize("algorithms", ["none", "warn", "error"])
def test_native_restores_each_of_torchs_three_modes(algorithms: str) -> None:
    """Whatever the mode was before a native call, it is so after it, also if the call raises."""
    with deciding({"ops": {"put_": "native"}}, algorithms):
        before = torch.get_deterministic_debug_mode()
        put()
        with pytest.raises(IndexError):
            torch.zeros(1).put_(torch.tensor([7]), torch.ones(1))
        after = torch.get_deterministic_debug_mode()

    assert before == after


def test_native_calls_in_many_threads_leave_the_mode_as_it_was() -> None:
    """Calls that overlap in time restore the mode that was there before the first of them."""

    def many() -> None:
        for _ in range(200):
            put()

    with deciding({"ops": {"put_": "native"}}):
        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mode = torch.get_deterministic_debug_mode()

    assert mode == 2
    assert counted("aten::put_") == {"ran non-deterministically, as the profile allows": 800}


@pytest.fixture
def composed(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name an op of its own for a test, which calls two others that torch refuses, `put_` first."""
    namespace = f"composed_for_{request.node.name}"
    library = torch.library.Library(namespace, "DEF")
    library.define("again(Tensor x) -> Tensor")

    def again(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().put_(torch.tensor([0, 0]), torch.ones(2))
        return torch.ops.aten.max_unpool2d(x.view(1, 2, 2), torch.zeros(1, 2, 2).long(), [2, 2])

    library.impl("again", again, "CompositeExplicitAutograd")
    yield namespace
    library._destroy()


def test_a_native_op_within_a_native_op_does_not_end_it(composed: str) -> None:
    """Until the outermost call is over torch refuses nothing, whatever ends within it."""
    with deciding({"ops": {f"{composed}::again": "native", "put_": "native"}}):
        result = getattr(torch.ops, composed).again(torch.zeros(4))
        mode = torch.get_deterministic_debug_mode()

    assert result.shape == (1, 2, 2)
    assert mode == 2


def test_advice_is_given_once(composed: str) -> None:
    """Where an op that is decided about calls another, the inner one speaks."""
    ops = {f"{composed}::again": "cpu", "put_": "native"}
    with deciding({"ops": ops}), pytest.raises(RuntimeError, match=REFUSED) as caught:
        getattr(torch.ops, composed).again(torch.zeros(4))

    assert str(caught.value).count("torchrepro:") == 1
    assert "aten::max_unpool2d" in str(caught.value)


def test_where_torch_refuses_one_op_nothing_is_put_in_front_of_any(composed: str) -> None:
    """An op that has a kernel of another library at the same key fails the knob and leaves none."""
    before = interposed_ops()
    theirs = torch.library.Library(composed, "IMPL")
    theirs.impl("again", lambda keys, x: x, "BackendSelect", with_keyset=True)
    with deciding({"ops": {f"{composed}::again": "cpu"}}) as applied:
        row = next(row for row in applied.report if row.knob == "device.fallback")

        assert (row.outcome, interposed_ops()) == ("failed", before)
    theirs._destroy()


@pytest.fixture
def always_warning() -> Iterator[None]:
    """Have torch say each time what it says once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("always_warning")
def test_warnings_of_torch_stay_torchs() -> None:
    """With `warn`, torch warns and goes on: an advising policy adds nothing and hides nothing."""
    with deciding("error", "warn"), pytest.warns(UserWarning, match=REFUSED) as caught:
        put()

    assert all("torchrepro" not in str(warning.message) for warning in caught)


SPELLINGS = ["put_", "aten::put_", "aten.put_", "aten::put_.default", "put_.default"]


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_an_op_is_known_by_all_its_spellings(spelled: str) -> None:
    """`aten::put_`, `aten.put_` and `put_` are one op."""
    with deciding({"ops": {spelled: "cpu"}}):
        result = put()

    assert result.tolist() == [2, 0, 0, 5]


def test_a_name_goes_before_a_pattern_and_a_long_pattern_before_a_short_one() -> None:
    """The order in which a mapping is written decides nothing."""
    entries = {"*": "error", "max_unpool*": "cpu", "put_": "native"}
    for order in (entries, dict(reversed(entries.items()))):
        with deciding({"ops": order}):
            put()
            unpool()
        assert counted("aten::put_") == {"ran non-deterministically, as the profile allows": 1}
        assert list(counted("aten::max_unpool2d").values()) == [1]


def test_error_by_name_refuses_every_call() -> None:
    """An op named with `error` raises even where torch has a deterministic kernel for it."""
    with deciding({"ops": {"cumsum": "error"}}):
        with pytest.raises(RuntimeError, match=r"aten::cumsum may not run.*\n.*native"):
            torch.ones(3).cumsum(0)
        torch.ones(3).cumprod(0)


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("cumsmu", "did you mean `cumsum`?"),
        ("upsmaple_*", "matches none"),
        ("aten::nothing_like_it", "no op"),
        ("matmul", "of other ops"),
        ("view", "view"),
    ],
)
def test_an_op_that_cannot_be_decided_about_is_refused(op: str, says: str) -> None:
    """A name that torch does not know, or that names nothing to run, fails and changes nothing."""
    before = interposed_ops()
    with deciding({"ops": {"put_": "native", op: "cpu"}}) as applied:
        row = applied.report["device.fallback"]
        inside = interposed_ops()

    assert row.outcome == "failed"
    assert says in row.why
    assert before == inside


def test_a_strict_profile_with_an_unknown_op_does_not_start() -> None:
    """A promise of repeatability is not made with a typing error in it."""
    profile = {
        "guarantee": "repeatable",
        "backends": ERROR,
        "device": {"fallback": {"ops": {"cumsmu": "cpu"}}},
    }
    with pytest.raises(torchrepro.ApplyError, match="did you mean `cumsum`"):
        torchrepro.apply(profile)

    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize("value", ["cpu", {"ops": {"*": "cpu"}}, {"ops": {"*": "native"}}])
def test_what_waits_for_torch_to_refuse_is_unsupported_while_torch_refuses_nothing(
    value: Any,
) -> None:
    """Without deterministic algorithms no op falls back, and the report says why."""
    with torchrepro.apply({"device": {"fallback": value}}) as applied:
        row = applied.report["device.fallback"]

    assert row.outcome == "unsupported"
    assert "backends.torch.deterministic_algorithms" in row.why


def test_nothing_is_interposed_without_a_profile_and_nothing_stays() -> None:
    """The policy stands in front of ops only while it is in force, also nested and by turns."""
    before = interposed_ops()
    with deciding("error") as outer:
        advising = set(interposed_ops())
        with deciding({"ops": {"cumsum": "native"}}):
            result = torch.ones(2).cumsum(0)
        after_inner = set(interposed_ops())
        with pytest.raises(RuntimeError, match="torchrepro:"):
            put()

    assert outer.report["device.fallback"].outcome == "applied"
    assert result.tolist() == [1, 2]
    assert advising == after_inner != set(before)
    assert interposed_ops() == before


def test_the_same_value_again_is_unchanged() -> None:
    """A second profile that decides the same changes nothing, and its undo neither."""
    with deciding("cpu"):
        with deciding("cpu") as second:
            assert second.report["device.fallback"].outcome == "unchanged"
        assert put().tolist() == [2, 0, 0, 5]


def test_backward_in_threads_of_torchs_own_falls_back() -> None:
    """An op that autograd calls from another thread is decided about like any other."""
    results: list[torch.Tensor] = []
    with deciding("cpu"):
        thread = threading.Thread(target=lambda: results.append(unpool()))
        thread.start()
        thread.join()

    assert torch.equal(unpool(), results[0])


def test_an_op_in_torchscript_falls_back() -> None:
    """Compiled TorchScript calls ops through the same dispatcher."""

    class Put(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, places: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            return x.clone().put_(places, values)

    arguments = torch.zeros(4), torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0])
    with warnings.catch_warnings(), deciding("cpu"):
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(Put(), arguments)
        result = scripted(*arguments)

    assert result.tolist() == [2, 0, 0, 5]


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:.*quantize:UserWarning")
def test_an_op_without_any_deterministic_kernel_says_so() -> None:
    """What neither the CPU nor torchrepro can compute deterministically raises with advice."""
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with deciding("cpu"), pytest.raises(RuntimeError, match=REFUSED) as caught:
        quantised.resize_(5)

    assert "dequantize, resize and quantize again" in str(caught.value)
    assert "cpu, and it runs on the CPU" not in str(caught.value)


def test_debug_strict_says_error_and_acts_on_it() -> None:
    """The shipped strict profile's `fallback: error` is in force, with its advice."""
    with torchrepro.apply("debug-strict") as applied:
        row = applied.report["device.fallback"]
        with pytest.raises(RuntimeError, match="torchrepro:"):
            put()

    assert row.outcome == "applied"


def test_the_policy_imports_nothing_heavy() -> None:
    """Applying it needs torch and nothing else that is slow to import."""
    code = (
        "import sys, torch, torchrepro\n"
        "before = set(sys.modules)\n"
        "from torchrepro.policies.fallback import install\n"
        "install('error')\n"
        "print(*set(sys.modules) - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    heavy = ("hydra", "omegaconf", "pydantic", "rich", "typer", "yaml", "torch._")

    assert [name for name in done.stdout.split() if name.startswith(heavy)] == []


COMPILED = """
import sys, torch, torchrepro
from torch.nn import functional

def put(x, places, values):
    return x.clone().put_(places, values) + 1

def scatter(x, places, values):
    return x.scatter_add(0, places, values) * 2

def unpool(x, places, values):
    x = torch.outer(x, x).reshape(1, 4, 4)
    return functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2)

arguments = torch.arange(4.0), torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0])
flags = {"torch": {"deterministic_algorithms": "error"}}
with torchrepro.apply({"backends": flags, "device": {"fallback": "cpu"}}):
    for function in (put, scatter, unpool):
        try:
            result = torch.compile(function, backend=sys.argv[1])(*arguments)
        except RuntimeError as error:
            print("refuses" if "deterministic implementation" in str(error) else error)
        else:
            print("same" if torch.equal(function(*arguments), result) else "differs")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_computes_what_eager_code_computes_or_refuses(
    fork_python: Callable[..., subprocess.CompletedProcess[str]], backend: str, tmp_path: Path
) -> None:
    """torch.compile's kernels are deterministic as well; what it cannot trace so, it refuses."""
    # In a process of its own: torch.compile leaves flags and variables behind.
    program = f"import warnings; warnings.simplefilter('ignore'){COMPILED}"
    done = fork_python("-c", program, backend, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    put_into, scattered, unpooled = done.stdout.splitlines()

    assert (put_into, scattered) == ("same", "same")
    assert unpooled in ("same", "refuses")
