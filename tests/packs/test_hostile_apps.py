"""The worst that a pack can hold, in an app that has the pack on Hydra's own search path."""

from __future__ import annotations

import os

import pytest

from .conftest import Link
from .hostile_profiles import CALLBACK, LEAVES_A_MARK

APP = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    print("RAN")

main()
"""
FILES = {  # what Hydra would compose by itself, if it came to see it
    "repro/plain.yaml": CALLBACK,
    "repro/_hidden.yaml": CALLBACK,
    "repro/.dotted.yaml": CALLBACK,
    "repro/a..b.yaml": CALLBACK,
    "repro/in/_hidden.yaml": CALLBACK,
    "repro/with/_hidden.yaml": CALLBACK,
    "beside.yaml": CALLBACK,
    "repro/secret.yaml": "description: ${oc.env:SECRET}\n",
    "repro/link.yaml": Link("/etc/hostname"),
}
ASKED = (
    "+repro=plain",
    "+repro=_hidden",
    "+repro=.dotted",
    "+repro=a..b",
    "+repro=in/_hidden",
    "+repro/in=_hidden",
    "+repro/with=_hidden",
    "+repro=../beside",
    "+repro=secret",
    "+repro=link",
    "+repro=team/repro/plain",
)


@pytest.mark.parametrize("asked", ASKED)
def test_no_file_of_a_pack_reaches_hydra_by_itself(installed_pack, fork_python, tmp_path, asked):
    """Whatever its files are called, none of a pack is composed by Hydra: no code, no task."""
    pack = installed_pack("acme-pack", {**FILES, "/evil_code.py": LEAVES_A_MARK})
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "SECRET": "the secret"}
    done = fork_python("app.py", asked, "hydra.searchpath=[pkg://acme_pack]", env=variables)

    assert not (pack.site / "marker").exists()
    # Hydra 1.4 itself refuses a name that leads out of a group, with its own status.
    hydra_refused = asked == "+repro=../beside" and "Parent traversal" in done.stderr
    assert (done.returncode, done.stdout) == (1 if hydra_refused else 3, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert "the secret" not in done.stderr
