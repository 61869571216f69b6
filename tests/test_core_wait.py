"""Detection of a busy machine during measurements."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graphspec.host import core_wait
from graphspec.host.core_wait import BUSY, CoreWait, busy_caution, thread_waits


def threads(folder: Path, waited: dict[str, int]) -> None:
    """As the kernel shows them: nanoseconds on a core, nanoseconds in line, turns."""
    for name, nanoseconds in waited.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "schedstat").write_text(f"123 {nanoseconds} 7\n", encoding="ascii")


def test_threads_add_up_and_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_wait, "TASKS", tmp_path)
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    threads(tmp_path, {"1": 1_000_000_000, "2": 500_000_000})
    (tmp_path / "3").mkdir()
    assert sum((thread_waits() or {}).values()) == 1.5e9
    watch = CoreWait()
    threads(tmp_path, {"1": 1_500_000_000, "2": 2_500_000_000})
    now[0] += 2.0
    assert watch.share() == 1.25
    (tmp_path / "2" / "schedstat").unlink()
    assert watch.share() == 0.25, "what an ended thread had waited is gone, and takes nothing from the others"
    threads(tmp_path, {"1": 900_000_000, "4": 100_000_000})
    assert watch.share() == 0.05, "another thread has the number of one that ended"


@pytest.mark.parametrize("shown", ["no folder", "no file", "0 0 0\n"])
def test_a_system_without_wait_times(shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_wait, "TASKS", tmp_path / "task")
    if shown != "no folder":
        (tmp_path / "task" / "1").mkdir(parents=True)
    if shown.startswith("0"):
        (tmp_path / "task" / "1" / "schedstat").write_text(shown, encoding="ascii")
    assert thread_waits() is None
    assert CoreWait().share() is None
    assert busy_caution({"x": None}) is None


@pytest.mark.skipif(thread_waits() is None, reason="the system does not tell")
def test_a_core_shared_with_another_program_is_noticed() -> None:
    cores = os.sched_getaffinity(0)
    spinner = f"import os\nos.sched_setaffinity(0, {{{min(cores)}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spinner], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            os.sched_setaffinity(0, {min(cores)})
            watch, end = CoreWait(), time.perf_counter() + 1.0
            while time.perf_counter() < end:
                pass
            share = watch.share()
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()
    assert share is not None and share > BUSY
    assert busy_caution({"spin": share}) is not None


@pytest.mark.skipif(thread_waits() is None, reason="the system does not tell")
def test_more_threads_than_cores_wait_for_themselves() -> None:
    """No other program is involved, so the warning must not claim it."""
    cores, stop = os.sched_getaffinity(0), threading.Event()

    def spin() -> None:
        # Outside the interpreter's lock, as an engine's threads are.
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()

    os.sched_setaffinity(0, {min(cores)})
    spinning = [threading.Thread(target=spin) for _ in range(3)]
    try:
        watch = CoreWait()
        for thread in spinning:
            thread.start()
        stop.wait(1.0)
        share = watch.share()
    finally:
        stop.set()
        for thread in spinning:
            thread.join()
        os.sched_setaffinity(0, cores)
    assert share is not None and share > BUSY
    assert "more threads than cores" in str(busy_caution({"spin": share}))


def test_the_warning_names_the_sides_that_waited() -> None:
    assert busy_caution({"a": 0.0, "b": BUSY}) is None
    reported = busy_caution({"eagle3": 0.62, "none": 0.01, "hf": 1.34})
    assert reported is not None and reported.startswith("Other programs kept the processor busy, or there are more threads than cores.")
    assert "per second timed: eagle3 0.62, hf 1.34." in reported and "none" not in reported
