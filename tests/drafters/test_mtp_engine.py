"""Prediction heads and a small language model inside the engine: tokens and hidden states are aligned at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec import LLM, SamplingParams
from tests.support.checkpoints import edit_json, edit_tensors
from tests.support.mtp_checkpoints import HIDDEN, LAYERS, NAMES, add_heads, head_tensors, write_target

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 40
BEAMS = {"topk": 2, "num_steps": 3, "num_draft_tokens": 9}
PROMPTS = [[7], [30, 2, 9], list(range(3, 20)), [39, 38, 5, 5, 11, 0, 1, 2]]


def counting_target(path: Path, family: str) -> Path:
    """After token x comes x + 1, modulo the vocabulary: embeddings are unit vectors, layers add nothing."""
    write_target(path, family, vocab_size=VOCAB, eos_token_id=None, rms_norm_eps=1e-6)
    unit = torch.eye(VOCAB, HIDDEN)
    ones, changes = torch.ones(HIDDEN), {"model.embed_tokens.weight": unit, "lm_head.weight": unit.roll(1, 0)}
    changes["model.norm.weight"] = ones
    for layer in range(LAYERS):
        changes[f"model.layers.{layer}.self_attn.o_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        changes[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.zeros(HIDDEN, 40)
    edit_tensors(path / "model.safetensors", **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    return path


def counting_head(layout: str, index: int, reads: str) -> dict[str, torch.Tensor]:
    """A head that looks at one of its two inputs only: the token's embedding, or the hidden state of the token before it."""
    prefix, _, _, projection, _, _ = NAMES[layout]
    prefix = prefix.format(index)
    raw = {name: torch.ones_like(tensor) if "norm" in name else tensor for name, tensor in head_tensors(layout, index).items()}
    raw |= {name: torch.zeros_like(tensor) for name, tensor in raw.items() if name.endswith(("o_proj.weight", "down_proj.weight"))}
    embedding, hidden = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    if reads == "embedding":
        embedding[:VOCAB, :VOCAB] = torch.eye(VOCAB)  # token x: its successor is what the language-model head makes of it
    else:
        hidden[:VOCAB, :VOCAB] = torch.eye(VOCAB).roll(1, 0)  # state of x - 1, one further
    halves = (hidden, embedding) if layout == "mimo" else (embedding, hidden)
    raw[f"{prefix}{projection}.weight"] = torch.cat(halves, dim=1)
    return raw


@pytest.mark.parametrize("reads", ["embedding", "hidden"])
@pytest.mark.parametrize(("layout", "num_heads", "shape"), [("deepseek", 1, {}), ("mimo", 3, {}), ("deepseek", 1, {"topk": 2})])
def test_a_perfect_head_is_always_accepted(layout: str, num_heads: int, shape: dict[str, Any], reads: str, tmp_path: Path) -> None:
    path = counting_target(tmp_path, "mimo" if layout == "mimo" else "llama")
    first = LAYERS if layout == "deepseek" else 0
    add_heads(path, *[counting_head(layout, first + i, reads) for i in range(num_heads)], num_nextn_predict_layers=num_heads)
    if shape:
        shape = {"num_steps": 3, "num_draft_tokens": 11, **shape}
    runtime = {"runtime": "eager", "page_size": 4, "max_rows": 4, "buckets": [4], "prefill_chunks": [2, 8]}
    llm = LLM(model=str(path), variant="mtp", **shape, **runtime)
    assert llm.plan.shape.num_steps == 3
    for prompt, out in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=13)), strict=True):
        assert out.token_ids == [(prompt[-1] + 1 + i) % VOCAB for i in range(13)]
        assert out.metrics.acceptance_length == 4.0  # the first token comes from the prompt, then 3 cycles of 4


def test_a_draft_that_is_the_target_is_always_accepted(tmp_path: Path) -> None:
    path = write_target(tmp_path, eos_token_id=None)
    runtime = {"runtime": "eager", "page_size": 4, "max_rows": 4, "buckets": [4], "prefill_chunks": [2, 8]}
    plain = LLM(model=str(path), variant="none", **runtime).generate(PROMPTS, SamplingParams(max_tokens=13))
    drafted = LLM(model=str(path), variant="standalone", draft=str(path), **runtime).generate(PROMPTS, SamplingParams(max_tokens=13))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert [out.metrics.acceptance_length for out in drafted] == [4.0] * len(PROMPTS)


@pytest.mark.parametrize(
    ("size", "shape", "runtime"),
    [(VOCAB - 4, {}, "eager"), (VOCAB - 4, BEAMS, "compiled"), (VOCAB + 8, {}, "eager"), (VOCAB + 8, BEAMS, "eager")],
)
def test_a_draft_whose_vocabulary_is_padded_to_another_size(size: int, shape: dict[str, Any], runtime: str, tmp_path: Path) -> None:
    """The target emits ids that the smaller draft doesn't have; the larger one would always propose an id that the target doesn't have."""
    target, draft = counting_target(tmp_path / "target", "llama"), counting_target(tmp_path / "draft", "llama")
    edit_json(draft / "config.json", vocab_size=size)
    unit = torch.eye(VOCAB, HIDDEN)
    rows = {"model__embed_tokens__weight": unit, "lm_head__weight": unit.roll(1, 0)}
    edit_tensors(draft / "model.safetensors", **{k: torch.cat((w, torch.full((8, HIDDEN), 9.0)))[:size].clone() for k, w in rows.items()})
    engine = {"page_size": 4, "max_rows": 4, "buckets": [4], "prefill_chunks": [2, 8], "runtime": runtime}
    llm = LLM(model=str(target), variant="standalone", draft=str(draft), **shape, **engine)
    plain = LLM(model=str(target), variant="none", **engine)
    for params in (SamplingParams(max_tokens=21), SamplingParams(max_tokens=21, temperature=1.3, seed=5)):
        outputs, expected = (each.generate(PROMPTS, params) for each in (llm, plain))
        assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]
        if params.temperature == 0:
            assert any(token >= VOCAB - 4 for out in outputs for token in out.token_ids)
            assert all(out.metrics.acceptance_length > (3.9 if size > VOCAB else 2.0) for out in outputs)
    assert not {token for prompt in PROMPTS for token in llm.draft_tree(prompt).token_N[1:]}.intersection(range(min(size, VOCAB), 99))
