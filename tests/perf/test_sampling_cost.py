"""``python -m perf.sampling_cost``: every form of sampling next to greedy decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import sampling_cost


def test_every_form_is_compared_with_greedy(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {name: sampling_cost.FORMS[name] for name in (sampling_cost.GREEDY, "temperature 1, top_p 0.9", "JSON by a schema")}
    monkeypatch.setattr(sampling_cost, "FORMS", forms)
    words = ["--model", "demo", "--rounds", "2", "--every", "20", "--max-tokens", "9", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="chat_template"):
        sampling_cost.main(words)
    assert sampling_cost.main([*words, "--raw"]) == 0
    assert "greedy: " in capsys.readouterr().out
    [file] = tmp_path.glob("*-sampling-cost.jsonl")
    found = {record["form"]: record for record in map(json.loads, file.read_text().splitlines()) if "form" in record}
    assert list(found) == list(forms)
    assert found["greedy"]["ratio"] == 1.0 and all(len(record["rounds"]) == 2 and record["ratio"] > 0 for record in found.values())


def test_counts_below_one_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--every", "--rounds", "--max-tokens"):
        with pytest.raises(SystemExit):
            sampling_cost.main([option, "0"])
        assert f"{option}: expected at least 1, found 0" in capsys.readouterr().err
