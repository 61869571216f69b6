"""Text written by the target, on which its drafter is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ..config.train_options import TextConfig, TrainConfig
from ..errors import ConfigError
from .checkpoint import write_array, write_json
from .facts import RECURRENT
from .loop import Watch, unwatched
from .written import REUSE

SEQUENCES = 128
"""Default of the most sequences that are written at once."""


class PreallocatedLayer(DynamicLayer):
    """A cache layer of fixed capacity that returns views, so that a generated token does not copy the whole cache."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.is_initialized = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values ``[B, G, T, D]``; returns all up to and including them."""
        if not self.is_initialized:
            batch, heads, _, dim = key_states.shape
            self.keys = key_states.new_empty(batch, heads, self.capacity, dim)
            self.values = torch.empty_like(self.keys)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        begin, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, begin : self.length] = key_states
        self.values[:, :, begin : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length


def preallocated_cache(model: PreTrainedModel, capacity: int) -> Cache:
    """A cache for ``capacity`` tokens; recurrent layers have a state of fixed size instead."""
    kinds = getattr(model.config, "layer_types", None) or [None] * model.config.num_hidden_layers
    return Cache(layers=[LinearAttentionLayer() if kind == RECURRENT else PreallocatedLayer(capacity) for kind in kinds])


def cut_prompts(stream: np.ndarray, count: int, length: int, seed: int) -> torch.Tensor:
    """``[count, length]`` int64: windows of ``stream`` that begin at random tokens.

    Raises:
        ConfigError: ``stream`` is no longer than a prompt.
    """
    if len(stream) <= length:
        raise ConfigError("train.data", f"more text than one prompt of {length} tokens", f"{len(stream)} tokens")
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, count)
    return torch.from_numpy(np.stack([stream[s : s + length] for s in starts]).astype(np.int64))


@torch.inference_mode()
def continue_text(model: PreTrainedModel, prompt_BL: torch.Tensor, length: int, temperature: float, seed: int) -> torch.Tensor:
    """Continue prompts of equal length to ``length`` tokens: ``[B, length]`` int64 on the CPU, prompt included.

    An end-of-text token does not stop a row: it is followed by the beginning of another document, as in the training stream.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    prompt_BL = prompt_BL.to(device)
    cache = preallocated_cache(model, length)
    out_BT = torch.empty(len(prompt_BL), length, dtype=torch.int64, device=device)
    begin = prompt_BL.shape[1]
    out_BT[:, :begin] = prompt_BL
    step_BT = prompt_BL
    for position in range(begin, length):
        logits_BV = model(step_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if temperature == 0.0:
            step_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            step_BT = torch.multinomial(torch.softmax(logits_BV.float() / temperature, -1), 1, generator=generator)
        out_BT[:, position] = step_BT[:, 0]
    return out_BT.cpu()


def text_sets(config: TrainConfig) -> list[list[int]]:
    """``train.text.sets``, or sets derived from the schedule: ``[batches, sequences, length]`` for each of its lengths."""
    if config.text.sets is not None:
        return config.text.sets
    if config.raw_share == 1.0 or not any(source.is_text for source in config.sources):
        return []
    rows: dict[int, int] = {}
    for steps, batch, length in config.schedule_phases:
        rows[length] = rows.get(length, 0) + steps * batch
    sets = []
    for length, count in rows.items():
        sequences = max(1, round(count * (1 - config.raw_share) / REUSE))
        batches = max(-(-sequences // SEQUENCES), min(len(config.text.temperatures), sequences))
        sets.append([batches, -(-sequences // batches), length])
    return sets


def text_file(work: Path, length: int) -> Path:
    """The file of the sequences of ``length`` tokens."""
    return work / f"text_{length}.npy"


def generate_text(
    config: TextConfig, sets: list[list[int]], model: PreTrainedModel, train: np.ndarray, work: Path, watch: Watch = unwatched
) -> dict[int, np.ndarray]:
    """Write every set to its :func:`text_file`, int32 ``[sequences, length]``, resuming after the last batch; returns them by length.

    Raises:
        ConfigError: too little text for a prompt, a length beyond the target's context, or text with other settings in ``work``.
    """
    parts = work / "text_parts"
    parts.mkdir(exist_ok=True)
    for _, _, length in sets:
        if length > model.config.max_position_embeddings:
            raise ConfigError("train.text.sets", f"lengths within the target's context of {model.config.max_position_embeddings}", length)
        if length <= config.prompt[1]:
            raise ConfigError("train.text.prompt", f"prompts shorter than the sequences of {length} tokens", config.prompt)
    for batches, batch, length in sets:
        settings = {
            "batches": batches,
            "sequences": batch,
            "prompt": config.prompt,
            "temperatures": config.temperatures,
            "seed": config.seed,
        }
        _check_text(work / f"text_{length}.json", settings)
        if text_file(work, length).exists():
            continue
        files = [parts / f"{length}_{index:03d}.npy" for index in range(batches)]
        for index, file in enumerate(files):
            watch(f"text of {length} tokens", index, batches)
            if file.exists():
                continue
            seed = config.seed * 1_000_003 + length * 1009 + index
            temperature = config.temperatures[index % len(config.temperatures)]
            prompt_length = int(np.random.default_rng(seed).integers(config.prompt[0], config.prompt[1] + 1))
            tokens = continue_text(model, cut_prompts(train, batch, prompt_length, seed), length, temperature, seed)
            write_array(file, tokens.numpy().astype(np.int32))
        watch(f"text of {length} tokens", batches, batches)
        write_array(text_file(work, length), np.concatenate([np.load(file) for file in files]))
    return {length: np.load(text_file(work, length)) for _, _, length in sets}


def _check_text(file: Path, settings: dict[str, Any]) -> None:
    if not file.exists():
        write_json(file, settings)
        return
    stored = json.loads(file.read_text(encoding="utf-8"))
    for key, value in settings.items():
        if stored.get(key) != value:
            hint = "another train.work leaves it alone, train.resume=false starts again"
            raise ConfigError(f"{file}: {key}", value, stored.get(key), hint)
