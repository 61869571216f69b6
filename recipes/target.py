"""Train the demo target: a small Llama on next-token prediction."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .optim import Optimizers, phase_at


@dataclass
class TargetConfig:
    """Shape and schedule of the demo target. Deep and thin on purpose: the deeper the target, the more a drafter saves."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 448
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    max_position_embeddings: int = 1024
    phases: list[list[int]] = field(default_factory=lambda: [[660, 24, 256], [60, 6, 1024]])
    """``[steps, batch, sequence length]`` in order: short sequences first, then the full context."""
    cooldown: int = 300
    warmup: int = 60
    lr: float = 4e-3
    clip: float = 1.0
    seed: int = 0
    save_every: int = 100
    compile: bool = True


def build_target(config: TargetConfig) -> LlamaForCausalLM:
    """A fresh model; the matrices that write to the residual stream start smaller, the more so the deeper the model."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=True,
        )
    )
    depth = math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            with torch.no_grad():
                parameter.div_(depth)
    return model


def trained_target(config: TargetConfig, work: Path) -> LlamaForCausalLM:
    """The model of ``work/target.pt``, as it was trained."""
    model = build_target(config)
    model.load_state_dict(torch.load(work / "target.pt")["model"])
    return model.requires_grad_(False).eval()


def bits_per_byte(model: PreTrainedModel, stream: np.ndarray, num_bytes: int, length: int = 512) -> tuple[float, float]:
    """``(nats per token, bits per byte)`` of ``stream``: windows of ``length`` with half a window of context before each scored half."""
    half, total, count = length // 2, 0.0, 0
    model.eval()
    ids = torch.from_numpy(stream)
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, half):
            begin = max(0, start - half)
            window = ids[begin : start + half + 1]
            logits = model(window[None, :-1], use_cache=False).logits[0]
            nll = torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="none")[start - begin :]
            total += float(nll.sum())
            count += nll.numel()
    return total / count, total / math.log(2) / num_bytes


def train_target(config: TargetConfig, train: np.ndarray, held_out: np.ndarray, held_out_bytes: int, work: Path) -> dict[str, float]:
    """Train, resuming from ``work/target.pt`` when it exists. Returns the figures for the model card; weights lie in the checkpoint."""
    torch.set_flush_denormal(True)
    model = build_target(config)
    steps = sum(phase[0] for phase in config.phases)
    optimizers = Optimizers(model, config.lr, steps, config.warmup, config.cooldown, ("embed_tokens", "lm_head"))
    checkpoint, step, tokens, seconds = work / "target.pt", 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        step, tokens, seconds = state["step"], state["tokens"], state["seconds"]
    forward = torch.compile(model, dynamic=False) if config.compile else model
    ids, smooth, started = torch.from_numpy(train), None, time.monotonic()

    def save() -> None:
        state = {"model": model.state_dict(), "optimizers": optimizers.state_dict(), "step": step, "tokens": tokens, "seconds": seconds}
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    while step < steps:
        batch, length = phase_at(config.phases, step)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        starts = torch.randint(0, len(ids) - length - 1, (batch,), generator=generator)
        rows = torch.stack([ids[s : s + length + 1] for s in starts.tolist()])
        model.train()
        logits = forward(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizers.step(step, config.clip)
        value = loss.item()
        smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
        step += 1
        tokens += batch * length
        now = time.monotonic()
        seconds, started = seconds + now - started, now
        if step % 20 == 0:
            print(f"target step {step}/{steps} loss {smooth:.3f} tokens {tokens / 1e6:.2f}M {tokens / seconds:.0f} tok/s", flush=True)
        if step % config.save_every == 0 or step == steps:
            save()
        if step % (5 * config.save_every) == 0 and step < steps:
            nats, bpb = bits_per_byte(model, held_out[:20000], round(held_out_bytes * 20000 / len(held_out)))
            print(f"target step {step} held-out (first 20k tokens) {nats:.3f} nats/token {bpb:.3f} bits/byte", flush=True)
    nats, bpb = bits_per_byte(model, held_out, held_out_bytes)
    figures = {"steps": steps, "tokens": tokens, "train_loss": smooth or float("nan"), "held_out_loss": nats, "held_out_bits_per_byte": bpb}
    (work / "target.json").write_text(json.dumps(figures, indent=2))
    return figures
