"""Exact acceptance of a draft network, simulated in plain torch on the target's own text.

The target's continuation of a prompt is computed once, greedy or sampled. Since the root of every cycle lies on that continuation, the
drafter's view at each of its positions is known without running cycles, and whole drafts can be made for all positions at once; the cycles
are then walked over the finished table. That holds for a drafter that does not see the sampler's noise: above temperature 0 it is
``variant.draft_noise=none``, and the default accepts more. The figure is new tokens per cycle, the target's own token included, the
prefill's token not counted (Leviathan et al. 2023; the EAGLE papers' tau).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..train_options import AcceptanceConfig
from .blocks import attend_rows
from .drafter import Drafter, Target, unrolled
from .generate import continue_text, cut_prompts, repetition


def gather_beams(x: Tensor, beam_BRK: Tensor, dim: int) -> Tensor:
    """Pick beams ``[B, R, K]`` of ``x``, whose dimensions ``dim - 1`` and ``dim`` are rows and beams and whose batch is dimension 0."""
    index = beam_BRK.view(beam_BRK.shape[0], *([1] * (dim - 2)), *beam_BRK.shape[1:], *([1] * (x.ndim - dim - 1)))
    return x.gather(dim, index.expand(*x.shape[:dim], beam_BRK.shape[-1], *x.shape[dim + 1 :]))


class Branches:
    """Keys and values of a drafter's layers: one prefix for all rows, and what every beam of every row added to it."""

    def __init__(self, rows: int, fan_out: int, visible_RT: Tensor) -> None:
        self.rows, self.fan_out = rows, fan_out
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.visible = visible_RT.repeat_interleave(fan_out, 0)

    def root(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of step 0: causal over the prefix."""
        self.prefix[layer] = k, v
        batch, heads, length, dim = k.shape
        empty = k.new_empty(batch, heads, self.rows, self.fan_out, 0, dim)
        self.own[layer] = empty, empty
        index = torch.arange(length, device=k.device)
        return attend_rows(q, k, v, index[:, None] >= index)

    def beams(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a later step: over the prefix, the beam's ancestors and itself."""
        shape = (self.rows, self.fan_out)
        keys, values = self.own[layer]
        keys = torch.cat((keys, k.unflatten(2, shape)[:, :, :, :, None]), 4)
        values = torch.cat((values, v.unflatten(2, shape)[:, :, :, :, None]), 4)
        self.own[layer] = keys, values
        return attend_rows(q, *self.prefix[layer], self.visible, keys.flatten(2, 3), values.flatten(2, 3))

    def keep(self, beam_BRK: Tensor) -> None:
        """The next step's beam ``j`` goes on from beam ``beam_BRK[.., j]``."""
        self.own = {layer: (gather_beams(k, beam_BRK, 3), gather_beams(v, beam_BRK, 3)) for layer, (k, v) in self.own.items()}


@torch.inference_mode()
def draft_candidates(
    drafter: Drafter, features_BTF: Tensor, tokens_BT: Tensor, first: int, depth: int, fan_out: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft from every row ``first <= i < T - 1``; row ``i`` has its root at position ``i + 1``.

    As in EAGLE-2 (Li et al. 2024): the first step offers the best K tokens; each later one expands the K best beams of the last step by
    K tokens each. A beam attends to the prefix and to its own ancestors, never to another branch.

    Returns:
        ``token [B, R, M]`` target ids, ``score [B, R, M]`` fp32 sums of log-probabilities, ``parent [B, R, M]`` index of the parent
        candidate or -1, ``level [M]`` depth from 1, with ``M = K + (S-1) K^2``.

    Raises:
        ConfigError: the network has a head for each step: it drafts chains (:func:`chain_lengths`).
    """
    if drafter.num_heads > 1:
        raise ConfigError("train.acceptance.shapes", "fan-out 1 for a network with a head for each step", fan_out)
    ids, device = drafter.target_ids(), tokens_BT.device
    last = tokens_BT.shape[1] - 1
    all_rows = torch.arange(last, device=device)
    rows = all_rows[first:]
    branches = Branches(len(rows), fan_out, rows[:, None] >= all_rows)
    start = drafter.start(features_BTF[:, :last])
    hidden_BRH = drafter.step(0, tokens_BT[:, 1:], start, all_rows, branches.root)[:, first:]
    batch, count, width = hidden_BRH.shape

    def best_of(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logp, choice = drafter.logits(hidden).float().log_softmax(-1).topk(fan_out, -1)
        return logp, choice if ids is None else ids[choice]

    beam_score, beam_token = best_of(hidden_BRH)
    token, score, parent = [beam_token], [beam_score], [torch.full_like(beam_token, -1)]
    level = [torch.ones(fan_out, dtype=torch.int64, device=device)]
    beam_node = torch.arange(fan_out, device=device).expand(batch, count, fan_out)
    beam_hidden = hidden_BRH[:, :, None].expand(-1, -1, fan_out, -1)
    offset = fan_out
    for step in range(1, depth):
        positions = (rows + step).repeat_interleave(fan_out)
        flat = beam_hidden.reshape(batch, count * fan_out, width)
        out = drafter.step(step, beam_token.flatten(1), flat, positions, branches.beams)
        logp, choice = best_of(out)
        scores = (beam_score.unsqueeze(-1) + logp.unflatten(1, (count, fan_out))).flatten(2)
        tokens = choice.unflatten(1, (count, fan_out)).flatten(2)
        token.append(tokens)
        score.append(scores)
        parent.append(beam_node.repeat_interleave(fan_out, -1))
        level.append(torch.full((fan_out * fan_out,), step + 1, device=device))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :fan_out]
        beam_token, beam_score, beam_node = tokens.gather(-1, best), scores.gather(-1, best), best + offset
        beam = best // fan_out
        beam_hidden = gather_beams(out.unflatten(1, (count, fan_out)), beam, 2)
        branches.keep(beam)
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


@torch.inference_mode()
def chain_lengths(drafter: Drafter, features_BTF: Tensor, tokens_BT: Tensor, first: int, depth: int) -> Tensor:
    """:func:`accepted_lengths` of chains of ``depth``, ``[B, R]`` for the rows ``first <= i < T - depth - 1``.

    A step of a chain matters only when all tokens before it were right, so every step can be run on the true ones.
    """
    ids = drafter.target_ids()
    # One more position than the last draft consumes: its truth.
    rows = tokens_BT.shape[1] - depth - 1
    alive = torch.ones(len(tokens_BT), rows - first, dtype=torch.bool, device=tokens_BT.device)
    lengths = torch.zeros_like(alive, dtype=torch.int64)
    for k, hidden in enumerate(unrolled(drafter, features_BTF[:, :-1], tokens_BT[:, :-1], depth)):
        choice = drafter.logits(hidden[:, first:]).argmax(-1)
        choice = choice if ids is None else ids[choice]
        alive = alive & (choice == tokens_BT[:, first + 2 + k : 2 + k + rows])
        lengths = lengths + alive
    return lengths


def walk(accepted_R: list[int]) -> list[int]:
    """Lengths accepted by the cycles one request goes through: each starts where the last one ended."""
    taken, row = [], 0
    while row < len(accepted_R):
        taken.append(accepted_R[row])
        row += accepted_R[row] + 1
    return taken


def check_acceptance(config: AcceptanceConfig, context: int, stream: np.ndarray) -> None:
    """Refuse what can't be measured, before anything is trained.

    Raises:
        ConfigError: the held-out text is shorter than a prompt, or the target's context than prompt and continuation.
    """
    if len(stream) <= config.prompt_length:
        expected = f"less than the held-out text of {len(stream)} tokens"
        raise ConfigError("train.acceptance.prompt_length", expected, config.prompt_length)
    if config.prompt_length + config.new_tokens > context:
        expected = f"at most {context - config.prompt_length}, what the target's context leaves"
        raise ConfigError("train.acceptance.new_tokens", expected, config.new_tokens)


def target_text(config: AcceptanceConfig, target: Target, stream: np.ndarray, temperature: float = 0.0) -> Tensor:
    """``[prompts, prompt_length + new_tokens]`` int64: what acceptance is measured on, prompts from ``stream`` and the target's own words.

    Raises:
        ConfigError: as :func:`check_acceptance`.
    """
    check_acceptance(config, target.model.config.max_position_embeddings, stream)
    prompts_BL = cut_prompts(stream, config.prompts, config.prompt_length, config.seed)
    return continue_text(target.model, prompts_BL, config.prompt_length + config.new_tokens, temperature, config.seed)


def measure_acceptance(
    config: AcceptanceConfig, target: Target, drafter: Drafter, text_BT: Tensor, end_of_text: int | None
) -> dict[str, object]:
    """Figures for every shape on :func:`target_text`.

    Cycles that could run past the known text, or past an end-of-text token, are left out; and for a network with a head for each step,
    shapes with a fan-out or a depth it does not have.
    """
    prompt, length = config.prompt_length, text_BT.shape[1]
    device = next(drafter.parameters()).device
    shapes = [s for s in config.shapes if drafter.num_heads == 1 or (s[1] == 1 and s[0] <= drafter.num_heads)]
    taken: list[list[int]] = [[] for _ in shapes]
    for part_BT in text_BT.split(config.batch):
        tokens_BT = part_BT.to(device)
        features, _ = target.view(tokens_BT, drafter.tap_layers)
        for (depth, fan_out, nodes), cycles in zip(shapes, taken, strict=True):
            # Row r has its root at prompt + r: the S tokens after it must be known, and the one more that the cycle would emit.
            complete = length - prompt - depth - 1
            if fan_out == 1:
                lengths = chain_lengths(drafter, features, tokens_BT, prompt - 1, depth)[:, :complete].clamp(max=nodes - 1)
            else:
                token, score, parent, level = draft_candidates(drafter, features, tokens_BT, prompt - 1, depth, fan_out)
                truth = torch.stack([tokens_BT[:, prompt + 1 + d : prompt + 1 + d + complete] for d in range(depth)], -1)
                kept = slice(0, complete)
                lengths = accepted_lengths(token[:, kept], score[:, kept], parent[:, kept], level, truth, nodes)
            for row_tokens, row_lengths in zip(part_BT.tolist(), lengths.tolist(), strict=True):
                continuation = row_tokens[prompt:]
                known = continuation.index(end_of_text) + 1 if end_of_text in continuation else len(continuation)
                cycles += walk(row_lengths[: max(0, known - depth - 1)])
    results: list[dict[str, object]] = []
    for (depth, fan_out, nodes), cycles in zip(shapes, taken, strict=True):
        reached = [sum(a >= d for a in cycles) for d in range(depth + 1)]
        results.append(
            {
                "num_steps": depth,
                "topk": fan_out,
                "num_draft_tokens": nodes,
                "cycles": len(cycles),
                "tokens_per_cycle": round(1 + sum(cycles) / max(1, len(cycles)), 4),
                "conditional_acceptance": [round(reached[d] / max(1, reached[d - 1]), 4) for d in range(1, depth + 1)],
            }
        )
    return {
        "prompts": config.prompts,
        "prompt_tokens": prompt,
        "new_tokens": config.new_tokens,
        "repeated_16_grams": round(repetition(text_BT, prompt), 4),
        "shapes": results,
    }
