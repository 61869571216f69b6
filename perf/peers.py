"""Other engines as sides of ``make race``: their requirements, converted models and processes.

``pip install -e ".[race]"`` installs ONNX Runtime GenAI, CTranslate2 and OpenVINO GenAI. They may be in another environment, whose
interpreter is ``--peers PYTHON``. Converted models are kept in the cache folder, by name of the converter and content of the checkpoint.
OpenVINO's converter needs an older transformers than graphspec; ``--exporter PROGRAM`` is the path of its ``optimum-cli``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from graphspec.drafters import convert as layouts
from graphspec.drafters.heads.eagle3_facts import TAP_KEY
from graphspec.host.native_build import cache_folder
from graphspec.models.average import average
from graphspec.models.checkpoint import Checkpoint

WORKER = Path(__file__).with_name("peer_worker.py")


class PeerError(Exception):
    """Why an engine can't take part."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: ``side`` is its name in tables, ``model`` its converter (empty: it reads GGUF), ``batches`` whether it takes batches,
    ``head`` whether an EAGLE-3 head drafts for it.
    """

    name: str
    side: str
    module: str
    model: str
    baseline: str = ""
    batches: bool = True
    head: bool = False


PEERS = (
    Peer("ort", "ONNX Runtime GenAI", "onnxruntime_genai", "ort"),
    Peer("ort-ngram", "ONNX Runtime GenAI, n-gram (2, 4)", "onnxruntime_genai", "ort", "ONNX Runtime GenAI", batches=False),
    Peer("ct2", "CTranslate2", "ctranslate2", "ct2"),
    Peer("openvino", "OpenVINO GenAI", "openvino_genai", "openvino"),
)
_ORT, _OPENVINO = "ONNX Runtime GenAI, int4", "OpenVINO GenAI, int4"
CHAT_PEERS = (
    Peer("openvino-own", "OpenVINO GenAI", "openvino_genai", ""),
    Peer("openvino-lookup", "OpenVINO GenAI, prompt lookup (3, 4)", "openvino_genai", "", "OpenVINO GenAI"),
    Peer("openvino-own", _OPENVINO, "openvino_genai", "openvino-int4"),
    Peer("openvino-own", f"{_OPENVINO}, eagle3 (4)", "openvino_genai", "openvino-int4", _OPENVINO, head=True),
    Peer("ort", _ORT, "onnxruntime_genai", "ort-int4"),
    Peer("ort-ngram", f"{_ORT}, n-gram (2, 4)", "onnxruntime_genai", "ort-int4", _ORT, batches=False),
)
"""Sides of a chat model, in their own precision: OpenVINO reads the same GGUF file; 4 bits of their own were chosen by the converters."""


def _command(model: str, python: str, exporter: str, source: Path, out: Path) -> list[str]:
    """The command line of the converter."""
    if model in ("ort", "ort-int4"):
        precision = "int4" if model == "ort-int4" else "fp32"
        return [python, "-m", "onnxruntime_genai.models.builder", "-m", str(source), "-o", str(out), "-p", precision, "-e", "cpu"]
    if model == "ct2":
        code = "from ctranslate2.converters.transformers import main; main()"
        return [python, "-c", code, "--model", str(source), "--output_dir", str(out), "--force"]
    kind = ("--weight-format", "fp32")
    if model == "openvino-int4":
        # Its network for EAGLE-3 heads counts as remote code.
        kind = ("--weight-format", "int4", "--group-size", "32", "--ratio", "1.0", "--trust-remote-code")
    return [exporter, "export", "openvino", "--model", str(source), "--task", "text-generation-with-past", *kind, str(out)]


def openvino_head(head: Path, folder: Path) -> Path:
    """An EAGLE-3 head as OpenVINO's exporter reads one: numbers, in the layout ``sglang``, with the tapped layers in a key of its own.

    Raises:
        CheckpointError: it can't be read.
        PeerError: it doesn't name its tapped layers.
    """
    stored = Checkpoint(head)
    packed = any(stored.is_packed(name) for name in stored.names())
    numbers = average([head], folder / "numbers", "bfloat16").folder if packed else head
    made = layouts.convert(numbers, folder / "head", "sglang").folder
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    if (taps := config.get("eagle_config", {}).get(TAP_KEY)) is None:
        raise PeerError(f"it needs a head that names its tapped layers, found none in {head}")
    config["hidden_layers_list"] = taps
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def _content(source: Path) -> str:
    """Digest of a checkpoint, since different demo models have the same name."""
    digest = hashlib.sha256()
    for file in sorted(file for file in source.iterdir() if file.suffix in (".json", ".safetensors")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def convert(model: str, python: str, exporter: str, source: Path) -> Path:
    """The folder of a checkpoint in another engine's format; converted unless the cache has it.

    Raises:
        PeerError: the converter is not installed, or failed.
    """
    folder = cache_folder() / "race" / f"{model}-{_content(source)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        out = Path(scratch, "model")
        try:
            done = subprocess.run(_command(model, python, exporter, source, out), capture_output=True, text=True, check=False)
        except OSError as error:
            raise PeerError(f"its converter doesn't run: {error}") from error
        if done.returncode:
            raise PeerError(f"its converter failed: {' '.join(done.stderr.split())[-300:]}")
        config = out / "config.json"
        if model == "ct2":
            # Without an unknown token the converter writes a model that the engine refuses to load; any word will do.
            settings, words = json.loads(config.read_text(encoding="utf-8")), json.loads(Path(out, "vocabulary.json").read_text("utf-8"))
            settings = {name: words[0] if name.endswith("_token") and not value else value for name, value in settings.items()}
            config.write_text(json.dumps(settings), encoding="utf-8")
        with suppress(OSError):  # another process was first
            out.rename(folder)
    return folder


def check_installed(peer: Peer, python: str) -> None:
    """Check that an interpreter has an engine.

    Raises:
        PeerError: it has not.
    """
    try:
        found = subprocess.run([python, "-c", f"import {peer.module}"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"no interpreter: {error}") from error
    if found.returncode:
        raise PeerError(f"not installed: {found.stderr.strip().splitlines()[-1]}")


class PeerProcess:
    """A running worker, with one line per request and per answer.

    Raises:
        PeerError: the engine is not installed for ``python``, or it doesn't start.
    """

    def __init__(self, peer: Peer, python: str, exporter: str, source: Path, threads: int, head: Path | None = None) -> None:
        check_installed(peer, python)
        folders = [convert(peer.model, python, exporter, source) if peer.model else source]
        if peer.head:
            if head is None:
                raise PeerError("it needs an EAGLE-3 head, found none")
            with tempfile.TemporaryDirectory() as scratch:
                folders.append(convert(peer.model, python, exporter, openvino_head(head, Path(scratch))))
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, str(WORKER), peer.name, str(folders[0]), str(threads), *map(str, folders[1:])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self.version: str = self._read()["version"]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, fixed: bool = False) -> list[list[int]]:
        """New tokens of each prompt, all prompts in one batch; ``fixed``: exactly so many, whatever ends a text."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens, "fixed": fixed}) + "\n")
        self._process.stdin.flush()
        return self._read()["tokens"]

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise PeerError(f"it ended: {' '.join(self._errors.read().split())[-300:]}")
        return json.loads(line)


def exporter_of(path: str | None) -> str:
    """``optimum-cli``: ``path``, or the one on the PATH, or its bare name."""
    return path or shutil.which("optimum-cli") or "optimum-cli"
