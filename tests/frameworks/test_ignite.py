"""Ignite under a profile: what its checkpoints contain, and which of them do not resume."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro.frameworks import hooking
from torchrepro.ground import console
from torchrepro.seeding.streams import World

from .training import loader_of, network, weights

ignite = pytest.importorskip("ignite.engine")
handlers = pytest.importorskip("ignite.handlers")

SAVED = 5
"""The batch, of 12, after which the checkpoint is written."""

NOT_RESTORED = "generators and loaders are not restored from this checkpoint: "


def parts_of(engine_class=ignite.Engine):
    """Return a model, its optimizer and the engine that trains it, as a `Checkpoint` saves them."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(_, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "trainer": engine_class(step)}


def trained(folder, parts):
    """Train an epoch; return the weights, and the path of a checkpoint from within the epoch."""
    saving = handlers.Checkpoint(parts, handlers.DiskSaver(str(folder)), n_saved=None)
    event = ignite.Events.ITERATION_COMPLETED(once=SAVED)
    parts["trainer"].add_event_handler(event, saving)
    parts["trainer"].run(loader_of(shuffle=True), max_epochs=1)
    return weights(parts["model"]), saving.last_checkpoint


def resumed(parts):
    """Return the weights at the end of the epoch from which `parts` were loaded."""
    parts["trainer"].run(loader_of(shuffle=True))
    return weights(parts["model"])


def test_a_checkpoint_has_one_entry_of_plain_values(tmp_path, capsys):
    """Ignite loads the checkpoint without a profile as well, and nothing is reported."""
    with torchrepro.apply("seed-only"):
        _, path = trained(tmp_path, parts_of())
    saved = torch.load(path, weights_only=True)
    handlers.Checkpoint.load_objects(parts_of(), saved)

    entry = saved.pop("torchrepro")
    assert saved.keys() == {"model", "optimizer", "trainer"}
    assert entry["ranks"][0]["loader"]["batches"] == SAVED
    assert json.loads(entry["manifest"])["digest"] == entry["digest"]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("by_instance", [False, True])
@pytest.mark.parametrize("read", [str, lambda path: torch.load(path, weights_only=True)])
def test_a_path_and_its_content_resume(tmp_path, capsys, read, by_instance):
    """`load_objects` is a static method, which an instance may call as well."""
    with torchrepro.apply("seed-only"):
        whole, path = trained(tmp_path / "saved", parts_of())
    with torchrepro.apply("seed-only"):
        parts = parts_of()
        owner = handlers.Checkpoint(parts, str(tmp_path)) if by_instance else handlers.Checkpoint
        owner.load_objects(parts, checkpoint=read(path))
        rest = resumed(parts)

    assert rest == whole
    assert not capsys.readouterr().err


def test_a_model_alone_resumes_no_training(tmp_path, capsys):
    """The weights of a teacher or of the best model change no generator."""
    with torchrepro.apply("seed-only"):
        _, path = trained(tmp_path, parts_of())
        before = torch.get_rng_state()
        model = {"model": network()}
        drawn = torch.get_rng_state()
        handlers.Checkpoint.load_objects(model, str(path))

        assert not torch.equal(before, drawn)
        assert torch.equal(torch.get_rng_state(), drawn)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine_class", "profiled", "reason"),
    [
        (ignite.Engine, False, "it was saved without torchrepro, or without a profile"),
        (ignite.DeterministicEngine, True, "a DeterministicEngine seeds each epoch itself"),
    ],
)
def test_a_checkpoint_that_does_not_resume_is_reported(
    tmp_path, capsys, engine_class, profiled, reason
):
    """The program then continues as without torchrepro: no generator changes."""
    with torchrepro.apply("seed-only") if profiled else nullcontext():
        _, path = trained(tmp_path, parts_of(engine_class))
    with torchrepro.apply("seed-only"):
        parts = parts_of(engine_class)
        before = torch.get_rng_state()
        # A DeterministicEngine saves states of numpy, which are read by pickle only.
        saved = torch.load(path, weights_only=False)
        handlers.Checkpoint.load_objects(parts, saved)

        assert torch.equal(torch.get_rng_state(), before)
    assert "torchrepro" not in saved
    assert f"ignite: the checkpoint: {NOT_RESTORED}{reason}" in capsys.readouterr().err


def test_a_checkpoint_of_several_processes_has_the_state_of_one(tmp_path, capsys, monkeypatch):
    """Lines report it when the checkpoint is saved, and when it is loaded."""
    monkeypatch.setattr(hooking, "ranks", lambda: World(rank=0, size=2))
    console.say_once.cache_clear()
    with torchrepro.apply("seed-only"):
        _, path = trained(tmp_path, parts_of())
        at_save = capsys.readouterr().err
        handlers.Checkpoint.load_objects(parts_of(), str(path))

    assert "ignite: a checkpoint has the state of one rank only" in at_save
    assert f"{NOT_RESTORED}it has the state of one rank only" in capsys.readouterr().err


def test_a_single_object_is_saved_without_an_entry(tmp_path):
    """Its own state is the content of the file, and its name is in the name of the file."""
    trainer = parts_of()["trainer"]
    with torchrepro.apply("seed-only"):
        _, path = trained(tmp_path, {"trainer": trainer, "model": network()})
        saving = handlers.Checkpoint({"trainer": trainer}, handlers.DiskSaver(str(path) + "s"))
        saving(trainer)

    assert Path(saving.last_checkpoint).name.startswith("trainer_")
    assert "iteration" in torch.load(saving.last_checkpoint, weights_only=True)
