"""FlashInfer's ``xqa`` as an attention of the decode phase; nothing here imports FlashInfer before it runs.

``docs/flashinfer.md`` says what it serves and what stays with the fused kernels.
"""

from __future__ import annotations
