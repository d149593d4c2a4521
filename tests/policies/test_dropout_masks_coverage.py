"""The table of masks knows every function of a known library that draws a mask."""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from torchrepro.policies.dropout import WRITTEN_MASKS, WrittenMask

DRAWS = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randperm", "random", "random_"),
    *("bernoulli", "bernoulli_", "uniform", "uniform_", "binomial", "normal", "normal_"),
    *("exponential_", "geometric_"),
}
NO_DROPOUT = {
    "initial weights": (
        "*__init__ *init*_weight* *reset_parameters *_init_* init_* *init_method "
        "*initialize_weights variance_scaling_ _trunc_normal_ _normal_init *.normal_ "
        "*.init_codebook"
    ),
    "which inputs a pretraining objective hides or compares": (
        "*random_masking *forecast_masking *get_random_mask _compute_mask_indices "
        "_sample_negative_indices *generate_*_mask_noise PerceiverMultimodalPreprocessor.forward "
        "UniSpeechForPreTraining.forward get_contrastive_denoising_training_group"
    ),
    "which points or boxes a loss looks at": (
        "*HungarianMatcher.forward *Loss.sample_points_using_uncertainty subsample_labels "
        "BalancedPositiveNegativeSampler.__call__"
    ),
    "noise on what a router or a mixture of experts chooses": (
        "*Router.* *SparseMoeBlock.forward sparsemixer"
    ),
    "the randomness of a generative model": (
        "*.sample *.sample_actions *compute_diffusion_loss *.get_audio_features "
        "*AcousticTokenizerModel.encode UnivNetModel.forward Vits*.forward "
        "DiffusionGemmaModel.forward PI0ForConditionalGeneration.forward JukeboxBottleneckBlock.*"
    ),
    "hashing and sampling in sparse attention": (
        "InformerProbSparseAttention.forward LSHSelfAttention._hash_vectors hashing"
    ),
    "augmentation of positions, patches or images": (
        "augment_patches_center_coordinates _apply_coord_augs *get_relative_position "
        "Shuffle.forward rand_bbox GeneralizedRCNNTransform.torch_choice"
    ),
    "annealing of an attention mask, and how much context a stream sees": (
        "*._disable_attention_mask *._streaming_mask"
    ),
    "noise on weights": "quant_noise",
    "an example input": "quantize_model",
}
LIBRARIES = {
    "torchvision": ("ops", "models"),
    "timm": ("layers", "models"),
    "transformers": ("models",),
}


OTHER_VERSIONS = {  # rows for functions that transformers had before 5
    ("transformers.models.*", "drop_path"),
    ("transformers.models.*", "LayerDropModuleList.__iter__"),
}


@dataclass(frozen=True)
class Scan:
    """The findings in the source of a library."""

    unknown: dict[str, set[str]]
    """Function that draws and that no row knows -> the names it reads."""
    used: set[WrittenMask]
    """The rows that know a function."""


@cache
def _scan(library: str) -> Scan:
    scan = Scan({}, set())
    for module, name, function in _functions(library):
        read = _read(function)
        rows = {row for row in WRITTEN_MASKS if row.draws_in(module, name, read)}
        scan.used.update(rows)
        if not rows and _draws(function):
            scan.unknown[f"{module}:{name}"] = read
    return scan


def _functions(library: str) -> Iterator[tuple[str, str, ast.AST]]:
    spec = importlib.util.find_spec(library)
    if spec is None:
        pytest.skip(f"{library} is not installed")
    root = Path((spec.submodule_search_locations or ())[0])
    pattern = "modeling_*.py" if library == "transformers" else "*.py"
    for folder in LIBRARIES[library]:
        for path in sorted((root / folder).rglob(pattern)):
            module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            for name, function in _within(ast.parse(path.read_text(encoding="utf-8"))):
                yield module, name, function


def _within(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, ast.FunctionDef):
            yield prefix + part.name, part
        elif isinstance(part, ast.ClassDef):
            yield from _within(part, f"{prefix}{part.name}.")
        elif isinstance(part, ast.stmt):
            yield from _within(part, prefix)


def _draws(function: ast.AST) -> bool:
    calls = [part.func for part in ast.walk(function) if isinstance(part, ast.Call)]
    return any(getattr(call, "attr", getattr(call, "id", None)) in DRAWS for call in calls)


def _read(function: ast.AST) -> set[str]:
    names = (getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(function))
    return {name for name in names if name}


def _excused(name: str) -> bool:
    patterns = (pattern for several in NO_DROPOUT.values() for pattern in several.split())
    return any(fnmatchcase(name.partition(":")[2], pattern) for pattern in patterns)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_mask_is_known_or_is_no_dropout(library: str) -> None:
    """A function that draws random numbers has a row, or is listed with a reason to have none.

    Outside of constructors, no listed function mentions dropping. No row is outdated, except for
    rows of older versions of a library.
    """
    scan = _scan(library)
    speaking = [
        name
        for name, read in scan.unknown.items()
        if not name.endswith("__init__")
        and (
            "drop" in name.lower() or any("drop_prob" in one or "layerdrop" in one for one in read)
        )
    ]
    rows = {row for row in WRITTEN_MASKS if row.modules.startswith(f"{library}.")}

    assert [name for name in scan.unknown if not _excused(name)] == []
    assert speaking == []
    assert {(row.modules, row.functions) for row in rows - scan.used} <= OTHER_VERSIONS
