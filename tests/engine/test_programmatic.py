"""Programmatic launch is used if configured, or if the probe has passed on this machine; the probe compares whole engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.engine import programmatic
from graphspec.errors import ConfigError
from graphspec.lab.measure import programmatic as probe

pytest.importorskip("triton")

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for an H200, and an empty cache folder."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(programmatic, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_without_a_verdict_it_is_off() -> None:
    assert programmatic.verdict(CUDA) is None
    assert programmatic.resolve(None, "fused", CUDA) is False


@pytest.mark.parametrize("passed", [False, True])
def test_the_verdict_decides(passed: bool) -> None:
    programmatic.remember(CUDA, passed)
    assert programmatic.verdict(CUDA) is passed
    assert programmatic.resolve(None, "fused", CUDA) is passed
    assert programmatic.resolve(True, "fused", CUDA) is True
    assert programmatic.resolve(False, "fused", CUDA) is False


def test_a_verdict_holds_for_its_gpu_versions_and_kernels_only(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = programmatic.remember(CUDA, True)
    assert path.parent == hopper
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    assert programmatic.verdict(CUDA) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    assert programmatic.verdict(CUDA) is True
    kept = json.loads(path.read_text())
    for key in kept["identity"]:
        path.write_text(json.dumps({**kept, "identity": {**kept["identity"], key: "another"}}))
        assert programmatic.verdict(CUDA) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"passed": true}', "\0", '{"identity": null, "passed": "yes"}'])
def test_an_invalid_verdict_file_is_ignored(hopper: Path, content: str) -> None:
    (hopper / programmatic.FILE).write_text(content)
    assert programmatic.verdict(CUDA) is None


def test_a_folder_that_cannot_be_read_is_no_verdict(hopper: Path) -> None:
    (hopper / programmatic.FILE).mkdir()
    assert programmatic.verdict(CUDA) is None
    (hopper / programmatic.FILE).rmdir()
    hopper.rmdir()
    assert programmatic.verdict(CUDA) is None


def test_older_gpus_refuse_programmatic_launch_and_need_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    programmatic.remember(CUDA, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert programmatic.resolve(None, "fused", CUDA) is False
    with pytest.raises(
        ConfigError, match=r"kernels\.programmatic_launch: expected null or false below compute capability 9\.0, found true"
    ):
        programmatic.resolve(True, "fused", CUDA)


@pytest.mark.parametrize(("mode", "device"), [("reference", "cuda"), ("compiled", "cuda"), ("fused", "cpu")])
def test_other_engines_have_none(mode: str, device: str) -> None:
    programmatic.remember(CUDA, True)
    assert programmatic.resolve(None, mode, torch.device(device)) is False
    assert programmatic.resolve(True, mode, torch.device(device)) is False


def built(log: list[dict[str, Any]], **wrong: Any) -> Any:
    """Makes engines; those that match ``wrong`` give one token another value."""

    class Wrong(LLM):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().generate(*args, **kwargs)
            outputs[1].token_ids[5] += 1
            return outputs

    def build(**keys: Any) -> LLM:
        log.append(keys)
        keys = {**keys, "buckets": [4]}
        return (Wrong if wrong and wrong.items() <= keys.items() else LLM)(**keys)

    return build


def test_the_probe_compares_engines_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is no such launch: every pair is equal, unless one engine is made to be wrong."""
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(probe, "TOKENS", 56)
    monkeypatch.setattr(probe, "SHAPES", {"chain": {**probe.SHAPES["chain"], "num_steps": 2, "num_draft_tokens": 3}})
    log: list[dict[str, Any]] = []
    [finding] = probe.compare(built(log), "cpu", "eager", "reference")
    assert (finding.difference, finding.tokens) == ("", 56 + 40 + 24 + 8)
    assert [keys["programmatic_launch"] for keys in log] == [False, True]
    assert not any(keys["compile_around"] for keys in log), "the comparison takes seconds"
    [finding] = probe.compare(built(log, programmatic_launch=True), "cpu", "eager", "reference")
    assert finding.difference.startswith("request 1, token 5: ")


def test_differences_in_words() -> None:
    assert probe.first_difference([[1, 2]], [[1, 2]]) == ""
    assert probe.first_difference([[1, 2], [3]], [[1, 2], [4]]) == "request 1, token 0: 3 without, 4 with programmatic launch"
    assert probe.first_difference([[1, 2]], [[1]]) == "request 0: 2 tokens without, 1 with programmatic launch"


@pytest.mark.parametrize("differs", [False, True])
def test_the_command_keeps_its_verdict(
    differs: bool, hopper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked: list[bool] = []

    def compare(*, compiled: bool) -> list[probe.Finding]:
        asked.append(compiled)
        return [probe.Finding("tree, float32", 10, "token 3" if differs else "")]

    monkeypatch.setattr(probe, "compare", compare)
    assert probe.main([]) == probe.main(["--compiled"]) == int(differs)
    assert asked == [False, True]
    assert programmatic.verdict(CUDA) is not differs
    assert ("may not be used" if differs else "may be used") in capsys.readouterr().out


def test_without_a_gpu_the_command_reports_it(monkeypatch: pytest.MonkeyPatch, hopper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.main([]) == 2
    assert "no verdict is kept" in capsys.readouterr().out
    assert not any(hopper.iterdir())
