"""Fingerprints on devices: the arithmetic and the fetch."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from torchrepro.trace import device_fingerprint as module
from torchrepro.trace.device_fingerprint import (
    BATCH,
    CHUNK,
    NARROW,
    ROW,
    SMALL,
    WIDE,
    Mixing,
    PendingDigest,
    algorithm,
    device_fingerprint,
    device_fingerprints,
    fetch,
    key_tables,
    sums,
    sums_of_batch,
)
from torchrepro.trace.fingerprint import unobserved

MIXINGS = pytest.mark.parametrize("mixing", [WIDE, NARROW], ids=lambda mixing: mixing.name)
CPU = torch.device("cpu")


def _by_hand(memory: bytes, mixing: Mixing) -> list[int]:
    """Compute the sums word by word, with Python's integers."""
    bits = 8 * mixing.width
    modulus = 1 << bits
    memory += bytes(-len(memory) % mixing.width)
    found = []
    for table in key_tables(mixing, CPU, CHUNK):
        first_row = [int(key) for key in table[:ROW]]
        total = weighted = 0
        for place in range(len(memory) // mixing.width):
            here = memory[place * mixing.width : (place + 1) * mixing.width]
            row, column = divmod(place, ROW)
            key = first_row[column] + row * mixing.step
            mixed = int.from_bytes(here, sys.byteorder) + key
            for multiplier, shift in zip(mixing.multipliers, mixing.shifts, strict=True):
                mixed = mixed * multiplier % modulus
                signed = mixed - modulus if mixed >= modulus // 2 else mixed
                mixed = (signed ^ (signed >> shift)) % modulus
            total += mixed
            weighted += mixed * key
        found += [total % modulus, weighted % modulus]
    return found


@MIXINGS
@given(memory=some.binary(min_size=1, max_size=100), repeated=some.sampled_from([1, 7, 400]))
def test_the_sums_equal_those_computed_word_by_word(
    mixing: Mixing, memory: bytes, repeated: int
) -> None:
    """Torch's sums equal Python's integer sums modulo the size of a word."""
    tensor = torch.frombuffer(bytearray(memory * repeated), dtype=torch.uint8)

    found = [int(value) % (1 << 8 * mixing.width) for value in sums(iter([tensor]), mixing)]

    assert found == _by_hand(memory * repeated, mixing)


@MIXINGS
def test_keys_are_odd_and_distinct(mixing: Mixing) -> None:
    """Keys are invertible factors, and no two positions of a chunk share all of their keys."""
    tables = [table.long() for table in key_tables(mixing, CPU, CHUNK)]
    together = tables[0] if mixing is WIDE else (tables[0] << 32) + tables[1]

    assert all(bool((table & 1).all()) for table in tables)
    assert bool(together.sort().values.diff().all())


@MIXINGS
def test_a_large_tensor_is_the_sum_of_its_chunks(mixing: Mixing) -> None:
    """The sizes of chunks and pieces make no difference."""
    tensor = torch.arange(CHUNK // 4 + 5000, dtype=torch.int32).view(torch.uint8)
    places = (0, 8 * 5001, 8 * 5002, CHUNK + 8, len(tensor))
    cut = (tensor[begin:end] for begin, end in pairwise(places))

    assert torch.equal(sums(cut, mixing), sums(iter([tensor]), mixing))


@MIXINGS
def test_chunks_cannot_be_exchanged(mixing: Mixing) -> None:
    """Equal bytes in another chunk, or another row of keys, give another fingerprint."""
    row = ROW * mixing.width
    tensor = torch.randint(0, 256, (CHUNK + 2 * row,), dtype=torch.uint8)
    for distance in (row, CHUNK):
        other = tensor.clone()
        other[:row], other[distance : distance + row] = (
            tensor[distance : distance + row],
            tensor[:row],
        )
        assert not torch.equal(sums(iter([tensor]), mixing), sums(iter([other]), mixing))


@MIXINGS
def test_sums_are_spread_evenly(mixing: Mixing) -> None:
    """Half of the bits of the sums differ between tensors that differ in one bit."""
    tensors = [torch.full((64,), value, dtype=torch.int32) for value in range(256)]
    bits = torch.stack([sums(iter([tensor]), mixing).view(torch.uint8) for tensor in tensors])
    changed = (bits[1:] ^ bits[:-1]).int()
    count = sum(int((changed >> bit & 1).sum()) for bit in range(8))

    assert 0.48 < count / (changed.numel() * 8) < 0.52


def _fetched(*tensors: torch.Tensor) -> list[bytes | None]:
    pending = [*map(device_fingerprint, tensors)]
    fetch(pending)
    return [one.bytes for one in pending]


def _on_streams(tensors: list[torch.Tensor]) -> list[PendingDigest]:
    pending = [device_fingerprint(tensors[0])]
    with torch.cpu.stream(torch.cpu.Stream()):
        pending.append(device_fingerprint(tensors[1]))
    return [*pending, *map(device_fingerprint, tensors[2:])]


def _on_threads(tensors: list[torch.Tensor]) -> list[PendingDigest]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(device_fingerprint, tensors))


@pytest.mark.parametrize(
    "begin", [lambda tensors: [*map(device_fingerprint, tensors)], _on_streams, _on_threads]
)
def test_fetching_together_gives_the_same_as_fetching_one_by_one(
    begin: Callable[[list[torch.Tensor]], list[PendingDigest]],
) -> None:
    """Fingerprints may start on any stream or thread, and be fetched in any portions.

    A pending fingerprint has no bytes before the fetch, and keeps no device memory after it.
    """
    tensors = [torch.full((5,), float(number)) for number in range(1200)]
    tensors += [torch.empty(0), torch.eye(3).to_sparse()]
    pending = begin(tensors)
    assert {one.bytes for one in pending} == {None}

    fetch(pending[1::2])
    fetch(pending)
    found = [one.bytes for one in pending]
    fetch(pending)

    assert [one.bytes for one in pending] == found
    assert [one.sums for one in pending] == [[]] * len(tensors)
    assert len(set(found)) == len(tensors)
    for number in (0, 1, 2, 3, 600, 1201):
        assert _fetched(tensors[number]) == [found[number]]


def test_a_later_write_does_not_change_a_pending_fingerprint() -> None:
    """A fingerprint is computed from the value at its request, also if it is fetched later."""
    tensor = torch.ones(100)
    before = device_fingerprint(tensor)
    tensor.add_(1)
    after = device_fingerprint(tensor)
    fetch([before, after])

    assert [before.bytes] == _fetched(torch.ones(100)) != [after.bytes]


@pytest.fixture
def _anew() -> Iterator[None]:
    module._mixing.cache_clear()
    module.summation.cache_clear()
    yield
    module._mixing.cache_clear()
    module.summation.cache_clear()


def _wrong(part: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (2,))


def _refused(part: Iterator[torch.Tensor]) -> torch.Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("broken", [_wrong, _refused])
def test_a_device_whose_sums_differ_from_the_host_is_not_used(
    broken: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arithmetic that fails or differs from the host is not used; else bytes are read."""

    def breaks(*mixings: Mixing) -> None:
        module._mixing.cache_clear()
        module.summation.cache_clear()
        monkeypatch.setattr(
            module,
            "sums",
            lambda part, mixing: broken(part) if mixing in mixings else sums(part, mixing),
        )

    breaks(WIDE)
    assert algorithm(CPU) == "mix32"

    breaks(WIDE, NARROW)
    assert algorithm(CPU) == "xxh3-128"
    assert device_fingerprint(torch.ones(3)).bytes == module.fingerprint(torch.ones(3))


@MIXINGS
@given(
    sizes=some.lists(
        some.tuples(
            some.integers(1, 3000),
            some.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32]),
            some.integers(0, 3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_batch_has_the_sums_of_its_tensors(
    mixing: Mixing, sizes: list[tuple[int, torch.dtype, int]]
) -> None:
    """One batch of tensors of any dtype, length and offset has the sums of each tensor alone."""
    tensors = [
        torch.randint(0, 256, (offset + size * dtype.itemsize,), dtype=torch.uint8)[offset:]
        for size, dtype, offset in sizes
    ]
    tensors = [
        tensor if tensor.storage_offset() % dtype.itemsize else tensor.view(dtype)
        for tensor, (_, dtype, _) in zip(tensors, sizes, strict=True)
    ]

    rows = module._rows(sums_of_batch(tensors, mixing).numpy())

    assert rows == [sums(iter([tensor]), mixing).numpy().tobytes() for tensor in tensors]


def test_tensors_that_are_read_together_have_the_fingerprints_of_each() -> None:
    """Small, large, empty, strided, sparse, lazy and freed tensors: each is as if read alone."""
    base = torch.arange(24.0).view(4, 6)
    freed = torch.ones(100)[10:20]
    freed.untyped_storage().resize_(0)
    tensors = [
        *(base, base.t(), base[:, 1:], torch.empty(0), torch.tensor(3.0), torch.ones(2).conj()),
        *(torch.view_as_complex(base.view(-1, 2)).conj(), base.to_sparse(), freed),
        *(torch.ones(SMALL + 1, dtype=torch.uint8), torch.zeros(3, dtype=torch.bool), base),
    ]

    together = device_fingerprints(tensors)
    fetch(together)

    assert [one.bytes for one in together] == _fetched(*tensors)


@pytest.mark.usefixtures("_anew")
def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has at most `BATCH` bytes, and no tensor of more than `SMALL` bytes."""
    sizes: list[int] = []

    def noted(tensors: list[torch.Tensor], mixing: Mixing) -> torch.Tensor:
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return sums_of_batch(tensors, mixing)

    monkeypatch.setattr(module, "sums_of_batch", noted)
    device_fingerprints([torch.ones(2), torch.ones(2)])  # tries the arithmetic
    sizes.clear()
    fetch(device_fingerprints([torch.ones(SMALL // 8) for _ in range(20)] + [torch.ones(SMALL)]))

    assert sum(sizes) == 20 * SMALL // 2
    assert max(sizes) <= BATCH


@pytest.mark.usefixtures("_anew")
def test_a_device_whose_batches_are_wrong_reads_each_tensor_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a batch differs from its tensors on a device, batches are not used there."""
    tensors = [torch.full((9,), float(number)) for number in range(4)]
    expected = _fetched(*tensors)
    monkeypatch.setattr(module, "sums_of_batch", lambda tensors, mixing: torch.ones(2, 1, 3).long())
    module.summation.cache_clear()

    together = device_fingerprints(tensors)
    fetch(together)

    assert [one.bytes for one in together] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 7, 8, 8193, CHUNK + 11, 3 * CHUNK])
def test_cuda_and_the_host_compute_the_same_sums(size: int) -> None:
    """Torch's ops on a GPU give the host's sums, aligned or not."""
    host = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    device = host.cuda()
    for part, expected in ((device[:size], host[:size]), (device[1:], host[1:])):
        with unobserved():
            wide, narrow = (sums(iter([expected]), mixing) for mixing in (WIDE, NARROW))
            assert torch.equal(sums(iter([part]), WIDE).cpu(), wide)
            assert torch.equal(sums(iter([part]), NARROW).cpu(), narrow)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_not_synchronized_before_the_fetch() -> None:
    """Between the first tensor of a device and the fetch, nothing synchronizes with it."""
    tensor = torch.randn(1000, 1001, device="cuda")
    fetch([device_fingerprint(tensor)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [device_fingerprint(part) for part in (tensor, tensor.t(), tensor[:, 1:])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    fetch(pending)

    expected = _fetched(tensor, tensor.t(), tensor[:, 1:])
    assert [one.bytes for one in pending] == expected
