"""An evaluation repeats if its computation does, whatever weights were overwritten before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchrepro.verdict.render import short
from torchrepro.verification.verifier import verify

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_temporary")]

FIRST = """
import copy, numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
saved, data = torch.load("weights.pt"), torch.load("data.pt")
"""
BUILD = (
    "net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))  # init\n"
)
LOAD = "net.load_state_dict(saved)\n"
EVALUATE = "net.eval(); x, y = data['x'], data['y']\n"
PRINT = "with torch.no_grad(): print((net(x).argmax(1) == y).sum().item())\n"
PLAIN = BUILD + LOAD + EVALUATE + PRINT

EXACT = {
    "loaded": PLAIN,
    "assigned": PLAIN.replace("(saved)", "(saved, assign=True)"),
    "copied, merged, and in another precision": BUILD
    + "net = copy.deepcopy(net).double()\n"
    + "net.load_state_dict({**net.state_dict(), **saved}); net.float()\n"
    + EVALUATE
    + PRINT,
    "initialised by chains of ops": BUILD
    + "nn.init.orthogonal_(net[0].weight); nn.init.trunc_normal_(net[3].weight, std=0.02)\n"
    + "table = nn.Embedding(4, 8, padding_idx=0)\n"
    + "table.load_state_dict({'weight': torch.ones(4, 8)})\n"
    + LOAD
    + EVALUATE
    + "x = x + table(torch.tensor([0, 1])).mean()\n"
    + PRINT,
    "called before it is loaded": BUILD
    + "net.eval()(torch.ones(1, 8))\n"
    + LOAD
    + EVALUATE
    + PRINT,
    "in batches of a loader": BUILD
    + LOAD
    + EVALUATE
    + "with torch.no_grad():\n"
    + "    outputs = [net(x).numpy() for x, y in DataLoader(TensorDataset(x, y), batch_size=16)]\n"
    + "print(numpy.concatenate(outputs).mean())\n",
    "trained on": BUILD.replace("0.5", "0.0")
    + LOAD
    + "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    + "for rows in torch.arange(64).split(16):\n"
    + "    loss = nn.functional.cross_entropy(net(data['x'][rows]), data['y'][rows])\n"
    + "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n",
}
FAULTY = {
    "drops in evaluation": (PLAIN.replace("net.eval()", "net.train()"), "print("),
    "drops though it was told to evaluate": (
        BUILD + LOAD + EVALUATE + "x = nn.functional.dropout(x, 0.5).flatten(1)  # fault\n" + PRINT,
        "# fault",
    ),
    "adds noise": (
        BUILD
        + "table = nn.Embedding(4, 8, padding_idx=0)\n"
        + LOAD
        + EVALUATE
        + "x = (x + torch.randn_like(x)).view(64, 8)  # fault\n"
        + PRINT,
        "# fault",
    ),
    "adds noise of numpy": (
        BUILD
        + LOAD
        + EVALUATE
        + "x = x + torch.from_numpy(numpy.random.randn(64, 8)).float()  # fault\n"
        + PRINT,
        "# fault",
    ),
    "evaluates a sample": (
        BUILD
        + LOAD
        + EVALUATE
        + "rows = torch.randperm(64)[:32]  # fault\nx, y = x[rows], y[rows]\n"
        + PRINT,
        "# fault",
    ),
    "loads a part": (
        BUILD
        + "head = nn.Linear(3, 3)  # fault\n"
        + LOAD
        + EVALUATE
        + PRINT.replace("net(x)", "head(net(x))"),
        "# fault",
    ),
    "saves what it never loaded": (BUILD + "torch.save(net.state_dict(), 'new.pt')\n", "# init"),
    "prints what it never loaded": (BUILD + "print(net[0].weight)\n", "# init"),
    "shuffles": (
        BUILD
        + LOAD
        + EVALUATE
        + "for x, y in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):  # fault\n"
        + "    print(net(x).sum().item())\n",
        "# fault",
    ),
}


def _verify(text: str) -> object:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    torch.save(net.state_dict(), "weights.pt")
    torch.save({"x": torch.randn(64, 8), "y": torch.randint(0, 3, (64,))}, "data.pt")
    Path("evaluate.py").write_text(FIRST + text, encoding="utf-8")
    return verify(None, [sys.executable, "evaluate.py"], closer=False).verdict


def _line(text: str, end: str) -> str:
    lines = (FIRST + text).splitlines()
    return f"evaluate.py:{next(number for number, line in enumerate(lines, 1) if end in line)}"


@pytest.mark.parametrize("text", EXACT.values(), ids=EXACT)
def test_values_overwritten_before_any_read_are_only_noted(text: str) -> None:
    """Unseeded initial weights that are then loaded leave the runs the same."""
    verdict = _verify(text)

    assert verdict.same
    assert not verdict.reaches
    (note,) = (each for each in verdict.notes if each.startswith("random numbers drawn at"))
    assert _line(text, "# init") in note


@pytest.mark.parametrize(("text", "end"), FAULTY.values(), ids=FAULTY)
def test_a_draw_that_reaches_a_result_is_not_hidden_by_initialization(text: str, end: str) -> None:
    """The first difference is one that reaches a printed, saved or evaluated result."""
    verdict = _verify(text)

    assert not verdict.same
    assert short(verdict.first.source) == _line(text, end)
