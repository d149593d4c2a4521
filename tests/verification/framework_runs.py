"""Runs a program of `tests/frameworks` in the folder where it is started: `NAME [OPTIONS]`.

Without arguments it imports what these programs import, for the forks of the process that does.
"""

import importlib
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FRAMEWORKS = ("lightning", "transformers.trainer", "accelerate", "torchdata.stateful_dataloader")

sys.path[:0] = [str(TESTS / "policies"), str(TESTS / "frameworks")]
from known_layers import let_torchvision_be_imported  # noqa: E402 - found there

let_torchvision_be_imported()
if sys.argv[1:]:
    name, *options = sys.argv[1:]
    program = importlib.import_module(f"{name}_program")
    folder = Path("out").absolute()
    folder.mkdir(exist_ok=True)
    program.train(folder, 0, lambda step: None, **json.loads(options[0] if options else "{}"))
else:
    for module in FRAMEWORKS:
        importlib.import_module(module)
