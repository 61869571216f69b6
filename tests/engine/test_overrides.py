"""Keyword arguments of ``LLM``: what a type checker knows of them is what the configuration has. What objects say of themselves."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest

import graphspec
from graphspec.api.llm import LLM, SamplingParams
from graphspec.api.overrides import Arguments, Overrides
from graphspec.config.schema import Config
from tests.support.engines import CHAIN, mirror_pair, prompts

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = """\
from pathlib import Path
from graphspec import LLM, AsyncLLM
LLM("demo", num_steps=4, buckets=[1, 2], dtype="float32", memory_gib=2, progress=False)
AsyncLLM(model=Path("demo"), draft=None, num_steps=None, tensor_parallel=2)
LLM("demo", num_stepz=4)
LLM("demo", num_steps="4")
AsyncLLM(num_stepz=4)
AsyncLLM(buckets=3)
reveal_type(LLM().generate("x")[0].text)
"""
SKIPPED = "torch,transformers,safetensors,tokenizers,triton,flashinfer,xgrammar,numpy,omegaconf,hydra,rich,huggingface_hub,yaml"


def test_keywords_are_the_keys_of_the_configuration() -> None:
    """Where two groups have a key of one name, the later one has it, as in ``engine_config``."""
    named = [name for name in inspect.signature(LLM.__init__).parameters if name not in ("self", "overrides")]
    expected = {}
    for group in (group for group in fields(Config) if group.name != "sampling"):
        kind = get_type_hints(Config)[group.name]
        expected |= {field.name: get_type_hints(kind)[field.name] for field in fields(kind) if field.name != "name"}
    assert get_type_hints(Overrides) == {name: kind for name, kind in expected.items() if name not in named}
    assert list(Arguments.__annotations__)[: -len(named)] == list(Overrides.__annotations__)
    hints = get_type_hints(LLM.__init__)
    assert {name: get_type_hints(Arguments)[name] for name in named} == {name: hints[name] for name in named}


def test_a_type_checker_knows_them(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    sections = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = true\n" for name in SKIPPED.split(","))
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\n" + sections)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)}, timeout=240)
    found = [line.partition(": ") for line in done.stdout.splitlines() if ": error:" in line or "Revealed" in line]
    assert [where for where, _, _ in found] == [f"snippet.py:{line}" for line in (5, 6, 7, 8, 9)], done.stdout + done.stderr
    assert 'Unexpected keyword argument "num_stepz" for "LLM"; did you mean "num_steps"?' in found[0][2]
    assert 'incompatible type "str"; expected "int | None"' in found[1][2] and 'keyword argument "num_stepz" for "AsyncLLM"' in found[2][2]
    assert 'incompatible type "int"; expected "list[int]"' in found[3][2] and 'is "str"' in found[4][2].replace("builtins.", "")


def test_objects_say_what_they_are_in_one_line(tmp_path: Path) -> None:
    pair = mirror_pair(tmp_path)
    llm = LLM(pair.target, "eagle3", pair.draft, "eager", prefill_chunks=[16], **CHAIN)
    shape = tuple(llm.plan.shape.numbers)
    assert repr(llm) == (
        f"LLM(model={str(pair.target)!r}, variant='eagle3', shape={shape}, runtime='eager', device='cpu', dtype='float32', "
        f"buckets={list(llm.plan.buckets)})"
    )
    outputs = llm.generate([*prompts(2), [10**9]], SamplingParams(max_tokens=5, ignore_eos=True, n=1))
    length = f"{outputs[0].metrics.acceptance_length:.2f}"
    assert repr(outputs[0]) == f"Output(index=0, text='', tokens=5, finish_reason='length', acceptance_length={length})"
    assert repr(outputs[2]).startswith("Output(index=2, text='', tokens=0, finish_reason='error', error=") and len(repr(outputs)) < 600
    long = replace(outputs[1], text="one line\n" * 100, token_ids=[1] * 900, sample=3)
    assert repr(long).startswith(r"Output(index=1, sample=3, text='one line\none line") and len(repr(long)) < 200
    assert "\n" not in repr(outputs) + repr(long)


def test_the_package_names_what_it_offers() -> None:
    assert dir(graphspec) == sorted(graphspec.__all__) and not {"Any", "import_module", "annotations"} & set(dir(graphspec))
    assert {name for name in graphspec.__all__ if getattr(graphspec, name, None) is None} == set()
    with pytest.raises(AttributeError, match=r"no attribute 'SampingParams' \(did you mean SamplingParams\?\); it has LLM, "):
        _ = graphspec.SampingParams
