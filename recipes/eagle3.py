"""The EAGLE-3 head of the demo model: the network in its published layout, and its training (Li et al. 2025, arXiv 2503.01840).

Rows follow one convention, the same as at inference: row ``i`` consumes token ``i + 1`` together with the target's features of
position ``i``, sits at RoPE position ``i``, and predicts token ``i + 2``. Token 0 is never consumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .generate import text_file
from .optim import Optimizers, phase_at


@dataclass
class HeadConfig:
    """Shape and schedule of the head. Width, heads and norms are the target's."""

    draft_vocab_size: int = 1024
    intermediate_size: int = 448
    tap_layers: list[int] = field(default_factory=lambda: [2, 6, 9])
    """The target's residual stream *entering* these layers is what the head sees: low, middle, high."""
    unroll: int = 6
    """Training-time test: draft steps unrolled on the head's own hidden states. At least the draft depth used at inference."""
    decay: float = 0.8
    """Weight of unrolled step ``k`` is ``decay ** k``."""
    phases: list[list[int]] = field(default_factory=lambda: [[900, 16, 256], [40, 5, 768]])
    """``[steps, batch, sequence length]``; the length names the set of generated text."""
    lr: float = 3e-3
    warmup: int = 40
    cooldown: int = 350
    clip: float = 1.0
    seed: int = 2
    save_every: int = 100


def rope(positions_T: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """``(cos, sin)`` ``[T, dim]`` of Llama's rotary embedding (the two halves of a head are rotated against each other)."""
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = positions_T.to(torch.float32)[:, None] * inverse
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn ``[.., T, D]`` by the angles of :func:`rope`."""
    low, high = x.chunk(2, -1)
    return x * cos_TD + torch.cat((-high, low), -1) * sin_TD


class SelfAttention(nn.Module):
    """Projections of the head's attention: queries, keys and values from ``[embedding; hidden]`` (2H), output to H."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer; attention itself is left to the caller, who knows which keys a row may see."""

    def __init__(self, target: LlamaConfig, intermediate: int) -> None:
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.heads, self.kv_heads = target.num_attention_heads, target.num_key_value_heads
        self.dim = hidden // self.heads
        self.self_attn = SelfAttention(hidden, self.heads, self.kv_heads, self.dim)
        self.mlp = FeedForward(hidden, intermediate)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)

    def project(self, embed: Tensor, hidden: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, T, H]`` twice to rotated queries ``[B, G, Q/G, T, D]``, rotated keys and values ``[B, G, T, D]``."""
        x = torch.cat((self.input_layernorm(embed), self.hidden_norm(hidden)), -1)
        batch, rows, _ = x.shape
        q = self.self_attn.q_proj(x).view(batch, rows, self.heads, self.dim).transpose(1, 2)
        k = self.self_attn.k_proj(x).view(batch, rows, self.kv_heads, self.dim).transpose(1, 2)
        v = self.self_attn.v_proj(x).view(batch, rows, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)
        return q.unflatten(1, (self.kv_heads, -1)), k, v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual, MLP, residual: the un-normed output ``[B, T, H]`` that is also the next draft step's hidden state."""
        hidden = hidden + self.self_attn.o_proj(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def attend(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, visible_TR: Tensor, own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
    """Attention over a shared prefix and, per row, over keys of the row's own branch.

    Args:
        q: ``[B, G, Q/G, T, D]``.
        prefix_k, prefix_v: ``[B, G, R, D]``.
        visible_TR: ``[T, R]`` bool, the prefix rows a query may see.
        own_k, own_v: ``[B, G, T, J, D]`` or None, all visible to their row.

    Returns:
        ``[B, T, Q * D]``.
    """
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bghtd,bgrd->bghtr", q * scale, prefix_k).masked_fill(~visible_TR, float("-inf"))
    if own_k is None or own_v is None:
        out = torch.einsum("bghtr,bgrd->bghtd", scores.softmax(-1), prefix_v)
    else:
        own = torch.einsum("bghtd,bgtjd->bghtj", q * scale, own_k)
        weights = torch.cat((scores, own), -1).softmax(-1)
        prefix_w, own_w = weights.split((prefix_k.shape[2], own_k.shape[3]), -1)
        out = torch.einsum("bghtr,bgrd->bghtd", prefix_w, prefix_v) + torch.einsum("bghtj,bgtjd->bghtd", own_w, own_v)
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


class Eagle3Head(nn.Module):
    """``state_dict`` is the published layout of an EAGLE-3 checkpoint, name by name; the embedding is the target's and not part of it."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, target: LlamaConfig, config: HeadConfig) -> None:
        super().__init__()
        hidden = target.hidden_size
        self.tap_layers = tuple(config.tap_layers)
        self.theta = float(target.rope_parameters["rope_theta"])
        self.fc = nn.Linear(len(config.tap_layers) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(target, config.intermediate_size)
        self.norm = nn.RMSNorm(hidden, target.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(target.vocab_size, dtype=torch.bool))

    def target_ids(self) -> Tensor:
        """``[Vd]``: target id of every draft id (``d2t`` holds offsets)."""
        return torch.arange(len(self.d2t)) + self.d2t

    def rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`rope` with the head's own dimension and base."""
        return rope(positions_T, self.midlayer.dim, self.theta)

    def logits(self, output: Tensor) -> Tensor:
        """``[.., H]`` un-normed outputs to ``[.., Vd]``."""
        out: Tensor = self.lm_head(self.norm(output))
        return out


def choose_draft_vocab(counts_V: np.ndarray, size: int, always: Sequence[int]) -> np.ndarray:
    """The ``size`` most counted target ids, ascending, ``always`` among them."""
    order = [int(i) for i in np.argsort(-counts_V, kind="stable") if int(i) not in set(always)]
    return np.sort(np.asarray([*always, *order[: size - len(always)]], dtype=np.int64))


def build_head(target: LlamaForCausalLM, config: HeadConfig, draft_ids: np.ndarray) -> Eagle3Head:
    """A fresh head: norm and output rows start as the target's, the output matrices of the layer start small."""
    torch.manual_seed(config.seed)
    head = Eagle3Head(target.config, config)
    ids = torch.from_numpy(draft_ids)
    with torch.no_grad():
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d[ids] = True
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[ids])
        for linear in head.modules():
            if isinstance(linear, nn.Linear) and linear is not head.lm_head:
                nn.init.normal_(linear.weight, std=0.02)
    return head


@torch.no_grad()
def target_view(model: LlamaForCausalLM, tokens_BT: Tensor, tap_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``(features [B, T, F], logits [B, T, V])`` of the target over ``tokens_BT``; F concatenates the tapped layers' inputs."""
    out = model(tokens_BT, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer] for layer in tap_layers], -1), out.logits


def unrolled_loss(
    head: Eagle3Head, features_BTF: Tensor, embed_BTH: Tensor, soft_BTv: Tensor, hard_BT: Tensor, unroll: int, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Training-time test: ``unroll`` draft steps on true tokens and the head's own hidden states.

    A row of step ``k`` sees the causal prefix of step 0, and of each later step up to its own only itself: that is what a draft branch
    that starts at this row sees at inference.

    Args:
        soft_BTv: the target's next-token distribution restricted to the draft vocabulary, ``[B, T, Vd]``.
        hard_BT: draft id of the target's argmax, -1 outside the draft vocabulary: such rows carry no loss, and count as misses.

    Returns:
        ``(loss, losses [unroll], hits [unroll])``: the weighted sum, and per step cross-entropy and top-1 agreement.
    """
    rows = features_BTF.shape[1] - unroll
    index_T = torch.arange(rows)
    causal_TT = index_T[:, None] >= index_T
    hidden = head.fc(features_BTF[:, :rows])
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    losses, hits = [], []
    prefix_k = prefix_v = torch.empty(0)
    for k in range(unroll):
        cos, sin = head.rope(index_T + k)
        query, key, value = head.midlayer.project(embed_BTH[:, 1 + k : 1 + k + rows], hidden, cos, sin)
        if k == 0:
            prefix_k, prefix_v = key, value
            attended = attend(query, prefix_k, prefix_v, causal_TT, None, None)
        else:
            own_k.append(key)
            own_v.append(value)
            attended = attend(query, prefix_k, prefix_v, causal_TT, torch.stack(own_k, 3), torch.stack(own_v, 3))
        hidden = head.midlayer.finish(hidden, attended)
        logits = head.logits(hidden)
        soft, hard = soft_BTv[:, 1 + k : 1 + k + rows], hard_BT[:, 1 + k : 1 + k + rows]
        inside = (hard >= 0).to(logits.dtype)
        cross_entropy = logits.logsumexp(-1) - (soft * logits).sum(-1)
        losses.append((cross_entropy * inside).sum() / inside.sum().clamp(min=1))
        hits.append((logits.argmax(-1) == hard).to(logits.dtype).mean())
    stacked = torch.stack(losses)
    return (stacked * decay ** torch.arange(unroll)).sum(), stacked.detach(), torch.stack(hits)


def train_head(config: HeadConfig, target: LlamaForCausalLM, train: np.ndarray, work: Path, end_of_text: int = 0) -> dict[str, object]:
    """Train on the generated text, resuming from ``work/head.pt``. Returns (and writes to ``head.json``) the figures for the model card."""
    torch.set_flush_denormal(True)
    sets = {length: np.load(text_file(work, length))["tokens"] for _, _, length in config.phases}
    # Share of the generated text plus share of the training text: the first is what is drafted, the second keeps rare tokens in order.
    written = np.bincount(np.concatenate([tokens.ravel() for tokens in sets.values()]), minlength=target.config.vocab_size)
    read = np.bincount(train, minlength=target.config.vocab_size)
    draft_ids = choose_draft_vocab(written / written.sum() + read / read.sum(), config.draft_vocab_size, (end_of_text,))
    coverage = float(written[draft_ids].sum() / written.sum())
    head = build_head(target, config, draft_ids)
    steps = sum(phase[0] for phase in config.phases)
    optimizers = Optimizers(head, config.lr, steps, config.warmup, config.cooldown, ("lm_head",))
    checkpoint, step, rows_seen, seconds = work / "head.pt", 0, 0, 0.0
    smooth: Tensor | None = None
    if checkpoint.exists():
        state = torch.load(checkpoint)
        head.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        step, rows_seen, seconds, smooth = state["step"], state["rows"], state["seconds"], state["smooth"]
    target.eval()
    ids = head.target_ids()
    to_draft_V = torch.full((target.config.vocab_size,), -1).scatter(0, ids, torch.arange(len(ids)))
    started = time.monotonic()

    def save() -> None:
        progress = {"step": step, "rows": rows_seen, "seconds": seconds, "smooth": smooth}
        torch.save({"model": head.state_dict(), "optimizers": optimizers.state_dict(), **progress}, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    while step < steps:
        batch, length = phase_at(config.phases, step)
        picks = np.random.default_rng(config.seed * 1_000_003 + step).integers(0, len(sets[length]), batch)
        tokens_BT = torch.from_numpy(sets[length][picks].astype(np.int64))
        features, target_logits = target_view(target, tokens_BT, head.tap_layers)
        with torch.no_grad():
            embed = target.model.embed_tokens(tokens_BT)
            soft, hard = target_logits[..., ids].softmax(-1), to_draft_V[target_logits.argmax(-1)]
        loss, losses, hits = unrolled_loss(head, features, embed, soft, hard, config.unroll, config.decay)
        loss.backward()
        optimizers.step(step, config.clip)
        now = torch.stack((losses, hits))
        smooth = now if smooth is None else 0.95 * smooth + 0.05 * now
        step += 1
        rows_seen += batch * (length - config.unroll)
        clock = time.monotonic()
        seconds, started = seconds + clock - started, clock
        if step % 20 == 0 or step == steps:
            agreement = " ".join(f"{h:.3f}" for h in smooth[1].tolist())
            rate = rows_seen / seconds
            print(f"head step {step}/{steps} loss {smooth[0].mean():.3f} agreement by depth {agreement} {rate:.0f} rows/s", flush=True)
        if step % config.save_every == 0 or step == steps:
            save()
    figures = {
        "steps": steps,
        "rows": rows_seen,
        "seconds": round(seconds),
        "unroll": config.unroll,
        "parameters": sum(p.numel() for p in head.parameters()),
        "sequences": {str(length): len(tokens) for length, tokens in sets.items()},
        "draft_vocab_size": config.draft_vocab_size,
        "draft_vocab_coverage": round(coverage, 4),
        "loss_by_depth": [round(x, 4) for x in smooth[0].tolist()] if smooth is not None else [],
        "agreement_by_depth": [round(x, 4) for x in smooth[1].tolist()] if smooth is not None else [],
    }
    (work / "head.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def load_head(config: HeadConfig, target: LlamaForCausalLM, work: Path) -> Eagle3Head:
    """The head of ``work/head.pt``, in evaluation mode."""
    head = Eagle3Head(target.config, config)
    head.load_state_dict(torch.load(work / "head.pt")["model"])
    return head.eval()
