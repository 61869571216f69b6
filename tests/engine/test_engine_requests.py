"""Requests of every kind through the engine: how they end, which are refused, what they share, and that they leave no state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphspec.api.llm import SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import CheckpointError, ConfigError, RequestError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key
from graphspec.graphs.stages.mailbox import Message
from graphspec.shapes import GraphKey
from tests.support.engines import (
    CHAIN,
    MIRROR_VOCAB,
    TREE,
    Pair,
    Watched,
    add_tokenizer,
    continued,
    ids,
    mirror_pair,
    prompts,
    watch_schedulers,
    words,
)

PLAIN: dict[str, Any] = {"variant": "none"}
SHAPES = pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=["none", "chain", "tree"])
NOISE = 0.8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"), noise=NOISE)
    add_tokenizer(made.target)
    return made


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watched]]:
    """Schedulers of the test; every one must have given back all it took."""
    made = watch_schedulers(monkeypatch)
    yield made
    assert made
    for scheduler in made:
        assert_balanced(scheduler)


def assert_balanced(scheduler: Scheduler) -> None:
    assert scheduler.allocator.num_used == 0
    assert sorted(scheduler._free_rows) == list(range(scheduler.plan.max_rows))
    assert scheduler.launcher.in_flight == 0


@SHAPES
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_more_requests_than_rows(pair: Pair, schedulers: list[Watched], shape: dict[str, Any], run_ahead: int) -> None:
    llm = pair.llm(**shape, max_rows=3, cycles_in_flight=run_ahead + 1)
    prompt_ids = prompts(8)
    lengths = [1, 2, 3, 20, 4, 9, 1, 14]
    outputs = llm.generate(prompt_ids, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert ids(outputs) == [pair.greedy(p, n, ignore_eos=True) for p, n in zip(prompt_ids, lengths, strict=True)]
    assert [(o.index, o.finish_reason, o.error, o.prompt_token_ids) for o in outputs] == [
        (i, "length", None, p) for i, p in enumerate(prompt_ids)
    ]
    for output in outputs:
        assert output.metrics.cycles <= max(0, len(output.token_ids) - 1)
    assert llm.metrics is not None
    assert llm.metrics.cycles == sum(o.metrics.cycles for o in outputs)


@SHAPES
def test_a_stop_id_ends_the_run_it_is_in(pair: Pair, schedulers: list[Watched], shape: dict[str, Any]) -> None:
    prompt = prompts(1)[0]
    whole = pair.greedy(prompt, 24, ignore_eos=True)
    stops = list(dict.fromkeys(whole))[:6]
    params = [SamplingParams(max_tokens=24, stop_token_ids=[stop], ignore_eos=True) for stop in stops]
    outputs = pair.llm(**shape).generate([prompt] * len(stops), params)
    for stop, output in zip(stops, outputs, strict=True):
        assert output.token_ids == whole[: whole.index(stop) + 1] == pair.greedy(prompt, 24, ignore_eos=True, stop=[stop])
        assert output.finish_reason == "stop"


@SHAPES
def test_end_of_text_and_ignoring_it(pair: Pair, schedulers: list[Watched], shape: dict[str, Any], tmp_path: Any) -> None:
    prompt = prompts(1)[0]
    eos = pair.greedy(prompt, 24, ignore_eos=True)[7]
    ending = mirror_pair(tmp_path, noise=NOISE, eos=eos)
    stopped, ignored, cut = ending.llm(**shape).generate(
        [prompt] * 3, [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=3)]
    )
    assert (stopped.token_ids, stopped.finish_reason) == (ending.greedy(prompt, 24), "stop")
    assert stopped.token_ids[-1] == eos
    assert len(stopped.token_ids) <= 8
    assert (ignored.token_ids, ignored.finish_reason) == (ending.greedy(prompt, 24, ignore_eos=True), "length")
    assert eos in ignored.token_ids[:-1]
    assert cut.token_ids == ending.greedy(prompt, 3)


@SHAPES
def test_a_stop_id_and_the_budget_on_one_token(pair: Pair, schedulers: list[Watched], shape: dict[str, Any]) -> None:
    prompt = prompts(1)[0]
    whole = pair.greedy(prompt, 24, ignore_eos=True)
    for length in (1, 3):
        params = SamplingParams(max_tokens=length, stop_token_ids=[whole[length - 1]], ignore_eos=True)
        first = whole.index(whole[length - 1]) + 1
        output = pair.llm(**shape).generate(prompt, params)[0]
        assert (output.token_ids, output.finish_reason) == (whole[:first], "stop")


@SHAPES
def test_prompts_around_chunk_sizes(pair: Pair, schedulers: list[Watched], shape: dict[str, Any]) -> None:
    lengths = (1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 47, 48, 49)
    prompt_ids = prompts(len(lengths), lengths)
    outputs = pair.llm(**shape, prefill_chunks=[8, 16], page_size=5).generate(prompt_ids, SamplingParams(max_tokens=9))
    assert ids(outputs) == [pair.greedy(prompt, 9) for prompt in prompt_ids]


def test_duplicate_prompts(pair: Pair, schedulers: list[Watched]) -> None:
    prompt = prompts(1)[0]
    outputs = pair.llm(**TREE, max_rows=4).generate([prompt] * 6, SamplingParams(max_tokens=15))
    assert ids(outputs) == [pair.greedy(prompt, 15)] * 6


def test_text_and_ids_are_one_prompt(pair: Pair, schedulers: list[Watched]) -> None:
    prompt_ids = prompts(3)
    llm = pair.llm(**CHAIN)
    params = SamplingParams(max_tokens=8)
    by_ids = llm.generate(prompt_ids, params)
    for outputs in (
        llm.generate([words(p) for p in prompt_ids], params),
        llm.generate([words(prompt_ids[0]), prompt_ids[1], tuple(prompt_ids[2])], params),
        [llm.generate(words(p), params)[0] for p in prompt_ids],
        [llm.generate(p, params)[0] for p in prompt_ids],
    ):
        assert ids(outputs) == ids(by_ids)
        assert [o.prompt_token_ids for o in outputs] == prompt_ids
        assert [o.text for o in outputs] == [continued(o.token_ids) for o in by_ids]
    assert llm.generate([]) == []


def test_text_needs_a_tokenizer(tmp_path: Any) -> None:
    llm = mirror_pair(tmp_path).llm(**PLAIN)
    assert [o.text for o in llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))] == [""]
    with pytest.raises(CheckpointError, match="tokenizer files"):
        llm.generate("w1 w2")


@SHAPES
def test_the_context_ends(pair: Pair, schedulers: list[Watched], shape: dict[str, Any]) -> None:
    llm = pair.llm(**shape, max_context=24, page_size=7, cycles_in_flight=2)
    prompt_ids = prompts(4, (10, 23, 22, 1))
    outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=60, ignore_eos=True))
    for prompt, output in zip(prompt_ids, outputs, strict=True):
        assert output.token_ids == pair.greedy(prompt, 24 - len(prompt), ignore_eos=True)
        assert output.finish_reason == "length"


def test_the_whole_context_of_the_checkpoint(pair: Pair, schedulers: list[Watched]) -> None:
    prompt = prompts(1, (70,))[0]
    outputs = pair.llm(**TREE).generate(prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    assert ids(outputs) == [pair.greedy(prompt, 26, ignore_eos=True)]


@pytest.mark.covers("eagle3", "preemption and exact resumption")
@pytest.mark.parametrize(
    ("shape", "page_size", "run_ahead", "temperature"),
    [(PLAIN, 8, 2, 0.0), (PLAIN, 1, 0, 1.0), (CHAIN, 1, 2, 0.0), (CHAIN, 8, 0, 1.0), (TREE, 4, 2, 1.0), (TREE, 8, 0, 0.0)],
    ids=["none", "none-sampled", "chain", "chain-sampled", "tree-sampled", "tree"],
)
def test_preempted_rows_go_on_where_they_were(
    pair: Pair, schedulers: list[Watched], shape: dict[str, Any], page_size: int, run_ahead: int, temperature: float
) -> None:
    prompt_ids = prompts(4, (9, 3, 12, 6))
    params = [SamplingParams(max_tokens=30, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)]
    roomy = pair.llm(**PLAIN).generate(prompt_ids, params)
    llm = pair.llm(**shape, page_size=page_size, cycles_in_flight=run_ahead + 1, max_rows=4, num_pages=96 // page_size)
    outputs = llm.generate(prompt_ids, params)
    assert ids(outputs) == ids(roomy)
    assert schedulers[-1].preempted > 0
    if temperature == 0:
        assert ids(outputs) == [pair.greedy(prompt, 30, ignore_eos=True) for prompt in prompt_ids]


@SHAPES
def test_a_request_alone_and_too_big(pair: Pair, schedulers: list[Watched], shape: dict[str, Any]) -> None:
    llm = pair.llm(**shape, page_size=4, num_pages=8)
    small, large = prompts(2, (3, 6))
    outputs = llm.generate([large, small], [SamplingParams(max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)])
    assert [o.finish_reason for o in outputs] == ["memory", "length"]
    assert 0 < len(outputs[0].token_ids) < 60
    assert outputs[0].token_ids == pair.greedy(large, 60, ignore_eos=True)[: len(outputs[0].token_ids)]
    assert outputs[1].token_ids == pair.greedy(small, 5, ignore_eos=True)


def test_a_prompt_larger_than_the_pool(pair: Pair) -> None:
    llm = pair.llm(**TREE, page_size=4, num_pages=8)
    with pytest.raises(
        RequestError, match=r"^runtime\.num_pages: expected 10 pages of 4 for a prompt of 30 tokens and the window after it, found 8"
    ):
        llm.generate(prompts(1, (30,))[0])


BAD: list[tuple[list[int], SamplingParams, str, str]] = [
    ([], SamplingParams(), "prompt", "at least one token, found an empty prompt"),
    ([1, MIRROR_VOCAB], SamplingParams(), "prompt[1]", f"a token id from 0 to {MIRROR_VOCAB - 1}, found {MIRROR_VOCAB}"),
    ([-1, 1], SamplingParams(), "prompt[0]", "found -1"),
    ([1] * 96, SamplingParams(), "prompt", "at most 95 tokens (max_context 96, one of them new), found 96 tokens"),
    ([1], SamplingParams(logprobs=21), "sampling.logprobs", "None, or 0 to runtime.max_logprobs = 20, found 21"),
    ([1], SamplingParams(logit_bias={MIRROR_VOCAB: 1.0}), "sampling.logit_bias", f"token ids from 0 to {MIRROR_VOCAB - 1}"),
    ([1], SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias", "at most runtime.max_logit_bias = 300 tokens"),
    ([1], SamplingParams(stop_token_ids=[MIRROR_VOCAB]), "sampling.stop_token_ids", f"found {MIRROR_VOCAB}"),
    (
        [1],
        SamplingParams(stop_token_ids=range(8)),
        "sampling.stop_token_ids",
        "at most runtime.max_stop_ids = 8, end-of-text ids included, found 9",
    ),
]


def test_bad_requests_fail_alone(pair: Pair, schedulers: list[Watched]) -> None:
    llm = pair.llm(**CHAIN)
    good = prompts(2)
    outputs = llm.generate(
        [good[0], *(p for p, *_ in BAD), good[1]], [SamplingParams(max_tokens=9), *(s for _, s, *_ in BAD), SamplingParams(max_tokens=9)]
    )
    assert [outputs[0].token_ids, outputs[-1].token_ids] == [pair.greedy(p, 9) for p in good]
    for output, (prompt, _, key, message) in zip(outputs[1:-1], BAD, strict=True):
        assert (output.finish_reason, output.token_ids, output.prompt_token_ids) == ("error", [], prompt)
        assert output.error is not None
        assert output.error.startswith(f"{key}: expected ")
        assert message in output.error


@pytest.mark.parametrize(("prompt", "params", "key", "message"), BAD[1:])
def test_a_bad_request_alone_raises(pair: Pair, prompt: list[int], params: SamplingParams, key: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        pair.llm(**PLAIN).generate(prompt, params)
    assert caught.value.key == key
    assert message in str(caught.value)


def test_requests_of_wrong_types_fail_alone(pair: Pair, schedulers: list[Watched]) -> None:
    """Each between two valid requests, whose tokens do not change; the message says what was found."""
    llm = pair.llm(**CHAIN)
    good, params = prompts(2), SamplingParams(max_tokens=9)
    expected = [pair.greedy(p, 9) for p in good]
    bad: list[Any] = [
        [1.5],
        [True],
        [float("nan")],
        [10**30],
        [None],
        ["1"],
        None,
        b"w1",
        {"prompt": 5},
        {"prompt_token_ids": [1.0]},
        "\ud800",
    ]
    for prompt in bad:
        outputs = llm.generate([good[0], prompt, good[1]], params)
        assert [outputs[0].token_ids, outputs[2].token_ids] == expected
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
        assert outputs[1].error is not None and outputs[1].error.startswith("prompt")
    same = llm.generate([{"prompt_token_ids": good[0]}, {"prompt": words(good[1])}], params)  # type: ignore[list-item]
    assert ids(same) == expected


def test_arguments_of_a_call_are_checked(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_context=20)
    calls: list[tuple[str, Any]] = [
        ("progress: expected a function", lambda: llm.generate([1], progress=5)),  # type: ignore[arg-type]
        ("sampling.max_token: .*did you mean max_tokens", lambda: llm.generate([1], {"max_token": 3})),
        ("params: expected a SamplingParams", lambda: next(llm.stream([1], 3))),  # type: ignore[arg-type]
        ("prompts: expected a text", lambda: next(llm.stream(None))),  # type: ignore[arg-type]
        ("requests: expected an integer >= 1, found 0", lambda: llm.warm_up(0)),
        ("requests: expected an integer, found 'a'", lambda: llm.warm_up("a")),  # type: ignore[arg-type]
        ("sampling: expected a SamplingClass, found 5", lambda: llm.warm_up(1, sampling=5)),  # type: ignore[arg-type]
        ("cycles: expected an integer >= 1, at most 18, found 0", lambda: llm.draft_tree([1], 0)),
        ("cycles: expected an integer >= 1, at most 18, found 1000000", lambda: llm.draft_tree([1], 10**6)),
        ("cycles: expected an integer, found True", lambda: llm.draft_tree([1], True)),
        ("prompt: expected one prompt, found 2 of them", lambda: llm.draft_tree([[1], [2]])),  # type: ignore[list-item]
        ("prompt: expected one prompt, found 0 of them", lambda: llm.draft_tree([])),
    ]
    for message, call in calls:
        with pytest.raises(RequestError, match=message):
            call()


def test_keys_of_other_engines_are_explained(pair: Pair) -> None:
    for keys, hint in (
        ({"max_model_len": 64}, "here it is max_context"),
        ({"gpu_memory_utilization": 0.5}, "here it is memory_fraction"),
        ({"tensor_parallel_size": 2}, "here it is tensor_parallel"),
        ({"pp_size": 2}, "a target is spread by tensor_parallel alone"),
        ({"port": 8000}, "graphspec serve has server.host, port"),
        ({"guided_regex": "a+"}, r"SamplingParams\(structured=...\)"),
        ({"seed": 3}, r"each request has its own: SamplingParams\(seed=...\)"),
        ({"max_new_tokens": 3}, r"SamplingParams\(max_tokens=...\)"),
        ({"pag_size": 3}, "did you mean page_size"),
        ({"tempature": 1}, r"did you mean SamplingParams\(temperature=...\)"),
        ({"dtype": "half"}, "did you mean float16"),
        ({"device": "gpu"}, "did you mean cuda"),
        ({"zzz": object()}, "docs/configuration.md"),
    ):
        with pytest.raises(ConfigError, match=hint) as caught:
            pair.llm(**PLAIN, **keys)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 200


@SHAPES
def test_requests_without_a_seed_share_no_noise(pair: Pair, schedulers: list[Watched], shape: dict[str, Any]) -> None:
    prompt_ids = prompts(60, (4,))
    hot = SamplingParams(max_tokens=3, temperature=20.0, ignore_eos=True)
    llm = pair.llm(**shape)
    outputs = llm.generate(prompt_ids, hot)
    assert len({output.token_ids[0] for output in outputs}) > 15, "60 draws of 40 tokens; one seed for all gave 4"
    assert len({output.seed for output in outputs}) == 60
    again = llm.generate(prompt_ids, [SamplingParams(max_tokens=3, temperature=20.0, ignore_eos=True, seed=o.seed) for o in outputs])
    assert ids(again) == ids(outputs)
    assert [output.seed for output in again] == [output.seed for output in outputs]
    assert [event.seed for event in llm.stream(prompt_ids[0], SamplingParams(max_tokens=1, seed=-5))] == [-5]


def test_params_for_each_prompt(pair: Pair) -> None:
    with pytest.raises(RequestError, match="one SamplingParams, or one for each of the 3 prompts, found 2 of them"):
        pair.llm(**PLAIN).generate(prompts(3), [SamplingParams()] * 2)


def test_draft_and_variant_go_together(pair: Pair) -> None:
    missing = r"variant\.draft: expected the folder of a draft checkpoint for .*, found no value \(variant=ngram needs none\)"
    with pytest.raises(ConfigError, match=missing):
        type(pair.llm(**PLAIN))(pair.target, runtime="eager")
    with pytest.raises(ConfigError, match=r"variant\.draft: expected nothing for variant 'none'"):
        type(pair.llm(**PLAIN))(pair.target, variant="none", draft=pair.draft, runtime="eager")


def test_seeds_of_the_whole_range(pair: Pair, schedulers: list[Watched]) -> None:
    seeds = [0, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]
    prompt = prompts(1)[0]
    params = [SamplingParams(max_tokens=16, temperature=1.0, seed=s, ignore_eos=True) for s in seeds]
    outputs = ids(pair.llm(**CHAIN).generate([prompt] * len(seeds), params))
    assert outputs[3] == outputs[4], "one bit pattern"
    assert outputs[2] == outputs[5]
    assert len({tuple(tokens) for tokens in outputs}) == 4


@SHAPES
def test_a_token_whose_embedding_is_not_finite(
    pair: Pair, schedulers: list[Watched], shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row fails once the target reads that token, as a sample or as a draft, and keeps what came before; the others never notice."""
    prompt_ids = prompts(6)
    expected = [pair.greedy(p, 20, ignore_eos=True) for p in prompt_ids]
    broken = next(
        t for t in expected[0][3:] if t not in prompt_ids[0] and any(t not in [*p, *e] for p, e in zip(prompt_ids, expected, strict=True))
    )
    launch, verified = Cycle.launch, set()

    def recording(self: Cycle, key: Key, message: Message) -> int:
        ticket = launch(self, key, message)
        if isinstance(key, GraphKey):
            verified.update(row for row, nodes in zip(message.lanes, self.arena["node_token_BN"].tolist(), strict=False) if broken in nodes)
        return ticket

    monkeypatch.setattr(Cycle, "launch", recording)
    llm = pair.llm(**shape)
    with torch.no_grad():
        llm.cycle.target.embed_tokens.weight[broken] = float("nan")
    outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=20, ignore_eos=True))
    reasons = set()
    for row, (prompt, tokens, output) in enumerate(zip(prompt_ids, expected, outputs, strict=True)):
        reasons.add(output.finish_reason)
        if output.finish_reason == "length":
            assert broken not in [*prompt, *tokens[:-1]], "the last token is never read"
            assert (output.token_ids, output.error) == (tokens, None)
        else:
            assert row in verified or broken in prompt
            reached = 0 if broken in prompt else tokens.index(broken) + 1 if broken in tokens else 20
            assert len(output.token_ids) <= reached
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert output.error == "logits: expected finite numbers, found nan or inf in the target's output"
            if shape is PLAIN:
                assert len(output.token_ids) == reached
    assert "error" in reasons
    assert "length" in reasons or shape is TREE, "a tree proposes nearly every token somewhere"


@SHAPES
@pytest.mark.parametrize("pool", ["target_kv", "draft_kv"])
def test_kv_of_one_row_breaks(
    pair: Pair, schedulers: list[Watched], shape: dict[str, Any], pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pool == "draft_kv" and shape is PLAIN:
        assert "draft_kv" not in [name for name, *_ in pair.llm(**shape).slots()]
        pair.llm(**shape).generate([[1]], SamplingParams(max_tokens=1))
        return
    prompt_ids = prompts(4, (5, 9, 17, 8))
    launch, cycles = Cycle.launch, [0]

    def breaking(self: Cycle, key: Key, message: Message) -> int:
        if isinstance(key, GraphKey):
            cycles[0] += 1
            if cycles[0] == 3:
                page = int(self.arena["page_table_RP"][message.lanes[1], 0])
                self.arena[pool][:, :, page] = float("nan")
        return launch(self, key, message)

    monkeypatch.setattr(Cycle, "launch", breaking)
    outputs = pair.llm(**shape, page_size=4).generate(prompt_ids, SamplingParams(max_tokens=25, ignore_eos=True))
    expected = [pair.greedy(p, 25, ignore_eos=True) for p in prompt_ids]
    for i, (tokens, output) in enumerate(zip(expected, outputs, strict=True)):
        if i == 1 and pool == "target_kv":
            assert output.finish_reason == "error"
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert 0 < len(output.token_ids) < 25
        else:
            assert (output.token_ids, output.finish_reason) == (tokens, "length")
