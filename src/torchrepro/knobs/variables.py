"""The environment variables that torchrepro knows, from the rows of `variables.json`.

The fields of a row:

- `set_in`: the section of a profile that may set the variable. A variable in ``env`` is a knob.
  ``env_extra`` is for variables whose values cannot name code, a host, a credential or a file.
  The user who starts a run must consent to any other variable (`torchrepro.profile.schema`).
- `recorded`: manifests record the variable, as they do all knobs, because it affects results.
- `instead`: the setting to use in place of the variable. Published recipes set such a variable,
  but no library reads it.
- `legal`: a name in `KINDS`, words such as ``LAZY|EAGER`` (``~`` in front ignores case), or the
  fields of a `Text`.
- `decides_results`: true if the value decides results directly. A row of any section may have it.
- `enough` and `effect`: names in `ENOUGH` and `EFFECTS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrepro.ground.redaction import sounds_secret
from torchrepro.knobs.knob import (
    Calls,
    Digits,
    EffectiveValue,
    Knob,
    Legal,
    MissingState,
    Scope,
    Text,
    Variable,
)
from torchrepro.knobs.torch_state import Fp32Precision, InductorVariable

VARIABLES_FOR_ORDER_OF_SUMS = {"nccl": ("NCCL_ALGO", "NCCL_PROTO"), "hccl": ("HCCL_DETERMINISTIC",)}
"""Backend of torch.distributed -> the variables that fix the order of its sums. gloo needs none:
its order depends on sizes alone."""


def _any_case(*words: str) -> Text:
    return Text("|".join(words), ", ".join(words), ignore_case=True)


def _listed(word: str, words: str) -> Text:
    return Text(f"{word}(,{word})*", words)


def _per_operation(choice: str, words: str) -> Text:
    choices = rf"\^?{choice}(,{choice})*"
    operation = f"(allreduce|allgather|reducescatter|broadcast|reduce):{choices}"
    pattern = f"({choices};)?{operation}(;{operation})*|{choices}"
    return Text(pattern, words, ignore_case=True)


_ALLOCATOR_OPTION = (
    "(max_split_size_mb|garbage_collection_threshold|expandable_segments|backend|"
    "roundup_power2_divisions|roundup_bypass_threshold_mb|max_non_split_rounding_mb|"
    "release_lock_on_(cuda|hip)malloc|per_process_memory_fraction|large_segment_size_mb|"
    "pinned_use_(cuda|hip)_host_register|pinned_num_register_threads|"
    "pinned_use_background_threads|pinned_reserve_segment_size_mb|"
    "graph_capture_record_stream_reuse|throw_on_cudamalloc_oom|multi_stream_lazy_reclaim|"
    "base_addr_aligned_kb|page_size|segment_size_mb)"
    r":([0-9]{1,9}(\.[0-9]{1,9})?|True|False|true|false|1G|native|cudaMallocAsync|"
    r"\[(>|[0-9]{1,9}):[0-9]{1,9}(,(>|[0-9]{1,9}):[0-9]{1,9}){0,30}\])"
)
_HCCL_ALGORITHM = (
    "(level[0-2]:(NA|null|fullmesh|ring|doublering|pipeline|pairwise|star|H-D_R|NHR|NHR_V1|NB|"
    "AHC|AHC_BROKE|ARS))"
)
_HCCL_OP = (
    "(allreduce|allgather|allgatherv|reducescatter|reducescatterv|broadcast|reduce|scatter|"
    "alltoall|alltoallv|alltoallvc|sendrecv|batchsendrecv|others)"
)

KINDS: Mapping[str, Legal] = {
    "any": Text(r"[^\0]*", "any text without NUL characters"),
    "hash_seed": Digits(0, 2**32 - 1, also=("random",)),
    "threads": Digits(1, 9999),
    "bit": Text("[01]", '"0", "1"'),
    "exactly_one": Text(
        "[01]", '"0", "1"', 'only the exact text "1" counts; a word such as true is off'
    ),
    "boolean": Text("true|false", '"true", "false"', ignore_case=True),
    "switch": _any_case("0", "1", "true", "false", "yes", "no", "on", "off"),
    "count": Text("[0-9]{1,12}", "a whole number"),
    "signed": Text("-?[0-9]{1,12}", "a whole number, negative as well"),
    "decimal": Text(r"[0-9]{1,9}(\.[0-9]{1,9})?", "a number such as 60 or 0.5"),
    "label": Text("[A-Za-z0-9][A-Za-z0-9_-]{0,127}", "letters, digits, - and _"),
    "labels": _listed(
        "[A-Za-z0-9][A-Za-z0-9_-]{0,63}", "letters, digits, - and _, separated by commas"
    ),
    "level": _any_case("debug", "info", "warning", "warn", "error", "critical", "fatal"),
    "verbosity": _any_case("detail", "debug", "info", "warning", "error", "critical"),
    "distance": _any_case("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", *"012345"),
    "cpu_features": _listed("[A-Z][A-Z0-9_]{1,30}", "features such as AVX2,FMA3"),
    "locale": Text(
        r"(C|POSIX|[a-z]{2,3}_[A-Z]{2})(\.(UTF|utf)-?8)?",
        "C, POSIX, C.UTF-8, or such as en_US.UTF-8",
    ),
    "allocator": _listed(
        _ALLOCATOR_OPTION,
        "options such as expandable_segments:True,max_split_size_mb:128, numbers and switches",
    ),
    "nccl_algorithms": _per_operation(
        "(tree|ring|collnetdirect|collnetchain|collnet|nvls|nvlstree|pat)",
        "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT",
    ),
    "nccl_protocols": _per_operation("(ll|ll128|simple)", "Simple, LL, LL128"),
    "hccl_algorithms": Text(
        f"{_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*|"
        f"{_HCCL_OP}={_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*"
        f"(/{_HCCL_OP}={_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*)*",
        "a list such as level0:NA;level1:ring, or one per operation as in "
        "allreduce=level0:NA;level1:ring/alltoall=level0:NA;level1:pairwise",
    ),
}
"""Legal values that several variables share, or that are too long for the JSON file."""


ENOUGH: Mapping[str, Callable[[str], bool]] = {
    "a_number": str.isdigit,
    "not_empty": bool,
    "pinned": lambda value: bool(value) and not value.startswith("^"),  # it names algorithms
    "of_fixed_size": lambda value: value in (":4096:8", ":16:8"),  # cuBLAS then repeats its sums
    "in_fixed_order": lambda value: value.lower() in ("true", "strict"),  # HCCL's order of sums
    "switched_on": lambda value: value in ("1", "true"),  # the ATB library accepts both
}
"""Name in `enough` -> a check that returns whether a text of the variable gives the guarantee."""

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")
_MAPPED = Path("/proc/self/maps")


def _hash_secret() -> bytes:
    """Return the secret with which Python hashes text.

    Reads a private C variable, because `sys.flags` shows only whether the seed is 0.
    """
    import ctypes

    try:
        return bytes((ctypes.c_ubyte * 16).in_dll(ctypes.pythonapi, "_Py_HashSecret"))
    except ValueError:
        raise MissingState("this Python does not expose its hash secret") from None


def _secret_of(text: str) -> bytes:
    """Return the secret that CPython derives from a numeric PYTHONHASHSEED (`lcg_urandom`)."""
    if not text.isdigit():
        raise MissingState("a random secret can be any bytes")
    state, secret = int(text), bytearray()
    for _ in range(16 if state else 0):
        state = (state * 214013 + 2531011) % 2**32
        secret.append(state >> 16 & 0xFF)
    return bytes(secret) or bytes(16)


def openmp_of_torch() -> set[str]:
    """Return the paths of the loaded OpenMP runtimes that torch uses, or will use.

    A runtime belongs to torch if torch installs a file with the same name. The name is enough,
    because packages that install another runtime give it a different name. Returns an
    empty set if the system does not list loaded files.
    """
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in _MAPPED.read_text().splitlines()}
    except OSError:
        return set()
    loaded = {path for path in mapped if _OPENMP.match(Path(path).name)}
    names = _runtimes_of_torch() if loaded else frozenset()
    return {path for path in loaded if not names or Path(path).name.partition(".so")[0] in names}


@cache
def _runtimes_of_torch() -> frozenset[str]:  # empty if torch uses the runtime of the system
    spec = find_spec("torch")
    packages = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    folders = [
        path for package in packages for path in (package / "lib", package.parent / "torch.libs")
    ]
    names = [file.name for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return frozenset(name.partition(".so")[0] for name in names if _OPENMP.match(name))


def _from_openmp(function: str) -> int:
    import ctypes

    mode = os.RTLD_NOW | os.RTLD_NOLOAD
    runtimes = [ctypes.CDLL(path, mode=mode) for path in openmp_of_torch()]
    answers = {int(getattr(runtime, function)()) for runtime in runtimes}
    if len(answers) != 1:
        raise MissingState("no OpenMP runtime is loaded, or several that disagree")
    return answers.pop()


def _threads() -> int:
    if "torch" in sys.modules:
        return int(import_module("torch").get_num_threads())
    return _from_openmp("omp_get_max_threads")


def _threads_of_mkl() -> int:
    info = str(import_module("torch.__config__").parallel_info())
    threads = re.search(r"mkl_get_max_threads\(\) : (\d+)", info)
    if threads is None:
        raise MissingState("this torch has no MKL")
    return int(threads[1])


def _capability() -> str:
    name = str(Calls("torch.backends.cpu", "get_cpu_capability", "get_cpu_capability").read())
    return {"NO AVX": "DEFAULT"}.get(name, name)  # the name in older torch


EFFECTS: Mapping[str, EffectiveValue] = {
    "hashes": EffectiveValue(_hash_secret, _secret_of, "Python hashes with another seed"),
    "openmp_threads": EffectiveValue(_threads, int, "OpenMP has {} threads for torch"),
    "openmp_dynamic": EffectiveValue(
        lambda: bool(_from_openmp("omp_get_dynamic")),
        lambda text: text.lower() == "true",
        "dynamic is {} in OpenMP",
    ),
    "mkl_threads": EffectiveValue(_threads_of_mkl, int, "MKL has {} threads", "torch"),
    "capability": EffectiveValue(
        _capability, str.upper, "torch computes with {} instructions", "torch"
    ),
    "tf32": EffectiveValue(
        lambda: Fp32Precision("cuda.matmul").read() == "tf32",
        lambda text: text == "1",
        "TF32 is {} for torch's matrix products",
        "torch",
    ),
    "npu_task_queue": EffectiveValue(
        Calls("torch:npu", "get_task_queue_enable", "get_task_queue_enable").read,
        lambda text: int(text) if text.isdecimal() else 0,
        "torch_npu's task queue is {}",
        "torch",
    ),
    "npu_compatible_impl": EffectiveValue(
        Calls("torch:npu", "are_compatible_impl_enabled", "are_compatible_impl_enabled").read,
        lambda text: text == "1",
        "torch_npu's compatible_impl is {}",
        "torch",
    ),
}
"""Name in `effect` -> how to read the value that a library took from the variable."""

ROWS: list[dict[str, Any]] = [
    row
    for rows in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).values()
    for row in rows
]


def _legal(values: Any) -> Any:
    if isinstance(values, dict):
        return Text(**values)
    if values in KINDS:
        return KINDS[values]
    words = values.removeprefix("~").split("|")
    return Text("|".join(words), ", ".join(words), ignore_case=values.startswith("~"))


def _knob(row: Mapping[str, Any]) -> Knob:
    name = row["name"]
    access: Variable | InductorVariable = Variable(name)
    effect = EFFECTS[row["effect"]] if "effect" in row else None
    if "inductor" in row:
        access = InductorVariable(name, row["inductor"])
        words = f"inductor's {access.option} is {{}}"
        effect = EffectiveValue(access.loaded_value, lambda text: text == "1", words)
    return Knob(
        name=f"{row['set_in']}.{name}",
        legal=_legal(row["legal"]),
        access=access,
        variable=name,
        summary=row["does"],
        cost=row.get("cost", "none"),
        source=row.get("source", ""),
        door=row.get("door", ""),
        scope=Scope.PROCESS_AND_CHILDREN,
        aliases=tuple(row.get("aliases", ())),
        enough=ENOUGH[row["enough"]] if "enough" in row else None,
        misspellings=tuple(row.get("misspelt", ())),
        effect=effect,
        hardware=row.get("hardware", ""),
        decides_results=row.get("decides_results", False),
    )


ENV = tuple(_knob(row) for row in ROWS if row.get("set_in") == "env")

WITHOUT_EFFECT: Mapping[str, str] = {
    row["name"]: row["instead"] for row in ROWS if "instead" in row
}
"""Variables that published recipes set but no library reads -> the setting to use instead."""

DECIDE_RESULTS = frozenset(row["name"] for row in ROWS if row.get("decides_results"))
"""The variables, in any section, whose values decide results directly."""

RECORDED = tuple(
    sorted(row["name"] for row in ROWS if row.get("set_in") == "env" or row.get("recorded"))
)
"""The variables that a manifest may record, because they affect results."""


_OF_LIBRARIES = re.compile(
    r"(PY)?TORCH_?(?!REPRO|ELASTIC).*|(ATEN|C10|INDUCTOR|TRITON|CUTLASS|FBGEMM|FLASH_ATT\w*)_.*|"
    r"AOT_?INDUCTOR_.*|(CUTEDSL|FLYDSL)_.*|ENABLE_(HOST_SIDE|PERSISTENT|TEMPLATE|TMA)_.*|"
    r"(CUDA|CUBLAS(LT)?|CUDNN|CUFFT|CUSPARSE|CUSOLVER|CURAND|CUTENSOR|NCCL|NVIDIA|NVTE)_.*|"
    r"(HIP|ROCM?|ROCBLAS|HIPBLAS(LT)?|MIOPEN|HSA|RCCL)_.*|(SYCL|UR|ZE)_.*|"
    r"(ASCEND|HCCL|LCCL|ATB|ACL|ACLNN|NPU|CANN)_.*|(DNNL|ONEDNN|MKL(DNN)?|OMP|KMP|GOMP)_.*|"
    r"(BLIS|OPENBLAS|GOTO|VECLIB|NPY|NUMPY)_.*|GLIBC_TUNABLES|CXX|CC|C(XX|PP)?FLAGS|LDFLAGS"
)
"""Variables with the prefix of a library that computes, and variables of compilers."""


def other_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a short digest of every variable of a library that is not in `RECORDED`.

    Four hex digits are enough to show a change, and too few to confirm a guess at the value.
    """
    return {
        name: digest_of_text(f"{name}={value}")
        for name, value in sorted(environment.items())
        if _OF_LIBRARIES.fullmatch(name) and name not in RECORDED and not sounds_secret(name)
    }


def digest_of_text(text: str) -> str:
    """Return the first four hex digits of the SHA-256 digest of `text`."""
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:4]}"


@cache
def allowed() -> Mapping[str, Knob]:
    """Return the variables outside the catalogue that a profile may set without consent.

    The summary of a row is the whole effect of the variable, which shows why consent is not needed.
    """
    return {row["name"]: _knob(row) for row in ROWS if row.get("set_in") == "env_extra"}


def variable(name: str) -> Knob:
    """Return a knob for a variable that a profile sets in `env_extra`, outside the catalogue."""
    does = "A variable that the profile adds; the catalogue does not describe it."
    row = {"set_in": "env_extra", "name": name, "legal": "any", "does": does, "cost": "unknown"}
    return _knob(row)


_DANGEROUS = r"""
(?! (PYTHONUNBUFFERED|PYTHONFAULTHANDLER|PYTHONHASHSEED|HYDRA_FULL_ERROR|LOKY_MAX_CPU_COUNT
    |TF_ENABLE_ONEDNN_OPTS|TRITON_PRINT_AUTOTUNING|PYTORCH(_CUDA|_HIP|_NPU)?_ALLOC_CONF)$ )
( (LD|DYLD|GIT|SSH|SSL|PIP|CONDA|HYDRA|TORCHREPRO|JAVA|PERL|RUBY|NODE|BASH)_.*
| (OMPI|PMIX|PMI|PRTE|I_MPI|MPICH|OPENSSL|UV|POETRY|NPM|CARGO|DOCKER|PYTEST|COV|COVERAGE)_.*
| (AWS|AZURE|GOOGLE|GCLOUD|KUBE|SUDO|XDG|JUPYTER|IPYTHON|LOKY|PET|TORCHELASTIC|OTEL)_.*
| (GDK|GTK|GIO|QT)_.*
| PYTHON.*                                    # start-up files, search paths, warnings as code
| PERL5.* | RUBYOPT | BASH_ENV | BASHOPTS | SHELLOPTS | ENV | IFS | PS4 | PROMPT_COMMAND
| MASTER_ADDR | MASTER_PORT | RANK | LOCAL_RANK | GROUP_RANK | WORLD_SIZE | LOCAL_WORLD_SIZE
| MPLBACKEND | TORCH_LOGS_OUT | TORCH_TRACE | TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD | HOSTALIASES
| LESSOPEN | LESSCLOSE | MANPAGER | VISUAL | CDPATH | TERMCAP | TERMINFO
| CCC_OVERRIDE_OPTIONS | MAKEFLAGS | LDSHARED | HOSTCC | NVCC_CCBIN | LUA_INIT | KUBECONFIG
| PATH | HOME | USER | SHELL | EDITOR | PAGER | BROWSER | TMPDIR | TMP | TEMP | CC | CXX | CPP
| .*(PATH|_PRELOAD|_LIBRARY|_LIBRARIES|_PLUGIN|_PLUGINS|_PROXY|_HOME|_DIR|_BUNDLE|_FILE|_CONF)
| .*(CONFIGDIR|TZDIR|ZDOTDIR|_DIRS|_DIRECTORY|_FOLDER|_MODULES?|_ENGINES|_HOOKS?|_PIPE)
| .*(_UR[IL]|_ENDPOINT|_ADDR|_ADDRESS|_HOST|_HOSTS|_DSN|_CONFIG_FILE|_SERVER|_REMOTE_CACHE)
| (C|CXX|CPP|LD|AS|MAKE|NVCC_\w+|HIPCC\w*)_?FLAGS\w*
| .*(_OPTS|_OPTIONS|_ADDOPTS|_COMMAND|_CMD|_CC|_CXX|_COMPILER|_LINKER|_PICKLER)
| GCONV_.* | MALLOC_.* | GLIBC_TUNABLES | CUDA_INJECTION.* | OMP_TOOL.* | TRITON_.*
| TORCH_PYTHON_NATIVE_.* | TORCH_COMPILE_OVERRIDE_.* | .*_FN | .*_OVERRIDE_\w*CONFIGS?
| AR | LDCXXSHARED | CUDACXX | HIPCXX | PYTORCH_NVCC | DIST_EXTRA_CONFIG | OPAL_.*
| NETRC | SSLKEYLOGFILE | NCCL_COMM_ID | .*_?(FILENAME|_BINARY|LOGDEST\w*|LD_PRELOAD\w*)
| .*_ALLOW_INSECURE\w* | (.*_)?TRUST_REMOTE_CODE | .*_WITH_SHELL )
"""


def refusal(name: str) -> str:
    """Return why no profile may set the variable `name`, or an empty string."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "not the name of a variable: letters, digits and underscores"
    if name in WITHOUT_EFFECT:
        return f"the variable does nothing: {WITHOUT_EFFECT[name]}"
    dangerous = re.compile(_DANGEROUS, re.VERBOSE | re.IGNORECASE)  # `re` caches it
    if dangerous.fullmatch(name) or sounds_secret(name):
        return "the variable is dangerous: it can name code, a search path, or a credential"
    return ""
