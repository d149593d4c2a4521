"""The variables outside the catalogue: those a profile may set, and those it never may.

A row belongs here if no legal value of it names code, a host, a credential or a file. Every other
variable needs the consent of whoever starts the run; see `torchrepro.profile.consent`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.knobs.legal_values import Text
from torchrepro.redaction import sounds_secret

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class AllowedVariable:
    """A variable that a profile may set without anybody's consent."""

    name: str
    legal: Text
    """Its legal values; they match as a whole."""

    why: str
    """What it does, which is all that it can do."""


def _words(*words: str) -> Text:
    return Text("|".join(words), ", ".join(words))


def _any_case(*words: str) -> Text:
    return Text("|".join(words), ", ".join(words), ignore_case=True)


def _listed(one: str, words: str) -> Text:
    """Return the legal values of a list of `one`, separated by commas."""
    return Text(f"{one}(,{one})*", words)


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
_BINDING = "(primary|master|close|spread)"
_PLACE = "[{][0-9,:]{1,64}[}](:[0-9]{1,4}){0,2}"
_AFFINITY = "[a-z]{1,16}(=[a-z]{1,16})?"

_KINDS = {
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
    "cpus": Text("[0-9]{1,4}([-:, ][0-9]{1,4})*", "numbers of CPUs such as 0-3 or 0,2"),
    "cpu_features": _listed("[A-Z][A-Z0-9_]{1,30}", "features such as AVX2,FMA3"),
    "isa": _any_case(
        *("all", "default", "sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"),
        *("avx512_core", "avx512_core_vnni", "avx512_core_bf16", "avx512_core_fp16"),
        *("avx512_core_amx", "avx512_core_amx_fp16", "avx10_1_512", "avx10_1_512_amx"),
    ),
    "locale": Text(
        r"(C|POSIX|[a-z]{2,3}_[A-Z]{2})(\.(UTF|utf)-?8)?",
        "C, POSIX, C.UTF-8, or such as en_US.UTF-8",
    ),
    "allocator": _listed(
        _ALLOCATOR_OPTION,
        "options such as expandable_segments:True,max_split_size_mb:128, numbers and switches",
    ),
}
"""The legal values that several variables share."""

_OWN = {
    "OMP_PROC_BIND": Text(
        f"true|false|({_BINDING}(,{_BINDING})*)",
        "true, false, primary, master, close, spread, separated by commas",
        ignore_case=True,
    ),
    "OMP_PLACES": Text(
        f"(threads|cores|sockets|ll_caches|numa_domains)([(][0-9]{{1,4}}[)])?|{_PLACE}(,{_PLACE})*",
        "threads, cores, sockets, ll_caches, numa_domains, or CPUs such as {0:4},{4:4}",
    ),
    "OMP_SCHEDULE": Text(
        "(static|dynamic|guided|auto)(,[0-9]{1,9})?",
        "static, dynamic, guided, auto, with a size as in static,4",
        ignore_case=True,
    ),
    "OMP_STACKSIZE": Text("[0-9]{1,9}[BKMGbkmg]?", "a size such as 16M"),
    "KMP_AFFINITY": Text(
        f"{_AFFINITY}(,({_AFFINITY}|[0-9]{{1,4}}))*", "words such as granularity=fine,compact,1,0"
    ),
    "KMP_BLOCKTIME": Text("[0-9]{1,9}|infinite", "milliseconds, infinite"),
    "MKL_DOMAIN_NUM_THREADS": _listed(
        "MKL_DOMAIN_[A-Z]{2,8}=[0-9]{1,4}", "such as MKL_DOMAIN_BLAS=4"
    ),
    "MKL_ENABLE_INSTRUCTIONS": _any_case(
        *("SSE4_2", "AVX", "AVX2", "AVX2_E1", "AVX512"),
        *(f"AVX512_E{level}" for level in range(1, 6)),
        "AVX10",
    ),
    "ONEDNN_VERBOSE": Text("[0-9]|[a-z_]{1,24}(,[a-z_]{1,24})*", "0, 1, 2, all"),
    "TORCH_LOGS": _listed("[+-]?[a-z][a-z0-9_]{0,40}", "words such as +dynamo,recompiles"),
    "HSA_OVERRIDE_GFX_VERSION": Text(
        r"[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}", "numbers such as 10.3.0"
    ),
    "NCCL_DEBUG_SUBSYS": _listed(r"\^?[A-Za-z]{2,12}", "such as INIT,COLL"),
    "JAX_PLATFORMS": _listed("(cpu|cuda|gpu|rocm|tpu|METAL)", "cpu, cuda, tpu"),
}
"""The legal values that one variable has to itself."""

_TABLE = """
# threads and instructions
OMP_THREAD_LIMIT                 count     The most threads that OpenMP starts
OMP_NESTED                       switch    Parallel regions within others have threads of their own
OMP_MAX_ACTIVE_LEVELS            count     How deep parallel regions have threads
OMP_PROC_BIND                    own       Whether OpenMP binds its threads
OMP_PLACES own The CPUs that OpenMP binds threads to, by number after `:` too
OMP_SCHEDULE                     own       How OpenMP deals out a loop
OMP_WAIT_POLICY                  ~active|passive How idle OpenMP threads wait
OMP_STACKSIZE                    own       The stack of each OpenMP thread
KMP_AFFINITY                     own       How Intel's OpenMP binds its threads
KMP_BLOCKTIME                    own       How long idle threads of Intel's OpenMP spin
KMP_INIT_AT_FORK                 switch    Whether Intel's OpenMP starts anew after a fork
KMP_DUPLICATE_LIB_OK             switch    Two copies of OpenMP in one process are no error
KMP_DETERMINISTIC_REDUCTION switch Intel's OpenMP adds up what threads found in a fixed order
GOMP_CPU_AFFINITY                cpus      The CPUs of GNU OpenMP's threads, 0-6:2 being a stride
MKL_NUM_STRIPES                  signed    How MKL divides a matrix product among threads
MKL_DOMAIN_NUM_THREADS           own       Threads of MKL for each kind of function
MKL_THREADING_LAYER ~INTEL|SEQUENTIAL|TBB|GNU|PGI Which of its own threading layers MKL takes
MKL_ENABLE_INSTRUCTIONS own The instruction set of MKL's kernels
MKL_SERVICE_FORCE_INTEL          switch    MKL takes Intel's OpenMP beside GNU's
MKL_VERBOSE                      0|1|2     MKL prints its calls
OPENBLAS_NUM_THREADS             count     Threads of OpenBLAS, as in NumPy
OPENBLAS_CORETYPE                label     OpenBLAS takes the kernels of this CPU
GOTO_NUM_THREADS                 count     Threads of OpenBLAS; an older name
BLIS_NUM_THREADS                 count     Threads of BLIS
VECLIB_MAXIMUM_THREADS           count     Threads of Apple's Accelerate
NUMEXPR_NUM_THREADS              count     Threads of numexpr
NUMEXPR_MAX_THREADS              count     The most threads of numexpr
NUMBA_NUM_THREADS                count     Threads of numba
NUMBA_DISABLE_JIT                switch    numba runs plain Python
LOKY_MAX_CPU_COUNT               count     The most processes of joblib
RAYON_NUM_THREADS                count     Threads of libraries in Rust, tokenizers among them
POLARS_MAX_THREADS               count     Threads of polars
OPENCV_FOR_THREADS_NUM           count     Threads of OpenCV
DNNL_MAX_CPU_ISA                 isa       oneDNN takes no kernels above it; an older name
ONEDNN_CPU_ISA_HINTS             ~no_hints|prefer_ymm The width of vectors that oneDNN prefers
ONEDNN_VERBOSE                   own       oneDNN prints its calls
NPY_DISABLE_CPU_FEATURES         cpu_features NumPy takes no kernels of these instructions
NPY_ENABLE_CPU_FEATURES          cpu_features NumPy takes kernels of these instructions only
# torch
PYTORCH_CUDA_ALLOC_CONF          allocator CUDA memory; `:` parts an option and its value
PYTORCH_ALLOC_CONF               allocator Memory of every device; `:` parts an option and its value
PYTORCH_HIP_ALLOC_CONF           allocator Memory of AMD GPUs; `:` parts an option and its value
PYTORCH_NPU_ALLOC_CONF           allocator Memory of NPUs; `:` parts an option and its value
PYTORCH_NO_CUDA_MEMORY_CACHING   switch    CUDA memory is not kept
PYTORCH_NVML_BASED_CUDA_CHECK    switch    How torch counts devices
PYTORCH_ENABLE_MPS_FALLBACK      switch    What Apple's GPU lacks runs on the CPU
PYTORCH_MPS_FAST_MATH            switch    Apple's GPU approximates functions
PYTORCH_MPS_HIGH_WATERMARK_RATIO decimal   Memory of Apple's GPU
PYTORCH_JIT                      switch    TorchScript compiles
TORCH_BLAS_PREFER_CUBLASLT       switch    Matrix products by cuBLASLt, not cuBLAS
TORCH_BLAS_PREFER_HIPBLASLT      switch    Matrix products by hipBLASLt
TORCH_LINALG_PREFER_CUSOLVER     switch    Linear algebra by cuSOLVER, not MAGMA
CUBLASLT_WORKSPACE_SIZE          count     The workspace of cuBLASLt, in KiB
TORCH_SHOW_CPP_STACKTRACES       switch    Errors show where in C++ they arose
TORCH_CPP_LOG_LEVEL              ~INFO|WARNING|ERROR|FATAL|0|1|2|3 torch's C++ logs
TORCH_DISTRIBUTED_DEBUG          ~OFF|INFO|DETAIL torch checks and logs
TORCH_LOGS own torch logs; no dots, since torch imports packages to find a dotted name
LOGLEVEL                         level     torchrun logs
TORCH_COMPILE_DISABLE            switch    torch.compile does nothing
TORCHDYNAMO_DISABLE              switch    torch.compile does nothing
TORCHDYNAMO_VERBOSE              switch    torch.compile says more about errors
TORCHDYNAMO_SUPPRESS_ERRORS      switch    What cannot be compiled runs eagerly
TORCHINDUCTOR_COMPILE_THREADS    count     Processes in which torch.compile compiles
TORCHINDUCTOR_FX_GRAPH_CACHE     switch    Compiled graphs are used again
TORCHINDUCTOR_AUTOGRAD_CACHE     switch    Traced graphs are used again
TORCHINDUCTOR_CUDAGRAPHS         switch    Compiled code runs as CUDA graphs
TORCHINDUCTOR_FREEZING           switch    Weights are constants of compiled code
TORCHINDUCTOR_CPP_WRAPPER        switch    Compiled kernels are called from C++
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM  switch    Compiled matrix products are chosen by timing
TORCHINDUCTOR_BENCHMARK_FUSION   switch    Fusions of compiled code are chosen by timing
TORCHINDUCTOR_EMULATE_PRECISION_CASTS switch    Compiled code rounds like eager
TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING switch    Divisions of compiled code round like eager
TRITON_PRINT_AUTOTUNING          switch    Triton prints which kernel it chose
TORCH_DEVICE_BACKEND_AUTOLOAD    switch    Whether installed back ends load with torch
# devices
CUDA_DEVICE_ORDER                FASTEST_FIRST|PCI_BUS_ID How GPUs are numbered
CUDA_DEVICE_MAX_CONNECTIONS      count     Queues between CPU and GPU
CUDA_MODULE_LOADING              LAZY|EAGER|DEFAULT When kernels are loaded
CUDA_CACHE_DISABLE               switch    The driver keeps nothing compiled
CUDA_CACHE_MAXSIZE               count     How much of what it compiled the driver keeps
CUDA_FORCE_PTX_JIT               switch    The driver compiles every kernel anew
CUDNN_LOGLEVEL_DBG               0|1|2|3   cuDNN logs
NVTE_DEBUG                       switch    Transformer Engine logs
NVTE_DEBUG_LEVEL                 0|1|2     Transformer Engine logs
HSA_FORCE_FINE_GRAIN_PCIE        switch    AMD GPUs share memory over PCIe
HSA_ENABLE_SDMA                  switch    AMD GPUs copy by an engine of their own
HSA_OVERRIDE_GFX_VERSION         own       ROCm takes the GPU for another model
AMD_LOG_LEVEL                    count     ROCm logs
MIOPEN_FIND_MODE ~NORMAL|FAST|HYBRID|DYNAMIC_HYBRID|1|2|3|4|5 How MIOpen chooses kernels
MIOPEN_LOG_LEVEL                 count     MIOpen logs
ASCEND_GLOBAL_LOG_LEVEL          0|1|2|3|4 CANN logs
ASCEND_SLOG_PRINT_TO_STDOUT      0|1       CANN logs to the terminal
ACLNN_CACHE_LIMIT                count     Ops that CANN keeps prepared
# collectives
NCCL_DEBUG                       ~NONE|VERSION|WARN|INFO|ABORT|TRACE NCCL logs
NCCL_DEBUG_SUBSYS                own       Which parts of NCCL log
NCCL_P2P_DISABLE                 switch    GPUs exchange data by way of the CPU
NCCL_P2P_LEVEL                   distance  Up to which distance GPUs exchange data directly
NCCL_SHM_DISABLE                 switch    Processes exchange data without shared memory
NCCL_PXN_DISABLE                 switch    No detours over another GPU's network card
NCCL_BUFFSIZE                    count     Buffers of NCCL
NCCL_CROSS_NIC                   0|1|2     NCCL's rings go over several network cards
NCCL_CUMEM_ENABLE                signed    How NCCL allocates memory
NCCL_DMABUF_ENABLE               switch    How NCCL shares memory with network cards
NCCL_LAUNCH_MODE                 ~PARALLEL|GROUP How NCCL launches kernels
NCCL_MIN_CTAS                    count     Fewest blocks of a collective of NCCL
NCCL_MAX_CTAS                    count     Most blocks of a collective of NCCL
NCCL_GRAPH_MIXING_SUPPORT        switch    Collectives inside and outside CUDA graphs
NCCL_IGNORE_CPU_AFFINITY         switch    NCCL binds its threads as it likes
NCCL_SOCKET_NTHREADS             count     Threads of each connection of NCCL
NCCL_NSOCKS_PERTHREAD            count     Sockets of each thread of NCCL
NCCL_MNNVL_ENABLE                signed    NCCL uses NVLink between machines
NCCL_NET_GDR_LEVEL               distance  Up to which distance a network card reads a GPU
NCCL_NET_GDR_READ                switch    A network card reads a GPU in order to send
NCCL_IB_DISABLE                  switch    NCCL does without InfiniBand
NCCL_IB_TIMEOUT                  count     How long InfiniBand waits
NCCL_IB_RETRY_CNT                count     How often InfiniBand tries again
NCCL_IB_QPS_PER_CONNECTION       count     Queues of an InfiniBand connection
NCCL_IB_GID_INDEX                signed    Which of a card's own addresses RoCE takes
NCCL_IB_TC                       signed    Traffic class of InfiniBand
NCCL_IB_SL                       signed    Service level of InfiniBand
NCCL_IB_ADAPTIVE_ROUTING         switch    Messages of InfiniBand may overtake each other
NCCL_IB_PCI_RELAXED_ORDERING     0|1|2     Writes of network cards may overtake each other
NCCL_ASYNC_ERROR_HANDLING        0|1|2|3   What a hanging collective leads to; an older name
TORCH_NCCL_ASYNC_ERROR_HANDLING  0|1|2|3   What a hanging collective leads to
NCCL_BLOCKING_WAIT               switch    Waiting for a collective blocks; an older name
TORCH_NCCL_BLOCKING_WAIT         switch    Waiting for a collective blocks
TORCH_NCCL_AVOID_RECORD_STREAMS  switch    Memory of collectives is freed sooner
TORCH_NCCL_HIGH_PRIORITY         switch    Collectives go first
TORCH_NCCL_NAN_CHECK             switch    NaN in a collective is an error
TORCH_NCCL_DESYNC_DEBUG          switch    Says which ranks lag when a collective hangs
TORCH_NCCL_ENABLE_MONITORING     switch    A watchdog ends a hanging process
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC count     After how long a watchdog ends a hanging process
TORCH_NCCL_TRACE_BUFFER_SIZE     count     How many collectives torch remembers
TORCH_FR_BUFFER_SIZE             count     How many collectives torch remembers
RCCL_MSCCL_ENABLE                switch    AMD's collectives by MSCCL
HCCL_BUFFSIZE                    count     Buffers of HCCL, in MB
HCCL_CONNECT_TIMEOUT             count     How long HCCL waits for other ranks
HCCL_EXEC_TIMEOUT                count     How long HCCL waits for a collective
HCCL_ASYNC_ERROR_HANDLING        0|1       What a hang leads to on Ascend
HCCL_INTRA_PCIE_ENABLE           0|1       NPUs of a server exchange over PCIe
HCCL_INTRA_ROCE_ENABLE           0|1       NPUs of a server exchange over RoCE
HCCL_OP_EXPANSION_MODE           AI_CPU|AIV|AIV_ONLY|HOST|HOST_TS|CCU_SCHED|CCU_MS
    What carries out HCCL's collectives
HCCL_RDMA_TC                     count     Traffic class of RoCE
HCCL_RDMA_SL                     count     Service level of RoCE
HCCL_RDMA_TIMEOUT                count     How long RoCE waits
HCCL_RDMA_RETRY_CNT              count     How often RoCE tries again
FI_PROVIDER efa|tcp|verbs|psm3|cxi|shm Which of its own networks libfabric takes
FI_EFA_USE_DEVICE_RDMA           switch    Network cards of AWS read GPUs
RDMAV_FORK_SAFE                  switch    Whether InfiniBand bears a fork
# libraries
TOKENIZERS_PARALLELISM           switch    tokenizers uses threads
TRANSFORMERS_OFFLINE             switch    transformers downloads nothing
TRANSFORMERS_VERBOSITY           verbosity transformers logs
TRANSFORMERS_NO_ADVISORY_WARNINGS switch    transformers warns less
DATASETS_VERBOSITY               verbosity datasets logs
DIFFUSERS_VERBOSITY              verbosity diffusers logs
HF_DATASETS_OFFLINE              switch    datasets downloads nothing
HF_EVALUATE_OFFLINE              switch    evaluate downloads nothing
HF_HUB_OFFLINE                   switch    huggingface_hub downloads nothing
HF_HUB_VERBOSITY                 verbosity huggingface_hub logs
HF_HUB_DISABLE_TELEMETRY         switch    huggingface_hub tells nobody that it is used
HF_HUB_DISABLE_PROGRESS_BARS     switch    huggingface_hub shows no progress
HF_HUB_DISABLE_SYMLINKS_WARNING  switch    huggingface_hub warns less
HF_HUB_DISABLE_XET               switch    huggingface_hub downloads without Xet
HF_HUB_ENABLE_HF_TRANSFER        switch    huggingface_hub downloads by the package hf_transfer
HF_XET_HIGH_PERFORMANCE          switch    huggingface_hub downloads faster
HF_HUB_DOWNLOAD_TIMEOUT          count     How long huggingface_hub waits for a file
DISABLE_TELEMETRY                switch    Libraries tell nobody that they are used
DO_NOT_TRACK                     switch    Libraries tell nobody that they are used
ACCELERATE_MIXED_PRECISION       no|fp16|bf16|fp8 The precision in which accelerate trains
ACCELERATE_GRADIENT_ACCUMULATION_STEPS count     Batches of an update under accelerate
ACCELERATE_DEBUG_MODE            switch    accelerate checks shapes before collectives
ACCELERATE_LOG_LEVEL             level     accelerate logs
FSDP_CPU_RAM_EFFICIENT_LOADING   switch    Only the first rank loads the weights
POSSIBLE_USER_WARNINGS           switch    Lightning warns
TIMM_FUSED_ATTN                  0|1|2     timm takes fused attention
TIMM_REENTRANT_CKPT              switch    How timm checkpoints activations
BITSANDBYTES_NOWELCOME           switch    bitsandbytes says nothing on import
VLLM_BATCH_INVARIANT             switch    vLLM computes a row alike in every batch
VLLM_ENABLE_V1_MULTIPROCESSING   switch    vLLM schedules in another process
VLLM_LOGGING_LEVEL               level     vLLM logs
VLLM_NO_USAGE_STATS              switch    vLLM tells nobody that it is used
WANDB_MODE online|offline|disabled|dryrun|shared Whether wandb logs, and when it sends
WANDB_SILENT                     switch    wandb prints nothing
WANDB_DISABLED                   switch    transformers does not log to wandb
WANDB_CONSOLE                    auto|off|wrap|redirect|wrap_raw What wandb keeps of the output
WANDB_DISABLE_CODE               switch    wandb stores no code
WANDB_DISABLE_GIT                switch    wandb does not look at git
WANDB_WATCH false|gradients|parameters|all What transformers logs to wandb of the model
WANDB_PROJECT                    label     The name of wandb's project, on the server that is set up
WANDB_NAME                       label     The name of wandb's run
WANDB_RUN_GROUP                  label     The group of wandb's run
WANDB_TAGS                       labels    The tags of wandb's run
MLFLOW_EXPERIMENT_NAME label The name of MLflow's experiment, on the server that is set up
MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING switch    MLflow logs the load of the machine
MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL decimal   How often MLflow looks at the load
MLFLOW_ENABLE_ASYNC_LOGGING      switch    MLflow logs in another thread
MLFLOW_LOGGING_LEVEL             level     MLflow prints
MLFLOW_FLATTEN_PARAMS            switch    transformers logs nested parameters flat
MLFLOW_DISABLE_TELEMETRY         switch    MLflow tells nobody that it is used
DISABLE_MLFLOW_INTEGRATION       switch    transformers does not log to MLflow
COMET_MODE                       online|offline|disabled Whether Comet logs
SWANLAB_MODE                     cloud|local|offline|disabled Whether SwanLab logs
NEPTUNE_MODE                     async|sync|offline|debug|read-only Whether Neptune logs
RAY_DEDUP_LOGS                   switch    Ray prints equal lines once
RAY_USAGE_STATS_ENABLED          switch    Ray tells its makers that it is used
RAY_BACKEND_LOG_LEVEL            level     Ray logs
RAY_memory_monitor_refresh_ms    count     How often Ray looks at memory; 0 is never
TF_CPP_MIN_LOG_LEVEL             0|1|2|3   TensorFlow logs
TF_ENABLE_ONEDNN_OPTS            switch    TensorFlow computes with oneDNN
TF_FORCE_GPU_ALLOW_GROWTH        switch    TensorFlow takes GPU memory as it needs it
JAX_ENABLE_X64                   switch    JAX computes in 64 bits
JAX_DISABLE_JIT                  switch    JAX compiles nothing
JAX_DEBUG_NANS                   switch    NaN is an error of JAX
JAX_PLATFORMS                    own       The devices that JAX looks for
JAX_DEFAULT_MATMUL_PRECISION     default|high|highest|bfloat16|tensorfloat32|float32
    How far JAX may round
XLA_PYTHON_CLIENT_PREALLOCATE    switch    JAX takes GPU memory at once
XLA_PYTHON_CLIENT_MEM_FRACTION   decimal   How much GPU memory JAX takes
PJRT_DEVICE                      CPU|CUDA|TPU|NEURON The device of torch_xla
KERAS_BACKEND                    torch|jax|tensorflow|openvino The library that Keras computes with
HYDRA_FULL_ERROR                 switch    Hydra shows tracebacks whole
# processes
PYTHONUNBUFFERED                 switch    Python prints at once
PYTHONFAULTHANDLER               switch    Python says where it was when it crashed
TQDM_DISABLE                     switch    No progress bars
TQDM_MININTERVAL                 decimal   How often progress bars are drawn
TQDM_MINITERS                    count     After how many steps progress bars are drawn
NO_COLOR                         switch    Programs print without color
FORCE_COLOR                      switch    Programs print in color
COLUMNS                          count     How wide a terminal is
LANG                             locale    Language, order and encoding of text; the dot parts both
LC_ALL                           locale    Language, order and encoding of text; the dot parts both
TZ                               UTC|GMT   The time zone; only these, others are read from files
SOURCE_DATE_EPOCH                count     The time that tools write into what they build
"""
"""A row: the variable, its legal values, and what it does.

Legal values are `own`, one of `_KINDS`, or words such as ``LAZY|EAGER``; a ``~`` in front of the
words says that their case does not count. A further variable is a further row.
"""


def _legal(name: str, values: str) -> Text:
    if values == "own":
        return _OWN[name]
    if values in _KINDS:
        return _KINDS[values]
    words = values.removeprefix("~").split("|")
    return _any_case(*words) if values.startswith("~") else _words(*words)


def _rows() -> Iterator[AllowedVariable]:
    for line in _TABLE.replace("\n    ", " ").splitlines():  # an indented line goes on
        if line and not line.startswith("#"):
            name, values, why = line.split(maxsplit=2)
            yield AllowedVariable(name, _legal(name, values), why)


ALLOWED = {row.name: row for row in _rows()}

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
