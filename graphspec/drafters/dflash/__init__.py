"""DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394): a block of masks, over keys and values made of the target's features."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="dflash",
    summary="block drafter (DFlash, JetSpec): one pass over masks, with keys and values of the context from the target's features",
    drafter="network",
    feature_source="taps",
    shift=1,
    facts="graphspec.drafters.dflash.facts:read_dflash_facts",
    loader="graphspec.drafters.dflash.network:load_dflash",
    stages="graphspec.drafters.dflash.stages:stages",
    outline="graphspec.drafters.dflash.network:DFlashDraft.outline",
    assumed="graphspec.drafters.dflash.facts:assumed_facts",
    training="graphspec.drafters.dflash.training:DFlashDraft",
    draft_shards=True,
    auto_shape=CycleShape(15, 1, 16, "marginals"),
    demo_draft="dflash",
)
