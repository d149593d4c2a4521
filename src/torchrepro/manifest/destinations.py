"""Where the profile of a run can be written: one class per tool, in its own terms."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torchrepro.ground.messages import near
from torchrepro.manifest.contents import FILE, as_text, hydra_folder, hydra_job, write_manifest
from torchrepro.profile.resolved import flatten
from torchrepro.reporting.process_state import manifest_folder

NAMESPACE = "torchrepro"


def _profile(manifest: Mapping[str, Any]) -> dict[str, Any]:
    # The resolved profile in its sections, with its digest and the guarantee that is held.
    report = manifest["report"]
    held = {"name": report["profile"], "guarantee": report["guarantee"]["held"]}
    return {"digest": manifest["digest"], **manifest["profile"], **held}


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    # The same under dotted keys with our prefix, each a text, a number or a truth value.
    return {
        f"{NAMESPACE}.{key}": value
        if isinstance(value, str | int | float)
        else json.dumps(value, sort_keys=True)
        for key, value in flatten(_profile(manifest)).items()
    }


class Destination:
    """A tool, or a kind of place, that takes a manifest, which holds no secret."""

    name: str
    takes: str  # what the program hands over, in words
    place: str = "the place"  # what it is called, in words
    started_by: str = ""  # what makes one active, in words; empty if it cannot say what is active
    modules: tuple[str, ...] = ()  # of the tool; as a target one means what is active in it
    place_class: str = ""  # the name of the class of its places in `modules`

    def module_of(self, target: Any) -> Any:
        """Return the loaded module of the tool of which `target` is a place, or None."""
        for module in self._loaded():
            kind = module
            for name in self.place_class.split("."):
                kind = getattr(kind, name, None)
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
        return [module for module in map(sys.modules.get, self.modules) if module is not None]

    def active(self) -> Any:
        """Return the place that is active now, or None; imports nothing."""
        return None

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        """Write `manifest` over what an earlier one left, and say in words where it is."""
        raise NotImplementedError


class Mlflow(Destination):
    """Tags and an artifact: unlike tags, a run's parameters can never be changed.

    See https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html.
    """

    name = "mlflow"
    takes = "mlflow or a run of it"
    started_by = "mlflow.start_run()"
    modules = ("mlflow",)
    place_class = "entities.Run"

    AT_ONCE = 100  # tags that MLflow takes in one call
    LONGEST = 500  # characters of a tag; the manifest has all of the value

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
    """Config and a file of the run: each call would make another version of an artifact.

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
    """Hyper-parameters and a text. Neither library says which writers are open.

    Event files only grow, so a later call is a later step of the text, and of the
    hyper-parameters TensorBoard shows the latest. They go into a run of their own below the
    writer's, which may have others. See https://docs.pytorch.org/docs/stable/tensorboard.html.
    """

    name = "tensorboard"
    takes = "a SummaryWriter"
    place = "the SummaryWriter"
    place_class = "SummaryWriter"

    # What `add_hparams` calls the name of a run, and the attribute of a writer's folder.
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
        # Indented by four blanks, Markdown shows it as it is.
        text = "".join(f"    {line}" for line in as_text(manifest).splitlines(keepends=True))
        target.add_text(f"{NAMESPACE}/manifest", text, global_step=step)
        target.flush()
        self._steps[target] = step
        return f"{getattr(target, folder)}: hyper-parameters and text {NAMESPACE}"


class FolderDestination(Destination):
    """A folder, which gets the manifest as a file."""

    name = "folder"
    takes = "a path to a folder"

    def is_place(self, target: Any) -> bool:
        # A word that is nearly the name of a tool is taken for a typo.
        if isinstance(target, str):
            is_path = "/" in target or "\\" in target or Path(target).is_dir()
            return bool(target) and (is_path or not near(target, TOOLS))
        return isinstance(target, PathLike)

    def write(self, target: Any, manifest: Mapping[str, Any]) -> str:
        return str(write_manifest(manifest_folder(Path(target)), manifest))


class HydraJobDestination(FolderDestination):
    """The output folder of the Hydra job that runs now, where `+repro=` writes as well."""

    name = "hydra"
    takes = "hydra"
    started_by = "the task function of a Hydra app"
    modules = ("hydra",)

    def is_place(self, target: Any) -> bool:
        return False  # it is written to as the active one alone

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
"""The first one whose place a target is gets the manifest."""

TOOLS = [each.name for each in DESTINATIONS if each.name != FolderDestination.name]
LEGAL = ", ".join(each.takes for each in DESTINATIONS)


def destination_of(target: Any) -> Destination | None:
    """Return the destination of which `target` is a place, or None."""
    return next((each for each in DESTINATIONS if each.is_place(target)), None)
