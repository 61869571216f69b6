"""`python -m perf.cold_start`: the programs of a first request, and what is summed over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from graphspec.kernels.fused.ahead import Compiled, Job
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


made: list[Any] = []
"""Every compiler with its processes, and its end."""


class Compiler:
    """Notes what it is given; the first kernel does not compile."""

    def __init__(self, target: GPUTarget, processes: int) -> None:
        self.target, self.jobs = target, dict[Job, Compiled]()
        made.append((self, processes))

    def take(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            job = Job.of(launch, self.target)
            self.jobs.setdefault(job, Compiled(job.kernel, 0.5, error="" if self.jobs else "no"))

    def wait(self) -> list[Compiled]:
        return list(self.jobs.values())

    def close(self) -> None:
        made.append("closed")


def test_kernels_are_compiled_once_and_one_that_fails_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launches_of(*parts: Callable[[], None]) -> Launches:
        with torch.no_grad():
            for part in parts:
                part()
        return Launches((("op", "graphspec.linear"),) * len(parts), "")

    made.clear()
    monkeypatch.setattr(cold_start, "KernelCompiler", Compiler)
    monkeypatch.setattr(cold_start, "compile_kernels", lambda written: ["kernel"])
    monkeypatch.setattr(cold_start, "launches_of", launches_of)
    monkeypatch.setattr(cold_start.os, "environ", dict(cold_start.os.environ))
    assert cold_start.main(["--layers", "4", "--processes", "3", "--out", str(tmp_path)]) == 1
    (compiler, processes), closed = made
    assert processes == 3 and closed == "closed"
    (file,) = tmp_path.glob("*-cold-start.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["program"] for record in records if record["kind"] == "program"] == PROGRAMS
    names = [job.kernel for job in compiler.jobs]
    # A layer's attention is one kernel for all layers; the projections of the first layer are another's.
    assert names.count("_tree_attention") < 4 and names.count("_linear") < 30
    assert records[-1] == {
        "kind": "kernels", "kernels": len(names), "processes": 3, "process_seconds": len(names) / 2, "failed": [names[0]],
    }  # fmt: skip
    assert "code of 4 programs" in capsys.readouterr().out
