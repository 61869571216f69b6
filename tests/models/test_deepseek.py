"""DeepSeek-V2 and V3 as targets, and their prediction heads: against transformers on one checkpoint; checkpoints that are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec import LLM, SamplingParams
from graphspec.config.schema import Config, ModelConfig, VariantConfig
from graphspec.drafters.mtp.facts import read_mtp_facts
from graphspec.drafters.mtp.loading import load_mtp
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.kernels import select_kernels
from graphspec.kernels.formulas import Rotation
from graphspec.models.attention import LatentTransform, TreeAttention
from graphspec.models.target import load_target
from graphspec.plan.buffers import declare_slots
from graphspec.plan.plan import make_plan
from graphspec.shapes import CycleShape
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, edit_json, write_folder, write_hf
from tests.support.engines import ids, prompts
from tests.support.features import marked
from tests.support.moe_checkpoints import (
    HIDDEN,
    LAYERS,
    YARN,
    HeadOfTransformers,
    add_heads,
    assert_refused,
    build_mixture,
    greedy,
    head_tensors,
    mixture_of,
    write_mixture,
)

from .test_models import assert_logits_and_taps

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 24
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2-groups": ("deepseek_v2", {**GROUPS, "q_lora_rank": 9}),
    "v2-one-group": ("deepseek_v2", {**GROUPS, "topk_group": 1, "num_experts_per_tok": 2}),
    "v2-yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "v2-yarn-equal-mscales": ("deepseek_v2", {"rope_parameters": {**YARN, "mscale_all_dim": 0.7}}),
    "v2-biases": ("deepseek_v2", {"attention_bias": True}),
    "v2-tied": ("deepseek_v2", {"tie_word_embeddings": True}),
    "v3": ("deepseek_v3", {}),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3-linear-rope-with-mscale": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0, "mscale_all_dim": 1.2}},
    ),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3-direct-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "v3-biases": ("deepseek_v3", {"attention_bias": True}),
    "v3-direct-queries-biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "n_routed_experts": 5}),
    "v3-all-groups": ("deepseek_v3", {"n_group": 2, "topk_group": 2}),
    "v3-weights-as-they-come": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    "v3-all-dense": ("deepseek_v3", {"first_k_dense_replace": LAYERS}),
    "v3-all-mixtures": ("deepseek_v3", {"first_k_dense_replace": 0}),
    "flash": ("glm4_moe_lite", {}),
    "flash-unlisted": ("glm4_moe_lite", {"mlp_layer_types": None, "q_lora_rank": None, "rope_interleave": False}),
}


@pytest.mark.parametrize("name", marked(CASES, lambda name: mixture_of(CASES[name][0]), "logits"))
@torch.inference_mode()
def test_logits_and_taps_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    model = build_mixture(family, **overrides)
    assert_logits_and_taps(model, write_hf(model, tmp_path, shard_size="40KB" if "tied" in name else None), LENGTH, (0, 2))


@pytest.mark.parametrize(
    "changes", [{}, {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False}, {"attention_bias": True}]
)
@torch.inference_mode()
def test_queries_of_mistral_small_4_grow_with_the_position(changes: dict[str, Any], tmp_path: Path) -> None:
    model = build_mixture("mistral4", **changes)
    facts = read_model_facts(write_hf(model, tmp_path))
    ours = load_target(facts, (), LENGTH, torch.float32, "cpu")
    assert facts.rope.query_beta == 0.3 and facts.rope.original_max_position_embeddings < LENGTH
    token_BT = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    found, expected = ours.logits(ours(token_BT, DenseAttention.prompt(2, LENGTH)).hidden_BTH), model(token_BT).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # The case tells growth from none.
    model.config.rope_parameters = {**model.config.rope_parameters, "llama_4_scaling_beta": 0.0}
    assert (model(token_BT).logits - expected).abs().max() > 1e-2


def test_mistral_small_4_drafts_chains_and_trees(tmp_path: Path) -> None:
    model = build_mixture("mistral4", easy=True, max_position_embeddings=96)
    path, prompt_ids = write_hf(model, tmp_path), prompts(2, vocab=VOCAB_SIZE)
    expected = [greedy(model, prompt, 16) for prompt in prompt_ids]
    for shape in ({"variant": "none"}, {"variant": "ngram"}, {"variant": "ngram", "num_steps": 3, "topk": 2}):
        llm = LLM(path, runtime="eager", max_rows=2, prefill_chunks=[4, 8], **shape)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == expected, shape


@torch.inference_mode()
def test_router_weights_stay_float32(tmp_path: Path) -> None:
    path, _ = write_mixture(tmp_path, "deepseek_v3")
    ours = load_target(read_model_facts(path), (), 8, torch.bfloat16, "cpu")
    block = ours.layers[1].mlp
    assert {name for name, p in ours.named_parameters() if p.dtype != torch.bfloat16} == {
        f"layers.{layer}.mlp.{name}" for layer in (1, 2) for name in ("router.weight", "correction_E")
    }
    assert block.gate_up_EFH.dtype == torch.bfloat16
    assert ours(torch.arange(8)[None], DenseAttention.prompt(1, 8)).hidden_BTH.dtype == torch.bfloat16


@torch.inference_mode()
def test_tree_attention_over_pages_is_latent_attention_of_the_visible_tokens() -> None:
    """The protocol's paged side against the dense one: the tokens of one branch, laid out as a chain."""
    generator = torch.Generator().manual_seed(0)
    prefix, nodes, heads, rank, rope = 5, 4, 3, 8, 4
    parents = [-1, 0, 0, 1]  # the root, two children, and a child of the first
    pool = torch.full((2, 1, 5, 3, 1, rank + rope), float("nan"))
    table = torch.tensor([[3, 1, 4, 2]], dtype=torch.int32)
    kernels = select_kernels("reference", "reference", "cpu")
    total = prefix + nodes
    latent, query = torch.randn(1, total, rank + rope, generator=generator), torch.randn(1, total, heads, rank + rope, generator=generator)
    depth = [0, 1, 1, 2]
    position = torch.tensor([[*range(prefix), *(prefix + d for d in depth)]])
    angle = position[0, :, None] * torch.tensor([1.0, 0.1])
    angles = torch.cat((angle.cos(), angle.sin()), -1)
    weight = 1 + 0.1 * torch.randn(rank, generator=generator)

    def transform(rows: list[int]) -> LatentTransform:
        return LatentTransform(weight, 1e-6, Rotation(angles, torch.tensor([rows])), True)

    def run(attention: Any, rows: list[int], layer: int = 1) -> torch.Tensor:
        return attention.latent(layer, query[:, rows, :, :rank], query[:, rows, :, rank:], latent[:, rows], transform(rows), 0.3)

    def paged(rows: list[int], ancestors: list[int], begin: int) -> TreeAttention:
        slot = torch.tensor([rows])
        words = torch.tensor(ancestors)[None, :, None]
        end = torch.tensor([begin])
        return TreeAttention(
            kernels,
            pool,
            table,
            position[:, rows],
            torch.ones_like(slot, dtype=torch.bool),
            slot,
            torch.zeros_like(slot),
            end,
            words,
        )

    run(paged(list(range(prefix)), [(1 << (j + 1)) - 1 for j in range(prefix)], 0), list(range(prefix)))
    found = run(paged(list(range(prefix, total)), [0b1, 0b11, 0b101, 0b1011], prefix), list(range(prefix, total)))
    for node in range(nodes):
        path, at = [], node
        while at >= 0:
            path.insert(0, prefix + at)
            at = parents[at]
        rows = [*range(prefix), *path]
        expected = run(DenseAttention.prompt(1, len(rows)), rows)[:, -1]
        torch.testing.assert_close(found[:, node], expected, rtol=1e-5, atol=1e-6)
    assert pool[0].isnan().all(), "one layer was written"


def test_pools_hold_one_row_per_token(tmp_path: Path) -> None:
    """The target's pool and the head's are latent; an ordinary draft next to it is not."""
    path, _ = write_mixture(tmp_path, "deepseek_v3")
    add_heads(path, head_tensors())
    target = read_model_facts(path)
    assert target.kv_rows == ((1, 1, 16),)
    plan = make_plan(
        Config(variant=VariantConfig(name="mtp"), model=ModelConfig(path=str(path))), target, read_mtp_facts(path, target), device="cpu"
    )
    assert plan.shape == CycleShape(3, 1, 4)
    pools = {slot.name: slot.dims for slot in declare_slots(plan, 1) if slot.kind == "kv"}
    assert pools == {
        "target_kv": (LAYERS, 1, plan.num_pages, plan.page_size, 1, 16),
        "draft_kv": (1, 1, plan.num_pages, plan.page_size, 1, 16),
        "page_feature": (1, 1, plan.num_pages, 1, 1, "F"),
    }


@torch.inference_mode()
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("next_to", [False, True])
def test_the_head_equals_that_of_transformers(family: str, next_to: bool, tmp_path: Path) -> None:
    """Three steps, each over what the one before returned. Next to the target its number is 0, where a model's own layers are dense."""
    raw = head_tensors(family, 0 if next_to else LAYERS, copies=True)
    path, model = write_mixture(tmp_path / "target", family, rope_parameters=YARN)
    folder = path
    if next_to:
        config = json.loads((path / "config.json").read_text())
        name = config["architectures"][0] + "NextN"
        folder = write_folder(
            tmp_path / "head", raw, {**config, "architectures": [name], "num_nextn_predict_layers": 1, "num_hidden_layers": 1}
        )
    else:
        add_heads(path, raw)
    target_facts = read_model_facts(path)
    target = load_target(target_facts, (), 64, torch.float32, "cpu")
    draft = load_mtp(read_mtp_facts(folder, target_facts), target, 64, torch.float32, "cpu")
    assert draft.facts.decoder.has_experts(0)
    reference, tokens = HeadOfTransformers(model, raw), [4, 9, 60, 0, 9, 33, 2]
    hidden = torch.randn(1, len(tokens), HIDDEN, generator=torch.Generator().manual_seed(5))
    for step in range(3):
        expected = reference(tokens, hidden)
        found = draft(torch.tensor([tokens]), draft.fuse(hidden), DenseAttention.prompt(1, len(tokens)), step=step)
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
        torch.testing.assert_close(draft.logits(found).log_softmax(-1), reference.log_probs(expected), rtol=0, atol=1e-5)
        hidden = expected


@torch.inference_mode()
def test_several_heads_and_a_dense_one(tmp_path: Path) -> None:
    """What a head has in place of an MLP is known by its tensors."""
    dense = head_tensors(index=LAYERS + 1, seed=6, first_k_dense_replace=1)
    assert not any("experts" in name for name in dense)
    path, _ = write_mixture(tmp_path, "deepseek_v3")
    add_heads(path, head_tensors(), dense)
    facts = read_mtp_facts(path, target := read_model_facts(path))
    assert (facts.num_heads, facts.decoder.num_layers) == (2, 2)
    assert [facts.decoder.has_experts(layer) for layer in (0, 1)] == [True, False]
    draft = load_mtp(facts, load_target(target, (), 8, torch.float32, "cpu"), 8, torch.float32, "cpu")
    assert torch.equal(draft.heads[1].layer.mlp.down_proj.weight, dense[f"model.layers.{LAYERS + 1}.mlp.down_proj.weight"])


def test_a_target_is_read_without_the_head_in_its_file(tmp_path: Path) -> None:
    path, _ = write_mixture(tmp_path, "deepseek_v3")
    plain = dict(load_target(read_model_facts(path), (), 8, torch.float32, "cpu").named_parameters())
    add_heads(path, head_tensors(copies=True))
    found = dict(load_target(read_model_facts(path), (), 8, torch.float32, "cpu").named_parameters())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


PUBLISHED = {
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "ep_size": 1,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
}


def test_keys_as_deepseek_publishes_them(tmp_path: Path) -> None:
    path, _ = write_mixture(tmp_path, "deepseek_v3")
    edit_json(
        path / "config.json", "rope_parameters", "rope_interleave", "head_dim", "qk_head_dim", "num_key_value_heads", "dtype", **PUBLISHED
    )
    facts = read_model_facts(path)
    assert facts.latent is not None and facts.experts is not None
    assert facts.latent.interleaved and facts.dtype == "bfloat16"
    assert facts.rope.attention_factor == 1.0  # both magnitudes are one; the scale has the square of it instead
    assert facts.latent.scale == pytest.approx(10**-0.5 * (0.1 * torch.tensor(40.0).log().item() + 1) ** 2)
    assert facts.experts.layers == (False, True, True)


BAD_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown method": ("deepseek_v3", {"quantization_config": {"quant_method": "hqq"}}, "quant_method: expected one of fp8"),
    "grouped queries": ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: expected num_attention_heads = 4"),
    "no rank": ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank: expected an integer >= 1"),
    "query rank": ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank: expected an integer >= 1"),
    "odd rotation": ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim: expected an even number"),
    "no value size": ("deepseek_v2", {"v_head_dim": "5"}, "v_head_dim: expected an integer >= 1"),
    "halves in V2": ("deepseek_v2", {"rope_interleave": False}, "rope_interleave: expected true"),
    "scoring": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: expected one of sigmoid"),
    "scoring of V2": ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func: expected one of softmax"),
    "method": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: expected one of greedy, group_limited_greedy"),
    "method of V3": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: expected one of noaux_tc"),
    "normalised V2": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: expected false"),
    "groups": ("deepseek_v3", {"n_group": 3}, "n_group: expected a divisor of n_routed_experts = 8"),
    "groups of one": ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_group: expected groups of at least 2 experts"),
    "too few groups": ("deepseek_v3", {"topk_group": 1}, "topk_group: expected at most n_group = 4, with num_experts_per_tok = 3"),
    "more groups than there are": ("deepseek_v2", {**GROUPS, "topk_group": 5}, "topk_group: expected at most n_group = 4"),
    "experts": ("deepseek_v3", {"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most the 8 experts"),
    "no topk": ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok: expected an integer >= 1"),
    "mlp bias": ("deepseek_v2", {"mlp_bias": True}, "mlp_bias: expected false"),
    "scaling": ("deepseek_v3", {"routed_scaling_factor": -1.0}, "routed_scaling_factor: expected a positive number"),
    "groups of Mistral": ("mistral4", {"n_group": 4, "topk_group": 2}, "topk_group: expected n_group"),
    "share of a head": (
        "mistral4",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
        r"rope_parameters: partial_rotary_factor: expected 0\.4, the share of qk_rope_head_dim",
    ),
    "sparse attention": ("deepseek_v3", {"architectures": ["DeepseekV32ForCausalLM"]}, "architectures: expected one of"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_mixture(tmp_path_factory.mktemp(family), family)[0] for family in ("deepseek_v2", "deepseek_v3", "mistral4")}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_are_refused(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    family, changes, message = BAD_CONFIGS[name]
    (tmp_path / "config.json").write_text((folders[family] / "config.json").read_text())
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(tmp_path)


def test_an_absent_query_rank_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["deepseek_v3"] / "config.json").read_text())
    edit_json(tmp_path / "config.json", "q_lora_rank")
    with pytest.raises(CheckpointError, match="q_lora_rank: expected an integer >= 1, or null"):
        read_model_facts(tmp_path)


BAD_TENSORS: dict[str, tuple[str, tuple[int, ...] | None, str]] = {
    "expert missing": ("mlp.experts.7.gate_proj.weight", None, r"experts\.7\.gate_proj\.weight: expected a tensor"),
    "correction missing": ("mlp.gate.e_score_correction_bias", None, r"e_score_correction_bias: expected a tensor of shape \[8\]"),
    "shared experts of another width": (
        "mlp.shared_experts.up_proj.weight",
        (12, 32),
        r"expected shape \[24, 32\], found shape \[12, 32\]",
    ),
    "keys and values": ("self_attn.k_proj.weight", (32, 32), r"self_attn\.k_proj\.weight: expected no such tensor"),
    "kv_b of another size": (
        "self_attn.kv_b_proj.weight",
        (40, 12),
        r"kv_b_proj\.weight: expected shape \[44, 12\], found shape \[40, 12\]",
    ),
    "fp8 scales": ("self_attn.kv_b_proj.weight_scale_inv", (1, 1), "this looks like a quantised checkpoint"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused(name: str, tmp_path: Path) -> None:
    assert_refused(write_mixture(tmp_path, "deepseek_v3")[0], *BAD_TENSORS[name])


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, _ = write_mixture(tmp_path / "target", "deepseek_v3")
    target = read_model_facts(path)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers = 1: expected tensors of as many prediction heads"):
        read_mtp_facts(path, target)  # transformers writes the key whether there are heads or not
    head = head_tensors()
    del head[f"model.layers.{LAYERS}.mlp.experts.3.up_proj.weight"]
    add_heads(path, head)
    facts = read_mtp_facts(path, target)
    with pytest.raises(
        CheckpointError, match=rf"layers\.{LAYERS}\.mlp\.experts\.3\.up_proj\.weight: expected a tensor of shape \[12, 32\]"
    ):
        load_mtp(facts, load_target(target, (), 8, torch.float32, "cpu"), 8, torch.float32, "cpu")


@torch.inference_mode()
def test_forward_is_one_graph(tmp_path: Path) -> None:
    path, _ = write_mixture(tmp_path, "deepseek_v3", rope_parameters=YARN)
    model = load_target(read_model_facts(path), (), 16, torch.float32, "cpu")
    attention = DenseAttention.prompt(1, 5)

    def step(token_BT: torch.Tensor) -> torch.Tensor:
        return model.logits(model(token_BT, attention).hidden_BTH)

    token_BT = torch.tensor([[1, 5, 9, 2, 2]])
    assert torch.equal(torch.compile(step, fullgraph=True, dynamic=False, backend="eager")(token_BT), step(token_BT))
