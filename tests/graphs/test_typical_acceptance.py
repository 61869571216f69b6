"""An acceptance rule from another package: found through its entry point, compared with the paper's rule node by node, marked as lossy."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config import catalog
from graphspec.config.catalog import all_acceptance_rules, load_object
from graphspec.config.compose import config_groups, load_config
from graphspec.config.schema import AcceptConfig, VariantConfig
from graphspec.errors import ConfigError
from graphspec.kernels import select_kernels
from graphspec.kernels.tree.tree_build import tree_build
from graphspec.plan.acceptance import resolve_accept
from graphspec.plan.buffers import Views
from graphspec.shapes import CycleShape, SamplingClass
from tests.drafters.test_entry_points import install
from tests.support.engines import SMALL, TREE, Pair, ids, mirror_pair, prompts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "typical_acceptance"
VOCAB = 12


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The catalog is read once per process; these tests change what it would find."""
    catalog.all_acceptance_rules.cache_clear()
    yield
    monkeypatch.undo()
    catalog.all_acceptance_rules.cache_clear()


@pytest.fixture
def typical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    line = "typical = graphspec_typical_acceptance:RULE"
    assert 'typical = "graphspec_typical_acceptance:RULE"' in (EXAMPLE / "pyproject.toml").read_text()
    points = f"[graphspec.acceptance_rules]\n{line}\n"
    monkeypatch.syspath_prepend(install(tmp_path / "site", points, EXAMPLE / "graphspec_typical_acceptance.py"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"))


def test_the_example_is_a_rule_like_ours(typical: None) -> None:
    assert [rule.name for rule in all_acceptance_rules()] == ["match", "target_only", "rejection", "synthetic", "typical"]
    assert "typical" in config_groups()["accept"]
    assert load_config("accept=typical").accept.rule == load_config("accept.rule=typical").accept.rule == "typical"


def test_the_deepest_likely_path_is_taken(typical: None) -> None:
    """Against the rule written out over Python lists: of the tokens drafted, which are likely, and how deep they lead."""
    from graphspec_typical_acceptance import DELTA, EPSILON

    shape, lanes = CycleShape(3, 2, 8), 400
    accept = resolve_accept(AcceptConfig(rule="typical"), VariantConfig(), shape, has_network=True)
    plan = SimpleNamespace(target=SimpleNamespace(vocab_size=VOCAB), accept=accept, num_words=1)
    kernels = select_kernels("reference", "auto", "cpu")
    build: Any = SimpleNamespace(plan=plan, kernels=kernels, shape=shape, sampling=SamplingClass(noise=True), target=None, draft=None)
    generator = torch.Generator().manual_seed(0)
    token_BM = torch.randint(0, VOCAB, (lanes, 10), generator=generator)
    parents = torch.tensor([-1, -1, 0, 0, 1, 1, 2, 2, 4, 4])
    score_BM, root_B = torch.rand(lanes, 10, generator=generator).cumsum(1).neg(), torch.ones(lanes, dtype=torch.int64)
    nodes = tree_build(score_BM, token_BM, parents.expand(lanes, -1), root_B, 8, 1, 3)
    temperature_B = torch.where(torch.arange(lanes) % 4 == 0, 0.0, 0.8)
    v: Any = Views(
        {
            **dict(zip(("node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX"), nodes, strict=True)),
            "lane_row_B": torch.arange(lanes), "lane_seed_B": torch.arange(lanes), "lane_temperature_B": temperature_B,
            "seq_len_R": torch.full((lanes,), 5),
        }
    )  # fmt: skip
    logits_BNV = torch.randn(lanes, 8, VOCAB, generator=generator) * 2.5
    chosen_BN, sound_BN = load_object(accept.kind.make)(build)(v, logits_BNV)
    matched_BN, _ = load_object("graphspec.graphs.stages.acceptance_rules:Match")(build)(v, logits_BNV)
    assert bool(sound_BN.all())
    token, parent, depth, _ = (part.tolist() for part in nodes)
    runs = []
    for lane in range(lanes):
        expected = matched_BN[lane].tolist()
        if temperature_B[lane] > 0:
            share = (logits_BNV[lane].double() / float(temperature_B[lane])).softmax(-1).tolist()
            reached = {0}
            for node in range(1, 8):
                before = parent[lane][node]
                if token[lane][node] < 0 or before not in reached:
                    continue
                entropy = -sum(p * math.log(p) for p in share[before])
                if share[before][token[lane][node]] >= min(EPSILON, DELTA * math.exp(-entropy)):
                    reached.add(node)
            node = max(reached, key=lambda n: (depth[lane][n], -n))
            runs.append(depth[lane][node])
            while node:
                expected[parent[lane][node]] = token[lane][node]
                node = parent[lane][node]
        assert chosen_BN[lane].tolist() == expected, lane
    assert set(runs) == {0, 1, 2, 3}, "paths of every length, or the test shows little"


def test_the_engine_runs_it_and_says_that_it_is_lossy(typical: None, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for rule in ("match", "typical"):
        with caplog.at_level(logging.WARNING):
            llm = LLM(pair.target, variant="eagle3", draft=str(pair.draft), draft_noise="none", rule=rule, **{**SMALL, **TREE})
        prompt_ids = prompts(3)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == [pair.greedy(prompt, 16) for prompt in prompt_ids]
        llm.generate(prompt_ids, SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True))
        assert llm.metrics is not None and llm.metrics.lossy == (rule == "typical")
        found[rule] = llm.metrics.acceptance_length
    assert found["typical"] > found["match"], "it accepts more than the target's own samples"
    assert "accept.rule=typical: the output does not have the target's distribution" in caplog.text


@pytest.mark.parametrize(
    ("points", "module", "found"),
    [
        ("match = broken_rule:RULE", 'RULE = AcceptanceRule(name="match", summary="", make="")', "next to the rule of that name"),
        ("mine = broken_rule:RULE", "RULE = 3", "broken_rule:RULE: 3"),
    ],
)
def test_a_bad_entry_point_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, points: str, module: str, found: str
) -> None:
    site = install(tmp_path / "site", f"[graphspec.acceptance_rules]\n{points}\n")
    (site / "broken_rule.py").write_text(f"from graphspec.config.catalog import AcceptanceRule\n{module}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "broken_rule", raising=False)
    with pytest.raises(ConfigError, match=r"graphspec\.acceptance_rules") as caught:
        all_acceptance_rules()
    assert found in caught.value.found
