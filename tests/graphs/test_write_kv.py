"""Writing only a drafter's KV: the bits that the whole network writes, and no computation after the last layer's keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from graphspec import LLM, SamplingParams
from graphspec.kernels.linear.linear import hidden_of
from graphspec.models.decoder import MixerLayers
from tests.support import mtp_checkpoints
from tests.support.checkpoints import build_hf, eagle3_tensors, write_eagle3, write_hf
from tests.support.depths import RandomDepth
from tests.support.engines import CHAIN, ids, prompts
from tests.support.hybrid_checkpoints import build_hybrid, mixer_head
from tests.support.moe_checkpoints import add_heads, head_tensors, write_mixture
from tests.support.variants import build_family

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

HEADS = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
LATENT = {"max_position_embeddings": 96}


def last_mlp(draft: Any) -> nn.Module:
    """The block after the attention, of which only the KV is wanted."""
    if hasattr(draft, "heads"):
        draft = draft.heads[-1]
    layers = draft.model.layers if hasattr(draft, "model") else getattr(draft, "layers", [getattr(draft, "layer", None)])
    return layers[-1][-1].mixer if isinstance(layers[-1], MixerLayers) else layers[-1].mlp


def make(path: Path, name: str, **keys: Any) -> LLM:
    if name == "latent mtp":
        target, _ = write_mixture(path, "deepseek_v3", easy=True, num_hidden_layers=2, **LATENT)
        return LLM(add_heads(target, head_tensors("deepseek_v3", 2, **LATENT)), variant="mtp", runtime="eager", **CHAIN, **keys)
    if name == "mtp of one net per layer":
        model = build_hybrid("nemotron_h_moe")
        target = mtp_checkpoints.add_heads(write_hf(model, path), mixer_head("nemotron_h_moe")[0], num_nextn_predict_layers=1)
        return LLM(target, variant="mtp", runtime="eager", **CHAIN, **keys)
    if name.startswith("eagle3"):
        target = write_hf(build_hf("llama", num_hidden_layers=6, max_position_embeddings=96), path / "target")
        count = int(name[-1])
        draft = write_eagle3(path / "draft", eagle3_tensors(num_layers=count), num_hidden_layers=count, max_position_embeddings=96)
        return LLM(target, variant="eagle3", draft=draft, runtime="eager", **CHAIN, **keys)
    shape = HEADS if name == "mtp-3" else CHAIN
    return build_family(path).llm(name, **shape, **keys)


NAMES = ("eagle", "eagle3, layers 1", "eagle3, layers 2", "mtp-1", "mtp-3", "standalone", "latent mtp", "mtp of one net per layer")


@pytest.mark.parametrize("name", NAMES)
def test_equals_what_the_whole_network_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several chunks, and catching up where the depth may change."""
    depths = {} if name == "mtp-3" else {"depths": [0, 1], "backlog": 6}
    found: list[tuple[Tensor, list[list[int]], int]] = []
    for alone in (True, False):
        llm = make(tmp_path / str(alone), name, max_rows=2, buckets=[2], prefill_chunks=[4, 8], **depths)
        draft: Any = llm.cycle.draft
        rows = 0

        def count(module: Any, inputs: tuple[Tensor, ...]) -> None:
            nonlocal rows
            rows += hidden_of(inputs[0]).shape[:-1].numel()

        last_mlp(draft).register_forward_pre_hook(count)
        if not alone:
            monkeypatch.setattr(type(draft), "write_kv", type(draft).forward)
        if depths:
            llm.depth_policy = RandomDepth(llm.plan, 3)
        output = llm.generate(prompts(2, (21, 13)), SamplingParams(max_tokens=24, ignore_eos=True))
        found.append((llm.cycle.arena["draft_kv"].clone(), ids(output), rows))
    (kv, tokens, few), (whole_kv, whole_tokens, many) = found
    assert kv.equal(whole_kv) and kv.any(), "the same KV to the bit"
    assert tokens == whole_tokens
    assert few < many, "the last layer's MLP runs where something is proposed"
