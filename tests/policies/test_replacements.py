"""`torchrepro.register_replacement`: the implementation of an op by a program."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import torchrepro
from torchrepro.policies.interpose import interposed
from torchrepro.policies.policy import effects

ERROR = {"device": {"fallback": "error"}}


def backwards(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum from the other end: the result differs visibly from the op."""
    return torch.cumsum(x.flip(dim), dim, dtype=dtype).flip(dim)


@pytest.fixture
def replaced() -> Iterator[Callable[..., None]]:
    """Register replacements, and remove all that the test leaves behind."""
    registered: list[Any] = []

    def register(op: Any, fn: Callable[..., Any]) -> None:
        torchrepro.register_replacement(op, fn)
        registered.append(op)

    yield register
    for op in set(map(str, registered)):
        with suppress(torchrepro.ProfileError):
            torchrepro.unregister_replacement(op)


X = torch.tensor([1.0, 2.0, 4.0])
PLAIN, REPLACED = [1.0, 3.0, 7.0], [7.0, 6.0, 4.0]


def counted() -> dict[tuple[str, str], int]:
    """Return how often each op was replaced, and by which function."""
    calls: Counter[tuple[str, str]] = Counter()
    for effect in effects():
        if effect.what.startswith("replaced by "):
            calls[effect.subject, effect.what] += effect.calls
    return dict(calls)


@pytest.mark.parametrize("op", ["aten::cumsum", "cumsum", torch.ops.aten.cumsum])
def test_a_replacement_is_used_while_a_profile_is_active(
    replaced: Callable[..., None], op: Any
) -> None:
    """Registered before the profile, the latest replacement is used only under the profile."""
    replaced(op, lambda *_, **__: torch.zeros(1))
    replaced(op, backwards)
    outside = X.cumsum(0).tolist()
    with torchrepro.apply(ERROR):
        inside = X.cumsum(0).tolist()

    assert (outside, inside, X.cumsum(0).tolist()) == (PLAIN, REPLACED, PLAIN)


def test_a_replacement_registered_later_takes_effect_at_once(
    replaced: Callable[..., None],
) -> None:
    """Under a profile a replacement is used from its registration until its removal."""
    with torchrepro.apply(ERROR):
        before = X.cumsum(0).tolist()
        replaced("cumsum", backwards)
        inside = X.cumsum(0).tolist()
        torchrepro.unregister_replacement("cumsum")
        after = X.cumsum(0).tolist()

    assert (before, inside, after) == (PLAIN, REPLACED, PLAIN)


def test_a_profile_without_fallback_uses_no_replacement(replaced: Callable[..., None]) -> None:
    """A profile that does not set the fallback uses no replacement, and interposes no op."""
    before = tuple(interposed)
    replaced("cumsum", backwards)
    with torchrepro.apply({"backends": {"torch": {"deterministic_algorithms": "error"}}}):
        result = X.cumsum(0).tolist()

    assert result == PLAIN
    assert before == tuple(interposed)


def test_a_profile_that_names_the_op_overrides_a_replacement(
    replaced: Callable[..., None],
) -> None:
    """A name in a profile overrides a replacement; a pattern does not."""
    replaced("cumsum", backwards)
    with torchrepro.apply({"device": {"fallback": {"ops": {"cumsum": "native"}}}}):
        named = X.cumsum(0).tolist()
    with torchrepro.apply({"device": {"fallback": {"ops": {"put_": "native", "*": "error"}}}}):
        matched = X.cumsum(0).tolist()

    assert (named, matched) == (PLAIN, REPLACED)


def test_a_replacement_is_listed_before_and_after_its_first_call(
    replaced: Callable[..., None],
) -> None:
    """The report names every active replacement, and how often it was called."""
    replaced("aten::cumsum.default", backwards)
    what = f"replaced by {__name__}.backwards"
    with torchrepro.apply(ERROR):
        unused = counted()
        X.cumsum(0)
        X.cumsum(0)
        used = counted()
    nowhere = [effect for effect in effects() if not effect.calls]

    assert unused == {("aten::cumsum", what): 0}
    assert used == {("aten::cumsum", what): 2}
    assert nowhere == []


def test_torch_computes_the_gradient_of_a_replaced_op(replaced: Callable[..., None]) -> None:
    """A replacement of the forward op does not change the formula of its gradient."""
    replaced("exp", lambda x: torch.ones_like(x) * 5)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with torchrepro.apply(ERROR):
        y = x.exp()
        y.sum().backward()

    assert y.tolist() == [5, 5]
    assert x.grad.tolist() == [5, 5]  # torch's formula: the result itself


def test_a_backward_op_is_replaced_under_its_own_name(replaced: Callable[..., None]) -> None:
    """The op that computes a gradient can be replaced without the forward op."""
    replaced("aten::reflection_pad1d_backward", lambda grad, x, _: torch.full_like(x, 3))
    x = torch.ones(1, 1, 4, requires_grad=True)
    with torchrepro.apply(ERROR):
        y = torch.nn.functional.pad(x, (1, 1), mode="reflect")
        y.sum().backward()

    assert y.shape == (1, 1, 6)
    assert x.grad.tolist() == [[[3, 3, 3, 3]]]


def test_an_output_given_by_the_caller_is_filled(replaced: Callable[..., None]) -> None:
    """`out=` is not an argument of the function, and is filled with its result."""
    replaced("cumsum", backwards)
    output = torch.empty(0)
    with torchrepro.apply(ERROR):
        result = torch.cumsum(X, 0, out=output)

    assert result is output
    assert output.tolist() == REPLACED


def test_an_in_place_op_is_replaced(replaced: Callable[..., None]) -> None:
    """A function for an in-place op writes to the tensor of the caller.

    It overrides the implementation of torchrepro.
    """
    replaced("put_", lambda x, places, values, accumulate=False: x.index_put_((places,), -values))
    algorithms = {"torch": {"deterministic_algorithms": "error"}}
    with torchrepro.apply({"device": {"fallback": "cpu"}, "backends": algorithms}):
        x = torch.zeros(3)
        result = x.put_(torch.tensor([2]), torch.ones(1))

    assert result is x
    assert x.tolist() == [0, 0, -1]


def test_numbers_next_to_tensors_have_the_dtypes_of_torch(replaced: Callable[..., None]) -> None:
    """`x * 2.5` has the dtype of torch, whether x has dimensions or not."""
    replaced("aten::mul", torch.mul)
    tensors = [
        torch.ones(shape, dtype=kind)
        for shape in ((), (2,))
        for kind in (torch.bool, torch.int32, torch.float64, torch.float32, torch.complex64)
    ]
    numbers = [True, 3, 2.5, 1j]
    expected = [x * number for x in tensors for number in numbers]
    with torchrepro.apply(ERROR):
        results = [x * number for x in tensors for number in numbers]

    assert [each.dtype for each in expected] == [each.dtype for each in results]
    assert all(map(torch.equal, expected, results))


def test_a_custom_op_is_replaced(replaced: Callable[..., None]) -> None:
    """An op of another namespace can be replaced like an op of torch."""
    library = torch.library.Library("torchrepro_tests", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    replaced("torchrepro_tests::double", lambda x: torch.ops.torchrepro_tests.double(x) + 1)
    with torchrepro.apply(ERROR):
        inside = torch.ops.torchrepro_tests.double(X).tolist()

    assert inside == [3, 5, 9]
    assert torch.ops.torchrepro_tests.double(X).tolist() == [2, 4, 8]


@pytest.mark.parametrize(
    ("op", "fn", "error", "says"),
    [
        ("cumsum", 3, TypeError, "must be callable"),
        ("aten::cumsmu", backwards, torchrepro.ProfileError, "did you mean `cumsum`"),
        ("matmul", backwards, torchrepro.ProfileError, "into other ops"),
    ],
)
def test_an_invalid_replacement_is_refused(
    op: str, fn: Any, error: type[Exception], says: str
) -> None:
    """A function that is not callable is refused; an unknown op too, with a near match."""
    with pytest.raises(error, match=says):
        torchrepro.register_replacement(op, fn)


def test_only_a_registered_replacement_can_be_removed(replaced: Callable[..., None]) -> None:
    """Removing an unknown replacement raises an error with the registered names."""
    replaced("cumsum", backwards)
    with pytest.raises(torchrepro.ProfileError, match="cumsum"):
        torchrepro.unregister_replacement("cumsmu")
