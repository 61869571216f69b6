"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): a head over the target's last hidden state."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="eagle",
    summary="EAGLE-1/2 head over the target's last hidden state, the target's embedding and head",
    drafter="network",
    shares_prefix=True,
    draft_shards=True,
    feature_source="hidden",
    shift=1,
    facts="graphspec.drafters.eagle.facts:read_eagle_facts",
    loader="graphspec.drafters.eagle.loading:load_eagle",
    outline="graphspec.drafters.eagle.network:EagleDraft.outline",
    assumed="graphspec.drafters.eagle.facts:assumed_facts",
    training="graphspec.drafters.eagle.training:EagleDraft",
    full_vocabulary=True,
    auto_shape=CycleShape(3, 1, 4),
    auto_tree=CycleShape(5, 4, 8),
    demo_draft="eagle",
)
