"""Gemma 4's assistant: multi-token prediction over the target's own keys and values."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="assistant",
    summary="Gemma 4's assistant: a small decoder that attends over the target's keys and values and keeps none of its own",
    drafter="network",
    shares_prefix=True,
    feature_source="hidden",
    facts="graphspec.drafters.assistant.facts:read_assistant_facts",
    loader="graphspec.drafters.assistant.loading:load_assistant",
    stages="graphspec.drafters.assistant.stages:assistant_stages",
    prefill="graphspec.drafters.assistant.stages:AssistantPrefill",
    outline="graphspec.drafters.assistant.loading:outline",
    auto_shape=CycleShape(3, 1, 4),
)
