"""The process of one revision: builds an engine per workload and runs it on command, using only the revision's public API.

Commands come from standard input and answers go to standard output, one JSON object per line. Other output of the revision goes to standard
error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Revision:
    """The engines of one revision, by workload."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}

    def hello(self) -> dict[str, Any]:
        """The folder of the imported package."""
        import graphspec

        return {"package": str(Path(graphspec.__file__).resolve().parent), "version": getattr(graphspec, "__version__", None)}

    def encode(self, texts: list[str], tokens: int) -> dict[str, Any]:
        """Token ids of ``texts`` by the demo model's tokenizer, repeated to ``tokens`` ids each."""
        from graphspec import LLM

        encode = LLM(model="demo", variant="none", runtime="eager", max_rows=1, buckets=[1]).tokenizer.encode
        return {"prompts": [(ids * (1 + tokens // len(ids)))[:tokens] for ids in map(encode, texts)]}

    def build(self, name: str, keys: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """An engine, warmed up by one pass over ``prompts``."""
        from graphspec import LLM, SamplingParams
        from graphspec.config.schema import RuntimeConfig

        started = time.perf_counter()
        # Prompts repeat and must be read each time; older versions have no such key.
        off = {"prefix_cache": False} if hasattr(RuntimeConfig, "prefix_cache") else {}
        self.engines[name] = (
            LLM(model="demo", **off, **keys),
            prompts,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        self.run(name)
        return {"seconds": time.perf_counter() - started}

    def run(self, name: str) -> dict[str, Any]:
        """All prompts of a workload, one after the other: seconds, and the new tokens of each."""
        llm, prompts, params = self.engines[name]
        started = time.perf_counter()
        outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
        return {"seconds": time.perf_counter() - started, "tokens": [list(output.token_ids) for output in outputs]}


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer until the commands end."""
    revision = Revision()
    for line in commands:
        request = json.loads(line)
        try:
            answer = getattr(revision, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001 - a revision may fail in any way; the other process says so
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        serve(sys.stdin, out)
