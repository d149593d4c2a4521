"""MLflow: tags and an artifact of the run.

Tags rather than parameters, because a run's parameters can never be changed. See
https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchrepro.integrations.destinations.entry import NAMESPACE, Destination
from torchrepro.manifest.contents import FILE

if TYPE_CHECKING:
    from torchrepro.integrations.destinations.entry import Entry

_PREFIX = f"{NAMESPACE}."
_AT_ONCE = 100  # tags that MLflow takes in one call
_LONGEST = 500  # characters of a tag; the manifest has the whole value


def _mlflow() -> Any:
    return sys.modules.get("mlflow")


def _is_run(target: Any) -> bool:
    mlflow = _mlflow()
    return mlflow is not None and isinstance(target, mlflow.entities.Run)


def _active() -> Any:
    return _mlflow().active_run() if _mlflow() else None


def _write(run: Any, entry: Entry) -> str:
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
    write=_write,
    modules=("mlflow",),
    recognises=_is_run,
    active=_active,
    would_be="mlflow.start_run()",
)
