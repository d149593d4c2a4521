"""The Trainer of Hugging Face under a profile: its checkpoints, its reporters, its switches."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import torchrepro
from torchrepro.frameworks import huggingface
from torchrepro.ground.console import say_once
from torchrepro.ground.patching import variables_restored
from torchrepro.seeding.streams import World

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "policies"))

from known_layers import let_torchvision_be_imported

transformers: Any = None
program: Any = None


@pytest.fixture(autouse=True, scope="module")
def _library():
    """Import the slow libraries when a test of this file runs, not at collection."""
    let_torchvision_be_imported()
    globals()["transformers"] = pytest.importorskip("transformers")
    globals()["program"] = pytest.importorskip("huggingface_program")


def _trainer(folder, *callbacks, kind=None, **arguments):
    given = transformers.TrainingArguments(
        str(folder),
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
        **{"max_steps": 2, "report_to": [], "save_steps": 1, **arguments},
    )
    data = program.Augmented()
    return (kind or transformers.Trainer)(
        program.Model(), given, program.collated, data, callbacks=[*callbacks]
    )


def _exported(folder, step=2):
    saved = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
    callbacks = saved["stateful_callbacks"].values()
    return [each["torchrepro"] for each in callbacks if "torchrepro" in each]


def test_a_checkpoint_has_the_state_once_with_digest_and_manifest(tmp_path, monkeypatch):
    """It has one entry, also with an explicit callback, about which the Trainer does not warn."""
    warned: list[str] = []
    monkeypatch.setattr(transformers.trainer_callback.logger, "warning", warned.append)

    with torchrepro.apply("debug-strict") as applied:
        _trainer(tmp_path, torchrepro.hf.Callback()).train()

    (entry,) = _exported(tmp_path)
    assert entry["digest"] == json.loads(entry["manifest"])["digest"] == applied.resolved.digest
    assert (entry["profile"], len(entry["ranks"])) == ("debug-strict", 1)
    assert warned == []


def test_a_trainer_may_have_lists_for_loaders(tmp_path):
    """It trains, evaluates and saves; a list has no position to save."""

    class OfLists(transformers.Trainer):
        def get_train_dataloader(self):
            return [program.collated([self.train_dataset[at]]) for at in range(4)]

        def get_eval_dataloader(self, _=None):
            return self.get_train_dataloader()

    with torchrepro.apply("debug-strict"):
        trainer = _trainer(tmp_path, kind=OfLists)
        trainer.train()
        measured = trainer.evaluate()

    (entry,) = _exported(tmp_path)
    assert entry["ranks"][0]["interrupted"] == []
    assert "eval_runtime" in measured


def test_0_and_2_workers_give_the_same_weights(tmp_path):
    """Also with the Trainer's own seeding of workers; the report names it in one line."""
    found = []
    for workers in (0, 2):
        with torchrepro.apply("debug-strict") as applied:
            trainer = _trainer(tmp_path, dataloader_num_workers=workers, save_strategy="no")
            trainer.train()
            found.append((program.weights(trainer.model), applied.report.loading))
    (none, said_of_none), (two, said_of_two) = found

    assert none == two
    assert said_of_none == ()
    (line,) = said_of_two
    assert "do not depend on num_workers" in line
    assert line.endswith(" is seeded by torchrepro instead of by seed_worker of transformers")


def test_without_a_profile_the_trainer_is_unchanged(tmp_path):
    """Before and after a profile it has its own callbacks, and our explicit one does nothing."""
    reporter = transformers.integrations.integration_utils.TensorBoardCallback
    before = [*transformers.trainer.DEFAULT_CALLBACKS], reporter.on_train_begin

    with torchrepro.apply("seed-only"):
        within = [*transformers.trainer.DEFAULT_CALLBACKS], reporter.on_train_begin

    assert [*transformers.trainer.DEFAULT_CALLBACKS], reporter.on_train_begin == before
    assert within[0][:-1] == before[0]
    assert within[1] is not before[1]
    _trainer(tmp_path, torchrepro.hf.Callback()).train()
    assert _exported(tmp_path) == []


def test_a_missing_hook_is_one_line_and_the_explicit_callback_does_without(
    tmp_path, monkeypatch, capsys
):
    """If the list of callbacks has another type, the program runs, and one line reports it."""
    say_once.cache_clear()
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", (program.TrainerCallback,))
    plain = (transformers.trainer_callback.DefaultFlowCallback(), torchrepro.hf.Callback())

    with torchrepro.apply("debug-strict"):
        monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [])
        _trainer(tmp_path, *plain).train()

    lines = [line for line in capsys.readouterr().err.splitlines() if "DEFAULT_CALLBACKS" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"torchrepro: transformers {transformers.__version__} has no ")
    assert len(_exported(tmp_path)) == 1


def test_resuming_a_checkpoint_without_our_state_is_reported(tmp_path, capsys):
    """The training continues as Hugging Face resumes it, and one line names the consequence."""
    _trainer(tmp_path).train()
    with torchrepro.apply("debug-strict"):
        capsys.readouterr()
        _trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    said = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    assert said == [
        "torchrepro: transformers: the checkpoint of step 1: generators and loaders are not "
        "restored from this checkpoint: it was saved without torchrepro, or without a profile"
    ]


CHECKPOINT = "transformers: the checkpoint of step 3: the run differs from it at the first step in "
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": ({}, {}, ""),
    "the optimizer's file is lost": ({}, {}, CHECKPOINT + "the state of AdamW; "),
    "it saved the model only": ({"save_only_model": True}, {}, CHECKPOINT + "the state of AdamW; "),
    "it does not skip data": (
        {},
        {"ignore_data_skip": True},
        CHECKPOINT + "the position of the loader over Augmented[48] in its epoch; ",
    ),
    "another seed": (
        {},
        {"seed": 7},
        "the loader over Augmented[48] was saved with initial_seed=42 and resumes with "
        "initial_seed=7, ",
    ),
}
"""What is wrong -> how the first run and the resumed one are made, and what is said."""


@pytest.mark.parametrize("wrong", SAID)
def test_state_that_a_resumed_run_lacks_is_reported_in_one_line(tmp_path, capsys, wrong):
    """At its first step, or when its loader begins; a complete resume reports nothing."""
    before, after, said = SAID[wrong]
    with torchrepro.apply("debug-strict"):
        _trainer(tmp_path, max_steps=4, **before).train()
        if "lost" in wrong:
            (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
        capsys.readouterr()
        again = _trainer(tmp_path, max_steps=4, **before, **after)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    found = [line for line in capsys.readouterr().err.splitlines() if "uninterrupted" in line]
    assert len(found) == bool(said)
    assert all(line.startswith(f"torchrepro: {said}") for line in found)


def test_rank_0_does_not_save_its_own_state_as_that_of_all_ranks(tmp_path, monkeypatch, capsys):
    """A checkpoint that only a callback requested has None for other ranks, and is not resumed.

    Gathering their states would wait for them forever if the callback does not run on all of them.
    """

    class SaveNow(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = True

    say_once.cache_clear()
    with torchrepro.apply("debug-strict"):
        monkeypatch.setattr(huggingface, "ranks", lambda: World(2, 0))
        _trainer(tmp_path, SaveNow(), save_steps=50).train()
        capsys.readouterr()
        monkeypatch.undo()
        _trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    (entry,) = _exported(tmp_path, 1)
    assert [state is None for state in entry["ranks"]] == [False, True]
    assert "it has the state of rank 0 only" in capsys.readouterr().err


def test_a_checkpoint_in_the_middle_of_a_step_is_reported(tmp_path, capsys):
    """The Trainer repeats that step, whose dropout has already drawn random numbers."""

    class SaveBeforeStep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            trainer._save_checkpoint(trainer.model, trial=None)

    say_once.cache_clear()
    with torchrepro.apply("debug-strict"):
        trainer = _trainer(tmp_path / "between")
        trainer.train()
        between = capsys.readouterr().err
        trainer = _trainer(tmp_path / "within", SaveBeforeStep(), save_strategy="no")
        trainer.train()

    assert "in the middle of a step" not in between
    assert "in the middle of a step" in capsys.readouterr().err


def test_the_profile_is_logged_by_the_reporters(tmp_path, monkeypatch):
    """TensorBoard gets the manifest in the Trainer's own event file, and MLflow its digest."""
    pytest.importorskip("tensorboard")
    mlflow = pytest.importorskip("mlflow")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    with torchrepro.apply("debug-strict") as applied:
        _trainer(tmp_path, report_to=["tensorboard", "mlflow"], save_strategy="no").train()

    (folder,) = {each.parent for each in tmp_path.glob("runs/*/events*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {"args/text_summary", "torchrepro/manifest/text_summary"} <= {*events.Tags()["tensors"]}
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.tags["torchrepro.digest"] == applied.resolved.digest


def test_switches_of_the_trainer_are_reported(tmp_path, capsys):
    """A switch that sets a knob of the profile is reported: it agrees, or why it does not."""
    with variables_restored(), torchrepro.apply("debug-strict", ["guard=none"]):
        _trainer(tmp_path, full_determinism=True, save_strategy="no").train()
    with torchrepro.apply("seed-only", ["backends.cuda.matmul_fp32_precision=tf32"]):
        _trainer(tmp_path, tf32=False, save_strategy="no").train()

    lines = capsys.readouterr().err.splitlines()
    said = [line.partition("transformers: ")[2] for line in lines if "TrainingArguments(" in line]
    assert said == [
        "TrainingArguments(full_determinism=True) agrees with debug-strict",
        "TrainingArguments(tf32=False) does not agree with seed-only: the profile sets "
        "backends.cuda.matmul_fp32_precision to tf32, and the switch sets it to ieee",
    ]


def test_hf_imports_nothing_and_its_callback_needs_transformers(execute):
    """`torchrepro.hf` exists after a bare import; without transformers the error says why."""
    code = (
        "import sys, torchrepro; torchrepro.hf\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
        "sys.modules['transformers'] = None\n"
        "from torchrepro.hf import Callback\n"
    )
    done = execute(sys.executable, "-c", code)

    assert done.stdout == "set()\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: torchrepro.hf.Callback is a callback for the Trainer of ")
