"""Engines of several ranks over gloo: the tokens of one rank, one message when a rank dies, and what a cycle exchanges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from graphspec import LLM, SamplingParams
from graphspec.errors import ConfigError, ResourceError
from graphspec.graphs.ranks import LeadingCycle
from tests.support.checkpoints import VOCAB_SIZE, build_hf, write_hf
from tests.support.engines import random_pair
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.moe_checkpoints import write_mixture
from tests.support.rank_runs import BUSY, CHAIN, SIZES, TREE, assert_same_tokens


def test_two_ranks_draft_a_tree_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft shares the embedding, of which each rank has a half."""
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    assert_same_tokens(monkeypatch, pair.target, pair.draft, 2, variant="eagle3", cycles_in_flight=2, **TREE)


def test_two_ranks_decode_a_latent_mixture_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = write_mixture(tmp_path, "deepseek_v3")
    assert_same_tokens(monkeypatch, target, None, 2, variant="ngram", num_pages=14, **CHAIN)


def test_two_ranks_draft_a_tree_over_recurrent_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of the value heads, and of the states."""
    target = write_hf(build_hybrid("qwen3_next", num_attention_heads=4, num_key_value_heads=2), tmp_path)
    assert_same_tokens(monkeypatch, target, None, 2, shares=False, variant="ngram", num_pages=14, **TREE)


SCRIPT = """
import sys
from graphspec import LLM, SamplingParams
with LLM(sys.argv[1], variant="ngram", tensor_parallel=2, runtime="eager", max_context=60, prefill_chunks=[8]) as llm:
    [out] = llm.generate([[5, 9, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
print(*out.token_ids)
"""


def torchrun(folder: Path, text: str, target: Path) -> subprocess.CompletedProcess[str]:
    """Two processes of a script, which end without an error."""
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done


def test_torchrun_starts_the_ranks_as_well(tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    done = torchrun(tmp_path, SCRIPT, pair.target)
    assert [int(token) for token in done.stdout.split()] == pair.greedy([5, 9, 3], 8, ignore_eos=True)


OWN_GROUP = """
import atexit, sys
import torch.distributed as dist
# Runs after what is registered later.
atexit.register(lambda: print("stayed in the group" if dist.is_initialized() else "left the group", file=sys.stderr))
dist.init_process_group("gloo")
"""


def test_a_rank_that_the_engine_ends_leaves_the_group_of_the_caller(tmp_path: Path) -> None:
    """A thread of gloo that outlives the interpreter aborts the process, now and then."""
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    done = torchrun(tmp_path, OWN_GROUP + SCRIPT + "dist.destroy_process_group()  # reached by rank 0 alone\n", pair.target)
    assert (done.stderr.count("left the group"), done.stderr.count("stayed in the group")) == (2, 0)


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
    """Ranks compute their samples from the same gathered bits, so only one that samples otherwise decides otherwise. With a filter each
    samples from all logits."""
    llm = small(tmp_path)
    cycle = llm.cycle
    assert isinstance(cycle, LeadingCycle)
    usual = cycle.kernels.sample_tokens

    def next_token(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        token, sound = usual(*arguments, **named)
        return (token + 1) % VOCAB_SIZE, sound

    cycle.kernels = replace(cycle.kernels, sample_tokens=next_token)
    with pytest.raises(ResourceError, match="the same tokens, paths and lengths on every rank"):
        llm.generate([[7, 9, 3, 1]], SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=5, top_p=0.9))
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


def test_a_group_that_was_left_has_no_threads(tmp_path: Path) -> None:
    """A thread of gloo that outlives the interpreter now and then aborts the process. Modules that hold a group may come after it."""
    code = """if True:
        import os, sys, time
        from contextlib import suppress
        from graphspec.engine import ranks

        def threads():
            for task in os.listdir("/proc/self/task"):
                with suppress(OSError):  # it has just ended
                    yield open(f"/proc/self/task/{task}/comm").read()

        ranks.join(0, 1, sys.argv[1], "cpu")
        until = time.monotonic() + 10  # a thread gets its name a moment after it has begun
        while not any("gloo" in name for name in threads()):
            assert time.monotonic() < until, [*threads()]
        import torch.distributed.nn.functional
        ranks.leave_group()
        until = time.monotonic() + 10  # the kernel may list a thread a moment longer than it runs
        while any("gloo" in name for name in threads()):
            assert time.monotonic() < until, [*threads()]
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
