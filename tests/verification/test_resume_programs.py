"""Programs that resume exactly agree, and for each fault the lost state is named."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from torchrepro.verification.relations.relation import relate
from torchrepro.verification.runner import RunRequest

from .resume_programs import EXACT, FAULTS

pytestmark = [pytest.mark.usefixtures("own_temporary", "forked"), pytest.mark.slow]


@pytest.mark.parametrize("name", EXACT)
def test_a_program_that_resumes_exactly_agrees(name: str) -> None:
    """Wherever its checkpoint is saved, and batches are compared."""
    Path("train.py").write_text(EXACT[name].text(), encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    assert (related.status, related.unknown) == (0, "")
    assert all(variant.verdict.compared.steps > 0 for variant in related.variants)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_the_lost_state_is_named(name: str) -> None:
    """The state named first is the one that the program lost."""
    program, forgotten, words, instead = FAULTS[name]
    Path("train.py").write_text(EXACT[program].text(forgotten, instead), encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    lost = [
        f"{'restored' if each.restored else 'not restored'}: {each}"
        for each in related.deciding.not_restored
    ]
    advice = related.verdict.advice
    assert related.status == 1
    assert words in (lost[0] if lost else advice.cause)


KEPT = {
    "a list of losses": ("memory = []", "memory.append(loss.item())  # here", "sum(memory[-3:])"),
    "a counter": ("seen = 0", "seen += 1  # here", "seen"),
    "an attribute": ("its = Its()", "its.seen = its.seen + 1  # here", "its.seen"),
    "what a function returns": ("seen = [0]", "value = counted(seen)  # here", "value"),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_line_that_reads_the_programs_own_state_is_named(name: str) -> None:
    """If all known state was restored, it is the line that reads a different own value."""
    begins, changes, scale = KEPT[name]
    text = f"""
        import os
        import torch
        class Its:
            seen = 0
        def counted(numbers):
            numbers[0] += 1
            return numbers[0]
        torch.manual_seed(0)
        data = torch.randn(8, 8, 4)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {begins}
        first = 0
        if os.path.exists("state.pt"):
            first, weights = torch.load("state.pt")
            model.load_state_dict(weights)
        for step in range(8):
            if step < first:
                continue
            loss = model(data[step]).square().mean()
            {changes}
            optimizer.zero_grad()
            (loss * ({scale})).backward()
            optimizer.step()
            if step == 3:
                torch.save((step + 1, model.state_dict()), "state.pt")
        """
    lines = textwrap.dedent(text).splitlines()
    Path("train.py").write_text("\n".join(lines), encoding="utf-8")
    here = next(number for number, line in enumerate(lines, 1) if "# here" in line)

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    assert "state that the program keeps itself" in related.verdict.advice.cause
    assert related.verdict.origin.where == f"{Path.cwd()}/train.py:{here}"
    assert f"train.py:{here} " in str(related)


def test_a_newer_checkpoint_that_was_not_used_is_named() -> None:
    """A program that reads its first checkpoint agrees, and the repeated steps are reported."""
    text = EXACT["rotating checkpoints"].text().replace("files[-1]", "files[0]")
    text = text.replace("step_{i - 7}", "step_{i - 99}")
    Path("train.py").write_text(text, encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    newer = "resumed from step_4.pt; step_12.pt is newer: 8 steps are done twice"
    assert related.status == 0
    assert [newer in variant.note for variant in related.variants] == [False, True]


def test_there_is_no_answer_if_no_checkpoint_was_restored() -> None:
    """No checkpoint was opened, and no parameter has its value from any of several."""
    text = EXACT["rotating checkpoints"].text()
    Path("train.py").write_text(text, encoding="utf-8")
    anew = text.replace("if files", "if 0").replace("range(first", "range(9")
    Path("anew.py").write_text(anew, encoding="utf-8")
    resume = f"{sys.executable} anew.py {{checkpoint}}"

    related = relate("resume", RunRequest([sys.executable, "train.py"]), resume_command=resume)

    assert related.variants[1].status == 4
    assert "no parameter has its value from" in related.variants[1].unknown


def test_no_line_says_that_nothing_later_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compared by their final state, so nothing is known about ops that differ later."""
    Path("train.py").write_text(EXACT["scheduler"].text("s"), encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    monkeypatch.setenv("TORCHREPRO_VERBOSE", "1")
    assert related.status == 1
    assert "nothing later differs" not in str(related)


def test_a_draw_after_restoring_is_named_if_nothing_else_draws() -> None:
    """The generator is restored, then the data is drawn from it: both lines are named."""
    data = "x = torch.randn(24, 4, 3)\n"
    head, loop = EXACT["torch's generator"].text().replace(data, "").split("for i in")
    text = f"{head}{data}for i in{loop}".replace("torch.randn(2)", "1")
    Path("train.py").write_text(text, encoding="utf-8")
    lines = text.splitlines()
    restored, drawn = (
        next(n for n, line in enumerate(lines, start=1) if word in line)
        for word in ("set_rng_state", "x = ")
    )

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    (lost,) = related.deciding.not_restored
    assert (lost.name, lost.restored) == ("torch", f"train.py:{restored}")
    assert lost.what == f"then drawn from at train.py:{drawn} before the first batch"


def test_a_later_draw_is_not_the_cause_of_the_first_difference() -> None:
    """A lost generator that is first drawn from three steps later is not named."""
    momentum = "opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)"
    drawn = "noise = random.random() if i == 9 else 0.0"
    body = f"{drawn}; loss = (net(x[i]) + noise).square().mean()"
    kept = EXACT["accumulation"].kept[:2]
    program = EXACT["scheduler"]._replace(
        setup=momentum, body=f"{body}; opt.zero_grad(); loss.backward(); opt.step()", kept=kept
    )
    Path("train.py").write_text(program.text("opt"), encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    (lost,) = related.deciding.not_restored
    assert str(lost) == "optimizer momentum_buffer: of weight, bias"


SAMPLES = """
import os, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    level = 0.0
    def __len__(self):
        return 8
    def __getitem__(self, i):
        {sample}
class Order(torch.utils.data.Sampler):
    first = 0
    def __iter__(self):
        yield from [*range(8)][self.first :]
    def __len__(self):
        return 8
torch.manual_seed(0)
net, data, order = torch.nn.Linear(1, 1), Rows(), Order()
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
own = torch.Generator()
options = dict(num_workers=1, sampler=order, generator=own, persistent_workers={lives_on})
loader = DataLoader(data, 2, **options)
i = 0
if os.path.exists("c.pt"):
    saved = torch.load("c.pt")
    i = saved["i"]
    net.load_state_dict(saved["net"])
    {restore}
for epoch in range(i // 4, 3):
    order.first = i % 4 * 2
    own.manual_seed(epoch)
    {each_epoch}
    for batch in loader:
        loss = net(batch).square().mean()
        opt.zero_grad(); loss.backward(); opt.step()
        i += 1
        if i == {saved}:
            torch.save(dict(i=i, net=net.state_dict(), opt=opt.state_dict()), "c.pt")
"""
DRAWN = "return torch.tensor([float(i)]) + torch.rand(1)"
SET = "return torch.tensor([float(i)]) + self.level"
OPTIMIZER = "opt.load_state_dict(saved['opt'])"
BY_WORKERS = ["generator torch of the workers: drawn from at train.py:9"]
BY_PERSISTENT = ["generator torch of the persistent workers: drawn from at train.py:9"]


@pytest.mark.parametrize(
    ("sample", "lives_on", "saved", "each_epoch", "restore", "named"),
    [
        (DRAWN, True, 4, "pass", OPTIMIZER, BY_PERSISTENT),
        (DRAWN, False, 6, "pass", OPTIMIZER, BY_WORKERS),
        (DRAWN, False, 6, "pass", "pass", BY_WORKERS),
        (SET, False, 4, "data.level += 1.0", OPTIMIZER, []),
        (SET, False, 6, "order.first = 0", OPTIMIZER, ["batch 3 of its epoch became batch 1"]),
    ],
    ids=["workers that live on", "within an epoch", "the optimizer as well", "an epoch", "a place"],
)
def test_only_the_reason_why_a_batch_differs_is_named(
    sample: str, lives_on: bool, saved: int, each_epoch: str, restore: str, named: list[str]
) -> None:
    """Other samples are due to the loader's position; other values of them are due to draws."""
    text = SAMPLES.format(
        sample=sample, lives_on=lives_on, saved=saved, each_epoch=each_epoch, restore=restore
    )
    Path("train.py").write_text(text, encoding="utf-8")

    related = relate("resume", RunRequest([sys.executable, "train.py"]))

    lost = [str(each) for each in related.deciding.not_restored]
    assert related.status == 1
    assert [each.rpartition(": ")[2] if "epoch" in each else each for each in lost] == named
