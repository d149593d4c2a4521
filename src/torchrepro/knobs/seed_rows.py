"""Rows for every generator that one seed reaches."""

from __future__ import annotations

from functools import partial

from torchrepro.knobs.knob import Knob, LazyAccess
from torchrepro.knobs.legal_values import SEED

RANDOMNESS = "https://docs.pytorch.org/docs/stable/notes/randomness.html"


_seed = partial(Knob, key="seed", legal=SEED, moves_on=True, guarded=False, per_rank=True)


def _accelerator(device: str, hardware: str, source: str, since: str) -> Knob:
    return _seed(
        name=f"seed.{device}",
        target=device,
        hardware=hardware,
        access=LazyAccess(f"seeding.global_seeds:{device}_seed"),
        library="torch",
        summary=f"Seed of the default generator of every {device.upper()} device.",
        cost="none; before device init the seed waits in torch's queue",
        source=source,
        since=since,
        aliases=(f"torch.{device}.manual_seed_all", f"torch.{device}.manual_seed"),
    )


SEEDS = (
    _seed(
        name="seed.streams",
        target="seed plan",
        set_on_import="",
        access=LazyAccess("seeding.global_seeds:root_seed"),
        summary="Root of every named stream: torchrepro.stream, seeded, dataloader_kwargs.",
        cost="none; deriving a stream takes about 5 microseconds",
        source="https://www.rfc-editor.org/rfc/rfc7693",
    ),
    _seed(
        name="seed.libraries",
        target="torch",
        access=LazyAccess("seeding.global_seeds:library_seeds"),
        library="torch",
        summary="Seed of other libraries that draw numbers (cupy, tensorflow, gymnasium, "
        "registered ones), given when they are loaded.",
        cost="none",
        source="https://docs.cupy.dev/en/stable/reference/random.html",
    ),
    _seed(
        name="seed.python",
        target="python",
        set_on_import="random",
        access=LazyAccess("seeding.global_seeds:python_seed"),
        summary="Seed of the generator behind the functions of Python's `random`.",
        cost="none",
        source="https://docs.python.org/3/library/random.html#random.seed",
        aliases=("random.seed",),
    ),
    _seed(
        name="seed.numpy",
        target="numpy",
        set_on_import="numpy.random",
        access=LazyAccess("seeding.global_seeds:numpy_seed"),
        library="numpy",
        summary="Seed of numpy's legacy global generator; a Generator of your own is not reached.",
        cost="about 6 ms the first time: numpy loads numpy.random",
        source="https://numpy.org/doc/stable/reference/random/legacy.html",
        aliases=("numpy.random.seed", "np.random.seed"),
    ),
    _seed(
        name="seed.torch",
        target="torch",
        access=LazyAccess("seeding.global_seeds:torch_seed"),
        library="torch",
        summary="Seed of torch's default CPU generator, of which only the low 32 bits count.",
        cost="none",
        source=RANDOMNESS,
        aliases=("torch.manual_seed",),
    ),
    _seed(
        name="seed.calls",
        target="torch",
        access=LazyAccess("seeding.global_seeds:seeding_calls"),
        library="torch",
        summary="Later calls of the program that seed a generator are honoured and recorded, each "
        "with its line.",
        cost="about a microsecond per such call",
        source=RANDOMNESS,
    ),
    _accelerator("cuda", "CUDA", RANDOMNESS, ""),
    _accelerator("npu", "Ascend", "https://pypi.org/project/torch-npu/", "torch_npu 2.1"),
    _accelerator("mps", "MPS", "https://docs.pytorch.org/docs/stable/mps.html", "1.12"),
    _accelerator("xpu", "XPU", "https://docs.pytorch.org/docs/stable/xpu.html", "2.3"),
)
