"""Runs one small Hydra app per case, each in a fork, and prints what became of them as JSON.

A case on standard input is the app's primary config, further files below its config folder, and
the words of its command line; the folder of case 3 is `3`.
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import hydra
import torch
from omegaconf import OmegaConf

OURS = ("torchrepro.", "hydra.")
seen = {}


def task(config):
    seen["config"] = OmegaConf.to_container(config, resolve=False)
    seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
    seen["seed"] = torch.initial_seed()


def ends(folder, words):
    sys.argv = ["app.py", *words, f"hydra.run.dir={folder}/out", f"hydra.sweep.dir={folder}/out"]
    app = hydra.main(version_base=None, config_path=f"{folder}/conf", config_name="config")(task)
    try:
        app()
    except SystemExit as left:
        return left.code or 0
    return 0


def write(folder, config, files):
    for name, text in {"config.yaml": config, **files}.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def answer(folder, words):
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            torch.manual_seed(99)
            known = set(sys.modules)
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                status = ends(folder, words)
            loaded = [name for name in sys.modules.keys() - known if name.startswith(OURS)]
            said.write("\0" + json.dumps({"status": status, "loaded": loaded, **seen}))
            said.flush()
            os._exit(0)
        os.waitpid(child, 0)
        said.seek(0)
        text, _, found = said.read().rpartition("\0")
    return {"said": text, **json.loads(found)}


def loaded_by(config, files, words):
    """Return the modules of Hydra and torchrepro that an app loads with these words."""
    folder = Path.cwd() / "first"
    write(folder, config, files)
    return answer(folder, words)["loaded"]


def main():
    torch.set_num_threads(1)
    cases = json.load(sys.stdin)
    for name in loaded_by(*cases[-1]) if cases else ():
        importlib.import_module(name)  # once, not in each fork
    answers = []
    for number, (config, files, words) in enumerate(cases):
        folder = Path.cwd() / str(number)
        write(folder, config, files)
        answers.append(answer(folder, words))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
