"""Trains a small target from scratch, on next-token prediction."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..config.train_options import TargetConfig, TrainConfig
from ..errors import ConfigError
from . import loop
from .attention import use_batched_products
from .hybrid import build_hybrid
from .loop import Watch, unwatched
from .texts import Streams
from .unlikelihood import UNMIXED, train_against_loops

NAME = "target"
BITS = ("lr", "adamw_lr", "schedule", "warmup", "cooldown", "restarts", "clip", "dtype", "compile", "seed")
"""Keys of ``train`` that determine, with phases and shape, the weights of a trained target."""


def build_target(config: TargetConfig, seed: int) -> PreTrainedModel:
    """A new model; the deeper it is, the smaller the initial matrices that write to the residual stream."""
    torch.manual_seed(seed)
    model = _build_llama(config) if config.architecture == "llama" else build_hybrid(config)
    depth = math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            with torch.no_grad():
                parameter.div_(depth)
    return model


def _build_llama(config: TargetConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(
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


def settings(config: TrainConfig) -> dict[str, Any]:
    """Everything that determines the trained weights, except the text."""
    given = asdict(config)
    return {"variant": "none", "phases": config.schedule_phases, **{key: given[key] for key in BITS}, "target": config.target.shape()}


def bits_per_byte(model: PreTrainedModel, stream: np.ndarray, num_bytes: int, length: int = 512) -> tuple[float, float]:
    """``(nats per token, bits per byte)`` of ``stream``, in windows of ``length`` tokens whose first half is context for the second."""
    half, total, count = length // 2, 0.0, 0
    model.eval()
    ids = torch.from_numpy(stream.astype(np.int64)).to(model.device)
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, half):
            begin = max(0, start - half)
            window = ids[begin : start + half + 1]
            logits = model(window[None, :-1], use_cache=False).logits[0]
            nll = F.cross_entropy(logits.float(), window[1:], reduction="none")[start - begin :]
            total += float(nll.sum())
            count += nll.numel()
    return total / count, total / math.log(2) / num_bytes


def train_target(
    config: TrainConfig, streams: Streams, work: Path, device: str = "cpu", watch: Watch = unwatched
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train on ``device``, resuming from the checkpoints in ``work``; returns the model and its figures.

    Raises:
        ConfigError: sequences longer than the context or than the text, or what :func:`graphspec.train.loop.run` raises.
    """
    longest = max(length for _, _, length in config.schedule_phases)
    written = config.unlikelihood.length if config.unlikelihood.steps else 0
    for key, tokens in (("train.sequence_length", longest), ("train.unlikelihood.length", written)):
        if tokens > config.target.max_position_embeddings:
            expected = f"at most train.target.max_position_embeddings = {config.target.max_position_embeddings}"
            raise ConfigError(key, expected, tokens)
    if len(streams.train) <= longest + 1:
        raise ConfigError("train.data", f"more than {longest + 1} tokens to train on", len(streams.train))
    if len(streams.held_out) < 2:
        raise ConfigError("train.held_out", "at least two tokens", len(streams.held_out))
    model = build_target(config.target, config.seed).to(device)
    usual = model.config._attn_implementation  # noqa: SLF001
    if config.dtype == "bfloat16" and model.device.type == "cpu" and isinstance(model, LlamaForCausalLM):
        use_batched_products(model)
    forward = torch.compile(model, dynamic=False) if config.compile else model

    def loss(step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        starts = np.random.default_rng(config.seed * 1_000_003 + step).integers(0, len(streams.train) - length - 1, batch)
        rows = np.stack([streams.train[start : start + length + 1] for start in starts]).astype(np.int64)
        tokens_BT = torch.from_numpy(rows).to(device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            logits = forward(tokens_BT[:, :-1], use_cache=False).logits
        value = F.cross_entropy(logits.float().flatten(0, 1), tokens_BT[:, 1:].flatten())
        return value, value.detach()

    job = loop.Job(NAME, model, UNMIXED, loss, settings(config), lambda means: {"loss": round(float(means), 4)})
    trained = loop.run(job, config, work, watch)
    against_loops: dict[str, Any] = {}
    if config.unlikelihood.steps:
        writer = build_target(config.target, config.seed).to(device)
        against_loops = train_against_loops(model, writer, streams.train, loss, config, settings(config), work, watch)
    model.requires_grad_(False).eval()
    model.set_attn_implementation(usual)
    nats, bits = bits_per_byte(model, streams.held_out, streams.facts["held_out_bytes"])
    return model, {
        "steps": config.total_steps,
        "tokens": loop.tokens_until(config, config.total_steps),
        "seconds": round(trained.seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": trained.figures["loss"],
        "held_out_loss": nats,
        "held_out_bits_per_byte": bits,
        **({"unlikelihood": against_loops} if against_loops else {}),
    }
