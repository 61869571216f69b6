"""Text written by the target itself: what its drafter is trained on, and what acceptance is measured on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from graphspec.errors import ConfigError


@dataclass
class TextConfig:
    """How much text the target writes, and how."""

    sets: list[list[int]] = field(default_factory=lambda: [[36, 128, 256], [6, 24, 768]])
    """``[batches, sequences per batch, tokens per sequence (prompt included)]``; one artefact per length."""
    prompt: list[int] = field(default_factory=lambda: [16, 64])
    """Shortest and longest prompt, in tokens."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0, 0.0, 0.8])
    """Batches take these in turn; 0 is greedy. A drafter meets both: greedy text is low in entropy, sampled text is varied."""
    seed: int = 1

    def __post_init__(self) -> None:
        if len(self.prompt) != 2 or not 1 <= self.prompt[0] <= self.prompt[1]:
            raise ConfigError("text.prompt", "[shortest, longest], both at least 1", self.prompt)
        for sizes in self.sets:
            if len(sizes) != 3 or min(sizes) < 1 or sizes[2] <= self.prompt[1]:
                raise ConfigError("text.sets", f"[batches, sequences, length] with a length above text.prompt's {self.prompt[1]}", sizes)
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError("text.temperatures", "at least one, none of them negative", self.temperatures)


class PreallocatedLayer(DynamicLayer):
    """A cache layer of fixed capacity that hands out views: no copy of the whole cache per generated token."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.is_initialized = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, G, T, D]`` keys and values; returns everything up to and including them."""
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


def cut_prompts(stream: np.ndarray, count: int, length: int, seed: int) -> torch.Tensor:
    """``[count, length]`` int64: windows of ``stream`` that begin at random tokens.

    Raises:
        ConfigError: ``stream`` is no longer than a prompt.
    """
    if len(stream) <= length:
        raise ConfigError("data", f"more text than one prompt of {length} tokens", f"{len(stream)} tokens")
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, count)
    return torch.from_numpy(np.stack([stream[s : s + length] for s in starts]))


@torch.inference_mode()
def continue_text(model: PreTrainedModel, prompt_BL: torch.Tensor, length: int, temperature: float, seed: int) -> torch.Tensor:
    """Continue prompts of equal length to ``length`` tokens: ``[B, length]`` int64 on the CPU, prompt included.

    An end-of-text token does not stop a row: what follows is the start of another document, as in the training stream.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    prompt_BL = prompt_BL.to(device)
    cache = Cache(layers=[PreallocatedLayer(length) for _ in range(model.config.num_hidden_layers)])
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


def text_file(work: Path, length: int) -> Path:
    """Where the sequences of ``length`` tokens lie."""
    return work / f"text_{length}.npz"


def generate_text(config: TextConfig, model: PreTrainedModel, train: np.ndarray, work: Path) -> None:
    """Write every set to :func:`text_file` (key ``tokens``, ``[sequences, length]`` int32). Resumes at the last finished batch."""
    parts = work / "text_parts"
    parts.mkdir(exist_ok=True)
    for batches, batch, length in config.sets:
        if text_file(work, length).exists():
            continue
        files = [parts / f"{length}_{index:03d}.npy" for index in range(batches)]
        for index, file in enumerate(files):
            if file.exists():
                continue
            started = time.monotonic()
            seed = config.seed * 1_000_003 + length * 1009 + index
            temperature = config.temperatures[index % len(config.temperatures)]
            prompt_length = int(np.random.default_rng(seed).integers(config.prompt[0], config.prompt[1] + 1))
            tokens = continue_text(model, cut_prompts(train, batch, prompt_length, seed), length, temperature, seed)
            unfinished = file.with_suffix(".tmp.npy")
            np.save(unfinished, tokens.numpy().astype(np.int32))
            unfinished.replace(file)
            rate = batch * (length - prompt_length) / (time.monotonic() - started)
            print(f"text length {length} batch {index + 1}/{batches} temperature {temperature} {rate:.0f} tok/s", flush=True)
        np.savez(text_file(work, length), tokens=np.concatenate([np.load(file) for file in files]))


def repetition(tokens_BT: torch.Tensor, begin: int, width: int = 16) -> float:
    """Share of the ``width``-token runs from ``begin`` on that occurred earlier in the same sequence: how much a text loops."""
    seen_again = total = 0
    for row in tokens_BT.tolist():
        seen: set[tuple[int, ...]] = set()
        for i in range(begin, len(row) - width + 1):
            run = tuple(row[i : i + width])
            seen_again += run in seen
            total += 1
            seen.add(run)
    return seen_again / max(1, total)
