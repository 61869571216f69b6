"""Inert data of a cycle: poisoned before every launch, without effect on any output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphspec.api.llm import SamplingParams
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key
from graphspec.graphs.stages.mailbox import Message
from graphspec.plan.buffers import POISON, Status
from graphspec.shapes import GraphKey
from tests.support.engines import CHAIN, TREE, Pair, Watched, idle_rows, ids, prompts, watch_schedulers

PLAIN: dict[str, Any] = {"variant": "none"}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {**PLAIN, "page_size": 4},
    "chain": {**CHAIN, "page_size": 4},
    "tree": {**TREE, "page_size": 1},
    "chain-ahead": {**CHAIN, "page_size": 16, "cycles_in_flight": 3},
    "tree-ahead": {**TREE, "page_size": 5, "cycles_in_flight": 3},
}
BUDGETS = [14, 3, 8, 1, 9, 11]


class Poisoner:
    """Poisons slots before every launch, and counts them, so that a test can't pass without poison."""

    def __init__(self, schedulers: list[Watched]) -> None:
        self.schedulers, self.done = schedulers, 0

    def before_launches(self, monkeypatch: pytest.MonkeyPatch, what: str) -> Callable[[Cycle, Key, Message], int]:
        """Poison with this method from now on; returns the launch without it."""
        launch = Cycle.launch

        def poisoned(cycle: Cycle, key: Key, message: Message) -> int:
            getattr(self, what)(cycle, key, message)
            return launch(cycle, key, message)

        monkeypatch.setattr(Cycle, "launch", poisoned)
        return launch

    def lanes(self, cycle: Cycle, key: Key, message: Message) -> None:
        """Every buffer of one cycle, padded lanes included."""
        cycle.arena.poison(("lane",))
        self.done += 1

    def free_pages(self, cycle: Cycle, key: Key, message: Message) -> None:
        """Every page without an owner that no request may find, and the dummy page."""
        allocator = self.schedulers[-1].allocator
        free = torch.tensor([owned == 0 and page not in allocator._key_of for page, owned in enumerate(allocator._owners)])
        assert free[0]
        for name in ("target_kv", "draft_kv", "page_feature"):
            if name in cycle.views(key).names:
                cycle.arena[name][:, :, free] = float("nan")
        self.done += int(free.sum()) > 1

    def unwritten_slots(self, cycle: Cycle, key: Key, message: Message) -> None:
        """Slots after the committed tokens on pages that rows do own."""
        if not isinstance(key, GraphKey):
            return
        size = cycle.plan.page_size
        for request in self.schedulers[-1].running:
            row = request.row
            if row.index not in message.lanes or cycle.arena["status_R"][row.index] != Status.LIVE:
                continue
            for slot in range(int(cycle.arena["seq_len_R"][row.index]), len(row.pages) * size):
                cycle.arena["target_kv"][:, :, row.pages[slot // size], slot % size] = float("nan")
                self.done += 1

    def windows(self, cycle: Cycle, key: Key, message: Message) -> None:
        """Window entries past each row's length."""
        token_RA, length_R = cycle.arena["window_token_RAc"], cycle.arena["window_len_R"]
        behind_RA = torch.arange(token_RA.shape[1]) >= length_R[:, None].clamp(min=1)
        token_RA[behind_RA] = POISON
        if "window_feature_RAcF" in cycle.views(key).names:
            cycle.arena["window_feature_RAcF"][behind_RA] = float("nan")
        self.done += int(behind_RA[list(message.lanes)].sum())

    def rows(self, cycle: Cycle, key: Key, message: Message) -> None:
        """Rows that are not live: free, finished with cycles still queued, and the dummy row. Prompts carry a feature on."""
        if not isinstance(key, GraphKey):
            return
        idle_R = idle_rows(cycle, self.schedulers[-1])
        for name in ("window_token_RAc", "seq_len_R", "budget_R", "draft_len_R", "stop_id_RE"):
            cycle.arena[name][idle_R] = POISON
        for name in ("temperature_R", "window_feature_RAcF"):
            if name in cycle.views(key).names:
                cycle.arena[name][idle_R] = float("nan")
        self.done += int(idle_R[:-1].sum())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("what", ["lanes", "free_pages", "unwritten_slots", "windows", "rows"])
def test_poison_does_not_move_the_output(pair: Pair, setting: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoner = Poisoner(watch_schedulers(monkeypatch))
    launch = poisoner.before_launches(monkeypatch, what)
    llm = pair.llm(**SETTINGS[setting], max_rows=4, buckets=[3, 4])
    prompt_ids = prompts(6)
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=n) for n, t in zip(BUDGETS, (0, 0, 1, 0, 0, 1), strict=True)
    ]
    outputs = llm.generate(prompt_ids, params)
    assert [o.finish_reason for o in outputs] == ["length"] * 6
    for prompt, param, output in zip(prompt_ids, params, outputs, strict=True):
        if param.temperature == 0:
            assert output.token_ids == pair.greedy(prompt, param.max_tokens, ignore_eos=True)
    monkeypatch.setattr(Cycle, "launch", launch)
    assert ids(llm.generate(prompt_ids, params)) == ids(outputs), "nothing is left either"
    if (setting, what) == ("none", "windows"):
        assert poisoner.done == 0, "plain decoding has windows of one entry"
    else:
        assert poisoner.done > 0


def test_poison_is_seen_where_it_should_be(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trick on slots that are read does change the outcome."""
    launch = Cycle.launch

    def poisoned(self: Cycle, key: Key, message: Message) -> int:
        if isinstance(key, GraphKey):
            self.arena["target_kv"].fill_(float("nan"))
        return launch(self, key, message)

    monkeypatch.setattr(Cycle, "launch", poisoned)
    outputs = pair.llm(**CHAIN).generate(prompts(2), SamplingParams(max_tokens=8))
    assert [o.finish_reason for o in outputs] == ["error", "error"]
