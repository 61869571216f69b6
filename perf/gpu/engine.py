"""The whole engine on a GPU, at the shapes of Llama-3.1-8B: ``python -m perf.gpu.engine``.

``perf.gpu.latency`` replays one captured cycle repeatedly. Here requests pass through scheduler, mailbox and ring, with two cycles in
flight, as those of a caller do. Measured are tokens per second from the first token to the last, compared with replay alone in the same
process, and the time to the first token of a prompt of 2048 tokens. Weights are random and acceptance is forced, and every row says so.
Writes one JSONL file into the folder of ``--out``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphspec.api.outputs import summarise
from graphspec.api.prompts import make_requests
from graphspec.engine.engine import Engine
from graphspec.engine.request import Request, SamplingParams
from graphspec.lab.measure.provenance import ROOT, provenance, result_file
from perf.gpu.bench import Bench, Case, write_configs
from perf.gpu.latency import CHAIN, PLAIN, TREE
from perf.gpu.results import append, tree_digest

PROMPT, TOKENS = 2048, 512
REPEATS = 5
CASES = (
    Case("tree (5,4,8)", TREE),
    Case("chain (7,1,8)", CHAIN),
    Case("none", PLAIN),
    Case("tree (5,4,8)", TREE, lanes=8),
    Case("none", PLAIN, lanes=8),
)


class WholeEngine:
    """An engine over the cycle of a :class:`Bench`.

    Args:
        bench: the cycle, its plan and its networks.
        prompt: tokens of each prompt.
        tokens: new tokens of each request.
    """

    def __init__(self, bench: Bench, prompt: int = PROMPT, tokens: int = TOKENS) -> None:
        self.bench, self.prompt, self.tokens = bench, prompt, tokens
        self.engine = Engine(bench.cycle)

    def serve(self, count: int, tokens: int) -> list[Request]:
        """Run ``count`` requests with random prompts to their end.

        Raises:
            RuntimeError: a request did not get all its tokens.
        """
        plan, generator = self.bench.plan, torch.Generator().manual_seed(0)
        prompts = torch.randint(5, min(1000, plan.target.vocab_size), (count, self.prompt), generator=generator).tolist()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True).resolve()
        requests = make_requests(prompts, params, plan, _no_text)
        self.engine.run(requests)
        short = [(request.finish_reason, request.error, len(request.output)) for request in requests if len(request.output) != tokens]
        if short:
            raise RuntimeError(f"expected {tokens} tokens of every request, found {short}")
        return requests

    def throughput(self, repeats: int = REPEATS) -> dict[str, Any]:
        """Tokens per second with as many requests as the case has lanes, and of the same program replayed back to back."""
        case, plan = self.bench.case, self.bench.plan
        self.serve(case.lanes, self.tokens)
        found = [summarise(self.serve(case.lanes, self.tokens), plan) for _ in range(repeats)]
        speed = statistics.median(one.tokens_per_second for one in found)
        length = found[-1].acceptance_length
        replay_ms = self.bench.milliseconds()["median"]
        replay = 1e3 * case.lanes * length / replay_ms
        return {
            "kind": "engine",
            "tokens_per_second": speed,
            "replay_tokens_per_second": replay,
            "percent_of_replay": 100 * speed / replay,
            "milliseconds_per_cycle": 1e3 * case.lanes * length / speed,
            "replay_milliseconds": replay_ms,
            "acceptance_length": length,
        }

    def first_token(self, repeats: int = REPEATS) -> dict[str, Any]:
        """Time to the first token of one prompt, in an idle engine."""
        self.serve(1, 1)
        times = []
        for _ in range(repeats):
            metrics = self.serve(1, 1)[0].metrics
            assert metrics.first_token is not None
            times.append(1e3 * (metrics.first_token - metrics.arrived))
        return {
            "kind": "first_token",
            "milliseconds": statistics.median(times),
            "least": min(times),
            "most": max(times),
            "prefill_chunks": list(self.bench.plan.prefill_chunks),
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """The measurements of this case, in order."""
        case = self.bench.case
        record = {
            "case": case.name,
            "lanes": case.lanes,
            "prompt_tokens": self.prompt,
            "cycles_in_flight": self.bench.plan.cycles_in_flight,
        }
        record["synthetic"] = case.shape.num_steps > 0
        for name, measure in (("first token", self.first_token), ("engine", self.throughput)):
            if name == "first token" and case.lanes > 1:
                continue
            yield {**measure(), **record, "task": f"{name}, {case.name} x{case.lanes}"}


def _no_text(text: object) -> list[int]:
    raise TypeError(f"expected token ids, found {text!r}")


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if row["kind"] == "engine":
        return f"{row['task']:36} {row['tokens_per_second']:.0f} tokens/s, {row['percent_of_replay']:.0f} % of replay alone"
    if row["kind"] == "first_token":
        return f"{row['task']:36} {row['milliseconds']:.1f} ms for {row['prompt_tokens']} tokens"
    return f"{row['task']:36} {row['kind']}: {str(row['error']).splitlines()[0][:160]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every case gave its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file (default: perf/results)")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no further case after this time (default: 200)")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens of a prompt (default: {PROMPT})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"new tokens of a request (default: {TOKENS})")
    parser.add_argument("--runtime", default="captured", help="preset of the runtime (default: captured)")
    parser.add_argument("--device", default="cuda", help="cuda; on cpu nothing here means anything")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was run, nothing is claimed")
        return 0
    file, began, sound, networks = result_file(options.out, "gpu-engine"), time.monotonic(), True, None
    append(file, {**provenance(), "tree": tree_digest()})

    def put(row: dict[str, Any]) -> None:
        append(file, row)
        print(line(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        configs = write_configs(Path(folder))
        build = partial(Bench, device=options.device, runtime=options.runtime)
        for case in CASES:
            task = f"{case.name} x{case.lanes}"
            if time.monotonic() - began > options.seconds:
                put({"kind": "not_run", "task": task, "error": f"{options.seconds:.0f} seconds were over"})
                sound = False
                continue
            bench = None
            try:
                bench = build(case, *configs, networks=networks)
                networks = bench.networks
                for row in WholeEngine(bench, options.prompt, options.tokens).rows():
                    put(row)
            except Exception as error:  # noqa: BLE001 - one case that fails must not cost the others their figures
                put({"kind": "failed", "task": task, "error": f"{type(error).__name__}: {error}"[:2000]})
                sound = False
            del bench
            gc.collect()
    print(f"written to {file}")
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
