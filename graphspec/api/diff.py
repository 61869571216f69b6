"""Two interpreters of one program side by side: the first slot that differs, and after which stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config.schema import Config
from ..engine.request import measured_params
from ..errors import ConfigError
from ..graphs.cycle import Cycle, RingEntry
from ..graphs.programs import Key
from ..graphs.stages.mailbox import Message
from ..plan.buffers import Arena
from .llm import LLM
from .prompts import Prompt

RELATIVE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Float slots of different kernels agree to this share of the slot's largest magnitude; integers, and equal kernels, agree exactly."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The first difference of two interpreters.

    Attributes:
        equal: they never did.
        launches: launches compared.
        cycle: launch of the first difference, prefill chunks counted.
        stage: stage after which it shows; ``program`` when a side is captured and has no stages to stop at.
        slot: the slot.
        detail: the first differing element and the size of the difference.
    """

    equal: bool
    launches: int
    cycle: int | None = None
    stage: str | None = None
    slot: str | None = None
    detail: str = ""


class ComparingLauncher:
    """A launcher that runs every program on two cycles from one state and compares after every stage."""

    def __init__(self, left: Cycle, right: Cycle) -> None:
        self.left, self.right = left, right
        self.exact = left.plan.kernels == right.plan.kernels and left.plan.attention == right.plan.attention
        self.launches = 0
        self.report: DiffReport | None = None

    @property
    def in_flight(self) -> int:
        return self.left.in_flight

    def read(self, ticket: int) -> RingEntry:
        return self.left.read(ticket)

    def launch(self, key: Key, message: Message) -> int:
        if self.report is None:
            self._compare(key, message)
        self.launches += 1
        return self.left.launch(key, message)

    def _compare(self, key: Key, message: Message) -> None:
        for shared in message.shared:
            self.left.share(shared)
        before = self.left.arena.snapshot()
        arenas = (self.left.arena, self.right.arena)
        programs = (self.left.programs[key], self.right.programs[key])
        mail = torch.zeros(self.left.layout.size, dtype=torch.int64)
        self.left.layout.encode(message, mail)
        for arena in arenas:
            arena["mail"].copy_(mail)
            arena.restore(before)
        with torch.no_grad():
            if any(p.replay for p in programs):
                for program in programs:
                    program()
                self._check("program", sorted({name for s in programs[0].stages for name in s.writes}), arenas)
            else:
                for stage, left, right in zip(programs[0].stages, programs[0].steps, programs[1].steps, strict=True):
                    left()
                    right()
                    self._check(stage.name, stage.writes, arenas)
        self.left.arena.restore(before)

    def _check(self, stage: str, names: tuple[str, ...] | list[str], arenas: tuple[Arena, Arena]) -> None:
        if self.report is not None:
            return
        for name in names:
            detail = difference(comparable(arenas[0], name), comparable(arenas[1], name), exact=self.exact)
            if detail:
                self.report = DiffReport(False, self.launches, self.launches, stage, name, detail)
                return


def comparable(arena: Arena, name: str) -> Tensor:
    """The slot without its meaningless parts: the dummy page and the dummy row."""
    tensor = arena[name]
    slot = next(s for s in arena.slots if s.name == name)
    if slot.kind == "kv":
        return tensor[:, :, 1:]
    return tensor[:-1] if slot.dims[0] == "R" else tensor


def difference(left: Tensor, right: Tensor, *, exact: bool) -> str:
    """Empty when equal, else what differs first. NaN equals NaN."""
    if not left.is_floating_point() or exact:
        differs = (left != right) & ~((left != left) & (right != right))
    else:
        scale = left.nan_to_num(0, 0, 0).abs().max().float()
        apart = (left.float() - right.float()).abs() > RELATIVE[left.dtype] * scale
        differs = torch.where(left.isfinite() & right.isfinite(), apart, (left != right) & ~(left.isnan() & right.isnan()))
    where = differs.nonzero()
    if not len(where):
        return ""
    index = tuple(where[0].tolist())
    return f"{list(index)}: {left[index].item()} against {right[index].item()}, {len(where)} of {left.numel()} elements differ"


def diff(config: Config, left: str, right: str, prompt: Prompt, max_tokens: int = 32) -> DiffReport:
    """Generate from ``prompt`` under runtime ``left`` while ``right`` runs every launch from the same state.

    Raises:
        ConfigError: a runtime that does not exist or can't run here, or kernels with a host step before each launch.
        RequestError: a prompt that can't be served.
    """
    sides = [LLM.from_config(replace(config, runtime=replace(config.runtime, name=name))) for name in (left, right)]
    if any(side.cycle.preparation is not None for side in sides):
        found = config.kernels.attention
        raise ConfigError("kernels.attention", "one without a host step before each launch: the right side launches nothing itself", found)
    params = measured_params(config.sampling, max_tokens=max_tokens, stop_token_ids=(), ignore_eos=False)
    sides[0].check(prompt, params)
    for side in sides:
        side.warm_up(sampling=params.sampling_class)
    comparing = ComparingLauncher(sides[0].cycle, sides[1].cycle)
    sides[0].generate(prompt, params, launcher=comparing)
    return comparing.report or DiffReport(True, comparing.launches)
