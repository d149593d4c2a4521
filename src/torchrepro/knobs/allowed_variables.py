"""The variables outside the catalogue: those a profile may set, and those it never may.

A row belongs here if no legal value of it names code, a host, a credential or a file. Every other
variable needs the consent of whoever starts the run; see `torchrepro.profile.consent`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchrepro.knobs.legal_values import Text
from torchrepro.redaction import sounds_secret


@dataclass(frozen=True, slots=True)
class Allowed:
    """A variable that a profile may set without anybody's consent."""

    name: str
    legal: Text
    """The values that it may have; they match as a whole."""

    why: str
    """What it does, which is all that it can do."""


def _words(*words: str) -> Text:
    return Text("|".join(words), ", ".join(words))


def _any_case(*words: str) -> Text:
    return Text("|".join(words), ", ".join(words), ignore_case=True)


def _listed(one: str, words: str) -> Text:
    """Return the legal values of a list of `one`, separated by commas."""
    return Text(f"{one}(,{one})*", words)


SWITCH = _any_case("0", "1", "true", "false", "yes", "no", "on", "off")
COUNT = Text("[0-9]{1,12}", "a whole number")
SIGNED = Text("-?[0-9]{1,12}", "a whole number, negative as well")
DECIMAL = Text(r"[0-9]{1,9}(\.[0-9]{1,9})?", "a number such as 60 or 0.5")
LABEL = Text("[A-Za-z0-9][A-Za-z0-9_-]{0,127}", "letters, digits, - and _")
LABELS = _listed("[A-Za-z0-9][A-Za-z0-9_-]{0,63}", "letters, digits, - and _, separated by commas")
LEVEL = _any_case("debug", "info", "warning", "warn", "error", "critical", "fatal")
VERBOSITY = _any_case("detail", "debug", "info", "warning", "error", "critical")
DISTANCE = _any_case("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", *"012345")
MODE = _words("online", "offline", "disabled")
CPUS = Text("[0-9]{1,4}([-:, ][0-9]{1,4})*", "numbers of CPUs such as 0-3 or 0,2")
LOCALE = Text(
    r"(C|POSIX|[a-z]{2,3}_[A-Z]{2})(\.(UTF|utf)-?8)?", "C, POSIX, C.UTF-8, or such as en_US.UTF-8"
)
_OPTIONS = (
    *("max_split_size_mb", "garbage_collection_threshold", "expandable_segments", "backend"),
    *("roundup_power2_divisions", "roundup_bypass_threshold_mb", "max_non_split_rounding_mb"),
    *("release_lock_on_(cuda|hip)malloc", "per_process_memory_fraction", "large_segment_size_mb"),
    *("pinned_use_(cuda|hip)_host_register", "pinned_num_register_threads"),
    *("pinned_use_background_threads", "pinned_reserve_segment_size_mb"),
    *("graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom", "multi_stream_lazy_reclaim"),
    *("base_addr_aligned_kb", "page_size", "segment_size_mb"),
)
_OPTION = (
    f"({'|'.join(_OPTIONS)})"
    r":([0-9]{1,9}(\.[0-9]{1,9})?|True|False|true|false|1G|native|cudaMallocAsync|"
    r"\[(>|[0-9]{1,9}):[0-9]{1,9}(,(>|[0-9]{1,9}):[0-9]{1,9}){0,30}\])"
)
ALLOCATOR = _listed(
    _OPTION, "options such as expandable_segments:True,max_split_size_mb:128, numbers and switches"
)
_CPU_FEATURES = _listed("[A-Z][A-Z0-9_]{1,30}", "features such as AVX2,FMA3")
_ISA = _any_case(
    *("all", "default", "sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"),
    *("avx512_core", "avx512_core_vnni", "avx512_core_bf16", "avx512_core_fp16"),
    *("avx512_core_amx", "avx512_core_amx_fp16", "avx10_1_512", "avx10_1_512_amx"),
)

THREADS = (
    Allowed("OMP_THREAD_LIMIT", COUNT, "The most threads that OpenMP starts"),
    Allowed("OMP_NESTED", SWITCH, "Parallel regions within others have threads of their own"),
    Allowed("OMP_MAX_ACTIVE_LEVELS", COUNT, "How deep parallel regions have threads"),
    Allowed(
        "OMP_PROC_BIND",
        Text(
            "true|false|((primary|master|close|spread)(,(primary|master|close|spread))*)",
            "true, false, primary, master, close, spread, separated by commas",
            ignore_case=True,
        ),
        "Whether OpenMP binds its threads",
    ),
    Allowed(
        "OMP_PLACES",
        Text(
            "(threads|cores|sockets|ll_caches|numa_domains)([(][0-9]{1,4}[)])?"
            "|[{][0-9,:]{1,64}[}](:[0-9]{1,4}){0,2}(,[{][0-9,:]{1,64}[}](:[0-9]{1,4}){0,2})*",
            "threads, cores, sockets, ll_caches, numa_domains, or CPUs such as {0:4},{4:4}",
        ),
        "The CPUs that OpenMP binds threads to, by number after `:` too",
    ),
    Allowed(
        "OMP_SCHEDULE",
        Text(
            "(static|dynamic|guided|auto)(,[0-9]{1,9})?",
            "static, dynamic, guided, auto, with a size as in static,4",
            ignore_case=True,
        ),
        "How OpenMP deals out a loop",
    ),
    Allowed("OMP_WAIT_POLICY", _any_case("active", "passive"), "How idle OpenMP threads wait"),
    Allowed(
        "OMP_STACKSIZE",
        Text("[0-9]{1,9}[BKMGbkmg]?", "a size such as 16M"),
        "The stack of each OpenMP thread",
    ),
    Allowed(
        "KMP_AFFINITY",
        Text(
            "[a-z]{1,16}(=[a-z]{1,16})?(,([a-z]{1,16}(=[a-z]{1,16})?|[0-9]{1,4}))*",
            "words such as granularity=fine,compact,1,0",
        ),
        "How Intel's OpenMP binds its threads",
    ),
    Allowed(
        "KMP_BLOCKTIME",
        Text("[0-9]{1,9}|infinite", "milliseconds, infinite"),
        "How long idle threads of Intel's OpenMP spin",
    ),
    Allowed("KMP_INIT_AT_FORK", SWITCH, "Whether Intel's OpenMP starts anew after a fork"),
    Allowed("KMP_DUPLICATE_LIB_OK", SWITCH, "Two copies of OpenMP in one process are no error"),
    Allowed(
        "KMP_DETERMINISTIC_REDUCTION",
        SWITCH,
        "Intel's OpenMP adds up what threads found in a fixed order",
    ),
    Allowed("GOMP_CPU_AFFINITY", CPUS, "The CPUs of GNU OpenMP's threads, 0-6:2 being a stride"),
    Allowed("MKL_NUM_STRIPES", SIGNED, "How MKL divides a matrix product among threads"),
    Allowed(
        "MKL_DOMAIN_NUM_THREADS",
        _listed("MKL_DOMAIN_[A-Z]{2,8}=[0-9]{1,4}", "such as MKL_DOMAIN_BLAS=4"),
        "Threads of MKL for each kind of function",
    ),
    Allowed(
        "MKL_THREADING_LAYER",
        _any_case("INTEL", "SEQUENTIAL", "TBB", "GNU", "PGI"),
        "Which of its own threading layers MKL takes",
    ),
    Allowed(
        "MKL_ENABLE_INSTRUCTIONS",
        _any_case(
            "SSE4_2",
            "AVX",
            "AVX2",
            "AVX2_E1",
            "AVX512",
            *(f"AVX512_E{level}" for level in range(1, 6)),
            "AVX10",
        ),
        "The instruction set of MKL's kernels",
    ),
    Allowed("MKL_SERVICE_FORCE_INTEL", SWITCH, "MKL takes Intel's OpenMP beside GNU's"),
    Allowed("MKL_VERBOSE", _words("0", "1", "2"), "MKL prints its calls"),
    Allowed("OPENBLAS_NUM_THREADS", COUNT, "Threads of OpenBLAS, as in NumPy"),
    Allowed("OPENBLAS_CORETYPE", LABEL, "OpenBLAS takes the kernels of this CPU"),
    Allowed("GOTO_NUM_THREADS", COUNT, "Threads of OpenBLAS; an older name"),
    Allowed("BLIS_NUM_THREADS", COUNT, "Threads of BLIS"),
    Allowed("VECLIB_MAXIMUM_THREADS", COUNT, "Threads of Apple's Accelerate"),
    Allowed("NUMEXPR_NUM_THREADS", COUNT, "Threads of numexpr"),
    Allowed("NUMEXPR_MAX_THREADS", COUNT, "The most threads of numexpr"),
    Allowed("NUMBA_NUM_THREADS", COUNT, "Threads of numba"),
    Allowed("NUMBA_DISABLE_JIT", SWITCH, "numba runs plain Python"),
    Allowed("LOKY_MAX_CPU_COUNT", COUNT, "The most processes of joblib"),
    Allowed("RAYON_NUM_THREADS", COUNT, "Threads of libraries in Rust, tokenizers among them"),
    Allowed("POLARS_MAX_THREADS", COUNT, "Threads of polars"),
    Allowed("OPENCV_FOR_THREADS_NUM", COUNT, "Threads of OpenCV"),
    Allowed("ONEDNN_MAX_CPU_ISA", _ISA, "oneDNN takes no kernels above this instruction set"),
    Allowed("DNNL_MAX_CPU_ISA", _ISA, "oneDNN takes no kernels above it; an older name"),
    Allowed(
        "ONEDNN_CPU_ISA_HINTS",
        _any_case("no_hints", "prefer_ymm"),
        "The width of vectors that oneDNN prefers",
    ),
    Allowed(
        "ONEDNN_VERBOSE",
        Text("[0-9]|[a-z_]{1,24}(,[a-z_]{1,24})*", "0, 1, 2, all"),
        "oneDNN prints its calls",
    ),
    Allowed(
        "NPY_DISABLE_CPU_FEATURES", _CPU_FEATURES, "NumPy takes no kernels of these instructions"
    ),
    Allowed(
        "NPY_ENABLE_CPU_FEATURES", _CPU_FEATURES, "NumPy takes kernels of these instructions only"
    ),
)

TORCH = (
    Allowed("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR, "CUDA memory; `:` parts an option and its value"),
    Allowed(
        "PYTORCH_ALLOC_CONF", ALLOCATOR, "Memory of every device; `:` parts an option and its value"
    ),
    Allowed(
        "PYTORCH_HIP_ALLOC_CONF", ALLOCATOR, "Memory of AMD GPUs; `:` parts an option and its value"
    ),
    Allowed(
        "PYTORCH_NPU_ALLOC_CONF", ALLOCATOR, "Memory of NPUs; `:` parts an option and its value"
    ),
    Allowed("PYTORCH_NO_CUDA_MEMORY_CACHING", SWITCH, "CUDA memory is not kept"),
    Allowed("PYTORCH_NVML_BASED_CUDA_CHECK", SWITCH, "How torch counts devices"),
    Allowed("PYTORCH_ENABLE_MPS_FALLBACK", SWITCH, "What Apple's GPU lacks runs on the CPU"),
    Allowed("PYTORCH_MPS_FAST_MATH", SWITCH, "Apple's GPU approximates functions"),
    Allowed("PYTORCH_MPS_HIGH_WATERMARK_RATIO", DECIMAL, "Memory of Apple's GPU"),
    Allowed("PYTORCH_JIT", SWITCH, "TorchScript compiles"),
    Allowed("TORCH_BLAS_PREFER_CUBLASLT", SWITCH, "Matrix products by cuBLASLt, not cuBLAS"),
    Allowed("TORCH_BLAS_PREFER_HIPBLASLT", SWITCH, "Matrix products by hipBLASLt"),
    Allowed("TORCH_LINALG_PREFER_CUSOLVER", SWITCH, "Linear algebra by cuSOLVER, not MAGMA"),
    Allowed("CUBLASLT_WORKSPACE_SIZE", COUNT, "The workspace of cuBLASLt, in KiB"),
    Allowed("TORCH_SHOW_CPP_STACKTRACES", SWITCH, "Errors show where in C++ they arose"),
    Allowed(
        "TORCH_CPP_LOG_LEVEL",
        _any_case("INFO", "WARNING", "ERROR", "FATAL", *"0123"),
        "torch's C++ logs",
    ),
    Allowed("TORCH_DISTRIBUTED_DEBUG", _any_case("OFF", "INFO", "DETAIL"), "torch checks and logs"),
    Allowed(
        "TORCH_LOGS",
        _listed("[+-]?[a-z][a-z0-9_]{0,40}", "words such as +dynamo,recompiles"),
        "torch logs; no dots, since torch imports packages to find a dotted name",
    ),
    Allowed("LOGLEVEL", LEVEL, "torchrun logs"),
    Allowed("TORCH_COMPILE_DISABLE", SWITCH, "torch.compile does nothing"),
    Allowed("TORCHDYNAMO_DISABLE", SWITCH, "torch.compile does nothing"),
    Allowed("TORCHDYNAMO_VERBOSE", SWITCH, "torch.compile says more about errors"),
    Allowed("TORCHDYNAMO_SUPPRESS_ERRORS", SWITCH, "What cannot be compiled runs eagerly"),
    Allowed("TORCHINDUCTOR_COMPILE_THREADS", COUNT, "Processes in which torch.compile compiles"),
    Allowed("TORCHINDUCTOR_FX_GRAPH_CACHE", SWITCH, "Compiled graphs are used again"),
    Allowed("TORCHINDUCTOR_AUTOGRAD_CACHE", SWITCH, "Traced graphs are used again"),
    Allowed("TORCHINDUCTOR_CUDAGRAPHS", SWITCH, "Compiled code runs as CUDA graphs"),
    Allowed("TORCHINDUCTOR_FREEZING", SWITCH, "Weights are constants of compiled code"),
    Allowed("TORCHINDUCTOR_CPP_WRAPPER", SWITCH, "Compiled kernels are called from C++"),
    Allowed(
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", SWITCH, "Compiled matrix products are chosen by timing"
    ),
    Allowed(
        "TORCHINDUCTOR_BENCHMARK_FUSION", SWITCH, "Fusions of compiled code are chosen by timing"
    ),
    Allowed("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", SWITCH, "Compiled code rounds like eager"),
    Allowed(
        "TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING",
        SWITCH,
        "Divisions of compiled code round like eager",
    ),
    Allowed("TRITON_PRINT_AUTOTUNING", SWITCH, "Triton prints which kernel it chose"),
    Allowed("TORCH_DEVICE_BACKEND_AUTOLOAD", SWITCH, "Whether installed back ends load with torch"),
)

DEVICES = (
    Allowed("CUDA_DEVICE_ORDER", _words("FASTEST_FIRST", "PCI_BUS_ID"), "How GPUs are numbered"),
    Allowed("CUDA_DEVICE_MAX_CONNECTIONS", COUNT, "Queues between CPU and GPU"),
    Allowed("CUDA_MODULE_LOADING", _words("LAZY", "EAGER", "DEFAULT"), "When kernels are loaded"),
    Allowed("CUDA_CACHE_DISABLE", SWITCH, "The driver keeps nothing compiled"),
    Allowed("CUDA_CACHE_MAXSIZE", COUNT, "How much of what it compiled the driver keeps"),
    Allowed("CUDA_FORCE_PTX_JIT", SWITCH, "The driver compiles every kernel anew"),
    Allowed("CUDNN_LOGLEVEL_DBG", _words("0", "1", "2", "3"), "cuDNN logs"),
    Allowed("NVTE_DEBUG", SWITCH, "Transformer Engine logs"),
    Allowed("NVTE_DEBUG_LEVEL", _words("0", "1", "2"), "Transformer Engine logs"),
    Allowed("HSA_FORCE_FINE_GRAIN_PCIE", SWITCH, "AMD GPUs share memory over PCIe"),
    Allowed("HSA_ENABLE_SDMA", SWITCH, "AMD GPUs copy by an engine of their own"),
    Allowed(
        "HSA_OVERRIDE_GFX_VERSION",
        Text(r"[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}", "numbers such as 10.3.0"),
        "ROCm takes the GPU for another model",
    ),
    Allowed("AMD_LOG_LEVEL", COUNT, "ROCm logs"),
    Allowed(
        "MIOPEN_FIND_MODE",
        _any_case("NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID", *"12345"),
        "How MIOpen chooses kernels",
    ),
    Allowed("MIOPEN_LOG_LEVEL", COUNT, "MIOpen logs"),
    Allowed("ASCEND_GLOBAL_LOG_LEVEL", _words("0", "1", "2", "3", "4"), "CANN logs"),
    Allowed("ASCEND_SLOG_PRINT_TO_STDOUT", _words("0", "1"), "CANN logs to the terminal"),
    Allowed("ACLNN_CACHE_LIMIT", COUNT, "Ops that CANN keeps prepared"),
)

COLLECTIVES = (
    Allowed(
        "NCCL_DEBUG", _any_case("NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"), "NCCL logs"
    ),
    Allowed(
        "NCCL_DEBUG_SUBSYS",
        _listed(r"\^?[A-Za-z]{2,12}", "such as INIT,COLL"),
        "Which parts of NCCL log",
    ),
    Allowed("NCCL_P2P_DISABLE", SWITCH, "GPUs exchange data by way of the CPU"),
    Allowed("NCCL_P2P_LEVEL", DISTANCE, "Up to which distance GPUs exchange data directly"),
    Allowed("NCCL_SHM_DISABLE", SWITCH, "Processes exchange data without shared memory"),
    Allowed("NCCL_PXN_DISABLE", SWITCH, "No detours over another GPU's network card"),
    Allowed("NCCL_BUFFSIZE", COUNT, "Buffers of NCCL"),
    Allowed("NCCL_CROSS_NIC", _words("0", "1", "2"), "NCCL's rings go over several network cards"),
    Allowed("NCCL_CUMEM_ENABLE", SIGNED, "How NCCL allocates memory"),
    Allowed("NCCL_DMABUF_ENABLE", SWITCH, "How NCCL shares memory with network cards"),
    Allowed("NCCL_LAUNCH_MODE", _any_case("PARALLEL", "GROUP"), "How NCCL launches kernels"),
    Allowed("NCCL_MIN_CTAS", COUNT, "Fewest blocks of a collective of NCCL"),
    Allowed("NCCL_MAX_CTAS", COUNT, "Most blocks of a collective of NCCL"),
    Allowed("NCCL_GRAPH_MIXING_SUPPORT", SWITCH, "Collectives inside and outside CUDA graphs"),
    Allowed("NCCL_IGNORE_CPU_AFFINITY", SWITCH, "NCCL binds its threads as it likes"),
    Allowed("NCCL_SOCKET_NTHREADS", COUNT, "Threads of each connection of NCCL"),
    Allowed("NCCL_NSOCKS_PERTHREAD", COUNT, "Sockets of each thread of NCCL"),
    Allowed("NCCL_MNNVL_ENABLE", SIGNED, "NCCL uses NVLink between machines"),
    Allowed("NCCL_NET_GDR_LEVEL", DISTANCE, "Up to which distance a network card reads a GPU"),
    Allowed("NCCL_NET_GDR_READ", SWITCH, "A network card reads a GPU in order to send"),
    Allowed("NCCL_IB_DISABLE", SWITCH, "NCCL does without InfiniBand"),
    Allowed("NCCL_IB_TIMEOUT", COUNT, "How long InfiniBand waits"),
    Allowed("NCCL_IB_RETRY_CNT", COUNT, "How often InfiniBand tries again"),
    Allowed("NCCL_IB_QPS_PER_CONNECTION", COUNT, "Queues of an InfiniBand connection"),
    Allowed("NCCL_IB_GID_INDEX", SIGNED, "Which of a card's own addresses RoCE takes"),
    Allowed("NCCL_IB_TC", SIGNED, "Traffic class of InfiniBand"),
    Allowed("NCCL_IB_SL", SIGNED, "Service level of InfiniBand"),
    Allowed("NCCL_IB_ADAPTIVE_ROUTING", SWITCH, "Messages of InfiniBand may overtake each other"),
    Allowed(
        "NCCL_IB_PCI_RELAXED_ORDERING",
        _words("0", "1", "2"),
        "Writes of network cards may overtake each other",
    ),
    Allowed(
        "NCCL_ASYNC_ERROR_HANDLING",
        _words("0", "1", "2", "3"),
        "What a hanging collective leads to; an older name",
    ),
    Allowed(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _words("0", "1", "2", "3"),
        "What a hanging collective leads to",
    ),
    Allowed("NCCL_BLOCKING_WAIT", SWITCH, "Waiting for a collective blocks; an older name"),
    Allowed("TORCH_NCCL_BLOCKING_WAIT", SWITCH, "Waiting for a collective blocks"),
    Allowed("TORCH_NCCL_AVOID_RECORD_STREAMS", SWITCH, "Memory of collectives is freed sooner"),
    Allowed("TORCH_NCCL_HIGH_PRIORITY", SWITCH, "Collectives go first"),
    Allowed("TORCH_NCCL_NAN_CHECK", SWITCH, "NaN in a collective is an error"),
    Allowed("TORCH_NCCL_DESYNC_DEBUG", SWITCH, "Says which ranks lag when a collective hangs"),
    Allowed("TORCH_NCCL_ENABLE_MONITORING", SWITCH, "A watchdog ends a hanging process"),
    Allowed(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        COUNT,
        "After how long a watchdog ends a hanging process",
    ),
    Allowed("TORCH_NCCL_TRACE_BUFFER_SIZE", COUNT, "How many collectives torch remembers"),
    Allowed("TORCH_FR_BUFFER_SIZE", COUNT, "How many collectives torch remembers"),
    Allowed("RCCL_MSCCL_ENABLE", SWITCH, "AMD's collectives by MSCCL"),
    Allowed("HCCL_BUFFSIZE", COUNT, "Buffers of HCCL, in MB"),
    Allowed("HCCL_CONNECT_TIMEOUT", COUNT, "How long HCCL waits for other ranks"),
    Allowed("HCCL_EXEC_TIMEOUT", COUNT, "How long HCCL waits for a collective"),
    Allowed("HCCL_ASYNC_ERROR_HANDLING", _words("0", "1"), "What a hang leads to on Ascend"),
    Allowed("HCCL_INTRA_PCIE_ENABLE", _words("0", "1"), "NPUs of a server exchange over PCIe"),
    Allowed("HCCL_INTRA_ROCE_ENABLE", _words("0", "1"), "NPUs of a server exchange over RoCE"),
    Allowed(
        "HCCL_OP_EXPANSION_MODE",
        _words("AI_CPU", "AIV", "AIV_ONLY", "HOST", "HOST_TS", "CCU_SCHED", "CCU_MS"),
        "What carries out HCCL's collectives",
    ),
    Allowed("HCCL_RDMA_TC", COUNT, "Traffic class of RoCE"),
    Allowed("HCCL_RDMA_SL", COUNT, "Service level of RoCE"),
    Allowed("HCCL_RDMA_TIMEOUT", COUNT, "How long RoCE waits"),
    Allowed("HCCL_RDMA_RETRY_CNT", COUNT, "How often RoCE tries again"),
    Allowed(
        "FI_PROVIDER",
        _words("efa", "tcp", "verbs", "psm3", "cxi", "shm"),
        "Which of its own networks libfabric takes",
    ),
    Allowed("FI_EFA_USE_DEVICE_RDMA", SWITCH, "Network cards of AWS read GPUs"),
    Allowed("RDMAV_FORK_SAFE", SWITCH, "Whether InfiniBand bears a fork"),
)

LIBRARIES = (
    Allowed("TOKENIZERS_PARALLELISM", SWITCH, "tokenizers uses threads"),
    Allowed("TRANSFORMERS_OFFLINE", SWITCH, "transformers downloads nothing"),
    Allowed("TRANSFORMERS_VERBOSITY", VERBOSITY, "transformers logs"),
    Allowed("TRANSFORMERS_NO_ADVISORY_WARNINGS", SWITCH, "transformers warns less"),
    Allowed("DATASETS_VERBOSITY", VERBOSITY, "datasets logs"),
    Allowed("DIFFUSERS_VERBOSITY", VERBOSITY, "diffusers logs"),
    Allowed("HF_DATASETS_OFFLINE", SWITCH, "datasets downloads nothing"),
    Allowed("HF_EVALUATE_OFFLINE", SWITCH, "evaluate downloads nothing"),
    Allowed("HF_HUB_OFFLINE", SWITCH, "huggingface_hub downloads nothing"),
    Allowed("HF_HUB_VERBOSITY", VERBOSITY, "huggingface_hub logs"),
    Allowed("HF_HUB_DISABLE_TELEMETRY", SWITCH, "huggingface_hub tells nobody that it is used"),
    Allowed("HF_HUB_DISABLE_PROGRESS_BARS", SWITCH, "huggingface_hub shows no progress"),
    Allowed("HF_HUB_DISABLE_SYMLINKS_WARNING", SWITCH, "huggingface_hub warns less"),
    Allowed("HF_HUB_DISABLE_XET", SWITCH, "huggingface_hub downloads without Xet"),
    Allowed(
        "HF_HUB_ENABLE_HF_TRANSFER", SWITCH, "huggingface_hub downloads by the package hf_transfer"
    ),
    Allowed("HF_XET_HIGH_PERFORMANCE", SWITCH, "huggingface_hub downloads faster"),
    Allowed("HF_HUB_DOWNLOAD_TIMEOUT", COUNT, "How long huggingface_hub waits for a file"),
    Allowed("DISABLE_TELEMETRY", SWITCH, "Libraries tell nobody that they are used"),
    Allowed("DO_NOT_TRACK", SWITCH, "Libraries tell nobody that they are used"),
    Allowed(
        "ACCELERATE_MIXED_PRECISION",
        _words("no", "fp16", "bf16", "fp8"),
        "The precision in which accelerate trains",
    ),
    Allowed(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", COUNT, "Batches of an update under accelerate"
    ),
    Allowed("ACCELERATE_DEBUG_MODE", SWITCH, "accelerate checks shapes before collectives"),
    Allowed("ACCELERATE_LOG_LEVEL", LEVEL, "accelerate logs"),
    Allowed("FSDP_CPU_RAM_EFFICIENT_LOADING", SWITCH, "Only the first rank loads the weights"),
    Allowed("POSSIBLE_USER_WARNINGS", SWITCH, "Lightning warns"),
    Allowed("TIMM_FUSED_ATTN", _words("0", "1", "2"), "timm takes fused attention"),
    Allowed("TIMM_REENTRANT_CKPT", SWITCH, "How timm checkpoints activations"),
    Allowed("BITSANDBYTES_NOWELCOME", SWITCH, "bitsandbytes says nothing on import"),
    Allowed("VLLM_BATCH_INVARIANT", SWITCH, "vLLM computes a row alike in every batch"),
    Allowed("VLLM_ENABLE_V1_MULTIPROCESSING", SWITCH, "vLLM schedules in another process"),
    Allowed("VLLM_LOGGING_LEVEL", LEVEL, "vLLM logs"),
    Allowed("VLLM_NO_USAGE_STATS", SWITCH, "vLLM tells nobody that it is used"),
    Allowed(
        "WANDB_MODE",
        _words("online", "offline", "disabled", "dryrun", "shared"),
        "Whether wandb logs, and when it sends",
    ),
    Allowed("WANDB_SILENT", SWITCH, "wandb prints nothing"),
    Allowed("WANDB_DISABLED", SWITCH, "transformers does not log to wandb"),
    Allowed(
        "WANDB_CONSOLE",
        _words("auto", "off", "wrap", "redirect", "wrap_raw"),
        "What wandb keeps of the output",
    ),
    Allowed("WANDB_DISABLE_CODE", SWITCH, "wandb stores no code"),
    Allowed("WANDB_DISABLE_GIT", SWITCH, "wandb does not look at git"),
    Allowed(
        "WANDB_WATCH",
        _words("false", "gradients", "parameters", "all"),
        "What transformers logs to wandb of the model",
    ),
    Allowed("WANDB_PROJECT", LABEL, "The name of wandb's project, on the server that is set up"),
    Allowed("WANDB_NAME", LABEL, "The name of wandb's run"),
    Allowed("WANDB_RUN_GROUP", LABEL, "The group of wandb's run"),
    Allowed("WANDB_TAGS", LABELS, "The tags of wandb's run"),
    Allowed(
        "MLFLOW_EXPERIMENT_NAME",
        LABEL,
        "The name of MLflow's experiment, on the server that is set up",
    ),
    Allowed("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", SWITCH, "MLflow logs the load of the machine"),
    Allowed(
        "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", DECIMAL, "How often MLflow looks at the load"
    ),
    Allowed("MLFLOW_ENABLE_ASYNC_LOGGING", SWITCH, "MLflow logs in another thread"),
    Allowed("MLFLOW_LOGGING_LEVEL", LEVEL, "MLflow prints"),
    Allowed("MLFLOW_FLATTEN_PARAMS", SWITCH, "transformers logs nested parameters flat"),
    Allowed("MLFLOW_DISABLE_TELEMETRY", SWITCH, "MLflow tells nobody that it is used"),
    Allowed("DISABLE_MLFLOW_INTEGRATION", SWITCH, "transformers does not log to MLflow"),
    Allowed("COMET_MODE", MODE, "Whether Comet logs"),
    Allowed(
        "SWANLAB_MODE", _words("cloud", "local", "offline", "disabled"), "Whether SwanLab logs"
    ),
    Allowed(
        "NEPTUNE_MODE",
        _words("async", "sync", "offline", "debug", "read-only"),
        "Whether Neptune logs",
    ),
    Allowed("RAY_DEDUP_LOGS", SWITCH, "Ray prints equal lines once"),
    Allowed("RAY_USAGE_STATS_ENABLED", SWITCH, "Ray tells its makers that it is used"),
    Allowed("RAY_BACKEND_LOG_LEVEL", LEVEL, "Ray logs"),
    Allowed("RAY_memory_monitor_refresh_ms", COUNT, "How often Ray looks at memory; 0 is never"),
    Allowed("TF_CPP_MIN_LOG_LEVEL", _words("0", "1", "2", "3"), "TensorFlow logs"),
    Allowed("TF_ENABLE_ONEDNN_OPTS", SWITCH, "TensorFlow computes with oneDNN"),
    Allowed("TF_FORCE_GPU_ALLOW_GROWTH", SWITCH, "TensorFlow takes GPU memory as it needs it"),
    Allowed("JAX_ENABLE_X64", SWITCH, "JAX computes in 64 bits"),
    Allowed("JAX_DISABLE_JIT", SWITCH, "JAX compiles nothing"),
    Allowed("JAX_DEBUG_NANS", SWITCH, "NaN is an error of JAX"),
    Allowed(
        "JAX_PLATFORMS",
        _listed("(cpu|cuda|gpu|rocm|tpu|METAL)", "cpu, cuda, tpu"),
        "The devices that JAX looks for",
    ),
    Allowed(
        "JAX_DEFAULT_MATMUL_PRECISION",
        _words("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"),
        "How far JAX may round",
    ),
    Allowed("XLA_PYTHON_CLIENT_PREALLOCATE", SWITCH, "JAX takes GPU memory at once"),
    Allowed("XLA_PYTHON_CLIENT_MEM_FRACTION", DECIMAL, "How much GPU memory JAX takes"),
    Allowed("PJRT_DEVICE", _words("CPU", "CUDA", "TPU", "NEURON"), "The device of torch_xla"),
    Allowed(
        "KERAS_BACKEND",
        _words("torch", "jax", "tensorflow", "openvino"),
        "The library that Keras computes with",
    ),
    Allowed("HYDRA_FULL_ERROR", SWITCH, "Hydra shows tracebacks whole"),
)

PROCESS = (
    Allowed("PYTHONUNBUFFERED", SWITCH, "Python prints at once"),
    Allowed("PYTHONFAULTHANDLER", SWITCH, "Python says where it was when it crashed"),
    Allowed("TQDM_DISABLE", SWITCH, "No progress bars"),
    Allowed("TQDM_MININTERVAL", DECIMAL, "How often progress bars are drawn"),
    Allowed("TQDM_MINITERS", COUNT, "After how many steps progress bars are drawn"),
    Allowed("NO_COLOR", SWITCH, "Programs print without color"),
    Allowed("FORCE_COLOR", SWITCH, "Programs print in color"),
    Allowed("COLUMNS", COUNT, "How wide a terminal is"),
    Allowed("LANG", LOCALE, "Language, order and encoding of text; the dot parts both"),
    Allowed("LC_ALL", LOCALE, "Language, order and encoding of text; the dot parts both"),
    Allowed("TZ", _words("UTC", "GMT"), "The time zone; only these, others are read from files"),
    Allowed("SOURCE_DATE_EPOCH", COUNT, "The time that tools write into what they build"),
)

ALLOWED: dict[str, Allowed] = {
    row.name: row for row in (*THREADS, *TORCH, *DEVICES, *COLLECTIVES, *LIBRARIES, *PROCESS)
}
"""A further variable is a further row."""


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
