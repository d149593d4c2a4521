"""Dropout as the identity, for every caller in the process.

A stand-in at the composite ops reaches modules, functions, names imported earlier, recurrent
layers and attention alike. One at `native_dropout` reaches what compiled and scripted code calls.
Kernels that drop inside a larger computation are given a probability of 0
(https://docs.pytorch.org/docs/stable/library.html).

A mask that a module writes by hand looks like any other random number. Nothing is assumed about
it: every op that still draws is counted and named in the report. Code that inductor has compiled
draws inside kernels of its own, which is not seen here.

Known functions that write such a mask run as their authors wrote them, except that one name is read
as the probability at which nothing drops. Each gets the code object compiled from its own source
with that name replaced (https://docs.python.org/3/reference/datamodel.html#function.__code__). The
function object stays, so it does not matter when it was imported, from where, or when a layer was
made. No attribute changes, so a layer is printed, copied and saved as before. What torch.jit or
torch.export captured is a copy of the code, and keeps its masks.
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
    "FuncTorchDynamicLayerFrontMode",  # torch.func takes these ops apart itself
    "FuncTorchVmapMode",
    "PrivateUse1",
    "AutogradPrivateUse1",
)
"""Where an op that torch makes of other ops can have a kernel of its own."""

_KERNEL_KEYS = ("Autograd", "FuncTorchVmapMode", "AutogradPrivateUse1")
"""Where an op with kernels is met by calls that autograd follows, as compiled ones."""

PROBABILITIES = {
    "dropout_p": 0.0,
    "dropout": 0.0,
    "dropout_prob": 0.0,
    "keep_prob": 1.0,
}
"""Arguments of larger kernels that drop inside, and the value with which they drop nothing."""

OF_ASCEND = {"p": 0.0, "prob": 0.0}
"""The same for the ops of torch_npu that have dropout in their name."""

_NAMESPACES = ("aten::", "npu::")

POLICY = "dropout"
_counting = threading.local()  # .inside: whether this thread is within an op that is counted


def _identity(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    # A copy, because code after dropout may write to its result in place.
    same = _identity_in_place(tensor, p, train)
    return same.clone() if p and train else same


def _identity_in_place(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    if not 0 <= p <= 1:  # torch checks it here as well, in these words
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    return tensor


def _identity_and_mask(kind: str, tensor: Any, *rest: Any, **more: Any) -> Any:
    torch = import_module("torch")
    return tensor.clone(), torch.ones_like(tensor, dtype=getattr(torch, kind))


def _rrelu(
    kind: str, tensor: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any, **more: Any
) -> Any:
    return getattr(import_module("torch").nn.functional, kind)(tensor, (lower + upper) / 2)


def _slopes(tensor: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any) -> Any:
    """Return what backward multiplies a gradient with, as torch keeps it in `noise`."""
    torch = import_module("torch")
    with torch.no_grad():
        return torch.ones_like(tensor).masked_fill_(tensor <= 0, (lower + upper) / 2)


def _with_noise(kind: str, tensor: Any, noise: Any, *rest: Any, **more: Any) -> Any:
    noise.copy_(_slopes(tensor, *rest))
    return _rrelu(kind, tensor, *rest)


_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
COMPOSITE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_DROPOUTS, _identity),
    **{f"{name}_": _identity_in_place for name in _DROPOUTS},
    "rrelu": partial(_rrelu, "leaky_relu"),
    "rrelu_": partial(_rrelu, "leaky_relu_"),
}
"""Ops that torch makes of other ops, and what stands in for them."""

WITH_KERNELS: dict[str, Callable[..., Any]] = {
    "native_dropout": partial(_identity_and_mask, "bool"),
    # TorchScript saves a mask of ones and asks for 1 / (1 - p) times the gradient.
    "native_dropout_backward": lambda gradient, mask, scale: gradient.clone(),
    "_fused_dropout": partial(_identity_and_mask, "uint8"),
    "rrelu_with_noise": partial(_with_noise, "leaky_relu"),
    "rrelu_with_noise_": partial(_with_noise, "leaky_relu_"),
    "rrelu_with_noise_functional": lambda tensor, noise, *rest, **more: (
        _rrelu("leaky_relu", tensor, *rest),
        _slopes(tensor, *rest),
    ),
}
"""Ops with kernels of their own, and what stands in for them."""


def _zero(undo: ExitStack) -> None:
    for table, keys in ((COMPOSITE, _COMPOSITE_KEYS), (WITH_KERNELS, _KERNEL_KEYS)):
        for name, stand_in in table.items():
            for op in ops_named(f"aten::{name}"):
                for key in filter(partial(has_kernel, op), keys):
                    undo.callback(override(op, key, partial(_instead, stand_in)))
                if table is WITH_KERNELS:
                    undo.callback(interpose(op, Priority.DROPOUT, partial(_instead, stand_in)))
                else:
                    _replace_in_python(undo, op, stand_in)
    for op, places in _larger_kernels():
        undo.callback(interpose(op, Priority.DROPOUT, partial(_without_dropout, places)))
    undo.callback(restore_masks)
    zero_masks()
    for op in random_ops():
        arguments = {argument.name for argument in op._schema.arguments}  # noqa: SLF001 - the schema has no public reader
        # Dropout, and what drops inside, draws nothing when it is zeroed.
        if packet_name(op) not in WITH_KERNELS and arguments.isdisjoint(PROBABILITIES):
            undo.callback(interpose(op, Priority.DROPOUT, partial(_count, op.name())))


policy = Toggle("keep", "zero", "dropout zero", _zero)
"""Whether dropout is zeroed: `keep` leaves torch alone, `zero` overrides its dropout."""


def _instead(
    stand_in: Callable[..., Any], proceed: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return stand_in(*args, **kwargs)


def _larger_kernels() -> Iterator[tuple[Any, tuple[tuple[int, str, float], ...]]]:
    names = (name for name in op_names() if name.startswith(_NAMESPACES))
    for op in ops_named(*names):
        of_ascend = op.name().startswith("npu::") and "dropout" in op.name()
        neutral = {**PROBABILITIES, **(OF_ASCEND if of_ascend else {})}
        places = tuple(
            (position, argument.name, neutral[argument.name])
            for position, argument in enumerate(op._schema.arguments)  # noqa: SLF001 - the schema has no public reader
            if argument.name in neutral and str(argument.type) == "float"
        )
        if places and can_be_interposed(op):
            yield op, places


def _without_dropout(
    places: tuple[tuple[int, str, float], ...],
    proceed: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    positional = list(args)
    for position, name, neutral in places:
        if position < len(positional):
            positional[position] = neutral
        elif name in kwargs:
            kwargs[name] = neutral
    return proceed(*positional, **kwargs)


def _replace_in_python(undo: ExitStack, op: Any, stand_in: Callable[..., Any]) -> None:
    """Put the stand-in where torch.compile looks before the dispatcher.

    Private (``OpOverload.py_kernels``): the decompositions that torch writes in Python outrank
    its dispatcher while code is traced, and there is no public way to replace one. Where they are
    gone, nothing outranks the override.
    """
    kernels: dict[Any, Any] = getattr(op, "py_kernels", {})
    before = {key: kernel for key, kernel in kernels.items() if str(key) != "DispatchKey.Meta"}

    def put(present: dict[Any, Any]) -> None:
        kernels.update(present)
        getattr(op, "_dispatch_cache", {}).clear()

    undo.callback(put, before)
    put(dict.fromkeys(before, stand_in))


def _count(name: str, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if getattr(_counting, "inside", False):
        return proceed(*args, **kwargs)  # an op that draws by another is counted once
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


# Known functions that write a mask of their own.


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """A function that draws a mask, and what one name in it stands for so that nothing drops."""

    modules: str  # A module's name, or with a `*` at the end the beginning of several
    functions: str  # pattern of qualified names within the module
    name: str  # pattern of the parameters, variables or attributes that are read as `value`
    value: str = "0.0"  # A Python expression

    def draws_in(self, module: str, function: str, read: Iterable[str]) -> bool:
        """Whether the function of that name in `module`, with the names it reads, is this row's."""
        is_known = fnmatchcase(module, self.modules) and fnmatchcase(function, self.functions)
        return is_known and any(fnmatchcase(each, self.name) for each in read)


_NEVER_SKIP = "-1.0"  # below every draw: some layers are skipped at `draw <= layerdrop`

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


_Place = tuple[str, int]  # a function's name and the first line of it or of its decorators


class SourceMissingError(RuntimeError):
    """The source of a function that draws a mask is not there, or is not what is running."""


_exchanged: dict[FunctionType, tuple[CodeType, CodeType]] = {}
"""Function -> its own code, and the code that drops nothing, which it has now."""

_lock = fork_safe_lock()  # modules are imported in any thread


def zero_masks() -> None:
    """Keep the known functions that are loaded, and those loaded later, from dropping.

    Changes their `__code__` and `sys.meta_path`; imports nothing. Raises `SourceMissingError`, and
    changes nothing, where the source of one of them cannot be read or is not what is running.
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
    """Give every function its own code back; changes nothing where `zero_masks` is not in force."""
    with _lock:
        _finder.unwatch()
        while _exchanged:
            function, (own, zeroed) = _exchanged.popitem()
            if function.__code__ is zeroed:  # else somebody has replaced it since
                function.__code__ = own


def _zero_when_loaded(module: str) -> None:
    with _lock:
        if _finder not in sys.meta_path:  # restored while the module was imported
            return
        try:
            _zero_in(module)
        except SourceMissingError as error:  # an import must not fail for it
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
        warnings.simplefilter("ignore")  # the compiler's, about a library's source
        tree = _tree(module)
        # The module is compiled in one piece: what it imports decides about a function's code.
        as_written = dict(_codes(compile(tree, file, "exec", dont_inherit=True)))
        rows_by_place = {_place(function.__code__): rows for function, rows in drawing.items()}
        for place, definition in _definitions(tree):
            if place in rows_by_place:
                _NameReplacer(rows_by_place[place]).visit(definition)
        zeroed = dict(_codes(compile(tree, file, "exec", dont_inherit=True)))
    for function in drawing:
        own = function.__code__
        found = as_written.get(_place(own))
        if found is None or found.co_code != own.co_code:
            raise SourceMissingError(f"{name}.{own.co_qualname} differs from its source")
        _exchanged[function] = own, zeroed[_place(own)]
        function.__code__ = zeroed[_place(own)]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        of_class = isinstance(value, type) and value.__module__ == module.__name__
        for member in list(vars(value).values()) if of_class else (value,):
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
            raise SourceMissingError(f"{module.__name__} is there without its source")
        return ast.parse(source)
    except (ImportError, SyntaxError) as error:
        raise SourceMissingError(
            f"{module.__name__}: its source cannot be read: {error}"
        ) from error


def _definitions(tree: ast.AST) -> Iterator[tuple[_Place, ast.FunctionDef]]:
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, ast.FunctionDef):
            first = min([part.lineno, *(decorator.lineno for decorator in part.decorator_list)])
            yield (part.name, first), part
        if isinstance(part, ast.stmt):
            yield from _definitions(part)


def _codes(code: CodeType) -> Iterator[tuple[_Place, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield _place(constant), constant
            yield from _codes(constant)


def _place(code: CodeType) -> _Place:
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
