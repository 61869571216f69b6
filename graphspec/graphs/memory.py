"""The memory plan: what an engine will allocate, counted beforehand and compared with the memory of the machine.

Weights are counted on networks built without data, slots by their declarations. Lines marked as estimates are the only estimates.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..config.catalog import load_object
from ..config.paths import user_path
from ..config.schema import Config
from ..errors import ConfigError, spell_bytes
from ..kernels import resolve
from ..kernels.recurrent.state_runs import BLOCK
from ..models.stack import pack_network, round_networks, round_weights, uses_packed_weights
from ..models.target import load_target
from ..models.token_map import apply_token_map, load_token_map
from ..plan.buffers import DTYPES, RECURRENT_SLOTS, declare_slots, plan_sizes
from ..plan.plan import Plan
from ..shapes import GREEDY
from .scratch import kernel_scratch
from .stages.mailbox import MailLayout

GIB = 2**30

GRAPH_RESERVE = 32 * 2**20
"""Bytes set aside for each captured program, apart from its tensors: kernel nodes and their parameters. An estimate: the driver holds them,
and the capture report knows of tensors alone."""
LIBRARY_RESERVE = 512 * 2**20
"""Bytes set aside on a GPU for what libraries allocate for themselves (cuBLAS workspaces, loaded kernels)."""
SMALLEST_CHUNK = 256
"""Tokens of the smallest prefill chunk that may be the largest where memory is short."""
LOGIT_COPIES = 4
"""Float32 tensors of the size of a program's logits that may be alive at once: as given, shaped, noise, probabilities."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One consumer of memory: its name, its bytes, the configuration keys that reduce it, and whether the figure is an estimate."""

    name: str
    size: int
    keys: tuple[str, ...] = ()
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory an engine will use, and its limit.

    Attributes:
        lines: every consumer, KV pools first.
        available: bytes of memory that the machine has.
        fraction: share of them that the engine may use.
        page_bytes: bytes of one page, in target and draft pool together.
        page_size: tokens of one page.
        num_pages: pages of each pool, the dummy page included.
        min_pages: fewest with which a request can run at all, the dummy page included.
        context: tokens that one row may have, and the most that would fit, where not one such row does; None: it fits, or pages are given.
    """

    lines: tuple[MemoryLine, ...]
    available: int
    fraction: float
    page_bytes: int
    page_size: int
    num_pages: int
    min_pages: int
    context: tuple[int, int] | None = None

    @property
    def budget(self) -> int:
        """Bytes the engine may use."""
        return int(self.available * self.fraction)

    @property
    def total(self) -> int:
        """Bytes it will use."""
        return sum(line.size for line in self.lines)

    @property
    def largest_num_pages(self) -> int:
        """Largest value of ``runtime.num_pages`` that fits; below 1 when nothing does."""
        return (self.budget - self.total) // self.page_bytes + self.num_pages - 1

    def check(self) -> None:
        """Check that the plan fits.

        Raises:
            ConfigError: it does not; names the key to lower, the largest value that fits, and every line of the plan.
        """
        if self.total <= self.budget:
            return
        if self.context is not None and self.context[1] > 1:
            planned, longest = self.context
            raise ConfigError("model.max_context", f"at most {longest}, for the KV of one such row to fit", planned, self.text())
        if self.context is None and self.largest_num_pages >= self.min_pages - 1:
            raise ConfigError("runtime.num_pages", f"at most {self.largest_num_pages}", self.num_pages - 1, self.text())
        keys = dict.fromkeys(key for line in self.lines for key in line.keys if key != "runtime.num_pages")
        needed = spell_bytes(self.total - (self.num_pages - self.min_pages) * self.page_bytes)
        found = f"{spell_bytes(self.budget)}; lower {', '.join(keys)}"
        raise ConfigError("memory", f"at least {needed}, even with the fewest pages", found, self.text())

    def text(self) -> str:
        """The plan in one line."""
        parts = ", ".join(f"{line.name} {'~' if line.estimate else ''}{spell_bytes(line.size)}" for line in self.lines)
        room = f"{spell_bytes(self.budget)}, {self.fraction:g} of {spell_bytes(self.available)}"
        return f"{parts}; together {spell_bytes(self.total)} of {room}; a page is {spell_bytes(self.page_bytes)}"


def plan_memory(plan: Plan, config: Config, weights: tuple[int, int] | None = None) -> MemoryPlan:
    """Count the memory that an engine with this plan will use. Reads the shapes in the checkpoints, but none of their data.

    Only position tables are allocated, which even networks without data have. If the tables alone don't fit, the plan lists them instead
    of the weights.

    Args:
        plan: of the engine.
        config: what it was made from.
        weights: bytes of target and draft, where there are no checkpoints to look at.

    Raises:
        CheckpointError: a checkpoint that does not fit its config.
    """
    sizes, dtype = plan_sizes(plan), DTYPES[plan.dtype]
    slots: dict[str, int] = {}
    groups = {"kv": 0, "slots": 0, "sampling": 0, "recurrent": 0}
    recurrent = RECURRENT_SLOTS.values()
    for slot in declare_slots(plan, MailLayout.of(plan).size):
        slots[slot.name] = math.prod(sizes[d] if isinstance(d, str) else d for d in slot.dims) * slot.dtype.itemsize
        group = "kv" if slot.kind == "kv" else "sampling" if slot.group else "recurrent" if slot.name in recurrent else "slots"
        groups[group] += slots[slot.name]
    available, tables = available_bytes(plan.device, config.hardware.memory_gib), _tables(plan)
    if weights is None and tables > int(available * config.runtime.memory_fraction):
        networks = [MemoryLine("position tables, not counted as weights", tables)]
    else:
        target, draft = weights or parameter_bytes(plan, config.variant.token_map)
        networks = [MemoryLine("target weights", target), MemoryLine("draft weights", draft)]
    rows = ("runtime.max_rows", "runtime.buckets", "variant.num_draft_tokens")
    lines = [
        MemoryLine(f"KV pools, {plan.num_pages} pages of {plan.page_size}", groups["kv"], ("runtime.num_pages",)),
        *networks,
        MemoryLine("recurrent states", groups["recurrent"], rows),
        MemoryLine("slots", groups["slots"], (*rows, "model.max_context")),
        MemoryLine("slots of single sampling classes", groups["sampling"], rows),
        MemoryLine("workspace", _workspace(plan, dtype), ("runtime.buckets", "runtime.prefill_chunks", "model.max_context"), estimate=True),
    ]
    lines.append(MemoryLine("scratch of kernels", kernel_scratch(plan), (*rows, "runtime.prefill_chunks")))
    if plan.device == "cuda":
        classes = plan.sampling_classes or (GREEDY,)
        cycles = {key for each in classes for key in plan.graph_keys(each)}
        programs = len(cycles) + len(classes) * len(plan.prefill_shapes) if plan.runtime.captured else 0
        lines.append(
            MemoryLine(
                "graphs and libraries",
                LIBRARY_RESERVE + programs * GRAPH_RESERVE,
                ("runtime.buckets", "runtime.sampling_classes"),
                estimate=True,
            )
        )
    return MemoryPlan(
        lines=tuple(line for line in lines if line.size),
        available=available,
        fraction=config.runtime.memory_fraction,
        page_bytes=groups["kv"] // plan.num_pages,
        page_size=plan.page_size,
        num_pages=plan.num_pages,
        min_pages=plan.pages_for(1 + plan.window_width) + 1,
    )


def fit_memory(plan: Plan, config: Config, weights: tuple[int, int] | None = None) -> tuple[Plan, MemoryPlan]:
    """``plan``, made smaller where memory is short and the configuration leaves that open, and its memory plan.

    Without ``runtime.num_pages`` the pools get the pages that fit, at least those of one row of ``max_context`` tokens; rows share them.
    If those don't fit, or the number is given, the largest prefill chunks go, unless they are given too; chunks of up to
    :data:`SMALLEST_CHUNK` tokens stay. If even that is not enough, ``plan`` is returned unchanged.

    Args:
        plan, config, weights: as for :func:`plan_memory`.

    Raises:
        CheckpointError: a checkpoint that does not fit its config.
    """
    shrinks = config.runtime.num_pages is None
    minimum = plan.table_width + 1 if shrinks else plan.num_pages
    whole = memory = plan_memory(plan, config, weights)
    fitting = plan
    while memory.largest_num_pages + 1 < minimum:
        chunks = fitting.prefill_chunks[:-1]
        if config.runtime.prefill_chunks is not None or fitting.prefill_chunks[-1] <= SMALLEST_CHUNK:
            return plan, replace(whole, context=_contexts(fitting, config, weights)) if shrinks else whole
        fitting = replace(fitting, prefill_chunks=chunks)
        memory = plan_memory(fitting, config, weights)
    if memory.total <= memory.budget:
        return fitting, memory
    fitting = replace(fitting, num_pages=memory.largest_num_pages + 1)
    return fitting, plan_memory(fitting, config, weights)


def _contexts(plan: Plan, config: Config, weights: tuple[int, int] | None) -> tuple[int, int]:
    """``max_context``, and the largest for which a pool of one row fits; 0: none does."""
    ahead = plan.tokens_in_flight

    def fits(width: int) -> bool:
        slots = width * plan.page_size
        short = replace(plan, max_context=slots - ahead, table_width=width, max_positions=slots, num_pages=width + 1)
        found = plan_memory(short, config, (networks + _tables(short), 0))
        return found.total <= found.budget

    # Networks have the same size but for their tables, which are not made here for every length that is tried.
    small = replace(plan, max_positions=plan.page_size)
    networks = sum(parameter_bytes(small, config.variant.token_map)) - _tables(small) if weights is None else sum(weights) - _tables(plan)
    widths = range(plan.pages_for(1 + ahead), plan.table_width)
    count = bisect_left(widths, True, key=lambda width: not fits(width))
    return plan.max_context, widths[count - 1] * plan.page_size - ahead if count else 0


def _tables(plan: Plan) -> int:
    """Bytes of the cosines and sines of every position, in target and draft."""
    models = (plan.target, plan.draft.decoder if plan.draft is not None else None)
    return plan.max_positions * sum(model.rope_columns for model in models if model is not None) * torch.float32.itemsize


def parameter_bytes(plan: Plan, token_map: str | None = None) -> tuple[int, int]:
    """Bytes of the target's parameters and tables, and of the draft's that it does not share with the target, packed where they will be.

    Packed weights that the checkpoint has in more than 16 bits count with 32; where every value fits into 16 they take half of that.
    """
    dtype, nowhere = DTYPES[plan.dtype], torch.device("meta")
    target = load_target(plan.target, plan.tap_layers, plan.max_positions, dtype, nowhere)
    draft: nn.Module | None = None
    if plan.draft is not None:
        draft = load_object(plan.variant.loader)(plan.draft, target, plan.max_positions, dtype, nowhere, None)
        if token_map is not None:
            apply_token_map(draft, load_token_map(user_path("variant.token_map", token_map), plan.target.vocab_size))
    networks = [network for network in (target, draft) if network is not None]
    for network in networks:
        round_weights(network, plan)
    if uses_packed_weights(plan):
        round_networks(target, draft, plan)
        for network in networks:
            pack_network(network, plan)
    held, *others = (_tensors(network) for network in networks)
    return sum(held.values()), sum(size for tensors in others for tensor, size in tensors.items() if tensor not in held)


def _tensors(module: nn.Module) -> dict[torch.Tensor, int]:
    """Every parameter and buffer once, with its bytes. Tensors compare by identity as keys."""
    return {tensor: tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers())}


def _workspace(plan: Plan, dtype: torch.dtype) -> int:
    """Tensors of the widest program that live between its stages' reads and writes: an upper estimate, for one program at a time."""
    lanes, model, wide = max(plan.buckets), plan.target, dtype.itemsize + 4
    tokens = max(lanes * plan.shape.num_draft_tokens, plan.prefill_chunks[-1])
    heads = max((model.num_heads + 2 * count) * width for _, count, width in model.kv_rows)
    mlp = 3 * model.intermediate_size * model.shared_mlp_factor
    if model.experts is not None:
        # The reference may run every expert over every token.
        run = model.experts.topk if plan.kernels == "fused" else model.experts.num_experts
        mlp = max(mlp, run * (3 * model.experts.intermediate_size + model.hidden_size))
    if plan.catches_up:
        tokens = max(tokens, lanes * plan.window_capacity)
    if model.recurrent is not None:
        # Inputs before and after the convolution, its parts in float32, and the pairs of a block of tokens.
        block = max(plan.shape.num_draft_tokens, BLOCK)
        heads = max(heads, 4 * model.recurrent.channels + 4 * model.recurrent.value_heads * block)
    layer = tokens * (3 * model.hidden_size + max(mlp, heads) + plan.feature_width) * wide
    logits = lanes * plan.shape.num_draft_tokens * model.vocab_size * 4 * LOGIT_COPIES
    if resolve("kernels.attention", plan.attention, plan.kernels, plan.device, plan.dtype) != "reference":
        return layer + logits
    # The reference gathers the keys and values of whole page tables, and scores every query against them.
    slots = plan.table_width * plan.page_size
    gathered = lanes * slots * max(count * width for _, count, width in model.kv_rows) * 2 * wide
    scores = 2 * tokens * model.num_heads * slots * 4
    return layer + max(logits, gathered + scores)


def available_bytes(device: str, memory_gib: float | None) -> int:
    """Bytes an engine may count on: ``hardware.memory_gib``, else what is free on the GPU, else what the machine has."""
    if memory_gib is not None:
        return int(memory_gib * GIB)
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        # Memory that torch has reserved and not allocated is free too.
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
