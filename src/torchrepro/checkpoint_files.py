"""Reads the tensors and values of a checkpoint, piece by piece, without running its code.

A checkpoint is a file of `torch.save`, a safetensors file, or a folder that
`torch.distributed.checkpoint` (DCP) wrote.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.ground.console import note
from torchrepro.ground.errors import ProfileError, near

if TYPE_CHECKING:
    from pathlib import Path

PIECE = 1 << 22
"""The most elements that are read at a time."""

WINDOW = 1 << 27
"""Bytes that are read before a file is mapped again, which frees the pages of the old mapping."""

METADATA = ".metadata"
FORMATS = f"a file of torch.save, a safetensors file, or a folder with a file {METADATA}"


class SavedTensor(partial[torch.Tensor]):
    """Returns a tensor of a checkpoint when it is called: a view of the file, or a copy."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield all elements in order, as one-dimensional tensors of at most `PIECE` elements."""
        copied = None if self().is_contiguous() else self().flatten()
        for start in range(0, self().numel(), PIECE):
            elements = self().view(-1) if copied is None else copied
            yield elements[start : start + PIECE].clone(memory_format=torch.contiguous_format)


def saved_state(path: Path) -> dict[str, Any]:
    """Return the `SavedTensor` or the value of each name in a checkpoint.

    Sparse and quantized tensors are values. Call this function and each `SavedTensor` in a block
    of `damage_explained`.
    """
    file = _MappedFile(partial(_load_sharded, path) if path.is_dir() else _loader(path))
    return {
        name: SavedTensor(file.tensor, name) if _is_strided(value) else value
        for name, value in file.state.items()
    }


@contextmanager
def damage_explained(path: Path) -> Iterator[None]:
    """Raise `ProfileError` about the checkpoint `path` for every error in the block."""
    try:
        yield
    except Exception as error:
        blamed, match, reason = str(path), "", re.split(r"\n|\. ", str(error) or "it ends early")[0]
        problem, todo = f"damaged, cut off, or not a checkpoint ({reason})", "copy or save it again"
        if code := re.search(r"GLOBAL (\S+)|(TorchScript)", str(error)):
            problem = f"needs the code of {code[1] or code[2]}, which is not run"
            todo = "load it in a program that you trust, and save its state_dict"
        elif isinstance(error, ImportError):
            problem, todo = f"needs the package {error.name}", f"pip install {error.name}"
        elif isinstance(error, OSError):
            blamed, problem, todo = error.filename or blamed, str(error.strerror), "check the path"
            siblings = [] if path.exists() else path.parent.glob("*")
            match = near(path.name, (sibling.name for sibling in siblings))
        raise ProfileError.about(problem, blamed, legal=FORMATS, near=match, todo=todo) from error


def _is_strided(value: Any) -> bool:
    return torch.is_tensor(value) and value.layout == torch.strided and not value.is_quantized


class _MappedFile:
    """A file that is mapped into memory, again whenever `WINDOW` bytes have been read."""

    def __init__(self, load: Callable[[], dict[str, Any]]) -> None:
        self.load, self.state, self.bytes_read = load, load(), 0

    def tensor(self, name: str) -> torch.Tensor:
        if self.bytes_read > WINDOW:
            self.state, self.bytes_read = self.load(), 0
        tensor: torch.Tensor = self.state[name].detach().resolve_conj().resolve_neg()
        self.bytes_read += min(tensor.numel(), PIECE) * tensor.itemsize
        return tensor


def _loader(path: Path) -> Callable[[], dict[str, Any]]:
    """Return a function that maps a file into memory and returns its tensors and values."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{" or path.suffix == ".safetensors":  # the length of the JSON, then the JSON
        return partial(_load_safetensors, path)
    if start.startswith(b"PK\3\4"):
        with zipfile.ZipFile(path) as archive:
            compressed = any(member.compress_type for member in archive.infolist())
        if not compressed:  # torch would map compressed bytes as elements
            return partial(_load_pickled, path, mmap=True)
    state = _load_pickled(path, mmap=False)
    note(f"{path} is not an uncompressed zip file, so all of it was loaded into memory")
    return lambda: state


def _load_pickled(source: Path | BytesIO, name: str = "", *, mmap: bool = False) -> dict[str, Any]:
    return _flattened(torch.load(source, "cpu", weights_only=True, mmap=mmap), name, {})


def _load_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _flattened(nested: Any, name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Add the values in nested dicts, lists and tuples to `state`, by their keys joined by dots."""
    items = dict(enumerate(nested)) if isinstance(nested, list | tuple) else nested
    if isinstance(items, dict) and (items or not name):
        for key, inner in items.items():
            _flattened(inner, f"{name}.{key}" if name else str(key), state)
    else:
        while name in state:  # {"a.b": 1, "a": {"b": 2}}
            name += "'"
        state[name] = nested
    return state


class _Record:
    """Has the fields of an object in `.metadata`. No code of the class of that object runs."""

    offset = None  # torch omits None in some versions

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"fields": state})


_RECORDS = re.compile(
    r"torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.(metadata|filesystem)\.\w+"
    r"|torch\.serialization\._get_layout|pathlib\.(_local\.)?\w+Path"
)
"""The names that `.metadata` may contain. All of them are read as `_Record`."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`, which is a pickle. Refuses a name that is not in the list."""

    def find_class(self, module: str, name: str) -> Any:
        public = getattr(torch, name, None) if module == "torch" else None
        if public is torch.Size or isinstance(public, torch.dtype):
            return public
        if not _RECORDS.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return _Record


def _load_sharded(folder: Path) -> dict[str, Any]:
    """Return the tensors and values of a folder that DCP wrote. A part is as `torch.save` wrote it.

    A tensor is assembled when it is read, so the largest tensor has to fit into memory.
    """
    with (folder / METADATA).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    descriptions = metadata.state_dict_metadata
    infos = {(key.fqn, key.offset): info for key, info in metadata.storage_data.items()}

    def part(name: str, offset: Any) -> dict[str, Any]:
        info = infos[name, offset]
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return _load_pickled(BytesIO(file.read(info.length)), name)

    @lru_cache(1)  # a tensor is fetched again for each piece
    def assembled(name: str) -> torch.Tensor:
        described = descriptions[name]
        whole = torch.zeros(described.size, dtype=described.properties.fields[0])
        if sum(prod(chunk.sizes) for chunk in described.chunks) != whole.numel():
            raise ValueError(f"parts of {name} are missing")
        for chunk in described.chunks:
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
            whole[tuple(map(slice, chunk.offsets, ends))] = part(name, chunk.offsets)[name]
        return whole

    state: dict[str, Any] = {}
    for name, described in descriptions.items():
        is_tensor = hasattr(described, "chunks")
        state |= {name: SavedTensor(assembled, name)} if is_tensor else part(name, None)
    return state
