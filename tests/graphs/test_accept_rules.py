"""Acceptance rules: emitted sequences against the exact distribution, on a vocabulary small enough to enumerate."""

from __future__ import annotations

import itertools
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.config.schema import AcceptConfig, VariantConfig
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError
from graphspec.graphs.stages import acceptance_rules, sampling
from graphspec.graphs.stages.acceptance_rules import Accept
from graphspec.graphs.stages.sampling import COIN_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, DraftSampler, coins
from graphspec.kernels import select_kernels
from graphspec.kernels.groups import Candidates
from graphspec.kernels.tree.marginal_pool import marginal_pool
from graphspec.kernels.tree.tree_build import tree_build
from graphspec.plan.acceptance import resolve_accept
from graphspec.plan.buffers import Status, Views
from graphspec.shapes import PLAIN, CycleShape, SamplingClass
from tests.support.engines import CHAIN, TREE, Pair, ids, mirror_pair, prompts

VOCAB, LENGTH, SAMPLES = 6, 3, 100_000
SHAPES = {"plain": PLAIN, "chain": CycleShape(2, 1, 3), "tree": CycleShape(2, 2, 6), "deep": CycleShape(3, 1, 4)}
KNOWN = torch.tensor([0, 2, 3, 5])
"""Target ids of the drafter's vocabulary."""


class Game:
    """Target and drafter are tables over the token before; everything else is the real sampler, tree, rule and walk, one lane per seed."""

    def __init__(
        self, shape: CycleShape, accept: AcceptConfig, *, temperature: float = 0.9, top_k: int = 0, draft_noise: str = "coupled",
        samples: int = SAMPLES, marginals: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(4)
        self.target_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 1.2
        self.draft_VVd = (self.target_VV + 0.7 * torch.randn(VOCAB, VOCAB, generator=generator))[:, KNOWN]
        self.shape, self.temperature, self.top_k = shape, temperature, top_k
        # Of a drafter that gives every depth one distribution: that of depth 2, by the root.
        self.second_VVd = torch.randn(VOCAB, VOCAB, generator=generator)[:, KNOWN]
        self.marginals = marginals
        rule = resolve_accept(accept, VariantConfig(draft_noise=draft_noise), shape, has_network=True)
        plan = SimpleNamespace(
            target=SimpleNamespace(vocab_size=VOCAB), accept=rule, accept_width=shape.accept_width, draft_context=1000, num_words=1
        )
        sampling_class = SamplingClass(noise=True, truncate=top_k > 0)
        kernels = select_kernels("reference", "auto", "cpu")
        self.build: Any = SimpleNamespace(plan=plan, kernels=kernels, shape=shape, sampling=sampling_class, target=None, draft=None)
        self.accept, self.sampler = Accept(self.build), DraftSampler(self.build)
        self.cycles, self.samples = 0, samples

    def views(self) -> Any:
        lanes, nodes = self.samples, self.shape.num_draft_tokens
        full = {"status_R": Status.LIVE, "seq_len_R": 5, "budget_R": 100, "draft_len_R": 100, "top_k_R": self.top_k}
        return Views(
            {
                "lane_row_B": torch.arange(lanes),
                "lane_seed_B": torch.arange(lanes) * 7 + 11,
                "lane_temperature_B": torch.full((lanes,), self.temperature),
                "top_p_R": torch.ones(lanes),
                "min_p_R": torch.zeros(lanes),
                "stop_id_RE": torch.full((lanes, 1), -1),
                "draft_prob_BSV": torch.full((lanes, max(1, self.shape.num_steps), VOCAB), torch.nan),
                "sample_BN": torch.zeros(lanes, nodes, dtype=torch.int64),
                "path_BA": torch.zeros(lanes, self.shape.accept_width, dtype=torch.int64),
                "accept_len_B": torch.zeros(lanes, dtype=torch.int64),
                "outcome_B": torch.zeros(lanes, dtype=torch.int64),
                **{name: torch.full((lanes,), value) for name, value in full.items()},
            }
        )

    def draft(self, v: Any, root_B: Tensor) -> None:
        """Nodes of one cycle, by the sampler's own proposals."""
        topk, lanes = self.shape.topk, self.samples
        nothing = torch.zeros(lanes, 1, 0, dtype=torch.int64)
        if self.shape.num_steps == 0:
            v.node_token_BN = root_B[:, None]
            v.node_parent_BN, v.node_depth_BN = torch.full((lanes, 1), -1), torch.zeros(lanes, 1, dtype=torch.int64)
            v.node_ancestors_BNX = torch.ones(lanes, 1, 1, dtype=torch.int64)
            return
        if self.marginals:
            self.draft_marginals(v, root_B)
            return
        score_BTK, token_BTK = self.sampler.propose(v, self.draft_VVd[root_B][:, None], KNOWN, v.seq_len_R + 1, nothing, 1)
        score_BE, token_BE = score_BTK[:, 0], token_BTK[:, 0]
        scores, tokens, parents = [score_BE], [token_BE], [-1] * topk
        for level in range(2, self.shape.num_steps + 1):
            path_BEs = torch.stack(tokens, -1) if topk == 1 else token_BE[..., None]
            more_BEK, next_BEK = self.sampler.propose(v, self.draft_VVd[token_BE], KNOWN, v.seq_len_R + level, path_BEs, level)
            parents += [len(parents) - topk + k for k in range(topk) for _ in range(topk)]
            score_BE, token_BE = (score_BE[..., None] + more_BEK).flatten(1), next_BEK.flatten(1)
            scores.append(score_BE)
            tokens.append(token_BE)
        v.node_token_BN, v.node_parent_BN, v.node_depth_BN, v.node_ancestors_BNX = tree_build(
            torch.cat(scores, 1), torch.cat(tokens, 1), torch.tensor(parents).expand(lanes, -1), root_B,
            self.shape.num_draft_tokens, 1, self.shape.num_steps,
        )  # fmt: skip

    def draft_marginals(self, v: Any, root_B: Tensor) -> None:
        """Nodes of one cycle of a drafter that proposes all depths at once."""
        steps, pool = self.shape.num_steps, self.shape.topk + self.shape.topk**2
        logits_BSV = torch.stack((self.draft_VVd[root_B], self.second_VVd[root_B]), 1)
        position_BS = v.seq_len_R[:, None] + 1 + torch.arange(steps)
        score_BSK, token_BSK = self.sampler.propose_levels(v, logits_BSV, KNOWN, position_BS)
        sizes = (torch.float32, torch.int64, torch.int64)
        candidates = Candidates(*(torch.empty(self.samples, pool, dtype=dtype) for dtype in sizes))
        marginal_pool(score_BSK, token_BSK, v.lane_row_B, v.status_R, candidates)
        v.node_token_BN, v.node_parent_BN, v.node_depth_BN, v.node_ancestors_BNX = tree_build(
            *candidates, root_B, self.shape.num_draft_tokens, 1, steps
        )

    def play(self) -> Tensor:
        """The first tokens after root 1 in every lane, over as many cycles as needed: int64 ``[lanes, LENGTH]``."""
        v, root_B = self.views(), torch.ones(self.samples, dtype=torch.int64)
        out = torch.full((self.samples, LENGTH + self.shape.accept_width), -1)
        count_B, entry_A = torch.zeros(self.samples, dtype=torch.int64), torch.arange(self.shape.accept_width)
        while int(count_B.min()) < LENGTH:
            self.draft(v, root_B)
            v.logits_BNV = self.target_VV[v.node_token_BN.clamp(min=0)]
            self.accept(v)
            length_B = v.accept_len_B
            assert int(length_B.min()) >= 1
            token_BA = v.sample_BN.gather(1, v.path_BA)
            at_BA = (count_B[:, None] + entry_A).clamp(max=out.shape[1] - 1)
            out.scatter_(1, at_BA, torch.where(entry_A < length_B[:, None], token_BA, out.gather(1, at_BA)))
            root_B = token_BA.gather(1, length_B[:, None] - 1).squeeze(1)
            v.seq_len_R = v.seq_len_R + length_B
            count_B = (count_B + length_B).clamp(max=LENGTH)
            self.cycles += 1
        self.mean = float((v.seq_len_R - 5).double().mean()) / self.cycles
        return out[:, :LENGTH]

    def law(self) -> Tensor:
        """Exact probability of every sequence, float64 ``[VOCAB ** LENGTH]``."""
        logits_VV = self.target_VV.double()
        if self.top_k:
            logits_VV = logits_VV.masked_fill(logits_VV < logits_VV.topk(self.top_k, -1).values[:, -1:], -torch.inf)
        share_VV = torch.softmax(logits_VV / self.temperature, -1)
        return torch.stack([
            torch.stack([share_VV[before, token] for before, token in itertools.pairwise((1, *sequence))]).prod()
            for sequence in itertools.product(range(VOCAB), repeat=LENGTH)
        ])  # fmt: skip


def chi_square(tokens: Tensor, law: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells that expect fewer than 5 are one cell, and impossible ones must be empty."""
    index = (tokens * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    found, expected = torch.bincount(index, minlength=len(law)).double(), law * len(tokens)
    assert found[law == 0].sum() == 0, "a token of probability 0 was emitted"
    rare = expected < 5
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    used = expected > 0
    return float(((found - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1


def excess(game: Game) -> float:
    """Standard deviations of the chi-square statistic above what the exact law gives."""
    statistic, freedom = chi_square(game.play(), game.law())
    return (statistic - freedom) / (2 * freedom) ** 0.5


BLOCK: dict[str, Any] = {"rule": "rejection", "block_verification": True}


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else "block" if value == BLOCK else value["rule"]


EXACT = [
    ("plain", {"rule": "match"}), ("chain", {"rule": "match"}), ("tree", {"rule": "match"}),
    ("plain", {"rule": "target_only"}), ("chain", {"rule": "target_only"}), ("tree", {"rule": "target_only"}),
    ("plain", {"rule": "rejection"}), ("chain", {"rule": "rejection"}),
    ("plain", BLOCK), ("chain", BLOCK), ("deep", BLOCK),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "accept"), EXACT, ids=name_of)
@pytest.mark.parametrize("top_k", [0, 4])
def test_sequences_have_the_exact_law(shape: str, accept: dict[str, Any], top_k: int) -> None:
    """Three tokens over one to three cycles: each given those before it, independent of drafts and accepted lengths."""
    game = Game(SHAPES[shape], AcceptConfig(**accept), top_k=top_k, samples=40_000 if top_k else SAMPLES)
    assert excess(game) < 4.5
    assert (game.mean > 1.1) == (shape != "plain"), "drafts are accepted, or the test shows nothing"


@pytest.mark.parametrize(
    ("shape", "accept"),
    [("chain", {"rule": "match"}), ("tree", {"rule": "match"}), ("tree", {"rule": "target_only"}), ("chain", {"rule": "rejection"}),
     ("chain", BLOCK)],
    ids=name_of,
)  # fmt: skip
def test_drafts_from_marginals_leave_the_law_as_it_is(shape: str, accept: dict[str, Any]) -> None:
    """A drafter whose second token does not depend on its first: what it misses is rejected, and nothing else changes."""
    game = Game(SHAPES[shape], AcceptConfig(**accept), marginals=True)
    assert excess(game) < 4.5
    assert game.mean > 1.1, "drafts are accepted, or the test shows nothing"


@pytest.mark.parametrize("thresholds", [{"threshold_single": 0.3}, {"threshold_acc": 0.6}], ids=str)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_lossy_threshold_deviates(shape: str, thresholds: dict[str, float]) -> None:
    """So would anything that is not exact: the test above can fail."""
    assert excess(Game(SHAPES[shape], AcceptConfig(rule="target_only", **thresholds), samples=30_000)) > 15


def test_a_wrong_draft_distribution_deviates(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game(SHAPES["chain"], AcceptConfig(rule="rejection"), samples=30_000)
    propose = game.sampler.propose

    def forget(v: Any, *args: Any) -> Any:
        result = propose(v, *args)
        v.draft_prob_BSV = v.draft_prob_BSV.roll(1, -1)
        return result

    monkeypatch.setattr(game.sampler, "propose", forget)
    assert excess(game) > 15


def expected_accepted(target_VV: Tensor, draft_VV: Tensor, steps: int, *, block: bool) -> float:
    """Mean number of accepted drafts after root 1, by enumeration of all drafted chains in float64; written from the papers."""
    mean = 0.0
    for chain in itertools.product(range(VOCAB), repeat=steps):
        pairs = list(itertools.pairwise((1, *chain)))
        p, q = ([float(table[pair]) for pair in pairs] for table in (target_VV, draft_VV))
        drawn = math.prod(q)
        if drawn == 0:
            continue
        if not block:
            mean += drawn * sum(math.prod(min(1.0, p[i] / q[i]) for i in range(n)) for n in range(1, steps + 1))
            continue
        prefix, shares = 1.0, []
        for i in range(steps):
            prefix = min(1.0, prefix * p[i] / q[i])
            if i + 1 == steps:
                shares.append(prefix)
                continue
            rest = float((prefix * target_VV[chain[i]] - draft_VV[chain[i]]).clamp(min=0).sum())
            shares.append(rest / (rest + 1 - prefix) if prefix < 1 else 1.0)
        later = 1.0
        for n in range(steps, 0, -1):
            mean += drawn * later * shares[n - 1] * n
            later *= 1 - shares[n - 1]
    return mean


@pytest.mark.parametrize("steps", [2, 3])
def test_a_block_is_accepted_as_often_as_the_paper_says(steps: int) -> None:
    """One cycle of the stage against the exact mean, which is above that of token-by-token rejection."""
    means = {}
    for block in (False, True):
        game = Game(CycleShape(steps, 1, steps + 1), AcceptConfig(rule="rejection", block_verification=block), samples=SAMPLES)
        v = game.views()
        game.draft(v, torch.ones(SAMPLES, dtype=torch.int64))
        v.logits_BNV = game.target_VV[v.node_token_BN.clamp(min=0)]
        game.accept(v)
        target_VV = torch.softmax(game.target_VV.double() / game.temperature, -1)
        draft_VV = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        draft_VV[:, KNOWN] = torch.softmax(game.draft_VVd.double() / game.temperature, -1)
        means[block] = expected_accepted(target_VV, draft_VV, steps, block=block)
        found_B = v.accept_len_B.double() - 1
        assert abs(float(found_B.mean()) - means[block]) < 4.5 * float(found_B.std()) / SAMPLES**0.5
    assert means[True] > means[False] + 0.003


def test_a_block_accepts_no_fewer_than_its_tokens() -> None:
    """In expectation, for any two models: exact, over random tables from almost equal to unrelated."""
    generator = torch.Generator().manual_seed(1)
    gains = []
    for spread in (0.1, 0.5, 1.0, 3.0) * 3:
        target_VV = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        draft_VV = target_VV + spread * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        tables = [torch.softmax(table, -1) for table in (target_VV, draft_VV)]
        by_token, by_block = (expected_accepted(*tables, 3, block=block) for block in (False, True))
        gains.append(by_block - by_token)
    assert min(gains) > -1e-12 and max(gains) > 0.05


def test_a_block_judged_with_the_coins_of_positions_deviates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts and their coins decide how much is kept; drawn again by a later cycle they bias it."""
    for module in (acceptance_rules, sampling):
        monkeypatch.setattr(module, "cycle_positions", lambda first_B, levels, width: first_B[:, None] + torch.arange(levels))
    assert excess(Game(SHAPES["deep"], AcceptConfig(**BLOCK))) > 15


def test_streams_are_independent() -> None:
    """Coins against each other's positions and seeds; the constants differ from each other and from none."""
    assert len({0, COIN_STREAM, RESIDUAL_STREAM, DRAFT_STREAM}) == 4
    coin_BT = coins(torch.arange(20_000), torch.arange(4).expand(20_000, -1)).double()
    assert abs(float(coin_BT.mean()) - 0.5) < 0.01 and coin_BT.min() > 0 and coin_BT.max() < 1
    correlation_TT = torch.corrcoef(coin_BT.T) - torch.eye(4)
    assert correlation_TT.abs().max() < 0.03


def test_coupled_drafts_are_accepted_more_often() -> None:
    for shape in ("chain", "tree"):
        means = {}
        for noise in ("coupled", "none"):
            game = Game(SHAPES[shape], AcceptConfig(), draft_noise=noise, temperature=1.0, samples=10_000)
            game.play()
            means[noise] = game.mean
        assert means["coupled"] > means["none"] + 0.05, shape


def resolve(shape: CycleShape, *, has_network: bool = True, draft_noise: str = "coupled", **accept: Any) -> Any:
    return resolve_accept(AcceptConfig(**accept), VariantConfig(draft_noise=draft_noise), shape, has_network=has_network)


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("variant.topk", lambda: resolve(SHAPES["tree"], rule="rejection")),
        ("accept.rule", lambda: resolve(SHAPES["chain"], rule="rejection", has_network=False)),
        ("variant.draft_noise", lambda: resolve(SHAPES["chain"], rule="rejection", draft_noise="none")),
        ("accept.rule", lambda: resolve(SHAPES["chain"], rule="luck")),
        ("accept.block_verification", lambda: resolve(SHAPES["chain"], rule="match", block_verification=True)),
        ("variant.topk", lambda: resolve(SHAPES["tree"], **BLOCK)),
        ("accept.threshold_acc", lambda: resolve(SHAPES["tree"], rule="target_only", threshold_acc=0.0)),
        ("accept.threshold_single", lambda: resolve(SHAPES["tree"], rule="target_only", threshold_single=1.1)),
        ("accept.threshold_single, accept.threshold_acc", lambda: resolve(SHAPES["tree"], threshold_acc=0.9)),
        ("accept.synthetic_length, accept.synthetic_rates", lambda: resolve(SHAPES["tree"], rule="synthetic")),
        ("accept.synthetic_length, accept.synthetic_rates", lambda: resolve(SHAPES["tree"], synthetic_length=2.0)),
        ("accept.synthetic_length", lambda: resolve(SHAPES["tree"], rule="synthetic", synthetic_length=3.5)),
        ("accept.synthetic_length", lambda: resolve(SHAPES["tree"], rule="synthetic", synthetic_length=0.5)),
        ("accept.synthetic_rates", lambda: resolve(SHAPES["tree"], rule="synthetic", synthetic_rates=[0.5, 0.6])),
        ("accept.synthetic_rates", lambda: resolve(SHAPES["chain"], rule="synthetic", synthetic_rates=[0.5, 0.4, 0.1])),
    ],
)
def test_what_a_rule_cannot_do_is_refused(key: str, call: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.key == key


def test_lossy_rules_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not resolve(SHAPES["tree"], rule="target_only").lossy
        assert not caplog.records
        assert resolve(SHAPES["tree"], rule="target_only", threshold_acc=0.9).lossy
    assert "0.9" in caplog.text
    made = resolve(SHAPES["chain"], rule="synthetic", synthetic_length=2.25)
    assert (made.rates, made.lossy, made.synthetic) == ((1.0, 0.25), True, True)
    assert not resolve(SHAPES["chain"], rule="rejection").coupled


@pytest.mark.covers("eagle3", "accept=target_only", "accept=rejection")
@pytest.mark.parametrize(("shape", "rule"), [(CHAIN, "target_only"), (TREE, "target_only"), (CHAIN, "rejection")])
def test_greedy_rows_do_not_depend_on_the_rule(pair: Pair, shape: dict[str, Any], rule: str) -> None:
    prompt_ids = prompts(3)
    params = [SamplingParams(max_tokens=12, temperature=t, seed=7) for t in (0.0, 1.0, 0.0)]
    outputs = ids(pair.llm(**shape, rule=rule).generate(prompt_ids, params))
    assert [outputs[i] for i in (0, 2)] == [pair.greedy(prompt_ids[i], 12) for i in (0, 2)]


@pytest.mark.parametrize("block", [False, True])
def test_drafts_drawn_from_the_target_are_always_accepted(tmp_path_factory: pytest.TempPathFactory, block: bool) -> None:
    """p / q is 1 everywhere; an index that is off by one would show as a rejection."""
    twin = mirror_pair(tmp_path_factory.mktemp("twin"))
    llm = twin.llm(**CHAIN, rule="rejection", block_verification=block)
    llm.generate(prompts(3, (4, 9, 8)), [SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(3)])
    assert llm.metrics is not None
    assert llm.metrics.acceptance_length > 4.9


@pytest.mark.covers("eagle3", "accept=synthetic")
@pytest.mark.parametrize(
    ("shape", "accept", "mean"),
    [
        (CHAIN, {"synthetic_length": 2.6}, 2.6),
        (CHAIN, {"synthetic_rates": [0.9, 0.5, 0.2]}, 2.6),
        (TREE, {"synthetic_length": 1.0}, 1.0),
        (TREE, {"synthetic_length": 2.5}, 2.5),
        (CHAIN, {"synthetic_length": 5.0}, 5.0),
    ],
)
def test_a_synthetic_run_has_its_mean(pair: Pair, shape: dict[str, Any], accept: dict[str, Any], mean: float) -> None:
    llm = pair.llm(**shape, rule="synthetic", **accept, max_rows=8)
    outputs = llm.generate(prompts(8, (4,)), [SamplingParams(max_tokens=80, seed=i) for i in range(8)])
    metrics = llm.metrics
    assert metrics is not None and metrics.synthetic and metrics.lossy and outputs[0].metrics.synthetic
    assert [len(o.token_ids) for o in outputs] == [80] * 8, "stop ids mean nothing"
    assert abs(metrics.acceptance_length - mean) < 4 / metrics.cycles**0.5 * (0 if mean in (1.0, 5.0) else 1) + 1e-9
    if "synthetic_rates" in accept:
        assert metrics.accepted_per_position[3] == 0


@pytest.mark.parametrize(
    ("shape", "accept"),
    [("tree", {"rule": "target_only"}), ("chain", {"rule": "rejection"}), ("deep", BLOCK),
     ("tree", {"rule": "synthetic", "synthetic_length": 2.0})],
    ids=name_of,
)  # fmt: skip
def test_the_stage_is_one_graph_under_every_rule(shape: str, accept: dict[str, Any]) -> None:
    """Traced whole, and the same tokens; code generation is the business of the compiled engines' tests."""
    game = Game(SHAPES[shape], AcceptConfig(**accept), top_k=4, samples=50)
    v = game.views()
    game.draft(v, torch.ones(50, dtype=torch.int64))
    v.logits_BNV = game.target_VV[v.node_token_BN.clamp(min=0)]
    game.accept(v)
    expected = v.sample_BN.clone(), v.accept_len_B.clone()
    v.sample_BN.fill_(-1)
    torch.compile(game.accept, fullgraph=True, dynamic=False, backend="eager")(v)
    assert torch.equal(v.sample_BN, expected[0]) and torch.equal(v.accept_len_B, expected[1])
