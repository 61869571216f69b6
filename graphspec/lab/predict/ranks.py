"""Cost of a target over several ranks: memory of each, floors, and the sums between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, ConfigError
from ...plan.draft_parallel import resolve_draft_parallel
from ...plan.plan import resolve_shape
from ...shapes import PLAIN
from ..floor import FloorModel
from .capacity import capacity

if TYPE_CHECKING:
    from ...config.catalog import Variant
    from ...config.command_options import LaunchConfig
    from ...facts import DraftFacts, ModelFacts
    from ...plan.draft_parallel import DraftParallel
    from ..floor import Hardware
    from .model_pair import ModelPair

BEST_BYTES = 16
"""Bytes of a position that a rank sends of its part of the logits: :func:`graphspec.kernels.tree.shard_topk.pack_shard`, K = 1."""
SIZES = (1, 2, 4, 8, 16)
"""Numbers of ranks that are priced."""


@dataclass(frozen=True, slots=True)
class RankPrice:
    """Plain decoding of the smallest batch over a number of ranks.

    Attributes:
        refused: why the target can't be split over that many; the other fields are then unset.
        weights: bytes of the target on each rank.
        needed: bytes of an engine with one row, on each rank.
        rows: most rows that fit; None: the memory of the hardware is not known.
        floor_ms: milliseconds of the bytes and operations of a rank.
        sums_ms: milliseconds of all of them.
    """

    size: int
    refused: str = ""
    weights: int = 0
    needed: int = 0
    rows: int | None = None
    floor_ms: float = 0.0
    sums: int = 0
    sums_ms: float = 0.0

    @property
    def fits(self) -> bool:
        """One row fits."""
        return not self.refused and bool(self.rows)

    @property
    def total_ms(self) -> float:
        """Floor and sums, one after the other."""
        return self.floor_ms + self.sums_ms

    def document(self) -> dict[str, Any]:
        """For ``format=json``."""
        if self.refused:
            return {"ranks": self.size, "refused": self.refused}
        names = ("weights", "needed", "rows", "floor_ms", "sums", "sums_ms")
        return {"ranks": self.size} | {name: getattr(self, name) for name in names}


def sums_of(facts: ModelFacts, size: int) -> int:
    """Collectives of one pass of a target: one after each block, norm over several ranks, for its tokens and the best of its logits."""
    norms = sum(facts.norms_over_ranks(layer) for layer in range(facts.num_layers))
    return facts.blocks + norms + 2 if size > 1 else 0


def sums_ms(facts: ModelFacts, size: int, tokens: int, itemsize: int, start_us: float, link: float) -> float:
    """Milliseconds of the collectives of a pass, which do not overlap with anything.

    Every rank reads the parts of all others over its own link: ``size - 1`` parts of each sum, and the best key of each part of the logits
    with what belongs to it. Sampling classes that need all logits (:func:`~graphspec.graphs.stages.sampling.target_needs_all`) read
    these too. The squares for norms over several ranks are a few numbers per token and are not counted.

    Args:
        itemsize: bytes of an activation.
        start_us: microseconds of a sum without data.
        link: bytes per second that a rank reads.
    """
    if size == 1:
        return 0.0
    read = (size - 1) * tokens * (facts.hidden_size * itemsize * (facts.blocks + 1) + BEST_BYTES)
    return sums_of(facts, size) * start_us * 1e-3 + 1e3 * read / link


def draft_of_rank(
    config: LaunchConfig, target: ModelFacts, pair: ModelPair, variant: Variant, *, device: str, dtype: str
) -> tuple[DraftFacts | None, DraftParallel | None]:
    """What a rank holds of the draft, and why, as :func:`graphspec.plan.plan.make_plan` settles it.

    Raises:
        ConfigError: the draft can't be spread as asked.
    """
    limits = (pair.draft.num_heads, pair.draft.max_steps) if pair.draft is not None else (1, None)
    shape = resolve_shape(variant, config.variant, target.family, *limits)
    return resolve_draft_parallel(config, variant, target.sharding, pair.draft, shape, device=device, dtype=dtype)


def price_ranks(
    config: LaunchConfig, pair: ModelPair, variant: Variant, context: int, *, dtype: str, hardware: Hardware
) -> list[RankPrice]:
    """Price every number of ranks of :data:`SIZES`; none where the link between the devices is not known."""
    link, found = config.hardware.link_gbs, []
    if link is None:
        return []
    batch = config.plan.batches[0]
    single_batch = replace(config, plan=replace(config.plan, batches=[batch]))
    for size in SIZES:
        try:
            facts = pair.target.of_rank(0, size)
            draft, _ = draft_of_rank(config, facts, pair, variant, device="cuda", dtype=dtype)
            token_map = config.variant.token_map if size == 1 else None
            model = FloorModel.of(facts, draft, dtype, variant, token_map, pair.from_config)
        except (ConfigError, CheckpointError) as error:
            found.append(RankPrice(size, refused=f"expected {error.expected}"))
            continue
        of_rank = replace(pair, target=facts)
        room = capacity(single_batch, of_rank, model, PLAIN, context, device="cuda", dtype=dtype, memory=hardware.memory)
        found.append(
            RankPrice(
                size,
                weights=model.target_weights.size,
                needed=room.total,
                rows=room.rows,
                floor_ms=sum(stage.floor_ms(hardware) for stage in model.stages(PLAIN, batch, context)),
                sums=sums_of(facts, size),
                sums_ms=sums_ms(facts, size, batch, model.itemsize, config.hardware.sum_us, 1e9 * link),
            )
        )
    return found


def recommended(prices: list[RankPrice]) -> RankPrice | None:
    """The fewest ranks over which one row fits; None: it fits over none of them, or nothing was priced."""
    return next((price for price in prices if price.fits), None)
