"""The device matcher, fused, against lists: blocks of history, long lists of occurrences, counters left at zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import INTERPRETED, semaphores
from graphspec.kernels.groups import Candidates
from graphspec.kernels.tree.fused import ngram_match as module
from graphspec.kernels.tree.ngram_match import match_rows
from graphspec.plan.buffers import POISON, Status
from tests.kernels.test_ngram_match import as_entries, best_paths, pool_of, problems

OP = op_of("ngram_match")

DEVICE = "cpu" if INTERPRETED else "cuda"


def rows(histories: list[list[int]], width: int) -> dict[str, Tensor]:
    """One live row for each history, poison after it, and a row that is not live; lanes in another order than the rows."""
    count = len(histories)
    history = torch.full((count + 1, width), POISON)
    for r, tokens in enumerate(histories):
        history[r, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return {
        "history_RL": history,
        "lane_row_B": torch.arange(count, -1, -1),
        "status_R": torch.tensor([*[Status.LIVE if h else Status.FREE for h in histories], Status.LENGTH]),
        "seq_len_R": torch.tensor([*[len(h) - 1 if h else POISON for h in histories], POISON]),
    }


def match(
    case: dict[str, Tensor], num_paths: int, depth: int, low: int, high: int, function: Any = module.ngram_match
) -> tuple[Tensor, ...]:
    lanes = case["lane_row_B"].shape[0]
    score = torch.full((lanes, num_paths * depth), math.nan, device=DEVICE)
    pool = (score, *(torch.full((lanes, num_paths * depth), POISON, device=DEVICE) for _ in range(2)))
    function(*(x.to(DEVICE) for x in case.values()), Candidates(*pool), num_paths, depth, low, high)
    assert not semaphores(torch.device(DEVICE), 2 * lanes).any()
    return tuple(x.cpu() for x in pool)


def check(histories: list[list[int]], width: int, num_paths: int, depth: int, low: int, high: int) -> None:
    found = match(rows(histories, width), num_paths, depth, low, high)
    for lane, tokens in enumerate([[], *reversed(histories)]):
        assert as_entries(found, lane) == pool_of(best_paths(tokens, num_paths, depth, low, high), num_paths, depth)


@given(problems(), st.sampled_from([2, 8, 64]))
@settings(max_examples=10, deadline=None)
def test_pool_is_that_of_the_oracle(problem: tuple[list[list[int]], int, int, int, int, int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(module, "MERGE", 4)
        check(*problem)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1026, 2050])
def test_occurrences_on_both_sides_of_a_block(length: int) -> None:
    """The match ends in the first block and its continuation in the second; the context limit is far off."""
    history = list(range(3, 3 + length))
    for n, at in enumerate((1018, 1020, 1022, 1024, 7)):
        if at + 3 < length:
            history[at : at + 3] = [1, 2, 5000 + n]
    history[-2:] = [1, 2]
    check([history], 5000, 3, 4, 1, 6)


def test_a_repeating_history_lists_every_position() -> None:
    check([[7] * 600, [4, 6, 4] * 190], 700, 2, 3, 1, 4)


def test_blocks_past_the_row_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs arrive as the row has blocks: with one more or one fewer, none would be the last."""
    monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(module, "MERGE", 8)
    for length in (1, 8, 9, 10, 17):
        check([[5] * length, [1]], 40, 1, 2, 1, 3)


def test_runs_and_batches_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    histories = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in (40, 13, 24)]
    case = rows(histories, 100)
    first, second = match(case, 2, 3, 1, 8), match(case, 2, 3, 1, 8)
    for lane in range(4):
        alone = match({**case, "lane_row_B": case["lane_row_B"][lane : lane + 1]}, 2, 3, 1, 8)
        for a, b, c in zip(first, second, alone, strict=True):
            assert torch.equal(a[lane], b[lane]) and torch.equal(a[lane], c[0])


def test_the_op_takes_rows_where_the_matcher_takes_lanes() -> None:
    case = rows([[1, 2, 3, 1, 2], [4, 4, 4]], 9)
    found = match(case, 2, 3, 1, 3, OP.reference)
    expected = match_rows(case["history_RL"][case["lane_row_B"]], torch.tensor([0, 3, 5]), 2, 3, 1, 3)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)
