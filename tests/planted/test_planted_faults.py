"""Every planted fault is found where it was planted: step, phase, module, op, source line, kind."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrepro
from torchrepro.ground.console import as_text
from torchrepro.verdict.render import LINES, verdict_parts
from torchrepro.verdict.value import Kind

from .faults import (
    another_sign,
    before_module,
    changed,
    halved,
    in_batch,
    in_dataset,
    in_memory,
    kernel,
    one_ulp,
    permuted,
    swapped_rows,
    zero_of_another_sign,
)
from .programs import PROGRAMS, SAMPLES, WORDS, conv_net, line_of, texts, transformer

ABSENT = min(set(range(WORDS)) - set([*texts()][6].flatten().tolist()))
"""A word that the batch of step 6 does not have."""


def _words(training):
    return training.model.words.weight


def _absent_word_one_ulp(weight):
    one_ulp(weight, ABSENT * weight.shape[1])


def _weight(training):
    return training.model.layers[1].up.weight


def _adam_state(training, name="exp_avg"):
    return training.optimizer.state[training.model.layers[1].up.weight][name]


def _index_of_last(training):
    training.model.last = training.model.last[::-1]


def _scale(training):
    block = training.model.layers[2]
    block.scale = math.nextafter(block.scale, 1.0)


def _rate(training):
    training.optimizer.param_groups[0]["lr"] *= 1 + 2**-52


def _dropout(training):
    training.model.layers[1].dropout.p = 0.1


def _other_dropout(training):
    block = training.model.layers[1]

    def masked(hidden):
        return hidden * (torch.rand_like(hidden) > 0.1)  # mask

    block.dropout.forward = masked


# Program, fault, whether every input is read anew; then what the verdict has to say: step, phase,
# module, op, the comment that marks the line, kind, and words.
CHANGED = "something outside torch has changed it"
TABLE: dict[str, tuple[Any, ...]] = {
    "one ulp in a forward op of layer 3": (
        *(transformer(), kernel("gelu", 7, 3, one_ulp), False),
        *(7, "forward", "layers.3", "aten::gelu", "gelu", Kind.OUTPUTS, ""),
    ),
    "an operand one ulp off, no op added": (
        *(transformer(), before_module("layers.2.down", 5, one_ulp), False),
        *(5, "forward", "layers.2.down", "aten::addmm", "down", Kind.OUTPUTS, ""),
    ),
    "an operand one ulp off, every input read anew": (
        *(transformer(), before_module("layers.2.down", 5, one_ulp), True),
        *(5, "forward", "layers.2.down", "aten::addmm", "down", Kind.INPUT, CHANGED),
    ),
    "a number one ulp off": (
        *(transformer(), changed(_scale, 4), False),
        *(4, "forward", "layers.2", "aten::mul.Tensor", "scores", Kind.ARGUMENT, ""),
    ),
    "a weight written through numpy": (
        *(transformer(), in_memory(_weight, 6, halved), False),
        *(6, "forward", "layers.1.up", "aten::addmm", "gelu", Kind.INPUT, CHANGED),
    ),
    "a weight one ulp off, which the forward pass does not read": (
        *(transformer(), in_memory(_words, 6, _absent_word_one_ulp), False),
        *(6, "forward", "words", "aten::embedding", "words", Kind.INPUT, CHANGED),
    ),
    "a weight written through numpy before the first step": (
        *(transformer(), in_memory(_weight, 0, halved), False),
        *(0, "forward", "layers.1.up", "aten::addmm", "gelu", Kind.OUTPUTS, ""),
    ),
    "the same, every input read anew": (
        *(transformer(), in_memory(_weight, 0, halved), True),
        *(0, "forward", "layers.1.up", "aten::addmm", "gelu", Kind.INPUT, ""),
    ),
    "a running mean written through numpy": (
        *(conv_net(), in_memory(lambda its: its.model.second[1].running_mean, 3, permuted), False),
        *(3, "forward", "second.1", "aten::native_batch_norm", "pictures", Kind.INPUT, ""),
    ),
    "a constant index swapped in its tensor": (
        *(transformer(), in_memory(lambda its: its.model.order, 5, permuted), False),
        *(5, "forward", "Transformer", "aten::index.Tensor", "order", Kind.INPUT, ""),
    ),
    "the same index, every input read anew": (
        *(transformer(), in_memory(lambda its: its.model.order, 5, permuted), True),
        *(5, "forward", "Transformer", "aten::index.Tensor", "order", Kind.INPUT, ""),
    ),
    "a constant index swapped in the code": (
        *(transformer(), changed(_index_of_last, 5), False),
        *(5, "forward", "Transformer", "new tensor", "last", Kind.DATA, ""),
    ),
    "one ulp in a backward op of a layer": (
        # The third from the end is that of layer 1.
        *(transformer(), kernel("gelu_backward", 4, 2, one_ulp), False),
        *(4, "backward", "layers.1", "aten::gelu_backward", "gelu", Kind.OUTPUTS, ""),
    ),
    "one ulp in the optimizer, foreach": (
        *(transformer(), kernel("_foreach_addcdiv_.ScalarList", 6, 0, one_ulp), False),
        *(6, "optimizer", "", "aten::_foreach_addcdiv_.ScalarList", "AdamW", Kind.OUTPUTS, ""),
    ),
    "the state of a fused optimizer written through numpy": (
        *(transformer("fused"), in_memory(_adam_state, 6, halved), False),
        *(6, "optimizer", "", "aten::_fused_adamw_", "AdamW", Kind.INPUT, ""),
    ),
    "a learning rate one ulp off": (
        *(transformer("fused"), changed(_rate, 5), False),
        *(5, "optimizer", "", "AdamW.step()", "AdamW", Kind.ARGUMENT, ""),
    ),
    "samples swapped after the loader": (
        *(conv_net(), in_batch(0, 6, swapped_rows), False),
        *(6, "forward", "first.0", "aten::convolution", "pictures", Kind.OUTPUTS, ""),
    ),
    "samples swapped in the dataset": (
        *(conv_net(), in_dataset(4 * SAMPLES), False),
        *(0, "forward", "", "new tensor", "items", Kind.DATA, ""),
    ),
    "samples swapped in the dataset of a worker": (
        *(conv_net(workers=1), in_dataset(4 * SAMPLES), False),
        *(4, "data", "", "DataLoader", "loader", Kind.DATA, ""),
    ),
    "words swapped in a batch made by hand": (
        *(transformer(), in_batch(None, 6, swapped_rows), False),
        *(6, "forward", "", "new tensor", "by hand", Kind.DATA, ""),
    ),
    "a sign": (
        *(conv_net(), kernel("mean.dim", 3, 1, another_sign), False),
        *(3, "forward", "ConvNet", "aten::mean.dim", "mean", Kind.OUTPUTS, ""),
    ),
    "the sign of a zero": (
        *(conv_net(), kernel("relu", 3, 1, zero_of_another_sign), False),
        *(3, "forward", "second.2", "aten::relu", "pictures", Kind.OUTPUTS, ""),
    ),
    "permuted elements in the second backward pass of a step": (
        *(conv_net(), kernel("threshold_backward", 8, 2, permuted), False),
        *(8, "backward", "second.2", "aten::threshold_backward", "pictures", Kind.OUTPUTS, ""),
    ),
    "a dropout that is on in one run": (
        *(transformer(), changed(_dropout, 2), False),
        *(2, "forward", "layers.1.dropout", "aten::empty_like", "dropout", Kind.ONLY_ONE, ""),
    ),
    "a dropout of another make": (
        *(transformer(), changed(_other_dropout, 2), False),
        *(2, "forward", "layers.1.dropout", "aten::rand_like", "mask", Kind.ONLY_ONE, ""),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", TABLE, ids=lambda name: name.replace(" ", "-"))
def test_a_planted_fault_is_found_where_it_was_planted(name: str, tmp_path: Path) -> None:
    """The first divergence has the step, phase, module, op, source line and kind of the fault."""
    program, fault, detail, *where, mark, kind, what = TABLE[name]
    for run, harmful in (("well", False), ("ill", True)):
        with torchrepro.record(tmp_path / run, detail=detail):
            program(fault, harmful)
    verdict = torchrepro.compare(tmp_path / "well", tmp_path / "ill")
    first = verdict.first

    assert not verdict.same
    print(first.step, first.phase, first.module, first.op, first.source, first.kind, first.what)
    assert [first.step, first.phase, first.module, first.op] == where
    assert first.source == line_of(mark, __file__ if mark == "mask" else PROGRAMS)
    assert first.kind is kind
    assert what in first.what
    assert len(as_text(*verdict_parts(verdict)).splitlines()) <= LINES
