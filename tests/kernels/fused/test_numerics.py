"""Token for token in bfloat16: engines on interpreted fused kernels, whose models make ties.

The output layer has every row twice and the logits are rounded to bfloat16, so that tokens tie or nearly do. What is compared is every bit
of the logits of every committed position. The interpreter shows addresses and the order of tiles; the instruction is read from the machine
code by ``tests/kernels/proof``. That the kernel by slot has other bits is shown in ``test_position_attention.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from perf.committed_logits import committed
from tests.support.checkpoints import VOCAB_SIZE, build_hf, write_hf
from tests.support.engines import prompts

KEYS: dict[str, Any] = {
    "mode": "fused", "runtime": "eager", "dtype": "bfloat16", "max_rows": 2, "buckets": [2], "max_context": 64, "prefill_chunks": [4],
}  # fmt: skip
PLAIN: dict[str, Any] = {"variant": "none", "page_size": 16}
TREE: dict[str, Any] = {"variant": "ngram", "num_steps": 2, "topk": 2, "num_draft_tokens": 5}
CHAIN: dict[str, Any] = {"variant": "ngram", "num_steps": 2, "topk": 1, "num_draft_tokens": 3}
LENGTH = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes)
    half = VOCAB_SIZE // 2
    with torch.no_grad():
        model.lm_head.weight[half : 2 * half] = model.lm_head.weight[:half]
    return write_hf(model.to(torch.bfloat16), tmp_path_factory.mktemp("ties") / "target")


def run(target: Path, numerics: str, **keys: Any) -> tuple[list[list[int]], dict[tuple[int, int], str], float]:
    llm = LLM(str(target), **{**KEYS, "numerics": numerics, **keys})
    logits = llm.cycle.target.logits
    llm.cycle.target.logits = lambda hidden: logits(hidden).bfloat16().float()  # type: ignore[method-assign]
    # Two rows for three requests: one joins when another leaves. The second repeats itself, so that its drafts are right.
    asked = [*prompts(2, lengths=(2, 5), vocab=VOCAB_SIZE), [7, 8, 9, 7, 8, 9, 7]]
    params = [SamplingParams(max_tokens=LENGTH + 2 * i, ignore_eos=True, temperature=0.3 * i, seed=i) for i in range(3)]
    outputs, found = committed(llm, asked, params)
    assert llm.metrics is not None and llm.metrics.numerics == numerics
    return [out.token_ids for out in outputs], found, llm.metrics.acceptance_length


@pytest.fixture(scope="module")
def plain(target: Path) -> tuple[list[list[int]], dict[tuple[int, int], str], float]:
    return run(target, "batch_invariant", **PLAIN)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "page_size"), [(TREE, 1), (CHAIN, 64)], ids=["tree", "chain"])
def test_drafts_change_no_bit(target: Path, plain: Any, shape: dict[str, Any], page_size: int) -> None:
    tokens, found, accepted = run(target, "batch_invariant", **shape, page_size=page_size)
    assert accepted > 1.05, "some drafts are accepted, or the test shows nothing"
    assert tokens == plain[0]
    assert len(plain[1]) > 12 and found.keys() >= plain[1].keys()
    assert {place: found[place] for place in plain[1]} == plain[1]
