"""Native top-k, levels and trees beyond the catalog's cases: whole vocabularies, rows in batches, and the engines that use them."""

from __future__ import annotations

import pytest
import torch

from graphspec.errors import ConfigError
from graphspec.graphs import programs
from graphspec.kernels import ATTENTION_OPS, LINEAR_OPS, OPS, op_of, select_kernels
from graphspec.kernels.groups import LogprobRing
from graphspec.kernels.native import cycle
from graphspec.kernels.native.call import team_threads, torch_loops
from graphspec.kernels.registry import KernelSet
from graphspec.kernels.tree import draft_level
from tests.kernels.cases import cases_of

WHOLE = tuple(op.name for op in OPS if "native" in op.implementations and op.name not in (*ATTENTION_OPS, *LINEAR_OPS))


@pytest.mark.parametrize("vocab", [7, 32, 33, 2048, 40_003])
@pytest.mark.parametrize("topk", [1, 4, 7])
def test_a_whole_vocabulary_is_ranked_as_the_reference_ranks_it(vocab: int, topk: int) -> None:
    """Coarse logits, so that many tie; some are not finite."""
    generator = torch.Generator().manual_seed(vocab + topk)
    logits = torch.randn(2, 3, vocab, generator=generator).mul(4).round() / 4
    logits[0, 1, ::3], logits[0, 2], logits[1, 0, 1:], logits[1, 1, ::2] = torch.nan, -torch.inf, torch.inf, -0.0
    found, expected = (op(logits, topk, None, None, None, None) for op in (cycle.draft_topk, draft_level.draft_topk))
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])


def test_a_row_has_the_same_bits_among_any_others_and_on_any_threads() -> None:
    logits = torch.randn(3, 4, 40_003, generator=torch.Generator().manual_seed(0)).mul(5)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        whole = cycle.draft_topk(logits, 4, None, None, None, None)
        for lane, row in ((0, 0), (1, 3), (2, 1)):
            alone = cycle.draft_topk(logits[lane : lane + 1, row : row + 1], 4, None, None, None, None)
            assert all(torch.equal(a[0, 0], w[lane, row]) for a, w in zip(alone, whole, strict=True))


def test_only_the_native_decoder_brings_them() -> None:
    ops = {op.name: op for op in OPS}
    whole = select_kernels("compiled", "auto", "cpu")
    one_by_one = select_kernels("compiled", "native", "cpu", linear="native")
    low = select_kernels("compiled", "auto", "cpu", dtype="bfloat16")
    assert {"draft_topk", "tree_walk", "commit_rows", "sample_tokens"} <= set(WHOLE)
    for name in WHOLE:
        assert getattr(whole, name) is ops[name].implementation("native")
        assert getattr(one_by_one, name) is getattr(low, name) is ops[name].reference


def test_slots_that_lie_apart_are_refused() -> None:
    op = OPS[[op.name for op in OPS].index("tree_build")]
    [case, *_] = cases_of(op, torch.Generator().manual_seed(0))
    apart = torch.empty(*case["node_token_BN"].shape, 2, dtype=torch.int64)[..., 0]
    with pytest.raises(ConfigError, match="contiguous slots"):
        op.call(cycle.tree_build, {**case, "node_token_BN": apart})
    with pytest.raises(ConfigError, match="float32"):
        cycle.draft_topk(torch.zeros(1, 1, 4, dtype=torch.float64), 1, None, None, None, None)


def test_torch_has_one_thread_around_native_ops_that_keep_theirs() -> None:
    torch.set_num_threads(3)
    with torch_loops(1):
        assert (torch.get_num_threads(), team_threads()) == (1, 3)
        with torch_loops(2):
            assert (torch.get_num_threads(), team_threads()) == (2, 3)
    with pytest.raises(ZeroDivisionError), torch_loops(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == team_threads() == 3


def test_a_prompt_is_read_with_one_thread_around_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager program of a compiled engine: OpenMP's threads would wait on the cores of the team."""
    torch.set_num_threads(3)
    found = []
    stage = type("Watched", (), {"__call__": lambda self, views: found.append((torch.get_num_threads(), team_threads()))})()
    monkeypatch.setattr(programs, "signature", lambda views: None)
    for threads in (None, 1):
        programs.Program([stage], None, compiled=False, threads=threads)()
    assert found == [(3, 3), (1, 3)]


@pytest.mark.parametrize("seed", range(24))
def test_filters_keep_the_tokens_of_the_reference(seed: int) -> None:
    """Vocabularies of many buckets, ties, flat and steep distributions, rows without a finite logit, thresholds at both ends."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], count: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (count,), generator=generator)]

    vocab, lanes, rows = [1, 7, 33, 1000, 5000][seed % 5], 4, 2
    logits = torch.randn(lanes, rows, vocab, generator=generator) * pick([0.1, 3.0, 20.0], 1)
    logits = logits.round(decimals=1) if seed % 3 == 0 else logits
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -torch.inf
    logits[0, 0, :] = torch.nan if seed % 2 else -torch.inf
    case = {
        "logits_BTV": logits,
        "temperature_B": pick([0.7, 0.0, 1e-3, 2.0**-126, 1.6, 100.0], lanes),
        "top_k_B": torch.randint(-1, vocab + 2, (lanes,), generator=generator),
        "top_p_B": pick([0.01, 0.3, 0.9, 0.999, 1.0], lanes),
        "min_p_B": pick([0.0, 0.05, 1.0], lanes),
    }
    op = op_of("filter_logits")
    native, reference = (op.call(op.implementation(name), case) for name in ("native", "reference"))
    assert torch.equal(native.nan_to_num(7.0), reference.nan_to_num(7.0))


@pytest.mark.parametrize(("distance", "top_p"), [(9.0, 0.3), (14.0, 0.99), (16.0, 0.995), (18.0, 0.9999), (26.0, 0.9999999)])
def test_a_nucleus_may_end_far_below_the_likeliest_token(distance: float, top_p: float) -> None:
    """One likely token and many unlikely ones that together reach the share, or do not."""
    logits = torch.randn(1, 2, 30_001, generator=torch.Generator().manual_seed(int(distance)))
    logits[0, 0] *= 0.1
    logits[..., 17] = distance
    case = {
        "logits_BTV": logits,
        "temperature_B": torch.tensor([1.0]),
        "top_k_B": torch.tensor([-1]),
        "top_p_B": torch.tensor([top_p]),
        "min_p_B": torch.tensor([0.0]),
    }
    op = op_of("filter_logits")
    native, reference = (op.call(op.implementation(name), case).isfinite() for name in ("native", "reference"))
    assert torch.equal(native, reference) and native[0, 0, 17]
    limited = {**case, "top_k_B": torch.tensor([300])}
    assert op.call(op.implementation("native"), limited).isfinite().sum() <= 2 * 300


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whole_vocabularies_are_sampled_as_the_reference_samples_them(seed: int, filtered: bool) -> None:
    """Noise is computed for few tokens only; which one wins must not depend on that."""
    generator = torch.Generator().manual_seed(seed)
    vocab, lanes, rows = [33, 5000, 40_003][seed % 3], 3, 3
    logits = torch.randn(lanes, rows, vocab, generator=generator) * [0.1, 1.0, 5.0, 30.0][seed % 4]
    logits = logits.round(decimals=1) if seed % 2 else logits
    logits[0, 0, ::2], logits[2, 2] = -torch.inf, torch.nan
    filters = (torch.tensor([-1, 40, 3]), torch.tensor([0.9, 1.0, 0.95]), torch.tensor([0.0, 0.0, 0.1])) if filtered else (None,) * 3
    position_BT = torch.randint(0, 5000, (lanes, rows), generator=generator)
    op = op_of("sample_tokens")
    for temperature in (0.3, 1.0, 7.0, 1e-30):
        seed_B = torch.randint(-(2**62), 2**62, (lanes,), generator=generator)
        case = (logits, torch.full((lanes,), temperature), seed_B, position_BT, *filters, False)
        native, reference = (op.implementation(name)(*case) for name in ("native", "reference"))
        assert all(torch.equal(a, b) for a, b in zip(native, reference, strict=True))


@pytest.mark.parametrize("alternatives", [0, 3])
def test_log_probabilities_are_noted_as_the_reference_notes_them(alternatives: int) -> None:
    """A part of a wider ring, the second time around; entries that belong to others keep their values."""
    generator = torch.Generator().manual_seed(0)
    lanes, nodes, vocab = 2, 5, 1001
    logits_BNV = torch.randn(lanes, nodes, vocab, generator=generator) * 4
    logits_BNV[0, 1, ::3] = -torch.inf
    path_BA = torch.tensor([[0, 1, 4], [0, 3, 0]])
    sample_BN = torch.randint(0, vocab, (lanes, nodes), generator=generator)
    sample_BN[1, 3] = -1
    cycle_1 = torch.tensor([6])
    wide = (torch.full((4, 3, 4), 7.0), torch.full((4, 3, 4, 5), 7.0), torch.full((4, 3, 4, 5), 7))
    rings = [LogprobRing(*(x.clone()[:, :lanes] for x in wide)) for _ in range(2)]
    kernels = select_kernels("compiled", "auto", "cpu")
    kernels.note_logprobs(logits_BNV, path_BA, sample_BN, cycle_1, rings[0], alternatives)
    KernelSet.note_logprobs(kernels, logits_BNV, path_BA, sample_BN, cycle_1, rings[1], alternatives)
    for found, expected in zip(*rings, strict=True):
        assert torch.equal(found, expected)
    assert (rings[0].ring_top_token_ZBAO[..., alternatives:] == 7).all() and (rings[0].ring_logprob_ZBA[[0, 1, 3]] == 7).all()
    log_softmax = logits_BNV[0, 4].log_softmax(-1)
    assert rings[0].ring_logprob_ZBA[2, 0, 2] == pytest.approx(float(log_softmax[sample_BN[0, 4]]), abs=1e-5)
    assert rings[0].ring_top_token_ZBAO[2, 0, 2, :alternatives].tolist() == log_softmax.topk(alternatives).indices.tolist()
