"""The public functions of seeding in a program without a profile."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ABOUT_PROFILES = {"apply", "plan", "load", "compare", "verify"}
"""Functions that take a profile or recordings, and so do not depend on the active profile."""

IMPLIED = {"unregister_generator", "unregister_replacement", "save_rng_state", "set_rng_state"}
PROGRAM = """
import json, random, sys
import numpy as np, torch, torchrepro

def states():
    numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return repr((random.getstate(), numbers))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torchrepro.sample_rng().random(), torchrepro.stream("noise", worker=0).seed

def loader(**more):
    return torch.utils.data.DataLoader(Data(), batch_size=2, **more)

def kwargs():
    return torchrepro.dataloader_kwargs("train")

def items(workers):
    batches = loader(shuffle=True, num_workers=workers, **kwargs())
    return [[part.tolist() for part in batch] for batch in batches]

def seeded():
    outside = torchrepro.stream("a").seed
    with torchrepro.seeded("init") as source:
        return [source.seed, outside == torchrepro.stream("a").seed, torch.rand(1).item()]

def isolated_rng():
    with torchrepro.isolated_rng():
        return torch.rand(1).item()

def checkpoint(folder, make):
    model = torch.nn.Linear(1, 1)
    done = []
    for stop in (2, 9):
        kept = torchrepro.Checkpoint(folder, model=model)
        for epoch in kept.epochs(1):
            for number, batch in enumerate(kept.batches(loader(shuffle=True, **make())), 1):
                done.append(kept.batch)
                kept.save()
                if number == stop:
                    break
            if stop == 2:
                break
    return done

def generators():
    torchrepro.register_generator("mine", random.Random(1))
    torchrepro.unregister_generator("mine")

def snapshots():
    torchrepro.save_rng_state("state.json")
    torchrepro.set_rng_state("state.json")
    torchrepro.set_rng_state(torchrepro.rng_state())

def record():
    with torchrepro.record("recorded"):
        torch.ones(1) + 1

def replacements():
    torchrepro.register_replacement("aten::cumsum", torch.cumsum)
    torchrepro.unregister_replacement("aten::cumsum")

def use_mesh():
    try:
        torchrepro.use_mesh(None)
    except torchrepro.SeedingError:
        return "no mesh, as under a profile"

class Accelerator:
    def register_save_state_pre_hook(self, hook):
        hook([], [], "nowhere")
    def register_load_state_pre_hook(self, hook):
        hook([], "nowhere")

CALLS = {
    "attach": lambda: torchrepro.attach(Accelerator()),
    "stream": lambda: [torchrepro.stream("a").seed, torchrepro.stream("b", epoch=1).seed],
    "sample_rng": lambda: torchrepro.sample_rng().random(),
    "seeded": seeded,
    "isolated_rng": isolated_rng,
    "dataloader_kwargs": lambda: [items(0), items(2)],
    "set_epoch": lambda: torchrepro.set_epoch(loader(), 3, start=1),
    "log_to": lambda: [str(torchrepro.log_to(*each)) for each in ((), ("folder",), ("mlflow",))],
    "end_step": torchrepro.end_step,
    "rng_state": snapshots,
    "register_generator": generators,
    "register_seeder": lambda: torchrepro.register_seeder("no_such_module", print),
    "register_replacement": replacements,
    "record": record,
    "use_mesh": use_mesh,
}
CALLS["place_modules"] = lambda model=torch.nn.Linear(1, 1): torchrepro.place_modules(model)
seed = json.loads(sys.argv[1])
if seed is not None:
    torch.manual_seed(seed)
found = {}
for name, call in CALLS.items():
    before = states()
    found[name] = [call(), before == states()]
found["Checkpoint"] = [[checkpoint("plain", dict), checkpoint("named", kwargs)], True]
print(json.dumps(found))
"""


def _outputs(
    fork: Callable[..., int], environment: dict[str, str], folder: Path, seed: int | None
) -> tuple[dict[str, list], str]:
    """Run the program with this seed; return the result of each call, and stderr."""
    folder.mkdir()
    (folder / "plain.py").write_text(PROGRAM, encoding="utf-8")
    out, err = folder / "out", folder / "err"
    out.touch()
    err.touch()
    status = fork(("plain.py", json.dumps(seed)), environment, folder, (os.devnull, out, err))
    said = err.read_text(encoding="utf-8")
    assert not status, said
    return json.loads(out.read_text(encoding="utf-8")), said


def test_every_public_function_runs_without_a_profile(
    fork: Callable[..., int], clean_environment: dict[str, str], tmp_path: Path
) -> None:
    """Nothing raises, no generator moves, and draws follow from the program's own seed."""
    runs = [
        _outputs(fork, clean_environment, tmp_path / str(number), seed)
        for number, seed in enumerate((5, 5, 6, None, None))
    ]
    found, said = runs[0]
    functions = {name for name in torchrepro.__all__ if name[0].islower()}

    assert functions == (found.keys() | IMPLIED | ABOUT_PROFILES) - {"Checkpoint"}
    assert [name for name, (_, still) in found.items() if not still] == []
    for drawn in ("stream", "sample_rng", "seeded", "dataloader_kwargs"):
        answers = [json.dumps(run[drawn]) for run, _ in runs]
        assert answers[0] == answers[1], drawn
        assert len(set(answers)) == 4, drawn
    assert found["seeded"][0][1], "a stream is the same in a seeded block"
    alone, in_workers = found["dataloader_kwargs"][0]
    assert alone == in_workers, "what is loaded does not depend on workers"
    assert found["log_to"][0] == ["", "", ""]
    for note in ("nothing is logged", "this loader is not seeded"):
        assert said.count(note) == 1, said
    assert found["Checkpoint"][0] == [[1, 2, 3], [1, 2, 3]]
    assert not (tmp_path / "0" / "folder").exists()
