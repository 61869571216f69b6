"""The simulated acceptance of the recipes, against drafting one token at a time and against drafters that know the answer."""

from __future__ import annotations

import pytest
import torch

from graphspec.train.acceptance import draft_candidates, measure_acceptance, target_text
from graphspec.train.draft import Texts, train_draft
from graphspec.train.drafter import Drafter, Target
from graphspec.train_options import AcceptanceConfig
from tests.support.drafts import SMALL, build, draft_logits, random_text, recipe, tiny_target


@pytest.mark.parametrize("variant", sorted(SMALL))
def test_tree_candidates_follow_their_own_branch(variant):
    target = tiny_target()
    drafter, tokens = build(variant, target), random_text(2, 11, seed=2)
    features, _ = Target(target).view(tokens, drafter.tap_layers)
    token, score, parent, level = draft_candidates(drafter, features, tokens, 5, 3, 3)
    assert token.shape == (2, 5, 3 + 2 * 9)
    ids = drafter.target_ids()
    ids = list(range(96)) if ids is None else ids.tolist()
    for lane, row in ((0, 0), (1, 4)):
        for node in range(token.shape[-1]):
            path, at = [], int(parent[lane, row, node])
            while at >= 0:
                path.insert(0, int(token[lane, row, at]))
                at = int(parent[lane, row, at])
            assert len(path) == int(level[node]) - 1
            before = float(score[lane, row, parent[lane, row, node]]) if path else 0.0
            logp = draft_logits(drafter, features[lane : lane + 1], tokens[lane : lane + 1], row + 5, path).log_softmax(-1)
            assert int(token[lane, row, node]) in [ids[i] for i in logp.topk(3).indices.tolist()]
            expected = before + float(logp[ids.index(int(token[lane, row, node]))])
            assert float(score[lane, row, node]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("variant", "network"), [*((v, {}) for v in SMALL), ("mtp", {"num_heads": 3})])
def test_measured_chain_equals_running_the_cycles(variant, network, tmp_path):
    target = tiny_target()
    # A short training, so that some drafts are accepted.
    stream = random_text(1, 400)[0].numpy()
    settings = AcceptanceConfig(prompts=4, prompt_length=8, new_tokens=24, shapes=[[3, 1, 4]], batch=3)
    text = target_text(settings, Target(target), stream)
    texts = Texts(stream, {32: text.numpy()})
    settings_of = {"unroll": 3, "phases": [[25, 4, 32]], "lr": 0.02, "warmup": 2, "cooldown": 5, "checkpoint_steps": 100}
    drafter, _ = train_draft(recipe(variant, network={**SMALL[variant], **network}, **settings_of), target, texts, tmp_path)
    (measured,) = measure_acceptance(settings, Target(target), drafter, text, None)["shapes"]
    ids, taken = drafter.target_ids(), []
    for tokens in text.split(1):
        features, _ = Target(target).view(tokens, drafter.tap_layers)
        root = 8
        while root + 4 < tokens.shape[1]:
            path: list[int] = []
            for _ in range(3):
                choice = int(draft_logits(drafter, features, tokens, root - 1, path).argmax())
                path.append(choice if ids is None else int(ids[choice]))
            truth = tokens[0, root + 1 : root + 4].tolist()
            taken.append(next((i for i in range(3) if path[i] != truth[i]), 3))
            root += taken[-1] + 1
    assert measured["cycles"] == len(taken)
    assert measured["tokens_per_cycle"] == pytest.approx(1 + sum(taken) / len(taken), abs=1e-4)
    assert 0 < sum(taken) < 3 * len(taken), "it must accept some drafts and refuse some"


class Oracle(Drafter):
    """Knows the text, up to a depth beyond which it is always wrong."""

    def __init__(self, text_BT: torch.Tensor, knows: int) -> None:
        super().__init__()
        self.text, self.knows = text_BT, knows
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def start(self, features_BTF):
        return features_BTF

    def step(self, index, tokens_BT, hidden_BTH, positions_T, attend):
        flat = torch.zeros(len(tokens_BT), 1, tokens_BT.shape[1], 2)
        attend(0, flat[:, :, None], flat, flat)
        answer = self.text[:, (positions_T + 2).clamp(max=self.text.shape[1] - 1)]
        return torch.nn.functional.one_hot(answer if index < self.knows else (answer + 1) % 96, 96).float()

    def logits(self, hidden):
        return 10 * hidden


@pytest.mark.parametrize("shape", [[4, 1, 5], [3, 2, 6]])
def test_a_perfect_drafter_gets_every_token(shape):
    target = Target(tiny_target())
    settings = AcceptanceConfig(prompts=3, prompt_length=6, new_tokens=30, shapes=[shape])
    text = target_text(settings, target, random_text(1, 200)[0].numpy())
    for knows in (shape[0], 1, 0):
        (measured,) = measure_acceptance(settings, target, Oracle(text, knows), text, None)["shapes"]
        assert measured["tokens_per_cycle"] == knows + 1
        assert measured["conditional_acceptance"][:knows] == [1.0] * knows


def test_cycles_after_the_end_are_left_out():
    target = Target(tiny_target())
    settings = AcceptanceConfig(prompts=1, prompt_length=6, new_tokens=30, shapes=[[2, 1, 3]])
    text = target_text(settings, target, random_text(1, 200)[0].numpy()).clone()
    end = 95
    text[text == end] = 94
    text[0, 6 + 14] = end
    (measured,) = measure_acceptance(settings, target, Oracle(text, 2), text, end)["shapes"]
    # 15 known tokens, the first of them the prefill's; a cycle whose S + 1 = 3 tokens might lie behind the end is not counted.
    assert measured["cycles"] == 4
