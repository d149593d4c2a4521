"""Seeding calls of a program are honoured, kept in its manifest, and named when runs differ."""

import json
import sys

import pytest

APP = """
import hydra, random, torch

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    torch.manual_seed(config.own)
    print("drawn", torch.rand(()).item())

if __name__ == "__main__":
    main()
"""
LINE = 7  # of the call, in app.py


def test_a_call_of_the_program_is_named_when_runs_differ(hydra_app, fork_python, answer, tmp_path):
    """Two runs whose programs seed differently draw differently, and `diff` names the line."""
    hydra_app(APP, "own: 1\n")
    outs = [
        fork_python("app.py", "+repro=seed-only", f"own={own}", f"hydra.run.dir=out{own}")
        for own in (1, 2)
    ]
    manifests = [tmp_path / f"out{own}/.hydra/repro.json" for own in (1, 2)]
    (call,) = json.loads(manifests[0].read_text(encoding="utf-8"))["seeding_calls"]
    status, told = answer("diff", *manifests)

    assert outs[0].stdout != outs[1].stdout
    assert call["where"] == f"{tmp_path}/app.py:{LINE}"
    assert (
        f"seeded by the program itself: torch.manual_seed(1) at {call['where']}" in outs[0].stderr
    )
    assert status == 1
    (row,) = told["differences"]
    assert (row["left"], row["right"]) == ("1", "2")
    assert row["key"] == f"torch.manual_seed at {call['where']}"
    assert answer("diff", manifests[0], manifests[0])[0] == 0


BEHIND_WRAPPERS = """
import sys, torch, torchrepro
from accelerate.utils import set_seed
with torchrepro.apply("debug-strict") as applied:
    import torch._dynamo
    torch.manual_seed(3)
    set_seed(7)
print(*applied.seeding_calls, sep="\\n")
"""


@pytest.mark.slow
def test_a_call_behind_a_wrapper_is_recorded_at_the_line_of_the_program(run_python, write):
    """torch.compile wraps `torch.manual_seed`, and torchrepro `set_seed`: neither hides a call."""
    file = write({"behind.py": BEHIND_WRAPPERS})
    ran = run_python(file)

    said = ran.stdout.splitlines()
    assert f"torch.manual_seed(3) at {file}:6" in said
    for function in ("random.seed", "numpy.random.seed", "torch.manual_seed"):
        assert f"{function}(7) at {file}:7" in said
    assert all(line.split(" at ")[1].startswith(str(file)) for line in said)


DRAWS = """
import numpy as np, torch

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return np.random.default_rng().random()

def main(config=None):
    for epoch in range(2): list(torch.utils.data.DataLoader(Noise(), num_workers=2))
    np.random.default_rng().random(), np.random.default_rng(3)
    np.random.default_rng().random()
"""
HYDRA_DRAWS = f"""
import hydra
{DRAWS}
if __name__ == "__main__":
    hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)(main)()
"""
IN_WORKERS, FIRST = 8, 12  # the lines that draw without a seed, in DRAWS
IN_SAMPLE = "draw from torchrepro.sample_rng()"
TO_DO = 'pass a seed: numpy.random.default_rng(1234), or torchrepro.stream("name").numpy()'


def _said(stderr):
    return [line for line in stderr.splitlines() if "drew without a seed" in line]


@pytest.mark.sampled
@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_a_strict_run_ends_with_the_lines_that_drew_without_a_seed(torchrepro, write, options):
    """Each function is named once with its first line and what to do, in a worker too; status 0.

    Under --quiet nothing is said of them.
    """
    program = write({"draws.py": f"{DRAWS}\nmain()\n"})
    ran = torchrepro("run", *options, "debug-strict", "--", sys.executable, program)

    assert ran.returncode == 0, ran.stderr
    drew = f"numpy.random.default_rng() at {program}"
    lines = [
        f"torchrepro: drew without a seed, in workers: {drew}:{IN_WORKERS} ({IN_SAMPLE})",
        f"torchrepro: drew without a seed: {drew}:{FIRST} ({TO_DO})",
    ]
    assert _said(ran.stderr) == ([] if options else lines)


def test_a_strict_job_says_and_keeps_what_drew_without_a_seed(hydra_app, fork_python, tmp_path):
    """A Hydra job says it as it ends, and its manifest has every line that drew."""
    hydra_app(HYDRA_DRAWS, "own: 1\n")
    words = ("app.py", "+repro=debug-strict", "hydra.run.dir=out")
    ran = fork_python(*words, env={"PYTHONHASHSEED": "0"})  # nothing that would begin it again
    kept = json.loads((tmp_path / "out/.hydra/repro.json").read_text(encoding="utf-8"))["report"]

    assert ran.returncode == 0, ran.stderr
    source = (tmp_path / "app.py").read_text(encoding="utf-8")
    first = source[: source.index(DRAWS)].count("\n") + FIRST
    drew = f"numpy.random.default_rng() at {tmp_path}/app.py"
    assert _said(ran.stderr)[-1].endswith(f"drew without a seed: {drew}:{first} ({TO_DO})")
    assert [read["where"] for read in kept["unseeded"]] == [
        f"{tmp_path}/app.py:{line}" for line in (first, first + 1)
    ]
