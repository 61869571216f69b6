"""Acceptance as the engine measures it on what training wrote, against drafting one token at a time with the network that was trained."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch

from graphspec import load_config
from graphspec.train.acceptance import conditional_shares, continue_held_out, held_out_prompts, measure_acceptance, small_engine
from graphspec.train.draft import Texts, train_draft
from graphspec.train.drafter import Target
from graphspec.train.export import export_draft
from graphspec.train.generate import cut_prompts
from graphspec.train.loop import unwatched
from recipes.continuation import continue_text
from tests.support.drafts import HYBRID, PARALLEL, SMALL, block_logits, draft_logits, random_text, recipe, round_to_bfloat16, tiny_target

PROMPT, NEW, STEPS = 8, 24, 3


@pytest.mark.parametrize(
    ("variant", "network", "family"),
    [("eagle3", {}, "llama"), ("mtp", {}, "llama"), ("mtp", {"num_heads": STEPS}, "llama"), ("p_eagle", {}, "llama"), ("mtp", {}, HYBRID),
     ("dflash", {"block_size": STEPS + 1}, "llama"), ("dflash", {"block_size": STEPS + 1, "causal": False}, "llama")],
)  # fmt: skip
def test_the_engine_accepts_what_the_trained_network_drafts(variant, network, family, tmp_path):
    target, stream = tiny_target(family), random_text(1, 400)[0].numpy()
    target.save_pretrained(tmp_path / "target")
    # A short training, so that some drafts are accepted.
    texts = Texts(stream, {32: continue_text(target, cut_prompts(stream, 4, PROMPT, 3), 32, 0.0, 0).numpy()})
    schedule = {"unroll": STEPS, "phases": [[25, 4, 32]], "lr": 0.02, "warmup": 2, "cooldown": 5, "checkpoint_steps": 100}
    made = recipe(variant, network={**(SMALL | PARALLEL)[variant], **network}, **schedule)
    drafter, _ = train_draft(made, target, texts, tmp_path)
    round_to_bfloat16(drafter)
    export_draft(drafter, target, tmp_path / "draft")
    config = load_config(
        f"variant={variant}", f"model.path='{tmp_path}/target'", f"train.out='{tmp_path}/draft'", "train.acceptance.prompts=4",
        f"train.acceptance.prompt_length={PROMPT}", f"train.acceptance.new_tokens={NEW}", "train.acceptance.batch=3",
    )  # fmt: skip
    prompts = held_out_prompts(config.train.acceptance, 128, stream)
    measured = measure_acceptance(config, [[STEPS, 1, STEPS + 1]], prompts, unwatched)
    plain = small_engine(config, config.model.path, load_config("variant=none").variant, prompts)
    ids, taken = drafter.target_ids(), []
    for output in continue_held_out(plain, config.train.acceptance, prompts):
        text = [*output.prompt_token_ids, *output.token_ids]
        tokens = torch.tensor([text])
        features, _ = Target(target).view(tokens, drafter.tap_layers)
        root = PROMPT
        while root + 1 < len(text):
            path: list[int] = []
            block = block_logits(drafter, features, tokens, root - 1, STEPS) if variant in PARALLEL else None
            for depth in range(STEPS):
                logits = block[depth] if block is not None else draft_logits(drafter, features, tokens, root - 1, path)
                choice = int(logits.argmax())
                path.append(choice if ids is None else int(ids[choice]))
            right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(path, text[root + 1 :], strict=False))))
            # The last cycle may have been cut short.
            if root + right + 1 < len(text) - 1:
                taken.append(right)
            root += right + 1
    [shape] = measured["shapes"]
    assert shape["tokens_per_cycle"] == pytest.approx(1 + sum(taken) / len(taken), abs=1e-4)
    shares = [sum(length >= depth for length in taken) / len(taken) for depth in range(1, STEPS + 1)]
    assert shape["conditional_acceptance"] == conditional_shares(shares)
    assert 0 < sum(taken) < STEPS * len(taken), "it must accept some drafts and refuse some"
    assert measured["sampled"]["temperature"] == 0.7 and measured["sampled"]["shapes"][0]["cycles"] > 0


def test_shares_are_conditional():
    assert conditional_shares([0.5, 0.25, 0.0, 0.0]) == [0.5, 0.5, 0.0, 0.0]
