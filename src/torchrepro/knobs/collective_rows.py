"""Rows for the variables that libraries of collectives read: NCCL, HCCL, LCCL."""

from __future__ import annotations

from torchrepro.knobs.legal import Text
from torchrepro.knobs.variable import BIT, COUNT, row

NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
ASCEND_ENV = "https://www.hiascend.com/document"

HCCL = Text(
    "false|true|strict",
    '"false", "true", "strict"',
    "HCCL refuses it with HCCL_E_PARA",
    ignore_case=True,
)
NTHREADS = Text(
    "64|128|256|512", '"64", "128", "256", "512"', "NCCL takes another number for the maximum"
)

ORDER_OF_SUMS = {"nccl": ("NCCL_ALGO", "NCCL_PROTO"), "hccl": ("HCCL_DETERMINISTIC",)}
"""Back end of torch.distributed -> the variables that fix in which order it adds up; gloo's order
follows from sizes alone."""


def pinned(value: str) -> bool:
    """Whether a list of algorithms names some rather than excluding some."""
    return bool(value) and not value.startswith("^")


_NCCL_ALGORITHM = "(tree|ring|collnetdirect|collnetchain|collnet|nvls|nvlstree|pat)"
_NCCL_PROTOCOL = "(ll|ll128|simple)"
_HCCL_ALGORITHM = (
    "(level[0-2]:(NA|null|fullmesh|ring|doublering|pipeline|pairwise|star|H-D_R|NHR|NHR_V1|NB|"
    "AHC|AHC_BROKE|ARS))"
)
_HCCL_OP = (
    "(allreduce|allgather|allgatherv|reducescatter|reducescatterv|broadcast|reduce|scatter|"
    "alltoall|alltoallv|alltoallvc|sendrecv|batchsendrecv|others)"
)


def _per_operation(one: str) -> str:
    """Return the pattern of a list for all of NCCL's operations, or of one list for each."""
    named = rf"\^?{one}(,{one})*"
    operation = "(allreduce|allgather|reducescatter|broadcast|reduce)"
    each = f"{operation}:{named}"
    return f"({named};)?{each}(;{each})*|{named}"


COLLECTIVES = (
    row(
        "NCCL_ALGO",
        "communicator",
        Text(
            _per_operation(_NCCL_ALGORITHM),
            "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT",
            ignore_case=True,
        ),
        "The algorithm of NCCL's collectives; left open, NCCL chooses by size and topology.",
        f"{NCCL_ENV}#nccl-algo",
        cost="one algorithm is not the fastest for every size",
        aliases=("backends.distributed.nccl_algo",),
        enough=pinned,
    ),
    row(
        "NCCL_PROTO",
        "communicator",
        Text(_per_operation(_NCCL_PROTOCOL), "Simple, LL, LL128", ignore_case=True),
        "The protocol of NCCL's collectives.",
        f"{NCCL_ENV}#nccl-proto",
        cost="Simple is slow for small messages",
        aliases=("backends.distributed.nccl_proto",),
        enough=pinned,
    ),
    row(
        "NCCL_NTHREADS",
        "communicator",
        NTHREADS,
        "Threads of one NCCL block.",
        f"{NCCL_ENV}#nccl-nthreads",
    ),
    row(
        "NCCL_MIN_NCHANNELS",
        "communicator",
        COUNT,
        "Fewest channels of NCCL; each channel sums a part.",
        f"{NCCL_ENV}#nccl-min-nchannels",
    ),
    row(
        "NCCL_MAX_NCHANNELS",
        "communicator",
        COUNT,
        "Most channels of NCCL; each channel sums a part.",
        f"{NCCL_ENV}#nccl-max-nchannels",
    ),
    row(
        "NCCL_NVLS_ENABLE",
        "communicator",
        Text("[012]", '"0", "1", "2"'),
        "NCCL may reduce in the NVLink switch.",
        f"{NCCL_ENV}#nccl-nvls-enable",
    ),
    row(
        "NCCL_COLLNET_ENABLE",
        "communicator",
        BIT,
        "NCCL may reduce in the network.",
        f"{NCCL_ENV}#nccl-collnet-enable",
    ),
    row(
        "HCCL_DETERMINISTIC",
        "communicator",
        HCCL,
        "Ascend's collectives add up in a fixed order; strict also keeps the order of ranks.",
        ASCEND_ENV,
        cost="true: slower all-reduce; strict: slower still, A2 and A3 only",
        aliases=("backends.distributed.hccl_deterministic",),
        enough=lambda value: value.lower() in ("true", "strict"),
    ),
    row(
        "HCCL_ALGO",
        "communicator",
        Text(
            f"{_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*|"
            f"{_HCCL_OP}={_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*"
            f"(/{_HCCL_OP}={_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*)*",
            "a list such as level0:NA;level1:ring, or one per operation as in "
            "allreduce=level0:NA;level1:ring/alltoall=level0:NA;level1:pairwise",
        ),
        "The algorithm of Ascend's collectives.",
        ASCEND_ENV,
        aliases=("backends.distributed.hccl_algo",),
        enough=bool,
    ),
    row(
        "LCCL_DETERMINISTIC",
        "communicator",
        Text("[01]|true|false", '"0", "1"'),
        "The collectives of the ATB library add up in a fixed order.",
        "https://www.hiascend.com/document",
        cost="slower all-reduce",
        aliases=("backends.distributed.lccl_deterministic",),
    ),
)
