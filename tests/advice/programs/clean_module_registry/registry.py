from collections.abc import Callable

from torch import nn

LAYERS: dict[str, Callable[[int], nn.Module]] = {}


def layer(name: str):
    def add(make: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
        LAYERS[name] = make
        return make

    return add


@layer("linear")
def linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


@layer("norm")
def norm(width: int) -> nn.Module:
    return nn.LayerNorm(width)


@layer("gate")
def gate(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GLU())
