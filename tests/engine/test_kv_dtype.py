"""KV pools of 16 bits, and 16-bit weights on a CPU: drafting emits the tokens of plain decoding, however keys and values are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphspec import LLM, SamplingParams
from graphspec.errors import ConfigError
from graphspec.models.experts import MixtureOfExperts
from graphspec.plan.dtypes import Dtypes, resolve_dtypes
from tests.support.checkpoints import build_hf, write_hf
from tests.support.engines import CHAIN, TREE, Pair, ids, prompts
from tests.support.moe_checkpoints import build_mixture

SIXTEEN = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GREEDY = SamplingParams(max_tokens=20)
SEEDED = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed) for seed in range(3)]


def tokens(llm: LLM) -> list[list[int]]:
    return [*ids(llm.generate(prompts(3), GREEDY)), *ids(llm.generate(prompts(3), SEEDED))]


def seeded(llm: LLM) -> list[list[int]]:
    return ids(llm.generate(prompts(3), SEEDED))


@pytest.mark.parametrize(("kv_dtype", "runtime"), [("bfloat16", "compiled"), ("float16", "compiled"), ("bfloat16", "eager")])
def test_drafting_emits_the_tokens_of_plain_decoding_with_the_same_pools(pair: Pair, kv_dtype: str, runtime: str) -> None:
    keys: dict[str, Any] = {"runtime": runtime, "kv_dtype": kv_dtype, "page_size": 4, "max_rows": 3, "buckets": [3]}
    plain = pair.llm(variant="none", **keys)
    expected = tokens(plain)
    assert plain.cycle.arena["target_kv"].dtype == getattr(torch, kv_dtype)
    for drafter in (CHAIN, TREE, {"variant": "ngram"}):
        llm = pair.llm(**drafter, **keys)
        assert tokens(llm) == expected
    drafting = pair.llm(**CHAIN, **keys)
    assert drafting.cycle.arena["draft_kv"].dtype == getattr(torch, kv_dtype)


def test_memory_counts_what_pools_hold(pair: Pair) -> None:
    pages = [pair.llm(**CHAIN, kv_dtype=kv_dtype, prefix_cache=False).memory.page_bytes for kv_dtype in ("float32", "bfloat16", "float16")]
    assert pages[0] == 2 * pages[1] == 2 * pages[2]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose numbers have no 16 bits."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return write_hf(build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes), tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("dtype", list(SIXTEEN))
def test_a_dtype_of_16_bits_on_a_cpu_is_that_of_weights_and_kv(wide: Path, dtype: str, tmp_path: Path) -> None:
    """The engine equals one of float32 that reads a rounded copy, and runs by the same native op."""
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=SIXTEEN[dtype])
    rounded = write_hf(model.float(), tmp_path / "rounded")
    keys: dict[str, Any] = {"variant": "ngram", "runtime": "compiled", "max_context": 64, "page_size": 8, "max_rows": 3, "buckets": [3]}
    narrow, float32 = LLM(str(wide), dtype=dtype, **keys), LLM(str(rounded), kv_dtype=dtype, **keys)
    assert narrow.decoders == float32.decoders == {"target": "one native op per pass"}
    assert narrow.plan.dtype == "float32" and narrow.cycle.arena["target_kv"].dtype is SIXTEEN[dtype]
    assert tokens(narrow) == tokens(float32)
    sizes = [{line.name: line.size for line in llm.memory.lines}["target weights"] for llm in (narrow, LLM(str(wide), **keys))]
    assert sizes[0] < 0.75 * sizes[1]


def test_experts_of_a_mixture_take_16_bits_too(tmp_path: Path) -> None:
    model = build_mixture("qwen3_moe")
    source = write_hf(model, tmp_path / "wide")
    rounded = write_hf(model.to(torch.bfloat16).float(), tmp_path / "rounded")
    keys: dict[str, Any] = {"variant": "ngram", "runtime": "compiled", "max_context": 64, "page_size": 8, "max_rows": 3, "buckets": [3]}
    narrow, float32, wide = (
        LLM(str(source), dtype="bfloat16", **keys), LLM(str(rounded), kv_dtype="bfloat16", **keys), LLM(str(source), **keys)
    )  # fmt: skip
    # Each class of requests is compiled anew; this one reads every number that the other does.
    assert seeded(narrow) == seeded(float32)

    def held(llm: LLM) -> int:
        return sum(module.native_gate_up.nbytes for module in llm.cycle.target.modules() if isinstance(module, MixtureOfExperts))

    assert 0 < held(narrow) == held(float32) < 0.6 * held(wide)


def test_where_dtypes_come_from() -> None:
    assert resolve_dtypes("auto", "auto", "bfloat16", "cpu", "compiled") == Dtypes("float32", "float32", "float32")
    assert resolve_dtypes("bfloat16", "auto", "float32", "cpu", "compiled") == Dtypes("float32", "bfloat16", "bfloat16")
    assert resolve_dtypes("bfloat16", "auto", "float32", "cpu", "reference") == Dtypes("bfloat16", "bfloat16", "bfloat16")
    assert resolve_dtypes("auto", "float16", "bfloat16", "cpu", "reference") == Dtypes("float32", "float32", "float16")
    assert resolve_dtypes("auto", "bfloat16", "bfloat16", "cuda", "fused") == Dtypes("bfloat16", "bfloat16", "bfloat16")
    for device, kernels in (("cuda", "fused"), ("cpu", "fused"), ("cuda", "reference")):
        with pytest.raises(ConfigError, match=r"runtime\.kv_dtype: expected auto or float16.*found.*bfloat16"):
            resolve_dtypes("float16", "bfloat16", "bfloat16", device, kernels)


def test_an_unknown_dtype_names_the_key(wide: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.kv_dtype: expected .*float32.*found.*fp8"):
        LLM(str(wide), variant="none", kv_dtype="fp8")
