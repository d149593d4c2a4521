"""Programs whose loops change as they go, by step numbers and by results, and train the same."""

import pickle
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from .small_models import STEPS, Tensors, items_of, perceptron, trained


def _scheduled(schedule_of: Callable[[torch.optim.Optimizer], LRScheduler]) -> Tensors:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = schedule_of(optimizer)
    for step in range(STEPS):
        model(items_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return list(model.parameters())


def learning_rate_by_a_function() -> Tensors:
    return _scheduled(lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step))


def learning_rate_in_one_cycle() -> Tensors:
    return _scheduled(lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1))


def learning_rate_on_a_plateau() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for step in range(STEPS):
        loss = model(items_of(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss.item())
    return list(model.parameters())


def groups_changed_by_step() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}], 0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 0.01 / (step + 1), (0.9, 0.99 + step / 1000)
        if step == 2:
            optimizer.add_param_group({"params": model[2].parameters(), "weight_decay": 0.1})
        model(items_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def gradients_added_up() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3 * STEPS):
        (model(items_of(number)).square().mean() / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def adversaries() -> Tensors:
    torch.manual_seed(7)
    generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (generator, critic)]
    says = nn.BCEWithLogitsLoss()
    real, made_up = torch.ones(8, 1), torch.zeros(8, 1)
    for step in range(STEPS):
        made = generator(torch.randn(8, 4))
        optimizers[1].zero_grad()
        (says(critic(items_of(step)), real) + says(critic(made.detach()), made_up)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        says(critic(made), real).backward()
        optimizers[0].step()
    return [*generator.parameters(), *critic.parameters()]


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
    """Compute in numpy, which no recording sees into."""
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


def caches_by_shape() -> Tensors:
    model, masks = perceptron(), {}

    def loss(step: int) -> torch.Tensor:
        items = items_of(step, 4 + step % 2, 6)
        if items.shape not in masks:
            masks[items.shape] = torch.ones(items.shape).tril_()
        return model(items * masks[items.shape]).square().mean()

    return trained(model, loss)


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


def numbers_of_python() -> Tensors:
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        rows = [[(row * step + column) / 7 for column in range(6)] for row in range(8)]
        scale = torch.as_tensor(1 / (step + 3), dtype=torch.float64)
        return (model(torch.tensor(rows)) * scale).square().mean()

    return trained(model, loss)


def pickled_in_memory() -> Tensors:
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        items, words = pickle.loads(pickle.dumps((items_of(step), {"step": step})))
        other = pickle.loads(pickle.dumps(model))
        return model(items + words["step"]).square().mean() + other(items).mean().detach()

    return trained(model, loss)


PROGRAMS = (
    learning_rate_by_a_function,
    learning_rate_in_one_cycle,
    learning_rate_on_a_plateau,
    groups_changed_by_step,
    gradients_added_up,
    adversaries,
    without_an_optimizer,
    ops_of_its_own,
    caches_by_shape,
    branches_by_results,
    written_before_it_is_read,
    numbers_of_python,
    pickled_in_memory,
)
