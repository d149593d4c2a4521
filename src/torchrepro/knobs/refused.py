"""Environment variables that no profile may set: those that do nothing, and the dangerous ones."""

from __future__ import annotations

import re

from torchrepro.hidden import sounds_secret

WITHOUT_EFFECT = {
    "NCCL_DETERMINISTIC": "NCCL has no such variable; pin NCCL_ALGO and NCCL_PROTO",
    "NCCL_P2P_NET_DISABLE": "NCCL has no such variable",
    "TORCH_DETERMINISTIC": "torch reads no such variable; set "
    "backends.torch.deterministic_algorithms",
    "PYTORCH_DETERMINISTIC": "torch reads no such variable; set "
    "backends.torch.deterministic_algorithms",
    "CUDNN_DETERMINISTIC": "cuDNN reads no such variable; set backends.cudnn.deterministic",
    "CUDNN_BENCHMARK": "cuDNN reads no such variable; set backends.cudnn.benchmark",
    "TF_DETERMINISTIC_OPS": "only TensorFlow reads it",
    "TF_CUDNN_DETERMINISTIC": "only TensorFlow reads it",
    "CUBLAS_WORKSPACE": "cuBLAS reads no such variable; set CUBLAS_WORKSPACE_CONFIG",
    "PYTHON_HASH_SEED": "Python reads no such variable; set PYTHONHASHSEED",
    "PYTHONSEED": "Python reads no such variable; set `seed`",
}
"""Variables found in published recipes that nothing reads, with what to set instead."""

_DANGEROUS = re.compile(
    r"""
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
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def refusal(name: str) -> str:
    """Return why no profile may set the variable `name`, or an empty string."""
    if not _NAME.fullmatch(name):
        return "not the name of a variable: letters, digits and underscores"
    if name in WITHOUT_EFFECT:
        return f"the variable does nothing: {WITHOUT_EFFECT[name]}"
    if _DANGEROUS.fullmatch(name) or sounds_secret(name):
        return "the variable is dangerous: it names code, where code is found, or a credential"
    return ""
