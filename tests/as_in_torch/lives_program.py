"""Makes objects of each type, uses them, drops them, and prints which are alive, as JSON.

Once without a garbage collection, so that living objects are referenced or part of a cycle; then
after one. `KINDS` maps a name to a function that returns weak references to all its objects;
further arguments of the program choose some names.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
from pathlib import Path
from weakref import ref

import torch
from torch import nn
from torch.utils import data

sys.path.append(str(Path(__file__).parent.parent / "policies"))
from known_layers import let_torchvision_be_imported

let_torchvision_be_imported()


class Samples(data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index)) + torch.rand(3) * random.random()


class Stream(data.IterableDataset):
    def __iter__(self):
        return (torch.full((3,), float(index)) for index in range(8))


class Order(data.Sampler):
    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).tolist())


class Batches(data.BatchSampler):
    pass


class Loader(data.DataLoader):
    pass


def read(loader, most=99):
    for number, _ in enumerate(loader, 1):
        if number == most:
            break


def loader_read_in_part():
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2, shuffle=True)
    read(loader, 2)
    return [ref(loader), ref(dataset), ref(loader.sampler), ref(loader.batch_sampler)]


def loader_read_twice():
    generator = torch.Generator()
    order, dataset = Order(generator), Samples()
    batches = Batches(order, 2, drop_last=False)
    loader = Loader(dataset, batch_sampler=batches, generator=generator)
    read(loader)
    read(loader)
    return [ref(each) for each in (loader, dataset, order, batches, generator)]


def loader_of_a_stream():
    dataset = Stream()
    loader = data.DataLoader(dataset, batch_size=2)
    read(loader)
    return [ref(loader), ref(dataset)]


def loader_without_batches():
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=None)
    read(loader)
    return [ref(loader), ref(dataset)]


def loader_with_workers():
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2, num_workers=1)
    read(loader)
    return [ref(loader), ref(dataset)]


def loader_whose_workers_live_on():
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    read(loader)
    read(loader, 1)
    return [ref(loader), ref(dataset), ref(loader._iterator)]


def iterator_never_read():
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2)
    iterator = iter(loader)
    return [ref(loader), ref(dataset), ref(iterator)]


def iterator_that_outlives_its_loader():
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2, shuffle=True)
    iterator, own = iter(loader), ref(loader)
    next(iterator)
    del loader
    gone = [own() is None]
    next(iterator)
    assert gone == [True], "the iterator keeps its loader"
    return [own, ref(dataset), ref(iterator)]


def loader_with_a_name():
    import torchrepro

    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2, **torchrepro.dataloader_kwargs("train"))
    read(loader)
    read(loader, 1)
    return [ref(loader), ref(dataset), ref(loader.generator)]


def loader_of_torchdata():
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = Samples()
    loader = StatefulDataLoader(dataset, batch_size=2, shuffle=True)
    read(loader, 2)
    again = StatefulDataLoader(dataset, batch_size=2, shuffle=True)
    again.load_state_dict(loader.state_dict())
    read(again)
    return [ref(loader), ref(again), ref(dataset), ref(loader._iterator)]


def loader_whose_state_was_loaded():
    loader = data.DataLoader(Samples(), batch_size=2)
    if hasattr(loader, "load_state_dict"):  # a framework's hook gives loaders a state
        read(loader, 1)
        loader.load_state_dict(loader.state_dict())
    return [ref(loader), ref(loader.dataset)]


def training():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for batch in data.DataLoader(Samples(), batch_size=4):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    gone = ref(scheduler)  # torch's wrappers make cycles of a scheduler and its optimizer
    return [ref(model), ref(model[0]), ref(model[0].weight), ref(loss), ref(optimizer), gone]


def generators():
    drawn = torch.Generator()
    drawn.manual_seed(3)
    torch.rand(2, generator=drawn)
    own = random.Random(3)
    own.random()
    unseeded = random.Random()
    unseeded.random()
    return [ref(drawn), ref(own), ref(unseeded)]


def tensors():
    one = torch.rand(4, requires_grad=True)
    two = (one * 2).sum()
    two.backward()
    return [ref(one), ref(two), ref(one.grad)]


def checkpoint():
    import torchrepro

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = data.DataLoader(Samples(), batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            kept = torchrepro.Checkpoint(folder, model=model, optimizer=optimizer)
            for _ in kept.epochs(2):
                for batch in kept.batches(loader):
                    model(batch).sum().backward()
                    optimizer.step()
                    kept.save(every=2)
                    if kept.batch == 3:
                        break
    return [ref(model), ref(optimizer), ref(loader), ref(loader.dataset)]


def process_group():
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.new_group([0], backend="gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    model(torch.rand(2, 3)).sum().backward()
    dist.all_reduce(torch.rand(2))
    found = [ref(dist.group.WORLD), ref(group)]
    del model, group
    gc.collect()  # torch's own: a reducer and its module
    dist.destroy_process_group()
    return found


def accelerator():
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = Samples()
    loader = data.DataLoader(dataset, batch_size=2)
    model, optimizer, loader = made.prepare(model, optimizer, loader)
    for batch in loader:
        made.backward(model(batch).sum())
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        made.save_state(folder)
        made.load_state(folder)
        read(made.skip_first_batches(loader, 1))
    return [ref(each) for each in (made, model, optimizer, loader, dataset)]


def fabric():
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    model = nn.Linear(3, 1)
    inner = ref(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = Samples()
    loader = made.setup_dataloaders(data.DataLoader(dataset, batch_size=2))
    model, optimizer = made.setup(model, optimizer)
    for batch in loader:
        made.backward(model(batch).sum())
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model, "optimizer": optimizer}
        made.save(Path(folder, "a.ckpt"), state)
        made.load(Path(folder, "a.ckpt"), state)
    return [ref(made), inner, ref(model), ref(optimizer), ref(loader), ref(dataset)]


def lightning_trainer():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, _):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, dataset = Module(), Samples()
    loader = data.DataLoader(dataset, batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder,
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        trainer.save_checkpoint(Path(folder, "a.ckpt"))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader, ckpt_path=Path(folder, "a.ckpt"))
    return [ref(trainer), ref(module), ref(module.layer), ref(loader), ref(dataset)]


def huggingface_trainer():
    from transformers import Trainer, TrainingArguments

    class Rows(data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": torch.full((3,), float(index))}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return {"loss": self.layer(x).sum()}

    model, dataset = Model(), Rows()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1
        )
        trainer = Trainer(model, arguments, train_dataset=dataset)
        trainer.train()
    return [ref(trainer), ref(model), ref(dataset), ref(trainer.accelerator)]


KINDS = {
    made.__name__: made
    for made in (
        *(loader_read_in_part, loader_read_twice, loader_of_a_stream, loader_without_batches),
        *(loader_with_workers, loader_whose_workers_live_on, iterator_never_read),
        *(iterator_that_outlives_its_loader, loader_with_a_name, loader_of_torchdata),
        *(loader_whose_state_was_loaded, training, generators, tensors, checkpoint, process_group),
        *(accelerator, fabric, lightning_trainer, huggingface_trainer),
    )
}

if __name__ == "__main__":
    alive = {}
    for name in sys.argv[1:] or KINDS:
        make = KINDS[name]
        make()  # what a library keeps for good is not of the second time
        gc.collect()
        gc.disable()
        made = make()
        before = [held() is not None for held in made]
        gc.enable()
        gc.collect()
        alive[name] = [before, [held() is not None for held in made]]
    print(json.dumps(alive))
