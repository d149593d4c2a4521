"""Known layers that draw a dropout mask of their own, kept from dropping.

They draw with `rand` or `bernoulli`, which no op-level policy can tell from other randomness.

The functions in `ROWS` run as their authors wrote them, except that one name is read as the
probability at which nothing drops. Each gets the code object compiled from its own source with
that name replaced (https://docs.python.org/3/reference/datamodel.html#function.__code__). The
function object stays, so it does not matter when it was imported, from where, or when a layer was
made. No attribute changes, so a layer is printed, copied and saved as before. What torch.jit or
torch.export captured is a copy of the code, and keeps its masks.
"""

from __future__ import annotations

import ast
import sys
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torchrepro.console import say
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.imports import AfterImport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """A function that draws a mask, and what one name in it stands for so that nothing drops."""

    modules: str
    """A module's name, or with a `*` at the end the beginning of several."""
    functions: str
    """Pattern of qualified names within the module."""
    name: str
    """Pattern of the parameters, variables or attributes that are read as `value`."""
    value: str = "0.0"
    """A Python expression."""

    def draws_in(self, module: str, function: str) -> bool:
        """Whether the function of that qualified name in `module` is one of this row's."""
        return fnmatchcase(module, self.modules) and fnmatchcase(function, self.functions)


_NEVER_SKIP = "-1.0"  # below every draw: some layers are skipped at `draw <= layerdrop`

ROWS = (
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


def zero() -> None:
    """Keep the known functions that are loaded, and those loaded later, from dropping.

    Changes their `__code__` and `sys.meta_path`; imports nothing. Raises `SourceMissingError`, and
    changes nothing, where the source of one of them cannot be read or is not what is running.
    """
    with _lock:
        _finder.watch()
        try:
            for module in filter(_finder.waits_for, list(sys.modules)):
                _zero_in(module)
        except BaseException:
            restore()
            raise


def restore() -> None:
    """Give every function its own code back; changes nothing where `zero` is not in force."""
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


_finder = AfterImport({row.modules for row in ROWS}, _zero_when_loaded)


def _zero_in(name: str) -> None:
    """Exchange the code of every function of the module `name` that draws a known mask."""
    module: Any = sys.modules.get(name)
    if module is None:
        return
    drawing: dict[FunctionType, list[WrittenMask]] = {}
    for function in _functions(module):
        code = function.__code__
        read = (*code.co_varnames, *code.co_names)
        rows = [
            row
            for row in ROWS
            if row.draws_in(name, code.co_qualname) and any(fnmatchcase(n, row.name) for n in read)
        ]
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
    """Yield the functions and methods that `module` itself defines, without their decorators."""
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
    """Yield the functions in a module's tree, wherever statements can hold one."""
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
    """Replaces each read of a name by the value that its row gives."""

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
