"""What torchrepro borrows from other libraries is a contract, and borrowed.yaml has its rows.

Once a new version of a library is out, run this file: the row that fails says what changed, which
module needs it, and what users lose without it.
"""

import ast
import ctypes
import importlib.abc
import importlib.util
import inspect
import json
import random
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as torchs_loaders

import torchrepro
from torchrepro.integrations import hydra_source
from torchrepro.policies.deterministic_ops import TORCH_NAMESPACES
from torchrepro.seeding import unseeded_generators

from .policies.known_layers import let_torchvision_be_imported

HERE = Path(__file__).parent
PACKAGE = Path(torchrepro.__file__).parent
ROWS = {row["title"]: row for row in yaml.safe_load((HERE / "borrowed.yaml").read_text())}
IN_TURN = [
    (title, names)
    for title, row in ROWS.items()
    if "stays" not in row
    # A table of many names of one kind is taken away at once.
    for names in ([row["names"]] if len(row["names"]) > 8 else [[name] for name in row["names"]])
]

DOCUMENTED = {"_asdict", "_make", "_replace", "_fields", "_exit"}
"""Names that begin with an underscore and are public: of named tuples, and `os._exit`."""

OF_OURS = {
    (
        "verification.relations.loading_observer",
        "_dataset",
    ),  # of our own wrapper of a dataset
    ("seeding.nondeterministic_calls", "_ns"),  # ends of the names of public functions
    ("verification.pinned_sources", "_ns"),
    ("verification.pinned_sources", "_like"),
}
"""Module and name that the scan takes for a foreign one."""

_PATH = re.compile(r"[\w.:*]+")


# What the modules use.


def _own_names(tree):
    """Return the names that a module defines itself: functions, attributes of `self`, and so on."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from (each.value for each in ast.walk(value) if hasattr(each, "value"))
            case ast.Call(func=ast.Attribute(value=ast.Call(args=[ast.Name(id="self")]))):
                yield from (keyword.arg for keyword in node.keywords)  # vars(self).update(_x=...)


def _written_names(tree):
    """Yield what may be a foreign name: of attributes, of imports, and of paths within texts."""
    passed_over = set()  # documentation, pieces of names, and our own slots
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()) | ast.JoinedStr():
                passed_over |= {id(each) for each in ast.walk(node)}
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                passed_over |= {id(each) for each in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.Import(names=names):
                yield from (part for each in names for part in each.name.split("."))
            case ast.ImportFrom(module=str(module), names=names):
                if not module.startswith("torchrepro"):
                    yield from (*module.split("."), *(each.name for each in names))
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in passed_over:
                paths = [word for word in text.split() if _PATH.fullmatch(word)]
                yield from (part for path in paths for part in re.split(r"[.:]+", path))


def _uses():
    """Return the private foreign names that each module uses, and every name that it writes."""
    private, written = {}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        written[module] = set(_written_names(tree))
        own = DOCUMENTED.union(_own_names(tree))
        private[module] = {
            name
            for name in written[module] - own
            if re.fullmatch(r"_(?!_)[\w*]+", name)
            and (not name.endswith("_") or name.count("_") > 2)  # `_target_`: a key of Hydra's
            and (module, name) not in OF_OURS
        }
    return private, written


PRIVATE, WRITTEN = _uses()


def test_each_private_name_of_another_library_has_a_row():
    """A module uses no private foreign name but those of the rows that name the module."""
    of_rows = defaultdict(set)
    for row in ROWS.values():
        for module in row["used_by"]:
            of_rows[module].update(row["names"])

    assert {
        module: missing for module, names in PRIVATE.items() if (missing := names - of_rows[module])
    } == {}


@pytest.mark.parametrize("title", ROWS)
def test_each_row_is_used(title):
    """Each name of a row is written in a module that it names, and each module writes one."""
    row = ROWS[title]
    used = {module: {*row["names"]} & WRITTEN[module] for module in row["used_by"]}

    assert set().union(*used.values()) == {*row["names"]}
    assert [module for module, names in used.items() if not names] == []


# What the rows expect.


def _import_under_way():
    seen = []

    class Example(importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            return importlib.util.spec_from_loader(name, self) if name == "example" else None

        def exec_module(self, module):
            seen.append(module.__spec__._initializing)

    sys.meta_path.insert(0, example := Example())
    try:
        its = importlib.import_module("example").__spec__
    finally:
        sys.meta_path.remove(example)
        sys.modules.pop("example", None)
    return seen == [True] and not its._initializing


def _secret_of_hashes():
    secret = bytes((ctypes.c_ubyte * 16).in_dll(ctypes.pythonapi, "_Py_HashSecret"))

    return any(secret) == bool(sys.flags.hash_randomization)


def _layout_of_random():
    example = random.Random(1)
    before = unseeded_generators._words(id(example))
    example.random()

    return unseeded_generators._words(id(example)) != before


def _task_of_a_pool():
    from concurrent.futures import process

    return "call_item" in process._process_worker.__code__.co_varnames


def _deterministic_algorithms():
    torch._C._set_deterministic_algorithms(False, warn_only=False)
    return True


def _settings_of_the_compiler():
    from torch._inductor import config
    from torch.utils._config_module import ConfigModule

    name = next(iter(config.get_config_copy()))
    is_known = hasattr(config._config[name], "default") and "__setattr__" in vars(ConfigModule)
    return is_known and config._is_default(name) in (True, False)


def _mark_for_the_compiler():
    from torch._dynamo import external_utils

    disabled = torch.compiler.disable(lambda: None)
    return disabled._torchdynamo_disable is True and external_utils is not None


def _schema_of_an_op():
    schema = torch.ops.aten.add.out._schema
    last = schema.arguments[-1]

    return (
        last.is_out and last.alias_info.is_write and schema.returns and str(last.type) == "Tensor"
    )


def _keys_below():
    keys = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    return keys.has(torch._C.DispatchKey.CPU) and not keys.has(torch._C.DispatchKey.BackendSelect)


def _kernels_of_an_op():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

    names = torch._C._dispatch_get_all_op_names()
    return "aten::uniform_" in names and has_kernel("aten::uniform_", "CPU")


def _frames_the_compiler_skips():
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        return frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    return callable(frames.skip_code) and callable(frames.set_eval_frame)


def _has_op(name):
    if name == "_histogramdd_from_bin_cts":
        return hasattr(torch.ops.aten, name)
    return any(hasattr(getattr(torch.ops, space), name) for space in ("aten", "profiler"))


def _ops_without_a_public_name():
    return [name for name in ROWS["ops without a public name"]["names"] if not _has_op(name)] == []


def _namespaces_of_ops():
    import torch._inductor.inductor_prims
    import torch.distributed.tensor  # noqa: F401 - so that all of torch's own are defined

    return {*ROWS["namespaces of ops"]["names"]} <= TORCH_NAMESPACES | {"_c10d_functional"}


def _higher_order_ops():
    import torch._higher_order_ops

    ops = torch._ops._higher_order_ops
    return ops["cond"].python_key_table is not None


def _leaves_of_a_tree():
    return torch.utils._pytree.tree_leaves([1, (2, {"a": 3})]) == [1, 2, 3]


def _version_of_a_tensor():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)

    return tensor._version == before + 1


def _base_of_a_view():
    tensor = torch.zeros(2)

    return tensor[:1]._base is tensor and tensor._base is None


def _address_in_c():
    one, other = torch.zeros(2), torch.zeros(2)
    storages = one.untyped_storage()._cdata, other.untyped_storage()._cdata
    generators = torch.Generator()._cdata, torch.default_generator._cdata

    return one[1:].untyped_storage()._cdata == storages[0] != storages[1] and all(generators)


def _parts_of_a_sparse_tensor():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,))

    return (
        sparse._nnz() == 2 and sparse._values().numel() == 2 and sparse._indices().shape == (1, 2)
    )


def _zeros_without_memory():
    return torch._efficientzerotensor(2)._is_zerotensor() and not torch.zeros(2)._is_zerotensor()


def _tensors_of_torch_func():
    told = []
    functorch = torch._C._functorch

    def note(value):
        told.append(functorch.is_functorch_wrapped_tensor(value))
        told.append(functorch.get_unwrapped(value) is not value)
        return value

    torch.func.vmap(note)(torch.zeros(2))
    functional = torch._to_functional_tensor(torch.zeros(2))
    is_told = torch._is_functional_tensor(functional) and not torch._is_functional_tensor(
        torch.zeros(1)
    )
    return (
        told == [True, True] and is_told and torch._from_functional_tensor(functional).shape == (2,)
    )


def _alias_with_a_version():
    from torch.utils._python_dispatch import TorchDispatchMode

    from torchrepro.trace.waiting_outputs import _alias

    aliases = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            aliases.append(_alias(result))
            return result

    with Mode():
        tensor = torch.ones(2, requires_grad=True).mul(2)
        tensor.add_(1)
    tensor.view(-1).add_(1)
    *_, first, second = aliases
    versions = first._version, second._version
    return versions == (2, 2) and first.grad_fn is None and first._base is None


def _reading_unobserved():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
        torch.zeros(2).add(1)
    return seen == []


def _weights_of_a_recurrent_layer():
    layer = torch.nn.LSTM(2, 2)

    is_second = layer._flat_weights[0] is layer.weight_ih_l0
    return is_second and layer._flat_weight_refs[0]() is layer.weight_ih_l0


def _names_that_wrappers_add():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils

    of_checkpointing = checkpoint_wrapper.checkpoint_wrapper(torch.nn.Linear(1, 1))
    compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    return (
        _common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module"
        and hasattr(of_checkpointing, "_checkpoint_wrapped_module")
        and hasattr(compiled, "_orig_mod")
    )


def _start_method_of_a_loader():
    return hasattr(DataLoader([1]), "_DataLoader__multiprocessing_context")


def _iterator_of_a_loader():
    loader = DataLoader([1], num_workers=1, persistent_workers=True)
    before, begun = loader._iterator, iter(loader)

    return before is None and loader._iterator is begun


def _iterators_by_the_number_of_workers():
    iterator = iter(DataLoader([1], num_workers=1))
    ended = iterator._shutdown is False
    iterator._shutdown_workers()

    kinds = (
        torchs_loaders._MultiProcessingDataLoaderIter,
        torchs_loaders._SingleProcessDataLoaderIter,
    )
    return ended and iterator._shutdown and type(iterator) is kinds[0] and kinds[1]


def _readers_of_datasets():
    kind = torch.utils.data._DatasetKind
    reader = kind.create_fetcher(kind.Map, [1], True, list, False)

    return reader.fetch([0]) == [1]


def _base_seed_of_an_iterator():
    return isinstance(iter(DataLoader([1]))._base_seed, int)


def _attributes_of_an_iterator():
    its = iter(DataLoader([1, 2], worker_init_fn=print))
    next(its)
    has_init = iter(DataLoader([1], num_workers=1, worker_init_fn=print))._worker_init_fn is print
    return has_init and (its._dataset, its._num_workers, its._num_yielded) == ([1, 2], 0, 1)


def _sampler_of_a_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    return type(DataLoader(Stream()).sampler).__name__ == "_InfiniteConstantSampler"


def _thread_that_pins_memory():
    from torch.utils.data._utils import pin_memory

    return callable(pin_memory._pin_memory_loop)


def _stack_of_modes():
    from torch.utils import _python_dispatch as modes

    class Mode(modes.TorchDispatchMode):
        pass

    with Mode() as mode:
        stack = modes._get_current_dispatch_mode_stack()
        popped = modes._pop_mode()
        modes._push_mode(popped)
    is_ours = getattr(mode, "_mode_key", None) is None
    return (
        stack == [mode] and popped is mode and is_ours and torch._C._current_graph_task_id() == -1
    )


def _node_that_runs():
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value**2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch._C._current_autograd_node()._sequence_nr())
            return gradient

    number = torch._C._autograd._get_sequence_nr()
    Square.apply(torch.ones(2, requires_grad=True)).sum().backward()
    return seen == [number]


def _call_of_a_module():
    class Model(torch.nn.Module):
        def forward(self):
            frame = sys._getframe(1)
            while frame.f_code is not torch.nn.Module._call_impl.__code__:
                frame = frame.f_back
            return frame.f_locals["self"] is self

    return Model()()


def _call_of_the_engine():
    code = torch.autograd.graph._engine_run_backward.__code__

    return code.co_filename.endswith("graph.py") and code.co_name == "_engine_run_backward"


def _code_left_out_of_compilation():
    from torch._dynamo import trace_rules

    return [*inspect.signature(trace_rules.add).parameters] == ["import_name"]


def _hooks_of_ddp():
    from torch.nn.parallel import DistributedDataParallel

    return "self._comm_hooks" in inspect.getsource(DistributedDataParallel.__init__)


def _parts_of_a_module():
    its = vars(torch.nn.Module())

    return its["_modules"] == {} and its["_non_persistent_buffers_set"] == set()


def _global_random_state():
    return np.random.mtrand._rand is np.random.rand.__self__


def _state_of_a_stateful_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader([1])
    state = loader.state_dict()
    before = loader._initial_iter_for_state_dict
    assert [*loader] == [torch.tensor([1])]
    return before and loader._iterator._finished and "_iterator_finished" in state


def _of_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator._dataloaders == [] and accelerator._optimizers == []


def _batches_that_lightning_has_fetched():
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return hasattr(trainer.fit_loop, "_data_fetcher") and _PrefetchDataFetcher().batches == []


def _order_of_a_composition():
    from hydra import compose, initialize

    with initialize(version_base=None, config_path=None):
        compose(overrides=["+repro=seed-only", "+repro/with=[no-dropout,cpu-fallback]"])
    hydra_source.process.unapplied.clear()  # nothing was to be put in force
    return hydra_source.process.request.pieces == ["with/no-dropout", "with/cpu-fallback"]


CHECKS = {
    "import under way": _import_under_way,
    "secret of hashes": _secret_of_hashes,
    "layout of random.Random": _layout_of_random,
    "task of a pool": _task_of_a_pool,
    "trace function in C": lambda: ctypes.pythonapi.PyEval_SetTrace and ctypes.pythonapi.Py_IncRef,
    "deterministic algorithms without inductor": _deterministic_algorithms,
    "settings of the compiler": _settings_of_the_compiler,
    "mark for the compiler": _mark_for_the_compiler,
    "version of NCCL": lambda: torch.version.cuda is None or hasattr(torch._C, "_nccl_version"),
    "schema of an op": _schema_of_an_op,
    "keys below a kernel": _keys_below,
    "kernels of an op": _kernels_of_an_op,
    "frames the compiler skips": _frames_the_compiler_skips,
    "ops without a public name": _ops_without_a_public_name,
    "namespaces of ops": _namespaces_of_ops,
    "higher-order ops": _higher_order_ops,
    "leaves of a tree": _leaves_of_a_tree,
    "version of a tensor": _version_of_a_tensor,
    "base of a view": _base_of_a_view,
    "address of an object in C": _address_in_c,
    "parts of a sparse tensor": _parts_of_a_sparse_tensor,
    "zeros without memory": _zeros_without_memory,
    "tensors of torch.func": _tensors_of_torch_func,
    "alias with a version": _alias_with_a_version,
    "reading unobserved": _reading_unobserved,
    "weights of a recurrent layer": _weights_of_a_recurrent_layer,
    "names that wrappers add": _names_that_wrappers_add,
    "readers of datasets": _readers_of_datasets,
    "start method of a loader": _start_method_of_a_loader,
    "iterator of a loader": _iterator_of_a_loader,
    "iterators by the number of workers": _iterators_by_the_number_of_workers,
    "base seed of an iterator": _base_seed_of_an_iterator,
    "attributes of an iterator": _attributes_of_an_iterator,
    "sampler of a stream": _sampler_of_a_stream,
    "thread that pins memory": _thread_that_pins_memory,
    "stack of modes": _stack_of_modes,
    "node that runs": _node_that_runs,
    "call of a module": _call_of_a_module,
    "call of the engine": _call_of_the_engine,
    "code left out of compilation": _code_left_out_of_compilation,
    "hooks of DDP": _hooks_of_ddp,
    "parts of a module": _parts_of_a_module,
    "global RandomState": _global_random_state,
    "state of a StatefulDataLoader": _state_of_a_stateful_loader,
    "loaders and optimizers of accelerate": _of_accelerate,
    "batches that Lightning has fetched": _batches_that_lightning_has_fetched,
    "order of a composition": _order_of_a_composition,
}
"""What shows that a row holds, where its places do not: returns something true, or raises."""


@pytest.fixture(scope="module")
def row(request):
    """Return a row, with its library imported: some set variables of the environment."""
    row = ROWS[request.param]
    library = row["library"]
    let_torchvision_be_imported()  # by other libraries
    if library != "Python":
        pytest.importorskip(library, reason=f"{library} is not installed")
    if "untried" not in row:
        for place in row.get("places", ()):
            _found(place)
    return row


def _found(place):
    """Return what is at a place, importing as much of its path as is a module."""
    found, path = None, ""
    for name in place.split("."):
        path = f"{path}.{name}".strip(".")
        if found is None or (inspect.ismodule(found) and not hasattr(found, name)):
            found = importlib.import_module(path)
        else:
            found = inspect.getattr_static(found, name, None) or getattr(found, name)
    return found


@pytest.mark.parametrize("row", ROWS, indirect=True)
def test_a_row_holds_in_the_installed_version(row):
    """What torchrepro borrows is where its row says, and does what the row expects."""
    if "untried" in row:
        pytest.skip(row["untried"])

    check = CHECKS.get(row["title"])
    assert row.get("places") or check
    assert check is None or check()


def test_each_check_belongs_to_a_row():
    """No check is left of a row that is gone."""
    assert CHECKS.keys() - ROWS.keys() == set()


# What becomes of a program without them.


@pytest.fixture(scope="module")
def fork(forks, tmp_path_factory):
    """Run programs in forks of a Python that has what compiling imports, a third of each run."""
    program = tmp_path_factory.mktemp("compiler") / "compiler.py"
    program.write_text("import torch\ntorch.compiler.list_backends()\n", encoding="utf-8")
    with forks(program) as fork:
        yield fork


@pytest.mark.slow
@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("title", "names"), IN_TURN, ids=[f"{title}-{names[0]}" for title, names in IN_TURN]
)
def test_a_program_ends_in_no_traceback_where_a_name_is_gone(title, names, fork_python):
    """Without a borrowed name a program under a profile works, or one line says what is missing."""
    row = ROWS[title]
    if row["library"] not in ("Python", "hydra") and not importlib.util.find_spec(row["library"]):
        pytest.skip(f"{row['library']} is not installed")

    removal = json.dumps([names, row["used_by"], row["library"]])
    done = fork_python(HERE / "renamed_program.py", removal)

    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or any(f"_gone{name}" in done.stderr for name in names)
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert compiled
    assert done.returncode or {*compiled} == {*row["used_by"]}
