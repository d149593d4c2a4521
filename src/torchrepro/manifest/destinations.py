"""Write the profile of a run to MLflow, W&B, TensorBoard or a folder, with one class for each."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torchrepro.ground.errors import near
from torchrepro.manifest.contents import FILE, as_text, hydra_folder, hydra_job, write_manifest
from torchrepro.profile.resolved import flatten
from torchrepro.reporting.process_state import manifest_folder

NAMESPACE = "torchrepro"


def _profile(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the profile, with the digest, the name and the satisfied guarantee."""
    report = manifest["report"]
    outcome = {"name": report["profile"], "guarantee": report["guarantee"]["held"]}
    return {"digest": manifest["digest"], **manifest["profile"], **outcome}


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return `_profile` under keys such as ``torchrepro.seed``. Lists and mappings become JSON."""
    return {
        f"{NAMESPACE}.{key}": value
        if isinstance(value, str | int | float)
        else json.dumps(value, sort_keys=True)
        for key, value in flatten(_profile(manifest)).items()
    }


class Destination:
    """A tool or a folder to which a manifest can be written."""

    name: str
    takes: str  # the accepted targets, in words
    place: str = "the place"  # a target, in words
    started_by: str = ""  # the call that makes a target active; empty if the tool cannot report it
    modules: tuple[str, ...] = ()  # of the tool; as a target, a module means the active run
    place_class: str = ""  # the class of targets, as a name in one of `modules`

    def module_of(self, target: Any) -> Any:
        """Return the loaded module of the tool that defines the class of `target`, or None."""
        for module in self._loaded():
            target_class = module
            for name in self.place_class.split("."):
                target_class = getattr(target_class, name, None)
            if isinstance(target_class, type) and isinstance(target, target_class):
                return module
        return None

    def is_place(self, target: Any) -> bool:
        """Return whether the manifest can be written to `target` itself."""
        return self.module_of(target) is not None

    def is_tool(self, target: Any) -> bool:
        """Return whether `target` is a module of the tool, or the name of the tool."""
        return bool(target == self.name) or any(target is module for module in self._loaded())

    def _loaded(self) -> list[Any]:
        return [module for module in map(sys.modules.get, self.modules) if module is not None]

    def active(self) -> Any:
        """Return the active target of the tool, or None. Does not import the tool."""
        return None

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        """Write `manifest` over an earlier one, and return a text that names the written items."""
        raise NotImplementedError


class Mlflow(Destination):
    """Writes tags and an artifact of an MLflow run. Tags can be changed later, parameters cannot.

    See https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html.
    """

    name = "mlflow"
    takes = "mlflow or a run of it"
    started_by = "mlflow.start_run()"
    modules = ("mlflow",)
    place_class = "entities.Run"

    AT_ONCE = 100  # MLflow's limit of tags per call
    LONGEST = 500  # characters of a tag; the manifest has the complete value

    def active(self) -> Any:
        mlflow = sys.modules.get("mlflow")
        return mlflow and mlflow.active_run()

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        mlflow: Any = sys.modules["mlflow"]
        client, run_id = mlflow.MlflowClient(), target.info.run_id
        prefix, tags = f"{NAMESPACE}.", {}
        for key, value in _flat(manifest).items():
            text = value if isinstance(value, str) else json.dumps(value)
            longer = len(text) > self.LONGEST
            tags[key] = f"{text[: self.LONGEST - 3]}..." if longer else text
        for key in client.get_run(run_id).data.tags:
            if key.startswith(prefix) and key not in tags:
                client.delete_tag(run_id, key)
        rows = [mlflow.entities.RunTag(key, text) for key, text in tags.items()]
        for start in range(0, len(rows), self.AT_ONCE):
            client.log_batch(run_id, tags=rows[start : start + self.AT_ONCE])
        client.log_text(run_id, as_text(manifest), FILE)
        return f"run {run_id}: tags {prefix}*, artifact {FILE}"


class Wandb(Destination):
    """Writes config and a file of a W&B run. An artifact would get a new version at every call.

    See https://docs.wandb.ai/ref/python/sdk/classes/run.
    """

    name = "wandb"
    takes = "wandb or a run of it"
    started_by = "wandb.init()"
    modules = ("wandb",)
    place_class = "Run"

    def active(self) -> Any:
        wandb = sys.modules.get("wandb")
        return wandb and wandb.run

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        if target.disabled:
            return f"run {target.id} is disabled: wandb keeps nothing"
        target.config.update({NAMESPACE: _profile(manifest)}, allow_val_change=True)
        path = write_manifest(Path(target.dir), manifest)
        target.save(glob.escape(str(path)), base_path=target.dir, policy="now")
        return f"run {target.id}: config {NAMESPACE}.*, file {FILE}"


class TensorBoard(Destination):
    """Writes hyper-parameters and a text with the caller's SummaryWriter.

    The caller passes a writer, because torch and tensorboardX do not list open writers. Event
    files only grow, so a later call writes the text as a new step, and TensorBoard shows the
    latest hyper-parameters. A separate run in the writer's folder contains them, since the
    writer's own run may have other hyper-parameters.
    See https://docs.pytorch.org/docs/stable/tensorboard.html.
    """

    name = "tensorboard"
    takes = "a SummaryWriter"
    place = "the SummaryWriter"
    place_class = "SummaryWriter"

    # The parameter of `add_hparams` for the name of a run, and the attribute of a writer's folder.
    WORDS: ClassVar = {
        "torch.utils.tensorboard": ("run_name", "log_dir"),
        "tensorboardX": ("name", "logdir"),
    }
    modules = tuple(WORDS)

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        step = self._steps.get(target, -1) + 1
        run_name, folder = self.WORDS[self.module_of(target).__name__]
        target.add_hparams(_flat(manifest), {}, **{run_name: NAMESPACE})
        # Markdown shows lines that are indented by four blanks verbatim.
        text = "".join(f"    {line}" for line in as_text(manifest).splitlines(keepends=True))
        target.add_text(f"{NAMESPACE}/manifest", text, global_step=step)
        target.flush()
        self._steps[target] = step
        return f"{getattr(target, folder)}: hyper-parameters and text {NAMESPACE}"


class FolderDestination(Destination):
    """A folder to which the manifest is written as a file."""

    name = "folder"
    takes = "a path to a folder"

    def is_place(self, target: Any) -> bool:
        # A word close to the name of a tool counts as a typo, not as a folder.
        if isinstance(target, str):
            is_path = "/" in target or "\\" in target or Path(target).is_dir()
            return bool(target) and (is_path or not near(target, TOOLS))
        return isinstance(target, PathLike)

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        return str(write_manifest(manifest_folder(Path(target)), manifest))


class HydraJobDestination(FolderDestination):
    """The folder of the running Hydra job, where a run with `+repro=` also writes its manifest."""

    name = "hydra"
    takes = "hydra"
    started_by = "the task function of a Hydra app"
    modules = ("hydra",)

    def is_place(self, target: Any) -> bool:
        return False  # a target is the name of the tool, not a folder

    def active(self) -> Path | None:
        config = hydra_job()
        return hydra_folder(config) if config is not None else None


DESTINATIONS: tuple[Destination, ...] = (
    Mlflow(),
    Wandb(),
    TensorBoard(),
    HydraJobDestination(),
    FolderDestination(),
)
"""In order: the first destination that accepts a target writes the manifest."""

_names = [destination.name for destination in DESTINATIONS]
TOOLS = [name for name in _names if name != FolderDestination.name]
LEGAL = ", ".join(destination.takes for destination in DESTINATIONS)


def destination_of(target: Any) -> Destination | None:
    """Return the destination that accepts `target`, or None."""
    accepting = (destination for destination in DESTINATIONS if destination.is_place(target))
    return next(accepting, None)
