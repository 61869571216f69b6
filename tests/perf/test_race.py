"""Other engines in `make race MODEL=demo`: their processes, and the report of one that can't take part. The engine is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from safetensors.torch import load_file

from perf import peers, speed

PEER = peers.Peer("echo", "Echo", "json", "echo")
WORKER = """
import importlib.metadata, json, runpy, sys
importlib.metadata.version = lambda package: "9.9"
names = runpy.run_path({worker!r})
def load(folder, threads, draft=""):
    first = len(draft) or threads
    print("noise of the engine")
    def generate(prompts, max_tokens, fixed):
        if prompts[0][0] < 0:
            sys.exit("no negative tokens")
        return [[first, *prompt[: max_tokens - 1], *[0] * fixed] for prompt in prompts]
    return generate
names["ENGINES"]["echo"] = ("echo", load)
names["main"](sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    file = tmp_path / "worker.py"
    file.write_text(WORKER.format(worker=str(peers.WORKER)))
    monkeypatch.setattr(peers, "WORKER", file)
    monkeypatch.setattr(peers, "cache_folder", lambda: tmp_path / "cache")
    copy = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(); pathlib.Path(sys.argv[1], 'made').touch()"
    monkeypatch.setattr(peers, "_command", lambda model, python, exporter, source, out: [python, "-c", copy, str(out)])
    source = tmp_path / "checkpoint"
    source.mkdir()
    (source / "config.json").write_text("{}")
    return source


def test_a_peer_answers_batch_by_batch_whatever_it_prints(worker):
    process = peers.PeerProcess(PEER, sys.executable, "none", worker, 3)
    assert process.version == "9.9"
    assert process.generate([[1, 2], [4, 5]], 2) == [[3, 1], [3, 4]]
    assert process.generate([[7, 8]], 3) == [[3, 7, 8]] and process.generate([[7, 8]], 3, fixed=True) == [[3, 7, 8, 0]]
    with pytest.raises(peers.PeerError, match="no negative tokens"):
        process.generate([[-1]], 1)
    process.close()


def test_models_are_converted_once_for_each_checkpoint(worker, monkeypatch):
    first = peers.convert("echo", sys.executable, "none", worker)
    assert (first / "made").is_file() and first.parent.parent.name == "cache"
    with monkeypatch.context() as patch:
        patch.setattr(peers, "_command", lambda *_: pytest.fail("converted again"))
        assert peers.convert("echo", sys.executable, "none", worker) == first
    (worker / "config.json").write_text('{"other": 1}')
    assert peers.convert("echo", sys.executable, "none", worker) != first


def test_a_head_drafts_for_an_engine_that_is_given_its_folder(worker, monkeypatch):
    peer = peers.Peer("echo", "Echo", "json", "echo", head=True)
    with pytest.raises(peers.PeerError, match="it needs an EAGLE-3 head, found none"):
        peers.PeerProcess(peer, sys.executable, "none", worker, 1)
    monkeypatch.setattr(peers, "convert", lambda model, python, exporter, source: source)
    monkeypatch.setattr(peers, "openvino_head", lambda head, folder: head / "made")
    process = peers.PeerProcess(peer, sys.executable, "none", worker, 1, Path("head"))
    assert process.generate([[7, 8]], 2) == [[len("head/made"), 7]]
    process.close()


def test_a_packed_head_becomes_one_that_openvino_exports(tmp_path):
    head = Path(str(files("graphspec"))) / "heads" / "smollm2" / "eagle3"
    made = peers.openvino_head(head, tmp_path)
    config = json.loads((made / "config.json").read_text())
    assert config["hidden_layers_list"] == [1, 14, 28] and config["architectures"] == ["LlamaForCausalLMEagle3"]
    names = set(load_file(made / "model.safetensors"))
    assert {"fc.weight", "lm_head.weight", "midlayer.mlp.up_proj.weight", "d2t"} <= names
    assert "quantization_config" not in config and not any("packed" in name for name in names)


def test_missing_sides_give_the_reason(worker, tmp_path, monkeypatch):
    def start(peer: peers.Peer = PEER, python: str = sys.executable) -> None:
        peers.PeerProcess(peer, python, "none", worker, 1)

    with pytest.raises(peers.PeerError, match=r"not installed: .*no_such_engine"):
        start(peers.Peer("echo", "Echo", "no_such_engine", "echo"))
    with pytest.raises(peers.PeerError, match="no interpreter"):
        start(python=str(tmp_path / "python"))
    monkeypatch.setattr(peers, "_command", lambda *_: [sys.executable, "-c", "import sys; sys.exit('no such architecture')"])
    with pytest.raises(peers.PeerError, match="converter failed: no such architecture"):
        start()
    monkeypatch.setattr(peers, "_command", lambda *_: [str(tmp_path / "optimum-cli")])
    with pytest.raises(peers.PeerError, match="converter doesn't run"):
        start()
    assert not list((tmp_path / "cache" / "race").iterdir()), "nothing half converted stays"


def test_the_rate_of_a_batch_counts_every_row_and_that_of_one_token_the_prompt(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(speed, "PAUSE", 0.0)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: float(next(clock)))
    batches = [[[1] * 8, [2] * 8]]
    first = speed.Decoder("first", lambda prompts: [[5, 6, 7] for _ in prompts])
    other = speed.Decoder("other", lambda prompts: [[5, 6, 0] for _ in prompts], "first")
    speed.measure([first, other], batches, 2)
    assert first.rates == [6.0, 6.0] and first.wrong == 0 and other.wrong == 2
    assert speed.rows([first, other])[1]["tokens_per_second"] is None
    prompt = speed.Decoder("prompt", lambda prompts: [[5] for _ in prompts])
    speed.measure([prompt], batches, 1)
    assert prompt.rates == [16.0]


def test_busy_programs_end_with_the_block(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(speed.subprocess, "Popen", lambda command: started.append(popen(command)) or started[-1])
    with pytest.raises(ZeroDivisionError), speed.busy_programs(2):
        assert [program.poll() for program in started] == [None, None]
        raise ZeroDivisionError
    assert all(program.returncode is not None for program in started)


def test_the_worker_needs_nothing_of_graphspec():
    """It runs where another engine is installed and this package is not."""
    code = f"import runpy, sys; runpy.run_path({str(peers.WORKER)!r}); assert not {{'graphspec', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd=Path("/"))
