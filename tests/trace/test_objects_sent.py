"""Python objects that ranks send each other are pickled: their bytes are not compared."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchrepro
from torchrepro.trace.reader import read_run

from .conftest import seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _save(folder: Path) -> None:
    dcp.save({"weights": torch.ones(3), "step": 4}, checkpoint_id=folder / "checkpoint")


SENT: dict[str, Callable[[Path], object]] = {
    "a checkpoint of torch.distributed": _save,
    "broadcast": lambda _: dist.broadcast_object_list([uuid.uuid4()]),
    "gathered by all": lambda _: dist.all_gather_object([None], uuid.uuid4()),
    "gathered": lambda _: dist.gather_object(uuid.uuid4(), [None]),
    "scattered": lambda _: dist.scatter_object_list([None], [uuid.uuid4()]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", SENT)
def test_an_object_that_is_new_in_every_run_is_no_difference(tmp_path: Path, way: str) -> None:
    """However it is sent; what the program computes before and after is compared."""
    for name in ("a", "b"):
        with torchrepro.record(tmp_path / name):
            torch.ones(2).sin()
            SENT[way](tmp_path / f"of {name}")
            torch.ones(2).cos()

    ops = {record.op for record in seen(read_run(tmp_path / "a")[0])}
    assert {"aten::sin", "aten::cos"} <= ops
    assert torchrepro.compare(tmp_path / "a", tmp_path / "b").same
