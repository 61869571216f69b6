"""`make race` on a chat model: llama.cpp's server as a side, rates by kind of prompt, and what gets no figure."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import pytest

from graphspec.config.catalog import resolve_variant
from graphspec.errors import CheckpointError
from graphspec.facts.folders import shipped_draft
from perf import chat_race, llama_server, peers
from perf.llama_server import LlamaServer, Mode
from perf.peer_worker import padded
from perf.peers import PeerError

SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = sys.argv[1:]
if "--broken" in options:
    sys.exit("error: unknown argument: --broken")

class Handler(BaseHTTPRequestHandler):
    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({{"build_info": "b1-test"}} if self.path == "/props" else {{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and asked["ignore_eos"] and not asked["cache_prompt"]
        if asked["prompt"] == [0]:
            return self.send_error(500, "out of slots")
        number = lambda name: int(options[options.index(name) + 1])
        tokens = [number("-t"), number("-c") // number("-np"), *asked["prompt"]][: asked["n_predict"]]
        self.answer({{"tokens": tokens, "timings": {{"predicted_ms": 250.0}}}})

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(options[options.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "llama-server"
    file.write_text(SERVER.format(python=sys.executable))
    file.chmod(0o755)
    return str(file)


def test_the_server_is_asked_with_token_ids_and_ends_with_its_side(program, tmp_path):
    server = LlamaServer(program, tmp_path / "model.gguf", Mode("plain"), 3, 64, rows=2)
    assert server.version == "b1-test" and server.answer([[5, 6, 7], [8]], 4) == [[3, 64, 5, 6], [3, 64, 8]]
    assert server.decoding() == 0.25
    with pytest.raises(PeerError, match=r"it doesn't answer: .*out of slots"):
        server.answer([[5], [0]], 4)
    server.close()
    assert server._process.poll() is not None


def test_a_server_that_remembers_starts_anew_for_every_round(program, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_race, "MODES", (Mode("plain"), Mode("other", remembers=True)))
    args = Namespace(llama=program, llama_draft=None, threads=1, context=64, batch=1, max_tokens=2, plain=False)
    started = []
    start = LlamaServer._start
    monkeypatch.setattr(LlamaServer, "_start", lambda self: started.append(self.mode.name) or start(self))
    with ExitStack() as stack:
        sides, _ = chat_race.llama_sides(args, tmp_path / "model.gguf", stack)
        chat_race.measure(sides, [("chat", [[4, 5]])], 2)
        assert started == ["plain", "other", "other", "other"]
    assert [len(side.rounds) for side in sides] == [2, 2] and sides[1].equal == [True, True]


def test_a_server_that_does_not_start_is_missing_with_its_own_words(program, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_race, "MODES", (Mode("plain"), Mode("other", ("--broken",))))
    args = Namespace(llama=program, llama_draft="head.gguf", threads=1, context=64, batch=1, max_tokens=3, plain=False)
    with ExitStack() as stack:
        sides, missing = chat_race.llama_sides(args, tmp_path / "model.gguf", stack)
        assert [side.name for side in sides] == ["plain", "llama.cpp, eagle3 (4)"] and sides[0].answer([[4]]) == [[1, 64, 4]]
        assert "unknown argument: --broken" in missing["other"]
        assert chat_race.llama_sides(args, tmp_path, stack)[1]["plain"].startswith("it needs a GGUF file")
    with pytest.raises(PeerError, match="not found"):
        llama_server.server_program(str(tmp_path / "none"))


def test_engines_of_another_interpreter_read_the_file_or_a_copy(tmp_path, monkeypatch):
    """What needs a converter gets the numbers in bfloat16, written once; who can't take part says why."""
    reading, converting = peers.Peer("own", "Reads", "json", ""), peers.Peer("made", "Converts", "json", "echo")
    again, gone = (
        peers.Peer("again", "Converts too", "json", "echo", "Converts", batches=False),
        peers.Peer("gone", "Gone", "no_engine", ""),
    )
    monkeypatch.setattr(chat_race, "CHAT_PEERS", (reading, converting, again, gone))
    monkeypatch.setattr(chat_race, "write_bfloat16", lambda source, folder: copies.append(folder))
    copies, started = [], []

    class Process:
        version = "1"

        def __init__(self, peer, python, exporter, source, threads, head):
            assert exporter == "exporter" and head == Path("head")
            self.peer = peer
            started.append((peer.side, source, threads))

        def generate(self, prompts, max_tokens, *, fixed):
            assert fixed
            return [[self.peer.name, *prompt][:max_tokens] for prompt in prompts]

        def close(self):
            started.append("closed")

    monkeypatch.setattr(chat_race, "PeerProcess", Process)
    args = Namespace(peers=sys.executable, exporter="exporter", draft="head", threads=2, batch=1, max_tokens=2, plain=False)
    folder, file = tmp_path / "model", tmp_path / "model" / "model.gguf"
    with ExitStack() as stack:
        sides, missing = chat_race.peer_sides(args, folder, file, stack)
        assert started == [("Reads", file, 2), ("Converts", copies[0], 2), ("Converts too", copies[0], 2)] and len(copies) == 1
        assert [side.answer([[5, 6], [7]]) for side in sides] == [[[name, 5], [name, 7]] for name in ("own", "made", "again")]
        assert list(missing) == ["Gone"] and "no_engine" in missing["Gone"]
    assert started[3:] == ["closed"] * 3
    with ExitStack() as stack:
        args.batch = 2
        assert chat_race.peer_sides(args, folder, file, stack)[1]["Converts too"] == "it takes one prompt at a time"
    copies[1:] = []
    with ExitStack() as stack:
        args.plain = True
        sides, missing = chat_race.peer_sides(args, folder, folder, stack)
        assert [side.name for side in sides] == ["Converts"] and len(copies) == 1, "a folder of numbers needs no copy"
        assert missing["Reads"] == "it needs a GGUF file, found model"


def test_openvinos_exporter_gets_numbers_and_the_tapped_layers(tmp_path):
    """From codes and from numbers alike; a head that names no tapped layers is a missing side, one that can't be read is an error."""
    shipped = shipped_draft("smollm2", tmp_path, resolve_variant("eagle3"))
    assert shipped is not None and "quantization_config" in json.loads((shipped / "config.json").read_text("utf-8"))
    made = peers.openvino_head(shipped, tmp_path / "codes")
    again = peers.openvino_head(tmp_path / "codes" / "numbers", tmp_path / "plain")
    for head in (made, again):
        config = json.loads((head / "config.json").read_text("utf-8"))
        assert config["hidden_layers_list"] == [1, 14, 28] and "quantization_config" not in config
    config = json.loads((tmp_path / "codes" / "numbers" / "config.json").read_text("utf-8"))
    del config["eagle_config"]
    (tmp_path / "codes" / "numbers" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(PeerError, match="names its tapped layers, found none"):
        peers.openvino_head(tmp_path / "codes" / "numbers", tmp_path / "unnamed")
    (tmp_path / "codes" / "numbers" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError):
        peers.openvino_head(tmp_path / "codes" / "numbers", tmp_path / "unreadable")


def test_rates_are_by_group_and_ours_with_other_tokens_have_none(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(chat_race, "PAUSE", 0.0)
    monkeypatch.setattr(chat_race.time, "perf_counter", lambda: float(next(clock)))
    plain = chat_race.Side("plain", lambda prompts: [[prompt[0], 1, 2] for prompt in prompts], ours=True)
    wrong = chat_race.Side("wrong", lambda prompts: [[9, 1, 2] for _ in prompts], ours=True)
    other = chat_race.Side("other", lambda prompts: [[prompt[0], 1, 2, *([3, 4, 5] if prompt[0] < 7 else [])] for prompt in prompts])
    chat_race.measure([plain, wrong, other], [("chat", [[5]]), ("code", [[7]]), ("chat", [[8]])], 2)
    found = chat_race.records([plain, wrong, other], ["chat", "code"])
    assert found[0]["tokens_per_second"] == {"chat": 3.0, "code": 3.0} and found[0]["equal"] == 1.0
    assert found[1]["tokens_per_second"] is None and found[1]["ratio"] is None
    assert found[2]["ratio"] == {"chat": 1.5, "code": 1.0} and found[2]["equal"] == pytest.approx(2 / 3)
    text = chat_race.table(found, ["chat", "code"])
    assert "| wrong | wrong output | wrong output | 0 % |" in text and "| other | 4 (1.50x) | 3 (1.00x) | 67 % |" in text


def test_sides_are_compared_with_plain_decoding_in_the_same_arithmetic(monkeypatch):
    monkeypatch.setattr(chat_race, "PAUSE", 0.0)
    plain = chat_race.Side("plain", lambda _: [[1], [3]], ours=True)
    rounded = chat_race.Side("rounded", lambda _: [[2], [3]], ours=True)
    rounded.plain = rounded
    right = chat_race.Side("right", lambda _: [[2], [3]], ours=True, plain=rounded)
    wrong = chat_race.Side("wrong", lambda _: [[1], [3]], ours=True, plain=rounded)
    other = chat_race.Side("other", lambda _: [[1], [3]])
    sides = [plain, right, wrong, rounded, other]
    chat_race.measure(sides, [("chat", [[5], [6]])], 2)
    assert [side.equal for side in sides] == [[True] * 4, [True] * 4, [False, True] * 2, [True] * 4, [True] * 4]


@pytest.mark.parametrize("option", ["--every", "--batch", "--rounds", "--max-tokens", "--context"])
def test_counts_below_one_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat_race.main([option, "0"])
    assert f"{option}: expected at least 1, found 0" in capsys.readouterr().err


def test_batches_have_prompts_of_one_group_and_one_size() -> None:
    prompts = [("chat", [1]), ("code", [2]), ("chat", [3]), ("code", [4]), ("chat", [5])]
    assert chat_race.batches(prompts, 1) == [(group, [prompt]) for group, prompt in prompts]
    assert chat_race.batches(prompts, 2) == [("chat", [[1], [3]]), ("code", [[2], [4]]), ("chat", [[5], [1]])]
    with pytest.raises(SystemExit, match="--batch: at most 2, the prompts of code, found 3"):
        chat_race.batches(prompts, 3)


def test_a_side_that_cannot_answer_is_missing_with_its_reason() -> None:
    def broken(_):
        raise PeerError("it ended")

    able, missing = chat_race.warm_up([chat_race.Side("a", lambda rows: rows), chat_race.Side("b", broken)], [[1]])
    assert [side.name for side in able] == ["a"] and missing == {"b": "it ended"}
    able, missing = chat_race.warm_up(able, [[1]], decoding=True)
    assert not able and missing == {"a": "it doesn't tell when its first token came"}


def test_padded_rows_have_one_length() -> None:
    assert padded([[1], [2, 3]], 0, left=True) == [[0, 1], [2, 3]] and padded([[1], [2, 3]], 9, left=False) == [[1, 9], [2, 3]]


def test_prompts_that_are_only_read_are_counted_by_their_tokens(tmp_path, capsys):
    assert chat_race.long_prompts([[1, 2], [3]], 5, "prompts") == [("prompts", [1, 2, 3, 1, 2]), ("prompts", [3, 1, 2, 3, 1])]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"kind": "code", "prompt": f"def {name}("}) + "\n" for name in "ab"))
    words = ["--model", "demo", "--no-hf", "--rounds", "1", "--prompt-tokens", "40", "--raw", "--context", "64", "--out", str(tmp_path)]
    assert chat_race.main([*words, "--prompts", str(prompts)]) == 0
    assert "ngram" not in capsys.readouterr().out, "no drafter reads a prompt faster"
    [file] = tmp_path.glob("*-chat-race.jsonl")
    [plain] = [record for record in map(json.loads, file.read_text().splitlines()) if "tokens_per_second" in record]
    assert set(plain["tokens_per_second"]) == {"prompts"} and plain["tokens_per_second"]["prompts"] > 40, "tokens of the prompt"


def test_decoding_after_a_long_prompt_is_timed_without_it(program, tmp_path, capsys) -> None:
    side = chat_race.Side("plain", lambda rows: [[1, 2, 3]], decoding=lambda: 0.5)
    chat_race.measure([side], [(chat_race.AFTER, [[4] * 100])], 2)
    assert side.rates(chat_race.AFTER) == [4.0, 4.0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"kind": "code", "prompt": "def a("}) + "\n")
    words = ["--model", "demo", "--no-hf", "--rounds", "1", "--prompt-tokens", "40", "--decoding", "--raw", "--context", "128"]
    assert chat_race.main([*words, "--max-tokens", "60", "--prompts", str(prompts), "--out", str(tmp_path)]) == 0
    [file] = tmp_path.glob("*-chat-race.jsonl")
    [plain] = [record for record in map(json.loads, file.read_text().splitlines()) if "tokens_per_second" in record]
    assert plain["side"] == "graphspec, plain" and plain["tokens_per_second"][chat_race.AFTER] > 0
    capsys.readouterr()
    for wrong in (["--decoding"], ["--decoding", "--prompt-tokens", "9", "--batch", "2"]):
        with pytest.raises(SystemExit):
            chat_race.main(wrong)
        assert "--decoding: expected --prompt-tokens, --batch 1 and --max-tokens of at least 2" in capsys.readouterr().err


def test_engines_take_part_with_the_tokens_of_plain_decoding(tmp_path, capsys):
    """The whole command on the demo model in batches, with drafts and transformers."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"kind": kind, "prompt": f"def {kind}("}) + "\n" for kind in ("code", "edit") * 2))
    words = ["--model", "demo", "--llama", str(tmp_path / "none"), "--rounds", "1", "--max-tokens", "8", "--batch", "2"]
    words += ["--shape", "3", "2", "5", "--shape", "3", "2", "6"]
    assert chat_race.main([*words, "--prompts", str(prompts), "--raw", "--context", "128", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "graphspec, ngram chain (2, 1, 3), or [0] steps" in shown and "graphspec, eagle3 tree (3, 2, 6)" in shown
    assert "Missing: llama.cpp: it needs a GGUF file" in shown
    [file] = tmp_path.glob("*-chat-race.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    sides = [line for line in lines if "tokens_per_second" in line]
    ours, other = sides[:-1], sides[-1]
    assert all(side["equal"] == 1.0 and set(side["tokens_per_second"]) == {"code", "edit"} for side in ours)
    assert len(ours) == 1 + len(chat_race.SHAPES["ngram"]) + 2 and other["side"] == "transformers generate, float32"
