"""What published models run between our kernels under the law of numerics: nothing that adds, so that it holds for them.

Their programs run over fake CUDA tensors. Whatever is elementwise has the same bits for every number of rows; a sum or a product of the
compiler or of a library may not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphspec.config.schema import Config, HardwareConfig, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.graphs.programs import PrefillKey, program_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.kernels import select_kernels
from graphspec.kernels.fused.launch import NAMESPACE
from graphspec.models.decoder import Decoder
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import make_plan
from graphspec.shapes import GREEDY, PRODUCT_ROWS
from tests.models.test_published_models import ROWS, shrink
from tests.support.fake_cuda import load_cuda_guard
from tests.support.tiny import move

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_softmax", "_log_softmax", "cumsum", "convolution")
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 9}


class Sums(TorchDispatchMode):
    """Notes the ops that add numbers of floating point, but for operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        adds = name in PRODUCTS or torch.Tag.reduction in func.tags
        if adds and func.namespace != NAMESPACE and isinstance(result, Tensor) and result.is_floating_point():
            self.found.add(name)
        return result


def sums(name: str, folder: Path, numerics: str, chunk: int = 16) -> tuple[set[str], set[str]] | None:
    """The sums of a greedy cycle over a tree, and of a prompt; None: graphspec has no modules for the model."""
    (folder / "config.json").write_text(json.dumps(shrink(ROWS[name]["config"])), encoding="utf-8")
    try:
        facts = read_model_facts(folder)
    except CheckpointError:
        return None
    config = Config(
        variant=VariantConfig(name="ngram", **TREE),
        model=ModelConfig(path="tiny", max_context=2 * chunk),
        runtime=RuntimeConfig(name="captured", max_rows=2, buckets=[2], page_size=16, prefill_chunks=[chunk]),
        kernels=KernelsConfig(mode="fused", numerics=numerics),
        hardware=HardwareConfig(dtype="float32"),
    )
    plan = make_plan(config, facts, None, device="cuda")
    load_cuda_guard()
    found: tuple[set[str], set[str]] = (set(), set())
    with FakeTensorMode(), torch.no_grad():
        kernels = select_kernels(plan.kernels, plan.attention, "cuda", linear=plan.linear, dtype=plan.dtype, numerics=plan.numerics)
        target = Decoder(plan.target, plan.tap_layers, plan.max_positions)
        move(target, "cuda")
        use_kernels(kernels, target)
        for key in (*plan.graph_keys(GREEDY), PrefillKey(chunk, GREEDY)):
            arena = Arena(plan, MailLayout.of(plan).size)
            arena.allocate(key.sampling)
            views = arena.views(key.lanes) if isinstance(key, PrefillKey) else arena.views(key.bucket, key.shape)
            with Sums() as seen:
                for stage in program_stages(plan, kernels, target, None, key):
                    stage(views)
            found[isinstance(key, PrefillKey)].update(seen.found)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_no_sum_is_left_to_the_compiler(name: str, tmp_path: Path) -> None:
    found = sums(name, tmp_path, "batch_invariant")
    if found is None:
        assert ROWS[name]["missing"], "a model that is refused"
    else:
        assert found == (set(), set())


@pytest.mark.parametrize("name", ["Qwen3-8B", "DeepSeek-V3, DeepSeek-R1", "Qwen3.6-27B, Qwen3.8-27B"])
def test_cycles_keep_the_law_where_prompts_have_more_rows_than_a_tile(name: str, tmp_path: Path) -> None:
    found = sums(name, tmp_path, "cycle_invariant", chunk=2 * PRODUCT_ROWS)
    assert found is not None and found[0] == set() and found[1] > set()


@pytest.mark.parametrize(("name", "left"), [("Qwen3-8B", {"sum"}), ("DeepSeek-V3, DeepSeek-R1", {"bmm", "sum"})])
def test_fast_numerics_leave_some(name: str, left: set[str], tmp_path: Path) -> None:
    """The last norm, and the products around latent attention; else the test above would show nothing."""
    assert sums(name, tmp_path, "fast") == (left, left)
