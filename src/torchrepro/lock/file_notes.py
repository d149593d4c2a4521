"""What a process of a run notes of its files, and how it finds those of a copy in place of its own.

Python's audit events tell of every file that Python opens, of the code that it imports, and of the
folders that are listed, and of the words of other programs that it starts. Of what a library opens
in C, `torch.save` and SQLite are heard; the rest is what is open or mapped as a step ends.
Every Python below the command does both, those that never import torch included: this module
imports next to nothing.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.callers import frames, is_library, package
from torchrepro.ground.imports import AfterImport

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

MOST = 100_000  # uses of files that one process notes

MOST_OUTSIDE = 5_000  # of them outside of the repository

READ, WRITTEN, LISTED, TOO_MANY = "read", "written", "listed", "too many"
VARIABLE = "variable"  # one that a line of the program has read; its size is 1 where it was set
TYPED = "typed"  # the program came by `python -c` or by standard input
CHANGED = "changed"  # otherwise than by writing, which is not noted
_WRITING = os.O_WRONLY | os.O_RDWR
LEFT_OUT = ("__pycache__", ".git")  # folders of a repository that hold no file of the program

_FINDERS = "__editable__"  # how the modules begin that setuptools puts in place of a path


class Use(NamedTuple):
    """The first use of a file or a folder by one process of a run."""

    kind: str
    path: str
    changed: int
    """When it had last been changed, in nanoseconds since 1970; 0 where it was not there."""
    size: int


def noted(log: Path) -> list[Use]:
    """Return what the processes of a run have noted, in the order of time."""
    found = []
    for line in log.read_bytes().splitlines() if log.exists() else ():
        try:
            found.append(Use(*json.loads(line)))
        except (ValueError, TypeError):  # a process that was killed may leave half a line
            continue
    return found


def begin(asked: Mapping[str, str]) -> None:
    """Note the files below `root` in the file `log`; adds an audit hook.

    With `tree`, a copy of `root`, this process finds what is in the copy before what is in `root`,
    which changes `sys.path`. A call that would write below `root`, or through a link of the copy to
    elsewhere, then raises `OSError`; what lies below `ours` may be written. Without, files outside
    of `root` that the program, or a library that loads data, has opened are noted, too, and the
    variables that the program reads.
    """
    notes = _Notes(**asked)
    if asked["tree"]:
        _find_in_copy(asked["root"], asked["tree"])
        AfterImport(["torch"], notes.guard_save).watch_all()
    else:
        notes.hear_variables()
    AfterImport(["torch.optim.optimizer"], notes.look_after_steps).watch_all()
    atexit.register(notes.look)
    sys.addaudithook(notes.hear)


def _find_in_copy(root: str, tree: str) -> None:
    """Put the folders of the copy in place of those of the original, where they are there."""

    def mapped(entry: str) -> str:
        there = tree + entry[len(root) :]
        is_inside = entry == root or entry.startswith(root + os.sep)
        return there if is_inside and os.path.isdir(there) else entry  # noqa: PTH112 - texts

    sys.path[:] = [mapped(entry) for entry in sys.path]
    for name in [*sys.modules]:
        if name.startswith(_FINDERS):
            places = getattr(sys.modules[name], "MAPPING", {}).values()
            parents = {os.path.dirname(str(place)) for place in places}  # noqa: PTH120 - texts
            # Such a finder comes after all of the path.
            sys.path += sorted(mapped(each) for each in parents if mapped(each) != each)


class _Notes:
    def __init__(self, root: str, log: str, tree: str, ours: str) -> None:
        self._inside = root + os.sep
        self._in_tree = tree + os.sep if tree else ""
        self._log = log
        self._ours = tuple(each + os.sep for each in (ours, sys.prefix) if each)
        self._not_data = (*self._ours, f"{sys.base_prefix}{os.sep}", *_OF_THE_SYSTEM)
        self._seen: set[tuple[str, str]] = set()
        self._outside: set[tuple[str, str]] = set()  # seen outside of the repository
        self._steps = 0

    def look_after_steps(self, module: str) -> None:
        sys.modules[module].register_optimizer_step_post_hook(self.look)

    def look(self, *step: Any) -> None:
        """Note the files that are open or mapped: C code may have opened them.

        It does so after a `step` of an optimizer if that is number 1, 2, 4, 8, ..., or without one.
        """
        self._steps += bool(step)
        if step and self._steps & (self._steps - 1):
            return
        # What would list the folder of descriptors may be perturbed, or be heard.
        found = {os.path.realpath(f"/proc/self/fd/{number}") for number in range(3, _DESCRIPTORS)}
        with suppress(OSError):  # this is a call of the program
            with open("/proc/self/maps", errors="surrogateescape") as maps:  # noqa: PTH123 - above
                found |= {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
            for path in filter(os.path.isfile, found):
                if ".so" not in os.path.basename(path):  # noqa: PTH119 - a text
                    self._note(READ, path)

    def hear_variables(self) -> None:
        """Note which variables a line of the program reads one by one."""
        kind: Any = type(os.environ)
        read, names = kind.__getitem__, kind.keys
        copying: set[Any] = set()  # where all of them are read, and so none by its name

        def noted_names(environ: Any) -> Any:
            caller = sys._getframe(1)  # noqa: SLF001 - documented
            copying.add((caller.f_code, caller.f_lasti))
            return names(environ)

        def noted_read(environ: Any, name: Any) -> Any:
            caller: Any = sys._getframe(1)  # noqa: SLF001 - documented
            is_one = (caller.f_code, caller.f_lasti) not in copying
            while caller.f_code.co_name in _READERS and is_library(caller.f_code.co_filename):
                if caller.f_back is None:  # C code has called it
                    break
                caller = caller.f_back
            key = VARIABLE, name
            if is_one and key not in self._seen and not is_library(caller.f_code.co_filename):
                self._seen.add(key)
                with suppress(OSError):
                    self._write(*key, 0, int(name in set(names(environ))))
            return read(environ, name)

        kind.keys, kind.__getitem__ = noted_names, noted_read

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        told, refused = _EVENTS.get(event), ""
        if told is None:
            return
        caller = sys._getframe().f_back  # noqa: SLF001 - documented
        try:
            for kind, path, *folder in told(*args):
                place = _within(path, *folder)
                if kind == TYPED and not self._in_tree:
                    self._write(kind, "", 0, 0)
                elif kind not in (CHANGED, TYPED) and not (kind == LISTED and _is_import(caller)):
                    self._note(kind, place, caller)
                if self._in_tree and kind in (WRITTEN, CHANGED):
                    parent, name = os.path.split(place)
                    real = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118 - texts
                    if self._leads_out(place, real if folder else os.path.realpath(place)):
                        self._note(WRITTEN, place)
                        refused = place
        except (OSError, ValueError, TypeError):
            return  # what is no path; an exception here would be one of the program's call
        if refused:
            what = "this run is in a copy, and that is a file of the user's own"
            raise OSError(errno.EROFS, what, refused)

    def guard_save(self, module: str) -> None:
        """Have `torch.save`, which opens files in C, ask as `open` does."""
        torch: Any = sys.modules[module]
        save = torch.save

        @wraps(save)
        def guarded(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self.hear("open", (f, "w", os.O_WRONLY))
            save(obj, f, *args, **kwargs)

        torch.save = guarded

    def _leads_out(self, place: str, real: str) -> bool:
        """Whether what would be written is below `root`, or behind a link of the copy."""
        is_own = real.startswith(self._inside) and not real.startswith(self._ours)
        return not real.startswith(self._in_tree) and (is_own or place.startswith(self._in_tree))

    def _note(self, kind: str, whole: str, caller: FrameType | None = None) -> None:
        key = kind, whole
        if key in self._seen or len(self._seen) > MOST or whole == self._log:
            return
        base = self._in_tree if self._in_tree and whole.startswith(self._in_tree) else self._inside
        if not whole.startswith(base):
            folder, name = os.path.split(whole)
            whole = os.path.join(_real(folder), name)  # noqa: PTH118 - texts
            if not whole.startswith(base):
                self._note_outside(kind, whole, caller)
                return
        real, whole = os.path.realpath(whole), _up_to_link(whole, base)
        if is_of_cache(os.path.dirname(whole)):  # noqa: PTH120 - texts
            return
        if len(self._seen) == MOST:
            kind, whole = TOO_MANY, ""
        self._seen.add(key)
        self._note_state(kind, whole)
        if real != whole and kind != WRITTEN:  # where a link leads
            self._note(kind, real, caller)

    def _note_outside(self, kind: str, path: str, caller: FrameType | None) -> None:
        """Note what is not in the repository, if it may be data, and the program has used it."""
        if self._in_tree or f"{path}/".startswith(self._not_data) or is_library(path):
            return
        key = kind, os.path.realpath(path)
        if key in self._outside or len(self._outside) == MOST_OUTSIDE:
            return
        if caller is None or _is_of_program(caller):
            self._outside.add(key)
            self._note_state(*key)

    def _note_state(self, kind: str, path: str) -> None:
        try:
            its = os.stat(path)  # noqa: PTH116 - a text
            self._write(kind, path, its.st_mtime_ns, its.st_size)
        except OSError:
            if kind in (WRITTEN, TOO_MANY):  # else it asked for what is not there
                self._write(kind, path, 0, 0)

    def _write(self, *use: str | int) -> None:
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(use).encode() + b"\n")
        finally:
            os.close(file)


def is_of_cache(path: str) -> bool:
    """Whether a path leads through a folder that holds no file of the program."""
    return any(f"{os.sep}{folder}{os.sep}" in f"{os.sep}{path}{os.sep}" for folder in LEFT_OUT)


def _up_to_link(path: str, base: str) -> str:
    """Return the first part of a path below `base` that is a link, or all of it."""
    at = len(base)
    while (at := path.find(os.sep, at + 1)) > 0:
        if os.path.islink(path[:at]):  # noqa: PTH114 - a text
            return path[:at]
    return path


def _is_import(caller: FrameType | None) -> bool:
    names = map(package, frames(caller))
    return next((name for name in names if name != "torchrepro"), "") in _IMPORTS


def _is_of_program(caller: FrameType) -> bool:
    """Whether a line of the program has called, or a library that loads data."""
    for frame in frames(caller):
        name = package(frame)
        if name not in sys.stdlib_module_names and name != "torchrepro":
            return name in _LOADERS or not is_library(frame.f_code.co_filename)
    return False


_LOADERS = (
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "polars", "pyarrow", "PIL"),
    *("h5py", "zarr", "lmdb", "joblib", "sklearn", "cv2", "imageio", "soundfile", "librosa"),
    *("webdataset", "fsspec", "yaml", "safetensors", "datasets", "transformers", "tokenizers"),
    *("sentencepiece", "diffusers", "timm", "lightning", "pytorch_lightning", "omegaconf", "hydra"),
)
"""Packages that open data for a program."""

_OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/", "/etc/", "/usr/", "/lib", "/bin/", "/sbin/", "/run/")
_IMPORTS = ("importlib", "_frozen_importlib_external")
_READERS = ("get", "getenv", "__contains__", "setdefault")  # of Python, each reads one variable
_DESCRIPTORS = 256  # that are looked at

_real = lru_cache(maxsize=1024)(os.path.realpath)


def _opened(path: Any, mode: Any, flags: int) -> Iterator[tuple[str, Any]]:
    if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_TRUNC:
        yield READ, path
    if flags & _WRITING:
        yield WRITTEN, path


def _in_words(words: Any, folder: Any) -> Iterator[tuple[str, str]]:
    """Yield the files that the words of another program name."""
    for word in [words] if isinstance(words, str | bytes | os.PathLike) else words:
        for text in os.fsdecode(word).split():  # a word may be a line for a shell
            path = os.path.join(os.fsdecode(folder or ""), text.rpartition("=")[2])  # noqa: PTH118
            if os.path.isfile(path):  # noqa: PTH113 - texts
                yield READ, path


def _within(path: Any, folder: int = -1) -> str:
    """Return the absolute path of what is named in `folder`, a descriptor, or from here.

    Raises `TypeError` for what is no path.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError
    base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""  # noqa: PTH115 - a text
    whole = os.path.join(base, os.fsdecode(path))  # noqa: PTH118 - texts
    return os.path.abspath(whole)  # noqa: PTH100 - links stay as they are named


_EVENTS: Mapping[str, Any] = {
    "open": _opened,
    "exec": lambda code: [] if code.co_filename.startswith("<") else [(READ, code.co_filename)],
    "import": lambda module, filename, *_: [(READ, filename)] if filename else [],
    "cpython.run_file": lambda path: [(READ, path)],
    "cpython.run_command": lambda code: (
        [] if code.startswith("from multiprocessing.") else [(TYPED, "")]
    ),
    "cpython.run_stdin": lambda *_: [(TYPED, "")],
    "subprocess.Popen": lambda program, words, folder, variables: _in_words(words, folder),
    "os.system": lambda line: _in_words(line, None),
    "os.listdir": lambda path: [(LISTED, path)],
    "os.scandir": lambda path: [(LISTED, path)],
    "os.rename": lambda old, new, of_old, of_new: [
        (CHANGED, old, of_old),
        (WRITTEN, new, of_new),
    ],
    "os.remove": lambda path, folder: [(WRITTEN, path, folder)],
    "os.rmdir": lambda path, folder: [(CHANGED, path, folder)],
    "os.mkdir": lambda path, mode, folder: (
        [] if os.path.exists(_within(path, folder)) else [(CHANGED, path, folder)]  # noqa: PTH110
    ),
    "os.link": lambda old, new, of_old, of_new: [
        (CHANGED, old, of_old),  # by whoever then writes to the new name
        (CHANGED, new, of_new),
    ],
    "os.symlink": lambda target, new, folder: [(CHANGED, new, folder)],
    "os.truncate": lambda path, length: [(WRITTEN, path)],
    "os.chmod": lambda path, mode, folder: [(CHANGED, path)],
    "os.chown": lambda path, user, group, folder: [(CHANGED, path)],
    "os.utime": lambda path, times, at, folder: [(CHANGED, path)],
    "sqlite3.connect": lambda path: [(READ, path), (WRITTEN, path)],
}
"""Event -> what it says was used; with a folder, what is there itself, were it a link: https://docs.python.org/3/library/audit_events.html."""
