"""Log-probabilities equal rescoring of the finished text, with any drafter, filters and cycles in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.api.outputs import Output
from graphspec.engine.request import SamplingParams
from tests.support.engines import CHAIN, TREE, Pair, ids, prompts

LENGTH = 14
PARAMS = [
    SamplingParams(max_tokens=LENGTH, logprobs=3),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=4, top_p=0.8, repetition_penalty=1.3, logprobs=1),
    SamplingParams(max_tokens=LENGTH, temperature=0.7, seed=5),
    SamplingParams(max_tokens=LENGTH, logit_bias={5: 4.0}, logprobs=0, temperature=1.0, seed=6),
    SamplingParams(max_tokens=LENGTH, min_tokens=9, logprobs=5),
]


def assert_rescored(pair: Pair, output: Output, count: int) -> None:
    """Against one forward of transformers over prompt and output."""
    text = [*output.prompt_token_ids, *output.token_ids]
    with torch.no_grad():
        logits_TV = pair.hf(torch.tensor([text])).logits[0].double()
    expected_TV = torch.log_softmax(logits_TV, -1)[len(output.prompt_token_ids) - 1 : -1]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for entry, token, expected_V in zip(output.logprobs, output.token_ids, expected_TV, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected_V[token]), abs=2e-5)
        best = expected_V.topk(count)
        assert list(entry.top) == best.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=2e-5)


@pytest.mark.covers("eagle3", "log-probabilities")
@pytest.mark.parametrize(
    ("shape", "keys"),
    [({"variant": "none"}, {}), (CHAIN, {"cycles_in_flight": 3}), (TREE, {"page_size": 4, "max_rows": 3, "cycles_in_flight": 2})],
    ids=["none", "chain-ahead", "tree-ahead"],
)
def test_logprobs_are_those_of_rescoring(pair: Pair, shape: dict[str, Any], keys: dict[str, Any]) -> None:
    llm = pair.llm(**shape, **keys)
    prompt_ids = prompts(len(PARAMS), (5, 9, 17, 3))
    outputs = llm.generate(prompt_ids, PARAMS)
    for output, params in zip(outputs, PARAMS, strict=True):
        if params.logprobs is None:
            assert output.logprobs is None
        else:
            assert_rescored(pair, output, params.logprobs)
    without = [SamplingParams(**{f: getattr(p, f) for f in p.__slots__ if f != "logprobs"}) for p in PARAMS]
    assert ids(llm.generate(prompt_ids, without)) == ids(outputs), "looking changes nothing"


def test_preempted_rows_report_every_token_once(pair: Pair) -> None:
    prompt_ids = prompts(4, (9, 16))
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2)
    for output in pair.llm(**CHAIN, page_size=4, num_pages=26).generate(prompt_ids, params):
        assert_rescored(pair, output, 2)


def test_a_stream_carries_them(pair: Pair) -> None:
    llm = pair.llm(**CHAIN)
    [output] = llm.generate(prompts(1), PARAMS[0])
    events = list(llm.stream(prompts(1), PARAMS[0]))
    assert [entry for event in events for entry in event.logprobs or ()] == output.logprobs
    assert all(len(event.logprobs or ()) == len(event.token_ids) for event in events)
    assert {event.logprobs for event in llm.stream(prompts(1), SamplingParams(max_tokens=3))} == {None}
