"""Make dropout return its input unchanged, for every caller in the process.

Replacements of the composite ops cover modules, functions, names imported earlier, recurrent
layers and attention. A replacement of `native_dropout` covers compiled and scripted code. Kernels
that contain dropout in a larger computation get a probability of 0
(https://docs.pytorch.org/docs/stable/library.html).

A module may draw its own mask with an op such as `torch.rand`. Such an op is not changed, because
random numbers can have another purpose. The report names each op that still draws, with the
number of calls. Draws of compiled code are not counted: they happen inside inductor's kernels.

Known functions with a custom mask get new code, compiled from their source with one change: a
value that drops nothing, such as 0.0, replaces a variable such as the probability
(https://docs.python.org/3/reference/datamodel.html#function.__code__). The function object stays
the same, so it does not matter when or how it was imported, or when a layer was created. No
attribute changes, so a layer is printed, copied and saved as before. A copy of the code that
torch.jit or torch.export captured keeps its masks.
"""

from __future__ import annotations

import ast
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torchrepro.ground.callers import frames, package
from torchrepro.ground.console import say
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.imports import AfterImport
from torchrepro.policies.interpose import (
    Priority,
    can_be_interposed,
    has_kernel,
    interpose,
    op_names,
    ops_named,
    override,
    packet_name,
    random_ops,
)
from torchrepro.policies.policy import Toggle, count

if TYPE_CHECKING:
    from contextlib import ExitStack


_COMPOSITE_KEYS = (
    "CompositeImplicitAutograd",
    "FuncTorchDynamicLayerFrontMode",  # torch.func decomposes these ops itself
    "FuncTorchVmapMode",
    "PrivateUse1",
    "AutogradPrivateUse1",
)
"""Dispatch keys where a composite op can have its own kernel."""

_KERNEL_KEYS = ("Autograd", "FuncTorchVmapMode", "AutogradPrivateUse1")
"""Dispatch keys that a call under autograd reaches first, also a call in compiled code."""

PROBABILITIES = {
    "dropout_p": 0.0,
    "dropout": 0.0,
    "dropout_prob": 0.0,
    "keep_prob": 1.0,
}
"""Arguments of larger kernels with dropout inside -> the value that drops nothing."""

OF_ASCEND = {"p": 0.0, "prob": 0.0}
"""Arguments of torch_npu's ops whose name contains dropout -> the value that drops nothing."""

_NAMESPACES = ("aten::", "npu::")

POLICY = "dropout"
_counting = threading.local()  # `.inside` is True while this thread runs a counted op


def _identity(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    # Returns a copy, because the caller may write to the result of dropout in place.
    unchanged = _identity_in_place(tensor, p, train)
    return unchanged.clone() if p and train else unchanged


def _identity_in_place(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    if not 0 <= p <= 1:  # same check and message as in torch
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    return tensor


def _identity_and_mask(dtype: str, tensor: Any, *rest: Any, **options: Any) -> Any:
    torch = import_module("torch")
    return tensor.clone(), torch.ones_like(tensor, dtype=getattr(torch, dtype))


def _rrelu(
    function: str,
    tensor: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    *rest: Any,
    **options: Any,
) -> Any:
    return getattr(import_module("torch").nn.functional, function)(tensor, (lower + upper) / 2)


def _slopes(tensor: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any) -> Any:
    """Return the slope of rrelu at each element. Backward reads it from the argument `noise`."""
    torch = import_module("torch")
    with torch.no_grad():
        return torch.ones_like(tensor).masked_fill_(tensor <= 0, (lower + upper) / 2)


def _with_noise(function: str, tensor: Any, noise: Any, *rest: Any, **options: Any) -> Any:
    noise.copy_(_slopes(tensor, *rest))
    return _rrelu(function, tensor, *rest)


_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
COMPOSITE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_DROPOUTS, _identity),
    **{f"{name}_": _identity_in_place for name in _DROPOUTS},
    "rrelu": partial(_rrelu, "leaky_relu"),
    "rrelu_": partial(_rrelu, "leaky_relu_"),
}
"""Composite ops -> their replacements."""

WITH_KERNELS: dict[str, Callable[..., Any]] = {
    "native_dropout": partial(_identity_and_mask, "bool"),
    # Ignores the scale, because TorchScript passes 1 / (1 - p) although nothing was dropped.
    "native_dropout_backward": lambda gradient, mask, scale: gradient.clone(),
    "_fused_dropout": partial(_identity_and_mask, "uint8"),
    "rrelu_with_noise": partial(_with_noise, "leaky_relu"),
    "rrelu_with_noise_": partial(_with_noise, "leaky_relu_"),
    "rrelu_with_noise_functional": lambda tensor, noise, *rest, **options: (
        _rrelu("leaky_relu", tensor, *rest),
        _slopes(tensor, *rest),
    ),
}
"""Ops with kernels -> their replacements."""


def _zero(undo: ExitStack) -> None:
    for table, keys in ((COMPOSITE, _COMPOSITE_KEYS), (WITH_KERNELS, _KERNEL_KEYS)):
        for name, replacement in table.items():
            for op in ops_named(f"aten::{name}"):
                for key in filter(partial(has_kernel, op), keys):
                    undo.callback(override(op, key, partial(_replaced, replacement)))
                if table is WITH_KERNELS:
                    undo.callback(interpose(op, Priority.DROPOUT, partial(_replaced, replacement)))
                else:
                    _replace_in_python(undo, op, replacement)
    for op, neutral in _larger_kernels():
        undo.callback(interpose(op, Priority.DROPOUT, partial(_without_dropout, neutral)))
    undo.callback(restore_masks)
    zero_masks()
    for op in random_ops():
        names = {argument.name for argument in op._schema.arguments}  # noqa: SLF001 - the schema has no public reader
        # Zeroed dropout draws nothing, so it is not counted.
        if packet_name(op) not in WITH_KERNELS and names.isdisjoint(PROBABILITIES):
            undo.callback(interpose(op, Priority.DROPOUT, partial(_count, op.name())))


policy = Toggle("keep", "zero", "dropout zero", _zero)
"""The knob `dropout`: `keep` changes nothing, `zero` overrides the dropout of torch."""


def _replaced(
    replacement: Callable[..., Any], proceed: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return replacement(*args, **kwargs)


def _larger_kernels() -> Iterator[tuple[Any, dict[str, float | None]]]:
    """Yield ops with dropout inside, and argument -> the value that turns dropout off, or None."""
    names = (name for name in op_names() if name.startswith(_NAMESPACES))
    for op in ops_named(*names):
        of_ascend = op.name().startswith("npu::") and "dropout" in op.name()
        neutral = {**PROBABILITIES, **(OF_ASCEND if of_ascend else {})}
        values = {
            argument.name: neutral.get(argument.name) if str(argument.type) == "float" else None
            for argument in op._schema.arguments  # noqa: SLF001 - the schema has no public reader
        }
        if any(value is not None for value in values.values()) and can_be_interposed(op):
            yield op, values


def _without_dropout(
    neutral: dict[str, float | None], proceed: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    positional = zip(args, neutral.values(), strict=False)
    args = tuple(argument if value is None else value for argument, value in positional)
    kwargs |= {name: neutral[name] for name in kwargs if neutral[name] is not None}
    return proceed(*args, **kwargs)


def _replace_in_python(undo: ExitStack, op: Any, replacement: Callable[..., Any]) -> None:
    """Replace the Python kernels of `op`, which torch.compile uses instead of the dispatcher.

    Uses private API (``OpOverload.py_kernels``): while torch.compile traces code, decompositions
    in Python have priority over the dispatcher, and no public API replaces them. If `op` has no
    Python kernel, its override in the dispatcher suffices.
    """
    kernels: dict[Any, Any] = getattr(op, "py_kernels", {})
    before = {key: kernel for key, kernel in kernels.items() if str(key) != "DispatchKey.Meta"}

    def install(replacements: dict[Any, Any]) -> None:
        kernels.update(replacements)
        getattr(op, "_dispatch_cache", {}).clear()

    undo.callback(install, before)
    install(dict.fromkeys(before, replacement))


def _count(name: str, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if getattr(_counting, "inside", False):
        return proceed(*args, **kwargs)  # an op that draws through another op is counted once
    _counting.inside = True
    try:
        count(POLICY, name, "drew random numbers", _caller())
        return proceed(*args, **kwargs)
    finally:
        _counting.inside = False


def _caller() -> str:
    for frame in frames():
        # Code that torch generates belongs to no module.
        if package(frame) not in ("torch", "torchrepro", ""):
            return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}:{frame.f_lineno}"
    return "torch itself"


# Known functions that draw a custom mask.


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """A row of `WRITTEN_MASKS`: functions that draw a mask, and how to make them drop nothing."""

    modules: str  # the name of a module, or a prefix followed by `*`
    functions: str  # pattern of qualified names within the module
    name: str  # pattern of the parameters, variables or attributes that `value` replaces
    value: str = "0.0"  # a Python expression

    def draws_in(self, module: str, function: str, read: Iterable[str]) -> bool:
        """Return whether this row covers `function` of `module`, given the names it reads."""
        is_known = fnmatchcase(module, self.modules) and fnmatchcase(function, self.functions)
        return is_known and any(fnmatchcase(name, self.name) for name in read)


_NEVER_SKIP = "-1.0"  # less than any draw, since a layer is skipped if `draw <= layerdrop`

WRITTEN_MASKS = (
    # https://github.com/pytorch/vision/tree/main/torchvision/ops
    WrittenMask("torchvision.ops.*", "stochastic_depth", "p"),
    WrittenMask("torchvision.ops.*", "drop_block[23]d", "p"),
    # https://github.com/huggingface/pytorch-image-models/tree/main/timm/layers
    WrittenMask("timm.*", "drop_path", "drop_prob"),
    WrittenMask("timm.*", "drop_block_*2d", "drop_prob"),
    WrittenMask("timm.*", "DropBlock2d.forward", "drop_prob"),
    WrittenMask("timm.*", "patch_dropout_forward", "prob"),
    WrittenMask("timm.*", "PatchDropout.forward", "prob"),
    WrittenMask("timm.*", "ResidualDrop.forward", "drop"),
    # https://github.com/huggingface/transformers/tree/main/src/transformers/models
    WrittenMask("transformers.models.*", "drop_path", "drop_prob"),
    WrittenMask("transformers.models.*", "*DropPath.forward", "drop_prob"),
    WrittenMask("transformers.models.*", "*.forward", "*layerdrop", _NEVER_SKIP),
    WrittenMask("transformers.models.*", "LayerDropModuleList.__iter__", "p", _NEVER_SKIP),
    WrittenMask("transformers.models.*", "*ResidualLayer.forward", "drop_rate"),
    WrittenMask("transformers.models.*", "StableDropout.forward", "drop_prob"),
    WrittenMask("transformers.models.*", "get_mask", "dropout"),
    WrittenMask("transformers.models.*", "*._consistent_dropout", "p"),
    WrittenMask(
        "transformers.models.*",
        "*._consistent_dropout",
        "all_masks",
        "torch.ones_like(inputs_embeds)",
    ),
    WrittenMask("transformers.models.*", "*ResidualVectorQuantize*.forward", "quantizer_dropout"),
    # https://gitcode.com/Ascend/pytorch/tree/master/torch_npu/contrib
    WrittenMask("torch_npu.contrib.*", "dropout_with_byte_mask", "training", "False"),
    WrittenMask("torch_npu.contrib.*", "dropout_with_byte_mask", "p"),
    WrittenMask("torch_npu.contrib.*", "Npu*Dropout.forward", "p"),
    WrittenMask("torch_npu.contrib.*", "NpuDropPath.forward", "drop_prob"),
    WrittenMask("torch_npu.contrib.*", "fuse_add_softmax_dropout", "p"),
)


_Position = tuple[str, int]  # name and first line of a function, including its decorators


class SourceMissingError(RuntimeError):
    """The source of a function that draws a mask is missing, or differs from the running code."""


_exchanged: dict[FunctionType, tuple[CodeType, CodeType]] = {}
"""Function -> its original code, and its current code, which drops nothing."""

_lock = fork_safe_lock()  # modules are imported in any thread


def zero_masks() -> None:
    """Make the known functions drop nothing, including functions of modules that are loaded later.

    Replaces the `__code__` of functions, and adds a finder to `sys.meta_path`. Imports nothing.
    Raises `SourceMissingError`, without any change, if a source is missing or differs from the
    running code.
    """
    with _lock:
        _finder.watch()
        try:
            for module in _finder.loaded():
                _zero_in(module)
        except BaseException:
            restore_masks()
            raise


def restore_masks() -> None:
    """Restore the original code of every function that `zero_masks` changed."""
    with _lock:
        _finder.unwatch()
        while _exchanged:
            function, (original, zeroed) = _exchanged.popitem()
            if function.__code__ is zeroed:  # False if other code replaced it later
                function.__code__ = original


def _zero_when_loaded(module: str) -> None:
    with _lock:
        if _finder not in sys.meta_path:  # the policy was turned off during the import
            return
        try:
            _zero_in(module)
        except SourceMissingError as error:  # the import of the user must not fail
            say(f"dropout is not zeroed: {error}")


_finder = AfterImport({row.modules for row in WRITTEN_MASKS}, _zero_when_loaded)


def _zero_in(name: str) -> None:
    module: Any = sys.modules.get(name)
    if module is None:
        return
    drawing: dict[FunctionType, list[WrittenMask]] = {}
    for function in _functions(module):
        code = function.__code__
        read = (*code.co_varnames, *code.co_names)
        rows = [row for row in WRITTEN_MASKS if row.draws_in(name, code.co_qualname, read)]
        if rows and function not in _exchanged:
            drawing[function] = rows
    if not drawing:
        return
    file = next(iter(drawing)).__code__.co_filename
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the library's source
        tree = _tree(module)
        # Compile the whole module, because its imports affect the code of a function.
        as_written = dict(_codes(compile(tree, file, "exec", dont_inherit=True)))
        rows_by_position = {_position(f.__code__): rows for f, rows in drawing.items()}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first_line = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                if (node.name, first_line) in rows_by_position:
                    _NameReplacer(rows_by_position[node.name, first_line]).visit(node)
        zeroed = dict(_codes(compile(tree, file, "exec", dont_inherit=True)))
    for function in drawing:
        running = function.__code__
        compiled = as_written.get(_position(running))
        if compiled is None or compiled.co_code != running.co_code:
            raise SourceMissingError(f"{name}.{running.co_qualname} differs from its source")
        _exchanged[function] = running, zeroed[_position(running)]
        function.__code__ = zeroed[_position(running)]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        members: list[Any] = [value]
        if isinstance(value, type) and value.__module__ == module.__name__:
            members = list(vars(value).values())
        for member in members:
            function = member
            if isinstance(function, staticmethod | classmethod):
                function = function.__func__
            while isinstance(function, FunctionType) and "__wrapped__" in vars(function):
                function = vars(function)["__wrapped__"]
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def _tree(module: ModuleType) -> ast.Module:
    get_source = getattr(getattr(module, "__loader__", None), "get_source", None)
    try:
        source: str | None = get_source(module.__name__) if get_source is not None else None
        if source is None:
            raise SourceMissingError(f"{module.__name__} has no source")
        return ast.parse(source)
    except (ImportError, SyntaxError) as error:
        raise SourceMissingError(f"{module.__name__}: cannot read its source: {error}") from error


def _codes(code: CodeType) -> Iterator[tuple[_Position, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield _position(constant), constant
            yield from _codes(constant)


def _position(code: CodeType) -> _Position:
    return code.co_name, code.co_firstlineno


class _NameReplacer(ast.NodeTransformer):
    def __init__(self, rows: list[WrittenMask]) -> None:
        self.rows = rows

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._replaced(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return self._replaced(node, node.attr)

    def _replaced(self, node: ast.Name | ast.Attribute, name: str) -> ast.expr:
        row = next((row for row in self.rows if fnmatchcase(name, row.name)), None)
        if row is None or not isinstance(node.ctx, ast.Load):
            return node
        value = ast.parse(row.value, mode="eval").body
        for part in ast.walk(value):
            ast.copy_location(part, node)
        return value
