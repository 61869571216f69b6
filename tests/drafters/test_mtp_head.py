"""Prediction heads against their equations, written out from the checkpoints' raw tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from graphspec.drafters.mtp.facts import counted_facts, read_mtp_facts
from graphspec.drafters.mtp.loading import load_mtp
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from graphspec.models.token_map import apply_token_map
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, assert_inert_rows, eagle3_tensors, edit_tensors, write_eagle3, write_hf
from tests.support.eagle_reference import layer, project, rms
from tests.support.float_law import assert_float_law
from tests.support.hybrid_checkpoints import build_hybrid, expert_head
from tests.support.mtp_checkpoints import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    NAMES,
    RecordingAttention,
    add_heads,
    head_tensors,
    qwen_config,
    write_heads,
    write_target,
)

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = [4, 9, 60, 0, 9, 33, 2]
POSITION = 20


def load(draft_path: Path, target_path: Path, max_positions: int = 64) -> Any:
    target_facts = read_model_facts(target_path)
    facts = read_mtp_facts(draft_path, target_facts)
    target = load_target(target_facts, facts.tap_layers, max_positions, torch.float32, "cpu")
    return load_mtp(facts, target, max_positions, torch.float32, "cpu"), target


def by_equations(
    raw: dict[str, torch.Tensor],
    layout: str,
    index: int,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    dtype: torch.dtype,
    *,
    theta: float,
    eps: float = 1e-5,
    rotated: int = HEAD_DIM,
    window: int | None = None,
) -> torch.Tensor:
    """The tokens through one head in ``dtype``, by the published equations."""
    prefix, enorm, hnorm, projection, last, at = NAMES[layout]
    prefix, gated = prefix.format(index), layout == "qwen"
    w = {name.removeprefix(prefix): tensor.to(dtype) for name, tensor in raw.items() if name.startswith(prefix)}
    # Norms of Qwen's heads are stored less 1.
    w = {name: tensor + 1 if gated and tensor.ndim == 1 else tensor for name, tensor in w.items()}
    halves = [rms(embedding[TOKENS].to(dtype), w[f"{enorm}.weight"], eps), rms(hidden.to(dtype), w[f"{hnorm}.weight"], eps)]
    residual = project(w, projection, torch.cat(halves[::-1] if layout == "mimo" else halves, -1))
    x = rms(residual, w[f"{at}input_layernorm.weight"], eps)
    out = layer(w, at, residual, x, POSITION, theta, HEAD_DIM, window=window, rotary=rotated, gated=gated, eps=eps)
    return rms(out, w[f"{last}.weight"], eps)


def check(
    draft: Any, target: Any, raws: list[dict[str, torch.Tensor]], layout: str, first: int, *, windows: Any = None, **keys: Any
) -> None:
    """Three steps, each fed with what the one before returned, against the equations; then the logits."""
    hidden = torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(5))
    raw = {name: tensor for head in raws for name, tensor in head.items()}
    for step in range(3):
        attention = RecordingAttention(*vars(DenseAttention.prompt(1, len(TOKENS))).values())
        attention.position_BT = attention.position_BT + POSITION
        found = draft(torch.tensor([TOKENS]), draft.fuse(hidden[None]), attention, step=step)
        number = min(step, len(raws) - 1)
        prefix = NAMES[layout][0].format(first + number)
        embedding = raw.get(f"{prefix}embed_tokens.weight", target.embed_tokens.weight)
        head = raw.get(f"{prefix}shared_head.head.weight", target.lm_head.weight)
        keys["window"] = windows[number] if windows else None
        reference, exact = (
            by_equations(raw, layout, first + number, embedding, hidden, dtype, **keys) for dtype in (torch.float32, torch.float64)
        )
        assert_float_law(found[0], reference, exact)
        assert attention.layers == [number]
        logits = draft.logits(found, step=step)
        assert logits.dtype == torch.float32
        assert_float_law(logits[0], reference @ head.T, exact @ head.double().T)
        hidden = found[0]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "num_heads", "overrides"),
    [
        ("llama", 1, {}),
        ("llama", 3, {"tie_word_embeddings": True}),
        ("mistral", 2, {"sliding_window": 3}),
        ("qwen2", 2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}),  # between the heads
        ("qwen3", 1, {}),
    ],
)
def test_nextn_heads_in_the_targets_file(family: str, num_heads: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    path = write_target(tmp_path, family, rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **overrides)
    raws = [head_tensors("deepseek", LAYERS + i, family=family, copies=True) for i in range(num_heads)]
    add_heads(path, *raws, num_nextn_predict_layers=num_heads, layer_types=None)
    draft, target = load(path, path)
    windows = {"mistral": (3, 3), "qwen2": (None, 4)}.get(family, (None,) * num_heads)
    assert draft.facts.decoder.sliding_window == windows
    check(draft, target, raws, "deepseek", LAYERS, theta=300.0, windows=windows)


@torch.inference_mode()
@pytest.mark.parametrize(("first", "num_layers"), [(0, 1), (0, 6), (6, 6)])
def test_nextn_heads_stored_with_the_target(first: int, num_layers: int, tmp_path: Path) -> None:
    """Exports number from 0, with num_hidden_layers of the export or of the model; a split checkpoint keeps the numbers."""
    raws = [head_tensors("deepseek", first + i) for i in range(2)]
    path = write_heads(tmp_path / "draft", *raws, num_hidden_layers=num_layers, architectures=["LlamaForCausalLMNextN"])
    draft, target = load(path, write_target(tmp_path / "target", "mistral"))
    check(draft, target, raws, "deepseek", first, theta=500.0)
    assert draft.facts.decoder.max_position_embeddings == 32  # shorter than the target's: nothing to refuse


@torch.inference_mode()
@pytest.mark.parametrize("num_heads", [1, 2])
def test_mimo_heads(num_heads: int, tmp_path: Path) -> None:
    path = write_target(tmp_path, "mimo", rope_parameters={"rope_type": "default", "rope_theta": 640000.0})
    raws = [head_tensors("mimo", i) for i in range(num_heads)]
    add_heads(path, *raws, num_nextn_predict_layers=num_heads)
    draft, target = load(path, path)
    assert target.facts.architecture == "MiMoForCausalLM"
    check(draft, target, raws, "mimo", 0, theta=640000.0)


@torch.inference_mode()
@pytest.mark.parametrize("nested", [True, False])
def test_qwen_head_with_a_target_of_its_width(nested: bool, tmp_path: Path) -> None:
    raw = head_tensors("qwen")
    config = qwen_config()
    if not nested:
        config = {"architectures": ["Qwen3NextForCausalLM"], **config["text_config"]}
        config |= {"rope_parameters": None, "rope_theta": 700.0, "partial_rotary_factor": 0.25}
        config |= {"mtp_num_hidden_layers": None, "num_nextn_predict_layers": 1}
    rest = {"model.language_model.layers.0.linear_attn.A_log": torch.zeros(4), "model.visual.pos_embed.weight": torch.zeros(2, 2)}
    path = write_heads(tmp_path / "draft", raw, rest, **config)
    draft, target = load(path, write_target(tmp_path / "target"))
    check(draft, target, [raw], "qwen", 0, theta=700.0, eps=1e-6, rotated=4)


@torch.inference_mode()
def test_qwen_layer_equals_transformers(tmp_path: Path) -> None:
    """The decoder layer between projection and last norm, as transformers computes it for the model the head belongs to."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

    raw, config = head_tensors("qwen"), qwen_config()
    draft, _ = load(write_heads(tmp_path / "draft", raw, **config), write_target(tmp_path / "target"))
    hf_config = Qwen3_5TextConfig(**{k: v for k, v in config["text_config"].items() if not k.startswith(("mtp", "attn"))})
    hf_config._attn_implementation = "eager"
    layer = Qwen3_5DecoderLayer(hf_config, 3).eval()
    layer.load_state_dict({name.removeprefix("mtp.layers.0."): t for name, t in raw.items() if name.startswith("mtp.layers.0.")})
    x_BTH = torch.randn(1, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
    position_BT = torch.arange(9)[None]
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    cos_sin = Qwen3_5TextRotaryEmbedding(hf_config)(x_BTH, position_BT)
    theirs = layer(x_BTH, position_embeddings=cos_sin, attention_mask=mask)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    mine = draft.heads[0].layer(x_BTH, draft.rotary(position_BT, position_BT + 1), DenseAttention.prompt(1, 9))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


@torch.inference_mode()
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_qwen_heads_with_experts_equal_transformers(family: str, stacked: bool, tmp_path: Path) -> None:
    """The layer and the norm after it are a model of one layer, which transformers runs over what the projection returned."""
    raw, model = expert_head(family, stacked=stacked)
    path = add_heads(write_hf(build_hybrid(family), tmp_path), raw, mtp_num_hidden_layers=1)
    draft, target = load(path, path)
    assert draft.facts.decoder.has_experts(0)
    assert draft.lm_head is target.lm_head
    hidden = torch.randn(1, len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(5))

    def normed(x: torch.Tensor, part: str) -> torch.Tensor:
        weight = raw[f"mtp.pre_fc_norm_{part}.weight"] + 1
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    halves = normed(target.embed_tokens.weight[torch.tensor([TOKENS])], "embedding"), normed(hidden, "hidden")
    expected = model.model(inputs_embeds=torch.cat(halves, -1) @ raw["mtp.fc.weight"].T).last_hidden_state
    found = draft(torch.tensor([TOKENS]), hidden, DenseAttention.prompt(1, len(TOKENS)))
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_heads_that_a_config_counts_have_the_mlp_of_their_family(family: str, tmp_path: Path) -> None:
    path = write_hf(build_hybrid(family), tmp_path, mtp_num_hidden_layers=1)
    facts, words = counted_facts(path, read_model_facts(path))
    assert (facts.layout, facts.num_heads, facts.decoder.recurrent) == ("qwen", 1, None)
    assert facts.decoder.has_experts(0) == (family != "qwen3_5")
    assert words.startswith("1 prediction head(s)")


COPIES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
COPY_NAMES = {"embed_tokens": "embed_tokens.weight", "lm_head": "shared_head.head.weight"}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_the_targets_matrices_are_shared(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also where they were rounded to another dtype."""
    path = write_target(tmp_path)
    stored = load_file(path / "model.safetensors")
    copies = {f"model.layers.{LAYERS}.{COPY_NAMES[part]}": stored[name].to(dtype) for part, name in COPIES.items()}
    add_heads(path, head_tensors("deepseek", LAYERS) | copies, num_nextn_predict_layers=1)
    draft, target = load(path, path)
    assert draft.heads[0].embed_tokens is None
    assert draft.heads[0].lm_head is None
    assert draft.embed_tokens is target.embed_tokens
    assert draft.lm_head is target.lm_head
    assert draft.target_token_Vd is None
    assert (draft.facts.feature_size, draft.facts.tap_layers, draft.facts.draft_vocab_size) == (HIDDEN, (), VOCAB_SIZE)
    edit_tensors(path / "model.safetensors", **{f"model__layers__{LAYERS}__embed_tokens__weight": torch.zeros(VOCAB_SIZE - 1, HIDDEN)})
    with pytest.raises(CheckpointError, match=rf"{LAYERS}\.embed_tokens\.weight: expected shape \[61, 48\], found shape \[60, 48\]"):
        load(path, path)


@torch.inference_mode()
@pytest.mark.parametrize("part", COPIES)
def test_other_matrices_than_the_targets_are_used_and_named(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the layer of one of two heads, or of the model whose folder the heads are in."""
    raws = [head_tensors("deepseek", LAYERS + i, copies=i == 1) for i in range(2)]
    other = next(name for name in raws[1] if name.endswith(COPY_NAMES["lm_head" if part == "embed_tokens" else "embed_tokens"]))
    del raws[1][other]
    path = add_heads(write_target(tmp_path / "whole"), *raws, num_nextn_predict_layers=2)
    draft, target, file = *load(path, path), path / "model.safetensors"
    check(draft, target, raws, "deepseek", LAYERS, theta=10000.0)
    assert [record.getMessage() for record in caplog.records if "differs from the target's" in record.getMessage()] == [
        f"{file}: model.layers.{LAYERS + 1}.{COPY_NAMES[part]} differs from the target's {file}: {COPIES[part]}; the draft keeps its own"
    ]
    mine, theirs = (write_target(tmp_path / name) for name in ("draft", "target"))
    add_heads(mine, head_tensors("deepseek", LAYERS), num_nextn_predict_layers=1)
    weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(8))
    edit_tensors(mine / "model.safetensors", **{COPIES[part]: weight})
    draft, target = load(mine, theirs)
    assert torch.equal(getattr(draft.heads[0], part).weight, weight)
    assert draft.embed_tokens is target.embed_tokens


def test_inert_rows_change_nothing_even_with_nan_features(tmp_path: Path) -> None:
    assert_inert_rows(load(write_heads(tmp_path / "draft", head_tensors("deepseek")), write_target(tmp_path / "target"))[0])


@torch.inference_mode()
@pytest.mark.parametrize("layout", NAMES)
def test_forward_is_one_graph_and_reads_nothing_back(layout: str, tmp_path: Path) -> None:
    heads = [head_tensors(layout, i) for i in range(1 if layout == "qwen" else 2)]
    config = {"qwen": qwen_config(), "mimo": {"architectures": ["MiMoForCausalLM"]}}.get(layout, {})
    draft, _ = load(write_heads(tmp_path / "draft", *heads, **config), write_target(tmp_path / "target"))
    attention = DenseAttention.prompt(1, 5)

    def steps(token_BT: torch.Tensor, hidden_BTH: torch.Tensor) -> torch.Tensor:
        hidden_BTH = draft(token_BT, draft.fuse(hidden_BTH), attention, step=0)
        return draft.logits(draft(token_BT, hidden_BTH, attention, step=1), step=1)

    arguments = (torch.tensor([[1, 5, -1, 9, 2]]), torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(2)))
    compiled = torch.compile(steps, fullgraph=True, dynamic=False, backend="aot_eager")(*arguments)
    assert torch.equal(compiled, steps(*arguments))


@torch.inference_mode()
def test_a_trimmed_head_leaves_the_targets_whole(tmp_path: Path) -> None:
    draft, target = load(write_heads(tmp_path / "draft", head_tensors("deepseek")), write_target(tmp_path / "target"))
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole, token_Vd = draft.logits(hidden), torch.tensor([3, 7, 60])
    apply_token_map(draft, token_Vd)
    assert torch.equal(draft.target_token_Vd, token_Vd)
    torch.testing.assert_close(draft.logits(hidden), whole[:, token_Vd], rtol=0, atol=1e-6)
    assert torch.equal(target.logits(hidden), whole)


def test_progress_counts_every_head(tmp_path: Path) -> None:
    path, calls = write_heads(tmp_path / "draft", head_tensors("deepseek"), head_tensors("deepseek", 1)), []
    target_facts = read_model_facts(write_target(tmp_path / "target"))
    target = load_target(target_facts, (), 8, torch.float32, "cpu")
    load_mtp(read_mtp_facts(path, target_facts), target, 8, torch.float32, "cpu", lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, 26) for i in range(26)]


@torch.inference_mode()
@pytest.mark.parametrize("layout", NAMES)
def test_a_target_is_read_without_the_heads_in_its_file(layout: str, tmp_path: Path) -> None:
    family = "mimo" if layout == "mimo" else "llama"
    plain = load_target(read_model_facts(write_target(tmp_path, family)), (), 8, torch.float32, "cpu")
    add_heads(tmp_path, head_tensors(layout, LAYERS if layout == "deepseek" else 0, copies=layout == "deepseek"))
    loaded = load_target(read_model_facts(tmp_path), (), 8, torch.float32, "cpu")
    for (name, mine), (_, theirs) in zip(loaded.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_layer_too_many_is_no_head(tmp_path: Path) -> None:
    head = head_tensors("deepseek", LAYERS)
    del head[f"model.layers.{LAYERS}.eh_proj.weight"]
    add_heads(write_target(tmp_path), head)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.{LAYERS}\."):
        load_target(read_model_facts(tmp_path), (), 8, torch.float32, "cpu")


def renamed(head: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in head.items()}


def without(head: dict[str, torch.Tensor], end: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in head.items() if not name.endswith(end)}


NEXTN, MIMO, QWEN = head_tensors("deepseek"), head_tensors("mimo"), head_tensors("qwen")
MIMO_CONFIG = {"architectures": ["MiMoForCausalLM"]}
REFUSED: dict[str, tuple[list[dict[str, torch.Tensor]], dict[str, Any], str]] = {
    "count absent": ([NEXTN], {"num_nextn_predict_layers": None}, r"num_nextn_predict_layers: expected 1, for .* found no such key"),
    "count zero": ([MIMO], {**MIMO_CONFIG, "num_nextn_predict_layers": 0}, r"num_nextn_predict_layers: expected 1, .* found 0"),
    "qwen count absent": ([QWEN], qwen_config(mtp_num_hidden_layers=None), "mtp_num_hidden_layers: expected 1"),
    "count too large": ([NEXTN], {"num_nextn_predict_layers": 2}, r"expected the number of heads in the checkpoint, .* \[0\], found 2"),
    "numbers with a gap": ([NEXTN, head_tensors("deepseek", 2)], {}, r"which are numbered \[0, 2\], found 2"),
    "two qwen heads": ([QWEN], qwen_config(mtp_num_hidden_layers=2), "mtp_num_hidden_layers"),
    "numbered from nowhere": ([head_tensors("deepseek", 5)], {}, r"layers\.5\.eh_proj\.weight: expected heads numbered from 2"),
    "no such tensors": ([{"model.norm.weight": torch.ones(48)}], {}, "num_nextn_predict_layers = 1: expected tensors of as many"),
    "projection missing": ([without(MIMO, "input_proj.weight")], MIMO_CONFIG, r"input_proj among 15 tensors \(model\.mtp_layers\.0\."),
    "MLA": (
        [renamed(NEXTN, "k_proj", "kv_a_proj_with_mqa")],
        {},
        r"kv_a_proj_with_mqa\.weight: expected a head of LlamaForCausalLM with attention over keys and values",
    ),
    "MoE": ([renamed(NEXTN, "mlp.", "mlp.experts.3.")], {}, r"mlp\.experts\.3\.\w+\.weight: expected a head of Llama.* with a dense MLP"),
    "MoE router": ([{**NEXTN, "model.layers.0.mlp.gate.weight": torch.ones(4, 48)}], {}, r"mlp\.gate\.weight: expected .* a dense MLP"),
    "qwen MoE": ([renamed(QWEN, "mlp.", "mlp.experts.0.")], qwen_config(), r"experts\.0\.\w+\.weight: expected .* a dense MLP"),
    "unknown architecture": ([NEXTN], {"architectures": ["Glm5ForCausalLMNextN"]}, "architectures: expected one of LlamaForCausalLM"),
    "keys of another architecture": ([NEXTN], {"architectures": ["DeepseekV3ForCausalLMNextN"]}, "qk_rope_head_dim: expected an integer"),
    "mimo names, llama": ([MIMO], {}, r"architectures: expected one of MiMoForCausalLM.*mtp_layers, found \['LlamaForCausalLM'\]"),
    "qwen names, llama": ([QWEN], {}, "architectures: expected a Qwen3Next or Qwen3_5"),
    "nextn names, qwen3.5": ([NEXTN], {"architectures": ["Qwen3_5ForCausalLM"]}, "architectures: expected one of"),
    "dedicated embeddings": ([QWEN], qwen_config(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings: expected absent"),
    "no gate": ([QWEN], qwen_config(attn_output_gate=False), "attn_output_gate: expected true"),
    "odd rotation": (
        [QWEN],
        qwen_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}),
        "partial_rotary_factor: expected at most 1, and an even number",
    ),
    "another width": ([NEXTN], {"hidden_size": 64}, "hidden_size: expected 48, as in"),
    "another vocabulary": ([NEXTN], {"vocab_size": 62}, "vocab_size: expected 61, as in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_config_or_names(name: str, tmp_path: Path) -> None:
    heads, config, message = REFUSED[name]
    path = write_heads(tmp_path / "draft", *heads, **{"num_nextn_predict_layers": len(heads), **config})
    with pytest.raises(CheckpointError, match=message):
        read_mtp_facts(path, read_model_facts(write_target(tmp_path / "target")))


@pytest.mark.parametrize(
    ("heads", "config", "message"),
    [
        ([without(NEXTN, "hnorm.weight")], {}, r"model\.layers\.0\.hnorm\.weight: expected a tensor"),
        (
            [{**MIMO, "model.mtp_layers.0.extra.weight": torch.ones(2)}],
            MIMO_CONFIG,
            r"mtp_layers\.0\.extra\.weight: expected no such",
        ),
        ([{**QWEN, "mtp.embed_tokens.weight": torch.ones(2)}], qwen_config(), r"mtp\.embed_tokens\.weight: expected no such tensor"),
        ([{**NEXTN, "fc.weight": torch.ones(2)}], {}, r"fc\.weight: expected no such tensor"),
        ([NEXTN], {"intermediate_size": 41}, r"gate_proj\.weight: expected shape \[41, 48\], found shape \[40, 48\]"),
        ([NEXTN], {"architectures": ["Qwen2ForCausalLM"]}, r"q_proj\.bias: expected a tensor of shape"),
    ],
)
def test_refused_when_loading(heads: list[Any], config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write_heads(tmp_path / "draft", *heads, **config), write_target(tmp_path / "target"))


def test_windows_of_the_heads_must_be_given(tmp_path: Path) -> None:
    """A list of the target's layers alone leaves open whether the heads have its window."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    path = add_heads(
        write_target(tmp_path, "qwen3", **window), head_tensors("deepseek", LAYERS, family="qwen3"), num_nextn_predict_layers=1
    )
    target = read_model_facts(path)
    assert target.sliding_window == (None, 4)
    with pytest.raises(CheckpointError, match="layer_types: expected 3 entries"):
        read_mtp_facts(path, target)


def test_other_kinds_of_checkpoint_are_refused(tmp_path: Path) -> None:
    target_path = write_target(tmp_path / "target")
    target = read_model_facts(target_path)
    with pytest.raises(CheckpointError, match="an EAGLE head belongs to another variant"):
        read_mtp_facts(write_eagle3(tmp_path / "eagle", eagle3_tensors()), target)
    with pytest.raises(CheckpointError, match="neither num_nextn_predict_layers nor tensors of such heads"):
        read_mtp_facts(target_path, target)


def test_damaged_or_missing_files_are_named(tmp_path: Path) -> None:
    target = read_model_facts(write_target(tmp_path / "target"))
    path = write_heads(tmp_path / "draft", NEXTN)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a complete safetensors file"):
        read_mtp_facts(path, target)
    file.write_bytes(b"\xff" * 16)
    with pytest.raises(CheckpointError, match="found no header"):
        read_mtp_facts(path, target)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json, found neither"):
        read_mtp_facts(path, target)


@torch.inference_mode()
def test_sharded_heads(tmp_path: Path) -> None:
    import json

    path = write_heads(tmp_path / "draft", head_tensors("deepseek"), head_tensors("deepseek", 1))
    whole, _ = load(path, write_target(tmp_path / "target"))
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    names = dict.fromkeys({**NEXTN, **head_tensors("deepseek", 1)}, "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    sharded, _ = load(path, tmp_path / "target")
    for (name, mine), (_, theirs) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
