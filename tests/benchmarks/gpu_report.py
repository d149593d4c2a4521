"""Prints what a recording costs on a GPU, beside the tools that record as well, in eight minutes.

    python -m tests.benchmarks.gpu_report [--device cuda] [--seconds 300] [WORKLOAD...]

The tables are those of `docs/explanation/fingerprints.md` and `docs/explanation/compared.md`. The
profile at the end shows where the host's time goes. `--device cpu` shows that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib.util
import io
import pstats
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrepro
from torchrepro.trace.device_fingerprint import (
    Summation,
    _methods,
    _mixing,
    device_fingerprint,
    device_fingerprints,
    summation,
)
from torchrepro.trace.fingerprint import unobserved
from torchrepro.trace.waiting_outputs import WaitingOutputs

from .paired import show
from .test_recording import DEBUG_MODE, debug_mode
from .workloads import Attention, Step, convolutional, tiny_ops, transformer

Context = Callable[[], contextlib.AbstractContextManager[Any]]

ASKED = {"convolutional": (4, 1.9), "transformer": (6, 2), "tiny_ops": (5, 2), "large": (1.5, 1.5)}
"""Workload -> how many times as long as plain a step may take, with every op and at level step."""

BATCHES = (64, 32, 16, 8, 4, 1)
"""The batches that are tried for the large workload, until one fits."""


def large(batch: int) -> Step:
    """A network of the shape of GPT-2 small in bfloat16: 12 layers, d=768, sequence 1024, AdamW."""
    layers = (Attention(768, 12) for _ in range(12))
    net = nn.Sequential(nn.Embedding(50257, 768), *layers, nn.Linear(768, 50257)).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (batch, 1024))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


class Report:
    """The measurements on one device, each within a share of the time."""

    def __init__(self, device: torch.device, folder: Path, seconds: float) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.folders = (folder / f"run{number}" for number in count())
        self.seconds = seconds

    def wait(self) -> None:
        """Wait until the device has finished."""
        getattr(self.module, "synchronize", lambda: None)()

    def took(self, step: Step, context: Context) -> float:
        """Return the seconds of a step within `context`: the least of whole recordings."""
        end, least, steps = time.monotonic() + self.seconds, float("inf"), 3
        with context():
            step()
        while least == float("inf") or time.monotonic() < end:
            self.wait()
            with context():
                step()  # the first step of a recording opens files and names modules
                self.wait()
                began = time.perf_counter()
                for _ in range(steps):
                    step()
                self.wait()
                least = min(least, (time.perf_counter() - began) / steps)
        return least

    def peak(self, step: Step, context: Context) -> float:
        """Return the most MiB of device memory that a step within `context` takes."""
        if not hasattr(self.module, "reset_peak_memory_stats"):
            return float("nan")
        self.module.reset_peak_memory_stats()
        with context():
            step()
            step()
        return float(self.module.max_memory_allocated() / 2**20)

    def recorded(self, **options: Any) -> Context:
        """Return a context that records into a new folder."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            folder = next(self.folders)
            try:
                with torchrepro.record(folder, **options):
                    yield
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return context

    def workload(self, name: str, step: Step) -> None:
        """Print what recordings and other tools cost for a workload."""
        contexts: dict[str, Context] = {
            "plain": contextlib.nullcontext,
            "every op": self.recorded(),
            "level step": self.recorded(level="step"),
        }
        if DEBUG_MODE:
            contexts["DebugMode with hashes"] = debug_mode
        took = {title: self.took(step, context) for title, context in contexts.items()}
        peaks = {title: self.peak(step, context) for title, context in contexts.items()}
        bounds = dict(zip(("every op", "level step"), ASKED[name], strict=True))
        rows = [
            (
                title + (f" (at most {bounds[title]:g})" if title in bounds else ""),
                f"{seconds * 1e3:.2f} ms, {seconds / took['plain']:.2f}x, "
                f"{peaks[title]:.0f} MiB at the most",
            )
            for title, seconds in took.items()
        ]
        show(f"a step of {name}", rows)

    def small_tensors(self) -> None:
        """Print what a fingerprint of 16 numbers takes of the host's time."""
        tensors = [torch.ones(16, device=self.device) for _ in range(512)]
        waiting = WaitingOutputs()

        def wait_and_launch() -> None:
            for tensor in tensors:
                waiting.add(tensor, 0)
            waiting.launch()

        called: Mapping[str, Callable[[], Any]] = {
            "alone": lambda: [device_fingerprint(tensor) for tensor in tensors],
            "waiting for a batch (at most 6)": wait_and_launch,
            "together": lambda: device_fingerprints(tensors),
        }
        rows = [(title, self._microseconds(call)) for title, call in called.items()]
        show("the host's time for 16 numbers", rows)

    def _microseconds(self, call: Callable[[], Any]) -> str:
        least = float("inf")
        for _ in range(20):
            self.wait()
            began = time.perf_counter()
            call()
            least = min(least, time.perf_counter() - began)
        return f"{least / 512 * 1e6:.1f} us"

    def large_tensors(self, size: int) -> None:
        """Print how fast a large tensor is read, beside copying it."""
        tensor = torch.randint(-9, 9, (size // 4,), dtype=torch.int32, device=self.device)
        other = torch.empty_like(tensor)

        def speed(call: Callable[[], Any], bytes_moved: int) -> float:
            call()
            least = float("inf")
            for _ in range(5):
                self.wait()
                began = time.perf_counter()
                call()
                self.wait()
                least = min(least, time.perf_counter() - began)
            return bytes_moved / least / 1e9

        copying = speed(lambda: other.copy_(tensor), 2 * size)
        reading = speed(lambda: device_fingerprint(tensor), size)
        rows = [
            ("copying, both directions", f"{copying:.0f} GB/s"),
            ("fingerprint (at least 50 %)", f"{reading:.0f} GB/s, {reading / copying:.0%}"),
        ]
        show(f"a tensor of {size >> 20} MiB", rows)

    def methods(self) -> None:
        """Print what each method takes for a batch of 512 tensors, and whether the sums agree."""
        tensors = [torch.ones(1000, device=self.device) for _ in range(512)]
        device = tensors[0].device  # with its index
        mixing, used = _mixing(device), summation(device)
        assert mixing is not None

        def row(method: Summation) -> tuple[str, str]:
            mark = ", used" if used is not None and method.name == used.name else ""
            with unobserved():
                return method.name, self._microseconds(lambda: method.of_batch(tensors)) + mark

        batched = [*_methods(device, mixing)][:-1]  # the last reads each tensor alone
        show("512 tensors of 1000 numbers, for each", map(row, batched))

    def profile(self, name: str, step: Step) -> None:
        """Print the functions that take most of the host's time when every op is recorded."""
        profiler, text = cProfile.Profile(), io.StringIO()
        with self.recorded()():
            step()
            profiler.enable()
            step()
            self.wait()
            profiler.disable()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(15)
        lines = text.getvalue().splitlines()
        print(f"\nwhere the host's time goes in a recorded step of {name}", *lines[4:], sep="\n")

    def beside_msprobe(self, name: str, step: Step, plain: float) -> None:
        """Print what msprobe takes where it is installed. Its patches stay in torch."""
        from .beside_msprobe import _dumped_by_msprobe

        dumped = _dumped_by_msprobe(step, "L1", next(self.folders))
        seconds = self.took(dumped, contextlib.nullcontext)
        figures = f"{seconds * 1e3:.1f} ms, {seconds / plain:.2f}x"
        show(f"msprobe, {name}", [("md5, by API", figures)])


def fitting() -> tuple[int, Step]:
    """Return the largest batch of the large workload that fits, and its step."""
    for batch in BATCHES:
        try:
            step = large(batch)
            step()
        except torch.OutOfMemoryError:
            continue
        return batch, step
    raise SystemExit("the large workload does not fit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workloads", nargs="*", default=[*ASKED])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=300, help="of measuring, in all")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the large tensor")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.manual_seed(0)
    makers = {"convolutional": convolutional, "transformer": transformer, "tiny_ops": tiny_ops}
    with tempfile.TemporaryDirectory() as folder:
        report = Report(device, Path(folder), asked.seconds / (5 * len(asked.workloads)))
        card = getattr(report.module, "get_device_name", lambda: "the host")()
        used = summation(torch.empty(0, device=device).device)
        versions = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
        named = [datetime.now(UTC).date().isoformat(), card, *versions, used and used.name]
        print(*named, sep=", ")
        report.small_tensors()
        report.methods()
        report.large_tensors(asked.size)
        steps: dict[str, Step] = {}
        for name in asked.workloads:
            if name == "large":
                with device:
                    batch, step = fitting()
                print(f"\nthe batch of the large workload: {batch}")
            else:
                with device:
                    step = makers[name]()
            report.workload(name, step)
            if name != "large":
                steps[name] = step
        for name, step in steps.items():
            report.profile(name, step)
        if importlib.util.find_spec("msprobe"):
            for name, step in steps.items():
                plain = report.took(step, contextlib.nullcontext)
                report.beside_msprobe(name, step, plain)


if __name__ == "__main__":
    main()
