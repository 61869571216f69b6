"""A small language model of the same vocabulary (arXiv 2211.17192)."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="standalone",
    summary="a small language model of the same vocabulary, with embedding, head and KV of its own",
    drafter="network",
    shares_prefix=True,
    draft_shards=True,
    facts="graphspec.drafters.standalone.facts:read_standalone_facts",
    loader="graphspec.drafters.standalone.network:load_standalone",
    outline="graphspec.drafters.standalone.network:outline",
    training="graphspec.drafters.standalone.training:StandaloneDraft",
    full_vocabulary=True,
    auto_shape=CycleShape(3, 1, 4),
    demo_draft="standalone",
)
