"""The command ``generate``: reads the requests, runs them together, prints their texts or one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .input import failures, read_requests
from .main import print_errors

if TYPE_CHECKING:
    from ..api.llm import LLM
    from ..api.outputs import Metrics, Output
    from ..config.command_options import LaunchConfig


def run(config: LaunchConfig) -> int:
    """Run the command; returns its exit code, 2 if every request failed."""
    requests = read_requests(config)
    if all(request.error for request in requests):
        return print_errors(failures([request.error for request in requests]))
    from ..api.llm import LLM
    from ..host.progress import progress_bars

    served = {i: (request.prompt, request.params) for i, request in enumerate(requests) if request.params is not None}
    llm = LLM.from_config(config)
    # Checks that need the model's facts, before anything is compiled.
    found = llm.check([prompt for prompt, _ in served.values()], [params for _, params in served.values()])
    errors = {i: request.error for i, request in enumerate(requests)} | dict(zip(served, found, strict=True))
    if all(errors.values()):
        return print_errors(failures(list(errors.values())))
    served = {i: request for i, request in served.items() if errors[i] is None}
    prompts, params = [prompt for prompt, _ in served.values()], [params for _, params in served.values()]
    count = sum(param.n for param in params)
    if config.format == "text" and len(requests) == count == 1:
        for event in llm.stream(prompts[0], params[0]):
            print(event.text, end="", flush=True)
        print()
    else:
        numbers = list(served)
        done: dict[int, list[Output]] = {}
        with progress_bars() as progress:
            for output in llm.generate(prompts, params, progress=progress):
                done.setdefault(numbers[output.index], []).append(output)
        errors |= {i: output.error for i, several in done.items() for output in several if output.finish_reason == "error"}
        _print_outputs(config, [request.headline for request in requests], done, errors, llm)
        print_errors(failures(list(errors.values())))
    if all(errors.values()):
        return 2
    if llm.metrics is not None:
        print(_summary(llm.metrics), file=sys.stderr)
    return 0


def _print_outputs(
    config: LaunchConfig, headlines: Sequence[str], outputs: Mapping[int, Sequence[Output]], errors: Mapping[int, str | None], llm: LLM
) -> None:
    """Print the outputs of every prompt, and in JSON the errors of failed ones."""
    if config.format == "json":
        rows = []
        for i, error in errors.items():
            several = outputs.get(i) or (None,)
            rows += [_row(output, error, i if len(several) > 1 else None) for output in several]
        asked, plan = {"variant": config.variant.name, "model": config.model.path}, llm.plan
        setting = asked | {"runtime": plan.runtime.name, "plan": plan.describe()}
        metrics = asdict(llm.metrics) if llm.metrics is not None else None
        print(json.dumps({"outputs": rows, "metrics": metrics, **setting}, default=str))
        return
    for i, several in outputs.items():
        for output in several if errors[i] is None else ():
            number = i if len(several) == 1 else f"{i}.{output.sample}"
            print(f"--- {number}: {headlines[i]}\n{output.text}")


def _row(output: Output | None, error: str | None, index: int | None) -> dict[str, Any]:
    if output is None:
        return {"text": "", "token_ids": [], "finish_reason": "error", "error": error}
    row: dict[str, Any] = {"text": output.text, "token_ids": list(output.token_ids), "finish_reason": output.finish_reason}
    row |= {"seed": output.seed, "stop_reason": output.stop_reason}
    row |= {} if index is None else {"index": index, "sample": output.sample}
    if output.logprobs is not None:
        row["logprobs"] = [asdict(entry) for entry in output.logprobs]
    return row | ({"error": error} if error is not None else {})


def _summary(metrics: Metrics) -> str:
    mark = "SYNTHETIC acceptance, the text means nothing: " if metrics.synthetic else "LOSSY acceptance: " if metrics.lossy else ""
    return f"{mark}{metrics.tokens_per_second:.1f} tokens/s, {metrics.cycles} cycles, {metrics.acceptance_length:.2f} tokens per cycle"
