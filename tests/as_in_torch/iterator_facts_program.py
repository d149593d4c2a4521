"""Prints, as JSON, all that a program can observe of the iterators of loaders.

`FACTS` maps a fact to a function that returns it as plain values. A fact that raises is the text
of its error.
"""

from __future__ import annotations

import collections.abc
import copy
import gc
import inspect
import io
import json
import pickle
import re
import sys
import threading
import warnings
from weakref import ref

import torch
from torch.utils import data
from torch.utils.data import dataloader

warnings.simplefilter("ignore")
Base = dataloader._BaseDataLoaderIter
Single = dataloader._SingleProcessDataLoaderIter
Many = dataloader._MultiProcessingDataLoaderIter


class Numbers(data.Dataset):
    def __init__(self, length=4):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


class BackwardIter(Single):
    """An iterator that reverses each batch."""

    def __init__(self, loader):
        super().__init__(loader)
        self.asked = []

    def _next_index(self):
        index = super()._next_index()
        self.asked.append(list(index))
        return index[::-1]

    def _next_data(self):
        return super()._next_data() * 10


class BackwardWorkers(Many):
    def _next_index(self):
        index = super()._next_index()
        return sorted(index, reverse=True) if len(index) else index


class Backward(data.DataLoader):
    def _get_iterator(self):
        return (BackwardWorkers if self.num_workers else BackwardIter)(self)


class Wrapped:
    """A wrapper of torch's iterator, as graph libraries have it."""

    def __init__(self, iterator):
        self.iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.iterator) + 100


class Wrapping(data.DataLoader):
    def _get_iterator(self):
        return Wrapped(super()._get_iterator())


class Generating(data.DataLoader):
    def _get_iterator(self):
        for index in self.sampler:
            yield self.dataset[index]


class Listing(data.DataLoader):
    def _get_iterator(self):
        return iter([self.dataset[index] for batch in self.batch_sampler for index in batch])


class Asserting(data.DataLoader):
    def __iter__(self):
        iterator = super().__iter__()
        assert isinstance(iterator, Base)
        assert type(iterator) in (Single, Many)
        return iterator


class Twice(data.DataLoader):
    def __iter__(self):
        for _ in range(2):
            yield from super().__iter__()


class Slotless(Single):
    __hash__ = None

    def __eq__(self, other):
        return isinstance(other, Slotless)


class Unhashable(data.DataLoader):
    def _get_iterator(self):
        return Slotless(self)


def loader(**more):
    return data.DataLoader(Numbers(), **{"batch_size": 1, **more})


def rows(batches):
    return [batch.tolist() for batch in batches]


def lives_on():
    return loader(num_workers=1, persistent_workers=True)


def of_torchdata(**more):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=1, **more)


def error(call):
    try:
        return repr(call())
    except Exception as raised:  # noqa: BLE001 - the fact is what a program gets
        return f"{type(raised).__name__}: {raised}"


def named(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def set_order():
    iterator = iter(loader())
    iterator._sampler_iter = iter([[3], [2], [1], [0]])
    return rows(iterator)


def set_attribute():
    made = loader()
    iterator = iter(made)
    iterator.mark = 1
    return [vars(iterator)["mark"], hasattr(iter(made), "mark"), hasattr(iterator, "nothing")]


def deleted_attribute():
    iterator = iter(loader())
    del iterator._num_yielded
    return error(lambda: iterator._num_yielded)


def set_collate():
    iterator = iter(loader())
    iterator._dataset_fetcher.collate_fn = lambda samples: torch.tensor(samples) + 50
    return rows(iterator)


def set_dataset():
    iterator = iter(loader())
    iterator._dataset_fetcher.dataset = [10, 11, 12, 13]
    return rows(iterator)


def set_index_sampler():
    made = loader()
    iterator = iter(made)
    return [
        iterator._index_sampler is made.batch_sampler,
        iterator._dataset is made.dataset,
        iterator._collate_fn is made.collate_fn,
        iterator._dataset_fetcher.dataset is made.dataset,
        iterator._dataset_fetcher.collate_fn is made.collate_fn,
        named(type(iterator._dataset_fetcher)),
    ]


def reset_by_hand():
    made = loader()
    iterator = iter(made)
    next(iterator)
    iterator._reset(made)
    return rows(iterator)


def state_of_loader():
    made = loader(num_workers=1)
    before = sorted(vars(made))
    iterator = iter(made)
    during = [
        made.sampler is made.batch_sampler.sampler,
        made.worker_init_fn,
        sorted(vars(made)) == before,
    ]
    return [during, iterator._worker_init_fn is made.worker_init_fn, rows(iterator)]


def own_worker_init():
    made = loader(num_workers=1, worker_init_fn=print_nothing)
    iterator = iter(made)
    return [iterator._worker_init_fn is print_nothing, rows(iterator)]


def print_nothing(worker):
    del worker


def same_with_workers_that_live_on():
    made = lives_on()
    first = iter(made)
    first.mark = 1
    once = rows(first)
    second = iter(made)
    return [first is second, made._iterator is second, second.mark, once, rows(second)]


def begun_while_another_is_read():
    made = loader()
    one, two = iter(made), iter(made)
    return [one is two, next(one).item(), next(one).item(), next(two).item(), one._num_yielded]


def dies_with_its_last_reference():
    gc.disable()
    iterator = iter(loader())
    next(iterator)
    watched = ref(iterator)
    del iterator
    gc.enable()
    return watched() is None


def callback_of_a_weak_reference():
    seen = []
    iterator = iter(loader())
    watched = ref(iterator, lambda _: seen.append(1))
    next(iterator)
    del iterator
    return [seen, watched() is None]


def references():
    iterator = iter(loader())
    next(iterator)
    return sys.getrefcount(iterator)


def read_in_a_thread():
    iterator, found = iter(loader()), []
    thread = threading.Thread(target=lambda: found.extend(rows(iterator)))
    thread.start()
    thread.join()
    return found


def dataset_that_raises():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError("two")
            return index

    iterator = iter(data.DataLoader(Broken(), batch_size=1))
    return [
        next(iterator).item(),
        next(iterator).item(),
        error(lambda: next(iterator)),
        next(iterator).item(),
    ]


def dispatched_by_type():
    from functools import singledispatch

    @singledispatch
    def kind(_):
        return "another"

    @kind.register(Base)
    def _(_):
        return "torch's"

    return kind(iter(loader()))


def matched_by_pattern():
    match iter(loader()):
        case Many():
            return "many"
        case Single(_num_workers=0):
            return "single"
        case _:
            return "none"


def iterator_of_an_iterator():
    iterator = iter(loader())
    return iter(iterator) is iterator


def in_a_set():
    made = loader()
    one, two = iter(made), iter(made)
    return [len({one, two, one}), one == two, hash(one) == object.__hash__(one)]


def addressless(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def past_the_end():
    iterator = iter(loader())
    list(iterator)
    return [error(lambda: next(iterator)), next(iterator, "none"), iterator._num_yielded]


def length_warning():
    class Short(Stream):
        def __len__(self):
            return 2

    made = data.DataLoader(Short(), batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        length = len(made)
        read = rows(made)
    return [length, read, len(caught)]


def saved_by_torch():
    return error(lambda: torch.save(iter(loader()), io.BytesIO()))


FACTS = {
    "its class": lambda: named(type(iter(loader()))),
    "its class, with workers": lambda: named(type(iter(loader(num_workers=1)))),
    "its class, without batches": lambda: named(type(iter(loader(batch_size=None)))),
    "its class, of a stream": lambda: named(type(iter(data.DataLoader(Stream())))),
    "its class, of torchdata": lambda: named(type(iter(of_torchdata()))),
    "__class__": lambda: iter(loader()).__class__ is Single,
    "isinstance of torch's base": lambda: isinstance(iter(loader()), Base),
    "isinstance of an Iterator": lambda: isinstance(iter(loader()), collections.abc.Iterator),
    "isinstance of a Sized": lambda: isinstance(iter(loader()), collections.abc.Sized),
    "bases": lambda: [named(kind) for kind in type(iter(loader())).__mro__],
    "dispatched by its type": dispatched_by_type,
    "matched by a pattern": matched_by_pattern,
    "iter of it": iterator_of_an_iterator,
    "repr": lambda: addressless(repr(iter(loader()))),
    "str": lambda: addressless(str(iter(loader()))),
    "length": lambda: [len(iter(loader())), len(iter(loader(batch_size=3)))],
    "length of a stream": lambda: error(lambda: len(iter(data.DataLoader(Stream())))),
    "truth": lambda: [bool(iter(loader())), bool(iter(data.DataLoader(Numbers(0))))],
    "hash and equality": in_a_set,
    "its own attributes": lambda: sorted(vars(iter(loader()))),
    "its own attributes, with workers": lambda: sorted(vars(iter(loader(num_workers=1)))),
    "dir": lambda: dir(iter(loader())),
    "an attribute that is set": set_attribute,
    "an attribute that is deleted": deleted_attribute,
    "an attribute that is missing": lambda: error(lambda: iter(loader()).nothing),
    "another order that is set": set_order,
    "another collate_fn that is set": set_collate,
    "another dataset that is set": set_dataset,
    "what it has of its loader": set_index_sampler,
    "what it has of its loader, with workers": state_of_loader,
    "a worker_init_fn of the program": own_worker_init,
    "the index it asks for": lambda: iter(loader())._next_index(),
    "the indices that it goes through": lambda: list(iter(loader(batch_size=2))._sampler_iter),
    "what it has counted": lambda: [
        (next(it), it._num_yielded)[1] for it in [iter(loader())] for _ in range(3)
    ],
    "reset by hand": reset_by_hand,
    "past its end": past_the_end,
    "the same while workers live on": same_with_workers_that_live_on,
    "two of one loader": begun_while_another_is_read,
    "a weak reference": dies_with_its_last_reference,
    "a weak reference with a callback": callback_of_a_weak_reference,
    "how often it is referred to": references,
    "pickle": lambda: error(lambda: pickle.dumps(iter(loader()))),
    "copy": lambda: error(lambda: copy.copy(iter(loader()))),
    "deepcopy": lambda: error(lambda: copy.deepcopy(iter(loader()))),
    "torch.save": saved_by_torch,
    "pickle of the loader, read": lambda: rows(pickle.loads(pickle.dumps(read_once(loader())))),
    "deepcopy of the loader, read": lambda: rows(copy.deepcopy(read_once(loader()))),
    "deepcopy of a loader whose workers live on": lambda: error(
        lambda: copy.deepcopy(read_once(lives_on()))
    ),
    "__next__ of its class": lambda: named(Base.__next__),
    "__next__ called by its class": lambda: Base.__next__(iter(loader())).tolist(),
    "__iter__ of the loader's class": lambda: named(data.DataLoader.__iter__),
    "signature of __next__": lambda: str(inspect.signature(Single.__next__)),
    "a loader's class that checks": lambda: [
        rows(Asserting(Numbers())),
        rows(Asserting(Numbers(), num_workers=1)),
    ],
    "an iterator's class of its own": lambda: rows(Backward(Numbers(), batch_size=2)),
    "an iterator's class of its own, with workers": lambda: rows(
        Backward(Numbers(), batch_size=2, num_workers=1)
    ),
    "an iterator around torch's": lambda: rows(Wrapping(Numbers())),
    "a class that generates its samples": lambda: list(Generating(Numbers(), num_workers=1)),
    "a class that lists its samples": lambda: [
        list(Listing(Numbers(), **more)) for more in ({}, {"num_workers": 1})
    ],
    "a loader that yields": lambda: [
        inspect.isgenerator(iter(Twice(Numbers()))),
        rows(Twice(Numbers())),
    ],
    "an iterator without a hash": lambda: rows(Unhashable(Numbers())),
    "a dataset that raises": dataset_that_raises,
    "read in a thread": read_in_a_thread,
    "the warning of a stream that is longer": length_warning,
    "zip and enumerate": lambda: [
        [n, a.item(), b.item()] for n, (a, b) in enumerate(zip(loader(), loader(), strict=True))
    ],
    "the state of torchdata's": lambda: sorted(iter(of_torchdata()).state_dict()),
}


def read_once(made):
    list(made)
    return made


def value_of(fact):
    try:
        return fact()
    except Exception as raised:  # noqa: BLE001 - the fact is what a program gets
        return f"raised {type(raised).__name__}: {raised}"


if __name__ == "__main__":
    print(json.dumps({name: value_of(fact) for name, fact in FACTS.items()}))
