"""Log the profile in force to the tools that a team uses: one class per tool, in its own terms."""

from __future__ import annotations

import glob
import json
import sys
from dataclasses import dataclass
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from torchrepro.applier import in_force
from torchrepro.bootstrap import in_force_now
from torchrepro.console import say_once
from torchrepro.errors import TorchreproError
from torchrepro.manifest.contents import FILE, as_text, hydra_folder, manifest, write_manifest
from torchrepro.messages import Problem, near, shown
from torchrepro.profile.composition import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torchrepro.applier import Applied


NAMESPACE = "torchrepro"


@dataclass(frozen=True, slots=True)
class Entry:
    """A profile in force and what its run has done so far, as plain JSON values.

    Everything here comes from the manifest, which holds no secret.
    """

    manifest: Mapping[str, Any]

    @property
    def profile(self) -> dict[str, Any]:
        """The resolved profile in its sections, with its digest and the guarantee that is held."""
        report = self.manifest["report"]
        held = {"name": report["profile"], "guarantee": report["guarantee"]["held"]}
        return {"digest": self.manifest["digest"], **self.manifest["profile"], **held}

    @property
    def flat(self) -> dict[str, Any]:
        """The same under dotted keys with our prefix, each a text, a number or a truth value."""
        return {
            f"{NAMESPACE}.{key}": value
            if isinstance(value, str | int | float)
            else json.dumps(value, sort_keys=True)
            for key, value in flatten(self.profile).items()
        }

    @property
    def text(self) -> str:
        """The manifest as JSON, ready to be a file."""
        return as_text(self.manifest)


class Destination:
    """A tool, or a kind of place, that takes an entry."""

    name: str
    takes: str
    """What the program hands over, in words."""

    place: str = "the place"
    """What it is called, in words."""

    started_by: str = ""
    """What makes a place of it active, in words; empty if it cannot say what is active."""

    modules: tuple[str, ...] = ()
    """The modules of the tool. As a target, one of them means what is active in it."""

    place_class: str = ""
    """The name of the class of its places in `modules`."""

    def module_of(self, target: Any) -> Any:
        """Return the loaded module of the tool of which `target` is a place, or None."""
        for module in self._loaded():
            kind = reduce(_attribute, self.place_class.split("."), module)
            if isinstance(kind, type) and isinstance(target, kind):
                return module
        return None

    def is_place(self, target: Any) -> bool:
        """Whether `target` is a place of this kind."""
        return self.module_of(target) is not None

    def is_tool(self, target: Any) -> bool:
        """Whether `target` is the tool itself, or its name."""
        return bool(target == self.name) or any(target is module for module in self._loaded())

    def _loaded(self) -> list[Any]:
        found = map(sys.modules.get, self.modules)
        return [module for module in found if module is not None]

    def active(self) -> Any:
        """Return the place that is active now, or None; imports nothing."""
        return None

    def write(self, target: Any, entry: Entry) -> str:
        """Write `entry` over what an earlier one left, and say in words where it is."""
        raise NotImplementedError


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


class Mlflow(Destination):
    """Tags and an artifact: unlike tags, a run's parameters can never be changed.

    See https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html.
    """

    name = "mlflow"
    takes = "mlflow or a run of it"
    started_by = "mlflow.start_run()"
    modules = ("mlflow",)
    place_class = "entities.Run"

    AT_ONCE = 100
    """Tags that MLflow takes in one call."""

    LONGEST = 500
    """Characters of a tag; the manifest has the whole value."""

    def active(self) -> Any:
        """Return the active run."""
        mlflow = sys.modules.get("mlflow")
        return mlflow and mlflow.active_run()

    def write(self, target: Any, entry: Entry) -> str:
        """Set the tags of a run, remove those of an earlier profile, and write the artifact."""
        mlflow: Any = sys.modules["mlflow"]
        client, run_id = mlflow.MlflowClient(), target.info.run_id
        prefix = f"{NAMESPACE}."
        tags = {key: self._tag(value) for key, value in entry.flat.items()}
        for key in client.get_run(run_id).data.tags:
            if key.startswith(prefix) and key not in tags:
                client.delete_tag(run_id, key)
        rows = [mlflow.entities.RunTag(key, text) for key, text in tags.items()]
        for start in range(0, len(rows), self.AT_ONCE):
            client.log_batch(run_id, tags=rows[start : start + self.AT_ONCE])
        client.log_text(run_id, entry.text, FILE)
        return f"run {run_id}: tags {prefix}*, artifact {FILE}"

    def _tag(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return text if len(text) <= self.LONGEST else f"{text[: self.LONGEST - 3]}..."


class Wandb(Destination):
    """Config and a file of the run: each call would make another version of an artifact.

    See https://docs.wandb.ai/ref/python/sdk/classes/run.
    """

    name = "wandb"
    takes = "wandb or a run of it"
    started_by = "wandb.init()"
    modules = ("wandb",)
    place_class = "Run"

    def active(self) -> Any:
        """Return the active run."""
        wandb = sys.modules.get("wandb")
        return wandb and wandb.run

    def write(self, target: Any, entry: Entry) -> str:
        """Set the config of a run and save the manifest with it."""
        if target.disabled:
            return f"run {target.id} is disabled: wandb keeps nothing"
        target.config.update({NAMESPACE: entry.profile}, allow_val_change=True)
        path = write_manifest(Path(target.dir), entry.manifest)
        target.save(glob.escape(str(path)), base_path=target.dir, policy="now")
        return f"run {target.id}: config {NAMESPACE}.*, file {FILE}"


class TensorBoard(Destination):
    """Hyper-parameters and a text. Neither library says which writers are open.

    Event files only grow, so a later call is a later step of the text, and of the
    hyper-parameters TensorBoard shows the latest. They go into a run of their own below the
    writer's, which may have others. See https://docs.pytorch.org/docs/stable/tensorboard.html.
    """

    name = "tensorboard"
    takes = "a SummaryWriter"
    place = "the SummaryWriter"
    place_class = "SummaryWriter"

    WORDS: ClassVar = {
        "torch.utils.tensorboard": ("run_name", "log_dir"),
        "tensorboardX": ("name", "logdir"),
    }
    """What `add_hparams` calls the name of a run, and the attribute of a writer's folder."""

    modules = tuple(WORDS)

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def write(self, target: Any, entry: Entry) -> str:
        """Add hyper-parameters and the manifest as text."""
        step = self._steps.get(target, -1) + 1
        run_name, folder = self.WORDS[self.module_of(target).__name__]
        target.add_hparams(entry.flat, {}, **{run_name: NAMESPACE})
        # Indented by four blanks, Markdown shows it as it is.
        text = "".join(f"    {line}" for line in entry.text.splitlines(keepends=True))
        target.add_text(f"{NAMESPACE}/manifest", text, global_step=step)
        target.flush()
        self._steps[target] = step
        return f"{getattr(target, folder)}: hyper-parameters and text {NAMESPACE}"


class Folder(Destination):
    """A folder, which gets the manifest as a file."""

    name = "folder"
    takes = "a path to a folder"

    def is_place(self, target: Any) -> bool:
        """Whether it is a path. A word that is nearly the name of a tool is taken for a typo."""
        if isinstance(target, str):
            is_path = "/" in target or "\\" in target or Path(target).is_dir()
            return bool(target) and (is_path or not near(target, _TOOLS))
        return isinstance(target, PathLike)

    def write(self, target: Any, entry: Entry) -> str:
        """Write the manifest into a folder, which is created if missing."""
        return str(write_manifest(Path(target), entry.manifest))


class HydraJob(Folder):
    """The output folder of the Hydra job that runs now, where `+repro=` writes as well."""

    name = "hydra"
    takes = "hydra"
    started_by = "the task function of a Hydra app"
    modules = ("hydra",)

    def is_place(self, target: Any) -> bool:
        """Return False: a folder is no job."""
        return False

    def active(self) -> Path | None:
        """Return the folder of the job."""
        hydra: Any = sys.modules.get("hydra.core.hydra_config")
        if hydra is None or not hydra.HydraConfig.initialized():
            return None
        config = hydra.HydraConfig.get()
        return hydra_folder(config) if config.runtime.get("output_dir", None) else None


DESTINATIONS: tuple[Destination, ...] = (Mlflow(), Wandb(), TensorBoard(), HydraJob(), Folder())
"""In the order in which a target is looked for."""

_TOOLS = [each.name for each in DESTINATIONS if each.name != Folder.name]
_LEGAL = ", ".join(each.takes for each in DESTINATIONS)


@dataclass(slots=True)
class Logged:
    """Where a profile was logged; leaving a `with` block logs it again, as it is then."""

    applied: Applied | None
    """None where no profile was in force."""
    targets: tuple[tuple[Destination, Any], ...]
    places: tuple[str, ...] = ()
    """What was written where, one line per destination."""

    def again(self) -> Logged:
        """Log the profile as it is now, over what was logged before.

        Does nothing where no profile was in force when it was first logged. Raises
        `TorchreproError` if a tool refuses, after all the others have been written.
        """
        if self.applied is None:
            return self
        entry = Entry(manifest(self.applied.resolved, self.applied.report))
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
    """Log digest, values and manifest of the profile in force to the tools that a team uses.

    A target is ``mlflow`` or a run of it, ``wandb`` or a run of it, a ``SummaryWriter``, a folder
    as a path or as text, or the name of a tool. Without targets, all that are active now are
    meant. No tool is imported for that. A later call replaces what an earlier one has logged. So
    call it again at the end of a run, or use it as a context manager, to include what policies and
    seeds did.
    Without a profile there is nothing to log: a note says so once, and nothing is written. Raises
    `TorchreproError` if nothing is active, a target is not a place to log to, or a tool refuses.
    """
    applied = _innermost()
    if applied is None:
        say_once(
            "log_to: no profile is in force, so nothing is logged; put one in force: "
            "torchrepro.apply, +repro=NAME of a Hydra app, or torchrepro run"
        )
        return Logged(None, ())
    chosen = tuple(_chosen(target) for target in targets) or _all_active()
    return Logged(applied, chosen).again()


def _innermost() -> Applied | None:
    in_force_now()  # under `torchrepro run` it waits for the imports of what it sets
    return in_force()[-1] if in_force() else None


def _chosen(target: Any) -> tuple[Destination, Any]:
    """Return the destination of `target`, and what is active in it if that is the tool itself."""
    for destination in DESTINATIONS:
        if destination.is_place(target):
            return destination, target
        if destination.is_tool(target):
            return destination, _active_in(destination)
    problem = Problem(
        "not a place to log to, nor a folder that is there",
        where="log_to",
        found=shown(target),
        legal=f"{_LEGAL}, or a name: {', '.join(_TOOLS)}",
        near=near(target, _TOOLS) if isinstance(target, str) else "",
    )
    raise TorchreproError(str(problem))


def _active_in(destination: Destination) -> Any:
    active = destination.active()
    if active is None:
        start = f"start one: {destination.started_by}" if destination.started_by else ""
        problem = Problem(
            f"log_to: nothing is active in {destination.name}",
            todo=start or f"hand over {destination.place} itself",
        )
        raise TorchreproError(str(problem))
    return active


def _all_active() -> tuple[tuple[Destination, Any], ...]:
    active = [(destination, destination.active()) for destination in DESTINATIONS]
    found = tuple(each for each in active if each[1] is not None)
    if not found:
        could_be = [f"{each.name} ({each.started_by})" for each in DESTINATIONS if each.started_by]
        problem = Problem(
            "log_to: nothing is active to log to",
            todo=f"start one, {', '.join(could_be)}, or name a place: {_LEGAL}",
        )
        raise TorchreproError(str(problem))
    return found


def _refusal(destination: Destination, error: Exception) -> str:
    words = json.dumps(str(error).strip().partition("\n")[0], ensure_ascii=False)
    return f"log_to: {destination.name} refused: {type(error).__name__}: {words}"
