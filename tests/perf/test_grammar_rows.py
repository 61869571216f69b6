"""The cost of rows with a grammar to rows without: passes over the demo model, their figures, and the output."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import perf.grammar_rows
from graphspec.config.command_options import LaunchConfig, ProfileConfig, WorkloadConfig
from graphspec.config.schema import AcceptConfig, RuntimeConfig, VariantConfig
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError, ResourceError
from graphspec.lab.measure.engine_side import EngineSide
from perf.grammar_rows import GrammarRows, Pass, grammar_rows, spell

if TYPE_CHECKING:
    from collections.abc import Iterator


def config(**changes: Any) -> LaunchConfig:
    values: dict[str, Any] = {
        "variant": VariantConfig(name="eagle3", num_steps=3, topk=1, num_draft_tokens=4),
        "runtime": RuntimeConfig(name="eager", prefill_chunks=[16, 64]),
        "workload": WorkloadConfig(requests=2, batch=3, input_tokens=16, output_tokens=20),
        "profile": ProfileConfig(rounds=2, stages=False),
    }
    return LaunchConfig(**(values | changes))


@pytest.fixture(scope="module")
def side() -> Iterator[EngineSide]:
    made = EngineSide(config())
    yield made
    made.llm.close()


def test_rows_next_to_a_grammar_have_the_tokens_they_have_without(side: EngineSide) -> None:
    rows = grammar_rows(side, 1)
    masked, whole = rows.run(grammar=True), rows.run(grammar=False)
    # Rows repeat the workload's requests: the batch has three, and two of them are others.
    expected = side.llm.generate([side.workload.requests[place].prompt for place in (1, 0)], [side.params[place] for place in (1, 0)])
    assert masked.tokens == whole.tokens == [out.token_ids for out in expected]
    assert masked.masked == masked.cycles > 5 and whole.masked == 0 < whole.cycles
    assert masked.seconds > 0 < whole.seconds
    load = side.llm.load()
    assert load.running == load.waiting == load.pages_used == 0, "what went on without end was ended"


def test_the_record_has_a_ratio_for_every_round(side: EngineSide) -> None:
    found = json.loads(json.dumps(grammar_rows(side, 1).measure(2)))
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
    assert "3 without have 1.50 times the time per token, 3.00 against 2.00 ms; only 90 % of" in spell(found)


def test_other_tokens_have_no_ratio_unless_the_rule_allows_them() -> None:
    wrong = passes(wrong=True)
    assert wrong["equal"] is False and wrong["ratio"] is None and wrong["tpot_ms"] is None
    assert "OTHER TOKENS" in spell(wrong)
    assert passes("rejection", temperature=0.8, wrong=True)["equal"] is None
    assert passes("rejection", wrong=True)["equal"] is False, "greedy, every rule gives the target's tokens"
    allowed = passes("target_only", lossy=True, wrong=True)
    assert allowed["equal"] is None and allowed["ratio"]["median"] == pytest.approx(1.5)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_figures_are_printed_and_decide_the_exit_code(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = nullcontext()
    monkeypatch.setattr(perf.grammar_rows, "EngineSide", lambda engine: SimpleNamespace(llm=llm))
    monkeypatch.setattr(
        perf.grammar_rows, "grammar_rows", lambda side, structured: SimpleNamespace(measure=lambda rounds: passes(wrong=wrong))
    )
    assert perf.grammar_rows.main(["--rows", "1", "variant=eagle3", "workload.batch=4"]) == int(wrong)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[::2]] == ["eagle3", "none"]
    assert ("OTHER TOKENS" if wrong else "1.50 times") in lines[0] and json.loads(lines[1])["equal"] is not wrong


def test_what_can_not_be_measured_is_refused(side: EngineSide) -> None:
    for rows in (-1, 0, 3, 7):
        with pytest.raises(ConfigError, match=r"--rows: expected at least 1, and fewer than workload\.batch = 3, .* found"):
            grammar_rows(side, rows)
    forced = EngineSide(config(accept=AcceptConfig(rule="synthetic", synthetic_length=2.0)))
    with forced.llm, pytest.raises(ResourceError, match=r"request 0: expected one that can be served, found .*accept=synthetic"):
        grammar_rows(forced, 1)


def test_a_single_token_has_no_time_per_token() -> None:
    made = EngineSide(config(workload=WorkloadConfig(requests=2, batch=2, input_tokens=8, output_tokens=1)))
    with made.llm, pytest.raises(ResourceError, match=r"workload\.output_tokens: expected .* two tokens or more"):
        grammar_rows(made, 1).run(grammar=True)
