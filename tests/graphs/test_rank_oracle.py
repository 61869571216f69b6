"""Two ranks compared with transformers' own tensor parallelism, under torchrun over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec import LLM, SamplingParams
from tests.support.checkpoints import build_hf, write_hf
from tests.support.engines import prompts
from tests.support.moe_checkpoints import build_mixture
from tests.support.rank_runs import CHAIN, SIZES, TREE

pytestmark = pytest.mark.kernels

LENGTH, VOCAB_SIZE = 12, 64
PROMPTS = prompts(3, (7, 1, 13), VOCAB_SIZE)
SCRIPT = """
import os
import sys
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

path, given, out = sys.argv[1:]
prompt_ids, length = torch.load(given)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager").eval()
# What from_pretrained(distributed_config=...) does; that itself needs accelerate.
config, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_plan="auto"))
model = model.maybe_distribute_model(model, config, meshes)
local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.model.layers.parameters())
texts, logits = [], []
with torch.no_grad():
    for text in prompt_ids:
        for _ in range(length):
            text = text + [int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())]
        texts.append(text)
        logits.append(model(torch.tensor([text]), use_cache=False).logits[0])
if torch.distributed.get_rank() == 0:
    torch.save({"texts": texts, "logits": logits, "local": local}, out)
# No rank closes its sockets while another one reads. Then at once: what tears down gloo's threads sometimes aborts the process.
torch.distributed.barrier()
os._exit(0)
"""


def transformers_over_two_ranks(path: Path, folder: Path) -> dict[str, Any]:
    """Texts with greedy tokens, logits of all their tokens, and numbers in the layers of rank 0."""
    script, given, out = (folder / name for name in ("script.py", "prompt_ids.pt", "found.pt"))
    script.write_text(SCRIPT)
    torch.save((PROMPTS, LENGTH), given)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *map(str, (script, path, given, out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(out)
    return found


def build(family: str) -> Any:
    if family == "qwen3_moe":
        return build_mixture(family, vocab_size=VOCAB_SIZE, moe_intermediate_size=16)
    return build_hf(family, vocab_size=VOCAB_SIZE, **SIZES | {"num_key_value_heads": 4 if family == "olmo2" else 2})


@pytest.mark.parametrize(("family", "shape"), [("llama", CHAIN), ("qwen3", TREE), ("qwen3_moe", CHAIN), ("olmo2", TREE)])
def test_tokens_and_log_probabilities_are_those_of_transformers_over_two_ranks(family: str, shape: dict[str, int], tmp_path: Path) -> None:
    model = build(family)
    path = write_hf(model, tmp_path / "target")
    theirs = transformers_over_two_ranks(path, tmp_path)
    assert theirs["local"] < 0.7 * sum(parameter.numel() for parameter in model.model.layers.parameters()), "it spread its layers too"
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE)
    with LLM(path, variant="ngram", tensor_parallel=2, runtime="eager", max_logprobs=VOCAB_SIZE, prefill_chunks=[8], **shape) as llm:
        outputs = llm.generate(PROMPTS, params)
    for output, text, logits_TV in zip(outputs, theirs["texts"], theirs["logits"], strict=True):
        assert [*output.prompt_token_ids, *output.token_ids] == text
        assert output.prompt_logprobs is not None and output.logprobs is not None
        expected_TV = torch.log_softmax(logits_TV.double(), -1)
        for entry, expected_V in zip([*output.prompt_logprobs[1:], *output.logprobs], expected_TV[:-1], strict=True):
            assert entry is not None and len(entry.top) == VOCAB_SIZE
            found_V = torch.tensor([entry.top[token] for token in range(VOCAB_SIZE)], dtype=torch.float64)
            torch.testing.assert_close(found_V, expected_V, rtol=0, atol=2e-5)
