"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all positions in one pass over mask tokens."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="p_eagle",
    summary="P-EAGLE head: EAGLE-3 layers that draft all levels in one pass over mask tokens",
    drafter="network",
    feature_source="taps",
    shift=1,
    facts="graphspec.drafters.p_eagle.facts:read_p_eagle_facts",
    loader="graphspec.drafters.p_eagle.network:load_p_eagle",
    stages="graphspec.drafters.p_eagle.stages:stages",
    outline="graphspec.drafters.p_eagle.network:PEagleDraft.outline",
    assumed="graphspec.drafters.p_eagle.facts:assumed_facts",
    training="graphspec.drafters.p_eagle.training:PEagleDraft",
    draft_shards=True,
    auto_shape=CycleShape(7, 1, 8, "marginals"),
    auto_tree=CycleShape(7, 4, 16, "marginals"),
    demo_draft="p_eagle",
)
