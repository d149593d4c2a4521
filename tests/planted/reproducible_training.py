"""Programs that train the same weights in every run, by different methods."""

import contextlib
import pickle
from copy import deepcopy
from io import BytesIO

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

from .small_models import STEPS, Tensors, items_of, perceptron, trained, training


def becomes_nan() -> Tensors:
    model = perceptron()
    return trained(
        model, lambda step: (model(items_of(step)) / (0.0 if step == 2 else 1.0)).mean() * 0
    )


@training()
def half_nan(model: nn.Sequential, step: int) -> torch.Tensor:
    result = model(items_of(step))
    return torch.where(result > 0, result, (result - 5).sqrt()).nan_to_num(0.5).mean()


def dropout() -> Tensors:
    model = perceptron(nn.Dropout(0.5), nn.GELU(), nn.AlphaDropout(0.2))
    return trained(model)


@training()
def data_of_parameters(model: nn.Sequential, step: int) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.data.mul_(0.99)
        parameter.data = parameter.data.clone()
    return model(items_of(step)).square().mean()


@training(lambda: perceptron(nn.LayerNorm(12), nn.GELU()))
def autocast(model: nn.Sequential, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(items_of(step)).float().square().mean()


def _checkpointed(*, reentrant: bool) -> Tensors:
    model = perceptron(nn.Dropout(0.3), nn.Tanh())

    def loss(step: int) -> torch.Tensor:
        hidden = model[0](items_of(step))
        hidden = checkpoint(model[1:3], hidden, use_reentrant=reentrant)
        return model[3](hidden).square().mean()

    return trained(model, loss)


def checkpoints_reentrant() -> Tensors:
    return _checkpointed(reentrant=True)


def checkpoints_not_reentrant() -> Tensors:
    return _checkpointed(reentrant=False)


def lbfgs() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(items_of(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return list(model.parameters())


@training()
def exceptions(model: nn.Sequential, step: int) -> torch.Tensor:
    items = items_of(step)
    with contextlib.suppress(RuntimeError):
        model(items.t())
    if step == 2:
        with contextlib.suppress(RuntimeError):
            model(items).backward()  # of more than one number
    return model(items).square().mean()


def recurrent() -> Tensors:
    torch.manual_seed(12)
    model = nn.LSTM(6, 5, num_layers=2, dropout=0.2, batch_first=True)

    def loss(step: int) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            items_of(step, 3, 7, 6), torch.tensor([7, 4, 2]), batch_first=True
        )
        return model(packed)[0].data.square().mean()

    return trained(model, loss)


def attention() -> Tensors:
    torch.manual_seed(13)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    found = trained(model, lambda step: model(items_of(step, 2, 5, 8)).square().mean())
    model.eval()
    with torch.no_grad():
        return [*found, model(items_of(20, 2, 5, 8))]


@training()
def second_derivatives(model: nn.Sequential, step: int) -> torch.Tensor:
    items = items_of(step).requires_grad_()
    (slope,) = torch.autograd.grad(model(items).square().sum(), items, create_graph=True)
    return slope.square().mean()


def averaged_and_clipped() -> Tensors:
    model = perceptron()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    for step in range(STEPS):
        model(items_of(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        schedule.step()
        average.update_parameters(model)
    return [*model.parameters(), *average.parameters()]


def scaled_gradients() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for step in range(STEPS):
        loss = model(items_of(step)).square().mean() * 1e30
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return list(model.parameters())


def saved_and_loaded() -> Tensors:
    model = perceptron()
    trained(model, lambda step: model(items_of(step)).mean())
    held = BytesIO()
    torch.save(model.state_dict(), held)
    held.seek(0)
    other = deepcopy(model)
    other.load_state_dict(torch.load(held))
    return trained(other, lambda step: other(items_of(step)).mean())


def gradients_in_hooks() -> Tensors:
    model = nn.utils.parametrizations.weight_norm(perceptron()[0])
    for parameter in model.parameters():
        parameter.register_hook(lambda slope: slope * 0.5)
    model.register_full_backward_hook(
        lambda _module, slopes, _out: (slopes[0],) if slopes[0] is None else None
    )
    return trained(model)


def two_models_in_turns() -> Tensors:
    one, other = perceptron(), nn.Linear(3, 6)
    optimizers = [torch.optim.RMSprop(model.parameters(), 0.01) for model in (one, other)]
    for step in range(STEPS):
        hidden = one(items_of(step))
        hidden.square().mean().backward()
        optimizers[0].step()
        (other(hidden.detach()) - 1).abs().mean().backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [*one.parameters(), *other.parameters()]


def groups_changed_by_step() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}], 0.01)

    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 0.01 / (step + 2), (0.9, 0.99 + step / 1000)
        if step == 1:
            optimizer.add_param_group({"params": model[2].parameters(), "weight_decay": 0.1})

    return trained(model, optimizer=optimizer, after_step=change)


def without_an_optimizer() -> Tensors:
    model = perceptron()
    for step in range(STEPS):
        model(items_of(step)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return list(model.parameters())


@torch.library.custom_op("torchrepro_tests::smoothed", mutates_args=())
def smoothed(items: torch.Tensor) -> torch.Tensor:
    """Compute in numpy, which a recording does not observe."""
    return torch.from_numpy(np.arctan(items.detach().numpy()))


def _keep_items(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _smoothed_backward(ctx, slope: torch.Tensor) -> torch.Tensor:
    (items,) = ctx.saved_tensors
    return slope / (1 + items.square())


smoothed.register_autograd(_smoothed_backward, setup_context=_keep_items)


def ops_of_its_own() -> Tensors:
    model = perceptron()
    return trained(model, lambda step: smoothed(model(items_of(step))).square().mean())


def branches_by_results() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for step in range(3 * STEPS):
        loss = model(items_of(step)).square().mean()
        if loss.item() < 0.1:
            break
        (loss * 2 if loss > 0.3 else loss.sqrt()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    return list(model.parameters())


def written_before_it_is_read() -> Tensors:
    model, held = perceptron(), torch.empty(8, 6)

    def loss(step: int) -> torch.Tensor:
        items, rows = items_of(step), torch.empty(8, 6)
        for place in range(8):
            rows[place] = items[place]
        torch.sin(rows, out=held)
        new = rows.new_empty(8, 6)
        new[:4], new[4:] = held[4:], held[:4]
        new[new > 0.5] = torch.tensor(0.5)
        return model(new).square().mean()

    return trained(model, loss)


@training()
def numbers_of_python(model: nn.Sequential, step: int) -> torch.Tensor:
    rows = [[(row * step + column) / 7 for column in range(6)] for row in range(8)]
    scale = torch.as_tensor(1 / (step + 3), dtype=torch.float64)
    return (model(torch.tensor(rows)) * scale).square().mean()


@training()
def pickled_in_memory(model: nn.Sequential, step: int) -> torch.Tensor:
    items, words = pickle.loads(pickle.dumps((items_of(step), {"step": step})))
    other = pickle.loads(pickle.dumps(model))
    return model(items + words["step"]).square().mean() + other(items).mean().detach()
