"""Hydra apps that request no profile are composed as if torchrepro were not installed."""

from __future__ import annotations

import json

import pytest

OTHERS = """
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin

class Mine(Callback):
    pass

@dataclass
class Closed:
    size: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])

@dataclass
class WithHydra(Closed):
    hydra: Any = field(
        default_factory=lambda: {"job": {"env_set": {"FOO": "stored"}}, "callbacks": {}}
    )

class Prepends(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.prepend("theirs", "file://theirs")

class Appends(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append("theirs", "file://theirs")

def registers(plugin, at=None):
    def register():
        plugins = Plugins.instance()
        plugins.register(plugin)
        order = plugins.plugin_type_to_subclass_list[SearchPathPlugin]
        order.insert(len(order) if at is None else at, order.pop())
    return register

def stores(name, node, group=None):
    return lambda: ConfigStore.instance().store(name=name, node=node, group=group)

def customizes_hydra():
    from hydra.conf import HydraConf, JobConf
    store = ConfigStore.instance()
    extra = {"replace": True} if "replace" in store.store.__annotations__ else {}
    store.store("config", HydraConf(job=JobConf(chdir=False)), "hydra", **extra)
"""

# The primary config of an app, code of its author, and its command line.
APPS = """
from others import *

FILES = ("conf", "config")
SHAPES = {
    "no config": (NONE, None, []),
    "no config, new keys": (NONE, None, ["+x=1", "++y={z: 2}"]),
    "files": (FILES, None, ["db=big", "size=4"]),
    "files, an override of Hydra's": (FILES, None, ["hydra.job.name=other", "hydra.verbose=[a]"]),
    "a closed dataclass": ((None, "closed"), stores("closed", Closed), ["size=4"]),
    "a dataclass with a section for Hydra": ((None, "own"), stores("own", WithHydra), []),
    "its own hydra/config": (FILES, customizes_hydra, []),
    "hydra/env/default before Hydra's": (FILES, registers(Prepends), []),
    "the same, by a plugin before ours": (FILES, registers(Prepends, 0), []),
    "the same, in a sweep": (FILES, registers(Prepends, 0), ["-m", "size=1,2"]),
    "hydra/env/default after Hydra's": (FILES, registers(Appends), []),
    "hydra/env/default in the store": (FILES, stores("default", {"job": {}}, "hydra/env"), []),
    "hydra/env/default in --config-dir": (FILES, None, ["--config-dir", "theirs"]),
    "hydra/env/default in hydra.searchpath":
        (FILES, None, ["hydra.searchpath=[file://theirs]", "+more=here"]),
    "hydra.searchpath in a file": (("conf", "searching"), None, ["+more=here"]),
    "override hydra/env": (("conf", "env"), None, []),
    "hydra/env on the command line": (FILES, None, ["hydra/env=prod"]),
    "callbacks inline": (("conf", "inline"), None, []),
    "callbacks of a group": (("conf", "grouped"), None, []),
    "callbacks of a group, in a sweep": (("conf", "grouped"), None, ["-m", "hydra.verbose=false"]),
    "a callback on the command line":
        (FILES, None, ["+hydra.callbacks.late={_target_: others.Mine}"]),
    "a callback called repro": (("conf", "named"), None, []),
    "an experiment": (FILES, None, ["+experiment=first"]),
    "experiments swept": (FILES, None, ["-m", "+experiment=first,second", "size=1,2"]),
    "a sweep in a file": (("conf", "sweep"), None, ["-m"]),
    "other groups of Hydra's":
        (FILES, None, ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra/help=default"]),
}
"""
FILES = {
    "conf/config.yaml": "defaults: [{db: small}, _self_]\nsize: 3\n",
    "conf/searching.yaml": "hydra: {searchpath: ['file://theirs']}\nsize: 3\n",
    "conf/env.yaml": "defaults: [{override hydra/env: prod}, _self_]\n",
    "conf/inline.yaml": "hydra: {callbacks: {mine: {_target_: others.Mine}}}\n",
    "conf/grouped.yaml": "defaults: [{override hydra/callbacks: mine}, _self_]\n"
    "hydra: {callbacks: {inline: {_target_: others.Mine}}}\n",
    "conf/named.yaml": "hydra: {callbacks: {repro: {_target_: others.Mine}}}\n",
    "conf/sweep.yaml": "hydra: {sweeper: {params: {size: '1,2'}}}\nsize: 3\n",
    "conf/db/small.yaml": "rows: 1\n",
    "conf/db/big.yaml": "defaults: [small]\nrows: 9\n",
    "conf/experiment/first.yaml": "# @package _global_\ndefaults: [{override /db: big}]\nsize: 5\n",
    "conf/experiment/second.yaml": "# @package _global_\n"
    "defaults: [{override /hydra/env: prod}]\nhydra: {job: {name: second}}\n",
    "conf/hydra/env/default.yaml": "job: {env_set: {FOO: main}}\n",
    "conf/hydra/env/prod.yaml": "# @package _global_\nhydra: {job: {env_set: {FOO: prod}}}\n",
    "conf/hydra/callbacks/mine.yaml": "first: {_target_: others.Mine}\n",
    "theirs/hydra/env/default.yaml": "# @package hydra.job\ndefaults: [extra]\n"
    "env_set: {FOO: theirs}\n",
    "theirs/hydra/env/extra.yaml": "# @package _global_\nhydra: {job: {name: renamed}}\n",
    "theirs/more/here.yaml": "x: 1\n",
    "others.py": OTHERS,
}
COMPOSED = """
import copy, json, sys, warnings
from pathlib import Path

if sys.argv.pop() == "without":
    sys.modules["hydra_plugins.torchrepro"] = None  # as if it were not installed
warnings.simplefilter("ignore")
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

Plugins.instance()  # imports plugins, some of which register configs at that moment
NONE = (None, None)
exec(Path("shapes.py").read_text())
composed = {}
for shape, ((path, name), prepare, words) in SHAPES.items():
    state = Singleton.get_state()
    if prepare:
        prepare()
    jobs = composed[shape] = []

    def task(config):
        config = {**config, "hydra": HydraConfig.get()}
        jobs.append(OmegaConf.to_container(OmegaConf.create(config), enum_to_str=True))

    sys.argv[1:] = [*words, "hydra.run.dir=out", "hydra.sweep.dir=out"]
    hydra.main(version_base="1.3", config_path=path and str(Path(path).resolve()),
               config_name=name)(task)()
    Singleton.set_state(state)
print()
print(json.dumps(composed))
"""


def remove_ours(job):
    """Remove our entries from a job's config; returns the callback, its index, and our sources."""
    hydra = job["hydra"]
    index = list(hydra["callbacks"]).index("torchrepro")
    sources = hydra["runtime"]["config_sources"]
    ours = [source for source in sources if source["schema"] == "torchrepro"]
    for source in ours:
        sources.remove(source)
    return hydra["callbacks"].pop("torchrepro"), index, len(ours)


CALLBACK = """
import torch
from hydra.experimental.callback import Callback

class Mine(Callback):
    def on_job_start(self, config, **kwargs):
        print("start", torch.are_deterministic_algorithms_enabled())

    def on_job_end(self, config, **kwargs):
        print("end", torch.are_deterministic_algorithms_enabled())
"""
APP = """
from inspect import signature

import hydra
import torch

WHITELIST = {"execution_whitelist": ("others.Mine",)}
ACCEPTED = WHITELIST if WHITELIST.keys() <= signature(hydra.main).parameters.keys() else {}

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME, **ACCEPTED)
def main(config):
    print("task", torch.are_deterministic_algorithms_enabled())

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_an_app_is_composed_as_without_torchrepro(write, answer_of):
    """The only differences are our callback, which is the first, and our source.

    With TORCHREPRO_HYDRA=0 there is no difference.
    """
    write({**FILES, "shapes.py": APPS, "compose.py": COMPOSED})
    installed, absent = (answer_of("compose.py", ours) for ours in ("with", "without"))
    switched_off = answer_of("compose.py", "with", env={"TORCHREPRO_HYDRA": "0"})
    ours = [remove_ours(job) for jobs in installed.values() for job in jobs]

    assert [shape for shape in absent if switched_off[shape] != absent[shape]] == []
    assert [shape for shape in absent if installed[shape] != absent[shape]] == []
    assert set(map(json.dumps, ours)) == {json.dumps([{"_convert_": "object"}, 0, 1])}
    assert min(map(len, absent.values())) > 0
    env_set = {shape: jobs[0]["hydra"]["job"]["env_set"] for shape, jobs in absent.items()}
    assert env_set["hydra/env/default before Hydra's"] == {"FOO": "theirs"}


def test_other_callbacks_run_under_the_profile(write, hydra_app, fork_python):
    """The profile is active before any other callback starts, until the last one has ended.

    This includes apps with a whitelist, if this Hydra has one, of classes that configs may create.
    """
    write(FILES)
    write({"others.py": CALLBACK})
    hydra_app(APP, FILES["conf/grouped.yaml"])
    single = fork_python("app.py", "+repro=debug-strict", env={"PYTHONHASHSEED": "0"})
    swept = fork_python("app.py", "-m", "+repro=debug-strict,seed-only", "hydra.sweep.dir=out")
    seen = ["start True"] * 2 + ["task True"] + ["end True"] * 2

    assert single.stdout.splitlines() == seen, single.stderr
    lines = [line for line in swept.stdout.splitlines() if "HYDRA" not in line]
    assert lines == seen + [line.replace("True", "False") for line in seen], swept.stderr
    assert "torchrepro.integrations" not in single.stderr + swept.stderr


PICKLES = """
import pickle, sys
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    with open("config.pickle", "wb") as file:
        pickle.dump(HydraConfig.instance().cfg, file)

if __name__ == "__main__":
    main()
"""
READS = """
import pickle, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchrepro":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
with open("config.pickle", "rb") as file:
    print(list(pickle.load(file).hydra.callbacks))
"""


def test_the_pickled_config_of_a_job_without_a_profile_needs_no_torchrepro(
    write, hydra_app, run_python, fork_python
):
    """A config that an app pickles can be loaded where torchrepro is not installed."""
    hydra_app(PICKLES, "hydra: {job: {chdir: false}}\n")
    write({"read.py": READS})
    pickled = fork_python("app.py")
    read = run_python("read.py")

    assert pickled.returncode == 0, pickled.stderr
    assert read.stdout.splitlines() == ["['torchrepro']"], read.stderr
