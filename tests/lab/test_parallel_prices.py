"""``graphspec plan`` and ``tune`` for drafters that propose all levels in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphspec.cli.main import main
from graphspec.config.catalog import load_object, resolve_variant
from graphspec.config.compose import load_config
from graphspec.facts import read_model_facts
from graphspec.lab.floor import FloorModel
from graphspec.lab.predict.advice import candidate_shapes
from graphspec.lab.predict.model_pair import SHAPES
from graphspec.lab.tune.short_list import Candidates
from graphspec.shapes import CycleShape
from perf.gpu.bench import JETSPEC_8B, QWEN3_8B, write_configs

CONTEXT, LAYER = 2048, 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
PARALLEL = pytest.mark.parametrize("name", ["dflash", "p_eagle"])


def model_of(name: str) -> FloorModel:
    """Llama-3.1-8B with the draft that is assumed for it."""
    target, variant = read_model_facts(SHAPES / "llama-3.1-8b"), resolve_variant(name)
    draft, _ = load_object(variant.assumed)(Path("assumed"), target)
    return FloorModel.of(target, draft, "bfloat16", variant, from_config=True)


def test_the_bytes_of_a_block_by_hand() -> None:
    """Five layers, five taps, keys and values of the context once more, the target's head; 15 rows propose whatever the depth."""
    draft, verify = model_of("dflash").stages(CycleShape(15, 7, 64, "marginals"), 1, CONTEXT)
    weights = 5 * LAYER + 5 * 4096 * 4096 + 2 * 5 * 1024 * 4096 + 128256 * 4096
    assert draft.parts["weights"] == pytest.approx(2 * weights, rel=1e-3)
    assert draft.parts["kv"] == pytest.approx(2 * 2 * 5 * 1024 * CONTEXT, rel=0.03)
    assert (draft.name, draft.passes, verify.name, verify.passes) == ("dflash", 1, "verify", 1)


@PARALLEL
def test_depth_is_one_pass_and_width_is_paid_for_in_verification(name: str) -> None:
    model = model_of(name)

    def costs(*numbers: int) -> Any:
        return model.stages(CycleShape(*numbers, "marginals"), 1, CONTEXT)

    (shallow, narrow), (deep, wide) = costs(4, 7, 32), costs(15, 7, 128)
    assert shallow.passes == deep.passes == 1
    assert shallow.parts["weights"] == deep.parts["weights"] and narrow.parts["weights"] == wide.parts["weights"]
    assert wide.flops == pytest.approx(4 * narrow.flops, rel=0.05)
    # An EAGLE-3 head reads its weights again for every level.
    eagle3 = model_of("eagle3").stages(CycleShape(15, 1, 16), 1, CONTEXT)
    assert sum(stage.passes for stage in eagle3[:-1]) == 15


@PARALLEL
def test_plan_and_tune_ask_about_deep_and_wide_trees(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    variant, deepest = resolve_variant(name), 15
    shapes = candidate_shapes(variant, 1, deepest)
    assert {shape.pool for shape in shapes} == {"marginals"}
    assert max(shape.num_steps for shape in shapes) == deepest and max(shape.num_draft_tokens for shape in shapes) == 128
    # Beams end where they did.
    assert max(shape.num_steps for shape in candidate_shapes(resolve_variant("eagle3"))) == 10
    words = ["model=llama-3.1-8b", f"variant={name}", "hardware=h200", "plan.batches=[1]", "plan.acceptance=[0.95]"]
    with pytest.raises(SystemExit) as done:
        main(["plan", *words, "format=json"])
    captured = capsys.readouterr()
    assert done.value.code == 0, captured.err
    (plan,) = json.loads(captured.out.splitlines()[-1])["plans"]
    assert [(stage["name"], stage["passes"]) for stage in plan["stages"]] == [(name, 1), ("verify", 1)]
    assert plan["shape"][0] > 10, "drafts that are nearly always right pay at any depth"
    possible = Candidates.of(load_config(*words)).possible
    assert max(shape.num_steps for shape in possible) > 10 and max(shape.num_draft_tokens for shape in possible) == 128


def test_the_floor_of_jetspecs_shape(tmp_path: Path) -> None:
    """Depth 16 over Qwen3-8B, from the configs of the GPU bench. The head is read twice, by draft and target."""
    target_folder, folder = write_configs(tmp_path, QWEN3_8B, JETSPEC_8B)
    target, variant = read_model_facts(target_folder), resolve_variant("dflash")
    facts = load_object(variant.facts)(folder, target)
    model = FloorModel.of(target, facts, "bfloat16", variant, from_config=True)
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288
    head, draft = 151936 * 4096, 5 * 4096 * 4096 + 2 * 5 * 1024 * 4096
    found = sum(stage.parts["weights"] for stage in model.stages(CycleShape(16, 7, 64, "marginals"), 1, CONTEXT))
    assert found == pytest.approx(2 * (36 * layer + head + 5 * layer + draft + head), rel=1e-3)
