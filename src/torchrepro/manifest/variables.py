"""The variables that steer numbers and are no knobs: one row each, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

DISPATCH = "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html"
HINTS = "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_isa_hints.html"
FPMATH = "https://uxlfoundation.github.io/oneDNN/dev_guide_attributes_fpmath_mode.html"
MKL = "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/current/"
OPENMP = "https://www.openmp.org/spec-html/5.0/openmpse50.html"
LIBOMP = "https://openmp.llvm.org/design/Runtimes.html"
LIBGOMP = "https://gcc.gnu.org/onlinedocs/libgomp/Environment-Variables.html"
OPENBLAS = "https://www.openmathlib.org/OpenBLAS/docs/runtime_variables/"
BLOCKS = "https://github.com/OpenMathLib/OpenBLAS/blob/develop/driver/others/parameter.c"
NUMPY = "https://numpy.org/doc/stable/reference/simd/build-options.html"
TORCH = "https://docs.pytorch.org/docs/stable/torch_environment_variables.html"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a manifest may record although no profile has a key for it."""

    name: str
    why: str
    """How it steers numbers."""

    source: str


_LIMIT = "oneDNN takes no kernels above this instruction set"
_WIDTH = "oneDNN prefers kernels of this vector width"
_BOUND = "Bound threads, and processes below them, may see fewer CPUs and so be fewer"
_DEVICES = "Which devices there are, and which of several models comes first"

VARIABLES: tuple[Variable, ...] = (
    Variable("ONEDNN_MAX_CPU_ISA", _LIMIT, DISPATCH),
    Variable("DNNL_MAX_CPU_ISA", f"{_LIMIT}; its older name", DISPATCH),
    Variable("ONEDNN_CPU_ISA_HINTS", _WIDTH, HINTS),
    Variable("DNNL_CPU_ISA_HINTS", f"{_WIDTH}; its older name", HINTS),
    Variable("DNNL_DEFAULT_FPMATH_MODE", "How far oneDNN may round; its older name", FPMATH),
    Variable(
        "MKL_ENABLE_INSTRUCTIONS",
        "MKL takes the kernels of this instruction set",
        f"{MKL}instruction-set-specific-dispatch-on-intel-archs.html",
    ),
    Variable(
        "MKL_DEBUG_CPU_TYPE",
        "MKL up to 2020.0 takes the kernels of another CPU, as on AMD",
        "https://en.wikipedia.org/wiki/Math_Kernel_Library",
    ),
    Variable(
        "MKL_DOMAIN_NUM_THREADS",
        "Threads of MKL for each kind of function",
        f"{MKL}mkl-domain-num-threads.html",
    ),
    Variable(
        "MKL_NUM_STRIPES",
        "MKL divides a matrix product among its threads in this way",
        f"{MKL}improving-performance-with-threading.html",
    ),
    Variable(
        "MKL_THREADING_LAYER",
        "The threads that MKL computes with, or none",
        f"{MKL}dynamic-select-the-interface-and-threading-layer.html",
    ),
    Variable("OMP_THREAD_LIMIT", "The most threads that OpenMP starts", OPENMP),
    Variable("OMP_NESTED", "Parallel regions within others have threads of their own", OPENMP),
    Variable("OMP_MAX_ACTIVE_LEVELS", "How deep parallel regions have threads", OPENMP),
    Variable("OMP_PROC_BIND", _BOUND, OPENMP),
    Variable("OMP_PLACES", _BOUND, OPENMP),
    Variable("GOMP_CPU_AFFINITY", _BOUND, LIBGOMP),
    Variable("KMP_AFFINITY", _BOUND, LIBOMP),
    Variable("KMP_HW_SUBSET", "The cores, and so the threads, that OpenMP takes", LIBOMP),
    Variable("KMP_ALL_THREADS", "The most threads that OpenMP starts", LIBOMP),
    Variable("KMP_DEVICE_THREAD_LIMIT", "The most threads that OpenMP starts", LIBOMP),
    Variable(
        "KMP_DETERMINISTIC_REDUCTION",
        "OpenMP adds up what its threads found in a fixed order",
        "https://github.com/llvm/llvm-project/blob/main/openmp/runtime/src/kmp_settings.cpp",
    ),
    Variable(
        "KMP_FORCE_REDUCTION",
        "How OpenMP adds up what its threads found",
        "https://github.com/llvm/llvm-project/blob/main/openmp/runtime/src/kmp_settings.cpp",
    ),
    Variable("OPENBLAS_NUM_THREADS", "Threads of OpenBLAS, as in NumPy", OPENBLAS),
    Variable("OPENBLAS_CORETYPE", "OpenBLAS takes the kernels of this CPU", OPENBLAS),
    Variable("GOTO_NUM_THREADS", "Threads of OpenBLAS; an older name", OPENBLAS),
    Variable("OPENBLAS_L2_SIZE", "OpenBLAS divides a product into blocks for this cache", BLOCKS),
    Variable("OPENBLAS_BLOCK_FACTOR", "OpenBLAS divides a product into larger blocks", BLOCKS),
    Variable("NPY_DISABLE_CPU_FEATURES", "NumPy takes no kernels of these instructions", NUMPY),
    Variable("NPY_ENABLE_CPU_FEATURES", "NumPy takes kernels of these instructions only", NUMPY),
    Variable(
        "GLIBC_TUNABLES",
        "glibc.cpu.hwcaps decides which exp, log and sin the C library takes",
        "https://www.gnu.org/software/libc/manual/html_node/Hardware-Capability-Tunables.html",
    ),
    Variable("TORCH_BLAS_PREFER_CUBLASLT", "Matrix products by cuBLASLt, not cuBLAS", TORCH),
    Variable("TORCH_LINALG_PREFER_CUSOLVER", "Linear algebra by cuSOLVER, not MAGMA", TORCH),
    Variable(
        "CUBLASLT_WORKSPACE_SIZE",
        "The workspace of cuBLASLt, on which its choice of kernels depends",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html",
    ),
    Variable(
        "WORLD_SIZE",
        "How many processes train together",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        _DEVICES,
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html",
    ),
    Variable(
        "ASCEND_RT_VISIBLE_DEVICES",
        _DEVICES,
        "https://www.hiascend.com/document",
    ),
    Variable(
        "HIP_VISIBLE_DEVICES",
        _DEVICES,
        "https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",
    ),
    Variable(
        "ROCR_VISIBLE_DEVICES",
        _DEVICES,
        "https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",
    ),
)
"""A further variable is a further row."""
