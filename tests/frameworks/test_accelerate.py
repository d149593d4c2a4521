"""accelerate under a profile: its loaders, its switches, its checkpoints."""

import json
import pkgutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torchrepro
from torchrepro.frameworks.hooking import give_loaders_state
from torchrepro.ground import console

from .training import Augmented

sys.path.append(str(Path(__file__).parents[1] / "policies"))

from known_layers import let_torchvision_be_imported

let_torchvision_be_imported()
accelerate = pytest.importorskip("accelerate")

SKIPPED = 5


class Read(IterableDataset):
    """The same rows, read one after the other."""

    def __iter__(self):
        yield from (Augmented()[index] for index in range(len(Augmented())))


def _loader(kind, workers):
    if kind == "read":
        return DataLoader(Read(), batch_size=4, num_workers=workers)
    own = torchrepro.dataloader_kwargs("data") if kind == "named" else {}
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers, **own)


def _epochs(kind, workers, *, dispatched, skipped):
    """Return three epochs of a prepared loader, the second without its first `skipped` batches."""
    config = accelerate.utils.DataLoaderConfiguration(
        dispatch_batches=dispatched, use_seedable_sampler=kind == "seedable"
    )
    with torchrepro.apply("debug-strict"):
        accelerator = accelerate.Accelerator(dataloader_config=config)
        loader = accelerator.prepare(_loader(kind, workers))
        first = torch.stack(list(loader))
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        return [first, torch.stack(list(rest)), torch.stack(list(loader))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["shuffled", "seedable", "read", "named"])
def test_skipped_batches_change_no_other_batch(kind, workers, dispatched):
    """An epoch without its first batches has the same other batches, as has the next epoch."""
    whole = _epochs(kind, workers, dispatched=dispatched, skipped=0)

    rest = _epochs(kind, workers, dispatched=dispatched, skipped=SKIPPED)

    assert not torch.equal(whole[1], whole[2])
    assert torch.equal(rest[1], whole[1][SKIPPED:])
    assert torch.equal(rest[2], whole[2])


@pytest.mark.parametrize("slots", [False, True])
def test_a_sampler_may_be_of_any_class(slots):
    """A sampler with a generator of accelerate gives the same in two runs, and varies by epoch.

    A sampler with `__eq__` has no hash, and one with slots has no weak references.
    """

    @dataclass(slots=slots)
    class Permuted:
        generator: torch.Generator | None = None

        def __len__(self):
            return len(Augmented())

        def __iter__(self):
            yield from torch.randperm(len(self), generator=self.generator).tolist()

    def epochs():
        with torchrepro.apply("debug-strict"):
            loader = DataLoader(Augmented(), batch_size=4, sampler=Permuted())
            prepared = accelerate.data_loader.prepare_data_loader(
                loader, num_processes=2, process_index=0
            )
            return [torch.stack(list(prepared)) for _ in range(2)]

    first, second = epochs(), epochs()

    assert all(map(torch.equal, first, second))
    assert not torch.equal(*first)


def test_skipped_batches_are_not_loaded():
    """The dataset does not load skipped rows."""

    class Counted(Augmented):
        asked = 0

        def __getitem__(self, index):
            Counted.asked += 1
            return super().__getitem__(index)

    with torchrepro.apply("debug-strict"):
        rest = accelerate.skip_first_batches(DataLoader(Counted(), batch_size=4), SKIPPED)
        batches = list(rest)

    assert (Counted.asked, len(rest)) == (len(Counted()) - 4 * SKIPPED, len(batches))


def test_after_a_profile_accelerate_has_its_own_functions_again(monkeypatch):
    """Its functions are restored, also where modules imported them by name.

    A module that imported a wrapped function gets accelerate's own function back.
    """
    before = accelerate.skip_first_batches
    monkeypatch.setitem(sys.modules, "later", later := ModuleType("later"))

    with torchrepro.apply("debug-strict"):
        exec("from accelerate import skip_first_batches", vars(later))
        within = accelerate.accelerator.skip_first_batches, vars(later)["skip_first_batches"]

    assert before not in within
    assert accelerate.accelerator.skip_first_batches is accelerate.skip_first_batches is before
    assert vars(later)["skip_first_batches"] is before


@pytest.mark.parametrize(
    ("given", "says"),
    [({"devices": 2}, 0), ({"deterministic": True}, 1), ({"nothing_like_it": 1}, 0)],
)
def test_set_seed_gets_the_arguments_of_any_version(given, says, monkeypatch, capsys):
    """The wrapped function gets exactly the arguments of the call."""

    def defined(seed, *, deterministic=False, devices=1):
        return seed, deterministic, devices

    def outcome(call):
        try:
            return call(seed=1, **given)
        except TypeError as refused:
            return str(refused)

    monkeypatch.setattr(accelerate.utils.random, "set_seed", defined)

    with torchrepro.apply("debug-strict"):
        returned = outcome(accelerate.utils.random.set_seed)

    assert returned == outcome(defined)
    assert capsys.readouterr().err.count("deterministic=True") == says


def _loaded_in_turn():
    """Return the batches of two prepared loaders; the second one is iterated first."""
    with torchrepro.apply("debug-strict"):
        loaders = accelerate.Accelerator().prepare(_loader("shuffled", 0), _loader("shuffled", 0))
        return [torch.stack(list(loader)).tolist() for loader in reversed(loaders)]


def test_accelerate_loads_the_same_batches_with_lightning_imported():
    """Loaders have a state if Lightning is imported; this changes no batch."""
    alone = _loaded_in_turn()
    with ExitStack() as undo:
        give_loaders_state(undo)
        beside = _loaded_in_turn()

    assert alone == beside


@pytest.mark.parametrize("batch_size", [4, 5])
def test_another_batch_size_within_an_epoch_is_reported(batch_size, tmp_path, capsys):
    """A loader that resumes an epoch by itself reports batches of another size."""
    loading = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    for size, saves in ((4, True), (batch_size, False)):
        with torchrepro.apply("debug-strict"):
            accelerator = accelerate.Accelerator(dataloader_config=loading)
            loader = accelerator.prepare(DataLoader(Augmented(), batch_size=size))
            if not saves:
                accelerator.load_state(str(tmp_path))
            for _ in loader:
                if saves:
                    accelerator.save_state(str(tmp_path))
                    break

    said = capsys.readouterr().err
    assert said.count("with batch_size=4 and resumes with batch_size=5") == (batch_size == 5)


def test_a_checkpoint_is_readable_without_torchrepro(tmp_path):
    """It has the profile, its digest and the manifest, in JSON of plain values."""
    with torchrepro.apply("debug-strict"):
        accelerate.Accelerator().save_state(str(tmp_path))
    entry = json.loads((tmp_path / "torchrepro_0.json").read_text())

    manifest = json.loads(entry["manifest"])
    assert entry["profile"] == manifest["profile"]["name"] == "debug-strict"
    assert entry["digest"] == manifest["digest"]


def test_checkpoints_have_the_state_only_while_a_profile_is_active(tmp_path):
    """This includes Accelerators from before the profile; none of them keeps our hook."""
    accelerator = accelerate.Accelerator()
    torchrepro.attach(accelerator)

    accelerator.save_state(str(tmp_path / "before"))
    with torchrepro.apply("debug-strict"):
        accelerator.save_state(str(tmp_path / "under"))
        accelerator.load_state(str(tmp_path / "under"))
    accelerator.save_state(str(tmp_path / "after"))

    before, under, after = (
        {path.name for path in (tmp_path / folder).iterdir()}
        for folder in ("before", "under", "after")
    )
    assert under - before == {"torchrepro_0.json"}
    assert after == before
    assert not accelerator._save_model_state_pre_hook
    assert not accelerator._load_model_state_pre_hook


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("run", "run: not an Accelerator"),
        (None, "None: not an Accelerator"),
        (accelerate.Accelerator, "Accelerator'>: a class, not an Accelerator"),
    ],
)
def test_only_an_accelerator_can_be_attached(other, said):
    """The error names any other object, also the class."""
    with pytest.raises(torchrepro.SeedingError, match=said):
        torchrepro.attach(other)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "it was saved without torchrepro, or without a profile"),
        ('{"format": 1', "damaged"),
        (
            '{"format": 2, "size": 2, "rank": 0, "ranks": [{}]}',
            "by 2 processes, and this run has 1 process",
        ),
    ],
)
def test_a_state_that_cannot_be_restored_is_one_line_and_no_error(content, why, tmp_path, capsys):
    """accelerate loads the checkpoint of another run, and one line reports the problem."""
    with torchrepro.apply("debug-strict"):
        accelerator = accelerate.Accelerator()
        accelerator.save_state(str(tmp_path))
        own = tmp_path / "torchrepro_0.json"
        own.unlink() if content is None else own.write_text(content)
        accelerator.load_state(str(tmp_path))

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "are not restored" in line]
    assert why in line


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerate.data_loader", "skip_first_batches"),
        ("accelerate.accelerator", "Accelerator.register_save_state_pre_hook"),
        ("accelerate.utils.random", "set_seed"),
    ],
)
def test_a_missing_hook_is_one_line(module, name, monkeypatch, capsys):
    """With another accelerate a program runs as without the hook, and one line names it."""
    console.say_once.cache_clear()
    owner, _, attribute = f"{module}.{name}".rpartition(".")
    monkeypatch.delattr(pkgutil.resolve_name(owner), attribute)

    with torchrepro.apply("debug-strict"):
        list(accelerate.Accelerator().prepare(_loader("shuffled", 0)))

    (line,) = [line for line in capsys.readouterr().err.splitlines() if name in line]
    assert f"accelerate {accelerate.__version__} has no " in line


@pytest.mark.parametrize(
    ("value", "agrees"), [("error", "agrees with"), ("warn", "does not agree with")]
)
def test_a_switch_is_compared_with_the_profile(value, agrees, monkeypatch, capsys):
    """`set_seed(deterministic=True)` sets a profile's knob: one line reports if they agree."""
    override = f"backends.torch.deterministic_algorithms={value}"
    with torchrepro.apply("seed-only", overrides=[override]), monkeypatch.context() as patch:
        patch.setattr(torch, "use_deterministic_algorithms", lambda _: None)  # no profile undoes it
        accelerate.utils.set_seed(1, deterministic=True)

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "set_seed" in line]
    assert agrees in line


def test_trackers_get_the_profile(tmp_path):
    """The trackers of `init_trackers` have the digest of the profile."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with torchrepro.apply("debug-strict"):
        accelerator = accelerate.Accelerator(log_with="tensorboard", project_dir=tmp_path)
        accelerator.init_trackers("runs")
        accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()

    assert any("repro" in tag for tag in events.Tags()["tensors"])


def _seconds_of_empty_weights(*overrides, **options):
    with torchrepro.apply("debug-strict", overrides) as applied:
        began = time.perf_counter()
        with accelerate.init_empty_weights(**options):
            made = torch.nn.Linear(5000, 5000)
        seconds = time.perf_counter() - began
    assert made.weight.is_meta
    return seconds, {each.left_open for each in applied.report.guarantee.lowered}


def test_empty_weights_cost_nothing_without_the_fill():
    """Filling takes nearly all the time of init_empty_weights; both ways to avoid it work."""
    filled, open_so = _seconds_of_empty_weights()
    unfilled, more = _seconds_of_empty_weights("backends.torch.fill_uninitialized_memory=false")
    with_buffers, as_much = _seconds_of_empty_weights(include_buffers=True)

    assert max(unfilled, with_buffers) < filled / 4
    assert as_much == open_so
    assert more - open_so == {"the contents of uninitialized memory"}


def test_a_program_that_imports_accelerate_before_torch_is_hooked(fork_python):
    """Under `run` the profile is applied during that import, so the hook waits for its end."""
    program = "import accelerate; print(hasattr(accelerate.Accelerator.save_state, '__wrapped__'))"
    run = ("-m", "torchrepro", "run", "debug-strict", "--", sys.executable)
    done = fork_python(*run, "-c", program)

    assert done.stdout == "True\n", done.stderr
    assert "accelerate" not in done.stderr
