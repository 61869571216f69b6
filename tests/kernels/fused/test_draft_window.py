"""A drafter's first inputs, fused and reference, against lists."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import INTERPRETED
from graphspec.kernels.tree.draft_window import draft_window, take_last
from graphspec.kernels.tree.fused import draft_window as module
from graphspec.kernels.tree.fused.take_last import take_last as fused_take_last
from graphspec.plan.buffers import POISON, Status

OP = op_of("draft_window")

DEVICE = "cpu" if INTERPRETED else "cuda"
fused = module.draft_window


def rows(width: int, features: int, lookback: int, dtype: torch.dtype = torch.float32, spare: int = 0) -> dict[str, Any]:
    """Four rows: full window after many tokens, one entry after one token, stopped, and free; poison wherever nothing may be read."""
    generator = torch.Generator().manual_seed(width)
    length = torch.tensor([width, 1, 1, POISON])
    sequence = torch.tensor([2 * width + lookback, 1, POISON, POISON])
    token = torch.randint(0, 99, (4, width + spare), generator=generator)
    feature = torch.randn(4, width + spare, features, generator=generator).to(dtype)
    before, of_before = (
        torch.randint(0, 99, (4, lookback), generator=generator),
        torch.randn(4, lookback, features, generator=generator).to(dtype),
    )
    for r, known in enumerate((width, 1, 0, 0)):
        token[r, known:], feature[r, known:] = POISON, math.nan
    return {
        "lane_row_B": torch.tensor([1, 0, 3, 2, 3]),
        "status_R": torch.tensor([Status.LIVE, Status.LIVE, Status.STOPPED, Status.FREE]),
        "seq_len_R": sequence,
        "window_len_R": length,
        "window_token_RAc": token,
        "window_feature_RAcF": feature if features else None,
        "lookback_token_RY": before if lookback else None,
        "lookback_feature_RYF": of_before if lookback and features else None,
        "width": width,
    }


def call(function: Any, case: dict[str, Any], shift: int, num_words: int) -> list[Tensor]:
    placed = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in case.items()}
    return [x.cpu() for x in OP.call(function, {**placed, "shift": shift, "num_words": num_words})]


@pytest.mark.parametrize("function", [draft_window, fused], ids=["reference", "fused"])
@pytest.mark.parametrize(
    ("width", "features", "lookback", "shift", "num_words", "spare"),
    [
        (1, 3, 0, 1, 1, 0),
        (6, 5, 0, 1, 1, 0),
        (4, 0, 0, 0, 2, 0),
        (5, 7, 3, 1, 1, 0),
        (31, 0, 0, 0, 1, 0),
        (60, 1, 4, 1, 1, 0),
        (63, 1, 0, 0, 1, 0),
        (65, 0, 0, 1, 2, 0),
        (6, 5, 0, 1, 1, 10),
        (3, 2, 2, 0, 1, 1),
    ],
)
def test_entries_are_those_of_lists(
    function: Any, width: int, features: int, lookback: int, shift: int, num_words: int, spare: int
) -> None:
    case = rows(width, features, lookback, spare=spare)
    token, valid, slot, position, begin, words, known, following, feature = call(function, case, shift, num_words)
    assert feature.shape == (5, lookback + width, features)
    for b, r in enumerate(case["lane_row_B"].tolist()):
        live, sequence, length = r < 2, int(case["seq_len_R"][r]), int(case["window_len_R"][r])
        entries: list[tuple[int, list[float]]] = []
        if live:
            names = ("lookback_token_RY", "lookback_feature_RYF", lookback), ("window_token_RAc", "window_feature_RAcF", length)
            for tokens, values, count in names:
                entries += [(int(case[tokens][r, j]), case[values][r, j].tolist() if features else []) for j in range(count)]
            first = sequence - length + 1 - lookback
            entries = entries[max(shift - first, 0) :]
            assert int(begin[b]) == max(first, shift)
            assert slot[b].tolist() == [int(begin[b]) + u for u in range(lookback + width)]
            assert position[b].tolist() == [s - shift for s in slot[b].tolist()]
        assert int(known[b]) == len(entries) and int(following[b]) == sequence + 1
        assert valid[b].tolist() == [u < len(entries) for u in range(lookback + width)]
        for u in range(lookback + width):
            expected = entries[u] if u < len(entries) else (-1, [0.0] * features)
            assert (int(token[b, u]), feature[b, u].tolist()) == expected
            seen = sum(int(word) % 2**64 << 64 * x for x, word in enumerate(words[b, u]))
            assert seen == ((2 << u) - 1 if u < len(entries) else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [7, 2047, 2048, 2049])
def test_features_are_copied_to_the_bit(dtype: torch.dtype, features: int) -> None:
    case = rows(2, features, 0, dtype)
    found, expected = (call(function, case, 1, 1) for function in (fused, draft_window))
    assert found[-1].dtype == dtype
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


def test_a_lane_alone_gives_the_bits_of_the_batch() -> None:
    case = rows(6, 9, 2)
    whole = call(fused, case, 1, 1)
    for b in range(5):
        alone = call(fused, {**case, "lane_row_B": case["lane_row_B"][b : b + 1]}, 1, 1)
        for f, e in zip(alone, whole, strict=True):
            assert torch.equal(f[0], e[b])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_last_valid_entry_is_taken(dtype: torch.dtype) -> None:
    hidden = torch.randn(4, 3, 1025, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden[1, 1:], known = math.nan, torch.tensor([3, 1, 0, 2])
    for function in (take_last, fused_take_last):
        out = torch.full((4, 1025), math.nan, dtype=dtype, device=DEVICE)
        function(hidden.to(DEVICE), known.to(DEVICE), out)
        assert torch.equal(out.cpu(), torch.stack((hidden[0, 2], hidden[1, 0], hidden[2, 0], hidden[3, 1])))


@pytest.mark.usefixtures("nan_memory")
def test_every_result_is_written() -> None:
    case = rows(5, 6, 3)
    expected = call(draft_window, case, 1, 2)
    for f, e in zip(call(fused, case, 1, 2), expected, strict=True):
        assert torch.equal(f, e)
