"""``make same-bits``: what it counts, and that the documentation says what its result files hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from perf import same_bits

ROOT = Path(__file__).resolve().parents[2]


def test_every_other_token_and_logit_counts_and_so_does_a_missing_one() -> None:
    logits = {(0, 0): b"a", (0, 1): b"b", (1, 0): b"c"}
    assert same_bits.difference(([[1, 2], [3]], logits), ([[1, 2], [3]], dict(logits))) == {"differing_tokens": 0, "differing_logits": 0}
    found = {(0, 0): b"a", (0, 1): b"x"}
    assert same_bits.difference(([[1, 2], [3]], logits), ([[1, 4], [3]], found)) == {"differing_tokens": 1, "differing_logits": 2}
    with pytest.raises(ValueError, match="shorter"):
        same_bits.difference(([[1, 2]], {}), ([[1]], {}))


def test_counts_below_one_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--prompts", "--max-tokens", "--rows"):
        with pytest.raises(SystemExit):
            same_bits.main([option, "0"])
        assert f"{option}: expected at least 1, found 0" in capsys.readouterr().err


def test_the_figures_of_the_documentation_are_those_of_its_files() -> None:
    """docs/numerics.md, "200 prompts of 256 tokens": every form with every drafter and shape, once, and nothing differs."""
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    files = re.findall(r"\[\d+\]\(\.\./perf/results/(\S+-same-bits\.jsonl)\)", page)
    found = []
    for file in files:
        records = [json.loads(line) for line in (ROOT / "perf" / "results" / file).read_text(encoding="utf-8").splitlines()]
        [settings] = [record for record in records if record["kind"] == "settings"]
        assert (settings["prompts"], settings["max_tokens"]) == (200, 256), file
        found += [record for record in records if record["kind"] == "case" and record["case"] not in ("plain", same_bits.CONTROL)]
    cases = sorted((record["model"], record["case"]) for record in found)
    assert cases == sorted((model, case.name) for model in same_bits.MODELS for case in same_bits.CASES)
    assert all(record["differing_tokens"] == record["differing_logits"] == 0 for record in found)
    assert {record["numerics"] for record in found} == {"batch_invariant"}
    tokens, logits = (sum(record[key] for record in found) for key in ("tokens", "logits"))
    assert f"No token of {tokens:,} and no logit of {logits:,} positions differs" in " ".join(page.split())
