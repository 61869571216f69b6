"""A small target with a draft of every variant that has a network, all of random weights; and what the law of numerics compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.train.export import export_draft
from perf.committed_logits import committed
from tests.support.drafts import build, tiny_target
from tests.support.engines import prompts

Found = tuple[list[list[int]], dict[tuple[int, int], bytes]]
NETWORKS: dict[str, dict[str, Any]] = {
    "eagle": {}, "eagle3": {"tap_layers": [1]}, "mtp": {}, "standalone": {}, "p_eagle": {"tap_layers": [1]},
    "dflash": {"tap_layers": [1]},
}  # fmt: skip
CHAIN, TREE = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}, {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}
SHAPES = {"chain": CHAIN, "tree": TREE}
VOCAB = 96


def tied_target() -> PreTrainedModel:
    """Two layers; the output layer has every row twice, so that tokens tie, and is no copy of the embedding."""
    model = tiny_target(num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[VOCAB // 2 :] = model.lm_head.weight[: VOCAB // 2]
    return model.to(torch.bfloat16)


def write_family(path: Path) -> dict[str, Path | None]:
    """The folder of the target under ``none``, and of the draft of each variant; None: it has no network."""
    model = tied_target()
    model.save_pretrained(path / "target")
    found: dict[str, Path | None] = {"none": path / "target", "ngram": None, "ngram_trie": None}
    for name, network in NETWORKS.items():
        (path / name).mkdir()
        export_draft(build(name, model.float(), **network), model, path / name)
        found[name] = path / name
    return found


def requests(count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Every second is sampled; every third repeats itself, so that n-grams are right. Lengths differ, so that rows join and leave."""
    asked = prompts(count, lengths=(2, 5, 9, 4), vocab=VOCAB)
    asked = [[7, 8, 9, 7, 8, 9, 7][: len(prompt) + 2] if index % 3 == 2 else prompt for index, prompt in enumerate(asked)]
    heat = (0.0, 0.6)
    return asked, [SamplingParams(max_tokens=tokens + i, ignore_eos=True, temperature=heat[i % 2], seed=i) for i in range(count)]


def answered(llm: LLM, asked: tuple[list[list[int]], list[SamplingParams]]) -> Found:
    outputs, logits = committed(llm, *asked)
    return [output.token_ids for output in outputs], logits


def assert_same(found: Found, plain: Found) -> None:
    """Tokens, and the bits of all logits of all positions."""
    assert found[0] == plain[0]
    assert len(plain[1]) == sum(len(row) - 1 for row in plain[0])
    assert [place for place, bits in plain[1].items() if found[1].get(place) != bits] == []


def preempting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on the youngest of several rows goes back to the queue after each of its cycles; returns a list with an item each time."""
    step, times, known = Scheduler.step, [], {}

    def stepped(self: Scheduler) -> Any:
        updated = step(self)
        if len(self.running) > 1 and not self._tickets:
            last = max(self.running, key=lambda request: request.precedence())
            if last.row.ready and len(last.output) > known.get(last, 0):
                known[last] = len(last.output)
                times.append(len(last.output))
                self._preempt()
        return updated

    monkeypatch.setattr(Scheduler, "step", stepped)
    return times
