"""A small program under profiles, with a torchrepro for which some foreign names are gone.

Taking a name away from torch would break torch itself. So torchrepro's own modules are compiled
with another name in its place, which no library has: to them it is as if a new version had renamed
it. The names and the modules are on the command line, as JSON, with the library they are of. The
last line of standard output has the modules that were compiled so.
"""

import ast
import importlib.machinery
import json
import random
import re
import sys

import torch

NAMES, MODULES, LIBRARY = json.loads(sys.argv[1])
OBSERVERS = {
    "verification.relations.loading_observer:observe_loading": {"loader": {"start_method": "fork"}},
    "verification.relations.state_observer:note_state": {
        "tree": ".",
        "pattern": "*.pt",
        "kill": None,
    },
}
"""What begins the notes of a relation in the processes that it starts, and what it is told."""

compiled = []


def _gone(path):
    parts = re.split(r"([.:]+)", path)
    return "".join(f"_gone{part}" if part in NAMES else part for part in parts)


class Renaming(ast.NodeTransformer):
    """Give the names to nothing of ours: `self._name` is another attribute of the same name."""

    def visit_Attribute(self, node):
        self.generic_visit(node)
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if node.attr in NAMES and not is_own:
            node.attr = f"_gone{node.attr}"
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            node.value = " ".join(map(_gone, node.value.split(" ")))
        return node

    def visit_ImportFrom(self, node):
        if not (node.module or "").startswith("torchrepro"):
            node.module = _gone(node.module)
            for alias in node.names:
                if alias.name in NAMES:
                    alias.name, alias.asname = f"_gone{alias.name}", alias.asname or alias.name
        return node

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name in NAMES:
                alias.name, alias.asname = f"_gone{alias.name}", alias.asname or alias.name
        return node

    def visit_Assign(self, node):
        is_slots = any(getattr(target, "id", "") == "__slots__" for target in node.targets)
        return node if is_slots else self.generic_visit(node)


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        tree = Renaming().visit(ast.parse(self.get_data(self.path)))
        compiled.append(fullname.removeprefix("torchrepro."))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class Finder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.removeprefix("torchrepro.") not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Loader(fullname, spec.origin)
        return spec


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(4) + random.random() + index


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.rand(4) for _ in range(4))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.LSTM(4, 4)
        self.rest = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(4, 1))

    def forward(self, batch):
        return self.rest(self.recurrent(batch)[0]).sum()


def loaders():
    from torch.utils.data import DataLoader

    yield DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2)
    yield DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    yield DataLoader(Stream(), batch_size=4)
    if LIBRARY == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Numbers(), batch_size=4, shuffle=True)
        loader.load_state_dict(loader.state_dict())
        yield loader
    if LIBRARY == "timm":
        from timm.data.loader import _worker_init

        yield DataLoader(Numbers(), num_workers=1, worker_init_fn=_worker_init)


def fit(model):
    from lightning.pytorch import LightningModule, Trainer

    class Fitted(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=1, accelerator="cpu", default_root_dir="fitted", **quiet)
    trainer.fit(Fitted(), torch.utils.data.DataLoader(Stream(), batch_size=2))


def train():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if LIBRARY == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.save_state("accelerated")
        accelerator.load_state("accelerated")
    if LIBRARY == "lightning":
        fit(model)
    for loader in loaders():
        for batch in loader:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    compiled_sum = torch.compile(
        lambda value: torch.nn.functional.dropout(value).sum(), backend="eager"
    )
    compiled_sum(torch.eye(2)).item()
    torch.eye(2).to_sparse().sum().item()
    torch.func.grad(lambda value: (value**2).sum())(torch.ones(2))
    torch.save(model.state_dict(), "model.pt")


def main():
    import torchrepro
    from torchrepro.verification.at_start import IN_PROCESS, OBSERVED

    for path, told in OBSERVERS.items():
        if path.partition(":")[0] in MODULES:
            IN_PROCESS[OBSERVED]({path: {"folder": ".", **told}})
    policies = ["on_late=warn", "dropout=zero", "device.rng=host", "device.fallback=cpu"]
    for number, (profile, more) in enumerate([("seed-only", []), ("debug-strict", policies)]):
        with torchrepro.apply(profile, more), torchrepro.record(f"trace-{number}", statistics=True):
            train()
    for module in MODULES:  # what this program does not come to
        importlib.import_module(f"torchrepro.{module}")


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder())
    from torchrepro.ground.errors import TorchreproError

    try:
        main()
    except TorchreproError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    finally:
        print(json.dumps(compiled))
