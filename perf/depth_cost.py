"""Cost of an adaptive depth where drafting can't pay: ``python -m perf.depth_cost``.

The demo's EAGLE-3 head gets random weights, so that none of its drafts is accepted, and two engines decode the same prompts in one process:
one with ``adaptive.depths=[0,2]``, one with ``variant=none``. They alternate cycle by cycle, so that a slow phase of the machine affects
both, and share the target's weights, because the location of the weights in memory affects the speed. A ratio is that of their times over a
whole round: it includes prompts, probes, catching up and the host's work for the choice, and in the first round the first trial, which
``--rates`` avoids: the engine is then as ``graphspec tune`` configures it. Both must give the same tokens.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graphspec.api.llm import DEMO, LLM, model_folder
from graphspec.api.outputs import StreamEvent
from graphspec.engine.depth import AdaptiveDepth
from graphspec.engine.request import SamplingParams
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from graphspec.models.layers import Linear
from perf.speed import held_out_prompts

SHAPE: dict[str, Any] = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}
DEPTHS = [0, 2]


def useless_draft(folder: Path) -> Path:
    """Write the demo's EAGLE-3 head to ``folder``, every matrix replaced by noise of the same size."""
    shutil.copytree(model_folder(DEMO).parent / "eagle3", folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim > 1:
                tensors[name] = (torch.randn(tensor.shape, generator=generator) * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, file)
    return folder


def share_weights(source: nn.Module, other: nn.Module) -> None:
    """Make ``other``, a network like ``source``, use the weights of ``source``."""
    other.load_state_dict(source.state_dict(), assign=True)
    for ours, theirs in zip(source.modules(), other.modules(), strict=True):
        if isinstance(ours, Linear) and isinstance(theirs, Linear):
            theirs.packed = ours.packed


class Stopwatch:
    """One side of a round: its tokens by prompt, and the time of its turns.

    Args:
        events: what an engine streams.
        rows: events of one cycle, in which every row commits something.
    """

    def __init__(self, events: Iterator[StreamEvent], rows: int) -> None:
        self.events, self.rows = events, rows
        self.tokens: dict[int, list[int]] = {}
        self.seconds = 0.0

    def turn(self) -> bool:
        """Run one cycle, or the rest of the run; False: the run had ended."""
        started = time.perf_counter()
        events = list(islice(self.events, self.rows))
        self.seconds += time.perf_counter() - started
        for event in events:
            self.tokens.setdefault(event.index, []).extend(event.token_ids)
        return bool(events)


def take_turns(adaptive: LLM, plain: LLM, prompts: list[list[int]], params: SamplingParams, *, plain_first: bool) -> tuple[float, float]:
    """Seconds of both engines over the same prompts.

    Raises:
        SystemExit: their tokens differ.
    """
    sides = [Stopwatch(llm.stream(prompts, params), len(prompts)) for llm in (adaptive, plain)]
    order = sides[::-1] if plain_first else sides
    while sum(side.turn() for side in order):
        pass
    if sides[0].tokens != sides[1].tokens:
        raise SystemExit("the adaptive engine's tokens are not those of plain decoding")
    return sides[0].seconds, sides[1].seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the ratio, write the records to ``perf/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--backlog", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="adaptive.rates, as tune measures them: no first trial")
    parser.add_argument("--runtime", default="compiled", choices=("eager", "compiled"))
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    keys: dict[str, Any] = {"runtime": args.runtime, "max_rows": args.batch, "buckets": [args.batch], "max_context": 512}
    keys["prefix_cache"] = False
    with TemporaryDirectory() as folder:
        draft = useless_draft(Path(folder) / "draft")
        adaptive = LLM(variant="eagle3", draft=draft, **SHAPE, depths=DEPTHS, backlog=args.backlog, rates=args.rates, **keys)
    plain = LLM(variant="none", **keys)
    share_weights(adaptive.cycle.target, plain.cycle.target)
    prompts = held_out_prompts(plain.tokenizer.encode, args.batch, args.prompt_tokens)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True).resolve()
    take_turns(adaptive, plain, prompts, params, plain_first=False)  # compiles
    learned = adaptive.depth_policy
    assert isinstance(learned, AdaptiveDepth)
    adaptive.depth_policy = AdaptiveDepth({args.batch: adaptive.plan.depths_of(args.batch)}, learned.times, args.rates)
    ratios: list[float] = []
    for number in range(args.rounds):
        ours, theirs = take_turns(adaptive, plain, prompts, params, plain_first=number % 2 == 1)
        ratios.append(theirs / ours)
    median, spread = statistics.median(ratios), ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"tokens/s with adaptive depth over plain decoding, {args.batch} rows: {median:.3f}, median of {spread}")
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    figures = {"kind": "depth_cost", "times": learned.times, "adaptive_over_plain": {"median": median, "ratios": ratios}}
    write_jsonl(result_file(args.out, "depth-cost"), [provenance(), settings, figures])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
