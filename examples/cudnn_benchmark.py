"""Time a ResNet-50 with cuDNN's benchmark off and on, with images of one size and of changing ones.

    python examples/cudnn_benchmark.py                          # about a minute
    python examples/cudnn_benchmark.py --seconds 600            # more passes, so steadier figures
    python examples/cudnn_benchmark.py --passes 50 --size 256   # so many, however long they take

With `benchmark` on, cuDNN times its algorithms at every new shape and keeps the fastest: a gain
where shapes repeat, a loss where they do not, and chance has a say in which algorithm computes.
Without a GPU, oneDNN (torch calls it mkldnn) is switched off and on instead, with less to do.
One pass of each kind is timed first: so it is known how many fit into the time there is.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

import torchrepro
from torchrepro.ground.console import show, table

IMAGES = 2  # in every pass
MOST_PASSES = 50  # in a cell, unless more are asked for
SECONDS = 60  # for all cells together, unless more are asked for


@dataclass(frozen=True)
class Switch:
    """A knob that is switched off and on, and the work that shows the difference."""

    device: str
    section: str
    knob: str
    size: int

    def profile(self, *, on: bool) -> dict:
        """Return the profile of one row; its seed makes the shapes the same in every row."""
        return {"seed": 1, "backends": {self.section: {self.knob: on}}}


CUDNN = Switch("cuda", "cudnn", "benchmark", size=512)
MKLDNN = Switch("cpu", "cpu", "mkldnn_enabled", size=192)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its batch norm; the image shrinks by `stride` alone."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Three convolutions, narrow in the middle, added to what came in."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        as_it_is = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if as_it_is else convolution(inputs, outputs, 1, stride)
        self.residual = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, outputs, 1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(images) + self.shortcut(images))


def resnet50() -> nn.Sequential:
    """Return the network of 50 layers of https://arxiv.org/abs/1512.03385, with random weights."""
    blocks = []
    inputs = 64
    for width, length, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(length):
            blocks.append(Bottleneck(inputs, width, 1 if number else stride))
            inputs = 4 * width
    return nn.Sequential(
        convolution(3, 64, 7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, 1000),
    )


def fixed(size: int) -> list[int]:
    """Return the height and width of every image."""
    return [size, size]


def changing(size: int) -> list[int]:
    """Return another height and width at every call, each at least half of `size`."""
    return torch.randint(size // 2, size, (2,)).tolist()


def synchronize(device: str) -> None:
    """Wait until `device` has done what it was given: a GPU works on after a call returns."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def timed(
    model: nn.Module, switch: Switch, shape: Callable[[int], list[int]], passes: int
) -> float:
    """Return the seconds of so many forward passes."""
    synchronize(switch.device)
    start = time.perf_counter()
    for _ in range(passes):
        model(torch.rand(IMAGES, 3, *shape(switch.size), device=switch.device))
    synchronize(switch.device)
    return time.perf_counter() - start


def rows(model: nn.Module, switch: Switch, passes: int) -> list[tuple[float, float]]:
    """Return the seconds of the knob off and on, with both kinds of shapes."""
    found = []
    for on in (False, True):
        with torchrepro.apply(switch.profile(on=on)):
            found.append(tuple(timed(model, switch, shape, passes) for shape in (fixed, changing)))
    return found


def passes_within(seconds: float, of_one_each: float) -> int:
    """Return how many passes fit, where one of each kind takes `of_one_each` seconds."""
    return max(1, min(MOST_PASSES, int(seconds / of_one_each)))


def whole(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least` for argparse."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: not a whole number of at least {least}")
        return int(text)

    return number


def wanted() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Time forward passes of a ResNet-50.")
    parser.add_argument(
        "--seconds", type=whole(1), default=SECONDS, help=f"for all passes, {SECONDS} if not given"
    )
    parser.add_argument("--passes", type=whole(1), help="in every cell, however long they take")
    parser.add_argument("--size", type=whole(2), help="of an image, in pixels")
    return parser.parse_args()


def main() -> None:
    """Print how long it takes, what is measured, where, and the table."""
    asked = wanted()
    switch = CUDNN if torch.cuda.is_available() else MKLDNN
    switch = replace(switch, size=asked.size or switch.size)
    if asked.passes is None:
        print(f"This takes about {asked.seconds} s, and a few more to start; --seconds changes it.")
    else:
        print("One pass of each kind is timed first, to say how long the others take.")
    if switch.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"CPU, {torch.get_num_threads()} threads"
        print("No CUDA device here, so nothing about cuDNN: oneDNN on the CPU is switched instead.")
    model = resnet50().to(switch.device).eval()
    timed(model, switch, fixed, 1)  # loads what the first pass loads
    of_one_each = sum(map(sum, rows(model, switch, 1)))
    passes = asked.passes or passes_within(asked.seconds - of_one_each, of_one_each)
    print(f"torch {torch.__version__}, {where}; passes: {passes}, images in each: {IMAGES}")
    print(f"{passes} in each of 4 cells: about {passes * of_one_each:.0f} s ...", flush=True)
    name = f"backends.{switch.section}.{switch.knob}"
    largest = f"{switch.size} x {switch.size}"
    seconds = rows(model, switch, passes)
    cells = [
        (word, *(f"{each:.2f} s" for each in row))
        for word, row in zip(("off", "on"), seconds, strict=True)
    ]
    show(table((name, f"fixed, {largest}", f"changing, below {largest}"), cells))


if __name__ == "__main__":
    main()
