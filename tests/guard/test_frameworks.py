"""The determinism switches of real frameworks: some agree with a profile, some do not."""

import json
from importlib.util import find_spec

import pytest

from ..frameworks.training import START

pytestmark = pytest.mark.slow

TRANSFORMERS = f"""{START}
from huggingface_program import Augmented, Model, Trainer, TrainingArguments, collated

args = TrainingArguments(
    "out", full_determinism=True, max_steps=2, report_to=[], use_cpu=True, save_strategy="no",
    disable_tqdm=True, remove_unused_columns=False)
trainer = Trainer(Model(), args, collated, Augmented())  # the user's line
trainer.train()
"""
LIGHTNING = f"""{START}
from lightning_program import Model, lightning, loader_of

trainer = lightning.Trainer(deterministic={{deterministic}},  # the user's line
    max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accelerator="cpu")
trainer.fit(Model(), loader_of())
"""
ACCELERATE = f"""{START}
import accelerate

accelerate.utils.set_seed(3, deterministic={{deterministic}})  # the user's line
torch.optim.SGD(torch.nn.Linear(2, 1).parameters()).step()
"""
END = """
import json, os
from torchrepro.application.applier import active_profiles
(applied,) = active_profiles()
print(json.dumps(applied.report.to_json()))
print(os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["HCCL_DETERMINISTIC"])
print(torch.are_deterministic_algorithms_enabled())
"""
AGREEING = {
    # program, the switch's name, what it changed to something as good, the variables at the end
    "transformers": (
        TRANSFORMERS,
        "transformers' enable_full_determinism",
        ["env.CUBLAS_WORKSPACE_CONFIG", "env.HCCL_DETERMINISTIC"],
        ":16:8 1",
    ),
    "lightning": (LIGHTNING, "Lightning's Trainer(deterministic)", [], ":4096:8 true"),
    "accelerate": (ACCELERATE, "accelerate's set_seed(deterministic)", [], ":4096:8 true"),
}


@pytest.fixture
def run(execute_forked):
    """Run a program under `torchrepro run debug-strict` with this guard."""

    def run(text, guard="error"):
        return execute_forked(text, under=("debug-strict", f"guard={guard}", "--verbose"))

    return run


def needs(package):
    """Skip a test whose `package` is not installed; nothing is imported here."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def line_of(text):
    lines = enumerate(text.splitlines(), 1)
    return next(f"program.py:{number}" for number, line in lines if "the user's line" in line)


@pytest.mark.parametrize("framework", AGREEING)
def test_a_switch_that_agrees_is_reported_as_unchanged_with_its_name(framework, run):
    """The strictest switch of a framework runs to its end under a guard that stops.

    The report, as text and as JSON, has its name, and the line of the program that switched it on.
    """
    needs(framework)
    template, name, rewritten, variables = AGREEING[framework]
    program = template.format(deterministic=True) + END
    done = run(program)

    assert done.returncode == 0, done.stderr[-3000:]
    said, *state = [line for line in done.stdout.splitlines() if line.startswith(('{"', ":", "T"))]
    report = json.loads(said)
    assert state == [variables, "True"]
    assert report["drift"] == []
    assert [(each["knob"], each["by"]) for each in report["as_good"]] == [
        (knob, name) for knob in rewritten
    ]
    assert [(each["name"], each["outcome"]) for each in report["switches"]] == [(name, "unchanged")]
    mine = line_of(program)
    assert all(each["called"].endswith(mine) for each in (*report["as_good"], *report["switches"]))
    last = done.stderr.splitlines()[-max(1, len(rewritten)) :]
    assert all("unchanged" in line and name in line and mine in line for line in last)


def test_without_a_guard_a_switch_is_identified_by_its_values(run):
    """The report then names the switch, but no line."""
    needs("transformers")
    done = run(TRANSFORMERS.format() + END, "none")

    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith('{"'))
    report = json.loads(said)
    assert [(each["by"], each["where"]) for each in report["as_good"]] == [
        ("transformers' enable_full_determinism", "")
    ] * 2
    assert "as transformers' enable_full_determinism writes it" in done.stderr
    assert report["drift"] == []


def test_a_switch_that_turns_determinism_off_is_refused_with_both_lines(run):
    """The error names the line of Lightning and the program's line once each, before step 0."""
    needs("lightning")
    program = LIGHTNING.format(deterministic=False)
    done = run(program)

    assert done.returncode == 1
    told = done.stderr[done.stderr.index("knobs have changed") :]
    assert told.count("accelerator_connector.py:") == told.count(line_of(program)) == 1
    assert "backends.torch.deterministic_algorithms = none" in told
    assert "backends.torch.inductor_deterministic = false" in told
    assert "before step 0" in told
