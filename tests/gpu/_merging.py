"""Calls in which the last program to arrive merges what the others left, in the shapes of Llama-3.1-8B and of DeepSeek's models.

The ops' own cases are small: they have one part nearly everywhere, so that repeating them merges nothing. What a call launches is known
without a GPU, so the default tests hold these calls to merging (``tests/kernels/fused/test_merging.py``), and those on a GPU repeat them
(``test_fused_again.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from graphspec.kernels import OPS
from graphspec.kernels.fused.launch import Launch
from graphspec.kernels.groups import Candidates, Heads
from graphspec.kernels.linear.fused.linear import fused_linear
from graphspec.kernels.linear.fused.linear_kv_write import fused_linear_kv_write

Case = dict[str, Any]
VOCAB, DRAFT_VOCAB, CONTEXT, PAGE = 128256, 32000, 4096, 16
GIB = 1 << 30
MAX_BYTES = 2 * GIB
"""Of all calls of one batch size, arguments and scratch, on a GPU that a dozen test processes share."""
COUNTS = ("splits", "parts", "programs", "SPLITS")
"""What launchers call the number of programs that share a result."""
LAW = "batch_invariant"
"""Numerics under which cycles have the kernels of ``cycle_invariant``, too."""


def parts(launch: Launch) -> int:
    """How many programs share one result in a launch, at most; 1 where each has its own."""
    named = {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.constexprs}
    if launch.kernel.fn.__name__ == "_ngram_match":
        return launch.grid[1]
    return next((int(named[name]) for name in COUNTS if name in named), 1)


@dataclass(frozen=True)
class Merging:
    """One call.

    Attributes:
        name: says op and shape.
        function: the fused op.
        make: its arguments, on a device.
        mutates: groups of arguments it writes.
        minimum: programs that share a result, at least.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[str], Case]
    mutates: tuple[str, ...] = ()
    minimum: int = 2

    def outputs(self, case: Case) -> list[Tensor]:
        """Results of one launch, and what it has written, into copies."""
        own = {key: tree_map_only(Tensor, Tensor.clone, value) if key in self.mutates else value for key, value in case.items()}
        result = self.function(**own)
        results = () if result is None else result if isinstance(result, tuple) else (result,)
        return [*results, *(tensor for name in self.mutates for tensor in own[name] if isinstance(tensor, Tensor))]


def _normal(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).mul_(scale)


def _table(lanes: int, columns: int) -> Tensor:
    pages = torch.randperm(lanes * columns, generator=torch.Generator().manual_seed(0)) + 1
    return pages.view(lanes, columns).to(torch.int32)


def _linear(rows: int, outputs: int, inputs: int, *parts: str) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        case: Case = {"x": _normal(device, rows, inputs), "weight": _normal(device, outputs, inputs, scale=inputs**-0.5)}
        if "norm" in parts:
            case |= {"norm_weight": _normal(device, inputs), "norm_eps": 1e-5}
        if "residual" in parts:
            case["residual"] = _normal(device, rows, outputs)
        return case | {"gated": "gated" in parts}

    return make


def _projected(lanes: int, rows: int, *parts: str) -> Callable[[str], Case]:
    """Queries, keys and values of Llama-3.1-8B; of Qwen3-8B with ``head norms``."""

    def make(device: str) -> Case:
        norms = (_normal(device, 128), _normal(device, 128), 1e-6) if "head norms" in parts else ()
        slots = 4 * PAGE
        heads = Heads(
            _normal(device, slots, 128, dtype=torch.float32),
            torch.arange(rows).expand(lanes, rows).to(device),
            _normal(device, 1, 2, lanes * 4 + 1, PAGE, 8, 128),
            0,
            _table(lanes, 4).to(device),
            (slots - rows + torch.arange(rows)).expand(lanes, rows).to(device),
            torch.ones(lanes, rows, dtype=torch.bool, device=device),
            *norms,
        )
        return {
            "x": _normal(device, lanes, rows, 4096),
            "weight": _normal(device, 6144, 4096, scale=4096**-0.5),
            "bias": None,
            "norm_weight": _normal(device, 4096),
            "norm_eps": 1e-5,
            "norm_offset": False,
            "heads": heads,
        }

    return make


def _logits(device: str, lanes: int, rows: int, vocab: int) -> Tensor:
    """Like a model's: bfloat16 values, so ties are common."""
    return (_normal(device, lanes, rows, vocab) * 3).float()


def _filters(device: str, lanes: int) -> Case:
    """Lanes that filter by the number of tokens, by their mass, and by both."""
    lane = torch.arange(lanes)
    return {
        "top_k_B": torch.tensor([50, -1, 1000])[lane % 3].to(device),
        "top_p_B": torch.tensor([0.9, 0.95, 1.0])[lane % 3].to(device),
        "min_p_B": torch.tensor([0.0, 0.02])[lane % 2].to(device),
    }


def _sampler_arguments(device: str, lanes: int, rows: int) -> Case:
    return {
        "temperature_B": torch.tensor([0.8, 1.0])[torch.arange(lanes) % 2].to(device),
        "seed_B": torch.arange(lanes).to(device),
        "position_BT": (torch.arange(lanes * rows).view(lanes, rows) + 100).to(device),
    }


def _sampled(lanes: int, rows: int, filtered: bool) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        filters = _filters(device, lanes) if filtered else dict.fromkeys(("top_k_B", "top_p_B", "min_p_B"))
        return {"logits_BTV": _logits(device, lanes, rows, VOCAB), **_sampler_arguments(device, lanes, rows), **filters, "strict": True}

    return make


def _filtered(lanes: int, rows: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        temperature_B = _sampler_arguments(device, lanes, rows)["temperature_B"]
        return {"logits_BTV": _logits(device, lanes, rows, VOCAB), "temperature_B": temperature_B, **_filters(device, lanes)}

    return make


def _ranked(lanes: int, rows: int, vocab: int, topk: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        ids = (torch.arange(vocab) * (VOCAB // vocab)).to(device)
        sampler_arguments = _sampler_arguments(device, lanes, 1)
        case = {"logits_BTVd": _logits(device, lanes, rows, vocab), "topk": topk, "target_token_Vd": ids}
        return case | {
            "seed_B": sampler_arguments["seed_B"],
            "position_B": sampler_arguments["position_BT"][:, 0],
            "temperature_B": sampler_arguments["temperature_B"],
        }

    return make


def _shard(lanes: int, rows: int, topk: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        columns = VOCAB // 8
        ids = (torch.arange(columns) + 3 * columns).to(device)
        return {
            "logits_BTVr": _logits(device, lanes, rows, columns),
            "topk": topk,
            "token_Vr": ids,
            **_sampler_arguments(device, lanes, rows),
        }

    return make


def _window(device: str, lanes: int, tokens: int, slots: int, page_size: int) -> Case:
    """Chains at the end of full contexts."""
    words = (torch.ones(tokens, dtype=torch.int64) << torch.arange(tokens)).cumsum(0)
    return {
        "layer": 0,
        "table_BP": _table(lanes, slots // page_size).to(device),
        "prefix_begin_BT": torch.zeros(lanes, tokens, dtype=torch.int64).to(device),
        "prefix_end_B": (slots - tokens - torch.arange(lanes)).to(device),
        "ancestors_BTX": words.expand(lanes, tokens)[..., None].contiguous().to(device),
    }


def _attended(lanes: int, tokens: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        pages = lanes * CONTEXT // PAGE + 1
        query, pool = _normal(device, lanes, tokens, 32, 128), _normal(device, 1, 2, pages, PAGE, 8, 128)
        return {"query_BTQD": query, "kv_pool": pool, **_window(device, lanes, tokens, CONTEXT, PAGE), "scale": 128**-0.5}

    return make


def _latent(lanes: int, tokens: int, heads: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        pool = _normal(device, 1, 1, lanes * CONTEXT // 64 + 1, 64, 1, 576)
        latent, rope = (_normal(device, lanes, tokens, heads, width) for width in (512, 64))
        window = _window(device, lanes, tokens, CONTEXT, 64)
        return {"query_latent_BTQL": latent, "query_rope_BTQR": rope, "latent_pool": pool, **window, "scale": 192**-0.5}

    return make


def _experts(tokens: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        experts, topk, hidden, width = 16, 6, 2048, 1408
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).topk(topk)
        return {
            "x_TH": _normal(device, tokens, hidden),
            "index_TK": scores.indices.to(device),
            "weight_TK": scores.values.to(device),
            "gate_up_EFH": _normal(device, experts, 2 * width, hidden, scale=hidden**-0.5),
            "down_EHF": _normal(device, experts, hidden, width, scale=width**-0.5),
        }

    return make


def _history(lanes: int) -> Callable[[str], Case]:
    def make(device: str) -> Case:
        paths, depth = 8, 6
        tokens = torch.randint(0, 60, (lanes, 2 * CONTEXT), generator=torch.Generator().manual_seed(0))
        return {
            "history_RL": tokens.to(device),
            "lane_row_B": torch.arange(lanes).to(device),
            "status_R": torch.ones(lanes, dtype=torch.int64).to(device),
            "seq_len_R": (2 * CONTEXT - 1 - torch.arange(lanes)).to(device),
            "candidates": Candidates(
                torch.full((lanes, paths * depth), torch.nan).to(device),
                *(torch.zeros(lanes, paths * depth, dtype=torch.int64).to(device) for _ in range(2)),
            ),
            "num_paths": paths,
            "depth": depth,
            "min_match": 1,
            "max_match": 12,
        }

    return make


def merging_calls(lanes: int) -> list[Merging]:
    """The calls of one batch size."""
    op = {op.name: op for op in OPS}
    rows, tokens = 8, 8 if lanes == 1 else 4

    def fused(name: str, numerics: str = "fast") -> Callable[..., Any]:
        return op[name].implementation(op[name].fused_name(numerics))

    # Up to 8 rows only products with a norm are split in fast numerics, and of Llama-3.1-8B's gated one every tile is a program's own.
    # Under the law its products without a norm are not split either.
    split = {
        "qkv": (6144, 4096, ("norm",), (("fast", lanes), ("fast", 2 * lanes), (LAW, lanes))),
        "o": (4096, 4096, ("residual",), (("fast", 16),)),
        "o of Llama-3.2-1B": (2048, 2048, ("residual",), ((LAW, lanes),)),
        "gate-up of Llama-3.2-3B": (16384, 3072, ("norm", "gated"), (("fast", lanes),)),
        "EAGLE-3's fc": (4096, 12288, (), (("fast", 16),)),
        "down": (4096, 14336, ("residual",), (("fast", 16),)),
        "down of Qwen3.6-27B": (5120, 17408, ("residual",), ((LAW, lanes),)),
    }
    products = [
        Merging(f"linear {name}, {numerics}, {count} rows", fused_linear(numerics), _linear(count, outputs, inputs, *how))
        for name, (outputs, inputs, how, calls) in split.items()
        for numerics, count in calls
    ]
    written = [
        Merging(f"linear_kv_write {' '.join(how)}, {numerics}", fused_linear_kv_write(numerics), _projected(lanes, 4, *how), ("heads",))
        for how in ((), ("head norms",))
        for numerics in ("fast", LAW)
    ]
    return [
        *products,
        *written,
        Merging("sample_tokens", fused("sample_tokens"), _sampled(lanes, rows, False)),
        Merging("sample_tokens, filtered", fused("sample_tokens"), _sampled(lanes, rows, True)),
        Merging("filter_logits", fused("filter_logits"), _filtered(lanes, rows)),
        Merging("draft_topk", fused("draft_topk"), _ranked(lanes, 1, DRAFT_VOCAB, 8)),
        Merging("draft_topk, whole vocabulary", fused("draft_topk"), _ranked(lanes, 4, VOCAB, 8)),
        Merging("shard_topk", fused("shard_topk"), _shard(lanes, rows, 8)),
        Merging("tree_attention", fused("tree_attention"), _attended(lanes, tokens), minimum=4),
        Merging("tree_attention, one token", fused("tree_attention"), _attended(lanes, 1), minimum=4),
        Merging("tree_attention by position", fused("tree_attention", LAW), _attended(lanes, tokens), minimum=4),
        Merging("latent_attention, DeepSeek-V3", fused("latent_attention"), _latent(lanes, 2, 128)),
        Merging("latent_attention, DeepSeek-V2-Lite", fused("latent_attention"), _latent(lanes, tokens, 16)),
        Merging("latent_attention by position, DeepSeek-V2-Lite", fused("latent_attention", LAW), _latent(lanes, tokens, 16)),
        Merging("moe_mlp", fused("moe_mlp"), _experts(lanes)),
        Merging("ngram_match", fused("ngram_match"), _history(lanes), ("candidates",)),
    ]
