"""Greedy output equals transformers token for token, sampled output equals plain decoding with the same seed: a hand-made pairwise cover.

The whole cross stands in ``test_equality_full.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphspec
from graphspec.api import llm as llm_module
from graphspec.api.llm import LLM, SamplingParams
from graphspec.facts import ModelFacts, read_model_facts
from tests.support.checkpoints import VOCAB_SIZE, architecture_of, build_hf
from tests.support.engines import CHAIN, MIRROR_VOCAB, TREE, WIDE, Pair, ids, mirror_pair, prompts, random_pair, watch_schedulers
from tests.support.features import marked

LENGTH = 22
"""New tokens per request."""


@pytest.fixture(scope="module")
def misses(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that is right most of the time, so that runs of every length are accepted."""
    return mirror_pair(tmp_path_factory.mktemp("misses"), noise=0.8)


def assert_greedy(pair: Pair, llm: LLM, batch: int, length: int = LENGTH, **prompt_options: Any) -> None:
    prompt_ids = prompts(batch, **prompt_options)
    outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=length))
    expected = [pair.greedy(prompt, length) for prompt in prompt_ids]
    assert ids(outputs) == expected
    assert [o.finish_reason for o in outputs] == ["length" if len(e) == length and e[-1] != MIRROR_VOCAB - 1 else "stop" for e in expected]


# variant or shape, page size, batch, rows, run-ahead: every pair of values that matters together occurs.
EAGER: list[tuple[dict[str, Any], int, int, int, int]] = [
    ({"variant": "none"}, 1, 1, 8, 0),
    ({"variant": "none"}, 16, 5, 3, 2),
    (CHAIN, 1, 8, 8, 1),
    (CHAIN, 16, 1, 1, 2),
    (CHAIN, 16, 6, 4, 0),
    (TREE, 1, 2, 8, 2),
    (TREE, 16, 8, 8, 0),
    (TREE, 5, 4, 3, 1),
    (WIDE, 1, 5, 4, 0),
    (WIDE, 16, 7, 8, 1),
]


def case_name(value: object) -> str | None:
    if isinstance(value, dict):
        return str(value["variant"]) if "variant" in value else "-".join(str(number) for number in value.values())
    return None


def eager_cases() -> list[Any]:
    """:data:`EAGER` with what each case shows."""
    cases = []
    for shape, page_size, batch, rows, run_ahead in EAGER:
        kind = [] if "variant" in shape else ["chain" if shape["topk"] == 1 else "tree"]
        features = [*kind, "greedy equals transformers", f"pages of {page_size}", "batch" if batch > 1 else "single request"]
        covers = pytest.mark.covers(shape.get("variant", "eagle3"), *features, *(["run-ahead"] if run_ahead else []))
        cases.append(pytest.param(shape, page_size, batch, rows, run_ahead, marks=covers))
    return cases


@pytest.mark.parametrize(("shape", "page_size", "batch", "rows", "run_ahead"), eager_cases(), ids=case_name)
def test_greedy_equals_transformers(misses: Pair, shape: dict[str, Any], page_size: int, batch: int, rows: int, run_ahead: int) -> None:
    llm = misses.llm(**shape, page_size=page_size, max_rows=rows, cycles_in_flight=run_ahead + 1)
    assert_greedy(misses, llm, batch)
    assert llm.metrics is not None
    if shape is not EAGER[0][0] and "variant" not in shape:
        assert 1.3 < llm.metrics.acceptance_length < shape["num_steps"] + 0.9, "runs of several lengths, or the test shows nothing"


@pytest.mark.covers("eagle3", "compiled")
def test_compiled_tree_equals_transformers(misses: Pair) -> None:
    """The chain's turn is in test_replay."""
    llm = misses.llm(num_steps=2, topk=3, num_draft_tokens=6, runtime="compiled", buckets=[4], max_rows=4, cycles_in_flight=2)
    assert_greedy(misses, llm, 5)


@pytest.fixture(scope="module")
def plain(misses: Pair) -> dict[tuple[float, int], list[list[int]]]:
    """Plain decoding at each temperature, one seed per prompt."""
    llm = misses.llm(variant="none")
    return {(t, batch): ids(llm.generate(prompts(batch), sampled(t, batch))) for t in (0.7, 1.0) for batch in (3, 8)}


def sampled(temperature: float, batch: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=100 + i) for i in range(batch)]


@pytest.mark.covers("eagle3", "seeded sampling equals plain decoding")
@pytest.mark.parametrize(
    ("shape", "noise", "temperature", "batch", "page_size", "run_ahead"),
    [
        (CHAIN, "coupled", 0.7, 8, 16, 0),
        (CHAIN, "none", 1.0, 3, 1, 1),
        (TREE, "coupled", 1.0, 8, 1, 2),
        (TREE, "none", 0.7, 3, 16, 0),
        (WIDE, "coupled", 0.7, 3, 16, 1),
        (WIDE, "none", 1.0, 8, 4, 0),
    ],
    ids=case_name,
)
def test_sampled_equals_plain_decoding(
    misses: Pair, plain: dict[tuple[float, int], list[list[int]]], shape: dict[str, Any], noise: str, temperature: float, batch: int,
    page_size: int, run_ahead: int,
) -> None:  # fmt: skip
    llm = misses.llm(**shape, draft_noise=noise, page_size=page_size, cycles_in_flight=run_ahead + 1)
    assert ids(llm.generate(prompts(batch), sampled(temperature, batch))) == plain[temperature, batch]
    assert len({tuple(tokens) for tokens in plain[temperature, batch]}) == batch


def test_sampled_outputs_depend_on_seed_and_temperature(misses: Pair) -> None:
    llm = misses.llm(**CHAIN)
    prompt_ids = [prompts(1)[0]] * 4
    params = [SamplingParams(max_tokens=LENGTH, temperature=t, seed=s) for t, s in ((1.0, 1), (1.0, 2), (0.3, 1), (1.0, 1))]
    first, second, third, fourth = ids(llm.generate(prompt_ids, params))
    assert first == fourth
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_greedy_and_sampled_rows_share_a_batch(misses: Pair, plain: dict[tuple[float, int], list[list[int]]]) -> None:
    prompt_ids, params = prompts(8), sampled(1.0, 8)
    for i in (0, 3, 4):
        params[i] = SamplingParams(max_tokens=LENGTH, seed=9)
    outputs = ids(misses.llm(**TREE).generate(prompt_ids, params))
    for i, output in enumerate(outputs):
        assert output == (misses.greedy(prompt_ids[i], LENGTH) if i in (0, 3, 4) else plain[1.0, 8][i])


@pytest.mark.covers("eagle3", "a draft equal to its target is always accepted")
@pytest.mark.parametrize("steps", [1, 2, 4, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_draft_equal_to_its_target_is_always_accepted(twin: Pair, steps: int, temperature: float, page_size: int) -> None:
    """Finds every off-by-one in slots, positions, features and noise: each would show as a miss."""
    llm = twin.llm(num_steps=steps, topk=1, num_draft_tokens=steps + 1, page_size=page_size)
    # The drafter doesn't consume a prompt's first token, so both agree once three tokens follow it.
    prompt_ids = prompts(4, (4, 9, 8, 17))
    outputs = llm.generate(prompt_ids, [SamplingParams(max_tokens=40, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)])
    assert llm.metrics is not None
    assert llm.metrics.acceptance_length == steps + 1
    assert llm.metrics.accepted_per_position == [1.0] * steps
    assert all(len(set(o.token_ids)) > 8 for o in outputs), "an output that repeats itself would hide an error"


@pytest.mark.parametrize("shape", [TREE, {"num_steps": 5, "topk": 2, "num_draft_tokens": 19}], ids=case_name)
def test_a_tree_holds_the_chain_of_a_draft_equal_to_its_target(twin: Pair, shape: dict[str, Any]) -> None:
    llm = twin.llm(**shape)
    llm.generate(prompts(4, (4, 9, 8, 17)), SamplingParams(max_tokens=40, ignore_eos=True))
    assert llm.metrics is not None
    assert llm.metrics.acceptance_length == shape["num_steps"] + 1


def test_the_draft_does_not_run_beyond_its_context(tmp_path: Path) -> None:
    pair = mirror_pair(tmp_path)
    (pair.draft / "config.json").write_text(
        (pair.draft / "config.json").read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 20')
    )
    llm = pair.llm(**CHAIN)
    prompt = prompts(1, (10,))[0]
    output = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert output.token_ids == pair.greedy(prompt, 40, ignore_eos=True)
    assert output.metrics.cycles >= 20, "one token a cycle from position 20 on"


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-3-heads-over-1": ("llama", {"num_key_value_heads": 1}),
    "llama-5-heads-over-5": ("llama", {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "ministral3": ("ministral3", {"rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.3}}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2-tied-window": (
        "qwen2",
        {"head_dim": None, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "exaone4": ("exaone4", {"sliding_window": 7, "sliding_window_pattern": 2, "num_key_value_heads": 1}),
    "granite": ("granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "seed-oss": ("seed_oss", {"num_key_value_heads": 1}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3", {"sliding_window": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0}),
    "glm": ("glm", {"num_key_value_heads": 1}),
    "glm4": ("glm4", {"num_key_value_heads": 1}),
    "ernie4.5": ("ernie4_5", {"num_key_value_heads": 1}),
    "ernie4.5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "phi3": ("phi3", {"num_key_value_heads": 1}),
    "phi3-partly-rotated-window": (
        "phi3",
        {"sliding_window": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
}


def family_of(name: str) -> str:
    """The architecture of a case."""
    return architecture_of(FAMILIES[name][0])


@pytest.mark.parametrize("name", marked(FAMILIES, family_of, "none", "eagle3", "chain", "tree"))
def test_every_family_equals_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = FAMILIES[name]
    pair = random_pair(tmp_path, build_hf(family, num_hidden_layers=3, eos_token_id=VOCAB_SIZE - 1, **overrides))
    prompt_ids = prompts(3, (12, 1, 25), VOCAB_SIZE)
    expected = [pair.greedy(prompt, 20) for prompt in prompt_ids]
    for shape in ({"variant": "none"}, CHAIN, TREE):
        assert ids(pair.llm(**shape, page_size=4).generate(prompt_ids, SamplingParams(max_tokens=20))) == expected


@pytest.mark.parametrize("num_pages", [None, 16])
def test_length_dependent_rope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int | None) -> None:
    """Past the trained context "dynamic" depends on the length a token saw; a resumed row prefills what was generated one by one."""
    model = build_hf("llama", num_hidden_layers=2, max_position_embeddings=12, eos_token_id=VOCAB_SIZE - 1, rope_parameters=DYNAMIC)
    pair = random_pair(tmp_path, model)
    made = watch_schedulers(monkeypatch)

    def beyond(_: object, path: Path) -> ModelFacts:
        return replace(read_model_facts(path), max_position_embeddings=64)

    monkeypatch.setattr(llm_module, "read_target_facts", beyond)
    prompt_ids = prompts(3, (6, 9, 15), VOCAB_SIZE)
    outputs = pair.llm(variant="none", page_size=4, max_rows=3, num_pages=num_pages).generate(prompt_ids, SamplingParams(max_tokens=30))
    assert ids(outputs) == [pair.greedy(prompt, 30) for prompt in prompt_ids]
    assert (made[0].preempted > 0) == (num_pages is not None)


@pytest.fixture(scope="module")
def demo() -> Pair:
    """The model shipped with the package."""
    from transformers import AutoModelForCausalLM

    folder = Path(graphspec.__file__).parent / "demo"
    assert (folder / "target" / "config.json").is_file(), "the demo model belongs to the package"
    return Pair(folder / "target", folder / "eagle3", AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32").eval())


@pytest.mark.parametrize("shape", [CHAIN, WIDE], ids=case_name)
def test_demo_model_equals_transformers(demo: Pair, shape: dict[str, Any]) -> None:
    llm = LLM(runtime="eager", **shape)
    texts = ["Once upon a time", "The little dog"]
    outputs = llm.generate(texts, SamplingParams(max_tokens=24))
    assert ids(outputs) == [demo.greedy(llm.tokenizer.encode(text), 24) for text in texts]
