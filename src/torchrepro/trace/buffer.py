"""Keeps the records of the running step in memory until they are moved to the store.

On request it also keeps details of ops: statistics of their outputs, and copies of tensors.
"""

from __future__ import annotations

import math
import threading
from asyncio import _get_running_loop as running_loop
from asyncio import current_task
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from torchrepro.ground.callers import frames
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.trace.device_fingerprint import PendingDigest, fetch
from torchrepro.trace.fingerprint import memory_of, pieces, unobserved
from torchrepro.trace.fingerprint_cache import FingerprintCache
from torchrepro.trace.format import INPUT, OUTPUT
from torchrepro.trace.frames import ModuleNames, source_of
from torchrepro.trace.op_facts import shapes_text, tensors_in

if TYPE_CHECKING:
    from torchrepro.trace.format import Row
    from torchrepro.trace.frames import CallSite
    from torchrepro.trace.request import RecordingRequest
    from torchrepro.trace.store import Store

IN_MEMORY = 1 << 16
"""The most records of a step in memory. If there are more, all are moved to the store."""

PIECE = 1 << 18
"""Elements that are widened at a time: few enough for the processor's cache."""

LARGE_PIECE = 1 << 23
"""Elements that are widened at a time on a device, where each piece waits for the device."""
_WIDEST = {"mps": "float32", "npu": "float32"}
"""The widest floats of types of devices where 64-bit arithmetic is slow or missing."""


class RecordBuffer:
    """Collects new records in order. Numbers the sites, arguments and threads of the records."""

    def __init__(self) -> None:
        self.rows: list[Row] = []  # inputs and outputs may be lists with pending digests
        self.sites: dict[Hashable, int] = {}
        self.arguments: dict[Hashable, int] = {}
        self.moved = 0  # records of the running step that are already in the store
        self._incomplete = False  # whether any row, also of earlier steps, had pending digests
        self._texts: dict[str, int] = {"": 0}
        self._number_of_texts = 0
        self._latest_arguments: dict[int, tuple[str, int]] = {}
        self._site_numbers: dict[tuple[str, ...], int] = {}
        self._threads: dict[int, int] = {}  # by the identifier of the thread
        self._tasks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count = 0
        # By number. Numbers are assigned last, because a signal may interrupt between two lines.
        self._new_sites: dict[int, tuple[str, ...]] = {}
        self._new_arguments: dict[int, str] = {}
        self._new_threads: dict[int, str] = {}
        self._lock = threading.RLock()

    def new_site(self, key: Hashable, phase: str, call_site: CallSite, op: str, shapes: Any) -> int:
        """Return the number of a site, and store the number in `sites` under `key`."""
        site = (phase, call_site.module, op, source_of(call_site), shapes_text(shapes))
        with self._lock:
            number = self._site_numbers.get(site)
            if number is None:
                number = len(self._site_numbers) + 1
                self._new_sites[number] = site
                self._site_numbers[site] = number
            self.sites[key] = number
            return number

    def new_argument(self, key: Hashable, text: str) -> int:
        """Return the number of an argument text; store the number in `arguments` under `key`."""
        with self._lock:
            number = self._texts.get(text)
            if number is None:
                number = self._texts[text] = self._number_for(text)
            self.arguments[key] = number
            return number

    def latest_argument(self, owner: int, text: str) -> int:
        """Return the number of `text`. Only the latest text of each `owner` is kept in memory.

        Some texts change in every step, such as a learning rate. All of them would fill the memory.
        """
        with self._lock:
            known = self._latest_arguments.get(owner)
            if known is None or known[0] != text:
                known = self._latest_arguments[owner] = text, self._number_for(text)
            return known[1]

    def _number_for(self, text: str) -> int:
        number = self._number_of_texts + 1
        self._new_arguments[number] = text
        self._number_of_texts = number
        return number

    def new_thread(self) -> int:
        with self._lock:
            number = self._threads[threading.get_ident()] = self._number_of_thread(
                threading.current_thread().name
            )
            if running_loop() is not None and (task := current_task()) is not None:
                self._tasks[task] = number
            return number

    def _number_of_thread(self, name: str) -> int:
        number = self._count
        self._new_threads[number] = name
        self._count = number + 1
        return number

    def thread(self, otherwise: int) -> int:
        """Return the number of the running thread. For a thread of autograd, return `otherwise`."""
        number = self._threads.get(threading.get_ident(), otherwise)
        return number if running_loop() is None else self.task(number)

    def task(self, thread: int) -> int:
        """Return the number of the asyncio task that `thread` is running.

        Tasks are numbered like threads, because the order of tasks depends on timing too. The main
        task of a loop, and the task in which the recording began, have the number of their thread.
        """
        task: Any = current_task()
        if task is None:
            return thread
        with self._lock:
            if task not in self._tasks:
                name = getattr(task.get_coro(), "__qualname__", "")
                self._tasks[task] = (
                    thread
                    if _is_main_task(task)
                    else self._number_of_thread(f"{task.get_name()} ({name})")
                )
            return self._tasks[task]

    def add(self, thread: int, site: int, argument: int, inputs: Any, outputs: Any) -> int:
        """Add a record, whose digests may be pending. Return the number of records in memory."""
        rows = self.rows
        try:
            joined = outputs if outputs.__class__ is bytes else b"".join(outputs)
            rows.append((thread, site, argument, b"".join(inputs), joined))
        except TypeError:
            self._incomplete = True
            rows.append((thread, site, argument, inputs, outputs))
        return len(rows)

    def add_outputs(self, sites: list[int], arguments: list[int], outputs: list[Any]) -> int:
        """Add a record without inputs for each output. Return the number of records in memory."""
        rows, thread = self.rows, self.thread(0)
        if {bytes}.issuperset(map(type, outputs)):
            rows.extend(zip(repeat(thread), sites, arguments, repeat(b""), outputs, strict=False))
        else:
            for site, argument, output in zip(sites, arguments, outputs, strict=True):
                self.add(thread, site, argument, (), (output,))
        return len(rows)

    def move_to_store(self, store: Store) -> None:
        """Move the records in memory to `store`. The step may continue afterwards."""
        with self._lock:
            count = len(self.rows)
            rows = self.rows[:count]  # other threads may append at the same time
            del self.rows[:count]
            store.add_sites([*self._new_sites.values()])
            store.add_arguments([*self._new_arguments.values()])
            store.add_threads([*self._new_threads.values()])
            self._new_sites, self._new_arguments, self._new_threads = {}, {}, {}
            self.moved += count
        if self._incomplete:
            columns = (column for row in rows for column in row[3:])
            incomplete = (column for column in columns if not isinstance(column, bytes))
            fetch(digest for digests in incomplete for digest in _unknown(digests))
            rows = [(*row[:3], joined(row[3], INPUT), joined(row[4], OUTPUT)) for row in rows]
        store.add_records(rows)

    def end_step(self, store: Store) -> tuple[int, int]:
        """Move the rest of a step to `store`. Return the step's first id and number of records."""
        self.move_to_store(store)
        count, self.moved = self.moved, 0
        return store.records - count + 1, count


def _is_main_task(task: Any) -> bool:
    """Whether an event loop was started to run `task`."""
    namespaces = (
        frame.f_locals
        for frame in frames()
        if frame.f_code.co_name in {"run", "run_until_complete"}
        and str(frame.f_globals.get("__name__")).startswith("asyncio.")
    )
    return any(
        task is variables.get("task") or task is variables.get("future") for variables in namespaces
    )


@dataclass(slots=True)
class UninitializedReads:
    """Counts how often one op at one call site has read uninitialized memory."""

    count: int = 0
    is_nan: bool = False  # whether a result had NaN although no initialized input had


@dataclass(slots=True)
class RecordingState:
    """The state that all parts of one recording share."""

    request: RecordingRequest
    spill: Callable[[], None]  # called when a step has more than `IN_MEMORY` records
    step: int = 0  # the running step
    names: ModuleNames = field(default_factory=ModuleNames)
    cache: FingerprintCache = field(default_factory=FingerprintCache)
    buffer: RecordBuffer = field(default_factory=RecordBuffer)
    uninitialized_reads: dict[tuple[CallSite, CallSite, str], UninitializedReads] = field(
        default_factory=dict
    )
    """Keys: the call site that allocated the memory, the call site that read it, and the op."""
    hidden: set[str] = field(default_factory=set)
    """The lines that hid ops from all modes, as ``file:line``."""
    # Locked while a record and its details are added, and while a step is moved to the store:
    # another thread may record an op or end the step at the same time.
    lock: Any = field(default_factory=fork_safe_lock)
    position: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns the running step and the number of records."""
    seeds: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Line that draws from an explicit generator -> step, record and seed of the first draw."""

    left_torch: int = 0  # the sum of the fingerprints of all tensors whose values left torch

    @property
    def wants_step(self) -> bool:
        return self.request.wants(self.step)


def _unknown(digests: Any) -> Iterator[PendingDigest]:
    return (digest for digest in digests if isinstance(digest, PendingDigest))


def joined(digests: Any, length: int) -> bytes:
    """Return the digests joined. Completes pending digests and cuts them to `length` bytes."""
    if isinstance(digests, bytes):
        return digests
    try:
        return b"".join(digests)  # nearly always: no digest is pending
    except TypeError:
        fetch(_unknown(digests))
    return b"".join(
        digest if isinstance(digest, bytes) else digest.bytes[:length] for digest in digests
    )


class TensorStatistics(NamedTuple):
    """Summary statistics of a tensor, with None in place of NaN."""

    numbers: int  # the count of elements that are not NaN
    mean: float | None = None
    norm: float | None = None
    low: float | None = None
    high: float | None = None


def statistics(tensor: Any) -> TensorStatistics:
    """Return count, mean, Euclidean norm, minimum and maximum of the elements of `tensor`.

    NaN elements are ignored. A complex element counts as two real numbers. Quantized elements are
    dequantized. Only the stored elements of a sparse tensor count. A tensor without elements,
    or with unreadable ones, has the count 0 and None for the rest. Waits for the device. Never
    raises.
    """
    try:
        with unobserved():
            rows = list(map(_statistics_of_piece, _widened_pieces(tensor)))
    except Exception:  # noqa: BLE001 - the code of a subclass may raise any error
        return TensorStatistics(0)
    count = sum(numbers for numbers, *_ in rows)
    if not count:
        return TensorStatistics(0)
    _, sums, norms, lows, highs = zip(*rows, strict=True)
    # math.fsum raises for infinities of both signs.
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
    mean, norm = (
        None if math.isnan(number) else number for number in (total / count, math.hypot(*norms))
    )
    return TensorStatistics(count, mean, norm, min(lows), max(highs))


def _widened_pieces(tensor: Any) -> Iterator[Any]:
    for part in _parts_with_values(tensor):
        wide = getattr(torch, _WIDEST.get(part.device.type, "float64"))
        size = PIECE if part.is_cpu else LARGE_PIECE
        for piece in pieces(part):
            numbers = piece.view(part.dtype)
            real = torch.view_as_real(numbers) if part.is_complex() else numbers
            yield from (few.to(wide) for few in real.reshape(-1).split(size))


def _parts_with_values(tensor: Any) -> Sequence[Any]:
    if hasattr(tensor, "__tensor_flatten__"):  # the first inner tensor has the values
        return _parts_with_values(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
    if tensor.layout == torch.sparse_coo:
        return _parts_with_values(tensor._values())  # noqa: SLF001 - the public method raises if not coalesced
    if tensor.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return _parts_with_values(tensor.values())
    return memory_of(tensor.dequantize() if tensor.is_quantized else tensor).parts


def _statistics_of_piece(piece: Any) -> tuple[int, float, float, float, float]:
    if not piece.numel():
        return 0, 0.0, 0.0, math.inf, -math.inf
    low, high = piece.aminmax()
    norm = torch.linalg.vector_norm(piece)
    row = torch.stack([piece.sum(), norm, low, high]).tolist()
    if math.isnan(row[2]):
        return _statistics_of_piece(piece[~piece.isnan()])
    return (piece.numel(), *row)


class DetailRecorder:
    """Records the requested details: statistics of op outputs, and tensors of some modules."""

    def __init__(self, state: RecordingState) -> None:
        self._state = state
        self._statistics: list[tuple[Any, ...]] = []
        self._tensors: list[tuple[Any, ...]] = []
        self._matched: set[str] = set()

    def before(self, call_site: CallSite, args: Any, kwargs: Any) -> list[Any] | None:
        """Return copies of an op's inputs if the tensors of the op's module are kept, else None."""
        if not self._keeps(call_site) or not self._state.wants_step:
            return None
        cache = self._state.cache
        tensors = tensors_in((args, kwargs))
        return [None if cache.is_uninitialized(tensor) else _kept(tensor) for tensor in tensors]

    def after(self, before: list[Any] | None, outputs: list[Any]) -> None:
        """Add to the last record the details of `outputs`, and the input copies in `before`."""
        if not self._state.wants_step:
            return
        buffer = self._state.buffer
        position = buffer.moved + len(buffer.rows) - 1
        if self._state.request.statistics:
            self._statistics += [
                (position, number, *statistics(tensor)) for number, tensor in enumerate(outputs)
            ]
        if before is not None:
            self._add_tensors(position, "input", before)
            self._add_tensors(position, "output", map(_kept, outputs))

    def new_tensor(self, call_site: CallSite, tensor: Any) -> None:
        """Add to the last record the details of a tensor made from Python or numpy values."""
        self.after([] if self._keeps(call_site) else None, [tensor])

    def _keeps(self, call_site: CallSite) -> bool:
        module = call_site.module
        matching = [
            pattern
            for pattern in self._state.request.keep
            if fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
        ]
        self._matched.update(matching)
        return bool(matching)

    def unmatched(self) -> list[str]:
        return [pattern for pattern in self._state.request.keep if pattern not in self._matched]

    def write(self, store: Store, first: int) -> None:
        """Write the details of a step to `store`; `first` is the id of the step's first record."""
        store.add_statistics((first + row[0], *row[1:]) for row in self._statistics)
        store.add_tensors((first + row[0], *row[1:]) for row in self._tensors)
        self._statistics, self._tensors = [], []

    def _add_tensors(self, position: int, role: str, kept: Iterable[Any]) -> None:
        self._tensors += [
            (position, role, index, *tensor)
            for index, tensor in enumerate(kept)
            if tensor is not None
        ]


def _kept(tensor: Any) -> tuple[str, str, bytes] | None:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return None
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    try:
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        data = copy.reshape(-1).view(torch.uint8).numpy() if copy.numel() else b""
    except Exception:  # noqa: BLE001 - the code of a subclass may raise any error
        return None
    return str(copy.dtype).removeprefix("torch."), ",".join(map(str, copy.shape)), bytes(data)
