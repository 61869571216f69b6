"""Fused kernels compiled ahead of time: nothing spills, and registers and shared memory are as committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphspec.kernels import OPS
from tests.kernels.proof import aot

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = json.loads(aot.TABLE.read_text())


def test_the_kernels_compile_to_the_committed_table() -> None:
    """In a separate process: here Triton interprets, and interpreted kernels can't be compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.proof.aot"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_nothing_in_the_table_spills() -> None:
    assert aot.spilling(COMMITTED["kernels"]) == []
    assert max(used["shared"] for used in COMMITTED["kernels"].values()) <= 227 * 1024


def test_every_fused_op_is_in_the_table() -> None:
    places = [op.implementations[name] for op in OPS for name in op.fused_names]
    files = {place.partition(":")[0].rpartition(".")[2] for place in places}
    # Two ops in one launch.
    assert files | {"linear_kv_write"} == {name.partition("/")[0] for name in COMMITTED["kernels"]}


def test_a_spill_is_found() -> None:
    used = {"registers": 255, "stack": 0, "local": 0, "shared": 0, "warps": 4}
    assert aot.spilling({"a": used, "b": {**used, "stack": 8}, "c": {**used, "local": 1}}) == ["b", "c"]


def test_named_files_are_written_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"registers": 20, "stack": 0, "local": 0, "shared": 0, "warps": 4}
    table = tmp_path / "table.json"
    table.write_text(json.dumps(COMMITTED))
    monkeypatch.setattr(aot, "TABLE", table)
    monkeypatch.setattr(aot, "INTERPRETED", False)
    monkeypatch.setattr(aot, "compile_all", lambda files, jobs: {f"{file}/new/{file}": used for file in files})
    assert aot.main(["take_last", "--write"]) == 0
    written = json.loads(table.read_text())["kernels"]
    others = {name: row for name, row in COMMITTED["kernels"].items() if not name.startswith("take_last/")}
    assert written == others | {"take_last/new/take_last": used}
    files = [name.partition("/")[0] for name in written]
    assert files == sorted(files)


def test_interpreted_kernels_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "INTERPRETED", True)
    with pytest.raises(SystemExit):
        aot.main([])
    assert "TRITON_INTERPRET" in capsys.readouterr().err
