"""FlashInfer's kernels as attention: ``xqa`` for trees, planned wrappers for prompts and for chains over latent rows.

Nothing here imports FlashInfer before its first call. ``docs/kernels.md`` lists the calls that run on it and on the fused kernels.
"""

from __future__ import annotations
