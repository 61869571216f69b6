"""The fused ops around draft and verification on a GPU, where programs run concurrently: exactly the reference, repeatedly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import OPS, KernelOp, op_of
from tests.kernels.cases import cases_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NAMES = ("mail_apply", "draft_window", "draft_level", "marginal_pool", "take_last", "ngram_match", "verify_rows")
BY_OP = [pytest.param(op, id=op.name) for op in OPS if op.name in NAMES]


def outputs(op: KernelOp, function: Any, case: dict[str, Any]) -> list[Tensor]:
    own = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in case.items()}
    result = op.call(function, own)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    return [*results, *(own[name] for name in op.mutates if own[name] is not None)]


@pytest.mark.references(*NAMES)
@pytest.mark.parametrize("op", BY_OP)
def test_fused_equals_reference(op: KernelOp) -> None:
    for seed in range(4):
        for case in cases_of(op, torch.Generator().manual_seed(seed)):
            expected = outputs(op, op.reference, case)
            for _ in range(20):
                for f, e in zip(outputs(op, op.implementation("fused"), case), expected, strict=True):
                    assert f.dtype == e.dtype and torch.equal(f, e)


def test_a_long_history_in_many_blocks() -> None:
    op = op_of("ngram_match")
    generator, lanes, width = torch.Generator().manual_seed(0), 8, 40000
    case = {
        "history_RL": torch.randint(0, 60, (lanes, width), generator=generator),
        "lane_row_B": torch.randperm(lanes, generator=generator),
        "status_R": torch.ones(lanes, dtype=torch.int64),
        "seq_len_R": torch.tensor([width - 1, 0, 1, 1023, 1024, 1025, 9000, 31000]),
        "candidate_score_BM": torch.full((lanes, 48), torch.nan),
        "candidate_token_BM": torch.zeros(lanes, 48, dtype=torch.int64),
        "candidate_parent_BM": torch.zeros(lanes, 48, dtype=torch.int64),
        "num_paths": 8,
        "depth": 6,
        "min_match": 1,
        "max_match": 12,
    }
    expected = outputs(op, op.reference, case)
    for _ in range(20):
        for f, e in zip(outputs(op, op.implementation("fused"), case), expected, strict=True):
            assert torch.equal(f, e)


def test_bfloat16_features_keep_their_bits() -> None:
    generator, rows, width, size = torch.Generator().manual_seed(0), 9, 6, 12288
    feature = torch.randn(rows, width, size, generator=generator).bfloat16()
    length = torch.randint(1, width + 1, (rows,), generator=generator)
    feature[torch.arange(width) >= length[:, None]] = torch.nan
    case = {
        "lane_row_B": torch.randperm(rows, generator=generator)[:8],
        "status_R": torch.ones(rows, dtype=torch.int64),
        "seq_len_R": length + 3000,
        "window_len_R": length,
        "window_token_RAc": torch.randint(0, 128256, (rows, width), generator=generator),
        "window_feature_RAcF": feature,
        "width": width,
        "lookback_token_RY": None,
        "lookback_feature_RYF": None,
        "shift": 1,
        "num_words": 1,
    }
    op = op_of("draft_window")
    for f, e in zip(outputs(op, op.implementation("fused"), case), outputs(op, op.reference, case), strict=True):
        assert torch.equal(f, e)


def test_count_rows_of_a_real_vocabulary_are_cleared_while_others_stay() -> None:
    op = op_of("mail_apply")
    case = cases_of(op, torch.Generator().manual_seed(3))[1]
    rows = case["status_R"].shape[0]
    case["output_count_RV"] = torch.ones(rows, 128256, dtype=torch.int32)
    case["prompt_seen_RV"] = torch.ones(rows, 128256, dtype=torch.int8)
    for f, e in zip(outputs(op, op.implementation("fused"), case), outputs(op, op.reference, case), strict=True):
        assert torch.equal(f, e)
