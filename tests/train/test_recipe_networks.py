"""The draft networks of the recipes: published layouts, agreement with transformers, unrolling, drafting, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from graphspec.config.train_options import AcceptanceConfig, TextConfig
from graphspec.drafters.heads.eagle3_training import choose_draft_vocab
from graphspec.errors import CheckpointError, ConfigError, ResourceError
from graphspec.train.acceptance import held_out_prompts
from graphspec.train.draft import Chats, Recipe, Texts, draft_losses, train_draft
from graphspec.train.drafter import Target, network_of, unrolled
from graphspec.train.export import export_draft
from graphspec.train.optim import Optimizers
from tests.support.drafts import (
    FAMILIES,
    PARALLEL,
    SMALL,
    build,
    draft_logits,
    load_draft,
    random_text,
    recipe,
    round_to_bfloat16,
    tiny_target,
)
from tests.support.eagle_reference import eagle3_fuse, eagle3_step


def layer_shapes(prefix: str, i: int, inputs: int = 32, **extra: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes = {
        "self_attn.q_proj": (32, inputs),
        "self_attn.k_proj": (16, inputs),
        "self_attn.v_proj": (16, inputs),
        "self_attn.o_proj": (32, 32),
    }
    shapes |= {"mlp.gate_proj": (i, 32), "mlp.up_proj": (i, 32), "mlp.down_proj": (32, i), "post_attention_layernorm": (32,)}
    return {f"{prefix}.{name}.weight": shape for name, shape in (shapes | extra).items()}


def mtp_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    norms = dict.fromkeys(("enorm", "hnorm", "shared_head.norm", "input_layernorm"), (32,))
    return layer_shapes(f"model.layers.{layer}", 48, eh_proj=(32, 64), **norms)


def test_published_names_and_shapes(tmp_path):
    target = tiny_target()
    expected = {
        "eagle": {"fc.weight": (32, 64), "fc.bias": (32,), **layer_shapes("layers.0", 40)},
        "eagle3": {
            "fc.weight": (32, 64), "norm.weight": (32,), "lm_head.weight": (48, 32), "d2t": (48,), "t2d": (96,),
            **layer_shapes("midlayer", 48, 64, input_layernorm=(32,), hidden_norm=(32,)),
        },
        "mtp": mtp_shapes(3),
    }  # fmt: skip
    names = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3", "mtp": "LlamaForCausalLMNextN"}
    for variant, shapes in expected.items():
        export_draft(build(variant, target), target, tmp_path / variant)
        tensors = load_file(tmp_path / variant / "model.safetensors")
        assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
        whole = {"d2t": torch.int64, "t2d": torch.bool}
        assert all(t.dtype == whole.get(name, torch.bfloat16) for name, t in tensors.items())
        facts = json.loads((tmp_path / variant / "config.json").read_text())
        assert facts["architectures"] == [names[variant]]
        assert facts["vocab_size"] == 96
        assert facts["rope_theta"] == 10000.0
    facts = {variant: json.loads((tmp_path / variant / "config.json").read_text()) for variant in expected}
    assert facts["eagle"]["bias"] is True
    assert facts["eagle"]["num_hidden_layers"] == facts["eagle3"]["num_hidden_layers"] == 1
    assert facts["eagle"]["intermediate_size"] == 40
    assert facts["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert facts["mtp"]["num_nextn_predict_layers"] == 1
    assert facts["mtp"]["num_hidden_layers"] == 3


def test_no_bias_and_no_draft_vocabulary_leave_their_tensors_out():
    target = tiny_target()
    facts, tensors = build("eagle", target, bias=False).published(target)
    assert "fc.bias" not in tensors
    assert facts["bias"] is False
    facts, tensors = build("eagle3", target, draft_vocab_size=96).published(target)
    assert not {"d2t", "t2d"} & set(tensors)
    assert facts["draft_vocab_size"] == 96


def test_two_heads_are_two_layers_after_the_targets():
    target = tiny_target()
    facts, tensors = build("mtp", target, num_heads=2).published(target)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == mtp_shapes(3) | mtp_shapes(4)
    assert facts["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_feature_is_the_final_hidden_state_and_taps_enter_layers(family):
    target = tiny_target(family)
    tokens = random_text(1, 9)
    inputs = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in target.model.layers]
    hooks.append(target.model.norm.register_forward_hook(lambda _, args, out: inputs.append(out)))
    features, logits = Target(target).view(tokens, ())
    for hook in hooks:
        hook.remove()
    assert torch.equal(features, inputs[3])
    assert torch.equal(logits, target(tokens).logits)
    taps, _ = Target(target).view(tokens, (1, 2))
    assert torch.equal(taps, torch.cat((inputs[1], inputs[2]), -1))


def reference_layer(target, tensors: dict[str, torch.Tensor], prefix: str, x: torch.Tensor, plain: bool) -> torch.Tensor:
    """The layer ``prefix`` run by transformers, without an input norm where the checkpoint holds none."""
    source = tiny_target(intermediate_size=tensors[f"{prefix}mlp.up_proj.weight"].shape[0]) if plain else target
    layer = type(source.model.layers[0])(source.config, 0).eval()
    held = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if "input_layernorm.weight" not in held:
        layer.input_layernorm = torch.nn.Identity()
    own = dict(layer.named_parameters())
    assert set(own) <= set(held)
    layer.load_state_dict({name: held[name] for name in own})
    rows = x.shape[1]
    mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
    angles = source.model.rotary_emb(x, torch.arange(rows)[None])
    with torch.no_grad():
        out = layer(x, attention_mask=mask, position_embeddings=angles)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_published_heads_equal_a_decoder_layer_of_transformers(family):
    target = tiny_target(family)
    tokens = random_text(2, 12)
    features, _ = Target(target).view(tokens, ())
    embed, rows = target.model.embed_tokens(tokens)[:, 1:], slice(0, 11)

    eagle = build("eagle", target)
    _, tensors = eagle.published(target)
    x = torch.nn.functional.linear(torch.cat((embed, features[:, rows]), -1), tensors["fc.weight"], tensors["fc.bias"])
    expected = reference_layer(target, tensors, "layers.0.", x, plain=True)
    with torch.no_grad():
        torch.testing.assert_close(next(unrolled(eagle, features, tokens, 1)), expected, rtol=1e-4, atol=1e-5)

    mtp = build("mtp", target)
    _, tensors = mtp.published(target)
    prefix = "model.layers.3."

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + target.config.rms_norm_eps) * tensors[f"{prefix}{name}.weight"]

    x = torch.cat((norm("enorm", embed), norm("hnorm", features[:, rows])), -1) @ tensors[f"{prefix}eh_proj.weight"].T
    expected = norm("shared_head.norm", reference_layer(target, tensors, prefix, x, plain=False))
    with torch.no_grad():
        found = next(unrolled(mtp, features, tokens, 1))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mtp.logits(found), target.lm_head(expected), rtol=1e-4, atol=1e-4)
    biased = {name for name in tensors if name.endswith("bias")}
    assert bool(biased) == (family == "qwen2")
    assert (f"{prefix}self_attn.q_norm.weight" in tensors) == (family == "qwen3")


def test_a_published_eagle3_head_reads_features_as_they_are():
    target = tiny_target()
    tokens = random_text(2, 12)
    drafter = build("eagle3", target)
    assert set(drafter.network.fc.input_scale.log2().tolist()) - {0.0}, "the scale must not be trivial here"
    features, _ = Target(target).view(tokens, drafter.tap_layers)
    _, held = drafter.published(target)

    embed = target.model.embed_tokens(tokens)[:, 1:].detach()
    steps = [
        eagle3_step(held, embed[lane], eagle3_fuse(held, features[lane, :11], 32), 0, theta=10000.0, head_dim=8, eps=1e-6)
        for lane in (0, 1)
    ]
    hidden, last = (torch.stack(part) for part in zip(*steps, strict=True))
    with torch.no_grad():
        found = next(unrolled(drafter, features, tokens, 1))
        torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drafter.logits(found), last @ held["lm_head.weight"].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("variant", "taps"), [("eagle3", [1, 2]), ("p_eagle", [1])])
def test_layers_from_the_target_begin_as_the_targets_own_end(variant: str, taps: list[int], family: str) -> None:
    """Where its taps are the stream that enters these layers, a head that sees no embedding and no other tap gives the target's logits."""
    target, tokens = tiny_target(family), random_text(2, 12)
    made = recipe(variant, network={**(SMALL | PARALLEL)[variant], "tap_layers": taps, "layers_from_target": True})
    drafter = network_of(variant).build(target, made.network(), torch.arange(96).flip(0))
    with torch.no_grad():
        drafter.network.layers[0].self_attn.qkv_proj.weight[:, :32] = 0
        drafter.network.fc.weight[:, :-32] = 0
        features, logits = Target(target).view(tokens, drafter.tap_layers)
        found = drafter.logits(next(drafter.drafts(features, tokens, 2, torch.arange(10))))
    torch.testing.assert_close(found, logits[:, :10, drafter.target_ids()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["eagle3", "p_eagle"])
@pytest.mark.parametrize("freeze", [True, False])
def test_a_frozen_output_head_stays_the_targets_rows_and_is_published(variant: str, freeze: bool, tmp_path: Path) -> None:
    target = tiny_target()
    texts = Texts(random_text(1, 500)[0].numpy(), {20: random_text(12, 20, seed=3).numpy()})
    network = {**(SMALL | PARALLEL)[variant], "freeze_lm_head": freeze, "layers_from_target": True}
    drafter, _ = train_draft(recipe(variant, network=network, unroll=2, phases=[[3, 4, 20]], lr=0.01), target, texts, tmp_path)
    _, tensors = drafter.published(target)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[drafter.target_ids()]) is freeze


def test_a_standalone_draft_is_an_ordinary_model(tmp_path):
    target = tiny_target("qwen3")
    drafter = build("standalone", target)
    round_to_bfloat16(drafter)
    export_draft(drafter, target, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_text(2, 12)
    with torch.no_grad():
        hidden = next(unrolled(drafter, torch.zeros(2, 12, 1), tokens, 1))
        torch.testing.assert_close(drafter.logits(hidden), model(tokens[:, 1:]).logits, rtol=1e-4, atol=1e-4)
    assert model.config.vocab_size == 96


@pytest.mark.parametrize(("variant", "network"), [*((v, {}) for v in SMALL), ("mtp", {"num_heads": 4})])
def test_unrolled_steps_equal_drafting_row_by_row(variant, network):
    target = tiny_target()
    drafter, tokens = build(variant, target, **network), random_text(1, 14)
    features, _ = Target(target).view(tokens, drafter.tap_layers)
    with torch.no_grad():
        for k, hidden in enumerate(unrolled(drafter, features, tokens, 4)):
            assert hidden.shape[1] == 10
            for row in (0, 4, 9):
                expected = draft_logits(drafter, features, tokens, row, tokens[0, row + 2 : row + 2 + k].tolist())
                torch.testing.assert_close(drafter.logits(hidden[0, row]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "network"),
    [*((v, {}) for v in SMALL), ("mtp", {"num_heads": 2}), ("p_eagle", {}), ("dflash", {"block_size": 3})],
)
def test_training_lowers_the_loss_and_resumes_bit_by_bit(variant, network, tmp_path, monkeypatch):
    target = tiny_target()
    texts = Texts(random_text(1, 500)[0].numpy(), {20: random_text(12, 20, seed=3).numpy()})
    made = recipe(
        variant,
        network={**(SMALL | PARALLEL)[variant], **network},
        unroll=2,
        feature_weight=0.5 if network_of(variant).feeds_feature else 0.0,
        raw_share=0.25,
        phases=[[22, 4, 20]],
        lr=0.01,
        warmup=2,
        cooldown=4,
        checkpoint_steps=5,
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    straight, figures = train_draft(made, target, texts, whole)

    update, steps = Optimizers.step, []

    def die_at_13(self: Optimizers) -> None:
        steps.append(1)
        if len(steps) == 14:
            raise MemoryError
        update(self)

    monkeypatch.setattr(Optimizers, "step", die_at_13)
    with pytest.raises(ResourceError, match=r"train\.batch"):
        train_draft(made, target, texts, halves)
    monkeypatch.undo()
    assert torch.load(halves / f"{variant}.pt")["step"] == 10
    resumed, _ = train_draft(made, target, texts, halves)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    reloaded = load_draft(made, target, whole / f"{variant}.pt")
    assert all(torch.equal(t, reloaded.state_dict()[name]) for name, t in straight.state_dict().items())

    tokens = texts.batch(8, 20, 0.0, 0)[0]
    features, logits = Target(target).view(tokens, straight.tap_layers)
    torch.manual_seed(made.train.seed)
    fresh = network_of(variant).build(target, made.network(), texts.counts(96))
    with torch.no_grad():
        row_A = fresh.anchors(tokens.shape[1] - 2, 0)
        before, _ = draft_losses(fresh, features, logits, tokens, row_A, 2, made.train.feature_weight)
        after, _ = draft_losses(straight, features, logits, tokens, row_A, 2, made.train.feature_weight)
    assert (after < before - 0.05).all(), (before, after)
    assert figures["steps"] == 22 and figures["tokens"] == 22 * 4 * 20

    with pytest.raises(CheckpointError, match="lr"):
        train_draft(Recipe(variant, replace(made.train, lr=0.02)), target, texts, whole)


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "mtp"])
def test_losses_are_cross_entropies_of_the_full_distribution(variant):
    target = tiny_target()
    drafter, tokens = build(variant, target), random_text(2, 9, seed=6)
    features, logits = Target(target).view(tokens, drafter.tap_layers)
    ids = drafter.target_ids()
    weight = 0.7 if drafter.feeds_feature else 0.0
    with torch.no_grad():
        losses, hits = draft_losses(drafter, features, logits, tokens, torch.arange(7), 2, weight)
    for k in range(2):
        terms, distances, agree = [], [], []
        for lane in range(2):
            for row in range(7):
                args = (drafter, features[lane : lane + 1], tokens[lane : lane + 1], row, tokens[lane, row + 2 : row + 2 + k].tolist())
                draft, truth = draft_logits(*args).double(), logits[lane, row + 1 + k].double()
                best = int(truth.argmax())
                choice = int(draft.argmax())
                agree.append((choice if ids is None else int(ids[choice])) == best)
                if ids is not None:
                    if best not in ids.tolist():
                        continue
                    truth = truth[ids]
                terms.append(-(truth.softmax(-1) * draft.log_softmax(-1)).sum())
        expected = torch.stack(terms).mean()
        if weight:
            with torch.no_grad():
                hidden = list(unrolled(drafter, features, tokens, 2))[k]
            gap = (hidden - features[:, 1 + k : 8 + k]).abs().double()
            distances = torch.where(gap < 1, gap.square() / 2, gap - 0.5)
            expected = expected + weight * distances.mean()
        assert float(losses[k]) == pytest.approx(float(expected), rel=1e-4)
        assert float(hits[k]) == pytest.approx(np.mean(agree), abs=1e-6)


def test_draft_vocabulary_is_the_most_counted_and_keeps_the_end():
    assert choose_draft_vocab(torch.tensor([0, 5, 9, 1, 7]), 3, (0,)).tolist() == [0, 2, 4]
    drafter = build("eagle3")
    ids = drafter.target_ids()
    _, tensors = drafter.published(tiny_target())
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten()) and torch.equal(ids, torch.arange(48) + tensors["d2t"])
    assert ids.tolist() == list(range(48)), "counts fall with the id"


def test_default_taps_are_low_middle_high():
    assert build("eagle3", tiny_target(num_hidden_layers=12), tap_layers=None).tap_layers == (2, 6, 9)
    with pytest.raises(ConfigError, match="tap_layers"):
        build("eagle3", tiny_target(num_hidden_layers=5), tap_layers=None)


def test_both_kinds_of_text_weigh_the_same():
    texts = Texts(np.array([1, 1, 1, 2]), {4: np.array([[2, 2, 2, 2]] * 50)})
    counts = texts.counts(4).double()
    assert (counts / counts.sum()).tolist() == [0.0, 0.375, 0.625, 0.0]


def test_conversations_are_counted_by_their_shares():
    ones, twos = (np.full((rows, 4), token) for rows, token in ((50, 1), (2, 2)))
    marks = np.ones((50, 4), dtype=bool)
    chats = [Chats(0.2, {4: (ones, marks)}), Chats(0.6, {4: (twos, marks[:2])})]
    counts = Texts(np.array([0]), {}, chats).counts(3).double()
    assert (counts / counts.sum()).tolist() == pytest.approx([0.5, 0.125, 0.375])


def test_coverage_is_that_of_what_the_target_writes():
    """Entries of conversations weigh as in training; the training text where the target wrote nothing."""
    text, ids, marks = np.array([1, 1, 1, 2]), torch.tensor([1]), np.ones((50, 4), dtype=bool)
    chats = [Chats(0.2, {4: (np.full((50, 4), 1), marks)}), Chats(0.6, {4: (np.full((2, 4), 2), marks[:2])})]
    assert Texts(text, {}).coverage(ids, 3) == 0.75
    assert Texts(text, {4: np.array([[2, 2, 2, 1]] * 50)}).coverage(ids, 3) == 0.25
    assert Texts(text, {}, chats).coverage(ids, 3) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"variant": "medusa"}, "variant"),
        ({"variant": "eagle", "network": {"draft_vocab_size": 8}}, "train.network.draft_vocab_size"),
        ({"variant": "mtp", "network": {"num_heads": "two"}}, "train.network.num_heads"),
        ({"variant": "mtp", "network": {"num_heads": 0}}, "train.network.num_heads"),
        ({"variant": "mtp", "network": {"num_heads": 3}, "unroll": 2}, "train.unroll"),
        ({"variant": "dflash", "network": {"block_size": 8}, "unroll": 4}, "train.unroll"),
        ({"variant": "dflash", "network": {"block_size": 1}}, "train.network.block_size"),
        ({"variant": "dflash", "network": {"anchors": 0}, "unroll": 7}, "train.network.anchors"),
        ({"variant": "p_eagle", "network": {"num_hidden_layers": 0}}, "train.network.num_hidden_layers"),
        ({"variant": "standalone", "feature_weight": 1.0}, "train.feature_weight"),
        ({"variant": "standalone", "network": {"hidden_size": 30}}, "train.network.num_attention_heads"),
        # The engine reads taps in ascending order only: what could not be loaded is not trained.
        ({"variant": "eagle3", "network": {"tap_layers": [1, 2, 2]}}, "train.network.tap_layers"),
        ({"variant": "eagle3", "network": {"layers_from_target": True, "intermediate_size": 8}}, "train.network.layers_from_target"),
        ({"variant": "eagle", "raw_share": 1.5}, "train.raw_share"),
        ({"variant": "eagle", "unroll": 0}, "train.unroll"),
        ({"variant": "eagle", "phases": [[1, 1, 5]], "unroll": 4}, "train.sequence_length"),
        ({"variant": "eagle", "phases": [[1, 1, 50]], "steps": 4}, "train.steps"),
        ({"variant": "eagle", "steps": 4, "tokens": 9}, "train.tokens"),
        ({"variant": "eagle", "steps": 10, "warmup": 11}, "train.warmup"),
        ({"variant": "eagle", "schedule": "cosine", "cooldown": 6}, "train.cooldown"),
        ({"variant": "eagle", "restarts": [600]}, "train.restarts"),
        # Before the target writes a set that no phase reads, which can take hours.
        ({"variant": "eagle", "phases": [[1, 1, 50]], "text": TextConfig(sets=[[1, 4, 128]])}, "train.text.sets"),
    ],
)
def test_bad_settings_name_their_key(settings, key):
    with pytest.raises(ConfigError) as caught:
        recipe(**settings)
    assert caught.value.key == key


def test_angles_are_those_of_the_target():
    scaling = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    target = tiny_target(rope_parameters={**scaling, "original_max_position_embeddings": 32})
    cos, sin = target.model.rotary_emb(torch.zeros(1), torch.arange(100)[None])
    rotation = build("eagle", target).network.rotary(torch.arange(100)[None], torch.arange(100)[None])
    for found, expected in zip(rotation.cos_sin(torch.float32), (cos, sin), strict=True):
        torch.testing.assert_close(found, expected[..., : found.shape[-1]], rtol=0, atol=1e-6)
    facts, _ = build("eagle", target).published(target)
    assert facts["rope_theta"] == 5000.0
    assert facts["rope_scaling"] == {key: value for key, value in target.config.rope_parameters.items() if key != "rope_theta"}
    dynamic = tiny_target(rope_parameters={"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0})
    with pytest.raises(ConfigError, match="rope_type"):
        build("eagle", dynamic)


def test_a_phase_beyond_the_context_is_refused(tmp_path: Path):
    texts = Texts(np.arange(90), {200: np.ones((1, 200), dtype=np.int32)})
    with pytest.raises(ConfigError, match="sequence_length"):
        train_draft(recipe("eagle", phases=[[1, 1, 200]]), tiny_target(), texts, tmp_path)
    with pytest.raises(ConfigError, match="new_tokens"):
        held_out_prompts(AcceptanceConfig(prompt_length=64, new_tokens=65), 128, np.ones(90, dtype=np.int64))


def test_a_phase_without_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train\.text\.sets"):
        train_draft(recipe("eagle", phases=[[1, 1, 40]]), tiny_target(), Texts(np.arange(90), {32: np.ones((1, 32))}), tmp_path)
