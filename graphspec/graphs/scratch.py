"""Scratch of fused kernels: what their launchers allocate in addition to results. It is in no slot, so the memory plan has a line for it.

Counted by the launchers themselves, called on ``meta`` tensors in the shapes that an engine's programs have. So a launcher that changes
what it allocates changes the plan, and there is no second formula to keep.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..plan import Plan

if TYPE_CHECKING:
    from ..facts import ModelFacts

logger = logging.getLogger(__name__)

Call = tuple[Callable[..., int], tuple[Any, ...]]
"""A function here that counts one call of one launcher, and its arguments."""


class _Allocations(TorchDispatchMode):
    """Keeps every tensor whose memory was allocated inside."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = {_place(tensor) for tensor in known}
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            place = _place(tensor)
            if place not in self.seen:
                self.seen.add(place)
                self.made.append(tensor)
        return result


def _place(tensor: Tensor) -> StorageWeakRef:
    """The memory of a tensor, equal for all its views while it is held."""
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def scratch_of(launcher: Callable[..., Any], *arguments: Any, **named: Any) -> int:
    """Bytes that a call of ``launcher`` on ``meta`` tensors allocates, without its results. Launches nothing."""
    from ..kernels.fused.launch import recording, semaphores

    shared = semaphores(torch.device("meta"), 0)
    with recording(), _Allocations([shared, *_tensors(arguments, named)]) as found:
        result = launcher(*arguments, **named)
    kept = {_place(tensor) for tensor in _tensors(result)}
    return sum(tensor.untyped_storage().nbytes() for tensor in found.made if _place(tensor) not in kept)


def kernel_scratch(plan: Plan) -> int:
    """Most bytes of scratch that are live at once in any program of ``plan``: those of one launcher.

    A launcher's scratch is free when it returns, and launches of one stream follow each other. Captured programs share one pool, in which
    each finds the memory that the last one freed, so nothing adds up. A GPU with another number of multiprocessors than an H200 cuts
    attention into more or fewer parts, and linear layers that were measured may be cut otherwise than is counted here.

    Without Triton nothing can be counted, and a warning says so.
    """
    if plan.kernels != "fused":
        return 0
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: scratch of fused kernels is not in the memory plan")
        return 0
    return max((_count(*call) for call in dict.fromkeys(_calls(plan))), default=0)


@functools.lru_cache(maxsize=4096)
def _count(call: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    return call(*arguments)


def _scratch(name: str, sizes: Mapping[str, int], **given: Any) -> int:
    """Of a call of an op's launcher in these sizes; see :meth:`graphspec.kernels.op.KernelOp.without_data`."""
    from ..kernels import OPS
    from ..kernels.fused.launch import launcher

    op = next(op for op in OPS if op.name == name)
    return scratch_of(launcher(op), **op.signature.gather(op.without_data(sizes, **given)))


def _linear(rows: int, outputs: int, inputs: int, dtype: str, numerics: str, norm: bool, gated: bool, added: bool, wide: bool) -> int:
    choice = importlib.import_module("graphspec.kernels.fused.linear_choice")
    config = choice.LinearTable().choose(choice.LinearShape(rows, outputs, inputs, dtype, norm, gated, added, False, wide), numerics)
    if config is None:
        return 0

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta")

    width = outputs // 2 if gated else outputs
    return scratch_of(
        importlib.import_module("graphspec.kernels.fused.linear").linear, empty(1, rows, inputs), empty(outputs, inputs),
        norm_weight=empty(inputs) if norm else None, residual=empty(1, rows, width) if added else None,
        gated=gated, float32=wide, config=config.encoded(),
    )  # fmt: skip


def _attention(lanes: int, tokens: int, heads: int, groups: int, dim: int, page: int, columns: int, words: int, dtype: str) -> int:
    of, sizes = getattr(torch, dtype), {"B": lanes, "T": tokens, "Q": heads, "D": dim, "P": columns, "X": words}
    return _scratch("tree_attention", sizes, query_BTQD=of, kv_pool=(of, 1, 2, 1, page, groups, dim), layer=0, scale=1.0)


def _latent(lanes: int, tokens: int, heads: int, rank: int, rope: int, page: int, columns: int, words: int, dtype: str) -> int:
    of, sizes = getattr(torch, dtype), {"B": lanes, "T": tokens, "Q": heads, "L": rank, "R": rope, "P": columns, "X": words}
    pool = (of, 1, 1, 1, page, 1, rank + rope)
    return _scratch("latent_attention", sizes, query_latent_BTQL=of, query_rope_BTQR=of, latent_pool=pool, layer=0, scale=1.0)


def _sample(lanes: int, rows: int, vocab: int) -> int:
    return _scratch("sample_tokens", {"B": lanes, "T": rows, "V": vocab}, strict=True)


def _filter(lanes: int, rows: int, vocab: int) -> int:
    return _scratch("filter_logits", {"B": lanes, "T": rows, "V": vocab})


def _topk(lanes: int, rows: int, vocab: int, topk: int) -> int:
    return _scratch("draft_topk", {"B": lanes, "T": rows, "Vd": vocab}, topk=topk)


def _experts(tokens: int, experts: int, topk: int, hidden: int, width: int, dtype: str) -> int:
    of, sizes = getattr(torch, dtype), {"T": tokens, "K": topk, "E": experts, "H": hidden, "F": width}
    return _scratch("moe_mlp", sizes, x_TH=of, gate_up_EFH=(of, experts, 2 * width, hidden), down_EHF=of)


def _history(lanes: int, width: int, paths: int, depth: int) -> int:
    sizes = {"B": lanes, "R": lanes + 1, "L": width, "M": paths * depth}
    return _scratch("ngram_match", sizes, num_paths=paths, depth=depth, min_match=1, max_match=2)


def _network(plan: Plan, model: ModelFacts, rows: int) -> Iterator[Call]:
    """Products and experts of one pass over ``rows`` tokens, without the output layer."""
    kind, hidden, latent = (plan.dtype, plan.numerics), model.hidden_size, model.latent
    # Norms after attention and MLP, and a multiplier, stand between a product and the residual.
    added = not model.family.norm_after and model.multipliers.residual == 1
    normed = added and model.family.norm != "float32"
    widths = {model.intermediate_size}
    if model.experts is not None:
        widths.add(model.experts.shared_size)
        yield _experts, (rows, model.experts.num_experts, model.experts.topk, hidden, model.experts.intermediate_size, plan.dtype)
    for width in widths - {0}:
        yield _linear, (rows, 2 * width, hidden, *kind, normed, True, False, False)
        yield _linear, (rows, hidden, width, *kind, False, False, added, False)
    if latent is not None:
        query = model.num_heads * (latent.nope_dim + latent.rope_dim)
        yield _linear, (rows, query, latent.query_rank or hidden, *kind, True, False, False, False)
        yield _linear, (rows, hidden, model.num_heads * latent.value_dim, *kind, False, False, added, False)
        return
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield _linear, (rows, (2 if model.family.attention_gate else 1) * query + 2 * key, hidden, *kind, normed, False, False, False)
    yield _linear, (rows, hidden, query, *kind, False, False, added, False)


def _decode(plan: Plan, model: ModelFacts, lanes: int, tokens: int) -> Iterator[Call]:
    """A pass of a network over ``tokens`` of each lane, over the keys and values of its row."""
    yield from _network(plan, model, lanes * tokens)
    places = (plan.page_size, plan.table_width, plan.num_words, plan.dtype)
    if model.latent is not None:
        yield _latent, (lanes, tokens, model.num_heads, model.latent.rank, model.latent.rope_dim, *places)
    else:
        yield _attention, (lanes, tokens, model.num_heads, model.num_kv_heads, model.head_dim, *places)


def _calls(plan: Plan) -> Iterator[Call]:
    """Every call with scratch that some program makes, in any sampling class; a call may come more than once."""
    target, vocab = plan.target, plan.target.vocab_size
    head = (vocab, target.hidden_size, plan.dtype, plan.numerics, True, False, False, True)
    for lanes in plan.buckets:
        for shape in plan.shapes:
            nodes = shape.num_draft_tokens
            yield from _decode(plan, target, lanes, nodes)
            yield _linear, (lanes * nodes, *head)
            yield _sample, (lanes, nodes, vocab)
            yield _filter, (lanes, nodes, vocab)
            if plan.draft is not None and shape.num_steps:
                model, known = plan.draft.decoder, plan.draft.draft_vocab_size
                # The first pass reads the widest window, whatever the depth.
                passes = {run.rows for run in (plan.draft.passes(plan.shape)[0], *plan.draft.passes(shape))}
                for tokens in passes:
                    yield from _decode(plan, model, lanes, tokens)
                    yield _linear, (lanes * tokens, model.hidden_size, plan.feature_width or model.hidden_size, plan.dtype, plan.numerics,
                                      False, False, False, False)  # fmt: skip
                for rows in {run.scored for run in plan.draft.passes(shape)}:
                    yield _linear, (lanes * rows, known, model.hidden_size, plan.dtype, plan.numerics, False, False, False, True)
                    yield _filter, (lanes, rows, known)
                    yield _topk, (lanes, rows, known, shape.topk)
            if plan.keeps_history and shape.num_steps:
                yield _history, (lanes, plan.max_positions, shape.topk, shape.num_steps)
        if plan.catches_up and plan.draft is not None:
            yield from _decode(plan, plan.draft.decoder, lanes, plan.window_capacity)
    for lanes, chunk in plan.prefill_shapes:
        yield from _network(plan, target, lanes * chunk)
        if plan.draft is not None:
            yield from _network(plan, plan.draft.decoder, lanes * (chunk + plan.lookback))
        yield _sample, (lanes, 1, vocab)
