"""Static buffers: every tensor a cycle touches is a declared slot, allocated once and never moved.

Letters are those of :mod:`graphspec.shapes`; ``1``-suffixed slots are scalars, ``Z`` is the ring depth, ``J`` the words of a ring lane,
``E`` the stop ids a row may have, ``I`` the tokens it may bias, ``O`` the alternatives reported with a log-probability, ``U`` the 64-bit
words that hold a bit for every token, ``Vw`` the 32-bit ones, ``Bw`` the bad words a row may have and ``Bt`` their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import CaptureError
from ..shapes import MASK_BITS, MAX_WINDOW, WORD_BITS, CycleShape, SamplingClass
from .plan import Plan

if TYPE_CHECKING:
    from ..facts import ModelFacts, RecurrentFacts
    from ..facts.recurrent import StateSlot

Group = TypeVar("Group", bound=NamedTuple)
Kind = Literal["mail", "state", "lane", "ring", "kv"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


RING_FIELDS = 2
"""Words of a ring entry's lane before its A tokens: how many of them are new, and the row's status."""


class Status:
    """Values of ``status_R``."""

    FREE = 0
    LIVE = 1
    STOPPED = 2
    """A stop id was emitted."""
    LENGTH = 3
    """The budget is used up."""
    FAILED = 4
    """The target's logits were not finite."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One static buffer.

    Attributes:
        name: with its dimension suffix.
        dims: letters resolved by the plan, or plain numbers.
        dtype: element type.
        kind: ``mail`` comes from the host, ``state`` persists per row, ``lane`` lives for one cycle, ``ring`` is what the host
            reads, ``kv`` is a pool.
        fill: value at start; also what padding holds.
        group: field of :class:`~graphspec.shapes.SamplingClass` whose programs need the slot; empty: all do.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype
    kind: Kind
    fill: float = 0
    group: str = ""


def plan_sizes(plan: Plan) -> dict[str, int]:
    """Size of each letter at the largest bucket. ``R`` includes the dummy row."""
    return {
        "B": max(plan.buckets),
        "R": plan.max_rows + 1,
        "A": plan.accept_width,
        "Ac": plan.window_capacity,
        "X": plan.num_words,
        "F": plan.feature_width,
        "V": plan.target.vocab_size,
        "Vr": plan.target.vocabulary.vocabulary_shard(plan.target.vocab_size).size,
        "P": plan.table_width,
        "E": plan.max_stop_ids,
        "I": plan.max_logit_bias,
        "O": plan.max_logprobs,
        "U": math.ceil(plan.target.vocab_size / WORD_BITS),
        "Vw": math.ceil(plan.target.vocab_size / MASK_BITS),
        "Bw": plan.max_bad_words,
        "Bt": plan.max_bad_word_tokens,
        "C": plan.prefill_chunks[-1],
        **_cycle_sizes(plan.shape),
        "Z": plan.ring_depth,
        "Y": plan.lookback,
        "L": plan.max_positions,
        "H": plan.draft.decoder.hidden_size if plan.draft else 0,
    }


def _cycle_sizes(shape: CycleShape) -> dict[str, int]:
    """Letters that cycles of one engine may differ in."""
    return {"N": shape.num_draft_tokens, "M": max(shape.num_candidates, 1), "S": shape.num_steps, "K": shape.topk}


def declare_slots(plan: Plan, mail_size: int) -> tuple[Slot, ...]:
    """Every buffer of an engine with this plan, KV pools included."""
    dtype = DTYPES[plan.dtype]
    i64, i32, f32 = torch.int64, torch.int32, torch.float32
    slots = [
        Slot("mail", (mail_size,), i64, "mail"),
        Slot("lane_row_B", ("B",), i64, "lane", plan.max_rows),
        Slot("lane_table_BP", ("B", "P"), i32, "lane"),
        Slot("lane_seed_B", ("B",), i64, "lane"),
        Slot("lane_temperature_B", ("B",), f32, "lane"),
        Slot("seq_len_R", ("R",), i64, "state"),
        Slot("status_R", ("R",), i64, "state", Status.FREE),
        Slot("budget_R", ("R",), i64, "state"),
        Slot("seed_R", ("R",), i64, "state"),
        Slot("temperature_R", ("R",), f32, "state"),
        Slot("stop_id_RE", ("R", "E"), i64, "state", -1),
        Slot("draft_len_R", ("R",), i64, "state"),
        Slot("page_table_RP", ("R", "P"), i32, "state"),
        Slot("window_token_RAc", ("R", "Ac"), i64, "state"),
        Slot("window_len_R", ("R",), i64, "state"),
        Slot("node_token_BN", ("B", "N"), i64, "lane", -1),
        Slot("node_parent_BN", ("B", "N"), i64, "lane", -1),
        Slot("node_depth_BN", ("B", "N"), i64, "lane"),
        Slot("node_ancestors_BNX", ("B", "N", "X"), i64, "lane"),
        Slot("logits_BNV", ("B", "N", "V"), f32, "lane"),
        Slot("sample_BN", ("B", "N"), i64, "lane"),
        Slot("path_BA", ("B", "A"), i64, "lane"),
        Slot("accept_len_B", ("B",), i64, "lane"),
        Slot("outcome_B", ("B",), i64, "lane", Status.FREE),
        Slot("cycle_1", (1,), i64, "state"),
        Slot("ring_ZBJ", ("Z", "B", plan.accept_width + RING_FIELDS), i64, "ring", -1),
        *_pools("target_kv", plan, plan.target),
    ]
    if plan.target.vocabulary.sharded:
        slots.append(Slot("logits_BNVr", ("B", "N", "Vr"), f32, "lane"))
    if plan.target.recurrent is not None:
        slots += _recurrent_slots(plan.target.recurrent, dtype)
    if plan.feature_width:
        slots += [Slot("window_feature_RAcF", ("R", "Ac", "F"), dtype, "state"), Slot("feature_BNF", ("B", "N", "F"), dtype, "lane")]
    if plan.keeps_page_features:
        # One row per page, of its last token; laid out like the pools, whose pages it belongs to.
        slots.append(Slot("page_feature", (1, 1, plan.num_pages, 1, 1, "F"), dtype, "kv"))
    if plan.lookback:
        slots += [Slot("lookback_token_RY", ("R", "Y"), i64, "state", -1), Slot("lookback_feature_RYF", ("R", "Y", "F"), dtype, "state")]
    if plan.keeps_history:
        slots.append(Slot("history_RL", ("R", "L"), i64, "state", -1))
    if plan.shape.num_steps:
        slots += [
            Slot("candidate_score_BM", ("B", "M"), f32, "lane"),
            Slot("candidate_token_BM", ("B", "M"), i64, "lane", -1),
            Slot("candidate_parent_BM", ("B", "M"), i64, "lane", -1),
        ]
    if plan.draft:
        draft = plan.draft.decoder
        slots += [
            *([Slot("draft_hidden_BH", ("B", "H"), dtype, "lane")] if plan.feature_width else []),
            # The first slot a drafter may see, the same for all; a constant tensor, so that no pass has to make one.
            Slot("draft_begin_1", (1,), i64, "state", plan.variant.shift),
            *(_pools("draft_kv", plan, draft) if plan.draft_reads_tokens else []),
        ]
        if plan.shape.pool == "beams":
            slots += _beam_slots()
    return (*slots, *_sampling_slots(plan))


RECURRENT_SLOTS = {"matrix": "matrix_RUHKV", "convolution": "column_RUOE", "inputs": "record_input_UBNE", "gates": "record_gate_UBNG"}
"""By kind, as the facts declare them."""


def _recurrent_slots(facts: RecurrentFacts, dtype: torch.dtype) -> list[Slot]:
    """The states of every row, and what the nodes of a cycle leave for its commit."""

    def slot(one: StateSlot, kind: Kind, *dims: str | int) -> Slot:
        return Slot(RECURRENT_SLOTS[one.kind], (*dims, *one.shape), torch.float32 if one.float32 else dtype, kind)

    states = [slot(one, "state", "R", facts.count) for one in facts.states]
    return [*states, *(slot(one, "lane", facts.count, "B", "N") for one in facts.records)]


def _beam_slots() -> list[Slot]:
    """The beams of one draft step; see :mod:`graphspec.kernels.tree.draft_level`."""
    i64 = torch.int64
    return [
        Slot("beam_token_BK", ("B", "K"), i64, "lane", -1),
        Slot("beam_index_BK", ("B", "K"), i64, "lane"),
        Slot("beam_source_BK", ("B", "K"), i64, "lane"),
        Slot("beam_path_BKS", ("B", "K", "S"), i64, "lane", -1),
        Slot("beam_ancestors_BKX", ("B", "K", "X"), i64, "lane"),
        Slot("beam_valid_BK", ("B", "K"), torch.bool, "lane"),
        Slot("beam_slot_BK", ("B", "K"), i64, "lane"),
        Slot("beam_position_BK", ("B", "K"), i64, "lane"),
        Slot("beam_end_B", ("B",), i64, "lane"),
        Slot("next_position_B", ("B",), i64, "lane"),
    ]


def _sampling_slots(plan: Plan) -> list[Slot]:
    """What only some sampling classes need."""
    i64, f32 = torch.int64, torch.float32
    slots = [
        Slot("top_k_R", ("R",), i64, "state", 0, "truncate"),
        Slot("top_p_R", ("R",), f32, "state", 1, "truncate"),
        Slot("min_p_R", ("R",), f32, "state", 0, "truncate"),
        Slot("repetition_R", ("R",), f32, "state", 1, "penalties"),
        Slot("presence_R", ("R",), f32, "state", 0, "penalties"),
        Slot("frequency_R", ("R",), f32, "state", 0, "penalties"),
        Slot("output_count_RV", ("R", "V"), torch.int32, "state", 0, "penalties"),
        Slot("prompt_seen_RV", ("R", "V"), torch.int8, "state", 0, "penalties"),
        Slot("bias_id_RI", ("R", "I"), i64, "state", -1, "bias"),
        Slot("bias_value_RI", ("R", "I"), f32, "state", 0, "bias"),
        Slot("stop_from_R", ("R",), i64, "state", 0, "bias"),
        Slot("ring_logprob_ZBA", ("Z", "B", "A"), f32, "ring", 0, "logprobs"),
        Slot("ring_top_logprob_ZBAO", ("Z", "B", "A", "O"), f32, "ring", 0, "logprobs"),
        Slot("ring_top_token_ZBAO", ("Z", "B", "A", "O"), i64, "ring", -1, "logprobs"),
        Slot("allowed_RU", ("R", "U"), i64, "state", -1, "allowed"),
        Slot("bad_word_RBwBt", ("R", "Bw", "Bt"), i64, "state", -1, "bad_words"),
        Slot("recent_token_RBt", ("R", "Bt"), i64, "state", -1, "bad_words"),
        Slot("following_token_R", ("R",), i64, "state", -1, "prompt_logprobs"),
        # Filled by the host between two segments of a program; every bit set where a lane has no grammar.
        Slot("token_mask_BNVw", ("B", "N", "Vw"), torch.int32, "lane", -1, "grammar"),
        *([Slot("forced_token_BS", ("B", "S"), i64, "lane", -1, "grammar")] if plan.shape.num_steps else []),
        Slot("ring_prompt_logprob_ZC", ("Z", "C"), f32, "ring", 0, "prompt_logprobs"),
        Slot("ring_prompt_top_logprob_ZCO", ("Z", "C", "O"), f32, "ring", 0, "prompt_logprobs"),
        Slot("ring_prompt_top_token_ZCO", ("Z", "C", "O"), i64, "ring", -1, "prompt_logprobs"),
    ]
    if plan.accept.sampled_drafts:
        slots.append(Slot("draft_prob_BSV", ("B", "S", "V"), f32, "lane", 0, "noise"))
    return slots


def slot_groups(sampling: SamplingClass) -> frozenset[str]:
    """Groups of slots that programs of this class need, in addition to those without a group."""
    on = {name: getattr(sampling, name) for name in sampling.__slots__} | {"logprobs": sampling.logprobs >= 0}
    return frozenset(name for name, needed in on.items() if needed)


def pool_names(name: str, model: ModelFacts) -> tuple[str, ...]:
    """Slots of a network's KV pools, one for each shape of heads: ``target_kv``, ``target_kv_2``, and so on."""
    return (name, *(f"{name}_{number}" for number in range(2, len(model.kv_rows) + 1)))


def draft_pools(plan: Plan) -> tuple[str, ...]:
    """Slots of the KV pools that the draft network attends over, one for each shape of heads in its layers: its own, or the target's."""
    if plan.draft is None:
        return ()
    decoder = plan.draft.decoder
    if plan.draft_reads_tokens:
        return pool_names("draft_kv", decoder)
    names = pool_names("target_kv", plan.target)
    read = {decoder.pool(layer): names[plan.target.pool(source)] for layer, source in enumerate(plan.draft.target_layers)}
    return tuple(read[pool] for pool in range(len(read)))


def own_draft_pools(plan: Plan) -> tuple[str, ...]:
    """Those of them that the draft network writes."""
    return draft_pools(plan) if plan.draft_reads_tokens else ()


def _pools(name: str, plan: Plan, model: ModelFacts) -> list[Slot]:
    """One pool for each shape of heads. All have as many pages: a page id means the same tokens in each."""

    def slot(own: str, layers: int, sides: int, heads: int, width: int) -> Slot:
        return Slot(own, (layers, sides, plan.num_pages, plan.page_size, heads, width), DTYPES[plan.kv_dtype], "kv")

    names = enumerate(zip(pool_names(name, model), model.kv_rows, strict=True))
    return [slot(own, model.pool_layers(pool), *row) for pool, (own, row) in names]


class Views:
    """The slots as one bucket sees them: attributes named like the slots, lane dimensions cut to the bucket."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names: tuple[str, ...] = ()
        self.add(tensors)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """More slots of the same bucket."""
        self.names += tuple(tensors)
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"no slot named {name!r} in this plan")

    def several(self, names: Iterable[str]) -> tuple[Tensor, ...]:
        """The slots of these names."""
        return tuple([getattr(self, name) for name in names])

    def take(self, group: type[Group]) -> Group:
        """Slots that ops take together (:mod:`graphspec.kernels.groups`)."""
        return group._make(getattr(self, name) for name in group._fields)


class Arena:
    """Owner of all slots: allocated once at the largest bucket, sliced per bucket, at addresses that never change.

    Slots that belong to a group are allocated when :meth:`allocate` is first asked for the group; ``slots`` lists what is allocated.

    Args:
        plan: the sizes.
        mail_size: words of the mailbox.
        device: where; default the plan's. Under a fake-tensor mode this may be a device the machine lacks.
    """

    def __init__(self, plan: Plan, mail_size: int, device: torch.device | str | None = None) -> None:
        self.sizes = plan_sizes(plan)
        self.declared = declare_slots(plan, mail_size)
        self.slots: tuple[Slot, ...] = ()
        self.device = torch.device(device or plan.device)
        self._tensors: dict[str, Tensor] = {}
        self._addresses: dict[str, int] = {}
        self._views: dict[tuple[int, CycleShape], Views] = {}
        self._widest = plan.shape
        self._allocate({""})

    def allocate(self, sampling: SamplingClass) -> None:
        """Allocate what programs of this class need and is not there yet; what is there stays where it is."""
        self._allocate(slot_groups(sampling))

    def _allocate(self, groups: AbstractSet[str]) -> None:
        fresh = tuple(s for s in self.declared if s.group in groups and s.name not in self._tensors)
        for slot in fresh:
            tensor = torch.full(self.shape(slot), slot.fill, dtype=slot.dtype, device=self.device)
            self._tensors[slot.name] = tensor
            # Fake and meta tensors have no address.
            if type(tensor) is Tensor and tensor.device.type != "meta":
                self._addresses[slot.name] = tensor.data_ptr()
        self.slots += fresh
        for (bucket, cycle), views in self._views.items():
            views.add({slot.name: self._cut(slot, bucket, cycle) for slot in fresh})

    def _cut(self, slot: Slot, bucket: int, cycle: CycleShape) -> Tensor:
        """The slot at the size of one bucket and cycle. A lane slot is the front of its memory, contiguous at any size."""
        tensor = self._tensors[slot.name]
        if slot.kind != "lane":
            return tensor.narrow(slot.dims.index("B"), 0, bucket) if "B" in slot.dims and bucket < self.sizes["B"] else tensor
        cut = {**self.sizes, **_cycle_sizes(cycle), "B": bucket}
        size = [cut[d] if isinstance(d, str) else d for d in slot.dims]
        return tensor.view(-1)[: math.prod(size)].view(size)

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Allocated shape of a slot."""
        return tuple(self.sizes[d] if isinstance(d, str) else d for d in slot.dims)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def views(self, bucket: int, cycle: CycleShape | None = None) -> Views:
        """Slots cut to ``bucket`` lanes of a cycle, default the widest; the same object for every call with the same two."""
        key = (bucket, cycle or self._widest)
        if key not in self._views:
            self._views[key] = Views({slot.name: self._cut(slot, *key) for slot in self.slots})
        return self._views[key]

    def check_addresses(self) -> None:
        """Raise when a slot moved or changed its shape or dtype: a captured program would read the old memory.

        Raises:
            CaptureError: names the slot, what it was and what it is.
        """
        for slot in self.slots:
            tensor, address = self._tensors[slot.name], self._addresses.get(slot.name)
            if address is None:
                continue
            if tensor.data_ptr() != address:
                raise CaptureError(slot.name, f"address {address:#x}", f"{tensor.data_ptr():#x}")
            if (tensor.dtype, tuple(tensor.shape)) != (slot.dtype, self.shape(slot)):
                raise CaptureError(slot.name, f"{slot.dtype} {list(self.shape(slot))}", f"{tensor.dtype} {list(tensor.shape)}")

    def poison(self, kinds: tuple[Kind, ...] = ("lane",)) -> None:
        """Fill slots of these kinds with NaN and, for integers, a value no index survives: what a cycle reads it must have written."""
        for slot in self.slots:
            if slot.kind in kinds:
                tensor = self._tensors[slot.name]
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                else:
                    tensor.fill_(True if tensor.dtype == torch.bool else max(POISON, torch.iinfo(tensor.dtype).min))

    def snapshot(self, kinds: tuple[Kind, ...] = ("state", "lane", "ring", "kv")) -> dict[str, Tensor]:
        """Copies of the slots of these kinds, by name."""
        return {s.name: self._tensors[s.name].clone() for s in self.slots if s.kind in kinds}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Write a snapshot back in place."""
        for name, tensor in snapshot.items():
            self._tensors[name].copy_(tensor)

    def describe(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """``(name, shape, dtype, bytes)`` of every slot."""
        return [
            (s.name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.numel() * t.element_size())
            for s in self.slots
            for t in (self._tensors[s.name],)
        ]


POISON = -(2**40) - MAX_WINDOW
