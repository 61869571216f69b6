"""The loop of every training run: steps, learning rates, records, checkpoints, and resuming with bit-identical results.

All randomness is drawn from the seed and the number of the step, so that number is the whole position in the data; a checkpoint has it with
the weights and the states of the optimizers and their schedules.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config.checks import brief
from ..config.train_options import TrainConfig
from ..errors import CheckpointError, ConfigError, ResourceError
from . import checkpoint
from .optim import SCHEDULE, Optimizers, phase_at, same_until

SMOOTHING = 0.95
"""Weight of the old value in the running means that are shown and recorded."""
STATE_COPIES = 3
"""Most numbers per parameter in a checkpoint: the parameter and AdamW's two moments."""


class Watch(Protocol):
    """Called with a stage, the number of its units that are done, their total, and a note of a few words."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def unwatched(stage: str, done: int, total: int, note: str = "") -> None:
    """A :class:`Watch` that shows nothing."""


@dataclass(frozen=True)
class Job:
    """One network in training.

    Attributes:
        name: of the checkpoint ``<name>.pt``, the records ``<name>.jsonl``, and the stage.
        module: that is trained.
        unmixed: parts of the names of matrices that AdamW updates.
        loss: ``(step, batch, sequence length) -> (loss [], figures)``; of the figures, a tensor of any shape, running means are kept.
        settings: everything that determines the trained weights, as JSON values; a checkpoint with other settings is refused.
        describe: turns the running means of the figures into a record, whose ``loss`` is shown.
        computing: a context around a loss and its gradients, in which parameters may have other values than those that are updated.
    """

    name: str
    module: nn.Module
    unmixed: tuple[str, ...]
    loss: Callable[[int, int, int], tuple[Tensor, Tensor]]
    settings: Mapping[str, Any]
    describe: Callable[[Tensor], dict[str, Any]]
    computing: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Trained:
    """Result of a finished run: ``figures`` from :attr:`Job.describe`, and ``seconds`` of training, those before interruptions included."""

    figures: dict[str, Any]
    seconds: float


def run(job: Job, config: TrainConfig, work: Path, watch: Watch = unwatched) -> Trained:
    """Train ``job.module`` to the end of the schedule, from the checkpoint in ``work`` if there is one.

    Raises:
        ConfigError: a loss that is not finite, or no room for a checkpoint.
        CheckpointError: a checkpoint that can't be read, or one with other settings.
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
        check_settings(state, job.settings, file, config)
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
                with job.computing():
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


def check_settings(state: Mapping[str, Any], settings: Mapping[str, Any], file: Path, config: TrainConfig) -> None:
    """Compare a checkpoint's settings with those of the run. The schedule may differ in the steps to come.

    Raises:
        CheckpointError: they differ, of which the first setting is named, or the file was not written by ``graphspec train``.
    """
    stored = state.get("settings")
    if not isinstance(stored, dict):
        raise CheckpointError(str(file), "a checkpoint of graphspec train", "another kind of file", "train.resume=false starts again")
    prolonged = all(key in stored for key in SCHEDULE) and same_until(state["step"], config, stored)
    for key, value in settings.items():
        if stored.get(key) != value and not (prolonged and key in SCHEDULE):
            hint = "it was trained with other settings: train.resume=false starts again, another train.work leaves it alone"
            raise CheckpointError(f"{file}: {key}", brief(value), brief(stored.get(key)), hint)


@contextmanager
def finishing_steps() -> Iterator[Callable[[], bool]]:
    """A context in which Ctrl-C and SIGTERM wait for the end of a step; yields a function that says whether one came.

    A second signal has its usual effect.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals.
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
    """A context that turns out-of-memory errors into ours.

    Raises:
        ResourceError: a step of ``batch`` sequences needs more memory than there is.
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
