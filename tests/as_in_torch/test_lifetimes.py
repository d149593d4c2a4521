"""Objects that a program drops are freed as early under a profile as in plain torch."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = ("-m", "torchrepro", "run")
UNDER = {
    "seed-only": (*RUN, "seed-only"),
    "debug-strict": (*RUN, "debug-strict", "guard=error"),
    "train-fast": (*RUN, "train-fast", "guard=warn"),
    "npu-align": (*RUN, "npu-align"),
    "with policies": (*RUN, "debug-strict", "dropout=zero", "device.rng=host"),
    "recorded": (*RUN, "debug-strict", "guard=error", "--record", "all"),
    "recorded by steps": (*RUN, "seed-only", "--record", "steps", "--level", "step"),
    "recorded now and then": (*RUN, "seed-only", "--record", "some", "--every", "2"),
}


@pytest.fixture
def alive(fork_python):
    """Return the living objects by type: before a garbage collection, and after one."""

    def alive(words, *kinds):
        done = fork_python(*words, HERE / "lives_program.py", *kinds)

        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return alive


QUICK = (
    *("loader_read_in_part", "loader_read_twice", "loader_of_a_stream", "iterator_never_read"),
    *(
        "iterator_that_outlives_its_loader",
        "loader_whose_workers_live_on",
        "training",
        "generators",
    ),
)


def test_objects_that_plain_torch_frees_immediately_are_freed_immediately(alive):
    """Loaders, samplers, datasets, iterators, models, optimizers, schedulers and generators."""
    plain, under = alive((), *QUICK), alive((*UNDER["seed-only"], "--", "python"), *QUICK)

    assert not [kind for kind in plain if any(map(any, plain[kind]))]
    assert under == plain


@pytest.mark.slow
@pytest.mark.parametrize("words", UNDER.values(), ids=UNDER)
def test_every_type_of_object_is_freed_as_in_plain_torch(words, alive):
    """Objects of frameworks too, under every profile, guarded and recorded."""
    plain = alive(())
    under = alive((*words, "--", "python"))

    assert {kind: under[kind] for kind in plain if under[kind] != plain[kind]} == {
        kind: plain[kind] for kind in plain if under[kind] != plain[kind]
    }


@pytest.mark.slow
@pytest.mark.parametrize("program", ["accelerators", "datasets", "iterators", "trainers"])
def test_a_sweep_needs_the_same_memory_as_without_a_profile(program, fork_python):
    """Within 10 %: each of its runs frees its memory without a garbage collection."""
    grown = {}
    for name, words in {"plain": (), "seed-only": (*UNDER["seed-only"], "--", "python")}.items():
        done = fork_python(*words, HERE / "sweep_program.py", program)

        assert done.returncode == 0, done.stderr
        grown[name] = float(done.stdout.splitlines()[-1])
    print(f"{program}: grown by {grown['plain']:.0f} MB in plain, {grown['seed-only']:.0f} MB")

    assert grown["seed-only"] <= 1.1 * grown["plain"]
