"""EAGLE-3 (arXiv 2503.01840): a head over three tapped layers of the target."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="eagle3",
    summary="EAGLE-3 head over three tapped target layers, own reduced vocabulary",
    drafter="network",
    shares_prefix=True,
    draft_shards=True,
    feature_source="taps",
    shift=1,
    facts="graphspec.drafters.eagle3.facts:read_eagle3_facts",
    loader="graphspec.drafters.eagle3.loading:load_eagle3",
    outline="graphspec.drafters.eagle3.network:Eagle3Draft.outline",
    assumed="graphspec.drafters.eagle3.facts:assumed_facts",
    training="graphspec.drafters.eagle3.training:Eagle3Draft",
    auto_shape=CycleShape(3, 1, 4),
    auto_tree=CycleShape(5, 4, 8),
    demo_draft="eagle3",
)
