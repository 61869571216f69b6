"""Trains a small target from scratch, on next-token prediction: a Llama, or a hybrid of gated delta nets and gated attention.

``python -m recipes.target train.data=[texts] train.out=my-target target.hidden_size=128`` takes the options of ``graphspec train``, the
shape ``target.*``, and ``unlikelihood.*`` for further steps against loops. An interrupted run goes on when the same command is given again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from graphspec.config.command_options import LaunchConfig
from graphspec.config.compose import load_config
from graphspec.config.paths import make_folder
from graphspec.config.train_options import TrainConfig
from graphspec.errors import ConfigError, GraphspecError
from graphspec.host.progress import progress_bars
from graphspec.text.tokenizer import Tokenizer
from graphspec.train import loop
from graphspec.train.acceptance import continue_held_out, held_out_prompts, small_engine
from graphspec.train.checkpoint import write_json
from graphspec.train.drafter import load_target
from graphspec.train.export import OUT, copy_tokenizer, save_weights
from graphspec.train.facts import RECURRENT, decoder_facts
from graphspec.train.filters import repetition
from graphspec.train.loop import Watch, unwatched
from graphspec.train.memory import keep_freed_memory
from graphspec.train.run import clear, folders, record, set_up
from graphspec.train.texts import Documents, Streams, encode

from .batched_products import use_batched_products
from .settings import TargetConfig, TargetSettings, read_settings
from .tokenizer import END_OF_TEXT, train_tokenizer
from .unlikelihood import NAME as UNLIKELIHOOD
from .unlikelihood import UNMIXED, train_against_loops

NAME = "target"
BITS = ("lr", "adamw_lr", "schedule", "warmup", "cooldown", "restarts", "clip", "dtype", "compile", "seed")
"""Keys of ``train`` that determine, with phases and shape, the weights of a trained target."""
USUAL = ("train.lr=0.004", "train.adamw_lr=null", "train.batch=24", "train.seed=0")
"""Options of a run that names no experiment."""
ROTATED = 0.25
"""Share of a hybrid's attention head that is rotated."""


def build_target(config: TargetConfig, seed: int) -> PreTrainedModel:
    """A new model; the deeper it is, the smaller the initial matrices that write to the residual stream."""
    torch.manual_seed(seed)
    model = _build_llama(config) if config.architecture == "llama" else _build_hybrid(config)
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


def _build_hybrid(config: TargetConfig) -> PreTrainedModel:
    """A new Qwen3.5 language model with dense MLPs, of transformers' class."""
    every = config.full_attention_interval
    kinds = ["full_attention" if (layer + 1) % every == 0 else RECURRENT for layer in range(config.num_hidden_layers)]
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            layer_types=kinds,
            linear_num_key_heads=config.linear_num_key_heads,
            linear_num_value_heads=config.linear_num_value_heads,
            linear_key_head_dim=config.linear_key_head_dim,
            linear_value_head_dim=config.linear_value_head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": ROTATED},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=True,
        )
    )


def weight_settings(config: TrainConfig, target: TargetConfig) -> dict[str, Any]:
    """Everything that determines the trained weights, except the text."""
    given = asdict(config)
    return {"variant": "none", "phases": config.schedule_phases, **{key: given[key] for key in BITS}, "target": target.shape()}


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
    config: TrainConfig, made: TargetSettings, streams: Streams, work: Path, device: str = "cpu", watch: Watch = unwatched
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train on ``device``, resuming from the checkpoints in ``work``; returns the model and its figures.

    Raises:
        ConfigError: sequences longer than the context or than the text, or what :func:`graphspec.train.loop.run` raises.
    """
    longest = max(length for _, _, length in config.schedule_phases)
    written = made.unlikelihood.length if made.unlikelihood.steps else 0
    for key, tokens in (("train.sequence_length", longest), ("unlikelihood.length", written)):
        if tokens > made.target.max_position_embeddings:
            expected = f"at most target.max_position_embeddings = {made.target.max_position_embeddings}"
            raise ConfigError(key, expected, tokens)
    if len(streams.train) <= longest + 1:
        raise ConfigError("train.data", f"more than {longest + 1} tokens to train on", len(streams.train))
    if len(streams.held_out) < 2:
        raise ConfigError("train.held_out", "at least two tokens", len(streams.held_out))
    model = build_target(made.target, config.seed).to(device)
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

    job = loop.Job(NAME, model, UNMIXED, loss, weight_settings(config, made.target), lambda means: {"loss": round(float(means), 4)})
    trained = loop.run(job, config, work, watch)
    against_loops: dict[str, Any] = {}
    if made.unlikelihood.steps:
        writer = build_target(made.target, config.seed).to(device)
        against_loops = train_against_loops(model, writer, streams.train, loss, config, made.unlikelihood, job.settings, work, watch)
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


def export_target(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    """Write config, generation config, weights (a tied embedding once) and tokenizer to ``out``."""
    make_folder(OUT, out)
    write_json(out / "config.json", {"architectures": [type(model).__name__], **decoder_facts(model), "use_cache": True}, OUT)
    ids = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    write_json(out / "generation_config.json", {**ids, "do_sample": False}, OUT)
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters() if name != "lm_head.weight"}
    save_weights(tensors, out / "model.safetensors")
    copy_tokenizer(tokenizer, out)


def run(config: LaunchConfig, made: TargetSettings, watch: Watch = unwatched) -> dict[str, Any]:
    """Train a target, resuming an interrupted run; returns the content of ``training.json``.

    Raises:
        ConfigError, CheckpointError, ResourceError, KeyboardInterrupt: as :func:`graphspec.train.run.run`.
    """
    train, vocab = config.train, made.target.vocab_size
    documents = Documents.read(train)
    work, out = folders(train)
    device, folder = set_up(config), work / "tokenizer"
    if not train.resume:
        clear(work, f"{NAME}.*", f"{UNLIKELIHOOD}*", "tokenizer/*")
    if not (folder / "tokenizer_config.json").exists():
        watch("tokenizer", 0, 1)
        train_tokenizer(documents.train.values(), vocab, folder)
        watch("tokenizer", 1, 1)
    tokenizer = Tokenizer(folder)
    end = tokenizer.special_tokens[END_OF_TEXT]
    streams = encode(documents, tokenizer, end, vocab, {"model.path": None, "target.vocab_size": vocab}, work, watch)
    prompts = held_out_prompts(train.acceptance, made.target.max_position_embeddings, streams.held_out)
    model, trained = train_target(train, made, streams, work, device, watch)
    export_target(model, folder, out)
    # Measure the published weights, which are rounded to bfloat16.
    nats, bits = bits_per_byte(load_target(out, torch.float32, device), streams.held_out, streams.facts["held_out_bytes"])
    outputs = continue_held_out(small_engine(config, str(out), config.variant, prompts), train.acceptance, prompts)
    figures = {
        "data": streams.facts,
        "training": trained,
        "published": {
            "held_out_loss": nats,
            "held_out_bits_per_byte": bits,
            "repeated_16_grams": round(repetition([output.token_ids for output in outputs]), 4),
            "samples": [
                {"prompt": tokenizer.decode(output.prompt_token_ids), "continuation": output.text}
                for output in outputs[: train.acceptance.samples]
            ],
        },
    }
    return record(NAME, figures, asdict(train) | asdict(made), out)


def headline(figures: dict[str, Any], out: str) -> str:
    """Last lines of the command's output."""
    published = figures["published"]
    loops = f"{100 * published['repeated_16_grams']:.1f} % of 16-grams repeated in greedy text"
    held_out = f"held out: {published['held_out_bits_per_byte']:.3f} bits per byte; {loops}"
    return f"{held_out}\ntarget written to {out} ({figures['megabytes']} MB)"


def options(words: Sequence[str]) -> tuple[LaunchConfig, TargetSettings]:
    """What the words of the command line say."""
    own = [word for word in words if word.startswith(("target.", "unlikelihood."))]
    rest = [word for word in words if word not in own]
    usual = [] if any(word.startswith("experiment=") for word in rest) else USUAL
    return load_config("variant=none", *usual, *rest), read_settings(TargetSettings, None, own)


def main(words: Sequence[str]) -> None:
    """Command line."""
    try:
        config, settings = options(words)
        with progress_bars(lines=True) as watch:
            figures = run(config, settings, watch)
    except GraphspecError as error:
        sys.exit(f"recipes.target: {error}")
    print(headline(figures, str(config.train.out)), flush=True)


if __name__ == "__main__":
    keep_freed_memory()
    main(sys.argv[1:])
