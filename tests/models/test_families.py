"""Families of targets as rows: one from another package, tensors that are fused in the file, and refusals by name."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphspec import LLM, SamplingParams
from graphspec.drafters.mtp.facts import read_mtp_facts
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import families, read_model_facts
from graphspec.facts.families import FAMILIES, all_families, find_family, target_architectures
from graphspec.models.target import load_target
from tests.drafters.test_entry_points import install
from tests.support import checkpoints
from tests.support.checkpoints import VOCAB_SIZE, architecture_of, build_hf, edit_json, edit_tensors, write_hf
from tests.support.engines import CHAIN, Pair, ids, prompts, random_pair
from tests.support.features import marked, of_family
from tests.support.moe_checkpoints import build_mixture

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = """
from graphspec.facts.family import Family
from graphspec.facts.layouts import SPLIT_LAYOUT, Layout

BACKBONE = Family(
    name="backbone",
    architectures=("BackboneForCausalLM",),
    layout=Layout(SPLIT_LAYOUT.rules, renamed=(("backbone.", "model."),)),
    qk_norm="projection",
    norms="after",
    norm="float32",
    multi_head=True,
)
"""


def pair_of(family: str, path: Path, **overrides: Any) -> Pair:
    return random_pair(path, build_hf(family, num_hidden_layers=2, eos_token_id=VOCAB_SIZE - 1, **overrides))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Families are read once per process; these tests change what would be found."""
    all_families.cache_clear()
    yield
    monkeypatch.undo()
    all_families.cache_clear()


def test_names_and_architectures_are_there_once() -> None:
    counts = Counter(name for family in FAMILIES for name in (family.name, *family.architectures))
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("architecture", [name for name in target_architectures() if hasattr(transformers, name)])
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """The context of a config that states none, and whether ``tie_word_embeddings`` means anything."""
    family, model = find_family(architecture), getattr(transformers, architecture)
    config = model.config_class()
    assert family is not None
    assert family.max_positions == config.get_text_config().max_position_embeddings
    assert family.ties == bool(model._tied_weights_keys)
    assert config.tie_word_embeddings is family.tied


@pytest.mark.parametrize("architecture", target_architectures())
def test_the_docs_name_every_architecture(architecture: str) -> None:
    assert f"`{architecture}`" in (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_a_family_of_another_package_is_a_target_like_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    pair = pair_of("olmo2", tmp_path)
    weights = pair.target / "model.safetensors"
    save_file({name.replace("model.", "backbone.", 1): tensor for name, tensor in load_file(weights).items()}, weights)
    edit_json(pair.target / "config.json", architectures=["BackboneForCausalLM"])
    with pytest.raises(CheckpointError, match="architectures") as caught:
        read_model_facts(pair.target)
    assert "BackboneForCausalLM" not in caught.value.expected

    site = install(tmp_path / "site", "[graphspec.families]\nbackbone = outside_family:BACKBONE\n")
    (site / "outside_family.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(site)
    all_families.cache_clear()
    assert target_architectures()[-1] == "BackboneForCausalLM"
    prompt_ids = prompts(2, (5, 9), VOCAB_SIZE)
    expected = [pair.greedy(prompt, 10) for prompt in prompt_ids]
    for shape in ({"variant": "none"}, CHAIN):
        assert ids(pair.llm(**shape).generate(prompt_ids, SamplingParams(max_tokens=10))) == expected


@pytest.mark.parametrize(
    ("points", "module", "found"),
    [
        ("llama = broken:ROW", 'ROW = Family(name="llama", architectures=("OtherForCausalLM",))', "llama"),
        ("mine = broken:ROW", 'ROW = Family(name="mine", architectures=("Qwen2ForCausalLM",))', "Qwen2ForCausalLM"),
        ("mine = broken:ROW", 'ROW = Family(name="other", architectures=())', "name='other'"),
        ("mine = broken:ROW", "ROW = 3", "broken:ROW: 3"),
    ],
)
def test_a_bad_entry_point_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, points: str, module: str, found: str
) -> None:
    site = install(tmp_path / "site", f"[graphspec.families]\n{points}\n")
    (site / "broken.py").write_text(f"from graphspec.facts.family import Family\n{module}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigError, match=r"graphspec\.families") as caught:
        all_families()
    assert found in caught.value.found
    assert families.Family.__module__ == "graphspec.facts.family"


@pytest.mark.parametrize(
    ("family", "key", "changes"),
    [
        ("phi3", "type", {"rope_parameters": None, "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}),
        ("phi3", "rope_type", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}}),
        ("phi3", "rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}),
        ("phi3", "partial_rotary_factor", {"rope_parameters": None, "partial_rotary_factor": 0.35}),
        ("olmo2", "partial_rotary_factor", {"rope_parameters": None, "partial_rotary_factor": 0.5}),
    ],
)
def test_a_rotation_the_family_does_not_know_is_refused_by_name(family: str, key: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_hf(build_hf(family, num_hidden_layers=1), tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_model_facts(folder)
    assert str(caught.value.key).endswith(f": {key}")


@pytest.mark.parametrize(
    ("family", "message", "changes"),
    [
        ("olmoe", "clip_qkv: expected null", {"clip_qkv": 8.0}),
        ("qwen2_moe", "qkv_bias: expected true or false", {"qkv_bias": "yes"}),
        ("ernie4_5_moe", "use_bias: expected false where layers have experts", {"use_bias": True}),
        ("ernie4_5_moe", "moe_k: expected at most the 6 experts", {"moe_k": 7}),
        ("ernie4_5_moe", "moe_num_experts: expected an integer >= 1", {"moe_num_experts": None}),
    ],
)
def test_a_key_that_would_change_the_computation_is_refused(family: str, message: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(write_hf(build_mixture(family), tmp_path, **changes))


def test_layers_of_experts_are_those_between_two(tmp_path: Path) -> None:
    folder = write_hf(build_mixture("ernie4_5_moe", num_hidden_layers=6), tmp_path)
    edit_json(folder / "config.json", moe_layer_interval=2, moe_layer_end_index=3, moe_layer_start_index=0)
    facts = read_model_facts(folder)
    assert facts.experts is not None and facts.experts.layers == (False, True, False, True, False, False)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["glm4", "ernie4_5"])
def test_rotated_neighbours_are_put_apart(family: str, tmp_path: Path) -> None:
    """Rows of queries and keys move within the rotated part of their head, those of values don't; a bias moves with its row."""
    model = build_hf(family, num_hidden_layers=1, num_key_value_heads=1, **({"use_bias": True} if family == "ernie4_5" else {}))
    ours = load_target(read_model_facts(write_hf(model, tmp_path)), (), 16, torch.float32, "cpu").layers[0].self_attn.qkv_proj
    theirs = model.model.layers[0].self_attn
    turned = 8 if family == "glm4" else 16
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, 16)]
    moved = [head * 16 + row for head in range(3) for row in order]
    for leaf in ("weight", "bias"):
        query, key, value = (getattr(projection, leaf) for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        assert torch.equal(getattr(ours, leaf), torch.cat((query[moved], key[order], value)))


def test_a_correction_is_a_vector_or_a_row(tmp_path: Path) -> None:
    folder = write_hf(build_mixture("ernie4_5_moe", num_hidden_layers=2), tmp_path)
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    row = load_file(folder / "model.safetensors")[name]
    assert row.shape == (1, 6)

    def correction() -> torch.Tensor:
        loaded = load_target(read_model_facts(folder), (), 16, torch.float32, "cpu").layers[1].mlp.correction_E
        assert isinstance(loaded, torch.Tensor)
        return loaded

    assert torch.equal(correction(), row[0])
    edit_tensors(folder / "model.safetensors", **{name: row[0].clone()})
    assert torch.equal(correction(), row[0])
    edit_tensors(folder / "model.safetensors", **{name: row.expand(2, 6).clone()})
    with pytest.raises(CheckpointError, match="e_score_correction_bias: expected shape"):
        correction()


def test_prediction_heads_of_ernie_are_left_unread(tmp_path: Path) -> None:
    """Published checkpoints have one; as a draft it is refused."""
    folder = write_hf(build_mixture("ernie4_5_moe", num_hidden_layers=2), tmp_path, num_nextn_predict_layers=1)
    names = ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", "mtp_block.0.self_attn.q_proj")
    edit_tensors(folder / "model.safetensors", **{f"model.{name}.weight": torch.ones(2, 2) for name in names})
    facts = read_model_facts(folder)
    assert load_target(facts, (), 16, torch.float32, "cpu").facts.num_layers == 2
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers = 1: expected tensors of as many .*model\.mtp_"):
        read_mtp_facts(folder, facts)


def test_fused_tensors_are_checked_as_a_whole(tmp_path: Path) -> None:
    folder = write_hf(build_hf("phi3", num_hidden_layers=1, num_key_value_heads=1), tmp_path)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    whole = load_file(folder / "model.safetensors")[name]
    assert whole.shape == (5 * 16, 48)

    def load() -> None:
        load_target(read_model_facts(folder), (), 16, torch.float32, "cpu")

    edit_tensors(folder / "model.safetensors", **{name: whole[:-1].clone()})
    with pytest.raises(CheckpointError, match="qkv_proj") as caught:
        load()
    assert (caught.value.expected, caught.value.found) == ("shape [80, 48]", "shape [79, 48]")
    edit_tensors(folder / "model.safetensors", name, **{name.replace("qkv_proj", "q_proj"): whole[:48].clone()})
    with pytest.raises(CheckpointError, match="q_proj") as caught:
        load()
    assert "missing: " + name in str(caught.value)


OP_BY_OP = {
    **dict.fromkeys(("olmo2", "olmo3"), "op by op: query and key norms over all heads together, or scaled in float32"),
    "granite": "op by op: a multiplier of what blocks add",
    "ministral3": "op by op: queries that grow with the position",
}
NATIVE = [name for name in checkpoints.FAMILIES if name not in OP_BY_OP]


@pytest.mark.parametrize("family", [*OP_BY_OP, *marked(NATIVE, architecture_of, "native", "compiled", "eagle3", "chain")])
def test_a_compiled_engine_reports_the_path_of_the_family(family: str, tmp_path: Path) -> None:
    """And decodes as transformers does, where it is native: compiling takes a minute, and is left to ``test_equality_full``."""
    path = OP_BY_OP.get(family, "one native op per pass")
    growing = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
    unlike = {"qwen2": {"head_dim": None}, "granite": {"residual_multiplier": 0.5}, "ministral3": {"rope_parameters": growing}}
    keys = unlike.get(family, {})
    pair = pair_of(family, tmp_path, **keys)
    llm = pair.llm(runtime="compiled", **CHAIN)
    assert llm.decoders == {"target": path, "draft": "one native op per pass"}
    if family in NATIVE:
        prompt_ids = prompts(2, (5, 9), VOCAB_SIZE)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=10))) == [pair.greedy(prompt, 10) for prompt in prompt_ids]


@of_family("Olmo2ForCausalLM", "standalone", "ngram", "tree")
def test_other_drafters_draft_for_these_families(tmp_path: Path) -> None:
    """A whole model of the same family, and the n-gram matcher: neither reads a feature, both write their own KV or none."""
    pair = pair_of("olmo2", tmp_path)
    draft = write_hf(build_hf("phi3", num_hidden_layers=1, eos_token_id=VOCAB_SIZE - 1), tmp_path / "draft")
    prompt_ids = prompts(2, (5, 9), VOCAB_SIZE)
    expected = [pair.greedy(prompt, 10) for prompt in prompt_ids]
    for keys in ({"variant": "standalone", "draft": str(draft)}, {"variant": "ngram"}):
        llm = LLM(str(pair.target), runtime="eager", num_steps=2, topk=2, num_draft_tokens=4, **keys)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=10))) == expected
