"""Gemma 4: two KV pools, values that are keys, experts beside a dense MLP, inputs of each layer, and shared keys and values."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphspec import LLM, SamplingParams
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from graphspec.facts.heads import LayerHeads
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.target import load_target
from graphspec.plan.buffers import declare_slots
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, edit_json, edit_tensors, write_hf
from tests.support.engines import CHAIN, TREE, Pair, ids, prompts, random_pair, watch_schedulers
from tests.support.features import marked, of_family
from tests.support.float_law import assert_float_law
from tests.support.gemma4 import BASE, INPUTS, KINDS, ROPES, SHAPES, build_gemma4, in_float64, randomise
from tests.support.plans import plan as plan_of
from tests.support.quantised_checkpoints import quantise

if TYPE_CHECKING:
    from pathlib import Path

GEMMA = "Gemma4ForCausalLM"
LENGTH = 24
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "dense, its own values": ("dense", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
    "one width": ("dense", {"global_head_dim": 8, "num_global_key_value_heads": None}),
    "one key head everywhere": ("dense", {"num_key_value_heads": 1}),
    "every window": ("dense", {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 3}),
    "no window": ("dense", {"layer_types": ["full_attention"] * 5}),
    "all pairs turn": ("dense", {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "proportional", "rope_theta": 500.0}}}),
    "scaled pairs": (
        "dense",
        {"rope_parameters": {**ROPES, "full_attention": {**ROPES["full_attention"], "partial_rotary_factor": 0.6, "factor": 4.0}}},
    ),
    "no cap, biases, a head of its own": (
        "dense",
        {"final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "experts": ("experts", {}),
    "all experts": ("experts", {"num_experts": 3, "top_k_experts": 3}),
    "inputs": ("inputs", {}),
    "inputs, nothing shared": ("inputs", {"num_kv_shared_layers": 0}),
    "inputs, plain width, values that are keys": ("inputs", {**SHAPES["dense"], "use_double_wide_mlp": False}),
    "shared, without inputs": ("inputs", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4}),
}


def streams(model: Any, token_BT: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits, and the residual stream that enters each layer and leaves the last."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: Any, _: Any, out: torch.Tensor) -> None:
        found[layer.self_attn.layer_idx + 1] = out.clone()

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    logits = model(token_BT, output_hidden_states=True).logits  # with these, shared layers see every token
    found[0] = model.model.embed_tokens(token_BT)
    for hook in hooks:
        hook.remove()
    return logits, found


@pytest.mark.parametrize("name", marked(CASES, lambda name: GEMMA, "logits"))
@torch.inference_mode()
def test_logits_and_taps_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = CASES[name]
    model = build_gemma4(kind, **changes)
    facts = read_model_facts(write_hf(model, tmp_path))
    taps = (0, 2, 3, facts.num_layers)
    ours = load_target(facts, taps, LENGTH, torch.float32, "cpu")
    token_BT = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    (theirs, own), (exact, wide) = streams(model, token_BT), streams(in_float64(model), token_BT)
    out = ours(token_BT, DenseAttention.prompt(2, LENGTH))
    assert out.feature_BTF is not None
    pairs = [(ours.logits(out.hidden_BTH), theirs, exact)]
    pairs += [(part, own[tap], wide[tap]) for part, tap in zip(out.feature_BTF.chunk(len(taps), -1), taps, strict=True)]
    for pair in pairs:
        assert_float_law(*pair)
    assert torch.equal(pairs[0][0].argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("kind", SHAPES)
@torch.inference_mode()
def test_low_precision_follows_transformers_casts(kind: str, tmp_path: Path) -> None:
    """Mean error against float64, over several models, at most twice that of transformers in the same dtype."""
    token_BT, errors = torch.arange(LENGTH)[None], torch.zeros(2, dtype=torch.float64)
    for seed in range(4):
        model = build_gemma4(kind, seed=seed)
        facts = read_model_facts(write_hf(model, tmp_path / str(seed)))
        low = copy.deepcopy(model).to(torch.bfloat16)
        ours = load_target(facts, (), LENGTH, torch.bfloat16, "cpu")
        logits = ours.logits(ours(token_BT, DenseAttention.prompt(1, LENGTH)).hidden_BTH)
        exact = in_float64(low)(token_BT).logits
        errors += torch.stack([(found - exact).abs().mean() for found in (logits, low(token_BT).logits)])
    assert errors[0] <= 2 * errors[1]


@of_family("Gemma4ForConditionalGeneration", "logits")
@torch.inference_mode()
def test_the_language_model_of_one_that_sees_and_hears(tmp_path: Path) -> None:
    text = copy.deepcopy({**BASE, **INPUTS, "model_type": "gemma4_text", "pad_token_id": 0})
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision |= {"head_dim": 8, "patch_size": 4, "position_embedding_size": 64}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    model = randomise(transformers.Gemma4ForConditionalGeneration(config), 0)
    ours = load_target(read_model_facts(write_hf(model, tmp_path)), (), 40, torch.float32, "cpu")
    token_BT = torch.randint(0, VOCAB_SIZE - 1, (2, 40), generator=torch.Generator().manual_seed(3))
    found = ours.logits(ours(token_BT, DenseAttention.prompt(2, 40)).hidden_BTH)
    assert_float_law(found, model(input_ids=token_BT).logits, in_float64(model)(input_ids=token_BT).logits)


def test_published_keys_say_what_those_of_transformers_do(tmp_path: Path) -> None:
    """Published configs have the global keys; transformers writes every layer's numbers."""
    folder = write_hf(build_gemma4("dense"), tmp_path)
    written = read_model_facts(folder)
    assert "per_layer_config" in json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", "per_layer_config", global_head_dim=16, num_global_key_value_heads=1)
    assert read_model_facts(folder) == written
    assert written.layer_heads[:3] == (LayerHeads(2, 8), LayerHeads(2, 8), LayerHeads(1, 16, keys_are_values=True))
    edit_json(folder / "config.json", layer_types=[*KINDS[:-1], "sliding_attention"])
    assert read_model_facts(folder) == written, "the last layer sees everything, whatever the config says"


def test_each_shape_of_heads_has_its_pool(tmp_path: Path) -> None:
    facts = read_model_facts(write_hf(build_gemma4("inputs", num_key_value_heads=1), tmp_path))
    assert facts.kv_rows == ((2, 1, 8), (2, 1, 16)) and facts.kv_layers == 4
    assert [(facts.pool(layer), facts.place(layer)) for layer in range(7)] == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 0), (0, 2), (1, 0)]
    assert [facts.mlp_size(layer) for layer in range(7)] == [20] * 4 + [40] * 3
    plan = plan_of("none", target=facts)
    pools = {slot.name: slot.dims for slot in declare_slots(plan, 1) if slot.kind == "kv"}
    assert pools == {
        "target_kv": (3, 2, plan.num_pages, plan.page_size, 1, 8),
        "target_kv_2": (1, 2, plan.num_pages, plan.page_size, 1, 16),
    }
    with pytest.raises(ConfigError, match=r"runtime\.tensor_parallel.*differ from layer to layer"):
        facts.of_rank(0, 2)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "key heads": ("dense", {"num_global_key_value_heads": 3}, "num_global_key_value_heads: expected a divisor of num_attention_heads = 4"),
    "odd heads": ("dense", {"global_head_dim": 15}, "global_head_dim: expected an even number"),
    "both directions": ("dense", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected vision or null"),
    "activation": ("dense", {"hidden_activation": "gelu"}, "hidden_activation: expected gelu_pytorch_tanh"),
    "share": (
        "dense",
        {"rope_parameters": {**ROPES, "full_attention": {**ROPES["full_attention"], "partial_rotary_factor": 2.0}}},
        "partial_rotary_factor: expected a number above 0, at most 1",
    ),
    "experts": ("experts", {"top_k_experts": 7}, "top_k_experts: expected at most the 6 experts, found 7"),
    "no experts": ("experts", {"num_experts": None}, "num_experts: expected an integer"),
    "sharing": ("inputs", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: expected at least one layer of each kind before"),
    "inputs": ("inputs", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: expected an integer >= 0"),
    "a number per layer": ("dense", {"per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config: expected head_dim and"),
    "a layer too many": ("dense", {"per_layer_config": {"5": {"head_dim": 4}}}, "per_layer_config: expected an object with layer numbers"),
    "shared heads": (
        "inputs", {"per_layer_config": {"3": {"head_dim": 4}}}, "per_layer_config: expected the same heads in layers that share",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused(name: str, tmp_path: Path) -> None:
    kind, changes, message = BAD[name]
    config = {**BASE, **SHAPES[kind], "architectures": ["Gemma4ForCausalLM"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "named"),
    [
        ("dense", "model.layers.1.layer_scalar", r"model\.layers\.1\.layer_scalar"),
        ("dense", "model.layers.1.self_attn.v_proj.weight", r"v_proj\.weight"),
        ("experts", "model.layers.2.router.per_expert_scale", "per_expert_scale"),
        ("experts", "model.layers.0.experts.down_proj", r"experts\.down_proj"),
        ("inputs", "model.embed_tokens_per_layer.weight", "embed_tokens_per_layer"),
    ],
)
def test_a_missing_tensor_is_named(kind: str, name: str, named: str, tmp_path: Path) -> None:
    folder = write_hf(build_gemma4(kind), tmp_path)
    edit_tensors(folder / "model.safetensors", name)
    with pytest.raises(CheckpointError, match=named):
        load_target(read_model_facts(folder), (), 8, torch.float32, "cpu")


@torch.inference_mode()
def test_keys_and_values_that_nothing_reads_may_be_in_the_file(tmp_path: Path) -> None:
    """Published E models have them for layers that share; for values that are keys there are none."""
    folder = write_hf(build_gemma4("inputs"), tmp_path / "inputs")
    file = folder / "model.safetensors"
    spare = {f"model.layers.5.self_attn.{part}_proj.weight": torch.ones(16, 36) for part in "kv"}
    edit_tensors(file, **{name.replace(".", "__"): tensor for name, tensor in spare.items()})
    load_target(read_model_facts(folder), (), 8, torch.float32, "cpu")
    folder = write_hf(build_gemma4("dense"), tmp_path / "dense")
    edit_tensors(folder / "model.safetensors", model__layers__2__self_attn__v_proj__weight=torch.ones(16, 36))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.v_proj"):
        load_target(read_model_facts(folder), (), 8, torch.float32, "cpu")


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return random_pair(tmp_path_factory.mktemp(request.param), build_gemma4(request.param, sliding_window=7))


@of_family(GEMMA, "none", "ngram", "eagle3", "standalone", "chain", "tree")
def test_output_is_the_targets_own(pair: Pair, tmp_path: Path) -> None:
    """Greedy tokens of prompts longer than the window, in chunks; trees move keys and values in both pools."""
    small = write_hf(build_gemma4("dense", seed=1, num_hidden_layers=3, layer_types=KINDS[:3]), tmp_path)
    prompt_ids = prompts(3, (14, 23, 9), VOCAB_SIZE)
    expected = [pair.greedy(prompt, 16) for prompt in prompt_ids]
    for keys in (
        {"variant": "none"},
        {"variant": "ngram"},
        CHAIN,
        TREE,
        {"variant": "standalone", "draft": str(small), **CHAIN},
        {"variant": "standalone", "draft": str(pair.target), **TREE},
    ):
        draft = keys.get("draft", pair.draft if "variant" not in keys else None)
        llm = LLM(pair.target, **{"variant": "eagle3", "runtime": "eager", "max_rows": 2, "prefill_chunks": [4, 8], **keys, "draft": draft})
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == expected, keys
        if draft == str(pair.target):
            assert sum(out.metrics.acceptance_length for out in llm.generate(prompt_ids, SamplingParams(max_tokens=16))) > 9


def test_shared_prefixes_and_preempted_rows_change_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_schedulers(monkeypatch)
    begin = prompts(1, (21,), VOCAB_SIZE)[0]
    prompt_ids = [begin, [*begin[:18], 5, 7, 9], [*begin[:13], 3]]
    expected = [pair.greedy(prompt, 14) for prompt in prompt_ids]
    for num_pages in (None, 14):
        llm = pair.llm(**TREE, max_rows=3, page_size=4, num_pages=num_pages, max_context=48)
        assert ids(llm.generate(prompt_ids[:1], SamplingParams(max_tokens=14))) == expected[:1]
        found = llm.generate(prompt_ids, SamplingParams(max_tokens=14))
        assert ids(found) == expected
        assert found[1].cached_tokens >= 16, "pages of both pools are shared"
        assert (made[-1].preempted > 0) == (num_pages is not None)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_pools_of_16_bits(kv_dtype: str, pair: Pair) -> None:
    prompt_ids = prompts(2, (14, 9), VOCAB_SIZE)
    plain, drafting = (pair.llm(**keys, kv_dtype=kv_dtype) for keys in ({"variant": "none"}, TREE))
    expected, found = (ids(llm.generate(prompt_ids, SamplingParams(max_tokens=14))) for llm in (plain, drafting))
    assert found == expected
    assert {drafting.cycle.arena[name].dtype for name in ("target_kv", "target_kv_2")} == {getattr(torch, kv_dtype)}


@of_family(GEMMA, "eagle3", "tree", "compiled")
@pytest.mark.full  # compiling takes most of a minute
def test_a_compiled_engine_gives_the_same(pair: Pair) -> None:
    prompt_ids = prompts(2, (14, 9), VOCAB_SIZE)
    expected = [pair.greedy(prompt, 12) for prompt in prompt_ids]
    llm = pair.llm(runtime="compiled", **TREE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=12))) == expected
    assert llm.decoders["target"].startswith("op by op: ")


def test_ranks_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_hf(build_gemma4("dense"), tmp_path)
    with pytest.raises(ConfigError, match=r"runtime\.tensor_parallel"):
        LLM(folder, variant="none", tensor_parallel=2)


@torch.inference_mode()
def test_a_head_equal_to_the_embedding_is_tied(tmp_path: Path) -> None:
    folder = write_hf(build_gemma4("dense"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    model = load_target(read_model_facts(folder), (), 8, torch.float32, "cpu")
    assert model.lm_head.weight is model.embed_tokens.weight


@of_family(GEMMA, "codes")
@pytest.mark.parametrize("layout", ["fp8-block", "pack-quantized"])
def test_packed_weights_have_the_output_of_their_numbers(layout: str, tmp_path: Path) -> None:
    """Projections whose values are keys included, eager and by native products."""
    wide = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "global_head_dim": 32, "eos_token_id": None}
    source = write_hf(build_gemma4("dense", **wide), tmp_path / "source")
    packed, plain = quantise(source, tmp_path, layout)
    model = transformers.Gemma4ForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    prompt_ids = prompts(2, (14, 9), VOCAB_SIZE)
    with torch.no_grad():
        wanted = [model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=12)[0, len(p) :].tolist() for p in prompt_ids]
    first = load_target(read_model_facts(packed), (), 8, torch.float32, "cpu").layers
    assert isinstance(first[2].self_attn.qk_proj.weight, PackedWeight)
    # Compiling takes most of a minute.
    for runtime in ("eager", "compiled") if layout == "pack-quantized" else ("eager",):
        llm = LLM(packed, variant="ngram", num_steps=3, topk=2, runtime=runtime, prefill_chunks=[4, 8])
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=12))) == wanted


@torch.inference_mode()
def test_experts_may_be_stored_one_by_one(tmp_path: Path) -> None:
    """As checkpoints of low precision have them."""
    folder = write_hf(build_gemma4("experts"), tmp_path)
    expected = load_target(read_model_facts(folder), (), 8, torch.float32, "cpu")
    apart = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, part = name.rpartition(".")
        rows = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part) if stem.endswith(".experts") else None
        for expert, own in enumerate(tensor if rows else ()):
            apart |= {f"{stem}.{expert}.{row}.weight": half.clone() for row, half in zip(rows, own.chunk(len(rows)), strict=True)}
        apart |= {} if rows else {name: tensor}
    save_file(apart, folder / "model.safetensors")
    found = load_target(read_model_facts(folder), (), 8, torch.float32, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), expected.parameters(), strict=True))
