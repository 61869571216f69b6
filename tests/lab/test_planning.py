"""``graphspec plan``: numbers against arithmetic, recommendations against brute force, parsing of measured files, one error per mistake."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.cli.main import main
from graphspec.config.catalog import resolve_variant
from graphspec.config.compose import config_groups, load_config
from graphspec.errors import GraphspecError
from graphspec.lab.floor import FloorModel, Hardware
from graphspec.lab.measure import machine
from graphspec.lab.predict.acceptance import SIBLING, Acceptance, conditional, fit_sibling, usual_sibling
from graphspec.lab.predict.advice import Efficiency, Outlook, Ranked, candidate_shapes
from graphspec.lab.predict.command import run
from graphspec.lab.predict.from_results import acceptance_of, calibrate, context_of, fit_stage, predictions, read_measured
from graphspec.lab.predict.plan import CLOSE, advise, recommend
from graphspec.shapes import PLAIN, CycleShape
from perf.gpu.bench import write_configs
from tests.support.plans import draft_facts, model_facts

ROOT = Path(__file__).resolve().parents[2]
EAGLE3 = resolve_variant("eagle3")
MODEL = FloorModel.of(model_facts(num_layers=4, sliding_window=(None,) * 4), draft_facts(), "float32", EAGLE3, from_config=True)
CHAIN, TREE = CycleShape(3, 1, 4), CycleShape(2, 2, 5)
BYTES_ONLY = Hardware(1e9)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The document of ``graphspec plan ... format=json``."""
    with pytest.raises(SystemExit) as done:
        main(["plan", *words, "format=json"])
    captured = capsys.readouterr()
    assert done.value.code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
    return document


# Acceptance


def test_a_chain_is_plain_arithmetic() -> None:
    model = Acceptance((0.8, 0.5))
    assert model.length(CHAIN) == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5)
    assert model.length(PLAIN) == 1.0


def test_a_tree_by_hand() -> None:
    """Two children of the root, two of each of those; all six candidates, then the best four of them."""
    c, g = 0.6, 0.5
    first, second = c, (1 - c) * c * g
    assert Acceptance((c,), sibling=g).ranked(1, 2) == pytest.approx([first, second])
    paths = sorted((first, second, first * first, first * second, second * first, second * second), reverse=True)
    assert Acceptance((c,), sibling=g).length(CycleShape(2, 2, 7)) == pytest.approx(1 + sum(paths))
    assert Acceptance((c,), sibling=g).length(TREE) == pytest.approx(1 + sum(paths[:4]))
    paired = [first, second, first * c, second * c]
    assert Acceptance((c,), sibling=g).length(CycleShape(2, 2, 5, "paths")) == pytest.approx(1 + sum(paired))


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6))
def test_conditional_shares_and_back(shares: list[float]) -> None:
    rates = [math.prod(shares[: depth + 1]) for depth in range(len(shares))]
    assert conditional(rates) == pytest.approx(tuple(shares))
    assert conditional([0.5, 0.0, 0.0]) == (0.5, 0.0, 0.0)


@given(st.floats(0.0, 1.0, allow_subnormal=False), st.integers(1, 4), st.integers(1, 4), st.data())
def test_more_nodes_never_commit_less(share: float, steps: int, fan: int, data: st.DataObject) -> None:
    model = Acceptance((share,))
    maximum = 1 + fan + (steps - 1) * fan**2
    if fan == 1:
        assert model.length(CycleShape(steps, 1, steps + 1)) <= steps + 1
        return
    nodes = data.draw(st.integers(2, maximum))
    length = model.length(CycleShape(steps, fan, nodes))
    assert 1 <= length <= steps + 1 + 1e-9 and length <= nodes
    assert nodes == maximum or length <= model.length(CycleShape(steps, fan, nodes + 1))


def test_the_tree_model_is_near_the_demo_drafts() -> None:
    """What ``docs/measuring.md`` says of it: from the chain's shares, trees within 8 % of what ``make acceptance`` measured."""
    file = max((ROOT / "perf" / "results").glob("*-acceptance.jsonl"))
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row.get("label") in ("chain", "tree")]
    fitted = []
    for chain in (row for row in rows if row["label"] == "chain"):
        config = load_config(f"sampling.temperature={chain['temperature']}", f"variant.draft_noise={chain['draft_noise']}")
        model = Acceptance(conditional(chain["accepted_per_position"]), sibling=usual_sibling(config))
        same = [row for row in rows if all(row[key] == chain[key] for key in ("variant", "temperature", "draft_noise"))]
        for tree in (row for row in same if row["label"] == "tree"):
            assert model.estimate(CycleShape(*tree["shape"])) == pytest.approx(tree["acceptance_length"], rel=0.08)
            fitted.append(fit_sibling(model.shares, {CycleShape(*tree["shape"]): tree["acceptance_length"]}))
    assert len(fitted) >= 12
    match = re.search(r"g lies between ([\d.]+) and ([\d.]+)\.", (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8"))
    assert match is not None and [float(g) for g in match.groups()] == [min(fitted), max(fitted)]


# Advice on constructed hardware


def test_a_prediction_is_the_floor_by_its_efficiency() -> None:
    """And, where something was measured, what computing takes beyond that."""
    beyond = Outlook(MODEL, 30, BYTES_ONLY, Efficiency(0.5, rates={"verify": 1e9})).predict(CHAIN, 2)
    verify = MODEL.stages(CHAIN, 2, 30)[-1]
    assert beyond.stages[-1].ms == pytest.approx(1e3 * (verify.bytes / 1e9 / 0.5 + verify.flops / 1e9))
    stages = MODEL.stages(CHAIN, 2, 30)
    prediction = Outlook(MODEL, 30, BYTES_ONLY, Efficiency(0.5, {"verify": 0.25}, host_ms=0.125)).predict(CHAIN, 2)
    floors = [1e3 * stage.bytes / 1e9 for stage in stages]
    assert prediction.floor_ms == pytest.approx(sum(floors))
    assert prediction.cycle_ms == pytest.approx(floors[0] / 0.5 + floors[1] / 0.5 + floors[2] / 0.25 + 0.125)
    assert prediction.tokens_per_second(2.5) == pytest.approx(2 * 2.5 / (prediction.cycle_ms / 1e3))
    assert Outlook(MODEL, 30, BYTES_ONLY).predict(CHAIN, 2).cycle_ms == pytest.approx(sum(floors) / 0.85)


@pytest.mark.parametrize("hardware", [BYTES_ONLY, Hardware(1e9, 2e9), Hardware(1e9, 2e7)], ids=["bytes", "balanced", "compute"])
@pytest.mark.parametrize("batch", [1, 8])
def test_free_width_against_brute_force(hardware: Hardware, batch: int) -> None:
    def floor(nodes: int) -> float:
        return MODEL.stages(CycleShape(nodes - 1, 1, nodes), batch, 30)[-1].floor_ms(hardware)

    wide = [nodes for nodes in range(1, 129) if floor(nodes) <= 1.05 * floor(1)]
    found = Outlook(MODEL, 30, hardware).free_width(batch)
    assert found == max(wide) and wide == list(range(1, found + 1))
    if hardware.flops == 2e7:
        assert found == 1


def test_the_crossover_against_brute_force() -> None:
    """Reading is cheap and computing dear, so that every node costs as soon as the batch is large."""
    hardware, lengths = Hardware(1e9, 6e9), {CHAIN: 2.5, TREE: 2.7}

    def pays(batch: int) -> bool:
        outlook = Outlook(MODEL, 10, hardware)
        plain = outlook.predict(PLAIN, batch).tokens_per_second(1.0)
        return any(outlook.predict(shape, batch).tokens_per_second(length) > plain for shape, length in lengths.items())

    verdicts = [pays(batch) for batch in range(1, 257)]
    first = verdicts.index(False) + 1
    assert 2 < first < 200 and not any(verdicts[first:])
    assert Outlook(MODEL, 10, hardware).crossover(lengths, largest=256) == first
    assert Outlook(MODEL, 10, hardware).crossover(lengths, largest=first - 1) is None
    assert Outlook(MODEL, 10, hardware).crossover({CHAIN: 1.0}) == 1


def test_ranking_is_by_predicted_speed() -> None:
    acceptance = Acceptance((0.7,), measured={TREE: 1.5})
    ranked = Outlook(MODEL, 30, BYTES_ONLY).rank({shape: acceptance.length(shape) for shape in (PLAIN, CHAIN, TREE)}, 4)
    assert [entry.tokens_per_second for entry in ranked] == sorted((entry.tokens_per_second for entry in ranked), reverse=True)
    assert {entry.shape: entry.acceptance_length for entry in ranked} == {
        PLAIN: 1.0, TREE: 1.5, CHAIN: pytest.approx(1 + 0.7 + 0.49 + 0.343),
    }  # fmt: skip


def test_of_nearly_equal_shapes_the_smallest_is_recommended() -> None:
    def ranked(shape: CycleShape, speed: float) -> Ranked:
        cycle = Outlook(MODEL, 10, BYTES_ONLY).predict(shape, 1)
        return Ranked(cycle, speed / cycle.tokens_per_second(1.0))

    best, near, far = ranked(CycleShape(4, 4, 32), 100.0), ranked(TREE, 100.0 * (1 - 0.9 * CLOSE)), ranked(CHAIN, 100.0 * (1 - 1.1 * CLOSE))
    assert recommend([far, near, best]) is near
    assert recommend([far, best]) is best


def test_candidates_are_shapes_the_drafter_can_serve() -> None:
    assert candidate_shapes(resolve_variant("none")) == []
    assert candidate_shapes(resolve_variant("mtp"), heads=3) == [CycleShape(s, 1, s + 1) for s in (1, 2, 3)]
    shallow = candidate_shapes(EAGLE3, deepest=2)
    assert max(shape.num_steps for shape in shallow) == 2 and any(not shape.is_chain for shape in shallow)
    assert {shape.pool for shape in candidate_shapes(resolve_variant("ngram"))} == {"paths"}
    assert len(set(candidate_shapes(EAGLE3))) == len(candidate_shapes(EAGLE3))


# Measured files

TRUTH = Efficiency(0.5, {"draft_extend": 0.4, "draft_steps": 0.3, "verify": 0.6}, {"verify": 3e9, "draft_extend": 2e9}, host_ms=0.02)
CASES = ((PLAIN, 1), (PLAIN, 4), (CHAIN, 1), (CHAIN, 4), (TREE, 1), (TREE, 4))


def side(shape: CycleShape, batch: int, **changes: Any) -> dict[str, Any]:
    """A side of an engine that runs exactly at :data:`TRUTH`, its stages timed by themselves 10 % slower."""
    record: dict[str, Any] = {
        "kind": "side", "case": f"{shape.num_steps}-{shape.topk} x {batch}", "side": "s", "role": "subject" if shape.num_steps else "none",
        "variant": "eagle3" if shape.num_steps else "none", "shape": shape.numbers if shape.num_steps else None, "device": "cpu",
        "temperature": 0.0, "batch": batch, "input_tokens": 20, "output_tokens": 20, "equal": True,
        "synthetic": False, "bandwidth": 1e9,
    }  # fmt: skip
    prediction = Outlook(MODEL, 30, BYTES_ONLY, TRUTH).predict(shape, batch)
    record["cycle_ms"] = {"median": prediction.cycle_ms}
    rows = [(stage.name, stage.ms) for stage in prediction.stages] + [("accept", TRUTH.host_ms)]
    record["stages"] = [{"name": name, "ms": 1.1 * ms} for name, ms in rows]
    if shape.num_steps:
        rates = [0.8, 0.4, 0.1][: shape.num_steps]
        record |= {"acceptance_unconditional": rates, "acceptance_length": 1 + sum(rates) + 0.2 * (shape.topk - 1)}
    return record | changes


def write(folder: Path, *sides: dict[str, Any]) -> str:
    head = {"kind": "provenance", "cpu": "some processor", "gpus": []}
    file = folder / "profile.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in (head, *sides)))
    return str(file)


def test_efficiency_is_taken_back_out_of_what_was_measured(tmp_path: Path) -> None:
    measured = read_measured(write(tmp_path, *(side(*case) for case in CASES)), EAGLE3, 0.0)
    assert measured.bandwidth == 1e9 and {context_of(s) for s, _ in measured.sides} == {30}
    found = calibrate(MODEL, measured, BYTES_ONLY)
    assert found is not None and found.stages == pytest.approx(TRUTH.stages) and found.host_ms == pytest.approx(TRUTH.host_ms)
    assert {name: rate for name, rate in found.rates.items() if rate < 1e15} == pytest.approx(TRUTH.rates)
    records = predictions(MODEL, measured, BYTES_ONLY, Efficiency())
    assert sum(record["stage"] is None for record in records) == len(CASES)
    assert all(record["error"] == pytest.approx(0.0, abs=1e-6) for record in records)


@given(st.floats(0.1, 1.0), st.floats(1e6, 1e12), st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(1e5, 1e9)), min_size=3, max_size=6))
def test_a_stage_is_fitted_exactly_where_that_is_possible(share: float, rate: float, stages: list[tuple[float, float]]) -> None:
    points = [(floor, 1e3 * work, floor / share + 1e3 * work / rate) for floor, work in stages]
    found, beyond = fit_stage(points)
    for floor, work, spent in points:
        assert floor / found + (work / beyond if beyond is not None else 0.0) == pytest.approx(spent, rel=1e-3)


def test_a_stage_of_one_size_has_a_share_only() -> None:
    assert fit_stage([(1.0, 5.0, 4.0), (2.0, 10.0, 8.0)]) == (pytest.approx(0.25), None)
    assert fit_stage([(1.0, 5.0, 4.0), (1.0, 50.0, 3.9)]) == (pytest.approx(1 / 3.95, rel=1e-2), None)


def test_a_side_is_not_predicted_from_itself(tmp_path: Path) -> None:
    """One case alone has nothing to be predicted from but the stated default; twice as fast a side shows up as an error of -50 %."""
    alone = read_measured(write(tmp_path, side(CHAIN, 1)), EAGLE3, 0.0)
    cycle = next(record for record in predictions(MODEL, alone, BYTES_ONLY, Efficiency()) if record["stage"] is None)
    assert cycle["predicted_ms"] == pytest.approx(Outlook(MODEL, 30, BYTES_ONLY).predict(CHAIN, 1).cycle_ms)
    assert cycle["error"] == pytest.approx(cycle["predicted_ms"] / cycle["measured_ms"] - 1)
    slow = side(CHAIN, 1)
    slow["cycle_ms"] = {"median": 2 * slow["cycle_ms"]["median"]}
    records = predictions(
        MODEL, read_measured(write(tmp_path, slow, side(CHAIN, 4), side(CHAIN, 8)), EAGLE3, 0.0), BYTES_ONLY, Efficiency()
    )
    assert next(r["error"] for r in records if r["stage"] is None and r["batch"] == 1) == pytest.approx(-0.5)


def test_acceptance_comes_from_real_equal_sides_of_this_variant(tmp_path: Path) -> None:
    ignored = [
        side(CycleShape(5, 1, 6), 1, variant="eagle"), side(CycleShape(6, 1, 7), 1, equal=False), side(CycleShape(8, 1, 9), 1, role="hf"),
        side(CycleShape(7, 1, 8), 1, synthetic=True), side(CycleShape(4, 1, 5), 1, temperature=1.0),
    ]  # fmt: skip
    found = acceptance_of(read_measured(write(tmp_path, *(side(*case) for case in CASES), *ignored), EAGLE3, 0.0), SIBLING)
    assert found is not None
    assert found.shares == pytest.approx((0.8, 0.5, 0.25))
    assert found.length(TREE) == pytest.approx(1 + 0.8 + 0.4 + 0.2) and set(found.measured) == {CHAIN, TREE}
    # g is the one that gives the tree its length.
    assert found.estimate(TREE) == pytest.approx(found.length(TREE), abs=0.02)
    tree_only = acceptance_of(read_measured(write(tmp_path, side(TREE, 1)), EAGLE3, 0.0), SIBLING)
    assert tree_only is not None and sum(tree_only.ranked(1, 2)) == pytest.approx(0.8)
    assert acceptance_of(read_measured(write(tmp_path, side(PLAIN, 1)), EAGLE3, 0.0), SIBLING) is None


def test_times_of_another_machine_are_left_alone(tmp_path: Path) -> None:
    file = write(tmp_path, *(side(*case, device="cuda") for case in CASES))
    text = Path(file).read_text().replace('"gpus": []', '"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]')
    Path(file).write_text(text)
    measured = read_measured(file, EAGLE3, 0.0)
    assert len(measured.on("h100", "cuda").sides) == len(measured.on("auto", "cuda").sides) == len(CASES)
    assert not measured.on("h200", "cuda").sides and not measured.on("cpu", "cpu").sides


# The command


def test_json_of_a_published_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.jsonl"
    words = ("model=llama-3.1-8b", "hardware=h200", "plan.batches=[1,32]", "plan.acceptance=[0.8,0.7,0.6]", f"plan.out={out}")
    document = plan(capsys, *words)
    assert document["parameters"]["target"] == 8_030_261_248
    assert document["memory"]["runtime"] == "captured (runtime=auto on cuda)", "what a GPU would run, without one"
    assert document["hardware"] | {"source": ""} == {
        "name": "h200", "bandwidth": 4.8e12, "flops": 989.5e12, "memory": int(131.3 * 2**30), "source": "",
    }  # fmt: skip
    one, many = document["plans"]
    assert one["plain_floor_ms"] == pytest.approx(3.18, abs=0.01) and one["plain_ms"] == pytest.approx(one["plain_floor_ms"] / 0.85)
    for row in (one, many):
        assert row["predicted_ms"] == pytest.approx(sum(stage["ms"] for stage in row["stages"]))
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] * row["acceptance_length"] / row["predicted_ms"])
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"]) and row["fits"]
        assert row["break_even"] == pytest.approx(row["predicted_ms"] / row["plain_ms"])
    assert many["free_width"] < one["free_width"]
    memory = document["memory"]
    assert memory["kv_per_token"] == {"target": 131072, "draft": 4096}
    assert memory["total"] == sum(part["bytes"] for part in memory["parts"]) <= memory["budget"] == int(0.9 * int(131.3 * 2**30))
    assert memory["rows_that_fit"] >= 32 and memory["context_that_fits"] == 131072
    assert (served := memory["served"]) | {"pool_tokens": 0} == {"rows": 8, "context": 131072, "pool_tokens": 0}
    assert 4 * 131072 < served["pool_tokens"] < 8 * 131072
    # Every row has pages for its context and the widest window, and there is the dummy page. Each keeps the feature of its last token.
    window = max(CycleShape(*row["shape"]).window_width for row in (one, many))
    pages = 32 * math.ceil((2048 + window) / 16) + 1
    assert memory["rows"] == 32 and memory["window"] == window * (131072 + 4096)
    assert next(part["bytes"] for part in memory["parts"] if part["name"].startswith("KV")) == pages * (16 * (131072 + 4096) + 3 * 4096 * 2)
    head, *records = map(json.loads, out.read_text().splitlines())
    assert head["kind"] == "provenance" and head["config"]["plan"]["batches"] == [1, 32] and records == document["plans"]


def test_rows_that_fit_fit_and_one_more_does_not() -> None:
    """Against the memory plan of engines with this many rows."""
    from graphspec.lab.predict.capacity import _network_sizes, _plan, engine_plan
    from graphspec.lab.predict.model_pair import read_model_pair

    config = load_config("model=llama-3.1-8b", "hardware=l40s", "plan.batches=[1]", "plan.context=1024")
    found = advise(config)
    pair, rows = read_model_pair(config.model.path, config.variant, EAGLE3), found.capacity.rows
    assert rows and found.capacity.longest
    memory = int(44.7 * 2**30)

    shape = found.rows[0].best.shape
    _, smallest = engine_plan(config, pair, shape, 1, 1024, device="cuda", dtype="bfloat16", memory=memory)
    sizes = _network_sizes(config, pair, found.outlook.model, smallest)

    def fits(rows: int, context: int) -> bool:
        _, memory_plan = _plan(config, pair, sizes, shape, "cuda", "bfloat16", memory, rows, context)
        return memory_plan.total <= memory_plan.budget

    assert fits(rows, 1024) and not fits(rows + 1, 1024)
    assert fits(1, found.capacity.longest) and (found.capacity.longest == 131072 or not fits(1, found.capacity.longest + 16))


def test_a_model_that_does_not_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 in FP8 on one H200: five times too large. Planned in seconds nevertheless, its 256 experts never built."""
    began = time.process_time()
    document = plan(capsys, "model=deepseek-v3", "variant=mtp", "hardware=h200", "plan.batches=[1,8]")
    assert time.process_time() - began < 15
    assert document["memory"]["rows_that_fit"] == 0 and not any(row["fits"] for row in document["plans"])
    assert not any("quantised" in note for note in document["notes"])
    # 8 of 256 experts and all that every token reads: far less than the whole model, far more than its KV.
    assert 18e9 < document["plans"][0]["plain_floor_ms"] / 1e3 * 4.8e12 < 45e9


def test_a_configured_shape_is_shown_next_to_the_recommended_one(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("variant.num_steps=3", "variant.topk=1", "variant.num_draft_tokens=4")
    document = plan(capsys, "hardware=rtx4090", "plan.batches=[1,2]", *shape)
    assert [(row["batch"], row["shape"]) for row in document["configured"]] == [(1, [3, 1, 4]), (2, [3, 1, 4])]
    assert document["draft"].endswith("eagle3") and document["notes"] == []


def test_with_a_measured_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its bandwidth takes the place of figures, its acceptance that of the guess; predictions are written and summed up."""
    file = write(tmp_path, *(side(*case) for case in CASES))
    document = plan(capsys, "hardware=cpu", f"plan.measured={file}", "plan.batches=[1]", "plan.context=100")
    assert document["hardware"]["bandwidth"] == 1e9 and file in document["hardware"]["source"]
    assert document["acceptance"]["shares"] == pytest.approx([0.8, 0.5, 0.25])
    cycles = [record for record in document["predictions"] if record["stage"] is None]
    assert document["error"]["cycles"] == len(cycles) == len(CASES)
    assert document["error"]["largest"] == pytest.approx(max(abs(record["error"]) for record in cycles))


def test_of_results_from_elsewhere_only_acceptance_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path, *(side(*case) for case in CASES))
    document = plan(capsys, "hardware=h200", f"plan.measured={file}", "plan.batches=[1]", "plan.context=100")
    assert document["hardware"]["bandwidth"] == 4.8e12 and document["efficiency"]["source"] == "assumed"
    assert document["acceptance"]["shares"] == pytest.approx([0.8, 0.5, 0.25]) and document["predictions"] == []
    assert any("only its acceptance" in note for note in document["notes"])


def test_tables_fit_into_100_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path, *(side(*case) for case in CASES))
    with pytest.raises(SystemExit) as done:
        main(["plan", "hardware=cpu", f"plan.measured={file}", "plan.context=100", "plan.batches=[1,8]"])
    lines = capsys.readouterr().out.splitlines()
    assert done.value.code == 0 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for part in ("memory,", "recommended (S, K, N)", "stages with weights", "tokens/s against", "median error", "free N", "pays from"):
        assert part in text


def test_measuring_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("graphspec.lab.predict.plan.copy_bandwidth", lambda *a, working_set: calls.append((*a, working_set)) or 2e10)
    monkeypatch.setattr("graphspec.lab.predict.plan.matmul_rate", lambda *a: calls.append(a) or 1e11)
    document = plan(capsys, "hardware=cpu", "runtime=eager", "plan.measure=true", "plan.batches=[1]")
    assert any("passes were not timed: the target's layers run op by op" in note for note in document["notes"])
    assert [call[:2] for call in calls[1:]] == [("cpu", "float32")]
    # The demo's 4.8 million parameters, each read once a cycle, and the context of a row: what caches hold.
    assert calls[0][0] == "cpu" and 19e6 < calls[0][1] < 32e6
    assert (document["hardware"]["bandwidth"], document["hardware"]["flops"]) == (2e10, 1e11)


def test_what_this_machine_can_do_is_a_sane_number() -> None:
    assert 1e8 < machine.copy_bandwidth("cpu", gib=0.03, seconds=0.05) < 1e13
    assert 1e8 < machine.matmul_rate("cpu", "float32", size=256, seconds=0.05) < 1e15


def test_a_cpu_is_measured_within_the_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest copy that touches as much as a program does; a GPU's median copy of what no cache holds."""
    timed: list[dict[str, Any]] = []

    def measure(run: Any, rewind: Any, block: int, device: str, seconds: float, warm_up: float) -> dict[str, float]:
        cells = {name: cell.cell_contents for name, cell in zip(run.__code__.co_freevars, run.__closure__, strict=True)}
        assert torch.equal(cells["source"], torch.ones_like(cells["source"])), "pages of its own"
        timed.append({"size": cells["source"].numel(), "block": block})
        return {"median": 4.0, "least": 2.0}

    monkeypatch.setattr(machine, "measure", measure)
    for touched, size in ((2**20, 2**19), (2**10, machine.MIN_COPY), (2**40, 2**22)):
        assert machine.copy_bandwidth("cpu", 2**-8, working_set=touched) == 2 * size / 2e-3
        assert timed[-1] == {"size": size, "block": machine.COPIED_AT_ONCE // size}
    assert machine.copy_bandwidth("cpu", 2**-8) == 2 * 2**22 / 2e-3


def test_every_gpu_profile_has_figures() -> None:
    for name in config_groups()["hardware"]:
        hardware = load_config(f"hardware={name}").hardware
        if hardware.device == "cuda":
            assert hardware.bandwidth_gbs and hardware.tflops and hardware.capacity_gib and hardware.memory_gib is None


BAD = {
    "hardware=cpu": ("hardware.bandwidth_gbs", "hardware=h200", "none with hardware=cpu"),
    "hardware=h200 model.path=/nowhere": ("model.path", "llama-3.1-8b", "'/nowhere'"),
    "hardware=h200 model.path=conf": ("config.json", "config.json", "no such file"),
    "hardware=h200 plan.context=5000": ("plan.context", "1024", "5000"),
    "hardware=h200 plan.context=0": ("plan.context", ">= 1", "0"),
    "hardware=h200 plan.acceptance=[]": ("plan.acceptance", "non-empty", "[]"),
    "hardware=h200 plan.acceptance=[1.5]": ("plan.acceptance", "from 0 to 1", "[1.5]"),
    "hardware=h200 plan.batches=[2,1]": ("plan.batches", "ascending", "[2, 1]"),
    "hardware=h200 plan.measured=/nowhere.jsonl": ("plan.measured", "graphspec profile wrote", "/nowhere.jsonl"),
    "hardware=h200 plan.measured=README.md": ("README.md:1", "JSON object", "graphspec"),
    "hardware.bandwidth_gbs=-1": ("hardware.bandwidth_gbs", ">= 1e-09", "-1"),
    "hardware=h200 variant=ngram variant.draft=x": ("variant.draft", "nothing", "x"),
    "hardware=h200 model=llama-3.1-8b variant=standalone": ("variant.draft", "can't be guessed", "no value"),
    "hardware=h200 model=llama-3.1-8b variant=mtp": ("num_nextn_predict_layers", "an integer", "no such key"),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_one_message_for_each_mistake(words: str) -> None:
    key, expected, found = BAD[words]
    with pytest.raises(GraphspecError) as error:
        advise(load_config(*words.split()))
    assert key in error.value.key and expected in str(error.value.expected) and found in str(error.value.found)


def test_a_file_without_a_side_of_this_engine(tmp_path: Path) -> None:
    file = write(tmp_path, side(CHAIN, 1, variant="eagle"), side(CHAIN, 1, equal=False))
    with pytest.raises(GraphspecError, match="sides of variant eagle3") as error:
        read_measured(file, EAGLE3, 0.0)
    assert error.value.key == "plan.measured"


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 64), st.integers(1, 60), st.floats(0.1, 0.95))
def test_the_recommended_shape_is_close_to_the_best(batch: int, context: int, share: float) -> None:
    lengths = {shape: Acceptance((share,)).length(shape) for shape in (PLAIN, *candidate_shapes(EAGLE3, deepest=3))}
    ranked = Outlook(MODEL, context, Hardware(1e9, 5e9)).rank(lengths, batch)
    chosen = recommend(ranked)
    assert chosen.tokens_per_second >= (1 - CLOSE) * ranked[0].tokens_per_second
    assert chosen.shape.num_draft_tokens <= ranked[0].shape.num_draft_tokens


def test_folders_with_nothing_but_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A target and a head as their publishers describe them; the head's own numbers go before any assumption."""
    target, draft = write_configs(tmp_path)
    values = json.loads((draft / "config.json").read_text()) | {"draft_vocab_size": 16000}
    (draft / "config.json").write_text(json.dumps(values))
    words = (f"model.path={target}", f"variant.draft={draft}", "hardware=h100", "plan.batches=[1]")
    document = plan(capsys, *words)
    layer = 8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4 * 4096
    assert document["parameters"] == {"target": 8_030_261_248, "draft": 3 * 4096 * 4096 + layer + 4096 * 16000}
    assert document["notes"] == [] and document["draft"] == str(draft)
    standalone = plan(capsys, f"model.path={target}", f"variant.draft={target}", "variant=standalone", "hardware=h100", "plan.batches=[1]")
    assert standalone["parameters"]["draft"] == 8_030_261_248
    assert standalone["plans"][0]["shape"] == [0, 1, 1] and standalone["crossover"] == 1


def test_a_quantised_target_is_planned_by_its_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Parameters are counted as numbers; a method that does not load is refused as loading would refuse it."""
    target, _ = write_configs(tmp_path)
    values = json.loads((target / "config.json").read_text())
    words = (f"model.path={target}", "variant=none", "hardware=h100", "plan.batches=[1]")
    plain = plan(capsys, *words)
    (target / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    document = plan(capsys, *words)
    assert document["parameters"]["target"] == plain["parameters"]["target"] == 8_030_261_248
    held = [next(part["bytes"] for part in found["memory"]["parts"] if part["name"] == "target weights") for found in (plain, document)]
    assert 0.56 * held[0] < held[1] < 0.58 * held[0]
    assert not any("quantised" in note for note in document["notes"])
    (target / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert "quantization_config.quant_method: expected one of fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("model=llama-3.1-70b", "hardware=h200"), marks=pytest.mark.full),
        ("model=llama-3.1-8b", "hardware=rtx4090", "plan.context=131072"),
        ("model=llama-3.1-8b", "hardware=rtx4090", "hardware.memory_gib=18"),
    ],
)
def test_suggested_configurations_fit(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """Every command that a refusal gives, as it stands, plans an engine that holds a row."""
    document = plan(capsys, *words, "plan.batches=[1]")
    shortfall = document["shortfall"]
    assert shortfall["needed"] > shortfall["allowed"] > 0 and shortfall["alternatives"]
    for each in shortfall["alternatives"]:
        program, command, *rest = shlex.split(each["command"])
        assert (program, command) == ("graphspec", "plan")
        found = plan(capsys, *rest, "plan.batches=[1]")
        assert found["memory"]["rows_that_fit"] > 0 and found["shortfall"] is None, each


def test_what_nodes_read_of_a_mixture_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Four nodes of gpt-oss-120b read almost four times the experts of one, and drafts that are hardly ever right don't pay."""
    run(load_config("model=gpt-oss-120b", "variant=ngram", "hardware=h200", "plan.batches=[1]", "plan.acceptance=[0.01]"))
    text = capsys.readouterr().out
    [four] = [line.split() for line in text.splitlines() if re.match(r" +4 +15\.3 ", line)]
    assert float(four[-1]) > 1.9
    assert "Drafting is predicted not to pay at batch 1." in text


def test_a_refusal_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    run(load_config("model=deepseek-v3", "variant=mtp", "hardware=h200", "plan.batches=[1]"))
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Does not fit: one row of 2048 tokens needs [\d.]+ GiB, [\d.]+ GiB may be used\.", first)
    assert second == "What would fit:" and "8 of these devices" in third
    run(load_config("model=llama-3.1-8b", "hardware=h200", "plan.batches=[1]"))
    assert capsys.readouterr().out.startswith("model ")
