"""Scratch of fused kernels: what their launchers allocate in addition to results. No slot holds it, so the memory plan has a line for it.

The launchers are called on ``meta`` tensors with the shapes of an engine's programs, and their allocations are counted. There is no second
formula to keep in step with them.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..facts.gguf_model import weights_files
from ..facts.quantisation import read_quantisation
from ..plan.plan import Plan

if TYPE_CHECKING:
    from ..facts import ModelFacts

logger = logging.getLogger(__name__)

Call = tuple[Callable[..., int], tuple[Any, ...]]
"""A function of this module that counts the scratch of one launcher call, and its arguments, which are hashable."""


class _Allocations(TorchDispatchMode):
    """Collects every tensor whose memory is allocated inside."""

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
    """Identifies a tensor's memory: equal for all views of it, as long as the reference is held."""
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


def has_codes(folder: Path, layer: str = "layers.0.mlp.up_proj") -> bool:
    """Whether a layer of a checkpoint may have low precision, by its name there; a GGUF file may have any such layer."""
    quantisation = read_quantisation(folder)
    return bool(weights_files(folder)) or (quantisation is not None and quantisation.scheme(layer) is not None)


def kernel_scratch(plan: Plan) -> int:
    """The most scratch that any launcher call in a program of ``plan`` needs, in bytes.

    Only one call's scratch is live at a time: it is freed when the launcher returns, launches of a stream run one after another, and
    captured programs share a pool in which each reuses what the last one freed. The figure assumes the multiprocessors of an H200 (a GPU
    with another number splits attention differently) and the default configuration of every linear layer (a measured one may differ).

    Returns 0, with a warning, if Triton is not installed.
    """
    if plan.kernels != "fused":
        return 0
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: scratch of fused kernels is not in the memory plan")
        return 0
    return max((count(*arguments) for count, arguments in dict.fromkeys(_calls(plan))), default=0)


def _op(name: str, sizes: Mapping[str, int], numerics: str = "fast", **given: Any) -> Call:
    """A call of an op's launcher with these sizes and arguments; see :meth:`graphspec.kernels.op.KernelOp.without_data`."""
    return _op_scratch, (name, tuple(sizes.items()), numerics, tuple(given.items()))


@functools.lru_cache(maxsize=4096)
def _op_scratch(name: str, sizes: tuple[tuple[str, int], ...], numerics: str, given: tuple[tuple[str, Any], ...]) -> int:
    from ..kernels import op_of
    from ..kernels.fused.launch import launcher

    op = op_of(name)
    return scratch_of(launcher(op, numerics), **op.signature.gather(op.without_data(dict(sizes), **dict(given))))


@functools.lru_cache(maxsize=4096)
def _linear(
    rows: int, outputs: int, inputs: int, dtype: str, numerics: str, norm: bool, gated: bool, added: bool, wide: bool, low: bool = False,
    narrow: bool = True,
) -> int:  # fmt: skip
    """``low``: of a weight in low precision, whose numbers are scratch where the library multiplies. As if they were one segment.

    ``narrow``: tiles may be, as of :func:`graphspec.kernels.linear.fused.linear_choice.invariant_config`.
    """
    choice = importlib.import_module("graphspec.kernels.linear.fused.linear_choice")
    config = choice.LinearTable().choose(
        choice.LinearShape(rows, outputs, inputs, dtype, norm, gated, added, False, wide), numerics, narrow
    )
    if config is None:
        return outputs * inputs * getattr(torch, dtype).itemsize if low else 0

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta")

    width = outputs // 2 if gated else outputs
    return scratch_of(
        importlib.import_module("graphspec.kernels.linear.fused.linear").linear, empty(1, rows, inputs), empty(outputs, inputs),
        norm_weight=empty(inputs) if norm else None, residual=empty(1, rows, width) if added else None,
        gated=gated, float32=wide, config=config.encoded(),
    )  # fmt: skip


def _network(plan: Plan, model: ModelFacts, rows: int) -> Iterator[Call]:
    """Products and experts of one pass over ``rows`` tokens, without the output layer."""
    kind, hidden, latent = (plan.dtype, plan.numerics_of(model)), model.hidden_size, model.latent
    # Norms after attention and MLP, a multiplier, and a sum of two nets stand between a product and the residual.
    added = model.family.norms == "before" and not model.family.side_by_side and model.multipliers.residual == 1
    normed = added and model.family.norm != "float32"
    low, widths = has_codes(model.path), {model.mlp_size(layer) for layer in range(model.num_layers)}
    if model.experts is not None:
        widths.add(model.experts.shared_size)
        experts, width, of = model.experts.num_experts, model.experts.intermediate_size, getattr(torch, plan.dtype)
        stream = model.experts.latent_size or hidden
        sizes = {"T": rows, "K": model.experts.topk, "E": experts, "H": stream, "F": width}
        entering = width if model.family.activation == "relu2" else 2 * width
        yield _op("moe_mlp", sizes, x_TH=of, gate_up_EFH=(of, experts, entering, stream), down_EHF=of)
        if stream != hidden:
            yield _linear, (rows, stream, hidden, *kind, False, False, False, False, low)
            yield _linear, (rows, hidden, stream, *kind, False, False, False, False, low)
    for width in widths - {0}:
        yield _linear, (rows, 2 * width, hidden, *kind, normed, True, False, False, low)
        yield _linear, (rows, hidden, width, *kind, False, False, added, False, low)
    if latent is not None:
        query = model.num_heads * (latent.nope_dim + latent.rope_dim)
        yield _linear, (rows, query, latent.query_rank or hidden, *kind, True, False, False, False, low)
        yield _linear, (rows, hidden, model.num_heads * latent.value_dim, *kind, False, False, added, False, low)
        return
    for layer in range(model.num_layers) if model.layer_heads else (0,):
        heads = model.heads(layer)
        query, parts = model.num_heads * heads.dim, 1 if heads.keys_are_values else 2 if model.keeps(layer) or not model.layer_heads else 0
        entering = (2 if model.family.attention_gate else 1) * query + parts * heads.count * heads.dim
        yield _linear, (rows, entering, hidden, *kind, normed, False, False, False, low, False)
        yield _linear, (rows, hidden, query, *kind, False, False, added, False, low)
    if model.layer_inputs is not None:
        width = model.layer_inputs.width
        for outputs, inputs in ((model.num_layers * width, hidden), (width, hidden), (hidden, width)):
            yield _linear, (rows, outputs, inputs, *kind, False, False, False, False, low)


def _decode(plan: Plan, model: ModelFacts, lanes: int, tokens: int) -> Iterator[Call]:
    """A pass of a network over ``tokens`` of each lane, over the keys and values of its row."""
    yield from _network(plan, model, lanes * tokens)
    of, page = getattr(torch, plan.dtype), plan.page_size
    sizes = {"B": lanes, "T": tokens, "Q": model.num_heads, "P": plan.table_width, "X": plan.num_words}
    if model.latent is not None:
        sizes |= {"L": model.latent.rank, "R": model.latent.rope_dim}
        pool = (of, 1, 1, 1, page, 1, model.latent.row_dim)
        yield _op("latent_attention", sizes, query_latent_BTQL=of, query_rope_BTQR=of, latent_pool=pool, layer=0, scale=1.0)
        return
    for heads in model.pool_heads:
        yield _op(
            "tree_attention", sizes | {"D": heads.dim}, plan.numerics_of(model),
            query_BTQD=of, kv_pool=(of, 1, 2, 1, page, heads.count, heads.dim), layer=0, scale=1.0,
        )  # fmt: skip


def _calls(plan: Plan) -> Iterator[Call]:
    """Every launcher call with scratch, of all programs and sampling classes; calls may repeat."""
    target, vocab = plan.target, plan.target.vocab_size
    head = (vocab, target.hidden_size, plan.dtype, plan.numerics, True, False, False, True, has_codes(target.path, "lm_head"))
    for lanes in plan.buckets:
        for shape in plan.shapes:
            nodes = shape.num_draft_tokens
            yield from _decode(plan, target, lanes, nodes)
            yield _linear, (lanes * nodes, *head)
            yield _op("sample_tokens", {"B": lanes, "T": nodes, "V": vocab}, strict=True)
            yield _op("filter_logits", {"B": lanes, "T": nodes, "V": vocab})
            if target.vocabulary.sharded:
                yield _op("shard_topk", {"B": lanes, "T": nodes, "Vr": target.vocabulary.vocabulary_shard(vocab).size}, topk=1)
            if plan.draft is not None and shape.num_steps:
                model, known = plan.draft.decoder, plan.draft.draft_vocab_size
                # The first pass reads the widest window, whatever the depth.
                passes = {run.rows for run in (plan.draft.passes(plan.shape)[0], *plan.draft.passes(shape))}
                for tokens in passes:
                    yield from _decode(plan, model, lanes, tokens)
                    yield _linear, (lanes * tokens, model.hidden_size, plan.feature_width or model.hidden_size, plan.dtype, "fast",
                                      False, False, False, False, has_codes(model.path, "fc"))  # fmt: skip
                for rows in {run.scored for run in plan.draft.passes(shape)}:
                    yield _linear, (lanes * rows, known, model.hidden_size, plan.dtype, "fast", False, False, False, True,
                                      has_codes(model.path, "lm_head"))  # fmt: skip
                    yield _op("filter_logits", {"B": lanes, "T": rows, "V": known})
                    yield _op("draft_topk", {"B": lanes, "T": rows, "Vd": known}, topk=shape.topk)
            if plan.keeps_history and shape.num_steps:
                sizes = {"B": lanes, "R": lanes + 1, "L": plan.max_positions, "M": shape.topk * shape.num_steps}
                yield _op("ngram_match", sizes, num_paths=shape.topk, depth=shape.num_steps, min_match=1, max_match=2)
        if plan.catches_up and plan.draft is not None:
            yield from _decode(plan, plan.draft.decoder, lanes, plan.window_capacity)
    for lanes, chunk in plan.prefill_shapes:
        yield from _network(plan, target, lanes * chunk)
        if plan.draft is not None and plan.draft_reads_tokens:
            yield from _network(plan, plan.draft.decoder, lanes * (chunk + plan.lookback))
        yield _op("sample_tokens", {"B": lanes, "T": 1, "V": vocab}, strict=True)
