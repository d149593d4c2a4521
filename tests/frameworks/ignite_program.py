"""A program of Ignite as its users write one, without torchrepro."""

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from training import ACCUMULATED, STEPS, loader_of, network, weights

EVERY = 5
EPOCHS = 3


def train(folder, workers, after_step, every=EVERY, after_epochs=False, **loading):
    loader = loader_of(shuffle=True, num_workers=workers, **loading)
    validation = loader_of(num_workers=workers)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train_step(engine, batch):
        model.train()
        model(batch).square().mean().backward()
        if engine.state.iteration % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()

    def validate(engine, batch):
        model.eval()
        with torch.no_grad():
            return model(batch).mean() + torch.rand(())

    trainer, evaluator = Engine(train_step), Engine(validate)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saving = Checkpoint(parts, DiskSaver(folder / "saved", require_empty=False), n_saved=None)
    if after_epochs:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(validation))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, saving)
    else:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every * ACCUMULATED), saving)
    trainer.add_event_handler(Events.STARTED, lambda _: torch.rand(1))
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda _: torch.rand(1))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=ACCUMULATED),
        lambda engine: after_step(engine.state.iteration // ACCUMULATED),
    )
    last = max(folder.glob("saved/*.pt"), key=_iteration, default=None)
    if last is not None:
        Checkpoint.load_objects(parts, torch.load(last, weights_only=True))
    trainer.run(loader, max_epochs=EPOCHS)
    assert trainer.state.iteration == STEPS * ACCUMULATED
    return weights(model), last


def _iteration(path):
    return int(path.stem.rpartition("_")[2])
