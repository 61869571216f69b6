"""The numerics that ``auto`` means: by what proves the law, once, in the plan; what is asked for stays, or is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphspec.config.schema import Config, KernelsConfig, RuntimeConfig
from graphspec.errors import ConfigError
from graphspec.plan.numerics import resolve_numerics
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import PRODUCT_ROWS
from tests.support.engines import mirror_pair, random_pair
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.plans import draft_facts, model_facts


def plan_on(device: str, runtime: str = "auto", max_rows: int = 8, **kernels: Any) -> Plan:
    config = Config(runtime=RuntimeConfig(name=runtime, max_rows=max_rows), kernels=KernelsConfig(**kernels))
    return make_plan(config, model_facts(), draft_facts(), device=device)


@pytest.mark.parametrize(
    ("device", "runtime", "kernels", "expected"),
    [
        ("cpu", "auto", {}, "batch_invariant"),
        ("cpu", "eager", {}, "fast"),
        ("cpu", "auto", {"attention": "native"}, "fast"),
        ("cpu", "auto", {"numerics": "fast"}, "fast"),
        ("cuda", "auto", {}, "cycle_invariant"),
        ("cuda", "eager", {}, "fast"),
        ("cuda", "auto", {"attention": "flashinfer"}, "fast"),
        ("cuda", "auto", {"linear_table": "table.json"}, "fast"),
        ("cuda", "auto", {"numerics": "fast"}, "fast"),
        ("cuda", "auto", {"numerics": "batch_invariant"}, "batch_invariant"),
    ],
)
def test_auto_is_the_law_where_it_is_proved(device: str, runtime: str, kernels: dict[str, Any], expected: str) -> None:
    plan = plan_on(device, runtime, **kernels)
    assert plan.numerics == plan.describe()["numerics"] == expected


def test_cycles_of_more_nodes_than_a_tile_has_rows_are_fast() -> None:
    nodes = plan_on("cuda").shape.num_draft_tokens
    most = PRODUCT_ROWS // nodes
    assert plan_on("cuda", max_rows=most, numerics="cycle_invariant").numerics == "cycle_invariant"
    config = Config(runtime=RuntimeConfig(max_rows=2 * most, buckets=[1, 2 * most]))
    assert make_plan(config, model_facts(), draft_facts(), device="cuda").numerics == "fast"
    config.kernels = KernelsConfig(numerics="cycle_invariant")
    with pytest.raises(ConfigError, match=rf"kernels\.numerics.*more than {PRODUCT_ROWS} nodes.*with {2 * most * nodes}"):
        make_plan(config, model_facts(), draft_facts(), device="cuda")


def test_a_gpus_arithmetic_in_32_bits_is_fast() -> None:
    found = [
        resolve_numerics(KernelsConfig(), "fused", model_facts(), device="cuda", dtype=dtype, nodes=8)
        for dtype in ("bfloat16", "float16", "float32")
    ]
    assert found == ["cycle_invariant", "cycle_invariant", "fast"]


def test_networks_with_torch_between_native_ops_are_fast() -> None:
    target = model_facts()
    found = [
        resolve_numerics(KernelsConfig(), "compiled", facts, device="cpu", dtype="float32", nodes=8)
        for facts in (target, replace(target, latent=object()), replace(target, recurrent=object()), replace(target, experts=object()))
    ]
    assert found == ["batch_invariant", "fast", "fast", "fast"]


def test_an_engine_says_what_it_used(tmp_path: Path) -> None:
    pair = mirror_pair(tmp_path)
    assert pair.llm(variant="none").plan.numerics == "fast", "the eager runtime"
    llm = pair.llm(variant="none", runtime="compiled")
    assert llm.plan.numerics == "batch_invariant" and llm.decoders["target"] == "one native op per pass"


def test_a_target_that_runs_op_by_op_is_refused(tmp_path: Path) -> None:
    hybrid = random_pair(tmp_path, build_hybrid("qwen3_5"))
    with pytest.raises(ConfigError, match=r"kernels\.numerics.*op by op"):
        hybrid.llm(variant="none", runtime="compiled", numerics="batch_invariant")
