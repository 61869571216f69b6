"""Kernels compiled by other processes while a program is traced: the same kernels that it launches, whatever happens to a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._inductor import config as inductor
from triton.backends.compiler import GPUTarget

from graphspec.kernels.fused import ahead
from graphspec.kernels.fused.ahead import Job
from graphspec.kernels.fused.launch import Launch
from graphspec.kernels.tree.fused.commit_rows import _commit_rows

ROOT = Path(__file__).resolve().parents[3]
TARGET = GPUTarget("cuda", 90, 32)

SCRIPT = """
import json, os, signal, sys, time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock
from triton.backends.compiler import GPUTarget
from graphspec.kernels.fused.ahead import Job, KernelCompiler
from graphspec.kernels.fused.launch import observing
from graphspec.shapes import CycleShape
from tests.support.codegen import launches_of, pretended_gpu
from tests.support.launches import operator_calls
from tests.support.shapes_8b import fake_cycle

target, seen, report = GPUTarget("cuda", 90, 32), [], {}
with fake_cycle(CycleShape(2, 1, 3), 4) as cycle:
    with observing(seen.extend):
        launches_of(*cycle.parts())
    called = [launch for part in cycle.parts() for call in operator_calls(part) for launch in call.launches]

def kernels(launches):
    # Without numbers: an extent of one has any stride, and the compiler chooses another than eager mode.
    jobs = {Job.of(launch, target) for launch in launches}
    return sorted({repr(replace(job, args=tuple(arg for arg in job.args if not isinstance(arg, int)))) for job in jobs})

report["traced"], report["launched"] = kernels(seen), kernels(called)

def named(*names):
    return [next(launch for launch in called if launch.kernel.fn.__name__ == name) for name in names]

def entries():
    return sorted(child.name for child in Path(os.environ["TRITON_CACHE_DIR"]).iterdir())

def reported(compiled):
    return [[kernel.kernel, kernel.entry, kernel.error] for kernel in compiled]

small = named("_commit_rows", "_mail_apply")
broken = replace(small[0], constexprs={})
with closing(KernelCompiler(target, 2)) as compiler:
    compiler.take([*small, broken])
    compiler.take(small)
    report["compiled"] = reported(compiler.wait())
report["ended"] = [process.returncode for process in compiler._processes]
report["entries"] = entries()
with pretended_gpu():
    report["again"] = [
        one.kernel.warmup(*one.args, grid=(1,), num_warps=one.num_warps, num_stages=one.num_stages, **one.constexprs).hash for one in small
    ]
report["entries_after"] = entries()
with closing(KernelCompiler(target, 2)) as second:
    second.take(small)
    report["cached"], report["second"] = len(second.cached), [reported(second.wait()), len(second._processes)]

# A process that is killed costs the kernel that it was compiling.
first, other = named("_linear", "_draft_topk")
with closing(KernelCompiler(target, 1)) as killed:
    killed.take([first])
    while not killed._processes:
        time.sleep(0.01)
    killed._processes[0].send_signal(signal.SIGKILL)
    killed.take([other])
    report["killed"] = reported(killed.wait())

# Without a process there is no kernel, and no error either.
def refuse():
    raise OSError("no more processes")

with mock.patch("graphspec.kernels.fused.ahead._start", refuse), closing(KernelCompiler(target, 1)) as alone:
    alone.take([first])
    report["refused"] = reported(alone.wait())

# Closing waits for nothing.
compiler = KernelCompiler(target, 1)
compiler.take(called)
while not compiler._processes:
    time.sleep(0.01)
report["late"] = reported(compiler.wait(0.0))
compiler.close()
report["closed"] = [len(compiler._processes), *(process.returncode for process in compiler._processes)]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a process in which Triton does not interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"log": done.stderr}


def test_tracing_shows_the_kernels_that_a_program_launches(report: Any) -> None:
    assert len(report["launched"]) > 15 and report["traced"] == report["launched"]


def test_launches_find_what_others_compiled(report: Any) -> None:
    """Under the name by which a launch looks it up; once each, though taken twice."""
    first, second, broken = report["compiled"]
    assert [first[0], second[0]] == ["_commit_rows", "_mail_apply"] and not first[2] and not second[2]
    assert report["again"] == [first[1], second[1]] and report["entries_after"] == report["entries"]
    assert report["ended"] and all(code is not None for code in report["ended"])
    assert broken[0] == "_commit_rows" and not broken[1] and broken[2], "a kernel that does not compile stops no other"


def test_what_is_in_the_cache_starts_no_process(report: Any) -> None:
    assert report["cached"] == 2 and report["second"] == [[], 0]


def test_a_process_that_dies_costs_one_kernel(report: Any) -> None:
    (_, entry, error), (_, other, fine) = report["killed"]
    assert not entry and error == "EOFError: its process ended with -9" and other and not fine
    assert "_linear was not compiled ahead: EOFError: its process ended with -9" in report["log"]
    assert report["refused"] == [["_linear", "", "OSError: no more processes"]]


def test_closing_does_not_wait(report: Any) -> None:
    assert report["late"] == [] and report["closed"] == [1, -9]


def launch(*args: Any, **constexprs: Any) -> Launch:
    return Launch(_commit_rows, (1,), args, constexprs, 4, 2)


def test_numbers_that_give_the_same_code_are_one_job() -> None:
    """Triton looks at 1, at divisibility by 16 and at the width, and at no other property of a number."""
    same = [(2, 3), (16, 4096), (-16, 0), (1 << 33, 1 << 34), (0.25, 4.0)]
    assert all(Job.of(launch(a), TARGET) == Job.of(launch(b), TARGET) for a, b in same)
    different = [1, 2, 16, 1 << 33, (1 << 33) + 1, 0.5, None]
    assert len({Job.of(launch(value), TARGET) for value in different}) == len(different)
    assert Job.of(launch(2, N=2), TARGET) != Job.of(launch(2, N=3), TARGET)
    assert Job.of(launch(2), TARGET) != Job.of(replace(launch(2), num_warps=8), TARGET)


def test_alignment_of_a_tensor_is_kept() -> None:
    whole = torch.empty(64, dtype=torch.bfloat16, device="meta")
    aligned, odd = (Job.of(launch(tensor), TARGET).args[0] for tensor in (whole[8:], whole[1:]))
    assert aligned == Job.of(launch(whole), TARGET).args[0] and (aligned.offset, odd.offset) == (0, 2)
    assert odd.tensor().data_ptr() % 16 == 2 and odd.tensor().dtype == torch.bfloat16


@triton.jit
def _local(x):
    pass


def test_a_kernel_that_no_other_process_finds_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ahead.KernelCompiler(TARGET, 1)
    monkeypatch.setattr(_local.fn, "__module__", "__main__")
    compiler.take([Launch(_local, (1,), (2,), {}, 4, 2)])
    assert compiler.wait() == []
    compiler.close()


@pytest.mark.parametrize(
    ("cores", "engines", "threads", "processes"),
    [(1, 1, 1, 0), (2, 1, 2, 1), (16, 1, 16, 8), (16, 4, 16, 3), (4, 8, 4, 0), (16, 1, 4, 4), (16, 1, 1, 0)],
)
def test_one_core_is_left_to_each_engine(cores: int, engines: int, threads: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with inductor.patch(compile_threads=threads):
        assert ahead.processes_for(engines) == processes
        if not processes:
            with ahead.compiling_ahead(engines) as wait:
                assert wait() is None
