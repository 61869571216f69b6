"""``graphspec tune``: the short list, the rules of the choice, the file it writes, and whole runs over a tiny pair."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from graphspec.api.llm import LLM
from graphspec.config.command_options import LaunchConfig, PlanningConfig, ProfileConfig, TuneConfig, WorkloadConfig
from graphspec.config.compose import load_config
from graphspec.config.schema import AdaptiveConfig, Config, HardwareConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.engine.depth import AdaptiveDepth
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError, ResourceError
from graphspec.lab.measure import compare
from graphspec.lab.measure.worker import Worker
from graphspec.lab.tune import command, tune
from graphspec.lab.tune.choice import (
    Outcome,
    backlog_for,
    choose,
    cycle_times,
    expected_tokens,
    first_depths,
    mean_shares,
    shallower_depths,
)
from graphspec.lab.tune.command import caution, table
from graphspec.lab.tune.experiment import experiment_text, write_experiment
from graphspec.lab.tune.short_list import Candidates, pick
from graphspec.shapes import CycleShape
from tests.support.engines import MIRROR_VOCAB, Pair, ids, mirror_pair, prompts

CHAIN, TREE, DEEP = (4, 1, 5), (5, 4, 16), (8, 1, 9)


def outcome(shape: tuple[int, int, int], batch: int, ratio: float, shares: tuple[float, ...] = ()) -> Outcome:
    return Outcome(shape, batch, 100 * batch * ratio, ratio, None, shares)


def test_there_is_one_chain_and_one_tree_of_each_depth_and_batches_take_turns() -> None:
    shapes = [CycleShape(4, 1, 5), CycleShape(2, 1, 3), CycleShape(3, 2, 6), CycleShape(3, 4, 12), CycleShape(6, 1, 7)]
    ratios = dict(zip(shapes, ({1: 1.9, 8: 0.9}, {1: 1.5, 8: 1.4}, {1: 2.0, 8: 0.8}, {1: 2.1, 8: 1.2}, {1: 2.2, 8: 0.7}), strict=True))
    given = {CycleShape(4, 1, 5): "automatic"}
    found = pick(given, ratios, 4)
    assert [(p.shape.num_steps, p.shape.topk, p.why) for p in found] == [
        (4, 1, "automatic"), (6, 1, "predicted at batch 1"), (2, 1, "predicted at batch 8"), (3, 4, "predicted at batch 1"),
    ]  # fmt: skip
    assert found[0].ratios == {1: 1.9, 8: 0.9}
    assert [p.why for p in pick(given | {CycleShape(3, 2, 6): "configured"}, ratios, 1)] == ["automatic", "configured"]
    assert len(pick(given, ratios, 50)) == 4


def test_a_prediction_that_favours_all_trees_does_not_keep_chains_out() -> None:
    chains = [CycleShape(steps, 1, steps + 1) for steps in (2, 3, 4)]
    trees = [CycleShape(steps, 4, 12) for steps in (3, 4, 5, 6)]
    ratios = {shape: {1: 1.0 + shape.num_steps / 100, 2: 1.0 - shape.num_steps / 100} for shape in chains}
    ratios |= {shape: {1: 2.0 + shape.num_steps / 100, 2: 2.0 - shape.num_steps / 100} for shape in trees}
    found = pick({CycleShape(5, 4, 8): "automatic"}, ratios | {CycleShape(5, 4, 8): {1: 2.0, 2: 2.0}}, 6)
    assert [(p.shape.num_steps, p.shape.topk) for p in found] == [(5, 4), (6, 4), (3, 4), (4, 1), (2, 1), (4, 4)]


def test_the_shape_that_serves_all_batch_sizes_best_is_chosen() -> None:
    found = choose([
        outcome(CHAIN, 1, 1.7), outcome(CHAIN, 8, 1.2), outcome(TREE, 1, 2.0), outcome(TREE, 8, 0.5),
        outcome(DEEP, 1, 1.8), outcome(DEEP, 8, 1.1),
    ])  # fmt: skip
    # 1.7 * 1.2 = 2.04 against 2.0 * 1 and 1.98: where a shape does not pay there is depth 0.
    assert (found.shape, found.score) == (CHAIN, pytest.approx(2.04**0.5))
    assert list(found.scores) == [CHAIN, TREE, DEEP]
    assert found.fastest == {1: TREE, 8: CHAIN}
    assert found.ratios == pytest.approx({CHAIN: 2.04**0.5, TREE: 1.0, DEEP: 1.98**0.5}), "what was measured is not made better"


def test_a_drafter_that_keeps_its_depth_is_judged_by_what_was_measured() -> None:
    """There is no plain decoding at the batch size where its shape doesn't pay."""
    found = [outcome(TREE, 1, 1.6), outcome(TREE, 8, 0.5), outcome(CHAIN, 1, 1.2), outcome(CHAIN, 8, 0.95)]
    assert choose(found).shape == TREE
    kept = choose(found, adapts=False)
    assert (kept.shape, kept.scores) == (CHAIN, pytest.approx({CHAIN: (1.2 * 0.95) ** 0.5, TREE: 0.8**0.5}))
    assert choose(found[:2], adapts=False).shape is None


def shown(tuning: tune.Tuning) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(tuning))
    drawn = str.maketrans(dict.fromkeys("┃│┏┓┗┛┡┩┢┪└┘├┤┬┴┳┻╇┼━─", " "))
    return " ".join(console.export_text().translate(drawn).split())


def tuned(*outcomes: Outcome, adapts: bool = True) -> tune.Tuning:
    shapes = list(dict.fromkeys(found.shape for found in outcomes))
    tuning = tune.Tuning([{"shape": shape, "why": "automatic"} for shape in shapes], list(outcomes))
    tuning.plain = {found.batch: 100.0 for found in outcomes}
    tuning.choice = choose(outcomes, adapts=adapts)
    return tuning


def test_a_ratio_below_one_is_shown_as_it_was_measured() -> None:
    text = shown(tuned(outcome(CHAIN, 1, 0.77)))
    assert "chosen: none: no shape was faster, the best 0.77x plain decoding over all batch sizes" in text
    assert "(4,1,5) automatic 77 (0.77x) 0.77 1.00" in text, "ratio, and the score"
    assert "score: below 1 counted as 1, since the engine decodes plainly there" in text
    text = shown(tuned(outcome(CHAIN, 1, 1.21), outcome(CHAIN, 8, 0.49)))
    assert "chosen: (4,1,5), 0.77x plain decoding over all batch sizes, 1.10x with plain decoding where that is faster" in text
    text = shown(tuned(outcome(CHAIN, 1, 1.5)))
    assert "chosen: (4,1,5), 1.50x plain decoding over all batch sizes S, K, N" in text and "score" not in text


def test_a_busy_machine_is_reported() -> None:
    tuning = tuned(outcome(CHAIN, 1, 1.5))
    tuning.rows = [
        {"case": case, "side": side, "core_wait": share}
        for case, side, share in (("batch 1", "eagle3", 0.3), ("batch 1", "none", 0.7), ("batch 8", "none", 0.01), ("old", "none", None))
    ]
    reported = caution(tuning)
    assert reported is not None and "per second timed: batch 1 0.70." in reported
    tuning.rows = tuning.rows[2:]
    assert caution(tuning) is None


def test_equal_scores_take_fewer_nodes_and_a_missing_batch_size_is_no_choice() -> None:
    assert choose([outcome(TREE, 1, 1.5), outcome(CHAIN, 1, 1.5)]).shape == CHAIN
    assert choose([outcome(TREE, 1, 9.0), outcome(CHAIN, 1, 1.5), outcome(CHAIN, 2, 1.5)]).shape == CHAIN


def test_nothing_that_pays_is_plain_decoding() -> None:
    found = choose([outcome(CHAIN, 1, 0.9), outcome(TREE, 1, 0.99)])
    assert (found.shape, found.score, found.fastest) == (None, 1.0, {1: None})


@pytest.mark.parametrize(("steps", "depths"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2]), (5, [0, 1, 2]), (8, [0, 2, 4])])
def test_depths_other_than_the_deepest(steps: int, depths: list[int]) -> None:
    assert shallower_depths(steps) == depths


def test_buckets_begin_where_times_and_shares_say() -> None:
    shares = [0.8, 0.5, 0.5, 0.5]
    times = {1: {0: 1.0, 2: 1.1, 4: 1.2}, 8: {0: 1.0, 2: 1.5, 4: 2.4}, 32: {0: 1.0, 2: 2.4, 4: 4.0}}
    assert [expected_tokens(shares, depth) for depth in (0, 1, 2, 9)] == pytest.approx([1, 1.8, 2.2, 2.5])
    assert first_depths(times, shares, {1: 1.9, 8: 0.9}) == {1: 4, 8: 2, 32: 0}
    assert first_depths(times, shares, {1: 0.95, 8: 0.9}) == {1: 0, 8: 2, 32: 0}, "the deepest was measured, and did not pay"
    assert mean_shares([outcome(CHAIN, 1, 1.0, (0.8, 0.6)), outcome(CHAIN, 2, 1.0, (0.6,))]) == pytest.approx([0.7, 0.6])


def test_times_are_those_of_the_workload_where_it_ran() -> None:
    programs = {1: {0: 2.0, 2: 3.0, 4: 4.0}, 4: {0: 2.0, 2: 2.123456, 4: 4.0}, 8: {0: 5.0, 2: 3.0, 4: 4.0}}
    measured = [replace(outcome(CHAIN, batch, 1.0), cycle_ms=20.0, plain_ms=10.0) for batch in (1, 8)]
    assert cycle_times(programs, measured) == {
        1: {0: 10.0, 2: 15.0, 4: 20.0},
        4: {0: 2.0, 2: 2.123, 4: 4.0},
        8: {0: 10.0, 2: 15.0, 4: 20.0},
    }
    assert cycle_times({1: {0: 2.0, 4: 4.0}}, [outcome(CHAIN, 1, 1.0)]) == {1: {0: 2.0, 4: 4.0}}


@pytest.mark.parametrize(("extra", "maximum", "backlog"), [(0.1, 128, 32), (0.3, 128, 64), (0.6, 128, 128), (3.0, 128, 128), (0.6, 50, 50)])
def test_the_backlog_makes_catching_up_cheap(extra: float, maximum: int, backlog: int) -> None:
    assert backlog_for({1: {0: 1.0, 2: 1.0 + extra, 4: 9.0}, 2: {0: 1.0, 2: 1.01}}, maximum) == backlog


def test_what_cannot_be_tuned_is_refused() -> None:
    def refused(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            command.check(load_config(*words))
        return caught.value.key

    assert refused("variant=none") == "variant"
    assert refused("experiment=demo_eagle1") == "variant.tree_choices"
    assert refused("accept.rule=synthetic", "accept.synthetic_length=2") == "accept"
    assert refused("accept=target_only", "accept.threshold_acc=0.5") == "accept"
    for word in ("tune.batches=[4,1]", "tune.batches=[]", "tune.out=tuned.json", "tune.candidates=0"):
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            load_config(word)
    assert command.check(load_config()) == [1, 2, 4, 8]
    assert command.check(load_config("tune.batches=[3,16]")) == [3, 16]


TIMES = {1: {0: 0.00123, 2: 2.0, 5: 3.25}, 8: {0: 1.0, 2: 2.0, 5: 3.0}}
ADAPTIVE = AdaptiveConfig(depths=[0, 2], backlog=64, times=TIMES, rates=[0.5, 0.25])
SAMPLED = ("sampling=sample", "sampling.temperature=0.7", "sampling.logit_bias={4: 1.5}", "accept=target_only")
CHANGING = ("runtime=eager", "runtime.depth_per_bucket={8: 0}", "kernels.attention=native")
EXPERIMENTS = {
    "demo": load_config("experiment=demo_tree"),
    "adaptive": replace(load_config("experiment=demo_tree", *CHANGING), adaptive=ADAPTIVE),
    "sampled": load_config("variant=ngram", *SAMPLED),
    "plain": load_config("experiment=demo_none", "model.path=/a b/model: 1", "hardware.memory_gib=2.5", "variant.ngram.max_window=5"),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_file_makes_its_configuration_again(name: str, tmp_path: Path) -> None:
    config, file = EXPERIMENTS[name], tmp_path / "folder" / "tuned.yaml"
    write_experiment(file, config, ["what was measured: 3", "", "all of it"])
    loaded = load_config(f"experiment={file}")
    assert isinstance(loaded, Config)
    assert asdict(loaded) == asdict(config)
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# what was measured: 3\n#\n# all of it\ndefaults:\n")
    assert f"- override /variant: {config.variant.name}\n" in text
    assert "workload" not in text
    later = load_config("sampling.max_tokens=7", f"experiment={file}", "runtime=eager", "runtime.page_size=4")
    assert (later.sampling.max_tokens, later.runtime.name, later.runtime.page_size) == (7, "eager", 4)


def test_a_default_group_is_listed_without_overrides() -> None:
    text = experiment_text(load_config("variant=mtp", "hardware=cpu"), [])
    assert text.splitlines()[-1] == "- _self_"


def test_the_command_line_takes_an_experiment_file(tmp_path: Path) -> None:
    write_experiment(tmp_path / "mine.yml", EXPERIMENTS["adaptive"], [])
    command = [sys.executable, "-m", "graphspec", "generate", "--cfg", "job", "experiment=mine.yml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "backlog: 64" in done.stdout
    assert "num_draft_tokens: 16" in done.stdout


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "No such file"),
        ("variant: [", "can be read"),
        ("- 1\n", "keys of the configuration"),
        ("variant:\n  topkk: 1\n", "did you mean topk"),
    ],
)
def test_a_file_that_is_no_experiment_is_explained(text: str | None, part: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=part):
        load_config(f"experiment={file}")


@pytest.mark.parametrize(
    ("variant", "tried"),
    [
        (VariantConfig(name="eagle3"), [(5, 1, 6), (5, 4, 16)]),
        (VariantConfig(name="eagle3", num_steps=7, topk=1, num_draft_tokens=8), [(7, 1, 8), (7, 4, 16)]),
        (VariantConfig(name="ngram"), [(6, 1, 7), (6, 4, 16)]),
    ],
)
def test_a_trial_runs_a_chain_and_a_wide_tree(variant: VariantConfig, tried: list[tuple[int, int, int]]) -> None:
    shapes = Candidates.of(LaunchConfig(variant=variant, hardware=HardwareConfig(device="cpu"))).tried()
    assert [tuple(shape.numbers) for shape in shapes] == tried


class Local:
    """Answers in this process as a worker's process would, including JSON. Time comes from a model: a cycle takes
    ``1 + step * S``, or ``1`` without drafts, so that what is faster does not depend on the machine.
    """

    step = 0.05
    spoiled: tuple[int, int, int] | None = None
    spoils_changing_depths = False
    core_wait = 0.01

    def __init__(self, name: str, timeout: float, say: object = None) -> None:
        self.worker, self.about = Worker(), {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker = None

    def ask(self, do: str, **values: Any) -> Any:
        answer = json.loads(json.dumps(self.worker.answer(do, **values), default=str))
        if do == "prepare":
            self.about = answer
        if do == "depth_times":
            return [[bucket, depth, 1e-3 * (1 + self.step * depth)] for bucket, depth, _ in answer]
        if do == "round":
            answer["core_wait"] = self.core_wait
            shape = self.about["shape"]
            for timeline in answer["timelines"]:
                reported = [0.0, *((1 + self.step * cycle["depth"]) for cycle in timeline["cycles"])]
                times = [sum(reported[: i + 1]) + 1.0 for i in range(len(timeline["bursts"]))]
                timeline["bursts"] = [[time, tokens] for time, (_, tokens) in zip(times, timeline["bursts"], strict=True)]
                timeline["arrived"], timeline["finished"] = 0.0, times[-1]
            changing = self.spoils_changing_depths and self.about["plan"]["depths"]
            if shape is not None and (tuple(shape) == self.spoiled or changing):
                answer["tokens"][0][-1] += 1
        return answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("mirror"))


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> type[Local]:
    monkeypatch.setattr(compare, "WorkerProcess", Local)
    monkeypatch.setattr(tune, "WorkerProcess", Local)
    monkeypatch.setattr(Local, "step", 0.05)
    monkeypatch.setattr(Local, "spoiled", None)
    monkeypatch.setattr(Local, "spoils_changing_depths", False)
    monkeypatch.setattr(Local, "core_wait", 0.01)
    return Local


def tune_config(pair: Pair, folder: Path, **changes: Any) -> LaunchConfig:
    values: dict[str, Any] = {
        "model": ModelConfig(path=str(pair.target)),
        "variant": VariantConfig(name="eagle3", draft=str(pair.draft), num_steps=4, topk=1, num_draft_tokens=5),
        "runtime": RuntimeConfig(name="eager", prefill_chunks=[8, 16], max_rows=2, buckets=[1, 2]),
        "hardware": HardwareConfig(device="cpu", dtype="float32", bandwidth_gbs=10.0, tflops=0.1),
        "profile": ProfileConfig(warm_up_seconds=0.0),
        "plan": PlanningConfig(acceptance=[0.9, 0.9, 0.9]),
        "workload": WorkloadConfig(source="random", requests=2, input_tokens=6, output_tokens=16, seed=3),
        "tune": TuneConfig(candidates=2, rounds=1, batches=[1, 2], out=str(folder / "made" / "tuned.yaml")),
        "results": str(folder / "results"),
    }
    return LaunchConfig(**(values | changes))


def result_of(folder: Path) -> list[dict[str, Any]]:
    [file] = (folder / "results").glob("*-tune.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_whole_run_writes_what_serves_best(pair: Pair, local: type[Local], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tune_config(pair, tmp_path)
    assert command.run(config) == 0
    shown = capsys.readouterr().out
    head, *sides, tuned = result_of(tmp_path)
    assert (head["kind"], tuned["kind"], {side["kind"] for side in sides}) == ("provenance", "tuned", {"side"})
    # A trial; two candidates and plain decoding at two batch sizes; then what is written, again next to plain decoding.
    assert [side["role"] for side in sides] == ["subject", "subject", "none"] * 3 + ["subject", "none"] * 2
    assert all(side["equal"] for side in sides)
    assert [(side["case"], side["shape"]) for side in sides[:3]] == [("trial, batch 1", shape) for shape in ([5, 1, 6], [5, 4, 16], None)]
    assert all({"verify"} <= {stage["name"] for stage in side["stages"]} for side in sides[:3])
    assert [4, 1, 5] in [side["shape"] for side in sides]

    file = tmp_path / "made" / "tuned.yaml"
    loaded = load_config(f"experiment={file}")
    shape = [loaded.variant.num_steps, loaded.variant.topk, loaded.variant.num_draft_tokens]
    assert (shape, tuned["experiment"]) == (tuned["shape"], str(file))
    assert tuned["score"] == pytest.approx(tuned["scores"][0]["score"])
    assert tuned["score"] > 1
    assert loaded.adaptive.depths == shallower_depths(shape[0]) == tuned["depths"]
    # Seconds between bursts, by the model: 1 of a plain cycle.
    assert loaded.adaptive.times[2] == {depth: pytest.approx(1000 + 50 * depth) for depth in (*loaded.adaptive.depths, shape[0])}
    assert loaded.adaptive.rates[:2] == [1.0, 1.0], "the draft computes the target's own function"
    assert loaded.runtime.depth_per_bucket == {}
    assert [row["batch"] for row in tuned["batches"]] == [1, 2]
    assert all(row["written_ratio"] > 1.5 for row in tuned["batches"])
    for part in ("chosen", "as written", str(file)):
        assert part in " ".join(shown.split())
    assert file.read_text(encoding="utf-8").startswith("# @package _global_\n# Written by graphspec tune on ")
    assert "# Workload: random, 6 + 16 tokens" in file.read_text(encoding="utf-8")

    prompt_ids = prompts(2, vocab=MIRROR_VOCAB)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM.from_config(loaded)
    assert isinstance(llm.depth_policy, AdaptiveDepth)
    assert ids(llm.generate(prompt_ids, params)) == ids(pair.llm(variant="none").generate(prompt_ids, params))
    assert llm.depth_policy.unknown() == ()


def test_a_bucket_begins_at_the_depth_that_was_measured_unless_another_is_clearly_faster() -> None:
    table = {0: 2.652, 1: 3.552, 2: 3.894, 4: 5.141}
    shares = [0.7052, 0.6885, 0.7976, 0.7463]
    assert expected_tokens(shares, 2) / table[2] > expected_tokens(shares, 4) / table[4]
    assert first_depths({1: table}, shares, {1: 1.44}) == {1: 4}
    assert first_depths({1: table | {2: 3.7}}, shares, {1: 1.44}) == {1: 2}


def test_where_nothing_pays_plain_decoding_is_written(
    pair: Pair, local: type[Local], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local.step = 9.0
    assert command.run(replace(tune_config(pair, tmp_path), format="json")) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["tuned"]["shape"], document["tuned"]["variant"], document["tuned"]["score"]) == (None, "none", 1.0)
    assert load_config(f"experiment={tmp_path}/made/tuned.yaml").variant.name == "none"
    assert Path(document["file"]).is_file()


def small(pair: Pair, folder: Path, **changes: Any) -> LaunchConfig:
    """One batch size, one request; ``changes`` are fields of :class:`TuneConfig`."""
    config = tune_config(pair, folder)
    return replace(config, tune=replace(config.tune, batches=[1], **changes), workload=replace(config.workload, requests=1))


def test_a_winner_found_on_a_busy_machine_is_marked(
    pair: Pair, local: type[Local], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local.core_wait = 0.62
    assert command.run(small(pair, tmp_path, candidates=1)) == 0
    sentence = "Other programs kept the processor busy, or there are more threads than cores."
    assert sentence in " ".join(capsys.readouterr().out.split())
    file = tmp_path / "made" / "tuned.yaml"
    assert sentence in " ".join(file.read_text(encoding="utf-8").replace("#", " ").split())
    local.core_wait = 0.01
    assert command.run(small(pair, tmp_path, candidates=1)) == 0
    assert sentence not in " ".join(capsys.readouterr().out.split())
    assert "processor" not in file.read_text(encoding="utf-8")


def test_a_fixed_table_holds_no_depths(pair: Pair, local: type[Local], tmp_path: Path) -> None:
    assert command.run(small(pair, tmp_path, adaptive=False, candidates=1)) == 0
    loaded = load_config(f"experiment={tmp_path}/made/tuned.yaml")
    assert loaded.adaptive == AdaptiveConfig()
    # Every depth accepts everything, and one more costs less than the token it brings: the deepest, everywhere.
    assert loaded.runtime.depth_per_bucket == {}


def test_buckets_beyond_every_batch_size_are_not_timed(pair: Pair, local: type[Local], tmp_path: Path) -> None:
    """They begin where the largest timed one does: plainly, where the shape is known not to pay there."""
    config = tune_config(pair, tmp_path, runtime=RuntimeConfig(name="eager", prefill_chunks=[8, 16], max_rows=4, buckets=[1, 2, 4]))
    shape = (4, 1, 5)
    tuning = tune.Tuning([], [outcome(shape, 1, 1.5, (0.9,) * 4), outcome(shape, 2, 0.9, (0.9,) * 4)])
    tuning.choice = choose(tuning.outcomes)
    written = tune.conclude(config, tuning, {"heads": 1, "backlog": 32}, [1, 2], lambda text: None)
    assert set(written.adaptive.times) == {1, 2}
    assert written.runtime.depth_per_bucket == {2: 0, 4: 0}
    policy = LLM.from_config(written).depth_policy
    assert isinstance(policy, AdaptiveDepth)
    assert policy.unknown() == (4,), "which the engine times itself"


def test_wrong_tokens_are_out(pair: Pair, local: type[Local], tmp_path: Path) -> None:
    local.spoiled = (4, 1, 5)
    assert command.run(small(pair, tmp_path)) == 0
    *_, tuned = result_of(tmp_path)
    assert tuned["shape"] != [4, 1, 5]
    assert [4, 1, 5] not in [row["shape"] for row in tuned["scores"]]
    assert tuned["wrong"] == ["eagle3 chain (4,1,5) at batch 1"]
    only = small(pair, tmp_path, candidates=1)
    local.spoiled = (5, 4, 8)
    with pytest.raises(ResourceError, match="eagle3 tree"):
        command.run(replace(only, variant=replace(only.variant, num_steps=None, topk=None, num_draft_tokens=None)))


def test_nothing_is_written_when_it_gives_wrong_tokens_itself(
    pair: Pair, local: type[Local], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local.spoils_changing_depths = True
    assert command.run(small(pair, tmp_path)) == 1
    assert not (tmp_path / "made").exists()
    *_, tuned = result_of(tmp_path)
    assert tuned["experiment"] is None
    assert "no experiment was written" in capsys.readouterr().out
