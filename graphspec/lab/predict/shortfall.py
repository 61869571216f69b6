"""When not even one row fits: how much memory is missing, and alternatives that fit, each with the command that plans it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...config.compose import load_config
from ...config.schema import VariantConfig
from ...errors import spell_bytes
from ...shapes import PLAIN
from .capacity import Capacity, capacity

if TYPE_CHECKING:
    from ...config.command_options import LaunchConfig
    from ...shapes import CycleShape
    from ..floor import FloorModel
    from .model_pair import ModelPair


@dataclass(frozen=True, slots=True)
class Alternative:
    """An alternative that fits.

    Attributes:
        what: in words.
        command: that plans it.
    """

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why not even one row fits.

    Attributes:
        needed, allowed: bytes of an engine with one row, and bytes that may be used.
        context: tokens of that row.
        alternatives: what would fit, the smallest change first.
    """

    needed: int
    allowed: int
    context: int
    alternatives: list[Alternative] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The first line of the answer."""
        return f"Does not fit: one row of {self.context} tokens needs {spell_bytes(self.needed)}, {spell_bytes(self.allowed)} may be used."

    def document(self) -> dict[str, Any]:
        """For ``format=json``."""
        alternatives = [{"what": each.what, "command": each.command} for each in self.alternatives]
        return {"needed": self.needed, "allowed": self.allowed, "context": self.context, "alternatives": alternatives}


def find_shortfall(
    config: LaunchConfig, pair: ModelPair, model: FloorModel, shape: CycleShape, found: Capacity, dtype: str, memory: int | None
) -> Shortfall | None:
    """None if a row fits, or if the memory is not known.

    Args:
        config: as composed.
        pair: facts of both models.
        model: their weights.
        shape: of the cycles that were planned.
        found: what fits with it.
        dtype: of the weights.
        memory: bytes of the hardware.
    """
    if found.rows != 0 or found.budget is None or memory is None:
        return None
    if shape.num_steps and config.variant.tree_choices is None:
        # The commands plan this shape, even if they would recommend another.
        steps, topk, nodes = shape.num_steps, shape.topk, shape.num_draft_tokens
        config = replace(config, variant=replace(config.variant, num_steps=steps, topk=topk, num_draft_tokens=nodes))
    return Shortfall(found.total, found.budget, found.context, list(_alternatives(config, pair, model, shape, found, dtype, memory)))


def _alternatives(
    config: LaunchConfig, pair: ModelPair, model: FloorModel, shape: CycleShape, found: Capacity, dtype: str, memory: int
) -> Iterator[Alternative]:
    if found.longest:
        yield Alternative(f"a row of at most {found.longest} tokens", _command(config, f"plan.context={found.longest}"))
    plain = replace(config, variant=VariantConfig(name="none"))
    alone = replace(pair, draft=None), replace(model, draft=None, draft_own=None, draft_weights=())
    if pair.draft is not None and _fits(plain, *alone, PLAIN, found.context, dtype, memory):
        yield Alternative("plain decoding, without the draft", _command(plain))
    for name, larger in sorted(_known_hardware(), key=lambda entry: entry[1]):
        if name != config.hardware.name and _fits(config, pair, model, shape, found.context, dtype, larger):
            yield Alternative(f"{name}, which has {spell_bytes(larger)}", _command(config, hardware=name))
            return


def _fits(config: LaunchConfig, pair: ModelPair, model: FloorModel, shape: CycleShape, context: int, dtype: str, memory: int) -> bool:
    single_batch = replace(config, plan=replace(config.plan, batches=[1]))
    found = capacity(single_batch, pair, model, shape, context, device="cuda", dtype=dtype, memory=memory)
    return bool(found.rows)


def _known_hardware() -> Iterator[tuple[str, int]]:
    """GPUs of the ``hardware`` group with their bytes of memory."""
    for file in files("graphspec.conf").joinpath("hardware").iterdir():
        name = file.name.removesuffix(".yaml")
        if name not in ("auto", "cpu"):
            hardware = load_config(f"hardware={name}").hardware
            if hardware.capacity_gib is not None:
                yield name, int(hardware.capacity_gib * 2**30)


def _command(config: LaunchConfig, *words: str, hardware: str | None = None) -> str:
    given = [f"model.path={config.model.path}", f"variant={config.variant.name}", f"hardware={hardware or config.hardware.name}"]
    if hardware is None and config.hardware.memory_gib is not None:
        given.append(f"hardware.memory_gib={config.hardware.memory_gib:g}")
    given += [f"variant.draft={config.variant.draft}"] if config.variant.draft is not None else []
    sizes = {key: getattr(config.variant, key) for key in ("num_steps", "topk", "num_draft_tokens")}
    given += [f"variant.{key}={value}" for key, value in sizes.items() if value is not None]
    if not any(word.startswith("plan.context=") for word in words) and config.plan.context is not None:
        given.append(f"plan.context={config.plan.context}")
    return shlex.join(["graphspec", "plan", *given, *words])
