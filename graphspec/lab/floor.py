"""The floor of a cycle: the bytes it must move and the operations it must do, stage by stage, and the least time these take.

Roofline (Williams et al., 2009): a stage takes at least ``max(bytes / bandwidth, flops / peak)``; stages follow one another. Counted are

* weights, once per pass, in the dtype that they are held in; of an embedding only the rows that are looked up, of a mixture of experts
  those that are expected to be hit (:func:`distinct_experts`), the experts that every token goes to always;
* committed KV of every row, once per pass and layer, at most a sliding window of it; the rows a pass writes;
* logits, written and read once in float32; features of the target, written by the verify stage and read by the first draft pass.

Activations inside a pass, RoPE tables and the buffers of stages without weights are not counted: they are small or never leave the cache.
Windows are counted at their static width. Parameters are counted in the modules that run, built without data, so that there is no second
model of the networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config.catalog import Variant, load_object
from ..config.paths import user_path
from ..errors import ConfigError
from ..facts.gguf_model import weights_files
from ..facts.quantisation import read_quantisation
from ..kernels.linear.moe_route import distinct_experts
from ..models.checkpoint import Checkpoint
from ..models.decoder import Decoder
from ..models.experts import MixtureOfExperts
from ..models.layers import Embedding, Linear
from ..models.outline import outline_weights
from ..models.packed_weight import PackedWeight
from ..models.target import load_target, settle_head, target_checkpoint
from ..models.token_map import apply_token_map, load_token_map
from ..plan.buffers import DTYPES

if TYPE_CHECKING:
    from ..facts import DraftFacts, ModelFacts
    from ..shapes import CycleShape

GROUPS = ("embedding", "layers", "experts", "head", "fuse")
"""Use of a parameter. layers: read by every pass; experts: of the router's choice; fuse: read by the first draft pass only."""
_EXPERTS = ("gate_up_EFH", "down_EHF")
_LOGIT_BYTES = 2 * 4
"""A float32 logit is written once and read once."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware that a floor is computed for.

    Attributes:
        bandwidth: bytes per second between memory and processor.
        flops: dense operations per second in the dtype of the model; None: not known, and floors are those of the bytes alone.
        memory: bytes; None: not known.
        name: of the device.
        source: where the figures come from.
    """

    bandwidth: float
    flops: float | None = None
    memory: int | None = None
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("bandwidth", "flops"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"hardware {key}", "a number above 0", value)


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a network by :data:`GROUPS`: their number, and their bytes. Tied or shared ones are counted once."""

    numbers: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def number(self) -> int:
        """All parameters."""
        return sum(self.numbers.values())

    @property
    def size(self) -> int:
        """Bytes of all parameters."""
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Forward:
    """One pass of a network.

    Attributes:
        network: ``target`` or ``draft``.
        rows: tokens of all lanes together.
        scored: how many of them have logits computed.
        context: committed tokens of each lane.
        fused: features of the target enter it.
    """

    network: str
    rows: int
    scored: int
    context: int
    fused: bool = False


@dataclass(frozen=True, slots=True)
class StageCost:
    """Bytes and operations of one stage.

    Attributes:
        name: of the stage.
        forwards: of a network in it.
        parts: bytes of ``weights``, ``experts``, ``kv``, ``state``, ``embedding``, ``logits``, ``features``.
        flops: operations; a multiplication and an addition are two.
    """

    name: str
    forwards: tuple[Forward, ...]
    parts: Mapping[str, float]
    flops: float

    @property
    def passes(self) -> int:
        """How many forwards."""
        return len(self.forwards)

    @property
    def bytes(self) -> float:
        """All of them."""
        return sum(self.parts.values())

    def floor_ms(self, hardware: Hardware) -> float:
        """Milliseconds it takes at least."""
        compute = self.flops / hardware.flops if hardware.flops is not None else 0.0
        return 1e3 * max(self.bytes / hardware.bandwidth, compute)

    def compute_bound(self, hardware: Hardware) -> bool:
        """The operations take longer than the bytes."""
        return hardware.flops is not None and self.flops / hardware.flops > self.bytes / hardware.bandwidth


@dataclass(slots=True)
class _Tally:
    """Adds up the passes of one stage."""

    forwards: list[Forward] = field(default_factory=list)
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("weights", "experts", "kv", "state", "embedding", "logits", "features"), 0.0)
    )
    flops: float = 0.0

    def stage(self, name: str) -> StageCost:
        return StageCost(name, tuple(self.forwards), self.parts, self.flops)


def group_parameters(
    network: nn.Module, itemsize: int, leave_out: Iterable[str] = (), without: nn.Module | None = None, *, packed: bool = False
) -> Weights:
    """Sort the parameters of a network into :data:`GROUPS`.

    Args:
        network: with or without data.
        itemsize: bytes of a parameter, except of those a module keeps in float32 (``float32_names``).
        leave_out: prefixes of names.
        without: a network whose weights are not counted, where the two share some.
        packed: linear layers and experts hold in 16 bits what their checkpoint has in 16 bits.
    """
    skipped = {id(one) for one in (*without.parameters(), *without.modules())} if without is not None else set()
    found: dict[int, tuple[str, int, int]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if name.startswith(tuple(leave_out)) or id(parameter) in skipped:
            continue
        path, _, leaf = name.rpartition(".")
        owner, group = network.get_submodule(path), _group_of(network, name)
        if id(parameter) in found and group != "head":  # a tied matrix is streamed as head
            continue
        width = 4 if leaf in getattr(owner, "float32_names", ()) else itemsize
        if packed and isinstance(owner, Linear) and leaf == "weight" and owner.stored is not None:
            width = owner.stored.itemsize
        if packed and isinstance(owner, MixtureOfExperts) and (stored := owner.stored.get(leaf)) is not None:
            width = stored.itemsize
        found[id(parameter)] = (group, parameter.numel(), parameter.numel() * width)
    for name, weight in network.named_modules(remove_duplicate=False):
        if isinstance(weight, PackedWeight) and id(weight) not in skipped and not name.startswith(tuple(leave_out)):
            group = _group_of(network, name)
            if id(weight) not in found or group == "head":
                rows, channels = weight.shape
                found[id(weight)] = (group, rows * channels, weight.nbytes)
    numbers, sizes = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    for group, number, size in found.values():
        numbers[group] += number
        sizes[group] += size
    return Weights(numbers, sizes)


def _group_of(network: nn.Module, name: str) -> str:
    """Which of :data:`GROUPS` a weight belongs to, by its name."""
    path, _, leaf = name.rpartition(".")
    owner, words = network.get_submodule(path), name.split(".")
    if isinstance(owner, MixtureOfExperts) and leaf in _EXPERTS:
        return "experts"
    if "lm_head" in words:
        return "head"
    if isinstance(owner, Embedding):
        return "embedding"
    return "fuse" if words[0] in getattr(network, "first_pass_only", ()) else "layers"


def build_target(facts: ModelFacts, tap_layers: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Decoder:
    """The target network without data; its facts need only a ``config.json``. Tensors that are there decide if its head is tied.

    Weights of low precision are those of the tensors, or without them those that the config describes.

    Raises:
        CheckpointError: low-precision tensors that do not load, or that this number of ranks can't divide.
    """
    quantisation, there = read_quantisation(facts.path), Checkpoint.is_there(facts.path)
    if there and (quantisation is not None or weights_files(facts.path)):
        return load_target(facts, tap_layers, 1, dtype, torch.device("meta"))
    if facts.tie_word_embeddings and there:
        facts = settle_head(facts, target_checkpoint(facts))
    with torch.device("meta"):
        target = Decoder(facts, tap_layers, 1).to(dtype)
    if quantisation is not None:
        outline_weights(target, facts.family.layout, quantisation, dtype)
    return target


def build_draft(
    facts: DraftFacts, target: Decoder, variant: Variant, token_map: str | None = None, from_config: bool | None = None
) -> nn.Module:
    """The draft network without data, sharing with the target what it shares in the engine.

    Where the checkpoint has tensors, their names decide that, as when it is loaded. From a ``config.json`` alone, embedding and head are
    taken as the target's wherever they can be.

    Args:
        facts: of the draft.
        target: without data.
        variant: catalog entry; without an ``outline`` its loader is called.
        token_map: file that trims the head (FR-Spec).
        from_config: don't read tensors; None: read them where there are any.

    Raises:
        CheckpointError: tensors that do not fit the config.
    """
    draft: nn.Module
    if variant.outline and (from_config or (from_config is None and not has_tensors(facts.path))):
        with torch.device("meta"):
            draft = load_object(variant.outline)(facts, target)
        if (quantisation := read_quantisation(facts.path)) is not None:
            outline_weights(draft, None, quantisation, target.embed_tokens.weight.dtype, target)
    else:
        draft = load_object(variant.loader)(facts, target, 1, target.embed_tokens.weight.dtype, torch.device("meta"), None)
    if token_map is not None:
        apply_token_map(draft, load_token_map(user_path("variant.token_map", token_map), target.facts.vocab_size))
    return draft


def has_tensors(folder: Path) -> bool:
    """Whether a checkpoint's folder holds weights."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorModel:
    """Target and draft as far as floors need them; :meth:`of` builds one, :meth:`stages` counts a cycle.

    Attributes:
        target, draft: facts; ``draft`` is None for a drafter without a network.
        itemsize: bytes of a weight that is not packed.
        kv_itemsize: bytes of an element of KV.
        target_weights: of the target.
        draft_weights: weights that pass 1, 2, ... of the draft reads; further passes read the last ones.
        draft_own: parameters of the draft that it does not share with the target.
    """

    target: ModelFacts
    draft: DraftFacts | None
    itemsize: int
    kv_itemsize: int
    target_weights: Weights
    draft_weights: tuple[Weights, ...]
    draft_own: Weights | None

    @classmethod
    def of(
        cls, target: ModelFacts, draft: DraftFacts | None, dtype: str, variant: Variant | None = None, token_map: str | None = None,
        from_config: bool | None = None, *, packed: bool = False, kv_dtype: str | None = None,
    ) -> FloorModel:  # fmt: skip
        """Build the model from facts.

        Args:
            target: of the target.
            draft: of the draft; None without a network.
            dtype: ``bfloat16``, ``float16`` or ``float32``.
            variant: catalog entry; needed with a draft.
            token_map: ``variant.token_map``.
            from_config: don't read the draft's tensors; None: read them where there are any.
            packed: linear layers are packed (:func:`graphspec.models.stack.uses_packed_weights`), and hold in 16 bits what a checkpoint
                with tensors has in 16 bits.
            kv_dtype: of the KV pools; None: ``dtype``.

        Raises:
            CheckpointError: tensors that do not fit their config.
        """
        taps = draft.tap_layers if draft is not None else ()
        if packed and has_tensors(target.path):
            model = load_target(target, taps, 1, DTYPES[dtype], torch.device("meta"))
        else:
            model = build_target(target, taps, DTYPES[dtype])
        network = None
        if draft is not None:
            assert variant is not None, "the variant of the draft"
            network = build_draft(draft, model, variant, token_map, from_config)
        return cls.of_networks(target, model, draft, network, dtype, packed=packed, kv_dtype=kv_dtype)

    @classmethod
    def of_networks(
        cls, target: ModelFacts, model: nn.Module, draft: DraftFacts | None, network: nn.Module | None, dtype: str, *, packed: bool = False,
        kv_dtype: str | None = None,
    ) -> FloorModel:  # fmt: skip
        """Build the model from networks, with or without data, whose weights are not packed yet; ``packed``: they will be."""
        itemsize, group = DTYPES[dtype].itemsize, partial(group_parameters, packed=packed)
        passes: tuple[Weights, ...] = ()
        own = None
        if draft is not None and network is not None:
            heads = [f"heads.{head}." for head in range(draft.num_heads)]
            passes = tuple(group(network, itemsize, [name for name in heads if name != head]) for head in heads)
            own = group(network, itemsize, without=model)
        return cls(
            target=target,
            draft=draft if network is not None else None,
            itemsize=itemsize,
            kv_itemsize=DTYPES[kv_dtype or dtype].itemsize,
            target_weights=group(model, itemsize),
            draft_weights=passes,
            draft_own=own,
        )

    def stages(self, shape: CycleShape, batch: int, context: int) -> tuple[StageCost, ...]:
        """Costs of the stages with weights, in order: those of the draft network, if any, and ``verify``.

        Args:
            shape: (S, K, N). A static tree counts K rows for each of its levels.
            batch: B, lanes.
            context: committed tokens of each row.
        """
        found = []
        if self.draft is not None and shape.num_steps:
            found += self._draft_stages(self.draft, shape, batch, context)
        verify, nodes = _Tally(), shape.num_draft_tokens
        columns, layers = self.target.vocab_size, range(self.target.num_layers)
        self._forward("target", verify, self.target, self.target_weights, batch, nodes, nodes, columns, context, layers)
        if self.draft is not None:
            verify.parts["features"] += batch * nodes * self.draft.feature_size * self.itemsize
        return (*found, verify.stage("verify"))

    def working_set(self, shape: CycleShape, batch: int, context: int) -> float:
        """Bytes that a cycle touches, each counted once, as if passes after the first read none: what a cache would have to hold.

        Args:
            shape, batch, context: as for :meth:`stages`.
        """
        own = self.draft_own if shape.num_steps else None
        return self.stages(shape, batch, context)[-1].bytes + (own.size - own.sizes["embedding"] if own is not None else 0)

    def _draft_stages(self, draft: DraftFacts, shape: CycleShape, batch: int, context: int) -> list[StageCost]:
        tallies: dict[str, _Tally] = {}
        for number, run in enumerate(draft.passes(shape)):
            tally = tallies.setdefault(run.stage, _Tally())
            if number == 0:
                tally.parts["features"] += batch * run.rows * draft.feature_size * self.itemsize
            # A prediction head has KV for its own layer only.
            layers = range(run.head, run.head + 1) if draft.num_heads > 1 else range(draft.decoder.num_layers)
            weights, columns = self.draft_weights[run.head], draft.draft_vocab_size
            passed = (weights, batch, run.rows, run.scored, columns, context, layers)
            self._forward("draft", tally, draft.decoder, *passed, fuse=number == 0, head_share=draft.head_share)
        return [tally.stage(name) for name, tally in tallies.items()]

    def _forward(
        self, network: str, tally: _Tally, facts: ModelFacts, weights: Weights, lanes: int, rows: int, scored: int, columns: int,
        context: int, layers: range, *, fuse: bool = False, head_share: float = 1.0,
    ) -> None:  # fmt: skip
        """Add one pass over ``lanes * rows`` tokens; ``lanes * scored`` of them get logits, each from ``head_share`` of the head."""
        tokens, parts, size = lanes * rows, tally.parts, self.itemsize
        tally.forwards.append(Forward(network, tokens, lanes * scored, context, fuse))
        streamed = ("layers", "fuse") if fuse else ("layers",)
        parts["weights"] += sum(weights.sizes[group] for group in streamed) + weights.sizes["head"] * min(1.0, lanes * scored * head_share)
        head = lanes * scored * weights.numbers["head"] * head_share
        tally.flops += 2 * tokens * sum(weights.numbers[group] for group in streamed) + 2 * head
        if facts.experts is not None and weights.numbers["experts"]:
            experts, topk = facts.experts.num_experts, facts.experts.topk
            parts["experts"] += weights.sizes["experts"] * distinct_experts(experts, topk, tokens) / experts
            tally.flops += 2 * tokens * weights.numbers["experts"] * topk / experts
        further = facts.num_layers * facts.layer_inputs.width if facts.layer_inputs is not None else 0
        parts["embedding"] += tokens * (facts.hidden_size + further) * size
        pool_rows = facts.kv_rows
        for layer in layers:
            if not facts.attends(layer):
                continue
            row = math.prod(pool_rows[facts.pool(layer)]) * self.kv_itemsize
            # Operations per query head and committed token: score and weighted sum.
            per_slot = 4 * facts.heads(layer).dim if facts.latent is None else 2 * (facts.latent.row_dim + facts.latent.rank)
            limit = facts.sliding_window[layer]
            seen = context if limit is None else min(context, limit)
            parts["kv"] += row * (lanes * seen + tokens * facts.keeps(layer))
            tally.flops += tokens * seen * facts.num_heads * per_slot
        if facts.recurrent is not None:
            # Verification reads the states, the commit reads and writes them; what nodes record is written and read.
            state, record = facts.recurrent.state_bytes(size), facts.recurrent.record_bytes(size)
            parts["state"] += 3 * lanes * state + 2 * tokens * record
            own = facts.recurrent
            tally.flops += tokens * own.count * own.value_heads * own.key_dim * own.value_dim * own.update_flops
        parts["logits"] += lanes * scored * columns * _LOGIT_BYTES


def kv_bytes_per_token(facts: ModelFacts, itemsize: int) -> int:
    """Bytes all layers keep of one token."""
    return sum(facts.pool_layers(pool) * math.prod(row) for pool, row in enumerate(facts.kv_rows)) * itemsize
