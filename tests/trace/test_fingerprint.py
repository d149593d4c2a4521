"""Fingerprints depend on value and layout only, and computing one changes nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as some
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrepro.trace import device_fingerprint as on_devices
from torchrepro.trace import fingerprint as memory
from torchrepro.trace.device_fingerprint import device_fingerprint, fetch
from torchrepro.trace.fingerprint import fingerprint
from torchrepro.trace.op_facts import PLAIN, shape_of
from torchrepro.trace.tensor_reads import fingerprint_of, read_each, size_of

from .conftest import Counting

PIECE = memory.PIECE


def on_device(tensor: torch.Tensor) -> bytes | None:
    """Return what a device would compute."""
    pending = device_fingerprint(tensor)
    fetch([pending])
    return pending.bytes


WHERE = pytest.mark.parametrize("taken", [fingerprint, on_device], ids=lambda take: take.__name__)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors whose memory could not be read."""
    tensors: list[torch.Tensor] = []
    original = memory.unreadable_memory

    def noted(tensor: torch.Tensor) -> memory.Memory:
        tensors.append(tensor)
        return original(tensor)

    for module in (memory, on_devices):
        monkeypatch.setattr(module, "unreadable_memory", noted)
    return tensors


def freed() -> torch.Tensor:
    """Return a view into freed memory, as sharded parameters are."""
    base = torch.ones(100)
    view = base[10:20]
    base.untyped_storage().resize_(0)
    return view


def shrunk() -> torch.Tensor:
    """Return a tensor that reaches beyond its memory."""
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(40)
    return tensor


def fake() -> torch.Tensor:
    """Return a fake tensor, which has no memory."""
    with FakeTensorMode():
        return torch.ones(3)


def inference() -> torch.Tensor:
    """Return an inference tensor, which autograd does not track."""
    with torch.inference_mode():
        return torch.ones(3)


def nested_with_gaps() -> torch.Tensor:
    """Return a nested tensor with transposed parts."""
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)]).transpose(1, 2)


def per_channel(dtype: torch.dtype, zero: float = 0.0) -> torch.Tensor:
    """Return a tensor with a scale for each row."""
    scales, zeros = torch.ones(4), torch.full((4,), zero)
    return torch.quantize_per_channel(torch.ones(4, 6) * 3, scales, zeros, 0, dtype)


class Plain(torch.Tensor):
    """A subclass with its own memory, whose functions must not be called."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("a fingerprint calls no function of a subclass")


def of_class(kind: type[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of a subclass, with its own memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ones(3).as_subclass(kind)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(3),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.empty(0, 3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "needs a gradient": lambda: torch.ones(3, requires_grad=True) * 2,
    "transposed, needs a gradient": lambda: torch.ones(3, 4, requires_grad=True).t(),
    "with gaps, needs a gradient": lambda: torch.ones(3, 4, requires_grad=True)[:, ::2],
    "inference": inference,
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "uint64": lambda: torch.ones(3, dtype=torch.uint64),
    "bits with gaps": lambda: torch.ones(8, dtype=torch.int16).view(torch.bits16)[::2],
    "uint4 with gaps": lambda: torch.ones(8, dtype=torch.uint8).view(torch.uint4)[::2],
    "float8 with gaps": lambda: torch.ones(8).to(torch.float8_e5m2)[::2],
    "coo": lambda: torch.eye(4).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested with gaps": nested_with_gaps,
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8),
    "quantised by channel": lambda: per_channel(torch.qint8),
    "two in a byte": lambda: per_channel(torch.quint4x2),
    "meta": lambda: torch.ones(3, device="meta"),
    "fake": fake,
    "freed": freed,
    "shrunk": shrunk,
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "subclass": lambda: of_class(Plain),
}


def _state(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        version = None if tensor.is_inference() else tensor._version
        gradient = tensor.requires_grad, tensor.grad_fn, tensor.grad
    return version, gradient, torch.is_grad_enabled()


@WHERE
@pytest.mark.filterwarnings("ignore")  # torch says of some layouts that they may still change
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_tensor_has_a_fingerprint_and_is_not_changed(
    kind: str, taken: Callable[[torch.Tensor], bytes], unread: list[torch.Tensor]
) -> None:
    """Equal tensors of any type have equal fingerprints, and computing one changes nothing.

    No op is run that a dispatch mode of the program would see.
    """
    tensor, like = KINDS[kind](), KINDS[kind]()
    generator, state, mode = torch.get_rng_state(), _state(tensor), Counting()

    with nullcontext() if kind in ("fake", "functional") else mode:  # they have their own
        found = taken(tensor)

    assert mode.ops == []
    assert found == taken(like)
    assert len(found) == 16
    assert _state(tensor) == state
    assert torch.equal(torch.get_rng_state(), generator)
    assert unread == []


@pytest.mark.filterwarnings("ignore")
def test_reading_many_tensors_gives_the_same_as_reading_them_one_by_one() -> None:
    """`read_each` returns the fingerprints, shapes and sizes of all tensors."""
    every = [make() for make in KINDS.values()]
    tensors = [tensor for tensor in every if type(tensor) in PLAIN]  # others raise when asked
    fingerprints, shapes, size = read_each(tensors)

    assert fingerprints == [*map(fingerprint_of, tensors)]
    assert shapes == [*map(shape_of, tensors)]
    assert size == sum(map(size_of, tensors))


def _alike() -> dict[str, list[torch.Tensor]]:
    same = ("scalar", "bool", "uint64", "bits with gaps", "csr", "csc", "bsr", "bsc", "coo")
    more = ("nested", "nested with gaps", "jagged", "quantised", "two in a byte", "mkldnn", "plain")
    order, parts = torch.zeros(2, 2, 2), (torch.zeros(2), torch.zeros(3))
    ones = torch.ones(3, dtype=torch.uint8)
    return {
        "ones, kept otherwise": [
            KINDS[kind]() for kind in (*same, *more, "coo, not coalesced", "meta", "empty")
        ],
        "memory in another order, cut elsewhere, longer": [
            *(order.permute(each) for each in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2))),
            *(torch.nested.nested_tensor(list(sizes)) for sizes in (parts, parts[::-1])),
            *(torch.zeros(size, dtype=torch.uint8) for size in (0, 1, 3, 8, 9)),
        ],
        "quantized integers": [
            torch._make_per_tensor_quantized_tensor(ones, 0.1, 0),
            torch._make_per_tensor_quantized_tensor(ones, 0.2, 0),
            torch._make_per_tensor_quantized_tensor(ones, 0.1, 1),
            per_channel(torch.qint8),
        ],
    }


@WHERE
@pytest.mark.filterwarnings("ignore")
def test_similar_tensors_have_different_fingerprints(
    taken: Callable[[torch.Tensor], bytes],
) -> None:
    """Tensors with another layout, dtype, order, length, scale or zero point differ."""
    for what, tensors in _alike().items():
        assert len({*map(taken, tensors)}) == len(tensors), what


def test_a_plain_tensor_has_the_hash_of_its_bytes() -> None:
    """Traces name the algorithm "xxh3-128", which others can check."""
    tensor = torch.arange(1000.0)

    assert fingerprint(tensor) == xxhash.xxh3_128_digest(tensor.numpy().tobytes())


SHAPES = some.lists(some.integers(1, 4), min_size=1, max_size=4)


@WHERE
@given(shape=SHAPES, data=some.data())
def test_equal_tensors_have_equal_fingerprints_at_any_address(
    taken: Callable[[torch.Tensor], bytes], shape: list[int], data: some.DataObject
) -> None:
    """Offset, allocation and version make no difference, in any order of dimensions."""
    order = data.draw(some.permutations(range(len(shape))))
    offset = data.draw(some.integers(0, 9))
    dtype = data.draw(some.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    values = torch.randint(-9, 9, shape).to(dtype)
    size = values.numel()
    room = torch.zeros(size + 20, dtype=dtype)
    moved = room[offset : offset + size].view(shape)
    moved.copy_(values)

    assert taken(moved.permute(order)) == taken(values.permute(order))
    assert taken(moved.permute(order).clone(memory_format=torch.contiguous_format)) == taken(
        values.permute(order).contiguous()
    )


@WHERE
@given(shape=SHAPES, data=some.data())
def test_gaps_in_memory_do_not_change_a_fingerprint(
    taken: Callable[[torch.Tensor], bytes], shape: list[int], data: some.DataObject
) -> None:
    """Bytes between elements are not read: a slice is equal to its contiguous copy."""
    step = data.draw(some.integers(2, 3))
    base = torch.randint(-9, 9, [*shape, 2 * step + 1])
    slices = base[..., ::step]
    before = taken(slices)
    base[..., 1::step] += 1

    assert taken(slices) == before == taken(slices.contiguous())


@WHERE
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, PIECE // 4 + 8), torch.float32),  # rows larger than a piece
        ((3, PIECE + 1), torch.int8),  # and rows that do not end at a word
        ((PIECE // 64, 33), torch.bfloat16),
        ((2, 3, PIECE // 16), torch.complex64),
    ],
)
def test_a_tensor_copied_in_pieces_has_the_fingerprint_of_its_contiguous_copy(
    taken: Callable[[torch.Tensor], bytes], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A large tensor with gaps has the fingerprint of its contiguous copy."""
    size = torch.Size(shape)
    base = torch.arange(size.numel()).to(dtype).view(shape)
    slices = base[..., 1:-1]

    assert taken(slices) == taken(slices.contiguous())


@WHERE
def test_a_fingerprint_depends_on_the_bits_of_the_computed_value(
    taken: Callable[[torch.Tensor], bytes],
) -> None:
    """A lazy conjugate counts as its computed value; NaNs with different bits differ."""
    values = torch.randn(3, 4, dtype=torch.complex64)
    nan = torch.tensor([0x7FC00000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)

    assert taken(values.conj()) == taken(values.conj_physical())
    assert taken(values.mH) == taken(values.conj_physical().t())
    assert taken(values.conj().imag) == taken(-values.imag)
    assert taken(nan) == taken(nan.clone()) != taken(other)


@WHERE
def test_tensors_of_transformed_functions_are_read(
    taken: Callable[[torch.Tensor], bytes], unread: list[torch.Tensor]
) -> None:
    """Within vmap and grad, tensors have no storage, but their values are read."""
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(taken(x))
        return (x * 2).sum()

    for value in (1.0, 1.0, 2.0):
        torch.func.vmap(function)(torch.full((2, 3), value))
        torch.func.grad(function)(torch.full((3,), value))

    assert found[0] == found[2] != found[4]
    assert found[1] == found[3] != found[5]
    assert unread == []


class Secretive(torch.Tensor):
    """A subclass that raises when its memory is requested."""

    @staticmethod
    def __new__(cls) -> "Secretive":
        made: Secretive = torch.Tensor._make_wrapper_subclass(cls, (3,))
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise KeyError("not yet")

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise KeyError("not yet")


@WHERE
def test_memory_that_cannot_be_read_has_a_constant_fingerprint(
    taken: Callable[[torch.Tensor], bytes], unread: list[torch.Tensor]
) -> None:
    """A tensor whose code raises has the fingerprint of its class, and no error is raised."""
    assert taken(Secretive()) == taken(Secretive())
    assert len(unread) == 2


def test_caches_that_threads_share_are_correct_and_bounded() -> None:
    """New shapes in several threads at once do not make the caches grow without limit."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in range(memory.MANY + 10)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [*map(fingerprint, tensors)], range(4)))

    assert found == [[*map(fingerprint, tensors)]] * 4
    assert len(memory.arrays) <= memory.MANY
