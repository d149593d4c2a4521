"""Lightning under a profile, and that nothing of it is imported or hooked without one."""

import json
import sys

import pytest
import torch

import torchrepro
from torchrepro.seeding.nondeterministic_calls import CLOCK
from torchrepro.trace.reader import read_run

from .training import START

TRAIN = f"""{START}
import lightning, lightning_program
from pathlib import Path
lightning_program.train(Path(sys.argv[1]), 0, lambda step: None)
"""


@pytest.fixture(scope="module")
def fork(forks, tmp_path_factory):
    """Run programs in forks of one Python that has imported Lightning."""
    program = tmp_path_factory.mktemp("lightning") / "program.py"
    program.write_text(f"{START}\nimport lightning_program\n")
    with forks(program) as fork:
        yield fork


@pytest.fixture
def python(fork_python):
    """Run code, under `torchrepro run` with these words if there are any."""

    def python(code, *words, under=()):
        run = ("-m", "torchrepro", "run", *under, "--", sys.executable) if under else ()
        return fork_python(*run, "-c", code, *words)

    return python


def test_without_a_profile_an_entry_point_imports_and_returns_nothing(execute):
    """The module of the entry points imports the standard library only."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from torchrepro.frameworks import entry_points as e\n"
        "print(e.lightning(), e.pytorch_lightning(), e.fabric())\n"
        "ours = {name for name in set(sys.modules) - before if 'torchrepro' in name}\n"
        "rest = {n.partition('.')[0] for n in set(sys.modules) - before - ours}\n"
        "print(sorted(rest - sys.stdlib_module_names), len(ours) < 6)"
    )
    done = execute(sys.executable, "-c", code)
    assert done.stdout.splitlines() == ["[] [] []", "[] True"]


@pytest.mark.slow
def test_a_checkpoint_has_plain_values_digest_and_manifest(tmp_path, python, execute):
    """Under `torchrepro run` a checkpoint can be loaded as weights only."""
    run = (sys.executable, "-m", "torchrepro", "run", "debug-strict", "--")
    done = execute(*run, sys.executable, "-c", TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr

    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["torchrepro"]

    assert json.loads(saved["manifest"])["digest"] == saved["digest"]
    assert saved["profile"] == "debug-strict"
    assert len(saved["ranks"]) == 1
    without = python(TRAIN.replace("step: None)", "step: None)\nassert 0"), str(tmp_path))
    assert "AssertionError" in without.stderr.splitlines()[-1], "it resumes without a profile"
    assert "torchrepro" not in without.stderr.replace("/torchrepro/", "")


PICKLED = f"""{START}
import copy, pickle, lightning, lightning_program
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

class Pickling(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        pickle.loads(pickle.dumps(trainer))
        print("pickled")

loader = DataLoader(torch.arange(4.0), batch_size=2)
trainer = lightning.Trainer(
    max_steps=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    accelerator="cpu", callbacks=[Pickling()], enable_model_summary=False,
)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
trainer.fit(Model(), loader)
both = CombinedLoader([loader, loader], "max_size_cycle")
iterator = iter(both)
next(iterator)
copy.deepcopy(both), pickle.dumps(both), pickle.dumps(iterator)
print("copied")
"""


@pytest.mark.parametrize("under", [(), ("seed-only",)], ids=["plain", "seed-only"])
def test_a_trainer_and_its_loaders_can_be_pickled_and_copied_while_it_fits(under, tmp_path, python):
    """In the middle of an epoch, under a profile as without one."""
    (tmp_path / "program_that_pickles.py").write_text(PICKLED)

    done = python(
        f"import sys; sys.path.append({str(tmp_path)!r}); import program_that_pickles", under=under
    )

    assert done.stdout.splitlines()[-2:] == ["pickled", "copied"], done.stderr


@pytest.mark.slow
def test_a_limit_of_time_is_a_read_of_the_clock(tmp_path, python):
    """A training with a time limit reads the clock; the report has the line that started it."""
    code = f"""{START}
import lightning, torchrepro
class Net(lightning.LightningModule):
    def training_step(self, *_):
        return None
    def configure_optimizers(self):
        return None
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
with torchrepro.record(sys.argv[1], level="step"):
    trainer = lightning.Trainer(max_time="00:00:00:09", max_epochs=1, accelerator="cpu", **quiet)
    trainer.fit(Net(), [torch.ones(1)])
"""
    folder = tmp_path / "run"
    done = python(code, str(folder))
    assert done.returncode == 0, done.stderr

    sources = read_run(folder)[0].meta["sources"]
    (read,) = (each for each in sources if each["what"] == CLOCK)
    assert read["name"].endswith("Timer.time_elapsed")
    assert read["where"].endswith(f":{code.count(chr(10))}")


SWITCHES = {
    "deterministic=True": "Trainer(deterministic=True) agrees with debug-strict",
    "deterministic=False": (
        "Trainer(deterministic=False) does not agree with debug-strict: the profile sets "
        "backends.torch.deterministic_algorithms to error, and the switch sets it to none"
    ),
}


@pytest.mark.slow
def test_switches_of_a_trainer_are_reported(python):
    """A switch that sets a knob of the profile is reported: it agrees, or why it does not."""
    code = f"""{START}
import lightning, torchrepro
with torchrepro.apply("debug-strict", ["guard=none"]):
    for given in {[*SWITCHES]!r}:
        eval(f"lightning.Trainer(accelerator='cpu', logger=False, {{given}})")
assert not hasattr(torch.utils.data.DataLoader, "state_dict")
assert lightning.Trainer.__init__.__module__.startswith("lightning")
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    said = [line.partition("lightning: ")[2] for line in done.stderr.splitlines()]
    assert [line for line in said if line.startswith("Trainer(")] == [*SWITCHES.values()]


def test_hooks_are_removed_after_the_profile():
    """Restoring a profile also removes the watch on imports of frameworks."""
    before = list(sys.meta_path)
    with torchrepro.apply("seed-only"):
        assert len(sys.meta_path) > len(before)
    assert sys.meta_path == before


@pytest.mark.slow
def test_loggers_get_the_manifest(tmp_path, python):
    """The loggers of a Trainer and of a Fabric have the manifest of the active profile."""
    code = f"""{START}
import lightning, lightning_program as program, training
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.loggers import CSVLogger
loader = torch.utils.data.DataLoader(training.Augmented(), batch_size=8)
lightning.Trainer(max_steps=1, accelerator="cpu", logger=CSVLogger(sys.argv[1], "trainer"),
                  enable_checkpointing=False).fit(program.Model(), loader)
fabric = lightning.Fabric(accelerator="cpu", loggers=FabricLogger(sys.argv[1], "fabric"))
fabric.setup(torch.nn.Linear(2, 2))
"""
    done = python(code, str(tmp_path), under=("debug-strict",))
    assert done.returncode == 0, done.stderr

    manifests = [json.loads(path.read_text()) for path in tmp_path.rglob("repro.json")]

    assert len(manifests) == 2
    assert {each["digest"] for each in manifests} == {torchrepro.load("debug-strict").digest}


UNUSUAL = f"""{START}
import pickle, warnings, torchrepro
warnings.filterwarnings("ignore")
import lightning, lightning_program as program, training
from lightning.pytorch.loggers.logger import Logger

class Bare(Logger):
    name, version = "bare", 0
    def log_metrics(self, metrics, step=None): pass
    def log_hyperparams(self, *params): pass

class Own:
    def __init__(self, loader): self.loader = loader
    def __iter__(self): return iter(self.loader)
    def __len__(self): return len(self.loader)
    def state_dict(self): return 7
    def load_state_dict(self, state): assert state == 7

torchrepro.apply("debug-strict")
loader = Own(torch.utils.data.DataLoader(training.Augmented(), batch_size=8))
trainer = lightning.Trainer(max_steps=1, accelerator="cpu", logger=Bare(),
                            default_root_dir=sys.argv[1])
assert [pickle.loads(pickle.dumps(each)) for each in trainer.callbacks if "RunState" in str(each)]
trainer.fit(program.Model(), loader)
trainer.save_checkpoint(sys.argv[1] + "/own.ckpt")
fabric = lightning.Fabric(accelerator="cpu")
torch.save([1, 2], sys.argv[1] + "/list.pt")
assert fabric.load(sys.argv[1] + "/list.pt") == [1, 2]
model, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
fabric.save(sys.argv[1] + "/best.pt", {{"model": model}})
drawn = torch.rand(2)
before = torch.get_rng_state()
assert fabric.load(sys.argv[1] + "/best.pt", {{"model": teacher}}) == {{}}
assert torch.equal(before, torch.get_rng_state())
"""


@pytest.mark.slow
def test_unusual_programs_train_as_without_a_profile(tmp_path, python):
    """Unusual loggers and loaders, pickled callbacks, plain files and a teacher's weights."""
    done = python(UNUSUAL, str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr


BY_HAND = f"""{START}
import logging, sys, torchrepro
import lightning, lightning_program as program, training
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
path = sys.argv[1] + "/own.ckpt"

def fit(data="augmented", saved=None, by_hand=False):
    model = program.Model()
    if by_hand:
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    saving = program.ModelCheckpoint(sys.argv[1], filename="own", every_n_train_steps=2)
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", logger=False,
                                enable_progress_bar=False,
                                callbacks=[] if saved or by_hand else [saving])
    trainer.fit(model, training.loader_of(data, shuffle=True), ckpt_path=saved)

with torchrepro.apply("debug-strict"):
    fit()
    for options in ({{"saved": path}}, {{"by_hand": True, "data": "odd"}}, {{"by_hand": True}}):
        print("fit", *options, file=sys.stderr)
        fit(**options)
"""


@pytest.mark.slow
def test_weights_that_a_program_loads_itself_are_reported_as_no_resume(tmp_path, python):
    """At the first step, if the data are the checkpoint's; not with other data."""
    done = python(BY_HAND, str(tmp_path))
    assert done.returncode == 0, done.stderr

    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith("fit ") or "the run differs from it" in line]
    assert said == [
        "fit saved",
        "fit by_hand data",
        "fit by_hand",
        f"torchrepro: lightning: {tmp_path}/own.ckpt: the run differs from it at the first step "
        "in the state of Adam, the generators, the loaders; so it differs from the uninterrupted "
        "run",
    ]
