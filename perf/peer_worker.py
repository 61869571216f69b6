"""Runs an engine of another project in a separate process: JSON lines in, JSON lines out.

It runs under the interpreter of an environment that has the engine, so it imports nothing of graphspec. A request is
``{"prompts": [[id, ...], ...], "max_tokens": n, "fixed": whether n are wanted in any case}``, the answer ``{"tokens": [[id, ...], ...]}``,
greedy; the prompts of a request are one batch. The first line of output is ``{"version": ...}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Batch = list[list[int]]
Generate = Callable[[Batch, int, bool], Batch]


def padded(rows: Batch, filler: int, *, left: bool) -> Batch:
    """Rows of one length."""
    longest = max(map(len, rows))
    fill = [[filler] * (longest - len(row)) for row in rows]
    return [more + row if left else row + more for row, more in zip(rows, fill, strict=True)]


def onnxruntime(folder: str, threads: int, ngram: bool) -> Generate:
    """ONNX Runtime GenAI; with ``ngram``, its n-gram speculation, which takes one prompt at a time."""
    import onnxruntime_genai as engine

    config = engine.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = engine.Model(config)
    own = json.loads(Path(folder, "genai_config.json").read_text(encoding="utf-8"))["model"]
    eos = own["eos_token_id"]
    ends = set(eos if isinstance(eos, list) else [eos])

    def generate(prompts: Batch, max_tokens: int, fixed: bool) -> Batch:
        params = engine.GeneratorParams(model)
        rows = padded(prompts, own["pad_token_id"], left=False)
        length = len(rows[0]) + max_tokens
        params.set_search_options(max_length=length, min_length=length if fixed else 0, do_sample=False, batch_size=len(prompts))
        if ngram:
            params.set_speculative_options(ngram_size=2, max_draft_tokens=4)
        generator = engine.Generator(model, params)
        generator.append_tokens(rows if len(rows) > 1 else rows[0])
        out: Batch = [[] for _ in prompts]
        while not generator.is_done() and len(out[0]) < max_tokens:
            generator.generate_next_token()
            for row, token in zip(out, generator.get_next_tokens(), strict=True):
                row.append(int(token))
        return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in out]

    return generate


def ctranslate2(folder: str, threads: int) -> Generate:
    """CTranslate2 in float32; it takes tokens as text, not ids."""
    import ctranslate2 as engine

    words = json.loads(Path(folder, "vocabulary.json").read_text(encoding="utf-8"))
    model = engine.Generator(folder, device="cpu", compute_type="float32", intra_threads=threads, inter_threads=1)

    def generate(prompts: Batch, max_tokens: int, fixed: bool) -> Batch:
        least = max_tokens if fixed else 0
        tokens = [[words[token] for token in prompt] for prompt in prompts]
        how = {"max_length": max_tokens, "min_length": least, "sampling_topk": 1, "return_end_token": True}
        found = model.generate_batch(tokens, include_prompt_in_result=False, **how)
        return [list(row.sequences_ids[0]) for row in found]

    return generate


def openvino(path: str, threads: int, draft: str = "", **options: Any) -> Generate:
    """OpenVINO GenAI. In its default precision activations are bfloat16 if the processor has it.

    Args:
        path: a folder of its own, or a GGUF file.
        threads: of the CPU.
        draft: a folder of its own, of an EAGLE-3 head that drafts 4 tokens.
        options: of the pipeline; with ``prompt_lookup``, n-grams of up to 3 tokens draft 4.
    """
    import numpy as np
    import openvino as runtime
    import openvino_genai as engine

    drafts = {"draft_model": engine.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=threads)} if draft else {}
    pipeline = engine.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **drafts, **options)

    def generate(prompts: Batch, max_tokens: int, fixed: bool) -> Batch:
        config = engine.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = max_tokens, False, fixed
        if options.get("prompt_lookup"):
            config.max_ngram_size, config.num_assistant_tokens = 3, 4
        elif draft:
            config.num_assistant_tokens = 4
        ids, mask = (np.array(padded(rows, 0, left=True), dtype=np.int64) for rows in (prompts, [[1] * len(row) for row in prompts]))
        inputs = engine.TokenizedInputs(runtime.Tensor(ids), runtime.Tensor(mask))
        return [list(map(int, row)) for row in pipeline.generate(inputs, config).tokens]

    return generate


ENGINES: dict[str, tuple[str, Callable[..., Generate]]] = {
    "ort": ("onnxruntime-genai", lambda folder, threads: onnxruntime(folder, threads, ngram=False)),
    "ort-ngram": ("onnxruntime-genai", lambda folder, threads: onnxruntime(folder, threads, ngram=True)),
    "ct2": ("ctranslate2", ctranslate2),
    "openvino": ("openvino-genai", partial(openvino, INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32")),
    "openvino-own": ("openvino-genai", openvino),
    "openvino-lookup": ("openvino-genai", partial(openvino, prompt_lookup=True)),
}


def main(name: str, folder: str, threads: int, *draft: str) -> None:
    """Answer requests until there are no more; ``draft``: the folder of a draft, if the engine takes one."""
    # The engines' own output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    package, load = ENGINES[name]
    generate = load(folder, threads, *draft)
    answer({"version": importlib.metadata.version(package)})
    for line in sys.stdin:
        request = json.loads(line)
        answer({"tokens": generate(request["prompts"], request["max_tokens"], request["fixed"])})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
