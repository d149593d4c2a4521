"""Twenty small programs that resume exactly, and twenty faults in how programs resume.

A program is a loop in which each batch changes some state. `kept` is the state in its checkpoint:
a name, the saved value, and the statement that restores it. A fault replaces that statement.
"""

from __future__ import annotations

from textwrap import indent
from typing import NamedTuple

_HEAD = """
import copy, os, random
from collections import deque
import numpy as np
import numpy.random
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0); random.seed(0); np.random.seed(0)
x = torch.randn(24, 4, 3)
net = torch.nn.Linear(3, 2)
"""

_LOOP = """
first = 0
if os.path.exists("c.pt"):
    saved = torch.load("c.pt", weights_only=False)
    first = saved["i"]
{restore}
for i in range(first, {last}):
{body}
    if i + 1 in {saves}:
        torch.save({{"i": i + 1, {kept}}}, "c.pt")
"""

_NET = ("net", "net.state_dict()", "net.load_state_dict(saved['net'])")
_OPT = ("opt", "opt.state_dict()", "opt.load_state_dict(saved['opt'])")
_ADAM = "opt = torch.optim.Adam(net.parameters(), 0.01)"
_SGD = "opt = torch.optim.SGD(net.parameters(), 0.1)"
_STEP = "opt.zero_grad(); loss.backward(); opt.step()"
_PLAIN = f"loss = net(x[i]).square().mean(); {_STEP}"


class Program(NamedTuple):
    """A loop that resumes exactly."""

    setup: str
    body: str
    kept: tuple[tuple[str, str, str], ...]
    saves: tuple[int, ...] = (6,)
    last: int = 12
    loop: str = _LOOP

    def text(self, fault: str = "", instead: str = "pass") -> str:
        """Return the program; with a fault, what restores `fault` is another statement."""
        restore = "\n".join(instead if name == fault else how for name, _, how in self.kept)
        kept = ", ".join(f"{name!r}: {what}" for name, what, _ in self.kept)
        body = indent(self.body.strip("\n"), "    ")
        names = {"restore": indent(restore, "    "), "body": body, "kept": kept}
        return f"{_HEAD}{self.setup}\n{self.loop.format(saves=self.saves, last=self.last, **names)}"


_WINDOW = """
net(x[i]).square().mean().backward()
if i % 4 == 3:
    opt.step(); opt.zero_grad()
"""

_GRADIENTS = (
    "gradients",
    "[p.grad for p in net.parameters()]",
    "for p, g in zip(net.parameters(), saved['gradients']): p.grad = g",
)

_SCALED = """
loss = net(x[i]).square().mean()
opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
"""
_LARGE = _SCALED.replace("net(x[i])", "(64 * net(x[i]))")


def _scaler(scale: str, more: str = "") -> str:
    return f"{_ADAM}; scaler = torch.amp.GradScaler('cpu', init_scale={scale}{more})"


_SCALER = ("scaler", "scaler.state_dict()", "scaler.load_state_dict(saved['scaler'])")
_NOISY = f"loss = (net(x[i]) + NOISE).square().mean(); {_STEP}"

_EMA = f"""
class Ema:
    def __init__(self):
        self.shadow, self.updates = copy.deepcopy(net.state_dict()), 0

    def update(self):
        self.updates += 1
        decay = min(0.9, self.updates / (self.updates + 4))
        for name, value in net.state_dict().items():
            self.shadow[name].lerp_(value, 1 - decay)

ema = Ema()
{_SGD}
"""

_EPOCHS = """
first = 0
if os.path.exists("c.pt"):
    saved = torch.load("c.pt", weights_only=False)
    first = saved["i"]
{restore}
i = first
for epoch in range(first // 6, 3):
    start_of_epoch()
    for position, (batch,) in enumerate(loader):
        if 6 * epoch + position < i:
            continue
{body}
        i += 1
        if i in {saves}:
            torch.save({{"i": i, {kept}}}, "c.pt")
"""
_BATCH = indent(f"loss = net(batch).square().mean(); {_STEP}", "    ")
_DATA = "data = TensorDataset(torch.randn(12, 3))"

EXACT = {
    "accumulation": Program(_ADAM, _WINDOW, (_NET, _OPT, _GRADIENTS), (6, 13), 20),
    "accumulation and a scheduler": Program(
        f"{_SGD}; scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)",
        f"{_WINDOW}    scheduler.step()",
        (
            *(_NET, _OPT, _GRADIENTS),
            ("s", "scheduler.state_dict()", "scheduler.load_state_dict(saved['s'])"),
        ),
        (11,),
        20,
    ),
    "begins at the window again": Program(
        _ADAM, _WINDOW, (_NET, _OPT, ("first", "i", "first = first // 4 * 4")), (6,), 16
    ),
    "skipped steps": Program(_scaler("2.0**127"), _LARGE, (_NET, _OPT, _SCALER), (2, 6), 20),
    "every step skipped": Program(
        _scaler("2.0**127"), _LARGE.replace("64", "2**14"), (_NET, _OPT, _SCALER), (4,), 8
    ),
    "growing scale": Program(
        _scaler("8.0", ", growth_interval=4"), _SCALED, (_NET, _OPT, _SCALER), (6,), 12
    ),
    "two optimizers": Program(
        f"{_ADAM}; other = torch.nn.Linear(2, 1)\n"
        "opt2 = torch.optim.Adam(other.parameters(), 0.01)",
        f"loss = other(net(x[i]).detach()).square().mean()\n"
        "opt2.zero_grad(); loss.backward(); opt2.step()\n"
        f"loss = net(x[i]).square().mean() + other(net(x[i])).mean(); {_STEP}",
        (
            *(_NET, _OPT),
            ("other", "other.state_dict()", "other.load_state_dict(saved['other'])"),
            ("opt2", "opt2.state_dict()", "opt2.load_state_dict(saved['opt2'])"),
        ),
    ),
    "scheduler": Program(
        f"{_SGD}; scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)",
        f"{_PLAIN}; scheduler.step()",
        (
            *(_NET, _OPT),
            ("s", "scheduler.state_dict()", "scheduler.load_state_dict(saved['s'])"),
        ),
    ),
    "torch's generator": Program(
        _SGD,
        _NOISY.replace("NOISE", "torch.randn(2)"),
        (_NET, ("rng", "torch.get_rng_state()", "torch.set_rng_state(saved['rng'])")),
    ),
    "numpy's generator": Program(
        _SGD,
        _NOISY.replace("NOISE", "np.random.rand()"),
        (_NET, ("rng", "np.random.get_state()", "np.random.set_state(saved['rng'])")),
    ),
    "python's generator": Program(
        _SGD,
        _NOISY.replace("NOISE", "random.random()"),
        (_NET, ("rng", "random.getstate()", "random.setstate(saved['rng'])")),
    ),
    "a generator of its own": Program(
        f"own = torch.Generator().manual_seed(3); {_SGD}",
        _NOISY.replace("NOISE", "torch.randn(2, generator=own)"),
        (_NET, ("rng", "own.get_state()", "own.set_state(saved['rng'])")),
    ),
    "EMA": Program(
        _EMA,
        f"{_PLAIN}; ema.update()",
        (_NET, ("ema", "vars(ema)", "vars(ema).update(saved['ema'])")),
    ),
    "replay memory": Program(
        f"memory = deque(maxlen=8); {_SGD}",
        "memory.append(x[i].numpy() + i)\n"
        "batch = torch.tensor(np.stack(random.choices(memory, k=2)))\n"
        f"loss = net(batch).square().mean(); {_STEP}",
        (
            _NET,
            ("memory", "[*memory]", "memory.extend(saved['memory'])"),
            ("rng", "random.getstate()", "random.setstate(saved['rng'])"),
        ),
    ),
    "best only": Program(
        f"best = 1e9; {_ADAM}",
        f"{_PLAIN}\nvalue = net(x[0]).square().mean().item()\n"
        "is_best, best = value < best, min(best, value)",
        (_NET, _OPT, ("best", "best", "best = saved['best']")),
        loop=_LOOP.replace("if i + 1 in {saves}", "if is_best and i + 1 < 10"),
    ),
    "rotating checkpoints": Program(
        _ADAM,
        f"{_PLAIN}\nif os.path.exists(f'step_{{i - 7}}.pt'): os.remove(f'step_{{i - 7}}.pt')",
        (_NET, _OPT),
        (4, 8, 12),
        18,
        _LOOP.replace('if os.path.exists("c.pt")', "if files")
        .replace('"c.pt"', "files[-1]", 1)
        .replace('"c.pt"', "f'step_{{i + 1}}.pt'")
        .replace(
            "first = 0",
            "first = 0\nfiles = [f'step_{{n}}.pt' for n in range(20) "
            "if os.path.exists(f'step_{{n}}.pt')]",
            1,
        ),
    ),
    "order of a loader": Program(
        f"{_DATA}; order = torch.Generator().manual_seed(1)\n"
        f"loader = DataLoader(data, 2, shuffle=True, generator=order); {_SGD}\n"
        "def start_of_epoch():\n    global began\n    began = order.get_state()",
        _BATCH,
        (_NET, ("order", "began", "order.set_state(saved['order'])")),
        (4, 8),
        loop=_EPOCHS,
    ),
    "epochs of a sampler": Program(
        f"{_DATA}; sampler = DistributedSampler(data, 1, 0)\n"
        f"loader = DataLoader(data, 2, sampler=sampler); {_SGD}\n"
        "def start_of_epoch(): sampler.set_epoch(epoch)",
        _BATCH,
        (_NET, ("epoch", "epoch", "pass")),
        (8,),
        loop=_EPOCHS,
    ),
    "a closure": Program(
        "opt = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)",
        "def closure():\n    opt.zero_grad(); loss = net(x[i]).square().mean(); loss.backward()\n"
        "    return loss\nopt.step(closure)",
        (_NET, _OPT),
        (3,),
        8,
    ),
    "no backward pass": Program(
        "velocity = [torch.zeros_like(p) for p in net.parameters()]; "
        "opt = torch.optim.SGD(net.parameters(), 0.1)",
        "its = torch.autograd.grad(net(x[i]).square().mean(), [*net.parameters()])\n"
        "for p, g, v in zip(net.parameters(), its, velocity): p.grad = v.mul_(0.9).add_(g) + 0\n"
        "opt.step()",
        (
            _NET,
            (
                *("velocity", "velocity"),
                "for v, its in zip(velocity, saved['velocity']): v.copy_(its)",
            ),
        ),
    ),
}
"""Programs that resume exactly, by what is particular of each."""


class Fault(NamedTuple):
    """A program with a fault, and words of the answer that name it."""

    program: str
    forgotten: str  # what it keeps and does not restore
    words: str
    instead: str = "pass"


FAULTS = {
    "gradients": Fault("accumulation", "gradients", "not restored: gradient of weight, bias"),
    "a scheduler beside gradients": Fault(
        "accumulation and a scheduler", "s", "not restored: scheduler StepLR: last_epoch 2 became 0"
    ),
    "moments": Fault("accumulation", "opt", "not restored: optimizer step"),
    "a scale that fell": Fault("skipped steps", "scaler", "not restored: scaler GradScaler: scale"),
    "a scale where all is skipped": Fault(
        "every step skipped", "scaler", "not restored: scaler GradScaler: scale"
    ),
    "a growth tracker": Fault(
        "growing scale", "scaler", "not restored: scaler GradScaler: scale 16.0 became 8.0"
    ),
    "the second optimizer": Fault("two optimizers", "opt2", "optimizer step: of Linear.weight"),
    "a scheduler": Fault(
        "scheduler", "s", "not restored: scheduler CosineAnnealingLR: last_epoch 6 became 0"
    ),
    "a scheduler that steps once more": Fault(
        *("scheduler", "s", "restored: scheduler CosineAnnealingLR at train.py:"),
        "scheduler.load_state_dict(saved['s'])\nscheduler.step()",
    ),
    "torch's generator": Fault("torch's generator", "rng", "not restored: generator torch"),
    "a generator that is drawn from": Fault(
        *("torch's generator", "rng", "restored: generator torch at train.py:"),
        "torch.set_rng_state(saved['rng'])\ntorch.randn(3)",
    ),
    "numpy's generator": Fault("numpy's generator", "rng", "not restored: generator numpy"),
    "python's generator": Fault("python's generator", "rng", "not restored: generator python"),
    "python's generator drawn from": Fault(
        *("python's generator", "rng", "restored: generator python at train.py:"),
        "random.setstate(saved['rng'])\nrandom.shuffle([1, 2, 3])",
    ),
    "a generator of its own": Fault("a generator of its own", "rng", "not restored: generator own"),
    "EMA": Fault("EMA", "ema", "weights ema.shadow"),
    "the counter of EMA": Fault(
        *("EMA", "ema", "ema.updates 6 became 0"), "ema.shadow = saved['ema']['shadow']"
    ),
    "replay memory": Fault("replay memory", "memory", "len(memory) 7 became 1"),
    "the order of a loader": Fault("order of a loader", "order", "generator order"),
    "the moments of the best": Fault("best only", "opt", "not restored: optimizer step"),
}
