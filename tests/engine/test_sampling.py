"""Penalties, bias, minimum length and filters: against transformers, against slow Python, and the same with and without drafts."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams, sampling_class
from graphspec.errors import RequestError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key
from graphspec.graphs.stages.mailbox import Message
from graphspec.graphs.stages.sampling import LogitShaper, sample_tokens, trusted
from graphspec.kernels import select_kernels
from graphspec.kernels.sampling.filter_logits import filter_logits
from graphspec.kernels.sampling.topk import stable_topk
from graphspec.kernels.tree.tree_build import causal_words
from graphspec.plan.buffers import POISON
from graphspec.shapes import GREEDY, GraphKey, SamplingClass
from tests.support.engines import CHAIN, MIRROR_VOCAB, TREE, WIDE, Pair, idle_rows, ids, prompts, watch_schedulers

KERNELS = select_kernels("reference", "auto", "cpu")
LENGTH = 18
STOPS = (5, 9, 17, 23, 31)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.8},
    {},
    {"temperature": 1.0, "top_k": 4},
    {"repetition_penalty": 1.4},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.7, "logit_bias": {5: 4.0, 7: 6.0, 20: -100.0}},
    {"min_tokens": 12, "stop_token_ids": STOPS},
    {
        "temperature": 0.7, "top_p": 0.95, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": -0.3,
        "frequency_penalty": 0.4, "logit_bias": {11: 3.0, 8: -2.0}, "min_tokens": 9, "stop_token_ids": STOPS,
    },
]  # fmt: skip


def some_params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, seed=50 + index, **KINDS[index % len(KINDS)])


@pytest.fixture(scope="module")
def alone(pair: Pair) -> list[list[int]]:
    """Plain decoding of each request alone, and so with its own sampling class."""
    llm = pair.llm(variant="none", max_rows=1)
    return [llm.generate([prompt], some_params(i))[0].token_ids for i, prompt in enumerate(prompts(len(KINDS)))]


@pytest.mark.covers("eagle3", "filters, penalties and bias mixed in a batch")
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ({"variant": "none"}, {"max_rows": 4}),
        (CHAIN, {"page_size": 1, "max_rows": 8}),
        (CHAIN, {"draft_noise": "none", "cycles_in_flight": 3, "max_rows": 3, "buckets": [3]}),
        (TREE, {"page_size": 5, "max_rows": 4, "cycles_in_flight": 2}),
        (WIDE, {"page_size": 16, "max_rows": 8}),
    ],
    ids=["none", "chain", "chain-uncoupled", "tree", "wide"],
)
def test_a_mixed_batch_equals_each_request_alone(pair: Pair, alone: list[list[int]], shape: dict[str, Any], keys: dict[str, Any]) -> None:
    """Temperature, filters, penalties, bias and minimum length per row; drafts change nothing, neighbours neither."""
    outputs = pair.llm(**shape, **keys).generate(prompts(len(KINDS)), [some_params(i) for i in range(len(KINDS))])
    assert ids(outputs) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(KINDS)


def test_every_parameter_changes_something(pair: Pair) -> None:
    llm, prompt = pair.llm(variant="none"), prompts(1)[0]
    for kind in KINDS[2:]:
        base = SamplingParams(
            max_tokens=40, temperature=kind.get("temperature", 0.0), seed=3, stop_token_ids=kind.get("stop_token_ids", ())
        )
        changed = replace(base, **kind)
        left, right = (llm.generate([prompt], p)[0].token_ids for p in (base, changed))
        assert left != right, kind


def hf_greedy(pair: Pair, prompt: list[int], length: int, **options: Any) -> list[int]:
    model = copy.deepcopy(pair.hf)
    stop = options.pop("stop", ())
    model.generation_config.eos_token_id = [MIRROR_VOCAB - 1, *stop]
    with torch.no_grad():
        token_BT = torch.tensor([prompt])
        out = model.generate(
            token_BT, attention_mask=torch.ones_like(token_BT), max_new_tokens=length, do_sample=False, pad_token_id=0, **options
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", [{"variant": "none"}, CHAIN, TREE], ids=["none", "chain", "tree"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": {5: 2.5, 30: -4.0}}, {"sequence_bias": {(5,): 2.5, (30,): -4.0}}),
        ({"min_tokens": 15, "stop_token_ids": STOPS}, {"min_new_tokens": 15, "stop": STOPS}),
        (
            {"repetition_penalty": 1.2, "min_tokens": 15, "stop_token_ids": STOPS},
            {"repetition_penalty": 1.2, "min_new_tokens": 15, "stop": STOPS},
        ),
    ],
    ids=["repeat-less", "repeat-more", "bias", "minimum", "both"],
)
def test_greedy_equals_transformers(pair: Pair, shape: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    prompt_ids = prompts(3, (9, 4, 17))
    outputs = pair.llm(**shape, page_size=4).generate(prompt_ids, SamplingParams(max_tokens=24, **ours))
    assert ids(outputs) == [hf_greedy(pair, prompt, 24, **theirs) for prompt in prompt_ids]


VOCAB = 13


def slow_shape(
    logits: list[float], prompt: list[int], output: list[int], shaping: dict[str, Any], position: int, stops: list[int]
) -> list[float]:
    """The order of operations, one token at a time."""
    shaped = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / shaping["repetition"] if logit > 0 else logit * shaping["repetition"]
        logit -= shaping["frequency"] * output.count(token)
        logit -= shaping["presence"] * (token in output)
        logit += shaping["bias"].get(token, 0.0)
        shaped.append(float("-inf") if position < shaping["stop_from"] and token in stops else logit)
    return shaped


class ShapingViews(SimpleNamespace):
    def take(self, group: Any) -> Any:
        return group._make(getattr(self, name) for name in group._fields)


def shaping_views(shapings: list[dict[str, Any]], prompts_: list[list[int]], outputs: list[list[int]], stops: list[int]) -> ShapingViews:
    rows = len(shapings)
    count_RV, seen_RV = torch.zeros(rows, VOCAB, dtype=torch.int32), torch.zeros(rows, VOCAB, dtype=torch.int8)
    bias_id_RI, bias_value_RI = torch.full((rows, 4), -1), torch.zeros(rows, 4)
    for r in range(rows):
        seen_RV[r, prompts_[r]] = 1
        for token in outputs[r]:
            count_RV[r, token] += 1
        for i, (token, value) in enumerate(shapings[r]["bias"].items()):
            bias_id_RI[r, i], bias_value_RI[r, i] = token, value
    return ShapingViews(
        allowed_RU=torch.full((rows, -(-VOCAB // 64)), -1),
        bad_word_RBwBt=torch.full((rows, 2, 3), -1),
        lane_row_B=torch.arange(rows).flip(0),
        output_count_RV=count_RV,
        prompt_seen_RV=seen_RV,
        bias_id_RI=bias_id_RI,
        bias_value_RI=bias_value_RI,
        stop_id_RE=torch.tensor([[*stops, -1]] * rows),
        stop_from_R=torch.tensor([shaping["stop_from"] for shaping in shapings]),
        **{f"{key}_R": torch.tensor([shaping[key] for shaping in shapings]) for key in ("repetition", "presence", "frequency")},
    )


def build(sampling: SamplingClass, vocab: int = VOCAB) -> Any:
    plan = SimpleNamespace(target=SimpleNamespace(vocab_size=vocab))
    return SimpleNamespace(kernels=KERNELS, sampling=sampling, plan=plan)


@pytest.mark.parametrize("mapped", [False, True], ids=["target", "draft"])
def test_every_branch_counts_its_own_path(mapped: bool) -> None:
    """Nodes of random trees, some of whose paths repeat tokens of prompt and output, against one token at a time."""
    generator = torch.Generator().manual_seed(0)
    rows, nodes = 4, 12
    shapings = [
        {"repetition": r, "presence": p, "frequency": f, "bias": b, "stop_from": s}
        for r, p, f, b, s in (
            (1.3, 0.5, 0.25, {3: 2.0}, 0),
            (1.0, 0.0, 0.0, {}, 12),
            (0.7, -1.0, 0.5, {0: -3.0, 12: 1.0}, 8),
            (1.1, 2, 2, {}, 9),
        )
    ]
    spoken = [torch.randint(0, VOCAB, (7,), generator=generator).tolist() for _ in range(2 * rows)]
    stops, seq_len = [2, 6], 6
    v = shaping_views(shapings, spoken[:rows], spoken[rows:], stops)
    parent_N = [-1, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes))]
    token_BN = torch.randint(0, VOCAB, (rows, nodes), generator=generator)
    token_BN[:, -1] = -1
    words_N, paths, depth_N = [0] * nodes, [[]] * nodes, [0] * nodes
    for n in range(nodes):
        above = parent_N[n]
        words_N[n] = (words_N[above] if n else 0) | 1 << n
        paths[n] = [*paths[above], n] if n else []
        depth_N[n] = len(paths[n])
    ancestors_BNX = torch.tensor(words_N)[None, :, None].expand(rows, -1, -1)
    position_BN = (seq_len + 1 + torch.tensor(depth_N)).expand(rows, -1)
    kept = torch.tensor([1, 2, 5, 6, 11, 12]) if mapped else torch.arange(VOCAB)
    logits_BNV = torch.randn(rows, nodes, len(kept), generator=generator) * 3

    shaper = LogitShaper(build(SamplingClass(penalties=True, bias=True)))
    path_BNN = KERNELS.node_paths(token_BN, ancestors_BNX)
    found_BNV = shaper(v, logits_BNV, position_BN, path_BNN, kept if mapped else None)
    different = 0
    for lane in range(rows):
        row = int(v.lane_row_B[lane])
        for n in range(nodes - 1):
            full = torch.zeros(VOCAB)
            full[kept] = logits_BNV[lane, n]
            output = [*spoken[rows + row], *token_BN[lane, paths[n]].tolist()]
            expected = torch.tensor(slow_shape(full.tolist(), spoken[row], output, shapings[row], int(position_BN[lane, n]), stops))[kept]
            torch.testing.assert_close(found_BNV[lane, n], expected, rtol=1e-6, atol=1e-6)
            different += int((expected != logits_BNV[lane, n]).sum())
    assert different > rows * nodes


def test_rows_that_ask_for_nothing_keep_their_bits() -> None:
    neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "bias": {}, "stop_from": 0}
    v = shaping_views([neutral] * 2, [[1, 2]] * 2, [[3, 3]] * 2, [4])
    v.lane_temperature_B, v.top_k_R = torch.tensor([0.0, 1.0])[v.lane_row_B], torch.tensor([3, -1])
    v.top_p_R, v.min_p_R = torch.tensor([0.1, 1.0]), torch.tensor([0.9, 0.0])
    logits_BTV = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    shaper = LogitShaper(build(SamplingClass(True, True, True, True, -1, True, True)))
    shaped_BTV = shaper(v, logits_BTV, torch.full((2, 3), 5), torch.full((2, 3, 2), 3), before_BTt=torch.full((2, 3, 2), 3))
    assert torch.equal(shaper.truncate(v, shaped_BTV), logits_BTV)


@pytest.mark.parametrize("field", ["bias", "allowed", "bad_words"])
def test_a_ban_hides_no_broken_logit(field: str) -> None:
    """Bans put -inf where the sampler then expects it; what the network got wrong is still seen, under a ban too."""
    shaping = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "bias": {1: 0.5}, "stop_from": 9}
    v = shaping_views([shaping], [[1]], [[1]], [2, 4])
    sampling = SamplingClass(**{field: True})
    v.allowed_RU[0, 0] = ~(1 << 2 | 1 << 4)
    v.bad_word_RBwBt[0] = torch.tensor([[-1, -1, 2], [-1, 3, 4]])
    for column, value, sound in ((None, 0.0, True), *((c, x, False) for c in (1, 2, 4, 7) for x in (torch.inf, -torch.inf, torch.nan))):
        logits_11V = torch.linspace(-1, 1, VOCAB)[None, None].clone()
        if column is not None:
            logits_11V[..., column] = value
        shaped_11V = LogitShaper(build(sampling))(v, logits_11V, torch.full((1, 1), 5), before_BTt=torch.tensor([[[9, 3]]]))
        assert column is not None or shaped_11V[0, 0, [2, 4]].tolist() == [-torch.inf] * 2
        token_11, sound_11 = sample_tokens(KERNELS, sampling, v, shaped_11V, torch.full((1, 1), 5))
        assert sound_11.tolist() == [[sound]] == trusted(sampling, shaped_11V).tolist(), (column, value)
        assert token_11.tolist() == [[VOCAB - 1]]
    nothing_11V = torch.full((1, 1, VOCAB), -torch.inf)
    assert not trusted(sampling, nothing_11V) and not trusted(GREEDY, nothing_11V)


def test_words_of_a_chain_are_its_paths() -> None:
    token_BN = torch.tensor([[7, 8, 9]])
    assert KERNELS.node_paths(token_BN, causal_words(3, 1, torch.device("cpu"))[None]).tolist() == [[[-1, -1, -1], [-1, 8, -1], [-1, 8, 9]]]


def filtered(logits_BTV: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    lanes = logits_BTV.shape[0]
    return filter_logits(
        logits_BTV, torch.full((lanes,), temperature), torch.full((lanes,), top_k), torch.full((lanes,), top_p), torch.full((lanes,), min_p)
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1, 0), (0, 0.7, 0), (0, 1, 0.1), (20, 0.9, 0.02), (3, 0.3, 0.5), (500, 0.05, 1)])
def test_filters_keep_what_transformers_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(60, 1, 211, generator=torch.Generator().manual_seed(2)) * 3
    theirs = logits[:, 0] / temperature
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    found = filtered(logits, temperature, top_k, top_p, min_p)[:, 0]
    assert torch.equal(found.isfinite(), theirs.isfinite())
    assert torch.equal(found[found.isfinite()], logits[:, 0][found.isfinite()])
    assert 1 < found.isfinite().sum() < logits.numel()


VALUES = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=24)
# Not st.floats: an engine in the same process flushes denormals, which hypothesis refuses.
SHARES = st.integers(1, 99).map(lambda n: n / 100)


@given(VALUES, st.integers(-1, 26), SHARES, st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.sampled_from([0.3, 1.0, 2.0]), st.randoms())
@settings(max_examples=150, deadline=None)
def test_a_filter_is_one_threshold(values: list[float], top_k: int, top_p: float, min_p: float, temperature: float, rng: Any) -> None:
    logits_11V = torch.tensor([[values]])
    kept_V = filtered(logits_11V, temperature, top_k, top_p, min_p)[0, 0].isfinite()
    kept = [x for x, keep in zip(values, kept_V.tolist(), strict=True) if keep]
    assert kept and max(values) in kept, "the most likely token stays"
    assert all((x in kept) == (x >= min(kept)) for x in values), "one threshold; ties go together"
    order = list(range(len(values)))
    rng.shuffle(order)
    shuffled_V = filtered(logits_11V[..., order], temperature, top_k, top_p, min_p)[0, 0].isfinite()
    assert shuffled_V.tolist() == kept_V[order].tolist()
    assert filtered(logits_11V, 0.0, top_k, top_p, min_p).equal(logits_11V)
    if min_p == 0 and top_p == 1 and 1 <= top_k <= len(values):
        assert min(kept) == sorted(values, reverse=True)[top_k - 1]


@given(VALUES, SHARES)
@settings(max_examples=100, deadline=None)
def test_top_p_is_the_smallest_set_of_that_mass(values: list[float], top_p: float) -> None:
    logits_11V = torch.tensor([[values]])
    share_V = torch.softmax(logits_11V.double()[0, 0], -1)
    kept_V = filtered(logits_11V, 1.0, 0, top_p)[0, 0].isfinite()
    assert share_V[kept_V].sum() >= top_p - 1e-6
    above_V = kept_V & (logits_11V[0, 0] > logits_11V[0, 0][kept_V].min())
    assert share_V[above_V].sum() <= top_p + 1e-6


def _refuse(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("computed without need")


def test_a_class_computes_and_holds_only_what_it_names(pair: Pair) -> None:
    llm = pair.llm(**TREE)
    extra = {"output_count_RV", "prompt_seen_RV", "bias_id_RI", "top_k_R", "ring_logprob_ZBA"}
    kernels = llm.cycle.kernels
    calls: list[tuple[bool, ...]] = []

    def watch(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(tuple(arg is not None for arg in args[1:7]))
        return kernels.sample_tokens(*args)

    llm.cycle.kernels = replace(kernels, gumbel_noise=_refuse, filter_logits=_refuse, sample_tokens=watch)
    greedy = llm.generate(prompts(2), SamplingParams(max_tokens=6))
    assert not extra & {name for name, *_ in llm.slots()}
    assert set(calls) == {(False,) * 6}, "neither noise nor filters"
    calls.clear()
    llm.cycle.kernels = replace(kernels, gumbel_noise=_refuse, filter_logits=_refuse, sample_tokens=watch)
    llm.generate(prompts(2), SamplingParams(max_tokens=6, seed=0, temperature=1.0))
    assert set(calls) == {(True,) * 3 + (False,) * 3}, "noise, no filters"
    assert not extra & {name for name, *_ in llm.slots()}
    before = {name: llm.cycle.arena[name].data_ptr() for name, *_ in llm.slots()}
    llm.cycle.kernels = kernels
    views = llm.cycle.arena.views(2)
    llm.generate(prompts(2), SamplingParams(max_tokens=6, seed=0, temperature=1.0, repetition_penalty=1.1))
    assert extra & {name for name, *_ in llm.slots()} == {"output_count_RV", "prompt_seen_RV"}
    assert views is llm.cycle.arena.views(2) and views.output_count_RV.shape == (9, MIRROR_VOCAB)
    assert {name: llm.cycle.arena[name].data_ptr() for name in before} == before
    llm.cycle.arena.check_addresses()
    llm.cycle.arena.poison(("lane",))
    assert ids(llm.generate(prompts(2), SamplingParams(max_tokens=6))) == ids(greedy)


def test_classes_are_unions() -> None:
    params = [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(repetition_penalty=1.1, logprobs=2)]
    assert sampling_class(params[:2]) == GREEDY, "a filter does nothing at temperature 0"
    assert sampling_class(params) == SamplingClass(penalties=True, logprobs=2)
    hot = SamplingParams(temperature=1.0, top_p=0.5, min_tokens=3, logprobs=0)
    assert sampling_class([hot]) == SamplingClass(True, True, False, True, 0)
    assert sampling_class([*params, hot]) == SamplingClass(True, True, True, True, 2)
    assert sorted([sampling_class([hot]), GREEDY]) == [GREEDY, sampling_class([hot])]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", -2), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("min_p", float("nan")), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")), ("presence_penalty", 2.5), ("frequency_penalty", -3.0), ("min_tokens", 200),
        ("min_tokens", -1),        ("logprobs", 21), ("logprobs", -1), ("logit_bias", {MIRROR_VOCAB: 1.0}), ("logit_bias", {3: 200.0}),
        ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(pair: Pair, key: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        pair.llm(variant="none").generate([1, 2], SamplingParams(**{key: value}))  # type: ignore[arg-type]
    assert caught.value.key.startswith(f"sampling.{key}")


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_preempted_row_resumes_with_its_counts(pair: Pair, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_schedulers(monkeypatch)
    prompt_ids = prompts(4, (9, 16))
    params = [
        SamplingParams(
            max_tokens=40, ignore_eos=True, seed=i, temperature=float(i % 2), repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=30,
            stop_token_ids=STOPS,
        )
        for i in range(4)
    ]  # fmt: skip
    roomy = pair.llm(**shape, page_size=4).generate(prompt_ids, params)
    tight = pair.llm(**shape, page_size=4, num_pages=30, cycles_in_flight=2).generate(prompt_ids, params)
    assert (made[0].preempted, made[1].preempted > 0) == (0, True)
    assert ids(tight) == ids(roomy)
    assert min(map(len, ids(roomy))) >= 30


def test_idle_rows_and_lanes_may_hold_anything(pair: Pair, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cycle may not read is NaN, or a number no index survives, before every launch."""
    made = watch_schedulers(monkeypatch)
    launch, poisoned = Cycle.launch, []

    def poison(self: Cycle, key: Key, message: Message) -> int:
        self.arena.poison(("lane",))
        if isinstance(key, GraphKey):
            idle_R = idle_rows(self, made[-1])
            made[-1]._rows.forget()
            for slot in self.arena.slots:
                if slot.group and slot.kind == "state":
                    tensor = self.arena[slot.name]
                    tensor[idle_R] = float("nan") if tensor.is_floating_point() else max(POISON, torch.iinfo(tensor.dtype).min)
                    poisoned.append(slot.name)
        return launch(self, key, message)

    monkeypatch.setattr(Cycle, "launch", poison)
    llm = pair.llm(**TREE, max_rows=4, cycles_in_flight=2)
    assert ids(llm.generate(prompts(len(KINDS)), [some_params(i) for i in range(len(KINDS))])) == alone
    assert len(set(poisoned)) == 11


def test_penalties_forget_the_row_before(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_rows=1)
    params = SamplingParams(max_tokens=LENGTH, repetition_penalty=1.5)
    prompt_ids = prompts(3)
    together = ids(llm.generate(prompt_ids, params))
    assert together == [llm.generate([prompt], params)[0].token_ids for prompt in prompt_ids]
    assert together == [hf_greedy(pair, prompt, LENGTH, repetition_penalty=1.5) for prompt in prompt_ids]


def test_compiled_with_everything_equals_plain_decoding(pair: Pair, alone: list[list[int]]) -> None:
    """One graph, all of it: the whole of torch.compile's fullgraph promise for the widest class."""
    llm = pair.llm(num_steps=1, topk=1, num_draft_tokens=2, runtime="compiled", buckets=[3], max_rows=3)
    assert ids(llm.generate(prompts(len(KINDS)), [some_params(i) for i in range(len(KINDS))])) == alone


def test_ties_of_the_largest_logit_are_kept_by_every_filter() -> None:
    logits_11V = torch.tensor([[[1.0, 3.0, 3.0, 2.0]]])
    assert filtered(logits_11V, 1.0, 1, 0.01, 1.0).isfinite().tolist() == [[[False, True, True, False]]]
    assert stable_topk(logits_11V, 1)[1].item() == 1


def test_an_engine_of_another_kind_is_not_affected(pair: Pair) -> None:
    """Greedy text with and without other classes having run on the engine."""
    llm: LLM = pair.llm(**CHAIN)
    prompt_ids = prompts(2)
    llm.generate(prompt_ids, [some_params(8), some_params(5)])
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == [pair.greedy(prompt, LENGTH) for prompt in prompt_ids]
