"""The loop of every training run: steps, learning rates, records, checkpoints, and going on where a run stopped, to the same bits.

Everything random is drawn from the seed and the number of the step, so a step is the whole position in the data; a checkpoint holds it with
the weights and the state of the optimizers and of their schedules.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..checks import brief
from ..errors import CheckpointError, ConfigError, ResourceError
from ..train_options import TrainConfig
from . import checkpoint
from .optim import Optimizers, phase_at

SMOOTHING = 0.95
"""Share of the old value in the running means that are shown and recorded."""
STATE_COPIES = 3
"""Numbers a checkpoint holds for each parameter, at most: itself and AdamW's two moments."""


class Watch(Protocol):
    """Called with a stage, its units done and in all, and a note of a few words."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


def unwatched(stage: str, done: int, total: int, note: str = "") -> None:
    """A :class:`Watch` that shows nothing."""


@dataclass(frozen=True)
class Job:
    """One network in training.

    Attributes:
        name: of the checkpoint ``<name>.pt``, of the records ``<name>.jsonl``, and of the stage.
        module: what is trained.
        unmixed: parts of the names of matrices that AdamW updates.
        loss: ``(step, batch, sequence length) -> (loss [], figures)``; running means are kept of the figures, a tensor of any shape.
        settings: everything that decides the bits, in values JSON has; a checkpoint of other settings is refused.
        describe: running means of the figures as a record, whose ``loss`` is shown.
    """

    name: str
    module: nn.Module
    unmixed: tuple[str, ...]
    loss: Callable[[int, int, int], tuple[Tensor, Tensor]]
    settings: Mapping[str, Any]
    describe: Callable[[Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Trained:
    """Result of a finished run: ``figures`` as the job describes them, ``seconds`` of training over all its sessions."""

    figures: dict[str, Any]
    seconds: float


def run(job: Job, config: TrainConfig, work: Path, watch: Watch = unwatched) -> Trained:
    """Train ``job.module`` to the end of the schedule, from the checkpoint in ``work`` where there is one.

    Raises:
        ConfigError: a loss that is no number any more, or no room for a checkpoint.
        CheckpointError: a checkpoint that can't be read, or one of other settings.
        ResourceError: a step needs more memory than there is.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    device = next(job.module.parameters()).device
    optimizers = Optimizers(job.module, config, job.unmixed)
    file, steps, phases = work / f"{job.name}.pt", config.total_steps, config.schedule_phases
    step, before = 0, 0.0
    means: Tensor | None = None
    if file.exists():
        state = checkpoint.load(file, device)
        check_settings(state, job.settings, file)
        job.module.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        step, before, means = state["step"], state["seconds"], state["means"]
    else:
        size = sum(p.numel() * p.element_size() for p in job.module.parameters())
        checkpoint.check_room(work, 2 * STATE_COPIES * size)
    log = checkpoint.Log(work / f"{job.name}.jsonl", step)

    def seconds() -> float:
        return before + time.monotonic() - began

    def save() -> None:
        assert means is not None, "a step was made"
        if not bool(means.isfinite().all()):
            raise ConfigError("train.lr", "a rate at which the loss stays finite", f"{brief(means.tolist())} after {step} steps")
        position = {"step": step, "seconds": seconds(), "means": means, "settings": dict(job.settings)}
        checkpoint.save(file, {"model": job.module.state_dict(), "optimizers": optimizers.state_dict(), **position})

    job.module.train()
    since, began = 0, time.monotonic()
    logged = began
    watch(job.name, step, steps, "" if step == 0 else f"from the checkpoint of step {step}")
    with finishing_steps() as stop:
        while step < steps:
            batch, length = phase_at(phases, step)
            rates = optimizers.rates
            with memory_named(batch, length):
                loss, figures = job.loss(step, batch, length)
                loss.backward()
                optimizers.step()
            now = figures.detach()
            means = now if means is None else SMOOTHING * means + (1 - SMOOTHING) * now
            step += 1
            since += batch * length
            if step % config.log_steps == 0 or step == steps:
                clock = time.monotonic()
                record = _record(job, config, step, since / max(clock - logged, 1e-9), seconds(), means, rates)
                since, logged = 0, clock
                log.write(record)
                watch(job.name, step, steps, _note(record))
            stopped = stop()
            if step % config.checkpoint_steps == 0 or step == steps or stopped:
                save()
            if stopped:
                raise KeyboardInterrupt
    assert means is not None, "a finished run made a step"
    return Trained(job.describe(means), seconds())


def _record(job: Job, config: TrainConfig, step: int, rate: float, seconds: float, means: Tensor, rates: list[float]) -> dict[str, Any]:
    left = tokens_until(config, config.total_steps) - tokens_until(config, step)
    return {
        "step": step,
        "steps": config.total_steps,
        "tokens": tokens_until(config, step),
        **job.describe(means),
        "learning_rates": rates,
        "tokens_per_second": round(rate, 1),
        "seconds": round(seconds, 2),
        "seconds_left": round(left / rate, 1),
    }


def _note(record: Mapping[str, Any]) -> str:
    loss = record["loss"]
    mean = sum(loss) / len(loss) if isinstance(loss, list) else loss
    minutes, seconds = divmod(round(record["seconds_left"]), 60)
    left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return f"loss {mean:.3f}, {record['tokens_per_second']:.0f} tokens/s, {left} left"


def tokens_until(config: TrainConfig, step: int) -> int:
    """Tokens read by the first ``step`` steps."""
    tokens = 0
    for steps, batch, length in config.schedule_phases:
        taken = min(step, steps)
        tokens += taken * batch * length
        step -= taken
    return tokens


def check_settings(state: Mapping[str, Any], settings: Mapping[str, Any], file: Path) -> None:
    """Compare a checkpoint's settings with those of the run.

    Raises:
        CheckpointError: they differ, or the file is another program's; names the first setting.
    """
    stored = state.get("settings")
    if not isinstance(stored, dict):
        raise CheckpointError(str(file), "a checkpoint of graphspec train", "a file of something else", "train.resume=false begins anew")
    for key, value in settings.items():
        if stored.get(key) != value:
            hint = "it was trained with other settings: train.resume=false begins anew, another train.work leaves it alone"
            raise CheckpointError(f"{file}: {key}", brief(value), brief(stored.get(key)), hint)


@contextmanager
def finishing_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM wait for the end of a step; yields what tells whether one came. A second one ends the process as it always did."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Signals reach the main thread alone.
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        restore()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    try:
        yield lambda: bool(came)
    finally:
        restore()


@contextmanager
def memory_named(batch: int, length: int) -> Iterator[None]:
    """Errors of memory that ran out, in our words.

    Raises:
        ResourceError: a step of ``batch`` sequences needs more than there is.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in text:
            raise
        raise ResourceError(
            "train.batch",
            f"memory for a step of {batch} sequences of {length} tokens",
            text.splitlines()[0] if text else "no more",
            "smaller train.batch or train.sequence_length",
        ) from error
