"""Which of its inputs a region that inductor has compiled writes."""

from __future__ import annotations

from typing import Any


def written_by_region(args: Any) -> list[Any]:
    """Return the tensors that a compiled region is about to write in place, from its graph.

    `args` are those of inductor's higher-order op: the callable and the list of inputs. A region
    whose graph is not at hand may write any of them.
    """
    callable_, inputs = args[0], list(args[1])
    graph = getattr(getattr(callable_, "original_gm", None), "graph", None)
    if graph is None:
        return inputs
    given = [node for node in graph.nodes if node.op == "placeholder"]
    # Functionalisation leaves one trace of a write in place: a last copy into the input.
    written = {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith("aten.copy_.")
    }
    return [
        tensor
        for node, tensor in zip(given, inputs, strict=False)
        if node in written and hasattr(tensor, "dtype")
    ]
