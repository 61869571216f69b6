"""Multi-token-prediction heads (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next; MiMo; Nemotron 3)."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="mtp",
    summary="multi-token-prediction heads: DeepSeek NextN, Qwen3-Next, MiMo, Nemotron 3; one reused, or one per step",
    drafter="network",
    shares_prefix=True,
    draft_shards=True,
    feature_source="hidden",
    shift=1,
    facts="graphspec.drafters.mtp.facts:read_mtp_facts",
    loader="graphspec.drafters.mtp.loading:load_mtp",
    stages="graphspec.drafters.mtp.stages:head_stages",
    prefill="graphspec.drafters.mtp.stages:head_prefill",
    outline="graphspec.drafters.mtp.network:MTPDraft.outline",
    assumed="graphspec.drafters.mtp.facts:counted_facts",
    training="graphspec.drafters.mtp.training:MtpDrafter",
    draft_in_target=True,
    full_vocabulary=True,
    auto_shape=CycleShape(3, 1, 4),
    demo_draft="mtp",
)
