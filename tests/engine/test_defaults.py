"""Requests that say nothing: the checkpoint's defaults, ``max_tokens`` without a number, and the edges of what may be said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec import LLM, SamplingParams
from graphspec.api.async_llm import AsyncLLM
from graphspec.config.schema import SamplingConfig
from graphspec.errors import CheckpointError, ConfigError, RequestError
from graphspec.graphs.stages.sampling import probabilities
from graphspec.kernels import select_kernels
from graphspec.shapes import GREEDY, NEUTRAL, SamplingClass, SamplingDefaults
from tests.support.engines import CHAIN, MIRROR_VOCAB, SMALL, TREE, Pair, add_tokenizer, ids, mirror_pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = [5, 7, 9]
SEEDED = {"max_tokens": 24, "ignore_eos": True, "seed": 3}
STATED = {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)
    add_tokenizer(pair.target)
    return pair


def with_generation_config(pair: Pair, folder: Path, **values: Any) -> Pair:
    """The pair with other content of ``generation_config.json``."""
    shutil.copytree(pair.target, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": MIRROR_VOCAB - 1, **values}))
    return replace(pair, target=folder)


@pytest.fixture(scope="module")
def sampled(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same checkpoint, which wants to be sampled."""
    return with_generation_config(pair, tmp_path_factory.mktemp("sampled") / "target", do_sample=True, **STATED)


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    with pair.llm(**CHAIN, max_rows=4, buckets=[1, 2, 4]) as llm:
        yield llm


@pytest.fixture(scope="module")
def hot(sampled: Pair) -> Iterator[LLM]:
    with sampled.llm(**CHAIN, max_rows=4, buckets=[1, 2, 4]) as llm:
        yield llm


# ---- the checkpoint's defaults


@pytest.mark.parametrize(
    "said", [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": -1, "top_p": 1.0}, {"repetition_penalty": 1.0}], ids=str
)
def test_the_checkpoint_says_what_the_request_does_not(said: dict[str, Any], hot: LLM, llm: LLM) -> None:
    [output] = hot.generate(PROMPT, SamplingParams(**SEEDED, **said))
    [expected] = llm.generate(PROMPT, SamplingParams(**SEEDED, **{**STATED, **said}))
    assert output.token_ids == expected.token_ids
    [silent] = llm.generate(PROMPT, SamplingParams(**SEEDED))
    assert output.token_ids != silent.token_ids


def test_defaults_can_be_ignored(sampled: Pair, pair: Pair) -> None:
    with sampled.llm(**CHAIN, generation_config="ignore") as llm:
        assert llm.plan.sampling_defaults == NEUTRAL
        assert llm.generate(PROMPT, SamplingParams(max_tokens=9))[0].token_ids == pair.greedy(PROMPT, 9)


def test_a_checkpoint_without_do_sample_stays_greedy(pair: Pair, tmp_path: Path) -> None:
    greedy = with_generation_config(pair, tmp_path / "target", **STATED | {"repetition_penalty": 1.0})
    with greedy.llm(**CHAIN) as llm:
        assert llm.generate(PROMPT)[0].token_ids == pair.greedy(PROMPT, llm.plan.max_context - len(PROMPT))


def test_a_bad_value_is_refused_unless_it_is_ignored(pair: Pair, tmp_path: Path) -> None:
    odd = with_generation_config(pair, tmp_path / "target", do_sample=True, top_p="most")
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p: expected a number, found 'most'"):
        odd.llm(**CHAIN)
    odd.llm(**CHAIN, generation_config="ignore").close()
    with pytest.raises(ConfigError, match=r"model.generation_config: expected one of auto, ignore"):
        odd.llm(**CHAIN, generation_config="vllm")


def test_the_plan_has_the_defaults_and_their_class(hot: LLM, llm: LLM, sampled: Pair) -> None:
    default = SamplingClass(noise=True, truncate=True, penalties=True)
    assert hot.plan.sampling_defaults == SamplingDefaults(**STATED)
    assert hot.plan.describe()["sampling_defaults"] == STATED
    assert hot.plan.sampling_classes[:2] == (GREEDY, default) and len(hot.plan.sampling_classes) == 3
    assert llm.plan.sampling_classes[0] == GREEDY and len(llm.plan.sampling_classes) == 2
    with sampled.llm(**CHAIN, max_rows=1, buckets=[1], sampling_classes=["greedy"]) as named:
        assert named.plan.sampling_classes == (GREEDY,), "an explicit choice is kept"
        AsyncLLM(named)
        assert {key.sampling for key in named.cycle.programs} == {GREEDY, default}, "nobody waits for what everybody asks for"


def test_several_outputs_need_a_temperature_of_someone(hot: LLM, llm: LLM) -> None:
    outputs = hot.generate(PROMPT, SamplingParams(**SEEDED, n=3))
    assert [output.sample for output in outputs] == [0, 1, 2] and len({tuple(output.token_ids) for output in outputs}) > 1
    with pytest.raises(RequestError, match=r"sampling.n: expected 1 at temperature 0, .* found 3"):
        llm.generate(PROMPT, SamplingParams(n=3))
    with pytest.raises(RequestError, match=r"sampling.n: expected 1 at temperature 0"):
        SamplingParams(n=3, temperature=0)
    failed, fine = llm.generate([PROMPT, PROMPT], [SamplingParams(n=3), SamplingParams(max_tokens=2)])
    assert failed.error is not None and failed.error.startswith("sampling.n") and fine.finish_reason == "length"
    assert [error is None for error in hot.check([PROMPT, PROMPT, []], SamplingParams(n=3))] == [True, True, False], "one for each prompt"


def test_what_is_measured_says_everything() -> None:
    assert SamplingConfig().temperature is None
    stated = SamplingConfig().stated()
    assert SamplingDefaults(**{name: getattr(stated, name) for name in STATED}) == NEUTRAL
    assert SamplingConfig(temperature=0.7, top_k=3).stated() == replace(stated, temperature=0.7, top_k=3)
    with pytest.raises(ConfigError, match=r"sampling.n: expected 1 where requests are measured or compared, found 2"):
        SamplingConfig(n=2).stated()
    params = SamplingParams(temperature=0.7).resolve()
    assert params.resolve(SamplingDefaults(**STATED)) is params, "what is resolved is not asked again"


# ---- mappings


def test_parameters_may_be_a_mapping(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, {"max_tokens": 4})
    assert output.token_ids == llm.generate(PROMPT, SamplingParams(max_tokens=4))[0].token_ids
    short, long = llm.generate([PROMPT, PROMPT], [{"max_tokens": 2}, SamplingParams(max_tokens=3)])
    assert (len(short.token_ids), len(long.token_ids)) == (2, 3)
    assert sum(len(event.token_ids) for event in llm.stream(PROMPT, {"max_tokens": 5})) == 5
    with pytest.raises(RequestError, match=r"sampling.do_sample: .*here it is temperature, which is 0 for greedy"):
        llm.generate(PROMPT, sampling_params={"do_sample": True})


# ---- the number of new tokens


def test_no_limit_is_the_end_of_the_context(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == llm.plan.max_context - len(PROMPT) and output.finish_reason == "length"
    with pytest.raises(RequestError, match=r"sampling.min_tokens: expected an integer >= 0, at most 2147483647, found 2147483648"):
        SamplingParams(max_tokens=None, min_tokens=2**31)


@pytest.mark.parametrize("variant", ["eagle3", "none", "ngram"])
def test_a_prompt_is_scored_without_a_new_token(variant: str, pair: Pair, llm: LLM) -> None:
    prompt = [7, 5, 9, 20, 21, 22, 23, 24, 25, 26, 27]
    params = SamplingParams(max_tokens=0, echo=True, logprobs=2, prompt_logprobs=2)
    with pair.llm(variant=variant, **(CHAIN if variant == "eagle3" else {}), max_rows=2, buckets=[1, 2]) as engine:
        [alone] = engine.generate(prompt, params)
        mixed = engine.generate([prompt, PROMPT, prompt], [params, SamplingParams(max_tokens=9), params])
        events = list(engine.stream(prompt, params))
        assert engine.load().pages_used == 0
    [expected] = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=2, echo=True))
    for output in (alone, mixed[0], mixed[2]):
        assert (output.token_ids, output.finish_reason, output.stop_reason, output.logprobs) == ([], "length", None, [])
        assert output.prompt_logprobs == expected.prompt_logprobs and output.text == llm.tokenizer.decode(prompt)
    assert mixed[1].token_ids == pair.greedy(PROMPT, 9)
    assert "".join(event.text for event in events) == alone.text and events[-1].finish_reason == "length"
    assert [event.prompt_logprobs for event in events] == [alone.prompt_logprobs]


def test_a_stop_id_after_the_prompt_ends_nothing_that_has_no_tokens(pair: Pair, llm: LLM) -> None:
    [first] = pair.greedy(PROMPT, 1)
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0, stop_token_ids=[first], stop=["x"]))
    assert (output.token_ids, output.finish_reason, output.text) == ([], "length", "")
    for fields in ({}, {"logprobs": 1}, {"n": 1}):
        with pytest.raises(RequestError, match=r"sampling.max_tokens: expected an integer >= 1"):
            SamplingParams(max_tokens=0, **fields)


# ---- small temperatures, many biases


@pytest.mark.parametrize(
    "keys", [{**CHAIN, "rule": "match"}, {**TREE, "rule": "target_only"}, {**CHAIN, "rule": "rejection"}], ids=lambda k: k["rule"]
)
def test_a_small_temperature_gives_the_greedy_tokens(keys: dict[str, Any], pair: Pair) -> None:
    with pair.llm(**keys, max_rows=4, buckets=[4]) as llm:
        heats = (1e-6, 1e-20, 1.2e-38, 5e-324)
        params = [SamplingParams(max_tokens=24, temperature=heat, seed=1, top_k=5, top_p=0.9, min_p=0.1) for heat in heats]
        assert ids(llm.generate([PROMPT] * 4, params)) == [pair.greedy(PROMPT, 24)] * 4
    assert SamplingParams(temperature=1e-38).temperature == 0 and SamplingParams(temperature=1.2e-38).temperature == 1.2e-38


@pytest.mark.parametrize("mode", ["reference", "compiled"])
def test_ops_are_exact_at_every_positive_temperature(mode: str) -> None:
    """Noise far below a logit's last bit changes nothing, and no quotient by the temperature is 0/0 or infinite minus infinite."""
    kernels = select_kernels(mode, "auto", "cpu")
    temperature_B = torch.tensor([1e-20, 1e-30, 2.0**-126])
    logits_BTV = torch.randn(3, 2, 1000) * torch.tensor([1.0, 1e-6, 6e4])[:, None, None]
    seed_B, position_BT, best_BT = torch.tensor([1, 2, 3]), torch.tensor([[5, 6]] * 3), logits_BTV.argmax(-1)
    for filters in ((None,) * 3, (torch.tensor([50] * 3), torch.tensor([0.9] * 3), torch.tensor([0.1] * 3))):
        token_BT, sound_BT = kernels.sample_tokens(logits_BTV, temperature_B, seed_B, position_BT, *filters, True)
        assert token_BT.equal(best_BT) and sound_BT.all()
    scores, drafted_BTK = kernels.draft_topk(logits_BTV, 4, None, seed_B, position_BT[:, 0], temperature_B)
    assert drafted_BTK.equal(logits_BTV.topk(4).indices) and scores.isfinite().all()
    share_BTV = probabilities(logits_BTV, temperature_B)
    assert share_BTV.argmax(-1).equal(best_BT) and share_BTV.sum(-1).allclose(torch.ones(3, 2))
    tied_BTV = torch.tensor([[[3.0, 3.0, -torch.inf, 2.0]]])
    assert probabilities(tied_BTV, temperature_B[-1:]).tolist() == [[[0.5, 0.5, 0.0, 0.0]]]


def test_three_hundred_tokens_may_be_biased(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.checkpoints import write_hf

    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    target = write_hf(LlamaForCausalLM(config).eval(), tmp_path / "target")
    with LLM(target, variant="none", **SMALL, max_rows=2, buckets=[1, 2]) as llm:
        few = dict.fromkeys((395, 396), 100.0)
        many = {**dict.fromkeys(range(100, 400), -100.0), **few}
        assert len(many) == llm.plan.max_logit_bias == 300
        params = [SamplingParams(max_tokens=8, ignore_eos=True, logit_bias=bias) for bias in (many, {7: 100.0}, few, None)]
        outputs = llm.generate([[1, 2]] * 4, params)
        assert {*outputs[0].token_ids} <= {395, 396} and outputs[1].token_ids == [7] * 8
        assert outputs[0].token_ids == outputs[2].token_ids
        [alone] = llm.generate([1, 2], SamplingParams(max_tokens=8, ignore_eos=True))
        assert outputs[3].token_ids == alone.token_ids, "a row keeps nothing of the request before"
        with pytest.raises(RequestError, match=r"at most runtime.max_logit_bias = 300 tokens, found 301"):
            llm.generate([1, 2], SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0)))
