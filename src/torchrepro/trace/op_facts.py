"""Facts about ops: the text of their arguments, and what they read, write, and share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchrepro.ground.redaction import HIDDEN, sounds_secret

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
"""The classes of tensors that do not change what an op does."""

CPU = torch.device("cpu")
_LITERALS = (
    *(bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def call_text(args: Any, kwargs: Any) -> str:
    """Return the arguments of a call as Python writes them, with `_` for a tensor.

    A string is redacted if the name of its argument sounds secret.
    """
    words = [value_text(value) for value in args]
    words += [
        f"{name}={HIDDEN if isinstance(value, str) and sounds_secret(name) else value_text(value)}"
        for name, value in (kwargs or {}).items()
    ]
    return f"({', '.join(words)})"


def value_text(value: Any) -> str:
    """Return one value as Python writes it, or the name of its type if it has no such form."""
    if isinstance(value, torch.Tensor):
        return "_"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value) if value is None or isinstance(value, _LITERALS) else type(value).__name__


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a nested value, in their order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def shape_of(tensor: Any) -> tuple[Any, ...]:
    """Return shape and dtype of a tensor, and its device if that is not the CPU.

    A ragged size has a number that counts on in the process: it is left out.
    """
    try:
        shape = tensor.shape
        if tensor.__class__ not in PLAIN:
            shape = tuple(size if isinstance(size, int) else "ragged" for size in shape)
    except RuntimeError:  # nested, with parts of different shapes
        shape = ("nested", tensor.numel())
    return (shape, tensor.dtype) if tensor.is_cpu else (shape, tensor.dtype, tensor.device)


def shapes_text(shapes: Any) -> str:
    """Return dtypes, shapes, and devices other than the CPU, as in ``float32[32, 64] cuda:0``."""
    return ", ".join(
        " ".join(
            [
                f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]",
                *map(str, device),
            ]
        )
        for shape, dtype, *device in shapes
    )


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


TRANSPARENT = _aten("alias detach detach_ lift record_stream") | {
    "prim::device",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
"""Ops that compute nothing: what they return is what they were given."""

ALLOCATING = _aten(
    "_empty_affine_quantized _empty_per_channel_affine_quantized empty empty_like empty_permuted"
    " empty_quantized empty_strided new_empty new_empty_strided resize_ resize_as_"
)
"""Ops whose result is memory that nobody has written yet."""

OVERWRITING = _aten(
    "_foreach_copy_ _foreach_zero_ copy_ fill_ zero_ uniform_ normal_ bernoulli_ random_"
    " exponential_ geometric_ cauchy_ log_normal_"
)
"""Ops that write all of their first argument without reading it."""

SHARING = _aten("_unsafe_view _reshape_alias")
"""Ops that return their input's memory although their schema does not say so."""

SCRATCH = {
    "aten::_cudnn_rnn": (3, 4),
    "aten::cudnn_batch_norm": (3,),
    "aten::_batch_norm_with_update": (3,),
    "aten::mkldnn_rnn_layer": (3,),
    "aten::miopen_rnn": (3,),
    "aten::_ctc_loss": (1,),
    "aten::_scaled_dot_product_efficient_attention": (1,),
    "aten::_efficient_attention_forward": (1,),
    "fsdp::all_gather_copy_in": (1,),
}
"""Op -> the outputs that are a kernel's own workspace, which it may not write in full.

Their layout is in the signatures of
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml
"""

SCRATCH_ARGUMENTS = {"aten::rrelu_with_noise": (1,), "aten::rrelu_with_noise_": (1,)}
"""Op -> arguments that are memory for its own use: it writes them only while it trains."""

UNSAID = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
"""Op -> arguments that it writes although its schema does not say so: running statistics."""

KEEPING = _aten(
    "_index_put_impl_ fill_diagonal_ index_copy_ index_fill_ index_put_ masked_fill_"
    " masked_scatter_ put_ scatter_ copy_ clone _to_copy"
)
"""Ops that pass on some or all values of the first tensor they read unchanged."""

COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of the ops that exchange tensors with other ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class OpFacts:
    """What one op does to its inputs, and which outputs count."""

    op: Any  # the op itself; held, so that its id means no other
    name: str  # as in ``aten::add.Tensor``
    transparent: bool = False
    view: bool = False
    rebinds: bool = False  # gives a tensor other memory, which is read where it is used
    overwrites: bool = False
    allocates: bool = False
    collective: bool = False
    written: tuple[int, ...] = ()  # positions of the arguments that are written in place
    written_names: tuple[str, ...] = ()  # keyword arguments that are written, such as ``out``
    scratch: tuple[int, ...] = ()  # positions of the outputs that no fingerprint is taken of
    scratch_arguments: tuple[int, ...] = ()  # positions of those that are its own memory
    compiled: bool = False  # runs a region that inductor has compiled
    counted: bool = True  # autograd counts what it writes: not in lists, nor what is `UNSAID`
    keeps: bool = False  # passes on values of its first input unchanged
    writes: bool = False  # writes any of its arguments
    view_of_first: bool = False  # a view of its first argument, which is a tensor
    single: bool = False  # all that it makes or writes is the one tensor that it returns
    single_written: bool = False  # and it is its first argument, written in place, and counted
    fresh: bool = False  # torch passes what it makes from values of Python or numpy through it

    def written_in(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the tensors that a call has written in place, each once."""
        values = [args[position] for position in self.written if position < len(args)]
        if kwargs:
            values += [kwargs[name] for name in self.written_names if name in kwargs]
        found: list[Any] = []
        for value in values:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if tensor is not None and not any(tensor is other for other in found):
                    found.append(tensor)
        return found


def facts_of(op: Any) -> OpFacts:
    """Return the facts of an op overload, from its schema and the tables above.

    ``_schema`` is private; torch's own modes read it, and the public ``torch.library.infer_schema``
    is for functions only. An op without a schema has only a name and counts as writing nothing.
    """
    schema = getattr(op, "_schema", None)
    if schema is None:
        compiled = str(op) == "inductor_compiled_code"
        return OpFacts(op, "compiled region" if compiled else str(op), compiled=compiled)
    plain = schema.name
    writes = [
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and position not in SCRATCH_ARGUMENTS.get(plain, ())
    ]
    returned = [value.alias_info for value in schema.returns]
    aliases = bool(returned) and all(info is not None and not info.is_write for info in returned)
    written = (
        *(position for position, argument in writes if not argument.kwarg_only),
        *UNSAID.get(plain, ()),
    )
    collective = plain.partition("::")[0] in COLLECTIVE
    rebinds, fresh = plain == "aten::set_", plain == "aten::lift_fresh"
    special = collective or rebinds or plain in ALLOCATING or plain in SCRATCH
    view = aliases or plain in SHARING
    of_first = plain in SHARING or _returns_memory_of_first(schema)
    one = [str(value.type) for value in schema.returns] == ["Tensor"]
    in_place = one and written == (0,) and len(writes) == 1 and of_first
    return OpFacts(
        op=op,
        name=f"{plain}.{schema.overload_name}" if schema.overload_name else plain,
        transparent=plain in TRANSPARENT or fresh,
        view=view,
        view_of_first=view and of_first,
        rebinds=rebinds,
        overwrites=plain in OVERWRITING,
        allocates=plain in ALLOCATING,
        collective=collective,
        written=written,
        written_names=tuple(argument.name for _, argument in writes),
        scratch=SCRATCH.get(plain, ()),
        scratch_arguments=SCRATCH_ARGUMENTS.get(plain, ()),
        counted=plain not in UNSAID
        and not any("List" in str(argument.type) for _, argument in writes),
        keeps=plain in KEEPING,
        writes=bool(written or writes),
        single=one and not special and not view and (in_place or not (written or writes)),
        single_written=in_place,
        fresh=fresh,
    )


def _returns_memory_of_first(schema: Any) -> bool:
    """Whether an op returns the memory of its first argument, one tensor: both have one name."""
    if not schema.arguments or not schema.returns or str(schema.arguments[0].type) != "Tensor":
        return False
    given, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return given is not None and returned is not None and given.before_set == returned.before_set
