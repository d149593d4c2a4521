"""`torchrepro run` on ranks, and what it and Hydra tell on standard error."""

import json

import pytest

DRAWS = """
import json, random, numpy, torch
print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item()]))
"""
WORKER = """
import sys
import numpy
from torch.utils.data import DataLoader, Dataset

class Seeding(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        numpy.random.seed(index)  # here
        return numpy.random.rand()

if __name__ == "__main__":
    how = {"num_workers": 1, "multiprocessing_context": sys.argv[1]}
    print(sum(len(list(DataLoader(Seeding(), **how))) for epoch in range(2)))
"""
LIBRARY = """
import torch, torchrepro

def fails(seed):
    raise RuntimeError(f"no seed {seed} for me")

torchrepro.register_seeder("frail", fails)
import frail
print(frail.WHOLE)
"""
SPLIT = """
import hydra

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    import torchrepro
    print("task", torchrepro.stream("split").seed)

if __name__ == "__main__":
    main()
"""
DISTINCT = ["seed-only", "ranks=distinct"]


@pytest.fixture
def drawn(fork_under):
    """Return the draws of a program from each generator, as one of two ranks or without ranks."""

    def drawn(words, rank=None):
        place = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2"}
        ended = fork_under(words, "-c", DRAWS, env=place)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return drawn


@pytest.mark.slow
def test_ranks_draw_distinct_or_equal_random_numbers_as_requested(drawn):
    """With `ranks=distinct` each generator differs between ranks; rank 0's is as without ranks.

    With `ranks=same` every generator starts in the same state on all ranks.
    """
    first, second = drawn(DISTINCT, 0), drawn(DISTINCT, 1)

    assert all(one != other for one, other in zip(first, second, strict=True))
    assert first == drawn(DISTINCT) == drawn("seed-only")
    assert second == drawn(DISTINCT, 1)
    assert drawn(["seed-only", "ranks=same"], 0) == drawn(["seed-only", "ranks=same"], 1)


@pytest.mark.slow
def test_a_program_may_apply_a_profile_before_it_imports_anything(fork_under):
    """If ranks differ, the profile of the run is applied first, even if random is imported."""
    apply = "import torchrepro; print(torchrepro.apply('seed-only').report.profile)"
    ended = fork_under(DISTINCT, "-c", apply, env={"RANK": "1", "WORLD_SIZE": "2"})

    assert (ended.returncode, ended.stdout) == (0, "seed-only\n"), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_seeding_call_in_a_worker_is_reported(under, write, start):
    """A dataset that seeds a generator in workers is reported with its line, once in all epochs."""
    program = write({"seeding.py": WORKER})
    ended = under("seed-only", "seeding.py", start)

    assert (ended.returncode, ended.stdout) == (0, "8\n"), ended.stderr
    line = 1 + next(n for n, text in enumerate(WORKER.splitlines()) if text.endswith("# here"))
    told = [text for text in ended.stderr.splitlines() if "in workers" in text]
    assert len(told) == 1
    assert f"numpy.random.seed(0) at {program}:{line}" in told[0]


@pytest.mark.slow
def test_a_failing_seeder_does_not_break_the_import(fork_under, write):
    """The import of a library succeeds though its seeder raises, and standard error names it."""
    write({"frail.py": "WHOLE = 'whole'\n", "program.py": LIBRARY})
    ended = fork_under("seed-only", "program.py")

    assert (ended.returncode, ended.stdout) == (0, "whole\n"), ended.stderr
    told = [text for text in ended.stderr.splitlines() if "seeder of frail failed" in text]
    assert len(told) == 1
    assert "RuntimeError: no seed" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "is_told"), [("spilt", True), ("split", False)])
def test_an_unused_stream_is_reported(hydra_app, fork_python, named, is_told):
    """A stream of a profile that the program does not use is reported, with a near match."""
    hydra_app(SPLIT, None)
    ended = fork_python("app.py", "+repro=seed-only", f"+repro.streams.{named}=3")

    assert ended.returncode == 0, ended.stderr
    told = [text for text in ended.stderr.splitlines() if "drawn from" in text]
    assert len(told) == is_told
    assert all("spilt was not drawn from" in text for text in told)
    assert all("did you mean split" in text for text in told)
