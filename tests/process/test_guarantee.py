"""The manifest and the last line of jobs and runs report the guarantee at the end."""

import json

import pytest

ALGORITHMS = "backends.torch.deterministic_algorithms"
HASH_SEED = "env.PYTHONHASHSEED"
OFF = """
import sys
import hydra, torch

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    torch.use_deterministic_algorithms(False)
    if config.get("leave"):
        sys.exit(0)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def manifest_of(tmp_path, hydra_app, fork_python):
    """Run an app and return its standard error and the report in its manifest."""

    def manifest_of(source, *overrides, run=fork_python, config=None):
        hydra_app(source, config)
        ended = run("app.py", *overrides, f"hydra.run.dir={tmp_path / 'out'}")

        assert ended.returncode == 0, ended.stderr
        manifest = json.loads((tmp_path / "out" / ".hydra" / "repro.json").read_text())
        return ended.stderr, manifest["report"]

    return manifest_of


def lowered(report):
    return {each["knob"] for each in report["guarantee"]["lowered"]}


@pytest.mark.parametrize("more", [(), ("repro.guard=none",), ("+leave=true",)])
def test_the_manifest_of_a_job_records_a_violated_guarantee(manifest_of, more):
    """A flag that the task switches off is in the final manifest, however the task ends."""
    stderr, report = manifest_of(OFF, "+repro=debug-strict", "repro.on_late=warn", *more)

    assert ALGORITHMS in lowered(report)
    assert ALGORITHMS in {drift["knob"] for drift in report["drift"]}
    assert report["guarantee"]["held"] == "seeded"
    assert "is active" not in stderr.splitlines()[-1]


def test_under_run_the_last_line_and_the_manifest_report_the_violation(manifest_of, fork_under):
    """A job that names the profile of its `run` completes the manifest; one line reports it."""

    def run(*words):
        return fork_under("debug-strict", *words)

    stderr, report = manifest_of(OFF, "+repro=debug-strict", run=run)
    headline, *_, last = stderr.splitlines()

    assert HASH_SEED not in lowered(report)
    assert ALGORITHMS in lowered(report)
    assert "is active" in headline
    assert "is active" not in last
    assert stderr.count("at the end") == 1


def test_a_fork_of_a_run_does_not_announce_its_end(fork_under):
    """A forked child may change its flags and exit: that does not count as the end of the run."""
    code = (
        "import os, sys, torch\n"
        "if os.fork() == 0:\n"
        "    torch.use_deterministic_algorithms(False)\n"
        "    sys.exit(0)\n"
        "os.wait()"
    )
    ended = fork_under("debug-strict", "-c", code)

    assert ended.returncode == 0
    assert "at the end" not in ended.stderr
