"""Where teams look for what a run was: one class per tool, each in that tool's own terms.

Tags rather than parameters, because a run's parameters can never be changed. See
https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html.

Event files only grow, so a later call is a later step of the text, and of the hyper-parameters
TensorBoard shows the latest. They go into a run of their own below the writer's, because the
writer's own may have others. See https://docs.pytorch.org/docs/stable/tensorboard.html.

A file of the run rather than an artifact, of which each call would make another version. See
https://docs.wandb.ai/ref/python/sdk/classes/run.
"""

from __future__ import annotations

import glob
import json
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torchrepro.applier import in_force
from torchrepro.bootstrap import in_force_now
from torchrepro.errors import TorchreproError
from torchrepro.manifest.contents import FILE, as_text, hydra_folder, manifest, write_manifest
from torchrepro.messages import Problem, near, shown
from torchrepro.profile.composition import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from torchrepro.applier import Applied


NAMESPACE = "torchrepro"


@dataclass(frozen=True, slots=True)
class Entry:
    """A profile in force and what its run has done so far, as plain JSON values.

    Everything here comes from the manifest, which holds no secret.
    """

    manifest: Mapping[str, Any]

    @classmethod
    def of(cls, applied: Applied) -> Entry:
        """Return the entry of `applied` as it is now."""
        return cls(manifest(applied.resolved, applied.report))

    @property
    def profile(self) -> dict[str, Any]:
        """The resolved profile in its sections, with its digest and the guarantee that is held."""
        report = self.manifest["report"]
        held = {"name": report["profile"], "guarantee": report["guarantee"]["held"]}
        return {"digest": self.manifest["digest"], **self.manifest["profile"], **held}

    @property
    def flat(self) -> dict[str, Any]:
        """The same under dotted keys, each a text, a number or a truth value."""
        return {key: _scalar(value) for key, value in flatten(self.profile).items()}

    @property
    def labels(self) -> dict[str, str]:
        """The same as texts."""
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.flat.items()
        }

    @property
    def text(self) -> str:
        """The manifest as JSON, ready to be a file."""
        return as_text(self.manifest)


@dataclass(frozen=True, slots=True)
class Destination:
    """One tool, or one kind of place, that takes an entry."""

    name: str

    takes: str
    """What the program hands over, in words."""

    write: Callable[[Any, Entry], str]
    """Write the entry, over what an earlier one left there, and return where that was."""

    modules: tuple[str, ...] = ()
    """The modules that are the tool itself, which stands for what is active in it."""

    recognises: Callable[[Any], bool] | None = None
    """Whether an object that a program has in hand is a place of this kind; None if none is."""

    active: Callable[[], Any] | None = None
    """Return what is active now, or None; imports nothing. None if the tool cannot say."""

    would_be: str = "nothing: hand over the place itself"
    """What makes it active, in words."""

    def is_place(self, target: Any) -> bool:
        """Whether `target` is a place of this kind."""
        return self.recognises is not None and self.recognises(target)

    def is_tool(self, target: Any) -> bool:
        """Whether `target` is the tool itself."""
        loaded = (sys.modules.get(name) for name in self.modules)
        return target is not None and any(target is module for module in loaded)

    def active_now(self) -> Any:
        """Return what is active now, or None; imports nothing."""
        return self.active() if self.active else None


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)


def _is_folder(target: Any) -> bool:
    """Whether it is a path; a bare word has to be a folder that is there, lest a typo make one."""
    if isinstance(target, str):
        return "/" in target or "\\" in target or Path(target).is_dir()
    return isinstance(target, PathLike)


def _write_to_folder(folder: Any, entry: Entry) -> str:
    return str(write_manifest(Path(folder), entry.manifest))


def _job_folder() -> Path | None:
    """Return the folder of the Hydra job that runs now, where `+repro=` writes as well."""
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config = hydra.HydraConfig.get()
    return hydra_folder(config) if config.runtime.get("output_dir", None) else None


FOLDER = Destination(
    name="folder",
    takes="a path to a folder",
    write=_write_to_folder,
    recognises=_is_folder,
)
HYDRA = Destination(
    name="hydra",
    takes="hydra",
    write=_write_to_folder,
    modules=("hydra",),
    active=_job_folder,
    would_be="the task function of a Hydra app",
)


_PREFIX = f"{NAMESPACE}."
_AT_ONCE = 100  # tags that MLflow takes in one call
_LONGEST = 500  # characters of a tag; the manifest has the whole value


def _mlflow() -> Any:
    return sys.modules.get("mlflow")


def _is_mlflow_run(target: Any) -> bool:
    mlflow = _mlflow()
    return mlflow is not None and isinstance(target, mlflow.entities.Run)


def _active_mlflow_run() -> Any:
    return _mlflow().active_run() if _mlflow() else None


def _write_to_mlflow(run: Any, entry: Entry) -> str:
    mlflow = _mlflow()
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    tags = {f"{_PREFIX}{key}": _cut(text) for key, text in entry.labels.items()}
    for key in client.get_run(run_id).data.tags:
        if key.startswith(_PREFIX) and key not in tags:
            client.delete_tag(run_id, key)
    rows = [mlflow.entities.RunTag(key, text) for key, text in tags.items()]
    for start in range(0, len(rows), _AT_ONCE):
        client.log_batch(run_id, tags=rows[start : start + _AT_ONCE])
    client.log_text(run_id, entry.text, FILE)
    return f"run {run_id}: tags {_PREFIX}*, artifact {FILE}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


MLFLOW = Destination(
    name="mlflow",
    takes="mlflow or a run of it",
    write=_write_to_mlflow,
    modules=("mlflow",),
    recognises=_is_mlflow_run,
    active=_active_mlflow_run,
    would_be="mlflow.start_run()",
)


_WORDS = {"torch.utils.tensorboard": ("run_name", "log_dir"), "tensorboardX": ("name", "logdir")}
"""The modules that have a `SummaryWriter`; what its `add_hparams` calls the name of a run, and
which attribute holds its folder."""

_written: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _module(target: Any) -> str:
    """Return the module whose `SummaryWriter` the target is, or an empty string."""
    for name in _WORDS:
        writer = getattr(sys.modules.get(name), "SummaryWriter", None)
        if writer is not None and isinstance(target, writer):
            return name
    return ""


def _is_writer(target: Any) -> bool:
    return bool(_module(target))


def _write_to_tensorboard(writer: Any, entry: Entry) -> str:
    step = _written.get(writer, -1) + 1
    run_name, folder = _WORDS[_module(writer)]
    values = {f"{NAMESPACE}.{key}": value for key, value in entry.flat.items()}
    writer.add_hparams(values, {}, **{run_name: NAMESPACE})
    # Indented by four blanks, Markdown shows it as it is.
    manifest = "".join(f"    {line}" for line in entry.text.splitlines(keepends=True))
    writer.add_text(f"{NAMESPACE}/manifest", manifest, global_step=step)
    writer.flush()
    _written[writer] = step
    return f"{getattr(writer, folder)}: hyper-parameters and text {NAMESPACE}"


TENSORBOARD = Destination(
    name="tensorboard",
    takes="a SummaryWriter",
    write=_write_to_tensorboard,
    modules=tuple(_WORDS),
    recognises=_is_writer,  # and neither library says which writers are open
    would_be="nothing: hand over the SummaryWriter itself",
)


def _wandb() -> Any:
    return sys.modules.get("wandb")


def _is_wandb_run(target: Any) -> bool:
    wandb = _wandb()
    return wandb is not None and isinstance(target, wandb.Run)


def _active_wandb_run() -> Any:
    return _wandb().run if _wandb() else None


def _write_to_wandb(run: Any, entry: Entry) -> str:
    if run.disabled:
        return f"run {run.id} is disabled: wandb keeps nothing"
    run.config.update({NAMESPACE: entry.profile}, allow_val_change=True)
    path = write_manifest(Path(run.dir), entry.manifest)
    run.save(glob.escape(str(path)), base_path=run.dir, policy="now")
    return f"run {run.id}: config {NAMESPACE}.*, file {FILE}"


WANDB = Destination(
    name="wandb",
    takes="wandb or a run of it",
    write=_write_to_wandb,
    modules=("wandb",),
    recognises=_is_wandb_run,
    active=_active_wandb_run,
    would_be="wandb.init()",
)


DESTINATIONS = (MLFLOW, WANDB, TENSORBOARD, HYDRA, FOLDER)
_LEGAL = ", ".join(destination.takes for destination in DESTINATIONS)
_ACTIVE = ", ".join(
    f"{destination.name} ({destination.would_be})"
    for destination in DESTINATIONS
    if destination.active
)


@dataclass(slots=True)
class Logged:
    """Where a profile in force was logged; leaving a `with` block logs it again, as it is then."""

    applied: Applied
    targets: tuple[tuple[Destination, Any], ...]
    places: tuple[str, ...] = ()
    """What was written where, one line per destination."""

    def again(self) -> Logged:
        """Log the profile as it is now, over what was logged before.

        Raises `TorchreproError` if a tool refuses, after all the others have been written.
        """
        entry = Entry.of(self.applied)
        places, refusals = [], []
        for destination, target in self.targets:
            try:
                places.append(f"{destination.name}: {destination.write(target, entry)}")
            except Exception as error:  # noqa: BLE001 - whatever a tool raises is its refusal
                refusals.append(_refusal(destination, error))
        self.places = tuple(places)
        if refusals:
            raise TorchreproError("\n".join(refusals + [f"logged to {place}" for place in places]))
        return self

    def __enter__(self) -> Logged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.again()
        except TorchreproError as refused:
            if error is None:
                raise
            error.add_note(f"torchrepro: {refused}")  # what went wrong first is what to show

    def __str__(self) -> str:
        return "\n".join(self.places)


def log_to(*targets: Any) -> Logged:
    """Put digest, profile and manifest of what is in force into the tools that a team uses.

    A target is ``mlflow`` or a run of it, ``wandb`` or a run of it, a ``SummaryWriter``, a path to
    a folder, or the name of a tool; without targets, all that are active now. A tool that the
    program has not imported is not imported. What an earlier call has logged there is replaced, so
    call it again at the end of a run, or use it as a context manager, and what policies and seeds
    did is part of it. Raises `TorchreproError` where no profile is in force, nothing is active, a
    target is none, or a tool refuses.
    """
    applied = _innermost()
    chosen = tuple(_chosen(target) for target in targets) or _all_active()
    return Logged(applied, chosen).again()


def _innermost() -> Applied:
    in_force_now()  # under `torchrepro run` it waits for the imports of what it sets
    if not in_force():
        todo = "put one in force: torchrepro.apply, +repro=NAME of a Hydra app, or torchrepro run"
        raise TorchreproError(str(Problem("log_to: no profile is in force", todo=todo)))
    return in_force()[-1]


def _chosen(target: Any) -> tuple[Destination, Any]:
    """Return the destination of `target`, and what is active in it if that is the tool itself."""
    for destination in DESTINATIONS:
        if destination.is_place(target):
            return destination, target
        if target == destination.name or destination.is_tool(target):
            return destination, _active_in(destination)
    names = [destination.name for destination in DESTINATIONS if destination is not FOLDER]
    close = near(target, names) if isinstance(target, str) else ""
    problem = Problem(
        "not a place to log to, nor a folder that is there",
        where="log_to",
        found=shown(target),
        legal=f"{_LEGAL}, or a name: {', '.join(names)}",
        near=close,
    )
    raise TorchreproError(str(problem))


def _active_in(destination: Destination) -> Any:
    active = destination.active_now()
    if active is None:
        problem = Problem(f"log_to: nothing is active in {destination.name}")
        raise TorchreproError(f"{problem}\n    active would be: {destination.would_be}")
    return active


def _all_active() -> tuple[tuple[Destination, Any], ...]:
    found = tuple(
        (destination, active)
        for destination in DESTINATIONS
        for active in (destination.active_now(),)
        if active is not None
    )
    if not found:
        problem = Problem(
            "log_to: nothing is active to log to",
            todo=f"start one, {_ACTIVE}, or name a place: {_LEGAL}",
        )
        raise TorchreproError(str(problem))
    return found


def _refusal(destination: Destination, error: Exception) -> str:
    words = json.dumps(str(error).strip().partition("\n")[0], ensure_ascii=False)
    return f"log_to: {destination.name} refused: {type(error).__name__}: {words}"
