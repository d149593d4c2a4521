"""What Lightning does under a profile, and that nothing of it is there without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchrepro

HERE = Path(__file__).parent
START = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "policies")!r}]
import torch
from known_layers import let_torchvision_be_imported
let_torchvision_be_imported()
"""
TRAIN = f"""{START}
import lightning, lightning_program
from pathlib import Path
lightning_program.train(Path(sys.argv[1]), 0, lambda step: None)
"""


def _python(code: str, *words: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    torchrepro_run = [sys.executable, "-m", "torchrepro", "run", *under, "--"] if under else []
    return subprocess.run(
        [*torchrepro_run, sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_an_entry_point_loads_nothing_and_gives_nothing_without_a_profile() -> None:
    """What Lightning imports by itself loads the standard library only, and returns no callback."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from torchrepro.frameworks import entry_points as e\n"
        "print(e.lightning(), e.pytorch_lightning(), e.fabric())\n"
        "ours = {name for name in set(sys.modules) - before if 'torchrepro' in name}\n"
        "rest = {n.partition('.')[0] for n in set(sys.modules) - before - ours}\n"
        "print(sorted(rest - sys.stdlib_module_names), len(ours) < 6)"
    )
    assert _python(code).stdout.splitlines() == ["[] [] []", "[] True"]


@pytest.mark.slow
def test_a_checkpoint_is_plain_and_says_what_it_came_from(tmp_path: Path) -> None:
    """Started by `torchrepro run`, a checkpoint loads as weights only, with digest and manifest."""
    done = _python(TRAIN, str(tmp_path), under=("debug-strict",))
    assert done.returncode == 0, done.stderr

    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["torchrepro"]

    assert json.loads(saved["manifest"])["digest"] == saved["digest"]
    assert saved["profile"] == "debug-strict"
    assert len(saved["ranks"]) == 1
    without = _python(TRAIN.replace("step: None)", "step: None)\nassert 0"), str(tmp_path))
    assert "AssertionError" in without.stderr.splitlines()[-1], "it resumes without a profile"
    assert "torchrepro" not in without.stderr.replace("/torchrepro/", "")


SWITCHES = {
    "deterministic=True": "Trainer(deterministic=True) agrees with debug-strict",
    "deterministic=False": (
        "Trainer(deterministic=False) does not agree with debug-strict: "
        "backends.torch.deterministic_algorithms is error there, and the switch makes it none"
    ),
}


@pytest.mark.slow
def test_switches_of_a_trainer_are_said() -> None:
    """Each switch that sets what the profile sets is said: whether it agrees, and if not, why."""
    code = f"""{START}
import lightning, torchrepro
with torchrepro.apply("debug-strict", ["guard=none"]):
    for given in {[*SWITCHES]!r}:
        eval(f"lightning.Trainer(accelerator='cpu', logger=False, {{given}})")
assert not hasattr(torch.utils.data.DataLoader, "state_dict")
assert lightning.Trainer.__init__.__module__.startswith("lightning")
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    said = [line.partition("lightning: ")[2] for line in done.stderr.splitlines()]
    assert [line for line in said if line.startswith("Trainer(")] == [*SWITCHES.values()]


@pytest.mark.slow
def test_a_missing_hook_is_one_line() -> None:
    """A Lightning whose Fabric has another shape is trained with as ever, and one line says so."""
    code = f"""{START}
import lightning.fabric.fabric, torchrepro
del lightning.fabric.fabric.Fabric.save
with torchrepro.apply("debug-strict"):
    pass
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "Fabric.save" in line]
    assert len(lines) == 1
    assert lines[0].startswith("torchrepro: lightning ")


def test_hooks_are_gone_after_the_profile() -> None:
    """Taking a profile back takes its watch on frameworks back as well."""
    before = list(sys.meta_path)
    with torchrepro.apply("seed-only"):
        assert len(sys.meta_path) > len(before)
    assert sys.meta_path == before


@pytest.mark.slow
def test_loggers_get_the_manifest(tmp_path: Path) -> None:
    """The loggers of a Trainer and of a Fabric hold the manifest of the profile in force."""
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
    done = _python(code, str(tmp_path), under=("debug-strict",))
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
def test_what_is_unusual_trains_as_without_a_profile(tmp_path: Path) -> None:
    """Odd loggers and loaders, pickled callbacks, plain files and a teacher's weights: as ever."""
    done = _python(UNUSUAL, str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
