"""Where a target is spread over ranks: whether each rank holds all of the draft, or a part (``runtime.draft_parallel``). Imports no torch.

A draft has two parts that can be spread apart: its layers, which then take two sums each per pass, and its own language-model head with
the embedding, which takes a gather of the best tokens. ``auto`` spreads a part where the bytes that a rank no longer reads would take
longer than the collectives do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..facts.sharding import UNSHARDED, Sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config.catalog import Variant
    from ..config.schema import Config, HardwareConfig
    from ..facts import DraftFacts, ModelFacts
    from ..facts.draft import DraftPass
    from ..shapes import CycleShape

KEY = "runtime.draft_parallel"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PartPrice:
    """What spreading a part of a draft saves and costs in a cycle of one lane.

    Attributes:
        part: ``layers`` or ``head``.
        saved_bytes: of weights that a rank no longer reads.
        collectives: in the cycle.
        saved_us: microseconds that these bytes take.
        collectives_us: microseconds of the collectives, none of which overlaps with anything.
    """

    part: str
    saved_bytes: int
    collectives: int
    saved_us: float
    collectives_us: float

    @property
    def pays(self) -> bool:
        return self.saved_us > self.collectives_us

    def text(self) -> str:
        """The choice and its reason in one line."""
        return (
            f"{self.part} {'sharded' if self.pays else 'replicated'}: {self.saved_bytes / 1e6:.4g} MB less to read per cycle take "
            f"{self.saved_us:.3g} us, {self.collectives} collectives {self.collectives_us:.3g} us"
        )


@dataclass(frozen=True, slots=True)
class DraftParallel:
    """What was chosen.

    Attributes:
        layers: every rank holds a part of the draft's layers.
        head: every rank holds a part of its own embedding and head, where it has any.
        reason: why, in words.
    """

    layers: bool = False
    head: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if self.layers == self.head:
            return f"{'sharded' if self.layers else 'replicated'} ({self.reason})"
        return f"{'layers' if self.layers else 'head'} sharded, the rest replicated ({self.reason})"


def layer_numbers(decoder: ModelFacts, layer: int, inputs: int = 1) -> int:
    """Weights that a token of one layer reads, of matrices that can be spread; of experts those that are chosen.

    Args:
        decoder: of a rank, or whole.
        layer: its index.
        inputs: vectors of hidden size that its attention reads side by side.
    """
    hidden, latent, experts = decoder.hidden_size, decoder.latent, decoder.experts
    if latent is not None:
        query = latent.nope_dim + latent.rope_dim
        heads = (latent.query_rank or hidden) * query + latent.rank * (latent.nope_dim + latent.value_dim) + hidden * latent.value_dim
        attention = decoder.num_heads * heads
    else:
        query, key = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        entering = (2 if decoder.family.attention_gate else 1) * query + 2 * key
        attention = inputs * hidden * entering + query * hidden
    matrices = 2 if decoder.family.activation == "relu2" else 3
    if experts is not None and experts.layers[layer]:
        chosen = experts.topk * experts.intermediate_size * (experts.latent_size or hidden)
        mlp = matrices * (chosen + experts.shared_size * hidden)
    else:
        mlp = matrices * hidden * decoder.intermediate_size
    if decoder.mixers is not None:
        return attention if decoder.attends(layer) else mlp
    return attention + mlp


def collective_us(size: int, read: int, hardware: HardwareConfig) -> float:
    """Microseconds of a collective of ``size`` ranks in which each reads ``read`` bytes of every other, over a link of its own."""
    assert hardware.link_gbs is not None, "a link that is known"
    return hardware.sum_us + (size - 1) * read / hardware.link_gbs * 1e-3


def price_parts(draft: DraftFacts, cut: DraftFacts, shape: CycleShape, itemsize: int, hardware: HardwareConfig) -> list[PartPrice]:
    """The prices of a draft's parts, in a cycle of one lane whose class needs no gathered logits.

    Args:
        draft: whole.
        cut: of one rank, everything spread.
        shape: of the cycle.
        itemsize: bytes of a weight and of an activation.
        hardware: with its bandwidth and its link.
    """
    bandwidth = hardware.bandwidth_gbs
    assert bandwidth is not None, "a bandwidth that is known"
    size, passes, decoder = cut.decoder.sharding.size, draft.passes(shape), draft.decoder

    def price(part: str, numbers: int, reads: Sequence[int]) -> PartPrice:
        saved = numbers * itemsize
        us = sum(collective_us(size, read, hardware) for read in reads)
        return PartPrice(part, saved, len(reads), saved / bandwidth * 1e-3, us)

    def layers_of(run: DraftPass) -> range:
        return range(run.head, run.head + 1) if draft.num_heads > 1 else range(decoder.num_layers)

    def saved_in(layer: int) -> int:
        inputs = draft.attention_inputs if layer == 0 else 1
        return layer_numbers(decoder, layer, inputs) - layer_numbers(cut.decoder, layer, inputs)

    ran = [(run, layer) for run in passes for layer in layers_of(run)]
    blocks = 2 if decoder.mixers is None else 1
    sums = [run.rows * decoder.hidden_size * itemsize for run, _ in ran for _ in range(blocks)]
    found = [price("layers", sum(saved_in(layer) for _, layer in ran), sums)]
    if draft.owns_head:
        rows = -(-draft.draft_vocab_size // size)
        # A key and a token for each of the best, a sum and a flag: 32 bits each.
        gathers = [run.scored * (2 * shape.topk + 2) * 4 for run in passes]
        lookups = [run.rows * decoder.hidden_size * itemsize for run in passes] if draft.owns_embedding else []
        found.append(price("head", len(passes) * (draft.draft_vocab_size - rows) * decoder.hidden_size, [*gathers, *lookups]))
    return found


def of_rank(draft: DraftFacts, rank: int, size: int, *, layers: bool, head: bool) -> DraftFacts:
    """What one of ``size`` ranks holds of a draft.

    Raises:
        ConfigError: its layers can't be spread so.
    """
    decoder = draft.decoder.of_rank(rank, size) if layers else draft.decoder
    return replace(draft, decoder=replace(decoder, vocabulary=Sharding(rank, size) if head else UNSHARDED))


def resolve_draft_parallel(
    config: Config, variant: Variant, ranks: Sharding, draft: DraftFacts | None, shape: CycleShape, *, device: str, dtype: str
) -> tuple[DraftFacts | None, DraftParallel | None]:
    """What this rank holds of the draft, and why; None: there is no draft network, or one rank.

    Args:
        config: what the user asked for.
        variant: its catalog entry.
        ranks: of the target.
        draft: whole.
        shape: of the cycle.
        device: ``cpu`` or ``cuda``.
        dtype: of the weights.

    Raises:
        ConfigError: ``sharded``, and the draft can't be spread.
    """
    asked = config.runtime.draft_parallel
    if not ranks.sharded or (draft is None and asked != "sharded"):
        return draft, None
    if draft is None:
        raise ConfigError(KEY, f"auto or replicated: variant {variant.name} has no draft network", asked)
    if asked == "replicated":
        return draft, DraftParallel(reason=f"{KEY}=replicated")
    obstacle, cut = "", draft
    if not variant.draft_shards:
        obstacle = f"variant {variant.name} does not declare draft_shards"
    else:
        try:
            cut = of_rank(draft, ranks.rank, ranks.size, layers=True, head=True)
        except ConfigError as error:
            obstacle = f"the draft's layers need {error.expected}"
    if asked == "sharded":
        if obstacle:
            raise ConfigError(KEY, f"auto or replicated: {obstacle}", asked)
        return cut, DraftParallel(True, True, f"{KEY}=sharded")
    hardware = config.hardware
    if obstacle:
        return draft, DraftParallel(reason=obstacle)
    if device != "cuda":
        return draft, DraftParallel(reason="sums between processes on a CPU cost more than they save")
    unknown = [key for key in ("bandwidth_gbs", "link_gbs") if getattr(hardware, key) is None]
    if unknown:
        return draft, DraftParallel(reason=f"hardware.{unknown[0]} is not known")
    prices = price_parts(draft, cut, shape, ITEMSIZE[dtype], hardware)
    pays = {price.part: price.pays for price in prices}
    # What is the target's is spread with the target.
    layers, head = pays["layers"], pays.get("head", pays["layers"])
    reason = "; ".join(price.text() for price in prices)
    return of_rank(draft, ranks.rank, ranks.size, layers=layers, head=head), DraftParallel(layers, head, reason)
