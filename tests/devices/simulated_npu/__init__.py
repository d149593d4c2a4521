"""An accelerator called "npu", simulated in Python, for tests that need one.

Two devices with kernels in torch's real dispatcher, below autograd: one for every aten op that the
CPU has a kernel for. Their memory is the host's under another name, so views and in-place ops
alias; their arithmetic is the CPU's, bit for bit; their random numbers come from generators of
their own. `install` cannot be undone, so it belongs in a process of its own (fixture `on_npu`).

What is not possible without C++:

- ``torch.Generator("npu")``.
- A backward pass on ``npu:1``: autograd is told of one device. Forward passes and random numbers
  work on both.
- ``torch.save`` and ``torch.load`` of tensors on the device: go through ``.cpu()``;
  ``map_location="npu"`` ends the process.
- Memory that grows in place: `resize_` beyond it moves that one tensor, its views stay behind.
- ``torch.accelerator.synchronize()``, and autocast that casts anything.

Attention has no fused kernel, and an LSTM runs cell by cell as on CUDA without cuDNN: these equal
the CPU's up to rounding (attention bit for bit where the CPU's is the math one too). GRU has none.
"""

from simulated_npu.faults import alert_on, reset, vary
from simulated_npu.kernels import log
from simulated_npu.registration import MISSING, install

__all__ = ["MISSING", "alert_on", "install", "log", "reset", "vary"]
