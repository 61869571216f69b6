"""Training a target against loops: sequence-level unlikelihood (Welleck et al. 2020, arXiv 1908.04319, section 5).

A small model that decodes greedily soon repeats itself. Every few steps the target continues prompts of its training text greedily; in
addition to the usual loss on text, tokens that complete a run which occurred before in the same continuation are made less likely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphspec.config.train_options import TrainConfig
from graphspec.train import loop
from graphspec.train.checkpoint import write_array
from graphspec.train.filters import repetition
from graphspec.train.generate import cut_prompts
from graphspec.train.loop import Job, Watch

from .continuation import continue_text
from .settings import UnlikelihoodConfig

NAME = "unlikelihood"
UNMIXED = ("embed_tokens", "lm_head")
"""Parts of the names of matrices that AdamW updates."""


def repeated(tokens_BT: np.ndarray, begin: int, width: int) -> np.ndarray:
    """Bool ``[B, T]``: tokens that end a run of ``width`` tokens which occurred earlier in the same row; runs start from ``begin`` on."""
    mask = np.zeros(tokens_BT.shape, dtype=bool)
    for row, flags in zip(tokens_BT, mask, strict=True):
        seen: set[tuple[int, ...]] = set()
        for end in range(begin + width, len(row) + 1):
            run = tuple(row[end - width : end].tolist())
            flags[end - 1] = run in seen
            seen.add(run)
    return mask


def unlikelihood(logits_BTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """``[]``: ``-log(1 - p)`` of the masked tokens, summed and divided by the number of all tokens.

    ``1 - p`` is summed from the other tokens: for ``p`` close to 1 a difference would lose all digits, and with them the gradient.
    """
    logits_BTV = logits_BTV.float()
    others_BTV = logits_BTV.scatter(-1, tokens_BT[..., None], float("-inf"))
    value_BT = logits_BTV.logsumexp(-1) - others_BTV.logsumexp(-1)
    return torch.where(mask_BT, value_BT, 0.0).sum() / mask_BT.numel()


class Continuations:
    """Greedy text of the target in training, written again every ``unlikelihood.refresh`` steps.

    Args:
        settings: of the run.
        seed: of the run.
        stream: ``[tokens]`` from which prompts are cut.
        writer: a model of the target's shape, with attention that uses a cache.
        work: folder of the current text, for a run that is resumed before the next refresh.
    """

    def __init__(self, settings: UnlikelihoodConfig, seed: int, stream: np.ndarray, writer: PreTrainedModel, work: Path) -> None:
        self.settings, self.seed = settings, seed
        self.stream, self.writer, self.work = stream, writer, work
        self.round = -1
        self.repeated = 0.0
        """Share of the runs of the current text that occurred earlier in it."""

    def at(self, step: int, model: PreTrainedModel) -> tuple[np.ndarray, np.ndarray]:
        """The step's batch of prompts with continuations ``[B, T]``, and a mask ``[B, T]`` of its repeating tokens."""
        settings = self.settings
        number, place = divmod(step, settings.refresh)
        if number != self.round:
            file = self.work / f"{NAME}_{number}.npy"
            if place == 0:
                write_array(file, self._write(number, model))
            self.round, self.tokens = number, np.load(file)
            self.mask = repeated(self.tokens, settings.prompt, settings.width)
            self.repeated = repetition(self.tokens[:, settings.prompt :].tolist(), settings.width)
        chosen = np.random.default_rng([self.seed, step]).choice(len(self.tokens), settings.batch, replace=False)
        return self.tokens[chosen], self.mask[chosen]

    def _write(self, number: int, model: PreTrainedModel) -> np.ndarray:
        self.writer.load_state_dict(model.state_dict())
        prompts = cut_prompts(self.stream, self.settings.sequences, self.settings.prompt, self.seed * 1_000_003 + number)
        return continue_text(self.writer, prompts, self.settings.length, 0.0, 0).numpy().astype(np.int32)


def train_against_loops(
    model: PreTrainedModel,
    writer: PreTrainedModel,
    stream: np.ndarray,
    likelihood: Callable[[int, int, int], tuple[Tensor, Tensor]],
    config: TrainConfig,
    options: UnlikelihoodConfig,
    settings: Mapping[str, Any],
    work: Path,
    watch: Watch,
) -> dict[str, Any]:
    """Train ``model`` for another ``options.steps``, resuming from the checkpoint in ``work``; returns its figures.

    Args:
        model: a target that was trained to the end of its schedule.
        writer: another model of its shape, with attention that uses a cache.
        stream: ``[tokens]`` of the training text.
        likelihood: ``(step, batch, length)`` to the usual loss on text and its figure.
        config: of the run; batch and length of the text are those of its first phase.
        options: of these steps.
        settings: that determined the target's weights so far.
    """
    _, batch, length = config.schedule_phases[0]
    schedule = replace(
        config, phases=[[options.steps, batch, length]], steps=None, tokens=None, lr=options.lr, adamw_lr=None,
        schedule="linear", warmup=None, cooldown=None, restarts=[],
    )  # fmt: skip
    texts, device, begin = Continuations(options, config.seed, stream, writer, work), model.device, options.prompt

    def loss(step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        tokens, mask = texts.at(step, model)
        tokens_BT, mask_BT = torch.from_numpy(tokens.astype(np.int64)).to(device), torch.from_numpy(mask).to(device)
        usual, _ = likelihood(config.total_steps + step, batch, length)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            logits = model(tokens_BT[:, :-1], use_cache=False).logits
        loops = unlikelihood(logits[:, begin - 1 :], tokens_BT[:, begin:], mask_BT[:, begin:])
        return usual + options.weight * loops, torch.stack([usual.detach(), loops.detach(), usual.new_tensor(texts.repeated)])

    def describe(means: Tensor) -> dict[str, Any]:
        return {key: round(value, 4) for key, value in zip(("loss", NAME, "repeated"), means.tolist(), strict=True)}

    job = Job(NAME, model, UNMIXED, loss, {**settings, NAME: asdict(options)}, describe)
    trained = loop.run(job, schedule, work, watch)
    return {**asdict(options), **trained.figures, "seconds": round(trained.seconds)}
