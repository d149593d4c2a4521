"""Every known layer with a mask of its own, tried before, under and after `dropout.zero_masks`.

    python known_layers.py LIBRARY before|after

makes the layers of LIBRARY before or after `zero`, which in the second case is in force before the
library is imported, and prints as JSON what each of them did.
"""

import importlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrepro.policies import dropout

Call = Callable[[Tensor], Tensor]
SEEDS = range(12)  # a mask that drops with probability 1/2 is the same for all of them once in 2000
WIDTH = 8
_defined: list[torch.library.Library] = []


def let_torchvision_be_imported() -> None:
    """Define the names that `import torchvision` needs, if its compiled ops cannot be loaded.

    A wheel built for CUDA has no ops on a torch built without CUDA, and its import fails at the
    first op that it describes to torch.compile. The tested layers are plain Python and need none
    of the ops. If the ops can be loaded, this function changes nothing.
    """
    folder = package_folder("torchvision")
    if folder is None or _defined:
        return
    try:
        for compiled in folder.glob("_C*.so"):
            torch.ops.load_library(compiled)
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _defined.append(library)


def package_folder(package: str) -> Path | None:
    """Return the folder of the installed `package` without importing it."""
    spec = find_spec(package)
    return None if spec is None else Path((spec.submodule_search_locations or ())[0])


@dataclass(frozen=True)
class Layer:
    """One way to call a known layer, and its result if nothing is dropped."""

    make: Callable[[], Any]
    shape: tuple[int, ...] = (32, WIDTH)
    undropped: Callable[[Any], Call] = lambda _: lambda x: x
    dropping: Callable[[Any], Call] = lambda made: made

    def observe(self, made: Any) -> dict[str, bool]:
        """Report whether `made` drops, and whether result and gradient are those without drops."""
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(1)).abs()
        expected = _with_gradient(self.undropped(made), x)
        seen = [_seeded(self.dropping(made), x, seed) for seed in SEEDS]
        return {
            "drops": any(not torch.equal(result, seen[0][0]) for result, _ in seen),
            "result": all(torch.equal(result, expected[0]) for result, _ in seen),
            "gradient": all(torch.equal(gradient, expected[1]) for _, gradient in seen),
        }


def _seeded(call: Call, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return _with_gradient(call, x)


def _with_gradient(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    result = call(leaf)
    (gradient,) = torch.autograd.grad((result * result).sum(), leaf)
    return result.detach(), gradient


def module(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    call: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
) -> Layer:
    """Return the layer that `make` creates; in evaluation it drops nothing."""
    in_mode = [lambda made, on=on: lambda x: call(made.train(on), x) for on in (False, True)]
    return Layer(make, shape, *in_mode)


def _of(module_name: str, name: str) -> Any:
    return getattr(importlib.import_module(module_name), name)


def torchvision() -> dict[str, Layer]:
    """Return the layers of torchvision."""

    def op(name: str) -> Any:
        return _of("torchvision.ops", name)

    plane, space = (4, 2, 8, 8), (4, 2, 6, 6, 6)
    return {
        "StochasticDepth by row": Layer(lambda: op("StochasticDepth")(0.5, "row")),
        "StochasticDepth by batch": Layer(lambda: op("StochasticDepth")(0.5, "batch")),
        "stochastic_depth": Layer(lambda: partial(op("stochastic_depth"), p=0.5, mode="row")),
        "DropBlock2d": Layer(lambda: op("DropBlock2d")(0.5, 3), plane),
        "drop_block2d": Layer(lambda: partial(op("drop_block2d"), p=0.5, block_size=3), plane),
        "DropBlock3d": Layer(lambda: op("DropBlock3d")(0.5, 3), space),
        "drop_block3d": Layer(lambda: partial(op("drop_block3d"), p=0.5, block_size=3), space),
    }


def timm() -> dict[str, Layer]:
    """Return the layers of timm."""

    def dropping(name: str) -> Any:
        return _of("timm.layers.drop", name)

    def patches(name: str) -> Any:
        return _of("timm.layers.patch_dropout", name)

    plane, tokens = (4, 2, 8, 8), (4, 9, WIDTH)
    return {
        "DropPath": Layer(lambda: dropping("DropPath")(0.5)),
        "drop_path": Layer(lambda: partial(dropping("drop_path"), drop_prob=0.5, training=True)),
        "DropBlock2d": Layer(lambda: dropping("DropBlock2d")(0.5, 3), plane),
        "drop_block_2d": Layer(
            lambda: partial(dropping("drop_block_2d"), drop_prob=0.5, block_size=3), plane
        ),
        "PatchDropout": Layer(lambda: patches("PatchDropout")(0.5), tokens),
        "PatchDropoutWithIndices": Layer(
            lambda: _first_of(patches("PatchDropoutWithIndices")(0.5)), tokens
        ),
        "ResidualDrop": module(
            lambda: _of("timm.models.efficientvit_msra", "ResidualDrop")(nn.Conv2d(2, 2, 1), 0.5),
            (32, 2, 3, 3),
        ),
    }


def _first_of(layer: nn.Module) -> Call:
    return lambda x: layer(x)[0]


def transformers() -> dict[str, Layer]:
    """Return the layers of transformers that skip layers or draw other masks."""
    sequence = (2, 16, WIDTH)
    return {
        **_skipping_layers(),
        "DropPath": Layer(lambda: _modeling("beit").BeitDropPath(0.5)),
        "StableDropout": Layer(lambda: _modeling("sew_d").StableDropout(0.5)),
        "XDropout": Layer(lambda: lambda x: _modeling("sew_d").XDropout.apply(x, 0.5)),
        "consistent dropout": Layer(
            lambda: (
                lambda x: _modeling("speecht5").SpeechT5SpeechDecoderPrenet._consistent_dropout(
                    None, x.clamp(0, 1), 0.5
                )
            ),
            sequence,
            lambda _: lambda x: x.clamp(0, 1),
        ),
        "LevitResidualLayer": module(
            lambda: _modeling("levit").LevitResidualLayer(nn.Linear(WIDTH, WIDTH), 0.5), (32, 1, 8)
        ),
        "DacResidualVectorQuantizer": module(_quantizer, (6, WIDTH, 4), lambda made, x: made(x)[0]),
    }


def _skipping_layers() -> dict[str, Layer]:
    def encoder(made: nn.Module, x: Tensor) -> Tensor:
        return made(inputs_embeds=x)[0]

    speech = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.5}
    bart = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "dropout": 0.0, "vocab_size": 9}
    sequence = (2, 16, WIDTH)
    return {
        "Wav2Vec2Encoder, by its config": module(
            lambda: _small("wav2vec2", "Wav2Vec2", "Encoder", speech),
            sequence,
            lambda made, x: made(x)[0],
        ),
        "BartEncoder": module(lambda: _small("bart", "Bart", "Encoder", bart), sequence, encoder),
        "BartDecoder": module(lambda: _small("bart", "Bart", "Decoder", bart), sequence, encoder),
    }


def _modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _small(folder: str, prefix: str, kind: str, options: Any) -> nn.Module:
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    kinds = ("", "encoder_", "decoder_")
    sizes = {
        **dict.fromkeys(("hidden_size", "d_model"), WIDTH),
        **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 3),
        **{f"{kind or 'num_'}attention_heads": 2 for kind in kinds},
        **dict.fromkeys(("intermediate_size", *(f"{kind}ffn_dim" for kind in kinds)), 16),
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0),
    }
    made = getattr(configuration, f"{prefix}Config")(**{**sizes, **options})
    layer: nn.Module = getattr(_modeling(folder), prefix + kind)(made)
    return layer


def _quantizer() -> nn.Module:
    configuration = importlib.import_module("transformers.models.dac.configuration_dac")
    dac = _modeling("dac")
    kind = getattr(dac, "DacResidualVectorQuantizer", None) or dac.DacResidualVectorQuantize
    config = configuration.DacConfig(
        n_codebooks=4,
        codebook_size=16,
        codebook_dim=4,
        encoder_hidden_size=2,
        downsampling_ratios=[2, 2],
        quantizer_dropout=0.5,
    )
    layer: nn.Module = kind(config)
    return layer


LIBRARIES: dict[str, Callable[[], dict[str, Layer]]] = {
    "torchvision": torchvision,
    "timm": timm,
    "transformers": transformers,
}


def _observe(library: str, order: str) -> dict[str, dict[str, Any]]:
    if order == "after":
        dropout.zero_masks()
    let_torchvision_be_imported()
    layers = LIBRARIES[library]()
    made = {name: layer.make() for name, layer in layers.items()}
    before = {name: layers[name].observe(call) for name, call in made.items()}
    dropout.zero_masks()
    under = {name: layers[name].observe(call) for name, call in made.items()}
    made_under = {name: layer.observe(layer.make()) for name, layer in layers.items()}
    dropout.restore_masks()
    after = {name: layers[name].observe(call) for name, call in made.items()}
    return {
        name: {
            "before": before[name],
            "under": under[name],
            "made under": made_under[name],
            "after": after[name],
        }
        for name in layers
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_observe(*sys.argv[1:])))
