"""One-pass drafters in training: published layouts, visibility in a block, anchors and masks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from graphspec.errors import ConfigError
from graphspec.train.drafter import Target
from graphspec.train.export import export_draft
from graphspec.train.masks import MaskConfig, spread
from tests.support.drafts import PARALLEL, block_logits, build, random_text, tiny_target
from tests.train.test_recipe_networks import layer_shapes

NETWORKS = [*((variant, {}) for variant in PARALLEL), ("dflash", {"causal": False})]


def test_published_names_and_shapes(tmp_path):
    target = tiny_target()
    norms = {"input_layernorm": (32,)}
    heads = {"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
    expected = {
        "dflash": {
            "fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,),
            **layer_shapes("layers.0", 40, **norms, **heads), **layer_shapes("layers.1", 40, **norms, **heads),
        },
        "p_eagle": {
            "fc.weight": (32, 64), "norm.weight": (32,), "lm_head.weight": (48, 32), "d2t": (48,), "t2d": (96,), "mask_hidden": (1, 64),
            **layer_shapes("layers.0", 48, 64, hidden_norm=(32,), **norms), **layer_shapes("layers.1", 48, **norms),
        },
    }  # fmt: skip
    facts = {}
    for variant, shapes in expected.items():
        export_draft(build(variant, target), target, tmp_path / variant)
        tensors = load_file(tmp_path / variant / "model.safetensors")
        assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
        facts[variant] = json.loads((tmp_path / variant / "config.json").read_text())
        assert facts[variant]["num_hidden_layers"] == 2
    assert facts["dflash"]["architectures"] == ["DFlashDraftModel"] and facts["dflash"]["num_target_layers"] == 3
    # Ids fall in frequency in this text, so the last one is the mask.
    own = {"mask_token_id": 95, "target_layer_ids": [0, 1], "block_size": 5, "causal_head": True}
    assert facts["dflash"]["dflash_config"] == own
    assert facts["p_eagle"]["mask_token_id"] == 95 and facts["p_eagle"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]


@pytest.mark.parametrize(("variant", "network"), NETWORKS)
def test_a_block_sees_nothing_after_its_anchor_and_no_other_block(variant, network):
    """All blocks of a sequence together, against each block alone after a sequence cut off at its root."""
    target = tiny_target()
    drafter, tokens, steps = build(variant, target, **network), random_text(1, 14), 4
    features, _ = Target(target).view(tokens, drafter.tap_layers)
    with torch.no_grad():
        rows = drafter.anchors(10, 0)
        assert rows.tolist() == list(range(10)), "few rows are all anchors"
        found = torch.stack([drafter.logits(hidden)[0] for hidden in drafter.drafts(features, tokens, steps, rows)], 1)
        for row in rows.tolist():
            torch.testing.assert_close(found[row], block_logits(drafter, features, tokens, row, steps), rtol=1e-4, atol=1e-4)


def test_only_rows_of_a_causal_block_are_alike_in_blocks_of_other_lengths():
    target = tiny_target()
    tokens = random_text(1, 14)
    for causal in (True, False):
        drafter = build("dflash", target, causal=causal)
        features, _ = Target(target).view(tokens, drafter.tap_layers)
        short, long = (block_logits(drafter, features, tokens, 6, steps) for steps in (2, 4))
        assert torch.allclose(short, long[:2], atol=1e-4) == causal


def test_every_row_is_an_anchor_in_its_turn():
    assert spread(10, 64, 3).tolist() == list(range(10))
    turns = [spread(10, 4, turn).tolist() for turn in range(3)]
    assert turns == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert spread(10, 4, 5).tolist() == turns[2]
    assert max(len(spread(rows, 7, turn)) for rows in range(1, 60) for turn in range(9)) == 7


def test_the_mask_is_the_rarest_token_that_ends_no_text():
    target = tiny_target(eos_token_id=3)
    counts = torch.full((96,), 5)
    counts[[3, 17, 60]] = 1
    assert MaskConfig().mask_of(target, counts) == 60
    assert MaskConfig(mask_token_id=8).mask_of(target, counts) == 8
    with pytest.raises(ConfigError, match="mask_token_id"):
        MaskConfig(mask_token_id=96).mask_of(target, counts)


def test_taps_that_do_not_follow_from_the_depth_are_named():
    with pytest.raises(ConfigError, match="tap_layers"):
        build("dflash", tiny_target(), tap_layers=None, num_hidden_layers=3)
