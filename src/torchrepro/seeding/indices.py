"""What samplers yield: a name for every index, and which of them an epoch has had before."""

from __future__ import annotations

from collections import Counter
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: Mapping[bytes, int] = {}


class Repeats:
    """Counts the samples of an epoch, so that one which comes again draws other numbers."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def of(self, index: Any) -> Mapping[bytes, int]:
        """Return how often the epoch has had each sample of the batch `index` before.

        Samples that come for the first time, and once, are left out.
        """
        names = [label(part) for part in index] if isinstance(index, list) else [label(index)]
        within = Counter(names)
        again = {
            name: self._seen[name]
            for name, times in within.items()
            if times > 1 or name in self._seen
        }
        self._seen.update(within)
        return again


class NoRepeats(Repeats):
    """Stands for the count of a sampler that yields no index twice."""

    def of(self, index: Any) -> Mapping[bytes, int]:
        """Return that no sample of the batch `index` has been there before."""
        return _NOTHING


def single(sampler: Any) -> Any:
    """Return what yields single indices: `sampler`, or the one that torch's makes batches of."""
    from torch.utils.data import BatchSampler

    return sampler.sampler if type(sampler) is BatchSampler else sampler


def repeats_of(sampler: Any) -> Repeats:
    """Return the count for an epoch of `sampler`, a free one if it yields no index twice."""
    from torch.utils import data

    sampler = single(sampler)
    once = type(sampler) in (data.SequentialSampler, data.DistributedSampler)
    if type(sampler) is data.RandomSampler:
        once = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return NoRepeats() if once else Repeats()


def label(index: Any) -> bytes:
    """Return bytes for `index` that are the same in every process."""
    if type(index) is int:
        return b"%d" % index
    if isinstance(index, list | tuple):
        return b"(" + b",".join(map(label, index)) + b")"
    if hasattr(index, "tolist"):  # an array or a tensor, whose text leaves out its middle
        return label(index.tolist())
    try:
        return b"%d" % as_index(index)
    except TypeError:
        text = repr(index)
    if " at 0x" in text:  # an address, which is another in every process
        raise SeedingError(
            Problem(
                "the sampler yields indices that have no text of their own",
                found=shown(index),
                todo="give their class a __repr__ that says which sample is meant",
            )
        )
    return text.encode()
