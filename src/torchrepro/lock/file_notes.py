"""Log the files that each process of a run uses, and redirect imports to a checkout.

Python's audit events report four things: files that Python opens, code that is imported, folders
that are listed, and the arguments of programs that are started. Files that C code opens are
missing, so `torch.save` and SQLite are intercepted, and open and mapped files are logged after
optimizer steps.
Every Python process of a command runs this module, even without torch, so it imports little.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.callers import frames, is_library, package
from torchrepro.ground.imports import AfterImport

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

MOST = 100_000  # logged uses of files per process

MOST_OUTSIDE = 5_000  # logged uses of files outside of the repository, per process

READ, WRITTEN, LISTED, TOO_MANY = "read", "written", "listed", "too many"
VARIABLE = "variable"  # a read of an environment variable; `size` is 1 if the variable was set
TYPED = "typed"  # the program came from `python -c` or from standard input
CHANGED = "changed"  # by a rename or chmod, for example: may be refused, but is not logged
_WRITING = os.O_WRONLY | os.O_RDWR
SKIPPED_FOLDERS = (
    "__pycache__",
    ".git",
)  # folders of a repository that contain no file of the program

_FINDERS = "__editable__"  # prefix of setuptools' finder modules for editable installs


class Use(NamedTuple):
    """The first use of a file or a folder by one process of a run."""

    kind: str
    path: str
    changed: int
    """The modification time, in nanoseconds since 1970; 0 if it did not exist."""
    size: int


def noted(log: Path) -> list[Use]:
    """Return the uses that the processes of a run have logged, in order of time."""
    if not log.exists():
        return []
    uses = []
    for line in log.read_bytes().splitlines():
        try:
            uses.append(Use(*json.loads(line)))
        except (ValueError, TypeError):  # incomplete line of a killed process
            continue
    return uses


def first_uses(uses: Iterable[Use]) -> dict[str, dict[str, Use]]:
    """Return the first use of each kind of each path: path -> kind -> use."""
    by_path: dict[str, dict[str, Use]] = {}
    for use in uses:
        by_path.setdefault(use.path, {}).setdefault(use.kind, use)
    return by_path


def begin(asked: Mapping[str, str]) -> None:
    """Add an audit hook that logs the uses of files below `root` in the file `log`.

    If `tree` is not empty, it is a checkout of `root`, and `sys.path` is changed so that imports
    find the checkout first. A write below `root`, or through a link out of the checkout, then
    raises `OSError`, except below `ours`. If `tree` is empty, also logs the files outside of `root`
    that the program or a data library opens, and the environment variables that the program reads.
    """
    notes = _Notes(**asked)
    if asked["tree"]:
        _find_in_copy(asked["root"], asked["tree"])
        AfterImport(["torch"], notes.guard_save).watch_all()
    else:
        notes.observe_variables()
    AfterImport(["torch.optim.optimizer"], notes.watch_steps).watch_all()
    atexit.register(notes.note_open_files)
    sys.addaudithook(notes.on_event)


def _find_in_copy(root: str, tree: str) -> None:
    """Replace each folder below `root` in `sys.path` by its copy in the checkout, if it exists."""

    def mapped(folder: str) -> str:
        copied = tree + folder[len(root) :]
        is_inside = folder == root or folder.startswith(root + os.sep)
        return copied if is_inside and os.path.isdir(copied) else folder  # noqa: PTH112 - texts

    sys.path[:] = [mapped(folder) for folder in sys.path]
    for name in [*sys.modules]:
        if name.startswith(_FINDERS):
            packages = getattr(sys.modules[name], "MAPPING", {}).values()
            parents = {os.path.dirname(str(path)) for path in packages}  # noqa: PTH120 - texts
            # Python searches all of `sys.path` before it asks such a finder.
            sys.path += sorted(mapped(folder) for folder in parents if mapped(folder) != folder)


class _Notes:
    def __init__(self, root: str, log: str, tree: str, ours: str) -> None:
        self._inside = root + os.sep
        self._in_tree = tree + os.sep if tree else ""
        self._log = log
        self._ours = tuple(folder + os.sep for folder in (ours, sys.prefix) if folder)
        self._not_data = (*self._ours, f"{sys.base_prefix}{os.sep}", *_SYSTEM_FOLDERS)
        self._seen: set[tuple[str, str]] = set()
        self._outside: set[tuple[str, str]] = set()  # seen outside of the repository
        self._steps = 0

    def watch_steps(self, module: str) -> None:
        sys.modules[module].register_optimizer_step_post_hook(self.note_open_files)

    def note_open_files(self, *step: Any) -> None:
        """Log the files that are open or mapped, because C code may have opened them.

        As a hook of optimizer steps, logs only after steps 1, 2, 4, 8, ... to save time.
        """
        self._steps += bool(step)
        if step and self._steps & (self._steps - 1):
            return
        # A listing of /proc/self/fd would raise an audit event, and the order may be perturbed.
        paths = {os.path.realpath(f"/proc/self/fd/{number}") for number in range(3, _DESCRIPTORS)}
        with suppress(OSError):  # an exception would end the program
            with open("/proc/self/maps", errors="surrogateescape") as maps:  # noqa: PTH123 - above
                paths |= {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
            for path in filter(os.path.isfile, paths):
                if ".so" not in os.path.basename(path):  # noqa: PTH119 - a text
                    self._note(READ, path)

    def observe_variables(self) -> None:
        """Log the environment variables that the program reads by name."""
        environ_type: Any = type(os.environ)
        read, names = environ_type.__getitem__, environ_type.keys
        copying: set[Any] = set()  # instructions that iterate over all variables

        def noted_names(environ: Any) -> Any:
            caller = sys._getframe(1)  # noqa: SLF001 - documented
            copying.add((caller.f_code, caller.f_lasti))
            return names(environ)

        def noted_read(environ: Any, name: Any) -> Any:
            caller: Any = sys._getframe(1)  # noqa: SLF001 - documented
            is_by_name = (caller.f_code, caller.f_lasti) not in copying
            while caller.f_code.co_name in _READERS and is_library(caller.f_code.co_filename):
                if caller.f_back is None:  # called from C code
                    break
                caller = caller.f_back
            key = VARIABLE, name
            if is_by_name and key not in self._seen and not is_library(caller.f_code.co_filename):
                self._seen.add(key)
                with suppress(OSError):
                    self._write(*key, 0, int(name in set(names(environ))))
            return read(environ, name)

        environ_type.keys, environ_type.__getitem__ = noted_names, noted_read

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Log an audit event. With a checkout, raise `OSError` for a write outside of it."""
        uses_of, refused = _EVENTS.get(event), ""
        if uses_of is None:
            return
        caller = sys._getframe().f_back  # noqa: SLF001 - documented
        try:
            for use, named, *folder in uses_of(*args):
                path = _within(named, *folder)
                if use == TYPED and not self._in_tree:
                    self._write(use, "", 0, 0)
                elif use not in (CHANGED, TYPED) and not (use == LISTED and _is_import(caller)):
                    self._note(use, path, caller)
                if self._in_tree and use in (WRITTEN, CHANGED):
                    parent, name = os.path.split(path)
                    real = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118 - texts
                    if self._leads_out(path, real if folder else os.path.realpath(path)):
                        self._note(WRITTEN, path)
                        refused = path
        except (OSError, ValueError, TypeError):
            return  # not a path; an exception here would be raised in the program
        if refused:
            reason = "this run must not write outside of its checkout, into a file of the user"
            raise OSError(errno.EROFS, reason, refused)

    def guard_save(self, module: str) -> None:
        """Wrap `torch.save`, which opens files in C, so that calls count as `open` events."""
        torch: Any = sys.modules[module]
        save = torch.save

        @wraps(save)
        def guarded(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self.on_event("open", (f, "w", os.O_WRONLY))
            save(obj, f, *args, **kwargs)

        torch.save = guarded

    def _leads_out(self, path: str, real: str) -> bool:
        """Return whether `path` leads to a file below `root`, or by a link out of the checkout."""
        is_original = real.startswith(self._inside) and not real.startswith(self._ours)
        return not real.startswith(self._in_tree) and (
            is_original or path.startswith(self._in_tree)
        )

    def _note(self, use: str, path: str, caller: FrameType | None = None) -> None:
        key = use, path
        if key in self._seen or len(self._seen) > MOST or path == self._log:
            return
        base = self._in_tree if self._in_tree and path.startswith(self._in_tree) else self._inside
        if not path.startswith(base):
            folder, name = os.path.split(path)
            path = os.path.join(_real(folder), name)  # noqa: PTH118 - texts
            if not path.startswith(base):
                self._note_outside(use, path, caller)
                return
        target, path = os.path.realpath(path), _up_to_link(path, base)
        if is_of_cache(os.path.dirname(path)):  # noqa: PTH120 - texts
            return
        if len(self._seen) == MOST:
            use, path = TOO_MANY, ""
        self._seen.add(key)
        self._note_state(use, path)
        if target != path and use != WRITTEN:  # the path is a link
            self._note(use, target, caller)

    def _note_outside(self, use: str, path: str, caller: FrameType | None) -> None:
        """Log a path outside of the repository, if it may be data and the program uses it."""
        if self._in_tree or f"{path}/".startswith(self._not_data) or is_library(path):
            return
        key = use, os.path.realpath(path)
        if key in self._outside or len(self._outside) == MOST_OUTSIDE:
            return
        if caller is None or _is_of_program(caller):
            self._outside.add(key)
            self._note_state(*key)

    def _note_state(self, use: str, path: str) -> None:
        try:
            status = os.stat(path)  # noqa: PTH116 - a text
            self._write(use, path, status.st_mtime_ns, status.st_size)
        except OSError:
            if use in (WRITTEN, TOO_MANY):  # a read of a missing file is not logged
                self._write(use, path, 0, 0)

    def _write(self, *use: str | int) -> None:
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(use).encode() + b"\n")
        finally:
            os.close(file)


def is_of_cache(path: str) -> bool:
    """Return whether a path is below one of `SKIPPED_FOLDERS`."""
    return any(
        f"{os.sep}{folder}{os.sep}" in f"{os.sep}{path}{os.sep}" for folder in SKIPPED_FOLDERS
    )


def _up_to_link(path: str, base: str) -> str:
    """Return the part of `path` that ends at the first link below `base`, or all of `path`."""
    at = len(base)
    while (at := path.find(os.sep, at + 1)) > 0:
        if os.path.islink(path[:at]):  # noqa: PTH114 - a text
            return path[:at]
    return path


def _is_import(caller: FrameType | None) -> bool:
    names = map(package, frames(caller))
    return next((name for name in names if name != "torchrepro"), "") in _IMPORTS


def _is_of_program(caller: FrameType) -> bool:
    """Return whether the nearest caller is the program, or a library that loads data."""
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

_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/", "/etc/", "/usr/", "/lib", "/bin/", "/sbin/", "/run/")
_IMPORTS = ("importlib", "_frozen_importlib_external")
_READERS = ("get", "getenv", "__contains__", "setdefault")  # in Python, to read one variable
_DESCRIPTORS = 256  # descriptors that are checked

_real = lru_cache(maxsize=1024)(os.path.realpath)


def _opened(path: Any, mode: Any, flags: int) -> Iterator[tuple[str, Any]]:
    if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_TRUNC:
        yield READ, path
    if flags & _WRITING:
        yield WRITTEN, path


def _in_words(words: Any, folder: Any) -> Iterator[tuple[str, str]]:
    """Yield a read of each file that the command line of another program names."""
    for word in [words] if isinstance(words, str | bytes | os.PathLike) else words:
        for text in os.fsdecode(word).split():  # a word may be a line for a shell
            path = os.path.join(os.fsdecode(folder or ""), text.rpartition("=")[2])  # noqa: PTH118
            if os.path.isfile(path):  # noqa: PTH113 - texts
                yield READ, path


def _within(path: Any, folder: int = -1) -> str:
    """Return `path` as an absolute path.

    A relative path starts at the folder with the descriptor `folder`, or at the working directory
    if `folder` is negative. Raises `TypeError` if `path` is not a path.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError
    base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""  # noqa: PTH115 - a text
    joined = os.path.join(base, os.fsdecode(path))  # noqa: PTH118 - texts
    return os.path.abspath(joined)  # noqa: PTH100 - does not resolve links


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
        (CHANGED, old, of_old),  # a later write to the new name also changes the old file
        (CHANGED, new, of_new),
    ],
    "os.symlink": lambda target, new, folder: [(CHANGED, new, folder)],
    "os.truncate": lambda path, length: [(WRITTEN, path)],
    "os.chmod": lambda path, mode, folder: [(CHANGED, path)],
    "os.chown": lambda path, user, group, folder: [(CHANGED, path)],
    "os.utime": lambda path, times, at, folder: [(CHANGED, path)],
    "sqlite3.connect": lambda path: [(READ, path), (WRITTEN, path)],
}
"""Audit event -> its uses of files: use, path, and a folder descriptor unless links are followed.

See https://docs.python.org/3/library/audit_events.html.
"""
