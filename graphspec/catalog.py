"""The variants as data: names, capabilities and where their networks live. Imports no torch, so that ``--help`` does not either.

Stages read capabilities and never a name; adding a variant means adding an entry here, a layout table and, when the network is new, a
module under :mod:`graphspec.variants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .errors import ConfigError
from .shapes import PLAIN, CycleShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Capabilities of one way to draft."""

    name: str
    summary: str
    has_network: bool
    """A draft network runs inside the cycle, over KV of its own."""
    feature_source: str = "none"
    """What the target hands to the drafter for each token: ``taps`` (residual streams entering chosen layers) or ``none``."""
    shift: int = 0
    """Draft RoPE position of a committed token is its slot minus this; the first ``shift`` tokens of a prompt are not consumed."""
    facts: str = ""
    """``module:function`` that reads the draft checkpoint's config: ``(folder, target facts) -> draft facts``."""
    loader: str = ""
    """``module:function`` that loads the network."""
    auto_shape: CycleShape = PLAIN
    """Shape when the user sets none of num_steps, topk, num_draft_tokens and the target's architecture has no entry of its own."""
    auto_shape_by_architecture: tuple[tuple[str, CycleShape], ...] = ()
    demo_draft: str | None = None
    """Folder of the demo draft beside the demo target."""

    @property
    def speculates(self) -> bool:
        return self.auto_shape.num_steps > 0

    def shape_for(self, architecture: str) -> CycleShape:
        """The automatic ``(S, K, N)`` for a target architecture."""
        return dict(self.auto_shape_by_architecture).get(architecture, self.auto_shape)


VARIANTS: tuple[Variant, ...] = (
    Variant(name="none", summary="plain decoding on the same engine: one verify node, no drafter", has_network=False),
    Variant(
        name="eagle3",
        summary="EAGLE-3 head over three tapped target layers, own reduced vocabulary",
        has_network=True,
        feature_source="taps",
        shift=1,
        facts="graphspec.facts:read_eagle3_facts",
        loader="graphspec.weights:load_eagle3",
        auto_shape=CycleShape(3, 1, 4),
        auto_shape_by_architecture=(("LlamaForCausalLM", CycleShape(5, 4, 8)),),
        demo_draft="eagle3",
    ),
)


def resolve_variant(name: str) -> Variant:
    """The catalog entry called ``name``.

    Raises:
        ConfigError: there is none.
    """
    for variant in VARIANTS:
        if variant.name == name:
            return variant
    raise ConfigError("variant", "one of " + ", ".join(v.name for v in VARIANTS), repr(name))


def load_object(path: str) -> Callable[..., Any]:
    """Resolve ``module:attribute``; the only place where a catalog entry turns into code."""
    module, _, attribute = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
