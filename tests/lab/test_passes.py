"""Passes timed on this machine: interpolation between sizes, cycles predicted from others, and validity of the cached times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.cli.main import main
from graphspec.config.catalog import resolve_variant
from graphspec.config.compose import load_config
from graphspec.lab.floor import FloorModel, Hardware
from graphspec.lab.predict import calibration
from graphspec.lab.predict.advice import Outlook
from graphspec.lab.predict.calibration import engine_of, network_calls, timed_shapes
from graphspec.lab.predict.passes import Curve, PassTimes, TimedCycle, read_curves
from graphspec.shapes import PLAIN, CycleShape
from perf.plan_error import minimum
from tests.support.plans import draft_facts, model_facts

EAGLE3 = resolve_variant("eagle3")
MODEL = FloorModel.of(model_facts(num_layers=4, sliding_window=(None,) * 4), draft_facts(), "float32", EAGLE3, from_config=True)
HARDWARE = Hardware(1e9)
CURVES = {
    "target.layers": Curve((1, 4, 16), ((1.0, 2.0), (1.5, 3.5), (4.5, 12.5)), (10, 110)),
    "target.head": Curve((1, 16), ((0.1,), (0.4,))),
    "draft.layers": Curve((1, 16), ((0.2, 0.3), (0.5, 2.0)), (10, 110)),
    "draft.head": Curve((1, 16), ((0.1,), (0.4,))),
    "draft.fuse": Curve((1, 16), ((0.05,), (0.2,))),
}
TRUTH = PassTimes(CURVES, (0.2, 0.08, 0.3, 0.5), (), 1e9, "known")


def cycle(shape: CycleShape, batch: int, context: int = 40) -> TimedCycle:
    """One that takes exactly as long as :data:`TRUTH` has it."""
    return TimedCycle(shape, batch, context, Outlook(MODEL, context, HARDWARE, TRUTH).predict(shape, batch).cycle_ms)


def test_between_points_and_past_them() -> None:
    curve = CURVES["target.layers"]
    assert [curve.at(rows, 10) for rows in (1, 2, 4, 10, 16, 28)] == pytest.approx([1.0, 1 + 0.5 / 3, 1.5, 3.0, 4.5, 7.5])
    assert [curve.at(4, context) for context in (0, 10, 60, 110, 210)] == pytest.approx([1.5, 1.5, 2.5, 3.5, 5.5])
    alone = Curve((2,), ((3.0,),))
    assert alone.at(9, 500) == 3.0
    assert minimum([alone, Curve((2,), ((2.5,),))]).times == ((2.5,),)


def test_a_cycle_is_its_passes_and_what_is_beyond_them() -> None:
    """(2, 2, 5) with one row at 10 tokens, by hand: three window rows, two beams, five nodes."""
    shape = CycleShape(2, 2, 5)
    extend, steps, verify = MODEL.stages(shape, 1, 10)
    layers, head = 1.5 + 3.0 * 1 / 12, 0.1 + 0.3 * 4 / 15
    assert TRUTH.milliseconds(verify, HARDWARE) == pytest.approx(layers + head)
    assert TRUTH.milliseconds(extend, HARDWARE) == pytest.approx(0.2 + 0.3 * 2 / 15 + 0.1 + 0.05 + 0.15 * 2 / 15)
    assert TRUTH.milliseconds(steps, HARDWARE) == pytest.approx(0.2 + 0.3 / 15 + 0.1 + 0.3 / 15)
    logits = sum(cost.parts["logits"] for cost in (extend, steps, verify)) / 1e6
    prediction = Outlook(MODEL, 10, HARDWARE, TRUTH).predict(shape, 1)
    assert prediction.cycle_ms - sum(stage.ms for stage in prediction.stages) == pytest.approx(0.2 + 2 * 0.08 + 0.3 + 0.5 * logits)


def test_other_shapes_follow_from_those_that_were_timed() -> None:
    timed = [cycle(shape, batch) for shape, batches in timed_shapes(EAGLE3, MODEL) for batch in batches]
    assert [(c.shape.numbers, c.batch) for c in timed] == [([0, 1, 1], 1), ([2, 1, 3], 1), ([2, 2, 5], 1), ([2, 2, 5], 4)]
    found = PassTimes.fit(MODEL, CURVES, timed, 1e9, "fitted")
    assert found.beyond == pytest.approx(TRUTH.beyond)
    for shape, batch in ((PLAIN, 8), (CycleShape(5, 1, 6), 1), (CycleShape(5, 4, 16), 4)):
        ms = Outlook(MODEL, 200, HARDWARE, found).predict(shape, batch).cycle_ms
        assert ms == pytest.approx(Outlook(MODEL, 200, HARDWARE, TRUTH).predict(shape, batch).cycle_ms)


def test_nothing_takes_less_than_no_time() -> None:
    """A tree that ran faster than its chain, as on a busy machine, is no reason for other trees to be faster still."""
    timed = [cycle(CycleShape(2, 1, 3), 1), cycle(PLAIN, 1), TimedCycle(CycleShape(2, 2, 5), 1, 40, cycle(CycleShape(2, 2, 5), 1).ms - 1.0)]
    found = PassTimes.fit(MODEL, CURVES, timed, 1e9, "fitted")
    assert min(found.beyond) == 0.0 == found.beyond[2]
    assert Outlook(MODEL, 40, HARDWARE, found).predict(PLAIN, 1).cycle_ms > 1.0


def test_free_nodes_by_measured_times() -> None:
    """By floors without a peak every node is free; by measured times it is not."""
    flat = PassTimes(CURVES | {"target.layers": Curve((1, 8, 16), ((1.0,), (1.0,), (4.0,)))}, TRUTH.beyond, (), 1e9, "flat")
    free = Outlook(MODEL, 10, HARDWARE, flat).free_width(1)
    head = [0.1 + 0.3 * (nodes - 1) / 15 for nodes in range(1, 9)]
    assert (
        free == max(nodes for nodes in range(1, 9) if 1 + head[nodes - 1] <= 1.05 * 1.1) == 3 != Outlook(MODEL, 10, HARDWARE).free_width(1)
    )


def test_what_is_timed_is_what_a_pass_does() -> None:
    """The native ops of a pass, run by themselves, give the network's own results bit for bit; there is no other op with weights."""
    config = load_config("model=demo", "variant=eagle3", "hardware=cpu")
    llm = LLM.from_config(engine_of(config, CycleShape(2, 1, 3), [1]))
    with torch.no_grad():
        for name, kinds in (("target", {"layers": 1, "head": 1}), ("draft", {"fuse": 1, "layers": 1, "head": 1})):
            calls = network_calls(llm, name, lanes=1, rows=3, context=20)
            assert {part: len(some) for part, some in calls.items()} == kinds
            hidden = calls["layers"][0]()[0]
            network: Any = llm.cycle.target if name == "target" else llm.cycle.draft
            assert torch.equal(calls["head"][0](), network.logits(hidden))
        assert hidden.shape == (1, 3, llm.plan.target.hidden_size)


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as done:
        main(["plan", "hardware=cpu", "plan.measure=true", "plan.batches=[1]", "format=json", *words])
    captured = capsys.readouterr()
    assert done.value.code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
    return document


def test_times_are_kept_until_something_they_hold_for_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[str] = []

    def measure(config: Any, variant: Any, model: FloorModel, say: Any) -> PassTimes:
        runs.append(variant.name)
        cycles = [TimedCycle(shape, batch, 40, 9.0) for shape, batches in timed_shapes(variant, model) for batch in batches]
        return PassTimes.fit(model, CURVES, cycles, 2e10, "measured now")

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path)
    first, second = measured(capsys), measured(capsys)
    assert runs == ["eagle3"] and first["plans"] == second["plans"]
    [file] = (tmp_path / "passes").iterdir()
    kept = json.loads(file.read_text())
    assert read_curves(kept) == CURVES and {"revision", "date", "cpu"} <= set(kept["provenance"])
    assert str(file) in second["efficiency"]["source"] and second["hardware"]["bandwidth"] == 2e10
    assert first["efficiency"]["curves"]["target.layers"]["rows"] == [1, 4, 16]
    file.write_text("[]")
    measured(capsys)
    assert runs == ["eagle3", "eagle3"] and json.loads(file.read_text())["cycles"] == kept["cycles"]
    measured(capsys, "variant=none")
    measured(capsys, "hardware.threads=1")
    assert runs[2:] == ["none", "eagle3"] and len(list((tmp_path / "passes").iterdir())) == 3


def test_a_model_without_weights_is_not_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rate in (("copy_bandwidth", 2e10), ("matmul_rate", 1e11)):
        monkeypatch.setattr(f"graphspec.lab.predict.plan.{name}", lambda *a, rate=rate, **_: rate)
    document = measured(capsys, "model=llama-3.1-8b")
    assert "passes were not timed: there are no weights" in document["notes"] and document["efficiency"]["source"] == "assumed"


def test_the_plan_counts_packed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are those of the engine."""
    words = ("hardware=cpu", "variant.num_steps=4", "variant.topk=1", "variant.num_draft_tokens=5")
    with pytest.raises(SystemExit):
        main(["plan", "hardware.bandwidth_gbs=20", "plan.batches=[1]", "plan.context=512", "format=json", *words])
    planned = {part["name"]: part["bytes"] for part in json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]["parts"]}
    held = {line.name: line.size for line in LLM.from_config(load_config("model.max_context=512", *words)).memory.lines}
    for name in ("target weights", "draft weights"):
        assert planned[name] == held[name]
