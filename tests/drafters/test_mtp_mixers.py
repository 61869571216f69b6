"""The prediction head of Nemotron-H, whose layers hold one net each: against transformers, and heads that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.drafters.mtp.facts import counted_facts, read_mtp_facts
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import DenseAttention, write_hf
from tests.support.hybrid_checkpoints import HIDDEN, build_hybrid, mixer_head
from tests.support.mtp_checkpoints import RecordingAttention, add_heads

from .test_mtp_head import TOKENS, load

if TYPE_CHECKING:
    from pathlib import Path

ONE = {"num_nextn_predict_layers": 1}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["nemotron_h_moe", "nemotron_h_latent"])
@pytest.mark.parametrize(
    ("kinds", "keys"),
    [
        (("full_attention", "moe"), {}),
        (("full_attention", "mlp"), {"mtp_hybrid_override_pattern": "*-"}),
        (("moe", "full_attention", "mlp"), {"mtp_layers_block_type": ["moe", "attention", "mlp"]}),
    ],
)
def test_it_equals_transformers(family: str, kinds: tuple[str, ...], keys: dict[str, Any], tmp_path: Path) -> None:
    """Its layers and the norm after them are a model, which transformers runs over what the projection returned."""
    raw, model = mixer_head(family, kinds)
    path = write_hf(build_hybrid(family), tmp_path, mtp_layers_block_type=None)
    draft, target = load(add_heads(path, raw, **ONE, **keys), path)
    assert draft.facts.decoder.mixers == tuple("attention" if kind == "full_attention" else "mlp" for kind in kinds)
    assert (draft.facts.decoder.kv_layers, draft.facts.attends, draft.lm_head is target.lm_head) == (1, False, True)
    hidden = torch.randn(1, len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(5))

    def normed(x: torch.Tensor, part: str) -> torch.Tensor:
        return raw[f"mtp.layers.0.{part}.weight"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    halves = normed(target.embed_tokens.weight[torch.tensor([TOKENS])], "enorm"), normed(hidden, "hnorm")
    entering = torch.cat(halves, -1) @ raw["mtp.layers.0.eh_proj.weight"].T
    expected = model.model(inputs_embeds=entering, use_cache=False).last_hidden_state
    attention = RecordingAttention(*vars(DenseAttention.prompt(1, len(TOKENS))).values())
    found = draft(torch.tensor([TOKENS]), hidden, attention)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert attention.layers == [0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two heads": ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: expected the number of heads"),
    "no attention": ({"mtp_hybrid_override_pattern": "EE"}, "at least one layer that attends"),
    "two that attend": ({"mtp_layers_block_type": ["attention", "attention"]}, "mtp_layers_block_type: expected one layer that attends"),
    "a recurrent layer": ({"mtp_hybrid_override_pattern": "*M"}, "mtp_hybrid_override_pattern: expected one layer that attends"),
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected a NemotronH architecture"),
    "another width": ({"hidden_size": 64}, "hidden_size: expected 48, as in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_lacks_is_refused(name: str, tmp_path: Path) -> None:
    keys, message = REFUSED[name]
    path = write_hf(build_hybrid("nemotron_h_moe"), tmp_path, mtp_layers_block_type=None)
    target = read_model_facts(path)
    add_heads(path, mixer_head("nemotron_h_moe")[0], **{**ONE, **keys})
    with pytest.raises(CheckpointError, match=message):
        read_mtp_facts(path, target)


def test_it_must_be_whole(tmp_path: Path) -> None:
    path, name = write_hf(build_hybrid("nemotron_h_latent"), tmp_path), "mtp.layers.1.mixer.fc1_latent_proj.weight"
    raw, _ = mixer_head("nemotron_h_latent")
    add_heads(path, {key: tensor for key, tensor in raw.items() if key != name}, **ONE)
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.1\.mixer\.fc1_latent_proj\.weight: expected a tensor of shape"):
        load(path, path)
    target = load_target(read_model_facts(path), (), 8, torch.float32, "cpu")
    assert target.facts.num_layers == 5, "plain decoding leaves the head unread"


def test_a_config_alone_counts_it(tmp_path: Path) -> None:
    path = write_hf(build_hybrid("nemotron_h_moe"), tmp_path, **ONE)
    facts, words = counted_facts(path, read_model_facts(path))
    assert (facts.layout, facts.num_heads, facts.decoder.mixers) == ("nemotron", 1, ("attention", "mlp"))
    assert words.startswith("1 prediction head(s)")
