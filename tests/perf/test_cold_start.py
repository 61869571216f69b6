"""`python -m perf.cold_start`: the programs of a first request, and what is summed over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphspec.kernels.fused.launch import Launch
from perf import cold_start
from tests.support.codegen import Launches
from tests.support.shapes_8b import fake_cycle

PROGRAMS = ["cycle", "prefill of 16 tokens", "prefill of 64 tokens", "prefill of 256 tokens"]


def test_the_programs_are_those_that_a_short_chat_builds() -> None:
    with fake_cycle(cold_start.SHAPE, 4) as cycle:
        found = cold_start.programs(cycle)
        assert list(found) == PROGRAMS
        assert all(parts() for parts in found.values())


def test_kernels_are_compiled_once_and_one_that_fails_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[Launch] = []

    def compile_all(launches: list[Launch], *_: Any) -> list[dict[str, str]]:
        compiled.extend(launches)
        return [{"kernel": launch.kernel.fn.__name__, "error": "no" if number == 0 else ""} for number, launch in enumerate(launches)]

    def launches_of(*parts: Callable[[], None]) -> Launches:
        return Launches((("op", "graphspec.linear"),) * len(parts), "")

    monkeypatch.setattr(cold_start, "compile_all", compile_all)
    monkeypatch.setattr(cold_start, "compile_kernels", lambda written: ["kernel"])
    monkeypatch.setattr(cold_start, "launches_of", launches_of)
    monkeypatch.setattr(cold_start.os, "environ", dict(cold_start.os.environ))
    assert cold_start.main(["--layers", "4", "--out", str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*-cold-start.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["program"] for record in records if record["kind"] == "program"] == PROGRAMS
    names = [launch.kernel.fn.__name__ for launch in compiled]
    # A layer's attention is one kernel for all layers; the projections of the first layer are another's.
    assert names.count("_tree_attention") < 4 and names.count("_linear") < 30
    assert records[-1]["kernels"] == len(compiled) and records[-1]["failed"] == [names[0]]
    assert "code of 4 programs" in capsys.readouterr().out
