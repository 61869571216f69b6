"""What the Triton kernels share: launching, tiles of partial sums, and their ahead-of-time compilation.

The kernels of an op are in the folder ``fused`` next to its contract. Nothing in these folders is imported unless ``kernels.mode=fused`` is
chosen, so a machine that runs the references needs no Triton. Every file has the kernels, a *launcher* (a function with the op's signature)
and ``OP``, the launcher registered with ``torch.library`` so that compiled regions see one opaque operator. ``sm_90.json`` has the
registers and shared memory of the compiled kernels, which ``python -m tests.kernels.proof.aot`` writes without a GPU.
"""

from __future__ import annotations
