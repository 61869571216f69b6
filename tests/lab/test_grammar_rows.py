"""The cost of rows with a grammar to rows without: passes over the demo model, their figures, and the output."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.config.command_options import LaunchConfig, ProfileConfig, WorkloadConfig
from graphspec.config.schema import AcceptConfig, RuntimeConfig, VariantConfig
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError, ResourceError
from graphspec.lab.measure import compare, profile
from graphspec.lab.measure.engine_side import EngineSide
from graphspec.lab.measure.grammar_rows import GrammarRows, Pass
from tests.lab.test_profile import FakeWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def config(**changes: Any) -> LaunchConfig:
    values: dict[str, Any] = {
        "variant": VariantConfig(name="eagle3", num_steps=3, topk=1, num_draft_tokens=4),
        "runtime": RuntimeConfig(name="eager", prefill_chunks=[16, 64]),
        "workload": WorkloadConfig(requests=2, batch=3, input_tokens=16, output_tokens=20),
        "profile": ProfileConfig(rounds=2, structured_rows=1, stages=False),
    }
    return LaunchConfig(**(values | changes))


@pytest.fixture(scope="module")
def side() -> Iterator[EngineSide]:
    made = EngineSide(config())
    yield made
    made.llm.close()


def test_rows_next_to_a_grammar_have_the_tokens_they_have_without(side: EngineSide) -> None:
    rows = side.grammar_rows
    assert rows is not None
    masked, whole = rows.run(grammar=True), rows.run(grammar=False)
    # Rows repeat the workload's requests: the batch has three, and two of them are others.
    expected = side.llm.generate([side.workload.requests[place].prompt for place in (1, 0)], [side.params[place] for place in (1, 0)])
    assert masked.tokens == whole.tokens == [out.token_ids for out in expected]
    assert masked.masked == masked.cycles > 5 and whole.masked == 0 < whole.cycles
    assert masked.seconds > 0 < whole.seconds
    load = side.llm.load()
    assert load.running == load.waiting == load.pages_used == 0, "what went on without end was ended"


def test_the_record_has_a_ratio_for_every_round(side: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.lab.measure.stages.copy_bandwidth", lambda *args, **kwargs: 1e9)
    found = json.loads(json.dumps(side.profile()))["next_to_grammar"]
    assert (found["rows"], found["structured_rows"], found["equal"], found["masked"]) == (3, 1, True, 1.0)
    assert len(found["ratio"]["rounds"]) == 2 and min(found["ratio"]["rounds"]) > 0
    assert [len(found["tpot_ms"][name]["rounds"]) for name in ("with", "without")] == [2, 2]


def passes(rule: str = "match", lossy: bool = False, temperature: float = 0.0, wrong: bool = False) -> dict[str, Any]:
    """The record of passes of known times; the first of each kind, which is not counted, takes long."""
    llm: Any = SimpleNamespace(plan=SimpleNamespace(accept=SimpleNamespace(rule=rule, lossy=lossy)))
    rows = GrammarRows(llm, [[1]] * 4, [SamplingParams(temperature=temperature).resolve()] * 4, 1)
    order: list[bool] = []

    def run(*, grammar: bool) -> Pass:
        number = order.count(grammar)
        order.append(grammar)
        tokens = [[7, 8 + (wrong and grammar and number == 2)]] * 3
        return Pass((0.1 if number == 0 else 1e-3 * number) * (1.5 if grammar else 1.0), tokens, 10, 9 if grammar else 0)

    rows.run = run  # type: ignore[method-assign]
    found = rows.measure(3)
    assert order == [True, False, False, True, True, False, False, True], "who goes first changes"
    return found


def test_ratios_are_taken_within_a_round() -> None:
    found = passes()
    assert found["ratio"]["rounds"] == pytest.approx([1.5] * 3) and found["ratio"]["median"] == pytest.approx(1.5)
    assert found["tpot_ms"]["without"]["rounds"] == pytest.approx([1, 2, 3]) and found["tpot_ms"]["with"]["median"] == pytest.approx(3)
    assert found["equal"] is True and found["masked"] == 0.9
    assert "3 without have 1.50 times the time per token, 3.00 against 2.00 ms; only 90 % of" in profile.next_to_grammar(found)


def test_other_tokens_have_no_ratio_unless_the_rule_allows_them() -> None:
    wrong = passes(wrong=True)
    assert wrong["equal"] is False and wrong["ratio"] is None and wrong["tpot_ms"] is None
    assert "OTHER TOKENS" in profile.next_to_grammar(wrong)
    assert passes("rejection", temperature=0.8, wrong=True)["equal"] is None
    assert passes("rejection", wrong=True)["equal"] is False, "greedy, every rule gives the target's tokens"
    allowed = passes("target_only", lossy=True, wrong=True)
    assert allowed["equal"] is None and allowed["ratio"]["median"] == pytest.approx(1.5)


class Worker(FakeWorker):
    """A side of ours reports its rows."""

    found: dict[str, Any]

    def ask(self, do: str, **values: Any) -> Any:
        answer = super().ask(do, **values)
        return answer | {"next_to_grammar": self.found} if do == "profile" else answer


@pytest.mark.parametrize("wrong", [False, True])
def test_the_ratio_is_in_table_and_record_and_decides_the_exit_code(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "WorkerProcess", Worker)
    monkeypatch.setenv("COLUMNS", "200")
    Worker.log, Worker.wrong, Worker.found = [], "", passes(wrong=wrong)
    settings = config(
        baseline=["none", "hf"], results=str(tmp_path), profile=ProfileConfig(rounds=1, structured_rows=1), workload=WorkloadConfig(batch=4)
    )
    assert profile.run(settings) == int(wrong)
    shown = capsys.readouterr().out
    assert "grammar" in shown and ("OTHER TOKENS" if wrong else "1.50x") in shown
    [file] = tmp_path.iterdir()
    sides = [row for line in file.read_text(encoding="utf-8").splitlines() if (row := json.loads(line)).get("kind") == "side"]
    assert [row["next_to_grammar"] and row["next_to_grammar"]["equal"] for row in sides] == [not wrong, not wrong, None]


def test_what_can_not_be_measured_is_refused_at_once() -> None:
    for rows in (3, 7):
        with pytest.raises(ConfigError, match=r"profile\.structured_rows: expected fewer than workload\.batch = 3, .* found"):
            config(profile=ProfileConfig(structured_rows=rows))
    with pytest.raises(ConfigError, match=r"profile\.structured_rows"):
        ProfileConfig(structured_rows=-1)
    forced = AcceptConfig(rule="synthetic", synthetic_length=2.0)
    with pytest.raises(ResourceError, match=r"request 0: expected one that can be served, found .*accept=synthetic"):
        EngineSide(config(accept=forced))


def test_a_single_token_has_no_time_per_token() -> None:
    made = EngineSide(config(workload=WorkloadConfig(requests=2, batch=2, input_tokens=8, output_tokens=1)))
    with made.llm, pytest.raises(ResourceError, match=r"profile\.structured_rows: expected .* two tokens or more"):
        assert made.grammar_rows is not None
        made.grammar_rows.run(grammar=True)
