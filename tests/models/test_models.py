"""Targets against transformers: same checkpoint, same logits, same tapped hidden states."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from graphspec.facts import read_model_facts
from graphspec.models.layers import Embedding, RMSNorm
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, architecture_of, build_hf, write_hf
from tests.support.features import marked
from tests.support.float_law import assert_float_law

TAPS = (0, 1, 3, 5)
LENGTH = 40

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-6-heads-over-3": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "llama-5-heads-over-1": ("llama", {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "llama-head-dim-of-its-own": ("llama", {"head_dim": 10, "num_key_value_heads": 1}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-rope-dynamic-short": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-rope-dynamic-long": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama-rope-yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "llama-rope-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 4.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "ministral3-growing-queries": ("ministral3", {"rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.3}}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2-tied-window": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "head_dim": None},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3-bias-window-wide-heads": (
        "qwen3",
        {
            "attention_bias": True,
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-bias-tied-grouped": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "olmo3-window-yarn": (
        "olmo3",
        {
            "sliding_window": 6,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "smollm3": ("smollm3", {"num_key_value_heads": 1}),
    "smollm3-listed-window": ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 7}),
    "exaone4": ("exaone4", {"sliding_window": 8, "head_dim": 12}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    "seed-oss": ("seed_oss", {"num_key_value_heads": 1}),
    "seed-oss-other-biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 20}),
    "gemma": ("gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5, "num_key_value_heads": 1}),
    "gemma3": ("gemma3", {"sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3-listed-scaled-capped": (
        "gemma3",
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
            "query_pre_attn_scalar": 10,
            "head_dim": 20,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm": ("glm", {"num_key_value_heads": 1}),
    "glm4": ("glm4", {"num_key_value_heads": 1}),
    "glm4-tied-no-bias-another-part": (
        "glm4",
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.85},
        },
    ),
    "ernie4.5": ("ernie4_5", {"num_key_value_heads": 1}),
    "ernie4.5-biases-apart-yarn": (
        "ernie4_5",
        {"use_bias": True, "tie_word_embeddings": False, "head_dim": 20, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    ),
    "phi3": ("phi3", {"num_key_value_heads": 1}),
    "phi3-partly-rotated-window": (
        "phi3",
        {"sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
}


def in_float64(model: Any) -> Any:
    """The same model with every matmul, norm and softmax in float64; transformers' own norm stays in float32 otherwise."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def offset(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(offset if type(module).__name__.startswith("Gemma") else forward, module)
    return wide


def assert_logits_and_taps(model: Any, folder: Any, length: int, taps: tuple[int, ...]) -> None:
    """Logits, hidden states and tapped features of two random prompts are as close to float64 as transformers' are."""
    ours = load_target(read_model_facts(folder), taps, length, torch.float32, "cpu")
    token_BT = torch.randint(0, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(3))
    theirs, oracle = (each(token_BT, output_hidden_states=True) for each in (model, in_float64(model)))
    found = ours(token_BT, DenseAttention.prompt(2, length))
    assert found.feature_BTF is not None
    logits = ours.logits(found.hidden_BTH)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.argmax(-1), theirs.logits.argmax(-1))
    places = (-1, *taps)
    states = (found.hidden_BTH, *found.feature_BTF.chunk(len(taps), dim=-1))
    pairs = [(logits, theirs.logits, oracle.logits)]
    pairs += [(mine, theirs.hidden_states[at], oracle.hidden_states[at]) for mine, at in zip(states, places, strict=True)]
    for mine, reference, exact in pairs:
        assert_float_law(mine, reference, exact)


@pytest.mark.parametrize("name", marked(CASES, lambda name: architecture_of(CASES[name][0]), "logits"))
@torch.inference_mode()
def test_logits_and_taps_equal_transformers(name: str, tmp_path: Any) -> None:
    family, overrides = CASES[name]
    model = build_hf(family, **overrides)
    folder = write_hf(model, tmp_path, shard_size="40KB" if "tied" in name or "bias" in name else None)
    assert_logits_and_taps(model, folder, LENGTH, TAPS)


@torch.inference_mode()
def test_rope_spelling_does_not_matter(tmp_path: Any) -> None:
    model = build_hf("llama", rope_parameters={**LLAMA3, "rope_theta": 777.0})
    new = read_model_facts(write_hf(model, tmp_path / "new"))
    old = write_hf(model, tmp_path / "old", rope_parameters=None, rope_theta=777.0, rope_scaling=LLAMA3)
    older = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}
    oldest = write_hf(model, tmp_path / "oldest", rope_parameters=None, rope_theta=777.0, rope_scaling=older)
    assert new.rope == read_model_facts(old).rope == read_model_facts(oldest).rope
    assert (new.rope.theta, new.rope.kind, new.rope.factor) == (777.0, "llama3", 8.0)


@torch.inference_mode()
def test_mimo_is_qwen2_under_another_name(tmp_path: Any) -> None:
    model = build_hf("qwen2", head_dim=None)
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True, "head_dim": 16}
    facts = read_model_facts(write_hf(model, tmp_path, num_nextn_predict_layers=1, **config))
    assert (facts.architecture, facts.attention_bias, facts.output_bias) == ("MiMoForCausalLM", True, False)
    ours = load_target(facts, (), 16, torch.float32, "cpu")
    token_BT = torch.arange(16)[None]
    logits = ours.logits(ours(token_BT, DenseAttention.prompt(1, 16)).hidden_BTH)
    torch.testing.assert_close(logits, model(token_BT).logits, rtol=0, atol=1e-5)


def test_without_taps_there_is_no_feature(tmp_path: Any) -> None:
    facts = read_model_facts(write_hf(build_hf("llama", num_hidden_layers=1), tmp_path))
    model = load_target(facts, (), 8, torch.float32, "cpu")
    assert model(torch.zeros(1, 3, dtype=torch.long), DenseAttention.prompt(1, 3)).feature_BTF is None


def test_embedding_of_invalid_tokens_is_zero() -> None:
    embedding = Embedding(5, 3)
    embedding.weight.copy_(torch.arange(1.0, 16.0).view(5, 3))
    embedding.weight[0] = float("nan")  # what a masked token would gather if it were not replaced
    token_BT, valid_BT = torch.tensor([[-1, 5, 2, 3, 2**40]]), torch.tensor([[True, True, True, False, True]])
    assert torch.equal(embedding(token_BT, valid_BT)[0], torch.tensor([[0.0] * 3, [0.0] * 3, [7.0, 8.0, 9.0], [0.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_transformers_bitwise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    ours, theirs = RMSNorm(48, 1e-5).to(dtype), LlamaRMSNorm(48, 1e-5).to(dtype)
    weight, x = torch.randn(48, generator=generator).to(dtype), torch.randn(9, 48, generator=generator).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_with_an_offset_equals_transformers_bitwise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    ours, theirs = RMSNorm(48, 1e-6, offset=True).to(dtype), Qwen3_5RMSNorm(48, 1e-6).to(dtype)
    weight, x = 0.3 * torch.randn(48, generator=generator), torch.randn(9, 48, generator=generator).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
        assert torch.equal(ours(x), theirs(x))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_low_precision_follows_transformers_casts(family: str, dtype: torch.dtype, tmp_path: Any) -> None:
    """Error against float64 at most twice that of transformers in the same dtype: the casts sit in the same places."""
    model = build_hf(family)
    facts = read_model_facts(write_hf(model, tmp_path))
    low = copy.deepcopy(model).to(dtype)
    token_BT = torch.arange(24)[None]
    exact = in_float64(low)(token_BT).logits  # weights rounded alike
    ours = load_target(facts, (), 24, dtype, "cpu")
    hidden_BTH = ours(token_BT, DenseAttention.prompt(1, 24)).hidden_BTH
    assert hidden_BTH.dtype == dtype
    logits = ours.logits(hidden_BTH)
    assert logits.dtype == torch.float32
    allowed = (low(token_BT).logits - exact).abs().max()
    assert (logits - exact).abs().max() <= 2 * allowed


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_forward_is_one_graph_and_reads_nothing_back(kind: str, tmp_path: Any) -> None:
    """FakeTensorMode raises on every host read; fullgraph compilation on every graph break."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rope = {"rope_type": kind, "rope_theta": 10000.0, **({"factor": 2.0} if kind == "dynamic" else {})}
    facts = read_model_facts(write_hf(build_hf("llama", num_hidden_layers=2, max_position_embeddings=8, rope_parameters=rope), tmp_path))
    model = load_target(facts, (0, 1), 16, torch.float32, "cpu")
    token_BT = torch.tensor([[1, 5, -1, 9, 2, 2, 7, 30, 4, 4]])
    attention = DenseAttention.prompt(1, 10)
    attention.valid_BT = token_BT >= 0

    def step(token_BT: torch.Tensor, position_BT: torch.Tensor, rope_length_BT: torch.Tensor, valid_BT: torch.Tensor) -> Any:
        out = model(token_BT, DenseAttention(position_BT, rope_length_BT, valid_BT))
        return model.logits(out.hidden_BTH), out.feature_BTF

    arguments = (token_BT, attention.position_BT, attention.rope_length_BT, attention.valid_BT)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        logits, feature = step(*(fake_mode.from_tensor(argument) for argument in arguments))
    assert logits.shape == (1, 10, VOCAB_SIZE)
    assert feature.shape == (1, 10, 96)
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")(*arguments)
    for found, expected in zip(compiled, step(*arguments), strict=True):
        assert torch.equal(found, expected)
