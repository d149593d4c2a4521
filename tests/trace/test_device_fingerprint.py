"""Fingerprints that a device computes: the arithmetic, the fetching, and the kernel for CUDA."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils._python_dispatch import TorchDispatchMode

from torchrepro.trace import device_fingerprint as module
from torchrepro.trace.device_batch import WIDTHS, Staging, staging_width
from torchrepro.trace.device_fingerprint import Pending, algorithm, device_fingerprint, fetch
from torchrepro.trace.fingerprint import (
    CHUNK,
    NARROW,
    ROW,
    WIDE,
    Mixing,
    key_tables,
    pieces,
    sums,
    unobserved,
)

MIXINGS = pytest.mark.parametrize("mixing", [WIDE, NARROW], ids=lambda mixing: mixing.name)
CPU = torch.device("cpu")


def _by_hand(memory: bytes, mixing: Mixing) -> list[int]:
    """Compute the sums word by word, in Python's integers."""
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
def test_the_sums_are_those_that_the_words_make(
    mixing: Mixing, memory: bytes, repeated: int
) -> None:
    """Torch's arithmetic is that of whole numbers modulo the size of a word, row after row."""
    tensor = torch.frombuffer(bytearray(memory * repeated), dtype=torch.uint8)

    found = [int(value) % (1 << 8 * mixing.width) for value in sums(iter([tensor]), mixing)]

    assert found == _by_hand(memory * repeated, mixing)


@MIXINGS
def test_keys_are_odd_and_unlike_each_other(mixing: Mixing) -> None:
    """Multiplying by a key can be undone, and no two places of a chunk share all of their keys."""
    tables = [table.long() for table in key_tables(mixing, CPU, CHUNK)]
    together = tables[0] if mixing is WIDE else (tables[0] << 32) + tables[1]

    assert all(bool((table & 1).all()) for table in tables)
    assert bool(together.sort().values.diff().all())


@MIXINGS
def test_a_large_tensor_is_the_sum_of_its_chunks(mixing: Mixing) -> None:
    """Where memory is cut makes no difference: into chunks, or pieces of another size."""
    tensor = torch.arange(CHUNK // 4 + 5000, dtype=torch.int32).view(torch.uint8)
    places = (0, 8 * 5001, 8 * 5002, CHUNK + 8, len(tensor))
    cut = (tensor[begin:end] for begin, end in pairwise(places))

    assert torch.equal(sums(cut, mixing), sums(iter([tensor]), mixing))


@MIXINGS
def test_chunks_cannot_be_exchanged(mixing: Mixing) -> None:
    """Equal bytes in another chunk, or another row of keys, are another value."""
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
    """Tensors that hardly differ have sums that look like any others: half of their bits differ."""
    tensors = [torch.full((64,), value, dtype=torch.int32) for value in range(256)]
    bits = torch.stack([sums(iter([tensor]), mixing).view(torch.uint8) for tensor in tensors])
    changed = (bits[1:] ^ bits[:-1]).int()
    count = sum(int((changed >> bit & 1).sum()) for bit in range(8))

    assert 0.48 < count / (changed.numel() * 8) < 0.52


class _Moves(TorchDispatchMode):
    """Notes the ops that wait for a device."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(name in str(func) for name in self.WAITING):
            self.waiting.append(str(func))
        return func(*args, **(kwargs or {}))


def test_computing_waits_for_nothing() -> None:
    """No op on the way reads a value back to the host."""
    tensors = [torch.randn(33, 65), torch.randn(33, 65)[:, 1:], torch.ones(3).bfloat16()]
    with _Moves() as seen:
        for tensor in tensors:
            for mixing in (WIDE, NARROW):
                sums(iter([tensor.contiguous()]), mixing)

    assert seen.waiting == []


def test_pending_ones_are_filled_by_fetching() -> None:
    """What is pending has no bytes until it is fetched, and holds nothing of the device after."""
    tensors = [torch.randn(10), torch.empty(0), torch.eye(3).to_sparse(), torch.randn(10)]
    pending = [device_fingerprint(tensor) for tensor in tensors]
    assert [one.bytes for one in pending] == [None] * 4

    fetch(pending)
    together = [one.bytes for one in pending]
    fetch(pending)

    assert all(one.bytes is not None and len(one.bytes) == 16 for one in pending)
    assert [one.bytes for one in pending] == together
    assert [one.slots for one in pending] == [[]] * 4
    for tensor, bytes_ in zip(tensors, together, strict=True):
        alone = device_fingerprint(tensor)
        fetch([alone])
        assert alone.bytes == bytes_


def test_what_was_written_afterwards_does_not_show() -> None:
    """A fingerprint is of the moment it was asked for, also when it is fetched later."""
    tensor = torch.ones(100)
    before = device_fingerprint(tensor)
    tensor.add_(1)
    after = device_fingerprint(tensor)
    fetch([before, after])
    again = device_fingerprint(torch.ones(100))
    fetch([again])

    assert before.bytes == again.bytes != after.bytes


@pytest.fixture
def _anew() -> Iterator[None]:
    module._device_hash.cache_clear()
    yield
    module._device_hash.cache_clear()


def _wrong(part: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _refused(part: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("broken", [_wrong, _refused])
def test_a_device_that_computes_something_else_is_not_trusted(
    broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arithmetic that fails or differs from the host's is not used; without any, bytes are read."""
    way = module.DeviceHash(WIDE, broken)  # type: ignore[arg-type]
    narrow = module._in_torch(NARROW)
    monkeypatch.setitem(module._IMPLEMENTATIONS, "cpu", (lambda: way, narrow))
    assert algorithm(CPU) == "mix32"

    module._device_hash.cache_clear()
    monkeypatch.setitem(module._IMPLEMENTATIONS, "cpu", (lambda: way,))
    assert algorithm(CPU) == "xxh3-128"
    assert device_fingerprint(torch.ones(3)).bytes == module.fingerprint(torch.ones(3))


NEGATED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "columns": lambda tensor: tensor[:, 1:],
    "every other row": lambda tensor: tensor[::2],
    "expanded": lambda tensor: tensor[:1].expand(3, -1),
    "negative": lambda tensor: torch._neg_view(tensor) if tensor.dtype in NEGATED else tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "a number": lambda tensor: tensor[-1:, -1:].reshape(()),
}
DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128),
)


@some.composite
def _parts(draw: some.DrawFn) -> torch.Tensor:
    """Draw a tensor of up to 256 KiB, which may begin anywhere that its dtype allows."""
    dtype = draw(some.sampled_from(DTYPES))
    rows = draw(some.integers(1, 9))
    most = WIDTHS[-1] // dtype.itemsize // max(rows, 3)  # an expanded one has 3 rows
    columns = draw(some.one_of(some.integers(1, 40), some.integers(1, most)))
    begin = draw(some.integers(0, 5)) * dtype.itemsize
    size = rows * columns * dtype.itemsize
    numbers = torch.Generator().manual_seed(draw(some.integers(0, 9)))
    memory = torch.randint(0, 256, (begin + size,), dtype=torch.uint8, generator=numbers)
    values = memory[begin:].clone() if begin % 8 else memory[begin:]
    tensor = (values % 2 if dtype is torch.bool else values).view(dtype).view(rows, columns)
    return LAYOUTS[draw(some.sampled_from(list(LAYOUTS)))](tensor)


@MIXINGS
@settings(max_examples=60)
@given(parts=some.lists(_parts(), min_size=1, max_size=6), wider=some.integers(0, 3))
def test_a_batch_changes_no_sum(mixing: Mixing, parts: list[torch.Tensor], wider: int) -> None:
    """Whatever lies beside a tensor, and however large its slot is, its sums are those alone."""
    parts = [part for part in parts if part.nbytes]
    least = staging_width(max((part.nbytes for part in parts), default=0))
    width = WIDTHS[min(WIDTHS.index(least) + wider, len(WIDTHS) - 1)] if parts else WIDTHS[0]
    alone = b"".join(sums(pieces(part), mixing).numpy().tobytes() for part in parts)

    batch = Staging(mixing, CPU, width)
    with unobserved():
        numbers = [batch.put(part) for part in parts]

    assert numbers == list(range(len(parts)))
    assert batch.bytes_of(batch.computed().view(-1).view(torch.uint8)) == alone


def test_batches_are_filled_and_dropped() -> None:
    """More tensors than a batch holds have the fingerprints they have alone; none is kept."""
    device_fingerprint(torch.ones(3))
    tensors = [torch.full((5,), float(number)) for number in range(2500)]
    pending = [device_fingerprint(tensor) for tensor in tensors]
    fetch(pending[1::2])
    fetch(pending)

    for number in (0, 1, 1023, 1024, 2499):
        alone = device_fingerprint(tensors[number])
        fetch([alone])
        assert alone.bytes == pending[number].bytes
    assert len({one.bytes for one in pending}) == len(tensors)
    device_fingerprint(tensors[0])  # nobody waits for it
    assert not module._open


def test_streams_share_no_batch() -> None:
    """Only work on one stream runs in order, so what is copied on another is mixed there too."""
    tensors = [torch.full((5,), float(number)) for number in range(3)]
    here = device_fingerprint(tensors[0])
    with torch.cpu.stream(torch.cpu.Stream()):
        there = device_fingerprint(tensors[1])
    here_again = device_fingerprint(tensors[2])
    together = [here, there, here_again]
    batches = [slot[0] for pending in together for slot in pending.slots]
    fetch(together)
    alone = [device_fingerprint(tensor) for tensor in tensors]
    fetch(alone)

    assert batches[0] is batches[2] is not batches[1]
    assert [one.bytes for one in together] == [one.bytes for one in alone]


def test_threads_share_a_batch() -> None:
    """Fingerprints that several threads begin at once are those of their own tensors."""
    tensors = [torch.full((5,), float(number)) for number in range(400)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(device_fingerprint, tensors))
    fetch(together)
    alone = [device_fingerprint(tensor) for tensor in tensors]
    fetch(alone)

    assert [one.bytes for one in together] == [one.bytes for one in alone]


IN_TRITON = """
import torch
from torchrepro.trace import triton_fingerprint as kernel
from torchrepro.trace.fingerprint import pieces
from torchrepro.trace.fingerprint import WIDE, sums

kernel.PROGRAMS = 7  # so that some of them have several rows
for size in (1, 7, 8, 9, 15, 8191, 8192, 8193, 200_003):
    memory = torch.randint(0, 256, (size + 8,), dtype=torch.uint8)
    for part in (memory[:size], memory[8:], memory[1:size + 1]):
        assert torch.equal(kernel.sums_of_part(part), sums(pieces(part), WIDE)), (size, part)
parts = [torch.randn(30, 20), torch.randn(30, 20)[:, 1:], torch.randn(9).bfloat16(), memory[1:7]]
batch = kernel.Results(memory.device, kernel.results_width(memory.nbytes))
numbers = [batch.put(part) for part in parts]
for number, part in zip(numbers, parts):
    assert torch.equal(kernel.sums_of_part(part), sums(pieces(part), WIDE))
    assert torch.equal(batch.computed()[number], sums(pieces(part), WIDE))
assert kernel.results_width(1 << 30) == 0 and not batch.is_full
print("equal")
"""

IN_PTX = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchrepro.trace import triton_fingerprint
from torchrepro.trace.fingerprint import ROW, WIDE

kernel = triton_fingerprint._kernel
types = dict(zip(kernel.arg_names, ("*u8", "*i64", "*i64", "*i64", "i64", "i32")))
values = dict(zip(kernel.arg_names[6:], (ROW, WIDE.step, *WIDE.multipliers, *WIDE.shifts)))
try:
    places = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    source = ASTSource(kernel, types | dict.fromkeys(values, "constexpr"), places)
except TypeError:
    source = ASTSource(kernel, types, values)
compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
print("local memory" if ".local" in compiled.asm["ptx"] else "equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize(
    ("code", "interpreted"), [(IN_TRITON, "1"), (IN_PTX, "0")], ids=["interpreted", "compiled"]
)
def test_the_kernel_for_cuda(code: str, interpreted: str) -> None:
    """Interpreted it gives the numbers that torch gives; it compiles, and fits into registers."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": interpreted},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy")

    assert done.stdout.endswith("equal\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 7, 8, 8193, CHUNK + 11, 3 * CHUNK])
def test_cuda_computes_what_the_host_computes(size: int) -> None:
    """Torch's ops and the Triton kernel on a GPU give the host's sums, aligned or not."""
    host = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    device = host.cuda()
    for part, expected in ((device[:size], host[:size]), (device[1:], host[1:])):
        with unobserved():
            wide, narrow = (sums(iter([expected]), mixing) for mixing in (WIDE, NARROW))
            assert torch.equal(sums(iter([part]), WIDE).cpu(), wide)
            assert torch.equal(sums(iter([part]), NARROW).cpu(), narrow)
            if importlib.util.find_spec("triton"):
                assert torch.equal(module._in_triton().sums(part).cpu(), wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_not_waited_for() -> None:
    """Between the first tensor of a device and the fetch, nothing synchronises with it."""
    tensor = torch.randn(1000, 1001, device="cuda")
    fetch([device_fingerprint(tensor)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [device_fingerprint(part) for part in (tensor, tensor.t(), tensor[:, 1:])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    fetch(pending)

    expected = [device_fingerprint(part) for part in (tensor, tensor.t(), tensor[:, 1:])]
    fetch(expected)
    assert [one.bytes for one in pending] == [one.bytes for one in expected]


def test_a_pending_one_that_is_known_is_not_fetched() -> None:
    """Bytes that are there stay."""
    known = Pending(b"0123456789abcdef")
    fetch([known])

    assert known.bytes == b"0123456789abcdef"
