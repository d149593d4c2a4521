"""Describes ops: the text of the arguments, and the tensors that an op reads, writes or shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchrepro.ground.redaction import HIDDEN, sounds_secret

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
"""The classes of tensors that do not override ops."""

CPU = torch.device("cpu")
_LITERALS = (
    *(bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def call_text(args: Any, kwargs: Any) -> str:
    """Return the arguments of a call in Python syntax, with `_` for a tensor.

    A string is redacted if its keyword suggests a secret, such as ``token``.
    """
    words = [value_text(value) for value in args]
    words += [
        f"{name}={HIDDEN if isinstance(value, str) and sounds_secret(name) else value_text(value)}"
        for name, value in (kwargs or {}).items()
    ]
    return f"({', '.join(words)})"


def value_text(value: Any) -> str:
    """Return a value in Python syntax. For a non-literal, return the name of the type."""
    if isinstance(value, torch.Tensor):
        return "_"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value) if value is None or isinstance(value, _LITERALS) else type(value).__name__


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def shape_of(tensor: Any) -> tuple[Any, ...]:
    """Return the shape and dtype of a tensor, and the device if the tensor is not on the CPU.

    Writes ``ragged`` in place of a symbol such as ``j1``, which depends on earlier nested tensors.
    """
    try:
        shape = tensor.shape
        if tensor.__class__ not in PLAIN:
            shape = tuple(size if isinstance(size, int) else "ragged" for size in shape)
    except RuntimeError:  # nested, with parts of different shapes
        shape = ("nested", tensor.numel())
    return (shape, tensor.dtype) if tensor.is_cpu else (shape, tensor.dtype, tensor.device)


def shapes_text(shapes: Any) -> str:
    """Return the text of shapes, as in ``float32[32, 64] cuda:0``. Omits the device for the CPU."""
    return ", ".join(
        " ".join(
            [
                f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]",
                *map(str, device),
            ]
        )
        for shape, dtype, *device in shapes
    )


def version_of(tensor: Any) -> int:
    """Return the version of `tensor`: how often torch has written it in place.

    Inference tensors have no version. For these, returns how often recorded ops wrote to the
    storage, through any view. https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
    """
    try:
        return tensor._version  # type: ignore[no-any-return]  # noqa: SLF001 - documented, see above
    except RuntimeError:
        return inference_writes.get(storage_id(tensor), 0)


inference_writes: dict[int, int] = {}  # number of writes to inference tensors, by storage


def storage_id(tensor: Any) -> int:
    """Return a number that identifies the storage of a tensor, or 0 without a storage."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # noqa: SLF001 - see `tensor_reads.BORROWED_NAMES`


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


TRANSPARENT = _aten("alias detach detach_ lift record_stream") | {
    "prim::device",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
"""Ops that compute nothing and return their argument."""

ALLOCATING = _aten(
    "_empty_affine_quantized _empty_per_channel_affine_quantized empty empty_like empty_permuted"
    " empty_quantized empty_strided new_empty new_empty_strided resize_ resize_as_"
)
"""Ops that return uninitialized memory."""

OVERWRITING = _aten(
    "_foreach_copy_ _foreach_zero_ copy_ fill_ zero_ uniform_ normal_ bernoulli_ random_"
    " exponential_ geometric_ cauchy_ log_normal_"
)
"""Ops that write all of their first argument without reading it."""

SHARING = _aten("_unsafe_view _reshape_alias")
"""Ops that return the memory of their input although their schema does not declare it."""

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
"""Op -> the outputs that are the workspace of a kernel, which may stay partly uninitialized.

The signatures of the ops are in
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml
"""

SCRATCH_ARGUMENTS = {"aten::rrelu_with_noise": (1,), "aten::rrelu_with_noise_": (1,)}
"""Op -> arguments that are its workspace, written only in training mode."""

UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
"""Op -> arguments that it writes although its schema does not declare it: running statistics."""

KEEPING = _aten(
    "_index_put_impl_ fill_diagonal_ index_copy_ index_fill_ index_put_ masked_fill_"
    " masked_scatter_ put_ scatter_ copy_ clone _to_copy"
)
"""Ops that copy or keep some values of the first tensor that they read."""

COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of the ops that exchange tensors with other ranks."""


CHECKED = frozenset({"aten", "prim", "prims", "profiler"})
"""Namespaces whose schemas torch's own tests check. Schemas of other ops may omit writes, as those
of collectives do."""


@dataclass(frozen=True, slots=True, eq=False)
class OpFacts:
    """Facts about one op: the effects on its inputs, and the outputs that are fingerprinted."""

    op: Any  # kept alive, so that the id of the op is not reused
    name: str  # as in ``aten::add.Tensor``
    transparent: bool = False
    view: bool = False
    rebinds: bool = False  # replaces the memory of a tensor; the next op reads the new memory
    overwrites: bool = False
    allocates: bool = False
    collective: bool = False
    written: tuple[int, ...] = ()  # positions of the arguments that are written in place
    written_names: tuple[str, ...] = ()  # keyword arguments that are written, such as ``out``
    scratch: tuple[int, ...] = ()  # positions of the outputs that are not fingerprinted
    scratch_arguments: tuple[int, ...] = ()  # positions of the arguments that are workspace
    compiled: bool = False  # runs a region that inductor has compiled
    counted: bool = True  # autograd counts its writes, except in lists and `UNDECLARED_WRITES`
    keeps: bool = False  # keeps values of its first input unchanged
    writes: bool = False  # writes any of its arguments
    is_opaque: bool = False  # may write memory that no schema declares
    may_write: bool = False  # writes, or is opaque
    view_of_first: bool = False  # a view of its first argument, which is a tensor
    single: bool = False  # creates or writes exactly one tensor, which it returns
    single_written: bool = False  # as `single`, and writes its first argument in place
    fresh: bool = False  # torch calls it on tensors that it creates from Python or numpy

    def written_in(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the tensors that a call has written in place, without duplicates."""
        values = [args[position] for position in self.written if position < len(args)]
        if kwargs:
            values += [kwargs[name] for name in self.written_names if name in kwargs]
        tensors: list[Any] = []
        for value in values:
            sequence = value if isinstance(value, list | tuple) else (value,)
            for tensor in sequence:
                if tensor is not None and not any(tensor is known for known in tensors):
                    tensors.append(tensor)
        return tensors


def facts_of(op: Any) -> OpFacts:
    """Return the facts of an op overload, from its schema and the tables in this module.

    ``_schema`` is private, but torch's own modes use it. ``torch.library.infer_schema`` is public,
    but accepts only functions. An op is opaque if it has no schema, or if its namespace is not in
    `CHECKED`.
    """
    schema = getattr(op, "_schema", None)
    if schema is None:
        compiled = str(op) == "inductor_compiled_code"
        name = "compiled region" if compiled else str(op)
        return OpFacts(op, name, compiled=compiled, is_opaque=True, may_write=True)
    op_name = schema.name
    writes = [
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and position not in SCRATCH_ARGUMENTS.get(op_name, ())
    ]
    returned_info = [value.alias_info for value in schema.returns]
    aliases = bool(returned_info) and all(
        info is not None and not info.is_write for info in returned_info
    )
    written = (
        *(position for position, argument in writes if not argument.kwarg_only),
        *UNDECLARED_WRITES.get(op_name, ()),
    )
    collective = op_name.partition("::")[0] in COLLECTIVE
    is_opaque = op_name.partition("::")[0] not in CHECKED
    rebinds, fresh = op_name == "aten::set_", op_name == "aten::lift_fresh"
    special = collective or rebinds or op_name in ALLOCATING or op_name in SCRATCH
    view = aliases or op_name in SHARING
    shares_first = op_name in SHARING or _returns_memory_of_first(schema)
    returns_tensor = [str(value.type) for value in schema.returns] == ["Tensor"]
    in_place = returns_tensor and written == (0,) and len(writes) == 1 and shares_first
    return OpFacts(
        op=op,
        name=f"{op_name}.{schema.overload_name}" if schema.overload_name else op_name,
        transparent=op_name in TRANSPARENT or fresh,
        view=view,
        view_of_first=view and shares_first,
        rebinds=rebinds,
        overwrites=op_name in OVERWRITING,
        allocates=op_name in ALLOCATING,
        collective=collective,
        written=written,
        written_names=tuple(argument.name for _, argument in writes),
        scratch=SCRATCH.get(op_name, ()),
        scratch_arguments=SCRATCH_ARGUMENTS.get(op_name, ()),
        counted=op_name not in UNDECLARED_WRITES
        and not any("List" in str(argument.type) for _, argument in writes),
        keeps=op_name in KEEPING,
        writes=bool(written or writes),
        is_opaque=is_opaque,
        may_write=is_opaque or bool(written or writes),
        single=returns_tensor
        and not special
        and not view
        and (in_place or not (written or writes)),
        single_written=in_place,
        fresh=fresh,
    )


def _returns_memory_of_first(schema: Any) -> bool:
    """Whether an op returns the memory of its first argument, according to the schema."""
    if not schema.arguments or not schema.returns or str(schema.arguments[0].type) != "Tensor":
        return False
    first, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return first is not None and returned is not None and first.before_set == returned.before_set
