"""Engines of several ranks over gloo: the tokens of one rank, one message when a rank dies, and what a cycle exchanges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from graphspec import LLM, SamplingParams
from graphspec.errors import ConfigError, ResourceError
from graphspec.graphs.ranks import LeadingCycle
from tests.support.checkpoints import VOCAB_SIZE, build_hf
from tests.support.engines import ids, prompts, random_pair, watch_schedulers
from tests.support.moe_checkpoints import write_mixture

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
CHAIN = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
# Three rows share pages that are enough for two: rows are preempted, and equal beginnings shared.
BUSY: dict[str, Any] = {"max_rows": 3, "buckets": [1, 3], "page_size": 4, "num_pages": 22, "prefill_chunks": [8], "max_context": 60,
                        "runtime": "eager", "debug": True}  # fmt: skip
BEGINNING = [5, 9, 3, 17, 2, 8, 40, 21, 33]
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, seed=7, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.2, seed=3, logprobs=2),
]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    asked = [*prompts(3, vocab=VOCAB_SIZE), *(BEGINNING + end for end in prompts(3, (2, 5, 4), vocab=VOCAB_SIZE, seed=1))]
    return asked, PARAMS * 2


def run(target: Path, draft: Path | None, size: int, **keys: Any) -> tuple[list[list[int]], int]:
    """Tokens, and how many tokens of prompts were shared."""
    asked, params = requests()
    with LLM(target, draft=draft, tensor_parallel=size, **BUSY | keys) as llm:
        first = llm.generate(asked, params)
        again = llm.generate(asked[3:], params[:3])
    outputs = [*first, *again]
    return ids(outputs), sum(out.cached_tokens for out in outputs)


@pytest.fixture
def same_tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Checks that ranks together emit what one does, while rows are preempted and share pages."""

    def check(target: Path, draft: Path | None, size: int, **keys: Any) -> None:
        watched = watch_schedulers(monkeypatch)
        one, together = run(target, draft, 1, **keys), run(target, draft, size, **keys)
        assert together == one and one[1] > 0
        assert len(watched) == 2 and all(scheduler.preempted for scheduler in watched)

    return check


def test_two_ranks_draft_a_tree_as_one_does(tmp_path: Path, same_tokens: Callable[..., None]) -> None:
    """The draft shares the embedding, of which each rank has a half."""
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    same_tokens(pair.target, pair.draft, 2, variant="eagle3", cycles_in_flight=2, **TREE)


def test_two_ranks_decode_a_latent_mixture_of_experts(tmp_path: Path, same_tokens: Callable[..., None]) -> None:
    target, _ = write_mixture(tmp_path, "deepseek_v3")
    same_tokens(target, None, 2, variant="ngram", num_pages=14, **CHAIN)


@pytest.mark.kernels
@pytest.mark.parametrize("variant", ["eagle3", "ngram_trie", "standalone", "none"])
def test_four_ranks_of_every_kind_of_drafter(variant: str, tmp_path: Path, same_tokens: Callable[..., None]) -> None:
    pair = random_pair(tmp_path, build_hf("qwen2", **SIZES | {"head_dim": None}))
    draft = {"eagle3": pair.draft, "standalone": pair.target}.get(variant)
    same_tokens(pair.target, draft, 4, variant=variant, num_pages=14, **({} if variant == "none" else CHAIN))


@pytest.mark.kernels
def test_two_ranks_compiled_with_a_depth_that_changes(tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    keys = {"variant": "eagle3", "depths": [0, 2], "max_rows": 1, "buckets": [1], **CHAIN}
    asked, params = requests()
    found = []
    for size, runtime in ((1, "eager"), (2, "compiled")):
        with LLM(pair.target, draft=pair.draft, tensor_parallel=size, **BUSY | keys | {"runtime": runtime}) as llm:
            found.append(ids(llm.generate(asked[:2], params[:2])))
            if size == 2:
                assert all("several ranks" in path for path in llm.decoders.values())
    assert found[0] == found[1]


SCRIPT = """
import sys
from graphspec import LLM, SamplingParams
with LLM(sys.argv[1], variant="ngram", tensor_parallel=2, runtime="eager", max_context=60, prefill_chunks=[8]) as llm:
    [out] = llm.generate([[5, 9, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
print(*out.token_ids)
"""


def test_torchrun_starts_the_ranks_as_well(tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(pair.target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == pair.greedy([5, 9, 3], 8, ignore_eos=True)


def small(tmp_path: Path, **keys: Any) -> LLM:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    return LLM(pair.target, variant="none", tensor_parallel=2, **BUSY | keys)


def test_a_rank_that_dies_ends_every_call_with_one_message(tmp_path: Path) -> None:
    llm = small(tmp_path)
    llm.generate([[5, 9, 3]], SamplingParams(max_tokens=2))
    assert llm.ranks is not None
    [child] = llm.ranks.children
    os.kill(child.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ResourceError, match=r"ranks: .*rank 1 was ended by signal 9.*made anew"):
            llm.generate([[5, 9, 3]], SamplingParams(max_tokens=8))
    llm.close()
    assert not dist.is_initialized() and llm.ranks.children == []


def test_ranks_that_decide_otherwise_are_found_in_debug_mode(tmp_path: Path) -> None:
    """Ranks compute their samples from the same gathered bits, so only one that samples otherwise decides otherwise."""
    llm = small(tmp_path)
    cycle = llm.cycle
    assert isinstance(cycle, LeadingCycle)
    usual = cycle.kernels.sample_tokens

    def next_token(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        token, sound = usual(*arguments, **named)
        return (token + 1) % VOCAB_SIZE, sound

    cycle.kernels = replace(cycle.kernels, sample_tokens=next_token)
    with pytest.raises(ResourceError, match="the same tokens, paths and lengths on every rank"):
        llm.generate([[7, 9, 3, 1]], SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=5))
    llm.close()


def test_an_error_while_a_rank_loads_ends_all_of_them(tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    (pair.target / "model.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="safetensors"):
        LLM(pair.target, variant="none", tensor_parallel=2, **BUSY)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("keys", "named"), [
    ({"tensor_parallel": 3}, "num_attention_heads = 4"), ({"tensor_parallel": 0}, "runtime.tensor_parallel"),
])  # fmt: skip
def test_impossible_ranks_are_refused_before_any_starts(keys: dict[str, int], named: str, tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    with pytest.raises(ConfigError, match=named):
        LLM(pair.target, variant="none", **keys)
    assert not dist.is_initialized()
