"""One level of beams, fused and reference, against lists; and all levels of a draft."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import INTERPRETED
from graphspec.kernels.groups import Beams, Candidates
from graphspec.kernels.tree.draft_level import draft_level
from graphspec.kernels.tree.draft_window import LIVE
from graphspec.kernels.tree.fused.draft_level import draft_level as fused
from graphspec.kernels.tree.mail_apply import FREE
from graphspec.plan.buffers import POISON, Status
from tests.kernels.cases import cases_of

OP = op_of("draft_level")

DEVICE = "cpu" if INTERPRETED else "cuda"
INF = math.inf
BEAMS = Beams._fields


def slots(lanes: int, topk: int, steps: int, num_words: int) -> dict[str, Tensor]:
    """Every slot, poisoned."""
    sizes = {"B": lanes, "K": topk, "S": steps, "X": num_words, "M": topk + (steps - 1) * topk**2}
    found = {n: torch.full([sizes[d] for d in n.rpartition("_")[2]], POISON, device=DEVICE) for n in OP.mutates}
    found["candidate_score_BM"] = torch.full((lanes, sizes["M"]), math.nan, device=DEVICE)
    found["beam_valid_BK"] = torch.ones(lanes, topk, dtype=torch.bool, device=DEVICE)
    return found


def pool_and_beams(found: dict[str, Tensor]) -> tuple[Candidates, Beams]:
    return Candidates(*(found[name] for name in Candidates._fields)), Beams(*(found[name] for name in BEAMS))


def bits(words: Tensor) -> set[int]:
    return {64 * x + j for x, word in enumerate(words.tolist()) for j in range(64) if (word >> j) & 1}


class Oracle:
    """The beams of one lane as Python objects."""

    def __init__(self, live: bool, sequence: int, topk: int, shift: int) -> None:
        self.live, self.sequence, self.topk, self.shift = live, sequence, topk, shift
        self.pool: list[tuple[float, int, int]] = []
        self.beams: list[dict[str, Any]] = []

    def level(self, increments: list[list[float]], tokens: list[list[int]], level: int) -> None:
        above = self.beams or [{"score": 0.0, "valid": self.live, "index": -1, "path": [], "seen": set()}]
        fresh = []
        for source, beam in enumerate(above):
            for increment, token in zip(increments[source], tokens[source], strict=True):
                # float32 addition
                score = float(torch.tensor(beam["score"]) + torch.tensor(increment)) if beam["valid"] else -INF
                score = -INF if math.isnan(score) else score
                fresh.append((score, token, source, len(self.pool)))
                self.pool.append((score, token, beam["index"]))
        best = sorted(fresh, key=lambda c: (-c[0], c[3]))[: self.topk]
        self.beams = [
            {
                "score": score, "token": token if score > -INF else -1, "index": index, "source": source,
                "valid": self.live and score > -INF, "path": [*above[source]["path"], token],
                "seen": above[source]["seen"] | {(level - 1) * self.topk + b},
                "slot": self.sequence + 1 + (level - 1) * self.topk + b, "position": self.sequence + level - self.shift,
            }
            for b, (score, token, source, index) in enumerate(best)
        ]  # fmt: skip


@pytest.mark.parametrize("function", [draft_level, fused], ids=["reference", "fused"])
@pytest.mark.parametrize(("topk", "steps", "num_words"), [(1, 6, 1), (2, 4, 1), (3, 5, 1), (8, 4, 1), (17, 5, 2)])
def test_levels_are_those_of_lists(function: Any, topk: int, steps: int, num_words: int) -> None:
    generator = torch.Generator().manual_seed(topk)
    status = torch.tensor([LIVE, FREE, LIVE, Status.STOPPED])
    sequence = torch.tensor([40, POISON, 0, POISON])
    row = torch.tensor([2, 1, 0, 3, 3])
    found = slots(5, topk, steps, num_words)
    lanes = [Oracle(status[r] == LIVE, int(sequence[r]), topk, steps % 2) for r in row]
    for level in range(1, steps + 1):
        rows = 1 if level == 1 else topk
        increment = -torch.rand(5, rows, topk, generator=generator).mul(6).round() / 4
        increment = increment.sort(-1, descending=True).values
        increment[0, rows // 2, topk // 2 :] = -INF
        increment[2, -1, -1] = math.nan
        if level == 2:
            increment[2] = -INF
        token = torch.randint(0, 99, (5, rows, topk), generator=generator)
        before = {name: found[name].clone() for name in BEAMS}
        arguments = (increment, token, level, level < steps, steps % 2, row, status, sequence)
        function(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments), *pool_and_beams(found))
        for b, lane in enumerate(lanes):
            lane.level(increment[b].tolist(), token[b].tolist(), level)
            pool = zip(*(found[name][b].tolist() for name in OP.mutates[:3]), strict=True)
            assert list(pool)[: len(lane.pool)] == lane.pool
        if level == steps:
            assert all(torch.equal(found[name], before[name]) for name in BEAMS), "the last level has no beams"
            continue
        for b, lane in enumerate(lanes):
            for name in ("token", "index", "source", "valid", "slot", "position"):
                assert found[f"beam_{name}_BK"][b].tolist() == [beam[name] for beam in lane.beams], name
            for k, beam in enumerate(lane.beams):
                assert found["beam_path_BKS"][b, k].tolist() == [*beam["path"], *[POISON] * (steps - level)]
                assert bits(found["beam_ancestors_BKX"][b, k]) == (beam["seen"] if beam["valid"] else set())
            assert int(found["beam_end_B"][b]) == lane.sequence + 1
            assert int(found["next_position_B"][b]) == lane.sequence + 1 + level
    # The whole pool was written: a NaN would be left of the poison.
    assert not found["candidate_score_BM"].isnan().any()
    assert (found["candidate_token_BM"] != POISON).all() and (found["candidate_parent_BM"] != POISON).all()


def test_a_lane_alone_gives_the_bits_of_the_batch() -> None:
    case = cases_of(OP, torch.Generator().manual_seed(5))[1]
    case = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in case.items()}
    lanes = case["lane_row_B"].shape[0]

    def run(chosen: list[int]) -> dict[str, Tensor]:
        own = {k: v[chosen].clone() if isinstance(v, Tensor) and not k.endswith("_R") else v for k, v in case.items()}
        OP.call(fused, own)
        return {name: own[name] for name in OP.mutates}

    whole, again = run(list(range(lanes))), run(list(range(lanes)))
    for name in OP.mutates:
        assert torch.equal(whole[name], again[name])
        for b in range(lanes):
            assert torch.equal(run([b])[name][0], whole[name][b])


def test_status_words_are_those_of_the_slots() -> None:
    assert (FREE, LIVE) == (Status.FREE, Status.LIVE)
