"""Layers with a recurrent state in place of keys and values, as ``config.json`` describes them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .keys import MAX_HEAD_DIM, MAX_HEADS, Keys
from .sharding import UNSHARDED, Shard, Sharding, joined, sharding_of

MAX_CONVOLUTION = 16
"""Taps of a convolution, several times the published 4."""
_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class StateSlot:
    """What a recurrent layer keeps of a row between cycles, or of a node from verification to commit."""

    kind: Literal["matrix", "convolution", "inputs", "gates"]
    shape: tuple[int, ...]
    """Shape for one row, or one node, in one layer."""
    float32: bool
    """Whatever the dtype of the model."""


def _bytes(slots: tuple[StateSlot, ...], itemsize: int) -> int:
    return sum(prod(slot.shape) * (4 if slot.float32 else itemsize) for slot in slots)


@dataclass(frozen=True, slots=True)
class SsmFacts:
    """What sets a Mamba-2 layer (arXiv 2405.21060) apart from a gated delta net of the same sizes."""

    conv_bias: bool
    projection_bias: bool
    """Whether both projections have biases."""
    norm: bool = True
    """A norm over groups of channels follows the output gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentFacts:
    """A causal convolution, then a matrix per head that each token decays, changes and reads.

    A gated delta net (arXiv 2412.06464), or Mamba-2. Of Mamba-2 the keys are B, the queries C and the values x, and the groups of heads
    that share B and C are the key heads.
    """

    layers: tuple[bool, ...]
    """Per layer: whether it is recurrent."""
    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``: queries and keys of one head serve consecutive value heads."""
    key_dim: int
    """Width of a key; for Mamba-2 the size of the state."""
    value_dim: int
    taps: int
    """Tokens that the convolution reads, the current one included."""
    ssm: SsmFacts | None = None
    """Mamba-2; None: the gated delta rule."""
    sharding: Sharding = UNSHARDED
    """Heads are those of one rank. Value heads are cut as query heads are, each run of them with a key head of its own."""

    def of_rank(self, rank: int, size: int) -> RecurrentFacts:
        """What one of ``size`` ranks holds; ``size`` is a divisor of the value heads."""
        sharding = sharding_of(rank, size, self.value_heads, self.key_heads)
        return replace(self, key_heads=len(sharding.key_heads), value_heads=self.value_heads // size, sharding=sharding)

    def value_shard(self, width: int) -> Shard:
        """The shard of a tensor with this many rows for each value head."""
        return self.sharding.shard(self.value_heads * width)

    @property
    def channel_shard(self) -> Shard:
        """The shard of the convolution's channels."""
        keys, values = self.sharding.key_shard(self.key_dim), self.value_shard(self.value_dim)
        return joined(keys, keys, values) if self.ssm is None else joined(values, keys, keys)

    @property
    def splits_groups(self) -> bool:
        """Whether a group of Mamba-2 heads, which share a norm, is split over ranks."""
        return self.ssm is not None and self.sharding.sharded and self.sharding.copies > 1

    @property
    def count(self) -> int:
        """U: recurrent layers."""
        return sum(self.layers)

    @property
    def channels(self) -> int:
        """E: channels of the convolution, queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def update_flops(self) -> int:
        """Operations of an element of a matrix and a token: decay, change, what the query reads, and under the delta rule the key."""
        return 7 if self.ssm is None else 5

    @property
    def states(self) -> tuple[StateSlot, ...]:
        """What lives per row."""
        return (
            StateSlot("matrix", (self.value_heads, self.key_dim, self.value_dim), float32=True),
            StateSlot("convolution", (self.taps - 1, self.channels), float32=False),
        )

    @property
    def records(self) -> tuple[StateSlot, ...]:
        """What a node leaves for the commit, which computes everything else from it again."""
        return (
            StateSlot("inputs", (self.channels,), float32=False),
            # Of each head a log-decay, and the rate of the delta rule or the step of Mamba-2. A decay per channel would be more of them.
            StateSlot("gates", (2 * self.value_heads,), float32=True),
        )

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one row's states in all layers; ``itemsize`` is that of the model's dtype."""
        return self.count * _bytes(self.states, itemsize)

    def record_bytes(self, itemsize: int) -> int:
        """Bytes of one node's records in all layers."""
        return self.count * _bytes(self.records, itemsize)

    def layers_from(self, first: int) -> RecurrentFacts | None:
        """The same without the first layers; None where no layer is recurrent any more."""
        rest = replace(self, layers=self.layers[first:])
        return rest if rest.count else None


def read_gated_delta(keys: Keys, num_layers: int) -> RecurrentFacts | None:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then one attention, unless ``layer_types`` says otherwise.

    Returns:
        None where every layer attends.

    Raises:
        CheckpointError: a key that is wrong or not supported.
    """
    kinds = keys.values.get("layer_types")
    if kinds is None:
        interval = keys.integer("full_attention_interval", 4)
        kinds = [_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in _KINDS for kind in kinds):
        raise keys.error("layer_types", f"{num_layers} entries of {' or '.join(_KINDS)}")
    layers = tuple(kind == "linear_attention" for kind in kinds)
    if not any(layers):
        return None
    if all(layers):
        raise keys.error("layer_types", "at least one entry of full_attention")
    key_heads = keys.integer("linear_num_key_heads", 16, maximum=MAX_HEADS)
    value_heads = keys.integer("linear_num_value_heads", 32, maximum=MAX_HEADS)
    if value_heads % key_heads:
        raise keys.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    return RecurrentFacts(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.integer("linear_key_head_dim", 128, maximum=MAX_HEAD_DIM),
        value_dim=keys.integer("linear_value_head_dim", 128, maximum=MAX_HEAD_DIM),
        taps=keys.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_CONVOLUTION),
    )
