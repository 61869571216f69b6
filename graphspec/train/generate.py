"""Text written by the target, on which its drafter is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..api.llm import LLM
from ..config.command_options import LaunchConfig
from ..config.schema import VariantConfig
from ..config.train_options import TextConfig, TrainConfig
from ..engine.request import SamplingParams
from ..errors import ConfigError
from .checkpoint import check_text_settings, write_array
from .loop import Watch, unwatched
from .written import REUSE, engine_for

SEQUENCES = 128
"""Default of the most sequences that are written at once."""


def cut_prompts(stream: np.ndarray, count: int, length: int, seed: int) -> torch.Tensor:
    """``[count, length]`` int64: windows of ``stream`` that begin at random tokens.

    Raises:
        ConfigError: ``stream`` is no longer than a prompt.
    """
    if len(stream) <= length:
        raise ConfigError("train.data", f"more text than one prompt of {length} tokens", f"{len(stream)} tokens")
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, count)
    return torch.from_numpy(np.stack([stream[s : s + length] for s in starts]).astype(np.int64))


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
    config: LaunchConfig, sets: list[list[int]], context: int, train: np.ndarray, work: Path, watch: Watch = unwatched
) -> dict[int, np.ndarray]:
    """Write every set to its :func:`text_file`, int32 ``[sequences, length]``, resuming after the last batch; returns them by length.

    An end of text does not stop a sequence: it is followed by the beginning of another document, as in the training stream.

    Args:
        config: of the run.
        sets: ``[batches, sequences, length]``.
        context: the longest that the target can read.
        train: the training stream, from which prompts are cut.
        work: folder of the files.
        watch: called with progress.

    Raises:
        ConfigError: too little text for a prompt, a length beyond the target's context, or text with other settings in ``work``.
    """
    text, parts = config.train.text, work / "text_parts"
    parts.mkdir(exist_ok=True)
    for _, _, length in sets:
        if length > context:
            raise ConfigError("train.text.sets", f"lengths within the target's context of {context}", length)
        if length <= text.prompt[1]:
            raise ConfigError("train.text.prompt", f"prompts shorter than the sequences of {length} tokens", text.prompt)
    for batches, batch, length in sets:
        settings = {"batches": batches, "sequences": batch, "prompt": text.prompt, "temperatures": text.temperatures, "seed": text.seed}
        check_text_settings(work / f"text_{length}.json", settings)
        if text_file(work, length).exists():
            continue
        files = [parts / f"{length}_{index:03d}.npy" for index in range(batches)]
        llm: LLM | None = None
        for index, file in enumerate(files):
            watch(f"text of {length} tokens", index, batches)
            if file.exists():
                continue
            if llm is None:
                rows, size = min(batch, text.batch), batches * batch * length
                llm = engine_for(config, config.model.path, VariantConfig(name="none"), rows=rows, context=length, tokens=size)
            write_array(file, _continued(llm, text, train, batch, length, index))
        if llm is not None:
            llm.close()
        watch(f"text of {length} tokens", batches, batches)
        write_array(text_file(work, length), np.concatenate([np.load(file) for file in files]))
    return {length: np.load(text_file(work, length)) for _, _, length in sets}


def _continued(llm: LLM, text: TextConfig, train: np.ndarray, batch: int, length: int, index: int) -> np.ndarray:
    """Batch ``index`` of a set: int32 ``[batch, length]``, prompts included."""
    seed = text.seed * 1_000_003 + length * 1009 + index
    temperature = text.temperatures[index % len(text.temperatures)]
    prompt = int(np.random.default_rng(seed).integers(text.prompt[0], text.prompt[1] + 1))
    params = [
        SamplingParams(max_tokens=length - prompt, temperature=temperature, seed=seed * batch + row, ignore_eos=True, detokenize=False)
        for row in range(batch)
    ]
    outputs = llm.generate(cut_prompts(train, batch, prompt, seed).tolist(), params)
    return np.array([[*output.prompt_token_ids, *output.token_ids] for output in outputs], dtype=np.int32)
