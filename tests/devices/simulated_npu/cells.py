"""The fused cell of LSTM, which torch has for accelerators only."""

from typing import Any

import torch

Some = torch.Tensor | None


def _sum(*parts: Some) -> torch.Tensor:
    present = [part for part in parts if part is not None]
    return torch.stack(torch.broadcast_tensors(*present)).sum(0)


def _over_batch(grad: torch.Tensor, has_bias: bool) -> Some:
    return grad.sum(0) if has_bias else None


def _lstm(
    from_input: torch.Tensor,
    from_hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: Some = None,
    hidden_bias: Some = None,
) -> tuple[torch.Tensor, ...]:
    gates = _sum(from_input, from_hidden, input_bias, hidden_bias)
    take, keep, new, show = gates.chunk(4, 1)
    take, keep, new, show = take.sigmoid(), keep.sigmoid(), new.tanh(), show.sigmoid()
    after = keep * cell + take * new
    return show * after.tanh(), after, torch.cat((take, keep, new, show), 1)


def _lstm_backward(
    grad_hidden: Some,
    grad_cell: Some,
    cell: torch.Tensor,
    after: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[Some, ...]:
    take, keep, new, show = workspace.chunk(4, 1)
    shown = after.tanh()
    hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    flow = _sum(grad_cell, hidden * show * (1 - shown**2))
    grad = torch.cat(
        (
            flow * new * take * (1 - take),
            flow * cell * keep * (1 - keep),
            flow * take * (1 - new**2),
            hidden * shown * show * (1 - show),
        ),
        1,
    )
    return grad, flow * keep, _over_batch(grad, has_bias)


CELL_KERNELS: dict[str, Any] = {
    "aten::_thnn_fused_lstm_cell": _lstm,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
}
