"""A small language model as drafter, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.drafters.standalone.facts import read_standalone_facts
from graphspec.drafters.standalone.network import load_standalone
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from graphspec.models.token_map import apply_token_map
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, build_hf, eagle3_tensors, edit_json, edit_tensors, write_eagle3, write_hf
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.mtp_checkpoints import add_heads, head_tensors, write_heads, write_target

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 20
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-narrower": ("llama", {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "mistral-window": ("mistral", {"sliding_window": 6, "num_hidden_layers": 2}),
    "qwen2": ("qwen2", {"head_dim": None, "num_hidden_layers": 2}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def load(path: Path, target_path: Path) -> Any:
    target_facts = read_model_facts(target_path)
    target = load_target(target_facts, (), LENGTH, torch.float32, "cpu")
    return load_standalone(read_standalone_facts(path, target_facts), target, LENGTH, torch.float32, "cpu"), target


@torch.inference_mode()
@pytest.mark.parametrize("name", DRAFTS)
def test_logits_equal_transformers(name: str, tmp_path: Path, target_path: Path) -> None:
    family, overrides = DRAFTS[name]
    model = build_hf(family, seed=7, **overrides)
    draft, target = load(write_hf(model, tmp_path), target_path)
    token_BT = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    theirs = model(token_BT, output_hidden_states=True)
    hidden_BTH = draft(token_BT, None, DenseAttention.prompt(2, LENGTH))
    torch.testing.assert_close(hidden_BTH, theirs.hidden_states[-1], rtol=0, atol=1e-5)
    logits = draft.logits(hidden_BTH)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, theirs.logits, rtol=0, atol=1e-5)
    # neither what the step before returned nor the number of the step is looked at
    again = draft(token_BT, torch.full_like(hidden_BTH, float("nan")), DenseAttention.prompt(2, LENGTH), step=3)
    assert torch.equal(again, hidden_BTH)
    assert torch.equal(draft.logits(again, step=3), logits)
    # nothing is shared with the target
    assert {id(p) for p in draft.parameters()}.isdisjoint(id(p) for p in target.parameters())


def test_facts(tmp_path: Path, target_path: Path) -> None:
    model = build_hf("llama", hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, max_position_embeddings=16)
    facts = read_standalone_facts(write_hf(model, tmp_path), read_model_facts(target_path))
    assert (facts.path, facts.decoder.path) == (tmp_path, tmp_path)
    assert (facts.decoder.num_layers, facts.decoder.hidden_size, facts.decoder.max_position_embeddings) == (2, 32, 16)
    assert (facts.draft_vocab_size, facts.target_hidden_size, facts.feature_size) == (VOCAB_SIZE, 48, 0)
    assert (facts.tap_layers, facts.num_heads) == ((), 1)


@torch.inference_mode()
def test_prediction_heads_of_the_draft_are_left_unread(tmp_path: Path, target_path: Path) -> None:
    path = write_target(tmp_path, "mimo")
    plain, _ = load(path, target_path)
    draft, _ = load(add_heads(path, head_tensors("mimo"), num_nextn_predict_layers=1), target_path)
    for (name, mine), (_, theirs) in zip(draft.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@torch.inference_mode()
def test_inert_rows_change_nothing(tmp_path: Path, target_path: Path) -> None:
    draft, _ = load(write_target(tmp_path), target_path)
    draft.model.embed_tokens.weight[0] = float("nan")  # what a masked token would gather if it were not replaced
    attention = DenseAttention.prompt(1, 4)
    attention.valid_BT = torch.tensor([[True, True, False, False]])
    assert draft(torch.tensor([[5, 6, -1, 0]]), None, attention).isfinite().all()


@torch.inference_mode()
def test_forward_is_one_graph_and_reads_nothing_back(tmp_path: Path, target_path: Path) -> None:
    draft, _ = load(write_target(tmp_path, "qwen3"), target_path)
    attention = DenseAttention.prompt(1, 5)

    def step(token_BT: torch.Tensor) -> torch.Tensor:
        return draft.logits(draft(token_BT, None, attention, step=1), step=1)

    token_BT = torch.tensor([[1, 5, -1, 9, 2]])
    assert torch.equal(torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")(token_BT), step(token_BT))


@torch.inference_mode()
def test_a_trimmed_head(tmp_path: Path, target_path: Path) -> None:
    draft, _ = load(write_target(tmp_path, tie_word_embeddings=True), target_path)
    hidden = torch.randn(2, 48, generator=torch.Generator().manual_seed(2))
    whole, token_Vd = draft.logits(hidden), torch.tensor([3, 7, 60])
    apply_token_map(draft, token_Vd)
    assert torch.equal(draft.target_token_Vd, token_Vd)
    torch.testing.assert_close(draft.logits(hidden), whole[:, token_Vd], rtol=0, atol=1e-6)
    assert draft.model.embed_tokens.weight.shape[0] == VOCAB_SIZE


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [VOCAB_SIZE - 5, VOCAB_SIZE + 7])
def test_a_vocabulary_padded_to_another_size(size: int, tied: bool, tmp_path: Path, target_path: Path) -> None:
    """Rows beyond the target's are not read; ids beyond the draft's are zero vectors, and no columns."""
    model = build_hf("llama", seed=7, num_hidden_layers=2, vocab_size=size, tie_word_embeddings=tied)
    draft, _ = load(write_hf(model, tmp_path), target_path)
    known = min(size, VOCAB_SIZE)
    assert draft.model.embed_tokens.weight.shape == draft.model.lm_head.weight.shape == (known, 48)
    assert (draft.model.lm_head.weight is draft.model.embed_tokens.weight) == tied
    token_BT = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    token_BT[0, 3] = VOCAB_SIZE - 1
    with torch.no_grad():
        embedded = torch.nn.functional.embedding(token_BT.clamp(max=size - 1), model.model.embed_tokens.weight)
        theirs = model(inputs_embeds=torch.where(token_BT[..., None] < size, embedded, 0.0)).logits
    logits = draft.logits(draft(token_BT, None, DenseAttention.prompt(2, LENGTH)))
    torch.testing.assert_close(logits, theirs[..., :known], rtol=0, atol=1e-5)
    assert draft.facts.draft_vocab_size == known
    if size > VOCAB_SIZE:
        assert draft.target_token_Vd is None
    else:
        assert draft.target_token_Vd.tolist() == list(range(size))
    apply_token_map(draft, torch.tensor([3, 7, VOCAB_SIZE - 2]))
    assert draft.target_token_Vd.tolist() == ([3, 7, VOCAB_SIZE - 2] if size > VOCAB_SIZE else [3, 7])


def test_another_size_is_a_warning_where_no_tokenizers_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, path = write_target(tmp_path / "target"), write_target(tmp_path / "draft", vocab_size=VOCAB_SIZE + 7)
    caplog.set_level("INFO")
    for level, end in (("WARNING", "taken as padding, without two tokenizers to compare"), ("INFO", "taken as padding")):
        caplog.clear()
        read_standalone_facts(path, read_model_facts(target))
        (record,) = (record for record in caplog.records if "padding" in record.getMessage())
        assert (record.levelname, record.getMessage()) == (level, f"{path}: a vocabulary of 68, that of the target is 61: {end}")
        for folder in (target, path):
            (folder / "tokenizer.json").write_text("{}")


def test_a_larger_vocabulary_is_checked_before_it_is_cut(tmp_path: Path, target_path: Path) -> None:
    path = write_target(tmp_path, vocab_size=VOCAB_SIZE + 7)
    edit_tensors(path / "model.safetensors", lm_head__weight=torch.zeros(VOCAB_SIZE, 48))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape \[68, 48\], found shape \[61, 48\]"):
        load(path, target_path)


def test_heads_are_no_language_models(tmp_path: Path, target_path: Path) -> None:
    target = read_model_facts(target_path)
    for number, architecture in enumerate(("LlamaForCausalLM", "LlamaForCausalLMEagle3")):
        path = write_eagle3(tmp_path / str(number), eagle3_tensors(), architectures=[architecture])
        with pytest.raises(CheckpointError, match="an EAGLE head belongs to another variant"):
            read_standalone_facts(path, target)
    path = write_heads(tmp_path / "mtp", head_tensors("mimo"), architectures=["MiMoMTP"])
    with pytest.raises(CheckpointError, match="architectures: expected one of"):
        read_standalone_facts(path, target)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.(enorm|eh_proj|hnorm)|model\.embed_tokens\.weight"):
        load(write_heads(tmp_path / "nextn", head_tensors("deepseek"), num_hidden_layers=1), target_path)
    path = write_target(tmp_path / "hybrid")
    edit_json(path / "config.json", architectures=["Qwen3_5ForCausalLM"], full_attention_interval=2)
    with pytest.raises(CheckpointError, match="every layer attends"):
        read_standalone_facts(path, target)
    edit_json(path / "config.json", architectures=["NemotronHForCausalLM"], hybrid_override_pattern="*-*-")
    with pytest.raises(CheckpointError, match="every layer attends"):
        read_standalone_facts(path, target)
    with pytest.raises(CheckpointError, match="every layer attends and none is recurrent"):
        read_standalone_facts(write_hf(build_hybrid("falcon_h1"), tmp_path / "side-by-side"), target)


def test_a_superfluous_tensor_is_refused(tmp_path: Path, target_path: Path) -> None:
    path = write_target(tmp_path)
    edit_tensors(path / "model.safetensors", fc__weight=torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"fc\.weight: expected no such tensor"):
        load(path, target_path)
