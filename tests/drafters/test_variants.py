"""Every variant: the output is the target's own, and what the cycle drafts is what the network gives without cache, pages and windows.

A hand-made pairwise cover; the whole cross stands in ``test_equality_full.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.api.llm import LLM, SamplingParams, generate_through
from graphspec.graphs.cycle import RingEntry
from graphspec.graphs.programs import Key
from graphspec.graphs.stages.mailbox import Message
from graphspec.shapes import GraphKey
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention
from tests.support.engines import CHAIN, TREE, WIDE, ids, prompts
from tests.support.features import of_family
from tests.support.variants import Family

LENGTH = 18
HEADS = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
STATIC = {"tree_choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 2], [0, 0, 0, 0]]}
PATHS = {"num_steps": 5, "topk": 3, "num_draft_tokens": 9}
PROB = {"num_steps": 6, "topk": 4, "num_draft_tokens": 10, "ngram": {"match": "prob", "max_window": 4}}

# draft, shape, page size, batch, rows, run-ahead
CASES: list[tuple[str, dict[str, Any], int, int, int, int]] = [
    ("none", {}, 1, 3, 2, 1),
    ("eagle", CHAIN, 16, 8, 8, 2),
    ("eagle", TREE, 1, 3, 8, 0),
    ("eagle", STATIC, 16, 1, 1, 1),
    ("eagle", STATIC, 1, 8, 4, 0),
    ("mtp-1", CHAIN, 1, 1, 8, 0),
    ("mtp-1", TREE, 16, 3, 2, 1),
    ("mtp-1", WIDE, 16, 8, 8, 2),
    ("mtp-3", HEADS, 16, 8, 4, 1),
    ("mtp-3", HEADS, 1, 3, 8, 2),
    ("mtp-3", {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}, 16, 1, 1, 0),
    ("standalone", CHAIN, 1, 8, 3, 1),
    ("standalone", TREE, 16, 1, 8, 2),
    ("standalone", WIDE, 16, 3, 8, 0),
    ("ngram", {}, 16, 8, 8, 1),
    ("ngram", PATHS, 1, 3, 2, 2),
    ("ngram", CHAIN, 16, 1, 1, 0),
    ("ngram_trie", {}, 16, 8, 4, 0),
    ("ngram_trie", PROB, 1, 3, 8, 0),
    ("ngram_trie", CHAIN, 16, 1, 8, 0),
]


NETWORKS = ("eagle", "mtp-1", "mtp-3", "standalone")


def name_of(value: object) -> str | None:
    return "-".join(str(v) for v in value.values() if isinstance(v, int)) or "static" if isinstance(value, dict) else None


def make(family: Family, name: str, shape: dict[str, Any], **overrides: Any) -> LLM:
    from graphspec.config.schema import NgramSettings

    values = {**shape, **overrides}
    if "ngram" in values:
        values["ngram"] = NgramSettings(**values["ngram"])
    return family.llm(name, **values)


def mixed(temperature: float, batch: int, length: int = LENGTH) -> list[SamplingParams]:
    """Another mixture of filters, penalties and bias for every row; the third and the sixth row are greedy."""
    mixtures: list[dict[str, Any]] = [
        {"top_p": 0.8},
        {"top_k": 7, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"min_p": 0.05, "frequency_penalty": 0.7},
        {"logit_bias": {3: 2.0, 5: -4.0}, "top_p": 0.95, "top_k": 20},
        {"temperature": 0.0},
        {"min_tokens": 12},
        {"top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    ]
    return [SamplingParams(**{"max_tokens": length, "temperature": temperature, "seed": i, **mixtures[i % 8]}) for i in range(batch)]


def covered(name: str, shape: dict[str, Any], page_size: int, batch: int, rows: int, run_ahead: int) -> list[str]:
    """Features a case of :data:`CASES` shows, as docs/features.md calls them."""
    del rows
    kind = "static tree" if "tree_choices" in shape else "chain" if shape.get("topk") == 1 else "tree"
    return [
        *([] if name == "none" else [kind]),
        "greedy equals transformers",
        "seeded sampling equals plain decoding",
        "filters, penalties and bias mixed in a batch",
        f"pages of {page_size}",
        "batch" if batch > 1 else "single request",
        *(["run-ahead"] if run_ahead else []),
    ]


def variant_of(name: str) -> str:
    return name.partition("-")[0]


def of_llama(name: str, shape: dict[str, Any], *columns: str) -> pytest.MarkDecorator:
    """What a case shows of its target's family."""
    kind = [] if name == "none" else ["chain" if shape.get("topk") == 1 else "tree"]
    return of_family("LlamaForCausalLM", variant_of(name), *kind, *columns)


@pytest.mark.parametrize(
    ("name", "shape", "page_size", "batch", "rows", "run_ahead"),
    [pytest.param(*case, marks=(pytest.mark.covers(variant_of(case[0]), *covered(*case)), of_llama(*case[:2]))) for case in CASES],
    ids=name_of,
)
def test_output_is_the_targets_own(
    family: Family, name: str, shape: dict[str, Any], page_size: int, batch: int, rows: int, run_ahead: int
) -> None:
    """Greedy as transformers decodes, and sampled as plain decoding does with the same seed."""
    llm = make(family, name, shape, page_size=page_size, max_rows=rows, cycles_in_flight=run_ahead + 1)
    prompt_ids = prompts(batch, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == [family.pair.greedy(prompt, LENGTH) for prompt in prompt_ids]
    assert llm.metrics is not None
    if llm.plan.variant.has_network and batch > 1:
        assert 1.2 < llm.metrics.acceptance_length < llm.plan.shape.num_steps + 0.95, "runs of several lengths, or the test shows nothing"

    temperature = 0.7 if page_size == 1 else 1.0
    unfiltered = [SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=50 + i) for i in range(batch)]
    for kind, params in (("unfiltered", unfiltered), ("mixed", mixed(temperature, batch))):
        key = (kind, temperature, batch)
        if key not in family.plain:
            family.plain[key] = ids(family.llm("none").generate(prompt_ids, params))
        assert ids(llm.generate(prompt_ids, params)) == family.plain[key], kind


class Watch:
    """A launcher that notes the nodes of every cycle of a single request."""

    def __init__(self, llm: LLM) -> None:
        self.cycle, self.nodes = llm.cycle, []

    @property
    def in_flight(self) -> int:
        return self.cycle.in_flight

    def launch(self, key: Key, message: Message) -> int:
        ticket = self.cycle.launch(key, message)
        if isinstance(key, GraphKey):
            self.nodes.append(self.cycle.arena.views(1).node_token_BN[0].tolist())
        return ticket

    def read(self, ticket: int) -> RingEntry:
        return self.cycle.read(ticket)


def dense(begin: int, length: int) -> DenseAttention:
    position_BT = torch.arange(begin, begin + length)[None]
    return DenseAttention(position_BT, position_BT + 1, torch.ones_like(position_BT, dtype=torch.bool))


def best(llm: LLM, hidden_BTH: Tensor, step: int) -> int:
    return int(llm.cycle.draft.logits(hidden_BTH[:, -1], step).argmax())


def chain_from_scratch(llm: LLM, model: Any, tokens: list[int], steps: int) -> list[int]:
    """What a chain drafts after ``tokens``, the last of which is the root: all rows recomputed in one causal pass."""
    draft, plan = llm.cycle.draft, llm.plan
    token_1T = torch.tensor([tokens])
    drafted: list[int] = []
    if not plan.feature_width:
        for step in range(steps):
            whole_1T = torch.cat((token_1T, torch.tensor([drafted], dtype=torch.int64)), 1)
            drafted.append(best(llm, draft(whole_1T, None, dense(0, whole_1T.shape[1]), step), step))
        return drafted
    # The last of transformers' hidden states has been through the final norm. The root's feature isn't known yet.
    feature_1TF = model(token_1T, output_hidden_states=True).hidden_states[-1][:, :-1]
    hidden_1TH, rows = draft.fuse(feature_1TF), len(tokens) - 1
    if plan.lookback:
        for step in range(steps):
            shifted = [*tokens[1 + step :], *drafted]
            hidden_1TH = draft(torch.tensor([shifted]), hidden_1TH, dense(0, rows), step)
            drafted.append(best(llm, hidden_1TH, step))
        return drafted
    for step in range(steps):
        consumed_1T = torch.tensor([[*tokens[1:], *drafted]])
        out_1TH = draft(consumed_1T, hidden_1TH, dense(0, rows + step), step)
        drafted.append(best(llm, out_1TH, step))
        hidden_1TH = torch.cat((hidden_1TH, out_1TH[:, -1:]), 1)
    return drafted


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.covers(variant_of(n), "drafts equal those without a cache")) for n in NETWORKS]
)
@pytest.mark.parametrize("length", [2, 9, 21])
def test_drafts_are_those_of_the_network_without_a_cache(family: Family, name: str, length: int) -> None:
    """Prompts shorter than a chunk, on its border, and over several chunks; every cycle of the request."""
    steps = 3
    llm = family.llm(name, num_steps=steps, topk=1, num_draft_tokens=steps + 1, page_size=4)
    prompt = prompts(1, (length,), VOCAB_SIZE, seed=length)[0]
    watch = Watch(llm)
    with torch.no_grad():
        output = generate_through(llm, watch, prompt, SamplingParams(max_tokens=26, ignore_eos=True))[0]
        known = [*prompt, *output.token_ids]
        at, lengths = len(prompt), set()
        for nodes in watch.nodes:
            assert nodes[0] == known[at]
            assert nodes[1:] == chain_from_scratch(llm, family.pair.hf, known[: at + 1], steps), f"root at {at}"
            taken = next((d for d in range(steps) if at + 1 + d >= len(known) or nodes[1 + d] != known[at + 1 + d]), steps)
            lengths.add(taken)
            at += taken + 1
    assert len(watch.nodes) > 6
    assert len(lengths) > 1, "runs of several lengths, or the windows were not tested"


def test_the_trie_learns_from_other_requests(family: Family) -> None:
    """The same prompt again: the second request finds its whole answer in the trie."""
    llm = family.llm("ngram_trie", num_steps=4, topk=4, num_draft_tokens=8)
    prompt = prompts(1, (12,), VOCAB_SIZE)[0]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.metrics.acceptance_length > 3.5 > first.metrics.acceptance_length


def test_the_device_matcher_copies_a_repeating_prompt(family: Family) -> None:
    llm = family.llm("ngram", num_steps=4, topk=1, num_draft_tokens=5)
    output = llm.generate([3, 8, 1] * 5, SamplingParams(max_tokens=60, ignore_eos=True))[0]
    assert output.token_ids == family.pair.greedy([3, 8, 1] * 5, 60, ignore_eos=True)
    assert output.metrics.cycles < 59, "greedy decoding of this target repeats itself, and the matcher sees it"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.covers(variant_of(n), "preemption and exact resumption"))
        for n in (*NETWORKS, "ngram", "ngram_trie")
    ],
)
def test_preemption_resumes_exactly(family: Family, name: str) -> None:
    shape = HEADS if name == "mtp-3" else CHAIN
    llm = family.llm(name, **shape, page_size=4, max_rows=4, num_pages=24)
    prompt_ids = prompts(4, (9, 12, 5, 16), VOCAB_SIZE)
    outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=20, ignore_eos=True))
    assert ids(outputs) == [family.pair.greedy(prompt, 20, ignore_eos=True) for prompt in prompt_ids]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.covers(variant_of(n), "token map")) for n in ("eagle", "mtp-1", "standalone")]
)
def test_a_token_map_trims_the_head_and_not_the_output(family: Family, tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    kept = torch.arange(0, VOCAB_SIZE, 2)
    save_file({"token_map": kept}, tmp_path / "map.safetensors")
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    llm = family.llm(name, **TREE, token_map=str(tmp_path / "map.safetensors"))
    assert llm.cycle.draft.logits(torch.zeros(1, 48)).shape[-1] == len(kept)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=12))) == [family.pair.greedy(prompt, 12) for prompt in prompt_ids]
    offered = llm.draft_tree(prompt_ids[0]).token_N[1:]
    assert offered and all(token % 2 == 0 for token in offered)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.covers(variant_of(n), "log-probabilities")) for n in (*NETWORKS, "ngram", "ngram_trie")]
)
def test_log_probabilities_do_not_depend_on_the_draft(family: Family, name: str) -> None:
    prompt_ids, params = prompts(3, vocab=VOCAB_SIZE), SamplingParams(max_tokens=12, temperature=0.8, seed=4, logprobs=2)
    found = [family.llm(n).generate(prompt_ids, params) for n in ("none", name)]
    for plain, drafted in zip(*found, strict=True):
        assert plain.token_ids == drafted.token_ids
        assert plain.logprobs is not None and drafted.logprobs is not None
        for left, right in zip(plain.logprobs, drafted.logprobs, strict=True):
            assert (left.token_id, list(left.top)) == (right.token_id, list(right.top))
            assert right.logprob == pytest.approx(left.logprob, abs=1e-5)


RULES = [
    *((n, "target_only", {}) for n in (*NETWORKS, "ngram", "ngram_trie")),
    *((n, "rejection", HEADS) for n in NETWORKS),
    *((n, "synthetic", {"synthetic_length": 2.5, **HEADS}) for n in NETWORKS),
]


@pytest.mark.parametrize(
    ("name", "rule", "keys"), [pytest.param(*case, marks=pytest.mark.covers(variant_of(case[0]), f"accept={case[1]}")) for case in RULES]
)
def test_acceptance_rules(family: Family, name: str, rule: str, keys: dict[str, Any]) -> None:
    """Greedy rows do not notice an exact rule, sampled ones finish; a forced length comes out."""
    llm = family.llm(name, rule=rule, **keys)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    params = [SamplingParams(max_tokens=40, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0, 0.0)]
    outputs = llm.generate(prompt_ids, params)
    assert [len(output.token_ids) for output in outputs] == [40] * 3
    if rule == "synthetic":
        assert llm.metrics is not None and llm.metrics.synthetic
        assert llm.metrics.acceptance_length == pytest.approx(2.5, abs=0.35)
    else:
        assert [outputs[i].token_ids for i in (0, 2)] == [family.pair.greedy(prompt_ids[i], 40, ignore_eos=True) for i in (0, 2)]
