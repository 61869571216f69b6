"""Variants and acceptance rules as data: names, capabilities and where their code is. Imports no torch, so that ``--help`` does not either.

Stages read capabilities and never a name. A variant is a folder of :mod:`graphspec.drafters`, and one line in :data:`VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

from ..errors import ConfigError
from ..shapes import PLAIN, CycleShape
from .checks import closest, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Capabilities of one way to draft."""

    name: str
    summary: str
    drafter: Literal["none", "network", "history", "host"]
    """Kind of drafter: a ``network`` inside the cycle, with a separate KV; a matcher over the row's own ``history``, inside the cycle too;
    the ``host``, between two cycles."""
    copies_repeats: bool = False
    """It drafts only what followed an earlier occurrence of the row's last ``variant.ngram.min_window`` tokens: the host can tell before a
    launch whether there is anything to draft."""
    feature_source: Literal["none", "hidden", "taps"] = "none"
    """Feature of the target that drafters of this kind read for each token: its ``hidden`` state after the final norm, or ``taps``, the
    residual streams entering chosen layers. The facts of a draft say which it reads."""
    shift: int = 0
    """Draft RoPE position of a committed token is its slot minus this; the first ``shift`` tokens of a prompt are not consumed."""
    facts: str = ""
    """Reads the config of a draft checkpoint: ``(folder, target facts) -> DraftFacts``. This and the following are ``module:attribute``,
    imported when they are first needed."""
    loader: str = ""
    """Loads the network: ``(facts, target network, max_positions, dtype, device, progress) -> DraftModel``."""
    stages: str = "graphspec.drafters.heads.beams:beam_stages"
    """The stages that fill the candidate pool: ``(build) -> list[Stage]``. The default runs the network step by step over beams."""
    prefill: str = "graphspec.graphs.stages.prefill:DraftPrefill"
    """Writes the draft KV of a prompt chunk: ``(build, planned attention) -> DraftPrefill``."""
    proposer: str = ""
    """Makes the proposer of a drafter on the host: ``(plan, text to token ids) -> graphspec.engine.proposer.Proposer``."""
    outline: str = ""
    """The network without data, if there is no checkpoint: ``(facts, target network) -> nn.Module``. Without it the loader is called."""
    assumed: str = ""
    """Facts for ``graphspec plan`` if there is no draft, or no tensors: ``(folder, target facts) -> (DraftFacts, in words)``."""
    training: str = ""
    """The network that ``graphspec train`` trains, a :class:`graphspec.train.drafter.Drafter`; without it the variant is not trained."""
    conversion: str = ""
    """The layouts that its drafts are published in, for ``graphspec convert``: a :class:`graphspec.drafters.heads.written.Kind`."""
    shares_prefix: bool = False
    """All it keeps of a prompt's token is that token's draft KV, target feature and id, none of which depends on more than Y tokens after
    it: requests that begin alike may share pages."""
    draft_shards: bool = False
    """Its network is made of the target's layers, embedding and head, by facts that may be those of one of several ranks."""
    draft_in_target: bool = False
    """The draft may lie in the target's own checkpoint: without ``variant.draft`` that folder is read."""
    full_vocabulary: bool = False
    """Its logits span the target's vocabulary unless a token map trims the head (FR-Spec)."""
    auto_shape: CycleShape = PLAIN
    """Shape when the user sets none of num_steps, topk and num_draft_tokens."""
    auto_tree: CycleShape | None = None
    """The same for targets of a family with ``drafts_trees``, where it differs."""
    demo_draft: str | None = None
    """Folder of the demo draft next to the demo target."""

    @property
    def speculates(self) -> bool:
        return self.drafter != "none"

    @property
    def has_network(self) -> bool:
        return self.drafter == "network"

    @property
    def reads_target(self) -> bool:
        """Drafters of this kind read features of the target."""
        return self.feature_source in ("hidden", "taps")

    def resolve_prefix_cache(self, wanted: bool | None, *, recurrent: bool) -> bool:
        """Whether requests share the pages of equal beginnings; ``wanted`` None: where this drafter and the target allow it.

        Raises:
            ConfigError: it doesn't.
        """
        if wanted and not self.shares_prefix:
            raise ConfigError("runtime.prefix_cache", f"null or false: variant {self.name} does not declare shares_prefix", wanted)
        if wanted and recurrent:
            raise ConfigError("runtime.prefix_cache", "null or false: the target has recurrent layers, whose state no page holds", wanted)
        return self.shares_prefix and not recurrent if wanted is None else wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRule:
    """Capabilities of one way to accept what was drafted."""

    name: str
    summary: str
    make: str
    """The rule in a program, as ``module:attribute``: ``(build) -> graphspec.graphs.stages.acceptance_rules.Match``."""
    exact: bool = True
    """The output has the target's distribution, unless an option of the rule says otherwise."""
    samples_positions: bool = False
    """What is sampled at a node belongs to its position, so drafters may rank with the sampler's own noise (``variant.draft_noise``)."""
    reads_probabilities: bool = False
    """Where there is noise, it reads the target's probabilities, not just the token that is sampled."""
    sampled_drafts: bool = False
    """Drafters draw one token of their own distribution, which is kept for the rule; chains of a network alone."""


_RULES = "graphspec.graphs.stages.acceptance_rules"
ACCEPTANCE_RULES = (
    AcceptanceRule(name="match", summary="sample, then match", make=f"{_RULES}:Match", samples_positions=True),
    AcceptanceRule(name="target_only", summary="one coin per node", make=f"{_RULES}:TargetOnly", reads_probabilities=True),
    AcceptanceRule(name="rejection", summary="p/q, chains", make=f"{_RULES}:Rejection", reads_probabilities=True, sampled_drafts=True),
    AcceptanceRule(name="synthetic", summary="a forced length", make=f"{_RULES}:Synthetic", exact=False, samples_positions=True),
)
RULE_ENTRY_POINTS = "graphspec.acceptance_rules"
"""Group of entry points through which another package adds an :class:`AcceptanceRule`: ``name = module:attribute``."""

PLAIN_DECODING = Variant(
    name="none", summary="plain decoding on the same engine: one verify node, no drafter", drafter="none", shares_prefix=True
)

VARIANTS = {
    "none": "graphspec.config.catalog:PLAIN_DECODING",
    "eagle": "graphspec.drafters.eagle:VARIANT",
    "eagle3": "graphspec.drafters.eagle3:VARIANT",
    "p_eagle": "graphspec.drafters.p_eagle:VARIANT",
    "dflash": "graphspec.drafters.dflash:VARIANT",
    "standalone": "graphspec.drafters.standalone:VARIANT",
    "mtp": "graphspec.drafters.mtp:VARIANT",
    "assistant": "graphspec.drafters.assistant:VARIANT",
    "ngram": "graphspec.drafters.ngram:VARIANT",
    "ngram_trie": "graphspec.drafters.ngram_trie:VARIANT",
}
"""The variants of the package, written like entry points: name, and ``module:attribute`` of its :class:`Variant`."""
ENTRY_POINTS = "graphspec.variants"
"""Group of entry points through which another package adds a :class:`Variant`: ``name = module:attribute``."""


@cache
def all_variants() -> tuple[Variant, ...]:
    """Ours, and those of installed packages (read once per process).

    Raises:
        ConfigError: an entry point that is no :class:`Variant`, or whose name is taken.
    """
    return _with_entry_points([load_object(path) for path in VARIANTS.values()], ENTRY_POINTS, "variant")


@cache
def all_acceptance_rules() -> tuple[AcceptanceRule, ...]:
    """Ours, and those of installed packages (read once per process).

    Raises:
        ConfigError: an entry point that is no :class:`AcceptanceRule`, or whose name is taken.
    """
    return _with_entry_points(ACCEPTANCE_RULES, RULE_ENTRY_POINTS, "rule")


class Named(Protocol):
    """A row of a catalog."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)


def entry_point_rows(group: str, kind: type[Row]) -> Iterator[tuple[str, str, Row]]:
    """Rows that installed packages add through entry points, by name.

    Args:
        group: of entry points.
        kind: of the rows; each has the name of its entry point.

    Yields:
        The key for messages about the entry point, what it points to, and the row.

    Raises:
        ConfigError: an entry point that is no ``kind``, or has another name.
    """
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        key, row = f"entry point {group}: {point.name}", point.load()
        if not isinstance(row, kind) or row.name != point.name:
            raise ConfigError(key, f"a {kind.__module__}.{kind.__qualname__} called {point.name!r}", f"{point.value}: {row!r}"[:200])
        yield key, point.value, row


def _with_entry_points(ours: Sequence[Row], group: str, what: str) -> tuple[Row, ...]:
    found = {row.name: row for row in ours}
    for key, value, row in entry_point_rows(group, type(ours[0])):
        if row.name in found:
            raise ConfigError(key, "a name that is not taken", f"{value} next to the {what} of that name")
        found[row.name] = row
    return tuple(found.values())


def resolve_acceptance_rule(name: str) -> AcceptanceRule:
    """The acceptance rule called ``name``.

    Raises:
        ConfigError: there is none.
    """
    rules = {rule.name: rule for rule in all_acceptance_rules()}
    one_of("accept.rule", name, list(rules))
    return rules[name]


def resolve_variant(name: str) -> Variant:
    """The catalog entry called ``name``.

    Raises:
        ConfigError: there is none.
    """
    variants = all_variants()
    for variant in variants:
        if variant.name == name:
            return variant
    names = [v.name for v in variants]
    raise ConfigError("variant", names, repr(name), closest(name, names))


def load_object(path: str) -> Any:
    """Resolve ``module:attribute``; the only place where a line of the catalog turns into code."""
    module, _, attribute = path.partition(":")
    return attrgetter(attribute)(import_module(module))
