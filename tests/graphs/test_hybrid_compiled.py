"""Compiled cycles of hybrid targets on a CPU: native kernels, and the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphspec.api.llm import LLM, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE, write_hf
from tests.support.engines import TREE, Pair, ids, prompts, random_pair
from tests.support.features import marked, of_family
from tests.support.hybrid_checkpoints import build_hybrid, hybrid_of, mixer_head
from tests.support.mtp_checkpoints import add_heads

LENGTH = 15
PROMPTS = prompts(4, (12, 1, 25, 7), VOCAB_SIZE)


@pytest.mark.kernels
@pytest.mark.parametrize("family", marked(("qwen3_5", "nemotron_h", "falcon_h1"), hybrid_of, "eagle3", "tree", "compiled"))
def test_compiled_cycles_decode_the_same(family: str, tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hybrid(family, seed=1))
    llm = pair.llm(**TREE, mode="compiled", page_size=4, max_rows=3)
    assert llm.cycle.kernels.records, "they are native"
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == [pair.greedy(prompt, LENGTH) for prompt in PROMPTS]


@pytest.mark.kernels
@of_family("NemotronHForCausalLM", "mtp", "tree", "compiled")
def test_a_compiled_head_of_one_net_per_layer(tmp_path: Path) -> None:
    model = build_hybrid("nemotron_h_latent")
    path = add_heads(write_hf(model, tmp_path), mixer_head("nemotron_h_latent")[0], num_nextn_predict_layers=1)
    llm = LLM(path, variant="mtp", runtime="compiled", page_size=4, max_rows=3, buckets=[3], **TREE)
    assert set(llm.decoders.values()) == {"op by op: layers of one mixer"}
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == [Pair(path, path, model).greedy(p, LENGTH) for p in PROMPTS]
