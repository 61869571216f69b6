"""Training a target against loops: sequence-level unlikelihood (Welleck et al. 2020, arXiv 1908.04319, section 5).

A small model that decodes greedily soon repeats itself. Every few steps the target continues prompts of its own training text greedily;
a token that completes a run already seen in that continuation is then made less likely, next to the usual loss on text.
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

from ..train_options import TrainConfig
from . import loop
from .checkpoint import write_array
from .generate import continue_text, cut_prompts, repetition
from .loop import Job, Watch

NAME = "unlikelihood"
UNMIXED = ("embed_tokens", "lm_head")
"""Parts of the names of matrices that AdamW updates."""


def repeated(tokens_BT: np.ndarray, begin: int, width: int) -> np.ndarray:
    """``[B, T]`` bool: the tokens that end a run of ``width`` tokens which occurred earlier in the same row; runs start at ``begin``."""
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

    ``1 - p`` is summed from the other tokens: where ``p`` is all but 1 a difference would lose every digit, and the gradient with them.
    """
    logits_BTV = logits_BTV.float()
    others_BTV = logits_BTV.scatter(-1, tokens_BT[..., None], float("-inf"))
    value_BT = logits_BTV.logsumexp(-1) - others_BTV.logsumexp(-1)
    return torch.where(mask_BT, value_BT, 0.0).sum() / mask_BT.numel()


class Continuations:
    """Greedy text of the target in training, written anew every ``train.unlikelihood.refresh`` steps.

    Args:
        config: of the run.
        stream: ``[tokens]`` the prompts are cut from.
        writer: a model of the target's shape, with attention that reads a cache.
        work: where each text is kept, for a run that goes on within a round.
    """

    def __init__(self, config: TrainConfig, stream: np.ndarray, writer: PreTrainedModel, work: Path) -> None:
        self.settings, self.seed = config.unlikelihood, config.seed
        self.stream, self.writer, self.work = stream, writer, work
        self.round = -1
        self.repeated = 0.0
        """Share of the runs of the current text that occurred before in it."""

    def at(self, step: int, model: PreTrainedModel) -> tuple[np.ndarray, np.ndarray]:
        """The step's batch of continuations ``[B, T]`` with their prompts, and the tokens of it that repeat, ``[B, T]``."""
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
    settings: Mapping[str, Any],
    work: Path,
    watch: Watch,
) -> dict[str, Any]:
    """Train ``model`` for ``train.unlikelihood.steps`` more, from the checkpoint in ``work`` where there is one; returns its figures.

    Args:
        model: a target whose schedule is finished.
        writer: another model of its shape, with attention that reads a cache.
        stream: ``[tokens]`` of the training text.
        likelihood: ``(step, batch, length)`` to the usual loss on text and its figure.
        config: of the run; batch and length of the text are those of its first phase.
        settings: what decided the target's bits so far.
    """
    options = config.unlikelihood
    _, batch, length = config.schedule_phases[0]
    schedule = replace(
        config, phases=[[options.steps, batch, length]], steps=None, tokens=None, lr=options.lr, adamw_lr=None,
        schedule="linear", warmup=None, cooldown=None, restarts=[],
    )  # fmt: skip
    texts, device, begin = Continuations(config, stream, writer, work), model.device, options.prompt

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
