"""EAGLE-3 heads in every published layout: names, shapes, options, and what a missing key means."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

from graphspec.errors import CheckpointError
from tests.support.checkpoints import TAPS, VOCAB_SIZE, DenseAttention, build_hf, eagle3_tensors, publish_eagle3, write_hf
from tests.support.eagle_reference import eagle3_fuse, eagle3_step

from .test_eagle3_head import load

BIASES = {"attention_bias": True, "mlp_bias": True}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: layout, arguments of eagle3_tensors, arguments of publish_eagle3
    "safeailab": ("safeailab", {}, {"taps": None}),
    "sglang": ("sglang", {}, {}),
    "sglang default taps": ("sglang", {}, {"taps": None, "num_aux_hidden_states": 3}),
    "speculators": ("speculators", {}, {}),
    "speculators norm first": ("speculators", {}, {"norm_before_residual": True}),
    "speculators qwen3": ("speculators", {"extras": ("qk_norm",)}, {"layer": {"model_type": "qwen3"}}),
    "speculators biases": ("speculators", {"extras": ("biases",)}, {"layer": BIASES}),
    "speculators deep": ("speculators", {"num_layers": 3, "extras": ("embedding",)}, {}),
    "speculators 3.1": ("speculators", {"extras": ("fc_norm",)}, {"fc_norm": True, "norm_output": True}),
    "speculators norm before fc": ("speculators", {"extras": ("input_norm",)}, {"norm_before_fc": True}),
    "modelopt": ("modelopt", {}, {}),
    "modelopt norm output": ("modelopt", {}, {"eagle_config": {"return_hidden_post_norm": True, "parallel_draft_heads_num_layers": 1}}),
    "modelopt deep": ("modelopt", {"num_layers": 2}, {}),
    "modelopt biases": ("modelopt", {"extras": ("biases",)}, {"layer": BIASES}),
    "sglang deep": ("sglang", {"num_layers": 2}, {}),
    "sglang fc bias": ("sglang", {"extras": ("fc_bias",)}, {"bias": True}),
    "sglang 3.1": ("sglang", {"extras": ("fc_norm",)}, {"fc_norm": True, "norm_output": True}),
    "sglang 3.1 nested": ("sglang", {"extras": ("fc_norm",)}, {"eagle_config": {"fc_norm": True, "norm_output": True}}),
    "sglang norm output": ("sglang", {}, {"norm_output": True}),
    "sglang norm before fc": ("sglang", {"extras": ("input_norm",)}, {"eagle_config": {"norm_before_fc": True}}),
    "norms known by their tensors": ("sglang", {"extras": ("fc_norm",)}, {}),
    "five taps": ("sglang", {"num_taps": 5, "extras": ("fc_norm",)}, {"taps": (0, 2, 4, 6, 8), "num_aux_hidden_states": 5}),
    "one tap": ("modelopt", {"num_taps": 1}, {"taps": (7,)}),
    "own width": ("safeailab", {"hidden_size": 32, "extras": ("embedding",)}, {"taps": None, "target_hidden_size": 48}),
    "grouped heads": ("sglang", {"num_heads": 6, "num_kv_heads": 3}, {}),
}
LEGACY = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_hf(build_hf("llama", num_hidden_layers=9), tmp_path_factory.mktemp("deep"))


def assert_equals_reference(draft: Any, target: Any, raw: dict[str, torch.Tensor], **options: Any) -> None:
    """fuse, two steps and logits against the equations."""
    width = target.facts.hidden_size
    feature = torch.randn(1, 7, raw["fc.weight"].shape[1], generator=torch.Generator().manual_seed(5))
    tokens = torch.tensor([[4, 9, 60, 0, 9, 33, 2]])
    attention = DenseAttention.prompt(1, 7)
    attention.position_BT = attention.position_BT + 40  # beyond the head's own max_position_embeddings of 32
    embedding = raw.get("embed_tokens.weight", target.embed_tokens.weight)[tokens[0]]
    head = raw.get("lm_head.weight", embedding_head(draft, target, raw))
    found, expected = draft.fuse(feature), eagle3_fuse(raw, feature[0], width)
    torch.testing.assert_close(found[0], expected)
    for step in range(2):
        found = draft(tokens, found, attention, step)
        expected, normed = eagle3_step(raw, embedding, expected, 40, **options)
        torch.testing.assert_close(found[0], expected)
        logits = draft.logits(found, step)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits[0], normed @ head.T)


def embedding_head(draft: Any, target: Any, raw: dict[str, torch.Tensor]) -> torch.Tensor:
    tied = draft.facts.decoder.tie_word_embeddings
    return raw.get("embed_tokens.weight", target.embed_tokens.weight) if tied else target.lm_head.weight


@torch.inference_mode()
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_equal_the_equations(name: str, tmp_path: Any, deep_target: Any) -> None:
    layout, sizes, spelling = PUBLISHED[name]
    raw = eagle3_tensors(**sizes)
    draft, target = load(publish_eagle3(tmp_path, raw, layout, **spelling), deep_target)
    taps = spelling.get("taps", TAPS)
    assert draft.facts.tap_layers == (taps or (2, 4, 6))
    assert draft.facts.layout == layout
    assert draft.facts.decoder.num_layers == sizes.get("num_layers", 1)
    assert [layer.self_attn.layer for layer in draft.layers] == list(range(sizes.get("num_layers", 1)))
    flags = {**spelling, **spelling.get("eagle_config", {})}
    output = flags.get("norm_output", False) or flags.get("return_hidden_post_norm", False)
    assert_equals_reference(draft, target, raw, norm_before_residual=flags.get("norm_before_residual", False), norm_output=output)
    assert torch.equal(draft.target_token_Vd, raw["d2t"] + torch.arange(23))


@torch.inference_mode()
def test_legacy_names_of_the_tap_norms(tmp_path: Any, deep_target: Any) -> None:
    raw = eagle3_tensors(extras=("fc_norm",))
    renamed = {next((new + name.removeprefix(old) for old, new in LEGACY.items() if name.startswith(old)), name): raw[name] for name in raw}
    assert "aux_norm_mid.weight" in renamed
    draft, target = load(publish_eagle3(tmp_path, renamed, "sglang", use_aux_norm=True), deep_target)
    assert_equals_reference(draft, target, raw)


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["sglang", "speculators", "modelopt"])
def test_heads_without_a_head(layout: str, tmp_path: Any, deep_target: Any) -> None:
    raw = eagle3_tensors(draft_vocab_size=VOCAB_SIZE, extras=("embedding",))
    for name in ("lm_head.weight", "d2t", "t2d"):
        del raw[name]
    draft, target = load(publish_eagle3(tmp_path / "shared", raw, layout), deep_target)
    assert draft.lm_head is target.lm_head
    assert_equals_reference(draft, target, raw)
    tied, target = load(publish_eagle3(tmp_path / "tied", raw, layout, layer={"tie_word_embeddings": True}), deep_target)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert_equals_reference(tied, target, raw)
    missing = {name: tensor for name, tensor in eagle3_tensors().items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*no such tensor"):
        load(publish_eagle3(tmp_path / "missing", missing, layout, draft_vocab_size=23), deep_target)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("layout", "expected", "level"), [("speculators", True, "WARNING"), ("modelopt", False, "INFO"), ("sglang", False, "INFO")]
)
def test_a_missing_norm_flag_follows_from_the_layout_and_is_logged_once(
    layout: str, expected: bool, level: str, tmp_path: Any, deep_target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    raw = eagle3_tensors()
    path = publish_eagle3(tmp_path, raw, layout)
    values = json.loads((path / "config.json").read_text())
    values.pop("norm_before_residual", None)
    (path / "config.json").write_text(json.dumps(values))
    caplog.set_level(logging.INFO, "graphspec")
    draft, target = load(path, deep_target)
    records = [record for record in caplog.records if "norm_before_residual" in record.getMessage()]
    assert [(record.levelname, str(expected) in record.getMessage()) for record in records] == [(level, True)]
    assert_equals_reference(draft, target, raw, norm_before_residual=expected)


@torch.inference_mode()
def test_tensors_decide_on_biases_and_say_so(tmp_path: Any, deep_target: Any, caplog: pytest.LogCaptureFixture) -> None:
    raw = eagle3_tensors(extras=("biases",))
    draft, target = load(publish_eagle3(tmp_path / "more", raw, "sglang"), deep_target)
    assert_equals_reference(draft, target, raw)
    assert any("attention_bias" in record.getMessage() for record in caplog.records)
    caplog.clear()
    plain = eagle3_tensors()
    draft, target = load(publish_eagle3(tmp_path / "less", plain, "sglang", layer={"attention_bias": True}, bias=True), deep_target)
    assert_equals_reference(draft, target, plain)
    assert [record.levelname for record in caplog.records if "bias" in record.getMessage()] == ["WARNING"] * 3


def test_norms_that_config_and_tensors_disagree_on(tmp_path: Any, deep_target: Any) -> None:
    denied = publish_eagle3(tmp_path / "denied", eagle3_tensors(extras=("fc_norm",)), "sglang", fc_norm=False)
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight: expected no such tensor, as config\.json says fc_norm = false"):
        load(denied, deep_target)
    absent = publish_eagle3(tmp_path / "absent", eagle3_tensors(), "speculators", norm_before_fc=True)
    with pytest.raises(CheckpointError, match=r"input_norm\.weight: expected a tensor of shape \[144\], found no such tensor"):
        load(absent, deep_target)
    both = eagle3_tensors(num_layers=2)
    both["layers.1.hidden_norm.weight"] = both["layers.1.input_layernorm.weight"].clone()
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm\.weight under one name"):
        load(publish_eagle3(tmp_path / "both", both, "speculators"), deep_target)


def test_taps_of_each_spelling_are_bounded(tmp_path: Any, deep_target: Any) -> None:
    for layout, top in (("speculators", 9), ("sglang", 8)):
        path = publish_eagle3(tmp_path / layout, eagle3_tensors(), layout, taps=(1, 3, 10))
        with pytest.raises(CheckpointError, match=rf"to {top} \(the target has 9 layers\)"):
            load(path, deep_target)


@torch.inference_mode()
def test_pytorch_files(tmp_path: Any, deep_target: Any) -> None:
    raw = eagle3_tensors()
    path = publish_eagle3(tmp_path, raw, "safeailab", taps=None)
    (path / "model.safetensors").unlink()
    torch.save(raw, path / "pytorch_model.bin")
    draft, target = load(path, deep_target)
    assert_equals_reference(draft, target, raw)


def test_quantised_heads(tmp_path: Any, deep_target: Any) -> None:
    raw = eagle3_tensors()
    scaled = {**raw, "midlayer.mlp.up_proj.weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match="quantised checkpoint"):
        load(publish_eagle3(tmp_path / "scaled", scaled, "sglang"), deep_target)
    eight = {**raw, "midlayer.mlp.up_proj.weight": raw["midlayer.mlp.up_proj.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=r"found F8_E4M3 .*quantised checkpoint"):
        load(publish_eagle3(tmp_path / "eight", eight, "sglang"), deep_target)
    path = publish_eagle3(tmp_path / "modelopt", raw, "modelopt")
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization: expected an object"):
        load(path, deep_target)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}')
    with pytest.raises(CheckpointError, match="kv_cache_quant_algo: expected null"):
        load(path, deep_target)
