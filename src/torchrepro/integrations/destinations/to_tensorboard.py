"""TensorBoard: hyper-parameters, and the manifest as a text.

Event files only grow, so a later call is a later step of the text, and of the hyper-parameters
TensorBoard shows the latest. They go into a run of their own below the writer's, because the
writer's own may have others. See https://docs.pytorch.org/docs/stable/tensorboard.html.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torchrepro.integrations.destinations.entry import NAMESPACE, Destination

if TYPE_CHECKING:
    from torchrepro.integrations.destinations.entry import Entry

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


def _write(writer: Any, entry: Entry) -> str:
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
    write=_write,
    modules=tuple(_WORDS),
    recognises=_is_writer,  # and neither library says which writers are open
    would_be="nothing: hand over the SummaryWriter itself",
)
