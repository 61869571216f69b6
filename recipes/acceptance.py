"""Exact greedy acceptance of a head, simulated in plain torch on the target's own greedy text.

The target's greedy continuation of a prompt is computed once. Since the root of every cycle lies on that continuation, the drafter's
view at each of its positions is known without running cycles, and whole drafts can be made for all positions at once; the cycles are
then walked over the finished table. The figure is new tokens per cycle, the target's own token included, the prefill's token not counted
(Leviathan et al. 2023; the EAGLE papers' tau).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .eagle3 import Eagle3Head, attend, target_view
from .generate import continue_text, cut_prompts, repetition


@dataclass
class AcceptanceConfig:
    """What is measured."""

    prompts: int = 128
    prompt_length: int = 64
    new_tokens: int = 160
    shapes: list[list[int]] = field(default_factory=lambda: [[4, 1, 5], [5, 4, 16]])
    """``[S, K, N]``: draft depth, fan-out, verify nodes (root included)."""
    samples: int = 2
    """Continuations kept as text."""
    seed: int = 3


def gather_beams(x: Tensor, beam_BRK: Tensor, dim: int) -> Tensor:
    """Pick beams ``[B, R, K]`` of ``x``, whose dimensions ``dim - 1`` and ``dim`` are rows and beams and whose batch is dimension 0."""
    index = beam_BRK.view(beam_BRK.shape[0], *([1] * (dim - 2)), *beam_BRK.shape[1:], *([1] * (x.ndim - dim - 1)))
    return x.gather(dim, index.expand(*x.shape[:dim], beam_BRK.shape[-1], *x.shape[dim + 1 :]))


@torch.inference_mode()
def draft_candidates(
    head: Eagle3Head, embedding: torch.nn.Embedding, features_BTF: Tensor, tokens_BT: Tensor, first: int, depth: int, fan_out: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft from every row ``first <= i < T - 1``; row ``i`` has its root at position ``i + 1``.

    As in EAGLE-2 (Li et al. 2024): the first step offers the best K tokens; each later one expands the K best beams of the last step by
    K tokens each. A beam attends to the prefix and to its own ancestors, never to another branch.

    Returns:
        ``token [B, R, M]`` target ids, ``score [B, R, M]`` fp32 sums of log-probabilities, ``parent [B, R, M]`` index of the parent
        candidate or -1, ``level [M]`` depth from 1, with ``M = K + (S-1) K^2``.
    """
    layer, ids = head.midlayer, head.target_ids()
    last = tokens_BT.shape[1] - 1
    all_rows = torch.arange(last)
    cos, sin = head.rope(all_rows)
    fused = head.fc(features_BTF[:, :last])
    query, prefix_k, prefix_v = layer.project(embedding(tokens_BT[:, 1:]), fused, cos, sin)
    rows = all_rows[first:]
    visible_RR = rows[:, None] >= all_rows
    attended = attend(query[:, :, :, first:], prefix_k, prefix_v, visible_RR, None, None)
    hidden_BRH = layer.finish(fused[:, first:], attended)
    batch, count, width = hidden_BRH.shape
    logp, choice = head.logits(hidden_BRH).float().log_softmax(-1).topk(fan_out, -1)
    token, score, parent = [ids[choice]], [logp], [torch.full_like(choice, -1)]
    level = [torch.ones(fan_out, dtype=torch.int64)]
    beam_token, beam_score = token[0], logp
    beam_node = torch.arange(fan_out).expand(batch, count, fan_out)
    beam_hidden = hidden_BRH[:, :, None].expand(-1, -1, fan_out, -1)
    heads, dim = prefix_k.shape[1], prefix_k.shape[3]
    own_k = own_v = prefix_k.new_empty(batch, heads, count, fan_out, 0, dim)
    visible = visible_RR.repeat_interleave(fan_out, 0)
    offset = fan_out
    for step in range(1, depth):
        cos, sin = head.rope((rows + step).repeat_interleave(fan_out))
        flat_hidden = beam_hidden.reshape(batch, count * fan_out, width)
        query, key, value = layer.project(embedding(beam_token.flatten(1)), flat_hidden, cos, sin)
        own_k = torch.cat((own_k, key.unflatten(2, (count, fan_out))[:, :, :, :, None]), 4)
        own_v = torch.cat((own_v, value.unflatten(2, (count, fan_out))[:, :, :, :, None]), 4)
        out = layer.finish(flat_hidden, attend(query, prefix_k, prefix_v, visible, own_k.flatten(2, 3), own_v.flatten(2, 3)))
        logp, choice = head.logits(out).float().log_softmax(-1).topk(fan_out, -1)
        scores = (beam_score.unsqueeze(-1) + logp.unflatten(1, (count, fan_out))).flatten(2)
        tokens = ids[choice].unflatten(1, (count, fan_out)).flatten(2)
        token.append(tokens)
        score.append(scores)
        parent.append(beam_node.repeat_interleave(fan_out, -1))
        level.append(torch.full((fan_out * fan_out,), step + 1))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :fan_out]
        beam_token, beam_score, beam_node = tokens.gather(-1, best), scores.gather(-1, best), best + offset
        beam = best // fan_out
        beam_hidden = gather_beams(out.unflatten(1, (count, fan_out)), beam, 2)
        own_k, own_v = gather_beams(own_k, beam, 3), gather_beams(own_v, beam, 3)
        offset += fan_out * fan_out
    return torch.cat(token, -1), torch.cat(score, -1), torch.cat(parent, -1), torch.cat(level)


def accepted_lengths(token_BRM: Tensor, score_BRM: Tensor, parent_BRM: Tensor, level_M: Tensor, truth_BRS: Tensor, nodes: int) -> Tensor:
    """Draft tokens greedy verification accepts, per row: ``[B, R]`` in ``0..S``.

    The ``nodes - 1`` best candidates by score are offered (ties by index); ``truth_BRS`` holds the target's next S tokens of each row.
    """
    order = score_BRM.sort(dim=-1, descending=True, stable=True).indices[..., : nodes - 1]
    offered = torch.zeros_like(token_BRM, dtype=torch.bool).scatter(-1, order, True)
    matches = offered & (token_BRM == truth_BRS[..., level_M - 1])
    alive = matches & (level_M == 1)
    for level in range(2, int(level_M.max()) + 1):
        alive = alive | (matches & (level_M == level) & alive.gather(-1, parent_BRM.clamp(min=0)))
    return (alive * level_M).amax(-1)


def walk(accepted_R: list[int]) -> list[int]:
    """Lengths accepted by the cycles one request goes through: each starts where the last one ended."""
    taken, row = [], 0
    while row < len(accepted_R):
        taken.append(accepted_R[row])
        row += accepted_R[row] + 1
    return taken


def measure_acceptance(
    config: AcceptanceConfig, target: LlamaForCausalLM, head: Eagle3Head, stream: np.ndarray, end_of_text: int = 0
) -> tuple[dict[str, object], Tensor]:
    """Figures for every shape, and the greedy text ``[prompts, prompt_length + new_tokens]`` they were measured on.

    Cycles that could run past the known text, or past an end-of-text token, are left out.
    """
    prompt, length = config.prompt_length, config.prompt_length + config.new_tokens
    text_BT = continue_text(target, cut_prompts(stream, config.prompts, prompt, config.seed), length, 0.0, 0)
    results: list[dict[str, object]] = []
    for depth, fan_out, nodes in config.shapes:
        taken: list[int] = []
        for tokens_BT in text_BT.split(8):
            features, _ = target_view(target, tokens_BT, head.tap_layers)
            token, score, parent, level = draft_candidates(head, target.model.embed_tokens, features, tokens_BT, prompt - 1, depth, fan_out)
            # Row r has its root at prompt + r: the S tokens after it must be known, and the one more that the cycle would emit.
            complete = length - prompt - depth - 1
            truth = torch.stack([tokens_BT[:, prompt + 1 + d : prompt + 1 + d + complete] for d in range(depth)], -1)
            rows = slice(0, complete)
            lengths = accepted_lengths(token[:, rows], score[:, rows], parent[:, rows], level, truth, nodes)
            for row_tokens, row_lengths in zip(tokens_BT.tolist(), lengths.tolist(), strict=True):
                continuation = row_tokens[prompt:]
                known = continuation.index(end_of_text) + 1 if end_of_text in continuation else len(continuation)
                taken += walk(row_lengths[: max(0, known - depth - 1)])
        reached = [sum(a >= d for a in taken) for d in range(depth + 1)]
        results.append(
            {
                "num_steps": depth,
                "topk": fan_out,
                "num_draft_tokens": nodes,
                "cycles": len(taken),
                "tokens_per_cycle": round(1 + sum(taken) / max(1, len(taken)), 4),
                "conditional_acceptance": [round(reached[d] / max(1, reached[d - 1]), 4) for d in range(1, depth + 1)],
            }
        )
    figures: dict[str, object] = {
        "prompts": config.prompts,
        "prompt_tokens": prompt,
        "new_tokens": config.new_tokens,
        "repeated_16_grams": round(repetition(text_BT, prompt), 4),
        "shapes": results,
    }
    return figures, text_BT
