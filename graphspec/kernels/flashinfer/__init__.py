"""FlashInfer's kernels as attention: ``xqa`` for trees, planned wrappers for prompts and for chains over latent rows.

Nothing here imports FlashInfer before it runs. ``docs/flashinfer.md`` lists the calls that it serves and those of the fused kernels.
"""

from __future__ import annotations
