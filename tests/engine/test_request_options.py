"""Options of a request other than sampling: several outputs, its own depth, its text, log-probabilities of its prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphspec
from graphspec.api.llm import SamplingParams
from graphspec.api.outputs import make_output
from graphspec.errors import RequestError
from graphspec.shapes import GraphKey
from tests.support.engines import CHAIN, MIRROR_VOCAB, TREE, Pair, add_tokenizer, continued, ids, mirror_pair, prompts, words

PLAIN: dict[str, Any] = {"variant": "none"}
SHAPES = pytest.mark.parametrize("shape", [PLAIN, CHAIN, {**TREE, "cycles_in_flight": 3}], ids=["none", "chain", "tree-ahead"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)
    add_tokenizer(made.target, bos=0)
    return made


@SHAPES
def test_several_outputs_of_one_prompt(pair: Pair, shape: dict[str, Any]) -> None:
    llm, prompt_ids = pair.llm(**shape, max_rows=3), [*prompts(2), [MIRROR_VOCAB]]
    params = [
        SamplingParams(max_tokens=9, temperature=1.0, seed=2**64 - 2, n=3),
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, temperature=1.0, n=2),
    ]
    outputs = llm.generate(prompt_ids, params)
    assert [(o.index, o.sample) for o in outputs] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert [o.seed for o in outputs[:3]] == [2**64 - 2, 2**64 - 1, 0]
    assert [o.finish_reason for o in outputs[4:]] == ["error", "error"]
    for output in outputs[:4]:
        one = SamplingParams(max_tokens=len(output.token_ids), temperature=0.0 if output.index else 1.0, seed=output.seed)
        assert llm.generate(output.prompt_token_ids, one)[0].token_ids == output.token_ids
    assert len({tuple(tokens) for tokens in ids(outputs[:3])}) > 1
    events = list(llm.stream(prompt_ids, params))
    for output in outputs[:4]:
        mine = [e for e in events if (e.index, e.sample) == (output.index, output.sample)]
        assert [t for e in mine for t in e.token_ids] == output.token_ids
    drawn = llm.generate(prompt_ids[0], SamplingParams(max_tokens=2, temperature=1.0, n=4))
    assert len({output.seed for output in drawn}) == 4


@pytest.mark.parametrize(
    "shape", [CHAIN, {**TREE, "cycles_in_flight": 3}, {**CHAIN, "variant": "ngram"}], ids=["chain", "tree-ahead", "ngram"]
)
def test_every_request_has_its_depth(pair: Pair, shape: dict[str, Any]) -> None:
    llm, prompt_ids = pair.llm(**shape), prompts(6)
    kinds: list[dict[str, Any]] = [{}, {"speculate": False}, {"num_steps": 1}, {"num_steps": 2, "temperature": 1.0}, {"num_steps": 0}, {}]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=8, **kind) for kind in kinds]
    outputs = llm.generate(prompt_ids, params)
    assert ids(outputs) == ids(
        pair.llm(**PLAIN).generate(
            prompt_ids, [SamplingParams(max_tokens=20, ignore_eos=True, seed=8, temperature=p.temperature) for p in params]
        )
    )
    for output, one in zip(outputs, params, strict=True):
        depth = llm.plan.shape.num_steps if one.depth is None else one.depth
        assert max(output.timing.cycle_tokens) <= depth + 1
        assert set(output.timing.cycle_depths) == {depth}
    assert outputs[1].timing.cycle_tokens == outputs[4].timing.cycle_tokens == [1] * 19
    if "variant" not in shape:
        assert max(outputs[0].timing.cycle_tokens) > 2
        assert llm.metrics is not None
        drafted = [tokens for o in outputs for tokens, _ in o.timing.drafted_cycles()]
        assert llm.metrics.acceptance_length == pytest.approx(sum(drafted) / len(drafted))


class Learner:
    """A policy that always drafts at full depth and records its inputs."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
        return 4

    def observe(self, bucket: int, depth: int, accepted: Any) -> None:
        self.seen += accepted


def test_a_changing_depth_learns_from_rows_that_could_go_as_deep(pair: Pair) -> None:
    llm, prompt_ids = pair.llm(**CHAIN, depths=[0, 2]), prompts(2)
    llm.depth_policy = learner = Learner()
    free, _ = llm.generate(
        prompt_ids, [SamplingParams(max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=20, ignore_eos=True, num_steps=1)]
    )
    assert learner.seen == [tokens - 1 for tokens in free.timing.whole_cycles()]


def test_a_depth_beyond_the_engines_is_refused(pair: Pair) -> None:
    for shape, maximum in ((PLAIN, 0), (CHAIN, 4)):
        with pytest.raises(RequestError, match=f"^sampling.num_steps: expected None, or 0 to variant.num_steps = {maximum}, found 5"):
            pair.llm(**shape).generate([1], SamplingParams(num_steps=5))


def test_echo_special_tokens_and_no_text(pair: Pair) -> None:
    llm, prompt = pair.llm(**CHAIN), "w31 w32 w33"
    ids_of_prompt = [0, 31, 32, 33]
    kinds: list[dict[str, Any]] = [
        {}, {"echo": True}, {"echo": True, "skip_special_tokens": False}, {"detokenize": False}, {"echo": True, "stop": "w33"},
        {"echo": True, "n": 2, "temperature": 1.0, "seed": 1},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=range(1, 30), **kind) for kind in kinds]
    outputs = llm.generate([prompt] * len(params), params)
    plain = outputs[0].token_ids
    assert [o.text for o in outputs[:5]] == [
        continued(plain), words([31, 32, 33, *plain]), words([*ids_of_prompt, *plain]), "", words([31, 32, 33, *plain]),
    ]  # fmt: skip
    assert [o.text for o in outputs[5:]] == [words([31, 32, 33, *o.token_ids]) for o in outputs[5:]]
    assert all(o.prompt_token_ids == ids_of_prompt for o in outputs)
    texts = [""] * 5
    for event in llm.stream([prompt] * 5, params[:5]):
        texts[event.index] += event.text
    assert texts == [o.text for o in outputs[:5]]


def test_the_names_of_the_parameters(pair: Pair) -> None:
    llm, params = pair.llm(**PLAIN), SamplingParams(max_tokens=3)
    assert ids(llm.generate([1, 2], sampling_params=params)) == ids(llm.generate([1, 2], params))
    assert [t for e in llm.stream([1, 2], sampling_params=params) for t in e.token_ids] == llm.generate([1, 2], params)[0].token_ids
    for call in (llm.generate, lambda *a, **k: list(llm.stream(*a, **k))):
        with pytest.raises(RequestError, match=r"^sampling_params: expected nothing next to params"):
            call([1, 2], params, sampling_params=params)  # type: ignore[operator]
    assert graphspec.Output is type(llm.generate([1], params)[0])
    assert graphspec.StreamEvent is type(next(iter(llm.stream([1], params))))


@SHAPES
def test_log_probabilities_of_prompts(pair: Pair, shape: dict[str, Any]) -> None:
    llm = pair.llm(**shape, max_rows=4)
    lengths = (1, 2, 8, 9, 16, 17, 25, 40)
    prompt_ids = prompts(len(lengths), lengths)
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=i % 3 if i != 3 else None, logprobs=i % 2 or None)
        for i in range(len(lengths))
    ]
    outputs = llm.generate(prompt_ids, params)
    assert ids(outputs) == [pair.greedy(prompt, 6, ignore_eos=True) for prompt in prompt_ids]
    for output, one in zip(outputs, params, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert_scored(pair, output, one.prompt_logprobs)
    assert not any(key.sampling.prompt_logprobs for key in llm.cycle.programs if isinstance(key, GraphKey))
    first = {}
    for event in llm.stream(prompt_ids, params):
        assert event.index not in first or event.prompt_logprobs is None
        first.setdefault(event.index, event.prompt_logprobs)
    assert [first[i] for i in range(len(prompt_ids))] == [output.prompt_logprobs for output in outputs]


def assert_scored(pair: Pair, output: Any, count: int) -> None:
    """Against one forward of transformers over the prompt."""
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    with torch.no_grad():
        expected_TV = torch.log_softmax(pair.hf(torch.tensor([prompt])).logits[0].float(), -1)
    assert found[0] is None
    assert [entry.token_id for entry in found[1:]] == prompt[1:]
    for entry, expected_V in zip(found[1:], expected_TV, strict=False):
        assert entry.logprob == pytest.approx(float(expected_V[entry.token_id]), abs=2e-5)
        best = expected_V.topk(count)
        assert list(entry.top) == best.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=2e-5)


def test_preempted_prompts_are_scored_once(pair: Pair) -> None:
    prompt_ids = prompts(4, (9, 16))
    params = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=1)
    llm = pair.llm(**CHAIN, page_size=4, num_pages=26, cycles_in_flight=2)
    for output in llm.generate(prompt_ids, params):
        assert_scored(pair, output, 1)


def test_a_prompt_whose_scoring_was_interrupted_is_scored_anew(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params = pair.llm(**CHAIN), SamplingParams(max_tokens=3, prompt_logprobs=2)
    llm.warm_up(sampling=params.resolve().sampling_class)
    [request], scheduler, launch = llm._requests(prompts(1, (40,)), params), llm._engine.scheduler, llm.cycle.launch

    def interrupted(key: Any, message: Any) -> int:
        if message.chunks[0].start == 32:
            raise KeyboardInterrupt
        return launch(key, message)

    monkeypatch.setattr(llm.cycle, "launch", interrupted)
    scheduler.add(request)
    with pytest.raises(KeyboardInterrupt):
        while scheduler.busy:
            scheduler.step()
    monkeypatch.undo()
    assert 0 < len(request.prompt_logprobs) < 39
    llm.cycle.reset()
    scheduler.recover()
    while scheduler.busy:
        scheduler.step()
    assert_scored(pair, make_output(request, None, llm.plan), 2)
