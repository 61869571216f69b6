"""The variants as data: names, capabilities and where their networks live. Imports no torch, so that ``--help`` does not either.

Stages read capabilities and never a name; adding a variant means adding an entry here, a layout table and, when the network is new, a
module under :mod:`graphspec.variants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from .errors import ConfigError
from .shapes import PLAIN, CycleShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Capabilities of one way to draft."""

    name: str
    summary: str
    drafter: Literal["none", "network", "history", "host"]
    """What proposes: a ``network`` inside the cycle, over KV of its own; a matcher over the row's own ``history``, inside the cycle too;
    the ``host``, between two cycles."""
    feature_source: Literal["none", "hidden", "taps"] = "none"
    """What the target hands to the drafter for each token: its ``hidden`` state after the final norm, or ``taps``, the residual streams
    entering chosen layers."""
    shift: int = 0
    """Draft RoPE position of a committed token is its slot minus this; the first ``shift`` tokens of a prompt are not consumed."""
    facts: str = ""
    """``module:function`` that reads the draft checkpoint's config: ``(folder, target facts) -> draft facts``."""
    loader: str = ""
    """``module:function`` that loads the network."""
    draft_in_target: bool = False
    """The draft may lie in the target's own checkpoint: without ``variant.draft`` that folder is read."""
    full_vocabulary: bool = False
    """Its logits span the target's vocabulary unless a token map trims the head (FR-Spec)."""
    auto_shape: CycleShape = PLAIN
    """Shape when the user sets none of num_steps, topk, num_draft_tokens and the target's architecture has no entry of its own."""
    auto_shape_by_architecture: tuple[tuple[str, CycleShape], ...] = ()
    demo_draft: str | None = None
    """Folder of the demo draft beside the demo target."""

    @property
    def speculates(self) -> bool:
        return self.drafter != "none"

    @property
    def has_network(self) -> bool:
        return self.drafter == "network"

    def shape_for(self, architecture: str) -> CycleShape:
        """The automatic ``(S, K, N)`` for a target architecture."""
        return dict(self.auto_shape_by_architecture).get(architecture, self.auto_shape)


_CHAIN = CycleShape(3, 1, 4)
_LLAMA_TREE = (("LlamaForCausalLM", CycleShape(5, 4, 8)),)

VARIANTS: tuple[Variant, ...] = (
    Variant(name="none", summary="plain decoding on the same engine: one verify node, no drafter", drafter="none"),
    Variant(
        name="eagle",
        summary="EAGLE-1/2 head over the target's last hidden state, the target's embedding and head",
        drafter="network",
        feature_source="hidden",
        shift=1,
        facts="graphspec.facts:read_eagle_facts",
        loader="graphspec.weights:load_eagle",
        full_vocabulary=True,
        auto_shape=_CHAIN,
        auto_shape_by_architecture=_LLAMA_TREE,
        demo_draft="eagle",
    ),
    Variant(
        name="eagle3",
        summary="EAGLE-3 head over three tapped target layers, own reduced vocabulary",
        drafter="network",
        feature_source="taps",
        shift=1,
        facts="graphspec.facts:read_eagle3_facts",
        loader="graphspec.weights:load_eagle3",
        auto_shape=_CHAIN,
        auto_shape_by_architecture=_LLAMA_TREE,
        demo_draft="eagle3",
    ),
    Variant(
        name="standalone",
        summary="a small language model of the same vocabulary, with embedding, head and KV of its own",
        drafter="network",
        facts="graphspec.facts:read_standalone_facts",
        loader="graphspec.weights:load_standalone",
        full_vocabulary=True,
        auto_shape=_CHAIN,
        demo_draft="standalone",
    ),
    Variant(
        name="mtp",
        summary="multi-token-prediction heads: DeepSeek NextN, Qwen3-Next, MiMo; one reused, or one per step",
        drafter="network",
        feature_source="hidden",
        shift=1,
        facts="graphspec.facts:read_mtp_facts",
        loader="graphspec.weights:load_mtp",
        draft_in_target=True,
        full_vocabulary=True,
        auto_shape=_CHAIN,
        demo_draft="mtp",
    ),
    Variant(
        name="ngram",
        summary="no network: continuations of earlier occurrences in the row's own tokens, matched on the device",
        drafter="history",
        auto_shape=CycleShape(6, 4, 12, "paths"),
    ),
    Variant(
        name="ngram_trie",
        summary="no network: a trie over all traffic on the host, between two cycles",
        drafter="host",
        auto_shape=CycleShape(8, 8, 12, "nodes"),
    ),
)
ENTRY_POINTS = "graphspec.variants"
"""Group of entry points through which another package adds a :class:`Variant`: ``name = module:attribute``."""


@cache
def all_variants() -> tuple[Variant, ...]:
    """Ours, and those of installed packages (read once per process).

    Raises:
        ConfigError: an entry point that is no :class:`Variant`, or whose name is taken.
    """
    found = {variant.name: variant for variant in VARIANTS}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        variant = point.load()
        key = f"entry point {ENTRY_POINTS}: {point.name}"
        if not isinstance(variant, Variant) or variant.name != point.name:
            raise ConfigError(key, f"a graphspec.catalog.Variant called {point.name!r}", f"{point.value}: {variant!r}"[:200])
        if variant.name in found:
            raise ConfigError(key, "a name that is not taken", f"{point.value} beside the variant of that name")
        found[variant.name] = variant
    return tuple(found.values())


def resolve_variant(name: str) -> Variant:
    """The catalog entry called ``name``.

    Raises:
        ConfigError: there is none.
    """
    variants = all_variants()
    for variant in variants:
        if variant.name == name:
            return variant
    raise ConfigError("variant", "one of " + ", ".join(v.name for v in variants), repr(name))


def load_object(path: str) -> Callable[..., Any]:
    """Resolve ``module:attribute``; the only place where a catalog entry turns into code."""
    module, _, attribute = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
