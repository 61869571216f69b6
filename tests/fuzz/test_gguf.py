"""Damaged and odd GGUF files: each is refused in one message or becomes a target."""

from __future__ import annotations

import math
import random
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind

from graphspec.facts import read_model_facts
from graphspec.facts.gguf import read_header
from graphspec.facts.gguf_model import gguf_folder
from graphspec.models.target import load_target
from graphspec.text.tokenizer import Tokenizer
from tests.support.checkpoints import build_hf, write_hf
from tests.support.gguf_files import copy_gguf, write_gguf

from ._harness import Case, choose, faults, judge

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
LENGTHS = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
VALUES: list[tuple[Any, ...]] = [
    *((number, Kind.UINT32) for number in (0, 1, 2, 3, 17, 2**31, 2**32 - 1)), (-1, Kind.INT32), (2**64 - 1, Kind.UINT64),
    (True, Kind.BOOL),
    *((number, Kind.FLOAT32) for number in (0.0, -1.0, 1.5, 1e38, math.nan, math.inf)), ("", Kind.STRING), ("x", Kind.STRING),
    ("yarn", Kind.STRING), ("llama", Kind.STRING), ("{{ x", Kind.STRING), ([1], Kind.ARRAY, Kind.UINT32),
    ([0] * 61, Kind.ARRAY, Kind.INT32),
    ([math.nan] * 61, Kind.ARRAY, Kind.FLOAT32), (["a"] * 61, Kind.ARRAY, Kind.STRING), (["a b"], Kind.ARRAY, Kind.STRING),
]  # fmt: skip
KEYS = (
    *(f"llama.{key}" for key in (
        "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
        "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.scale",
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast", "rope.scale_linear", "expert_count", "logit_scale",
    )),
    *(f"tokenizer.ggml.{key}" for key in (
        "model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id",
        "add_bos_token", "add_eos_token", "add_space_prefix",
    )),
    "general.architecture", "general.alignment", "split.count", "tokenizer.chat_template", "tokenizer.chat_template.tool_use",
)  # fmt: skip


class Bench:
    """A good file, and cases that damage copies of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good = folder, folder / "good.gguf"
        source = write_hf(build_hf("llama", tie_word_embeddings=True, **SIZES), folder / "source")
        write_gguf(source, self.good, {"attn_q": Type.Q8_0, "ffn_up": Type.Q4_0}, arch="llama")
        self.data = self.good.read_bytes()
        self.end = min(tensor.begin for tensor in read_header(self.good).tensors.values())

    def case(self, name: str, data: bytes | None = None, key: str = "", value: tuple[Any, ...] = ()) -> Case:
        """The file is ``data``, or a copy with one key replaced."""

        def run() -> object:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            try:
                file = folder / "case.gguf"
                if data is None:
                    copy_gguf(self.good, file, metadata={key: value})
                else:
                    file.write_bytes(data)
                made = gguf_folder(file)
                load_target(read_model_facts(made), (), 16, torch.float32, "cpu")
                return Tokenizer(made).encode("ab a") if (made / "tokenizer.json").exists() else None
            finally:
                shutil.rmtree(folder)

        return Case(name, run)

    def invent(self, rng: random.Random, number: int) -> Case:
        """One more case."""
        kind = rng.choice(("key", "key", "bytes", "length", "cut"))
        if kind == "key":
            key, value = rng.choice(KEYS), rng.choice(VALUES)
            return self.case(f"{number}: {key} = {value!r:.60}", key=key, value=value)
        if kind == "cut":
            length = rng.randrange(len(self.data))
            return self.case(f"{number}: cut to {length} bytes", self.data[:length])
        if kind == "length":
            place, length = rng.randrange(4, self.end - 8), rng.choice(LENGTHS)
            data = self.data[:place] + struct.pack("<Q", length) + self.data[place + 8 :]
            return self.case(f"{number}: {length} at {place}", data)
        damaged = bytearray(self.data)
        places = {rng.randrange(self.end): rng.randrange(256) for _ in range(rng.choice((1, 1, 2, 5)))}
        for place, byte in places.items():
            damaged[place] = byte
        return self.case(f"{number}: bytes {places}", bytes(damaged))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Bench(tmp_path)


def test_damaged_and_odd_files(bench: Bench, request: pytest.FixtureRequest) -> None:
    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    assert not faults(choose([], bench.invent, seed=seed, budget=budget))


def test_an_undamaged_copy_is_accepted(bench: Bench) -> None:
    assert judge(bench.case("undamaged", bench.data)).kind == "accepted"
    context = (64, Kind.UINT32)
    assert gguf.GGUFReader(copy_gguf(bench.good, bench.folder / "copy.gguf", metadata={"llama.context_length": context})).tensors
    assert judge(bench.case("another context", key="llama.context_length", value=context)).kind == "accepted"
