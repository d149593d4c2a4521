"""Seeding calls of a program are honoured, kept in its manifest, and named when runs differ."""

import json

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


def test_a_call_of_the_program_is_named_when_runs_differ(
    hydra_app, run_python, torchrepro, tmp_path
):
    """Two runs whose programs seed differently draw differently, and `diff` names the line."""
    hydra_app(APP, "own: 1\n")
    outs = [
        run_python("app.py", "+repro=seed-only", f"own={own}", f"hydra.run.dir=out{own}")
        for own in (1, 2)
    ]
    manifests = [f"out{own}/.hydra/repro.json" for own in (1, 2)]
    (call,) = json.loads((tmp_path / manifests[0]).read_text(encoding="utf-8"))["seeding_calls"]
    told = torchrepro("diff", *manifests, "--json")
    answer = json.loads(told.stdout)

    assert outs[0].stdout != outs[1].stdout
    assert call["where"] == f"{tmp_path}/app.py:{LINE}"
    assert (
        f"seeded by the program itself: torch.manual_seed(1) at {call['where']}" in outs[0].stderr
    )
    assert told.returncode == 1
    (row,) = answer["differences"]

    assert (row["left"], row["right"]) == ("1", "2")
    assert row["key"] == f"torch.manual_seed at {call['where']}"
    assert torchrepro("diff", manifests[0], manifests[0]).returncode == 0
