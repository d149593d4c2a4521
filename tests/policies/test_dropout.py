"""`dropout: zero`: torch's dropout ops are the identity, for whoever calls them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout as imported_before

import torchrepro

X = torch.ones(64, 8)
SEQUENCE = torch.ones(4, 6, 8)


ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
ENCODER = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.5)
RECURRENT = {
    kind: getattr(nn, kind)(8, 8, num_layers=3, dropout=0.5) for kind in ("LSTM", "GRU", "RNN")
}


def _attention(*, need_weights: bool) -> torch.Tensor:
    return ATTENTION(SEQUENCE, SEQUENCE, SEQUENCE, need_weights=need_weights)[0]


ENTRY_POINTS: dict[str, Callable[[], torch.Tensor]] = {
    "F.dropout": lambda: functional.dropout(X),
    "F.dropout by keyword": lambda: functional.dropout(input=X, p=0.3),
    "imported before": lambda: imported_before(X),
    "F.dropout1d": lambda: functional.dropout1d(X.view(8, 8, 8)),
    "F.dropout2d": lambda: functional.dropout2d(X.view(2, 4, 8, 8)),
    "F.dropout3d": lambda: functional.dropout3d(X.view(1, 1, 8, 8, 8)),
    "F.alpha_dropout": lambda: functional.alpha_dropout(X, training=True),
    "F.feature_alpha_dropout": lambda: functional.feature_alpha_dropout(X, training=True),
    "nn.Dropout": lambda: nn.Dropout(0.5)(X),
    "nn.Dropout in place": lambda: nn.Dropout(0.5, inplace=True)(X.clone()),
    "nn.AlphaDropout": lambda: nn.AlphaDropout(0.5)(X),
    "torch.dropout": lambda: torch.dropout(X, 0.5, train=True),
    "torch.ops.aten.dropout": lambda: torch.ops.aten.dropout(X, 0.5, True),
    "nn.LSTM": lambda: RECURRENT["LSTM"](SEQUENCE)[0],
    "nn.GRU": lambda: RECURRENT["GRU"](SEQUENCE)[0],
    "nn.RNN": lambda: RECURRENT["RNN"](SEQUENCE)[0],
    "attention with weights": lambda: _attention(need_weights=True),
    "attention without weights": lambda: _attention(need_weights=False),
    "transformer layer": lambda: ENCODER(SEQUENCE),
}


def _drops(call: Callable[[], torch.Tensor]) -> bool:
    """Whether the result of `call` depends on the seed."""
    results = []
    for seed in range(6):
        torch.manual_seed(seed)
        results.append(call().detach().clone())
    return not all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_drops_before_and_after_and_not_in_between(name: str) -> None:
    """Under the policy no entry point depends on the seed; before and after, each does."""
    call = ENTRY_POINTS[name]

    assert _drops(call)
    with torchrepro.apply({"dropout": "zero"}):
        assert not _drops(call)
    assert _drops(call)


def test_gradients_are_those_of_the_identity() -> None:
    """Backward through a zeroed dropout passes gradients on unchanged."""
    x = X.clone().requires_grad_()
    with torchrepro.apply({"dropout": "zero"}):
        functional.dropout(x, 0.9).mul(3).sum().backward()

    assert torch.equal(torch.full_like(X, 3.0), x.grad)


def test_gradients_can_be_differentiated_again() -> None:
    """Double backward through zeroed dropout, rrelu and `native_dropout` is exact."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64, requires_grad=True)

    def through(values: torch.Tensor) -> torch.Tensor:
        kept = torch.native_dropout(functional.dropout(values.sin()), 0.5, True)[0]
        return functional.rrelu(kept, training=True) ** 3

    with torchrepro.apply({"dropout": "zero"}):
        assert torch.autograd.gradcheck(through, x)
        assert torch.autograd.gradgradcheck(through, x)


def test_a_probability_out_of_range_is_refused_as_ever() -> None:
    """What torch refuses without the policy it refuses under it."""
    with torchrepro.apply({"dropout": "zero"}), pytest.raises((ValueError, RuntimeError)):
        torch.dropout(X, 1.5, train=True)


def test_evaluation_costs_and_changes_nothing() -> None:
    """Outside of training the very input comes back, as from torch's own dropout."""
    x = X.clone()
    with torchrepro.apply({"dropout": "zero"}):
        assert functional.dropout(x, 0.5, training=False).data_ptr() == x.data_ptr()
        assert nn.Dropout().eval()(x).data_ptr() == x.data_ptr()


def test_writing_to_the_result_leaves_the_input_alone() -> None:
    """The result of a zeroed dropout is no alias of its input."""
    x = X.clone()
    with torchrepro.apply({"dropout": "zero"}):
        functional.dropout(x).add_(1)

    assert torch.equal(X, x)


def test_modules_stay_in_training_mode() -> None:
    """Zeroing dropout does not switch a model to evaluation: batch norm keeps updating."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    with torchrepro.apply({"dropout": "zero"}):
        model(torch.randn(64, 8))

    assert model.training
    assert model[0].num_batches_tracked == 1


def test_keep_leaves_dropout_alone() -> None:
    """`dropout: keep` changes nothing."""
    with torchrepro.apply({"dropout": "keep"}) as applied:
        assert _drops(ENTRY_POINTS["F.dropout"])

    assert applied.report["dropout"].outcome == "unchanged"
