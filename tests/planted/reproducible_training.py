"""Programs that train the same weights in every run, each in a way of its own."""

import contextlib
from copy import deepcopy
from io import BytesIO

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .small_models import STEPS, Tensors, items_of, perceptron, trained


def becomes_nan() -> Tensors:
    model = perceptron()
    return trained(
        model, lambda step: (model(items_of(step)) / (0.0 if step == 2 else 1.0)).mean() * 0
    )


def half_nan() -> Tensors:
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        result = model(items_of(step))
        return torch.where(result > 0, result, (result - 5).sqrt()).nan_to_num(0.5).mean()

    return trained(model, loss)


def dropout() -> Tensors:
    model = perceptron(nn.Dropout(0.5), nn.GELU(), nn.AlphaDropout(0.2))
    return trained(model, lambda step: model(items_of(step)).square().mean())


def workers() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(8)
    data = TensorDataset(items_of(0, 32, 6), items_of(1, 32, 3))
    for items, wanted in DataLoader(data, batch_size=8, shuffle=True, num_workers=2):
        functional.mse_loss(model(items), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def data_of_parameters() -> Tensors:
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
            parameter.data = parameter.data.clone()
        return model(items_of(step)).square().mean()

    return trained(model, loss)


def autocast() -> Tensors:
    model = perceptron(nn.LayerNorm(12), nn.GELU())

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(items_of(step)).float().square().mean()

    return trained(model, loss)


def checkpointed(*, reentrant: bool) -> Tensors:
    model = perceptron(nn.Dropout(0.3), nn.Tanh())

    def loss(step: int) -> torch.Tensor:
        hidden = model[0](items_of(step))
        hidden = checkpoint(model[1:3], hidden, use_reentrant=reentrant)
        return model[3](hidden).square().mean()

    return trained(model, loss)


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


def exceptions() -> Tensors:
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        items = items_of(step)
        with contextlib.suppress(RuntimeError):
            model(items.t())
        if step == 2:
            with contextlib.suppress(RuntimeError):
                model(items).backward()  # of more than one number
        return model(items).square().mean()

    return trained(model, loss)


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


def second_derivatives() -> Tensors:
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        items = items_of(step).requires_grad_()
        (slope,) = torch.autograd.grad(model(items).square().sum(), items, create_graph=True)
        return slope.square().mean()

    return trained(model, loss)


def averaged_and_clipped() -> Tensors:
    model = perceptron()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
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
    return trained(model, lambda step: model(items_of(step)).square().mean())


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


PROGRAMS = (
    becomes_nan,
    half_nan,
    dropout,
    workers,
    data_of_parameters,
    autocast,
    lbfgs,
    exceptions,
    recurrent,
    attention,
    second_derivatives,
    averaged_and_clipped,
    scaled_gradients,
    saved_and_loaded,
    gradients_in_hooks,
    two_models_in_turns,
)
