"""Engines of several ranks over gloo, compared with one of a single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphspec import LLM, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import ids, prompts, watch_schedulers

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
CHAIN = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
# Three rows have pages for two only: rows are preempted, and equal beginnings shared.
BUSY: dict[str, Any] = {"max_rows": 3, "buckets": [1, 3], "page_size": 4, "num_pages": 22, "prefill_chunks": [8], "max_context": 60,
                        "runtime": "eager", "debug": True}  # fmt: skip
BEGINNING = [5, 9, 3, 17, 2, 8, 40, 21, 33]
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, seed=7, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.2, seed=3, logprobs=2),
]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    batch = [*prompts(3, vocab=VOCAB_SIZE), *(BEGINNING + end for end in prompts(3, (2, 5, 4), vocab=VOCAB_SIZE, seed=1))]
    return batch, PARAMS * 2


def run(target: Path, draft: Path | None, size: int, **keys: Any) -> tuple[list[list[int]], int]:
    """Tokens, and how many tokens of prompts were shared."""
    batch, params = requests()
    with LLM(target, draft=draft, tensor_parallel=size, **BUSY | keys) as llm:
        started = [child.process for child in llm.ranks.children] if llm.ranks is not None else []
        first = llm.generate(batch, params)
        again = llm.generate(batch[3:], params[:3])
    assert [process.returncode for process in started] == [0] * (size - 1)
    outputs = [*first, *again]
    return ids(outputs), sum(out.cached_tokens for out in outputs)


def assert_same_tokens(
    monkeypatch: pytest.MonkeyPatch, target: Path, draft: Path | None, size: int, *, shares: bool = True, **keys: Any
) -> None:
    """Check that several ranks emit the tokens of one, while rows are preempted and, with ``shares``, share pages."""
    watched = watch_schedulers(monkeypatch)
    one, together = run(target, draft, 1, **keys), run(target, draft, size, **keys)
    assert together == one and (one[1] > 0) == shares
    assert len(watched) == 2 and all(scheduler.preempted for scheduler in watched)
