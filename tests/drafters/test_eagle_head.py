"""EAGLE-1/2 heads against the published equations, and token maps that trim a draft's head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.drafters.eagle.facts import read_eagle_facts
from graphspec.drafters.eagle.loading import load_eagle
from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
from graphspec.drafters.heads.eagle3_loading import load_eagle3
from graphspec.drafters.standalone.facts import read_standalone_facts
from graphspec.drafters.standalone.network import load_standalone
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from graphspec.models.token_map import apply_token_map, load_token_map
from tests.support.checkpoints import (
    VOCAB_SIZE,
    DenseAttention,
    assert_inert_rows,
    build_hf,
    eagle3_tensors,
    eagle_tensors,
    edit_json,
    edit_tensors,
    publish_eagle,
    publish_eagle3,
    write_hf,
)
from tests.support.eagle_reference import eagle_step

TOKENS = torch.tensor([[4, 9, 60, 0, 9, 33, 2]])


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_hf(build_hf("llama"), tmp_path_factory.mktemp("target"))


def load(path: Any, target_path: Any, dtype: torch.dtype = torch.float32) -> Any:
    target_facts = read_model_facts(target_path)
    facts = read_eagle_facts(path, target_facts)
    target = load_target(target_facts, (), 64, torch.float32, "cpu")
    return load_eagle(facts, target, 64, dtype, "cpu"), target


def hidden_states(length: int = 7) -> torch.Tensor:
    return torch.randn(1, length, 48, generator=torch.Generator().manual_seed(5))


def assert_equals_reference(draft: Any, target: Any, raw: dict[str, torch.Tensor]) -> None:
    attention = DenseAttention.prompt(1, 7)
    attention.position_BT = attention.position_BT + 40  # beyond the head's own max_position_embeddings of 32
    found = draft.fuse(hidden_states())
    assert torch.equal(found, hidden_states())
    expected = found[0]
    for step in range(2):
        found = draft(TOKENS, found, attention, step)
        embedding = raw.get("embed_tokens.weight", target.embed_tokens.weight)
        expected, last = eagle_step(raw, embedding[TOKENS[0]], expected, 40)
        torch.testing.assert_close(found[0], expected)
        logits = draft.logits(found, step)
        assert (logits.dtype, logits.shape) == (torch.float32, (1, 7, VOCAB_SIZE))
        torch.testing.assert_close(logits[0], last @ target.lm_head.weight.T)


BIASES = {"attention_bias": True, "mlp_bias": True}
PUBLISHED: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "safeailab": ("safeailab", ("fc_bias", "embedding"), {}),
    "safeailab without a bias": ("safeailab", (), {}),
    "no bias key": ("safeailab", ("fc_bias",), {"bias": None}),
    "no bias key, no bias": ("safeailab", (), {"bias": None}),
    "renamed for SGLang": ("safeailab", ("fc_bias",), {"architectures": ["LlamaForCausalLMEagle"]}),
    "vLLM's name": ("safeailab", (), {"architectures": ["EagleLlamaForCausalLM"]}),
    "qwen2": ("safeailab", ("qkv_biases", "fc_bias"), {"architectures": ["Qwen2ForCausalLMEagle"]}),
    "plain qwen2": ("safeailab", ("qkv_biases",), {"architectures": ["Qwen2ForCausalLM"]}),
    "mistral": ("safeailab", (), {"architectures": ["MistralForCausalLMEagle"], "sliding_window": 4}),
    "hass": ("hass", ("fc_bias", "norms"), {}),
    "speculators": ("speculators-old", (), {}),
    "speculators with everything": ("speculators-old", ("fc_bias", "norms", "biases"), {"layer": BIASES}),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_equal_the_equations(name: str, tmp_path: Any, target_path: Any) -> None:
    layout, extras, config = PUBLISHED[name]
    raw = eagle_tensors(extras=extras)
    draft, target = load(publish_eagle(tmp_path, raw, layout, **config), target_path)
    assert (draft.embed_tokens is target.embed_tokens) == ("embedding" not in extras)
    assert draft.lm_head is target.lm_head
    assert (draft.facts.feature_size, draft.facts.tap_layers, draft.facts.decoder.num_layers) == (48, (), 1)
    assert draft.target_token_Vd is None
    assert_equals_reference(draft, target, raw)


@torch.inference_mode()
def test_a_copy_of_the_targets_embedding_is_shared(tmp_path: Any, target_path: Any) -> None:
    copied = load_target(read_model_facts(target_path), (), 8, torch.float32, "cpu").embed_tokens.weight
    raw = eagle_tensors() | {"embed_tokens.weight": copied.bfloat16()}
    draft, target = load(publish_eagle(tmp_path, raw, "safeailab"), target_path)
    assert draft.embed_tokens is target.embed_tokens


@torch.inference_mode()
@pytest.mark.parametrize("extras", [(), ("fc_bias",)])
def test_tensors_decide_on_the_bias_and_say_so(
    extras: tuple[str, ...], tmp_path: Any, target_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    raw = eagle_tensors(extras=extras)
    draft, target = load(publish_eagle(tmp_path, raw, "safeailab", bias=not extras), target_path)
    assert_equals_reference(draft, target, raw)
    assert ["fc.bias" in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]


def test_inert_rows_change_nothing_even_with_nan_features(tmp_path: Any, target_path: Any) -> None:
    assert_inert_rows(load(publish_eagle(tmp_path, eagle_tensors(extras=("norms",)), "hass"), target_path)[0])


@pytest.mark.parametrize(
    ("config", "key", "hint"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures", "variant=eagle3"),
        ({"draft_vocab_size": 32}, "architectures", "variant=eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": 32}, "draft_vocab_size", "variant=eagle3"),
        ({"layer": {"num_hidden_layers": 4}}, "architectures", "variant=standalone"),
        ({"layer": {"num_hidden_layers": 2}, "architectures": ["LlamaForCausalLMEagle"]}, "num_hidden_layers", "layers"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "architectures", "variant=mtp"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "variant=standalone"),
        ({"vocab_size": 60}, "vocab_size", "one vocabulary"),
        ({"hidden_size": 64}, "hidden_size", "target's hidden state"),
        ({"add_para_norm": True}, "add_para_norm", "not supported"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "eagle_config: parallel_draft_step", "not supported"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type", "another variant"),
        ({"speculators_model_type": "eagle", "transformer_layer_config": 3}, "transformer_layer_config", ""),
        ({"bias": "no"}, "bias", ""),
    ],
)
def test_heads_that_do_not_fit_are_named(config: dict[str, Any], key: str, hint: str, tmp_path: Any, target_path: Any) -> None:
    path = publish_eagle(tmp_path, eagle_tensors(), "safeailab", **config)
    with pytest.raises(CheckpointError) as caught:
        read_eagle_facts(path, read_model_facts(target_path))
    assert caught.value.key == f"{path / 'config.json'}: {key}"
    assert hint in caught.value.hint


def test_another_kind_of_layer_is_refused(tmp_path: Any, target_path: Any) -> None:
    path = publish_eagle(tmp_path, eagle_tensors(), "speculators-old", transformer_layer_architecture="MixtralDecoderLayer")
    with pytest.raises(CheckpointError, match="transformer_layer_architecture"):
        read_eagle_facts(path, read_model_facts(target_path))


def test_other_checkpoints_are_known_by_their_tensors(tmp_path: Any, target_path: Any) -> None:
    third = publish_eagle3(tmp_path / "third", eagle3_tensors(), "safeailab", taps=None)
    edit_json(third / "config.json", "draft_vocab_size")
    whole = write_hf(build_hf("llama", num_hidden_layers=1), tmp_path / "whole")
    nextn = publish_eagle(tmp_path / "nextn", eagle_tensors(), "safeailab")
    edit_tensors(nextn / "model.safetensors", "fc.weight", model__layers__0__eh_proj__weight=torch.zeros(48, 96))
    for path, hint in ((third, "variant=eagle3"), (whole, "variant=standalone"), (nextn, "variant=mtp")):
        with pytest.raises(CheckpointError, match="expected an EAGLE-1/2 head") as caught:
            load(path, target_path)
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"fc.weight": torch.zeros(48, 144)}, r"fc\.weight: expected shape \[48, 96\], found shape \[48, 144\]"),
        ({"embed_tokens.weight": torch.zeros(60, 48)}, r"embed_tokens\.weight: expected shape \[61, 48\]"),
        ({"layers.0.input_layernorm.weight": torch.ones(48)}, r"input_layernorm\.weight: expected no such tensor"),
        ({"lm_head.weight": torch.ones(61, 48)}, r"lm_head\.weight: expected no such tensor"),
        ({"fc.bias": torch.zeros(7)}, r"fc\.bias: expected shape \[48\]"),
        ({"layers.0.mlp.up_proj.weight": None}, r"up_proj\.weight: expected a tensor of shape \[56, 48\], found no such tensor"),
    ],
)
def test_wrong_tensors_are_named(changes: dict[str, Any], part: str, tmp_path: Any, target_path: Any) -> None:
    tensors = {name: tensor for name, tensor in {**eagle_tensors(), **changes}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=part):
        load(publish_eagle(tmp_path, tensors, "safeailab"), target_path)


def test_norms_that_config_and_tensors_disagree_on(tmp_path: Any, target_path: Any) -> None:
    for extras, layernorms, part in ((("norms",), False, "none of them"), ((), True, "embed_layernorm, hidden_layernorm")):
        path = publish_eagle(tmp_path / str(layernorms), eagle_tensors(extras=extras), "speculators-old", layernorms=layernorms)
        with pytest.raises(CheckpointError, match=f"layer norms: expected {part}"):
            load(path, target_path)


# ---- token maps

IDS = [60, 3, 17, 0, 44]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "standalone"])
def test_a_trimmed_head_gives_the_same_logits_for_fewer_tokens(kind: str, tmp_path: Any, target_path: Any) -> None:
    if kind == "eagle":
        draft, target = load(publish_eagle(tmp_path / "draft", eagle_tensors(), "safeailab"), target_path)
    else:
        whole = write_hf(build_hf("llama", num_hidden_layers=1, seed=3), tmp_path / "draft")
        target_facts = read_model_facts(target_path)
        target = load_target(target_facts, (), 64, torch.float32, "cpu")
        draft = load_standalone(read_standalone_facts(whole, target_facts), target, 64, torch.float32, "cpu")
    full, whole_head = draft.logits(hidden_states()), target.lm_head.weight.clone()
    torch.save(IDS, tmp_path / "freq.pt")
    token_Vd = load_token_map(tmp_path / "freq.pt", VOCAB_SIZE)
    apply_token_map(draft, token_Vd)
    assert draft.target_token_Vd.tolist() == sorted(IDS)
    assert draft.facts.draft_vocab_size == len(IDS)
    torch.testing.assert_close(draft.logits(hidden_states()), full[..., sorted(IDS)])
    assert torch.equal(target.lm_head.weight, whole_head)
    assert target.logits(hidden_states()).shape[-1] == VOCAB_SIZE
    with pytest.raises(ConfigError, match="a map of its own, of 5 tokens"):
        apply_token_map(draft, token_Vd)


def test_a_head_with_its_own_map_takes_no_other(tmp_path: Any, target_path: Any) -> None:
    target_facts = read_model_facts(target_path)
    facts = read_eagle3_facts(publish_eagle3(tmp_path, eagle3_tensors(), "sglang"), target_facts)
    target = load_target(target_facts, facts.tap_layers, 8, torch.float32, "cpu")
    with pytest.raises(ConfigError, match=r"variant\.token_map: .* of its own, of 23 tokens"):
        apply_token_map(load_eagle3(facts, target, 8, torch.float32, "cpu"), torch.tensor(IDS))


def test_every_way_to_write_a_token_map(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    ids = torch.tensor(IDS)
    torch.save(IDS, tmp_path / "list.pt")
    torch.save(ids.int(), tmp_path / "tensor.pt")
    save_file({"token_map": ids, "counts": ids.clone()}, tmp_path / "named.safetensors")
    save_file({"hot": ids, "share": ids.float()}, tmp_path / "only.safetensors")
    for name in ("list.pt", "tensor.pt", "named.safetensors", "only.safetensors"):
        found = load_token_map(tmp_path / name, VOCAB_SIZE)
        assert (found.dtype, found.tolist()) == (torch.int64, sorted(IDS)), name


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([0, 61], "token ids in .0, 61., found 61"),
        ([-1, 4], "found -1"),
        ([5, 4, 5], "distinct token ids, found 5 more than once"),
        ([], "token ids, found torch.int64 of shape .0."),
        ([1, 2.0], "other elements"),
        ([1, True], "other elements"),
        ({"ids": 3}, "found dict"),
        (torch.zeros(2, 2, dtype=torch.int64), r"shape \[2, 2\]"),
        (torch.zeros(2), "found torch.float32"),
    ],
)
def test_bad_token_maps_are_named(value: Any, part: str, tmp_path: Any) -> None:
    file = tmp_path / "map.pt"
    torch.save(value, file)
    with pytest.raises(CheckpointError, match=part) as caught:
        load_token_map(file, VOCAB_SIZE)
    assert str(file) in caught.value.key


def test_files_that_are_no_token_maps(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    (tmp_path / "map.txt").write_text("1 2 3")
    (tmp_path / "broken.pt").write_bytes(b"no")
    save_file({"a": torch.arange(3), "b": torch.arange(3)}, tmp_path / "two.safetensors")
    for name, part in (("gone.pt", "no such file"), ("map.txt", r"found \.txt"), ("broken.pt", "2 bytes"), ("two.safetensors", "a, b")):
        with pytest.raises(CheckpointError, match=part):
            load_token_map(tmp_path / name, VOCAB_SIZE)
