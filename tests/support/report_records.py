"""Invented result records in the commands' format, for tests of the report only. No figure in them was measured."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from graphspec.lab.measure.results import Results, read_results

HOSTILE = "</script><img src=x onerror=alert(1)></script /><!--<script \t\"'&amp;\n\u2028é"
PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
CODE = (
    "    with open(path, encoding='utf-8') as file:\n        lines = [line.rstrip('\\n') for line in file]\n    return lines\n\n\n"
    "def write_lines(path, lines):\n    with open(path, 'w', encoding='utf-8') as file:\n"
    "        for line in lines:\n            file.write(line + '\\n')\n"
)
STAGES = {"prepare": 0.03, "draft_extend": 0.14, "draft_step": 0.2, "tree_build": 0.05, "verify": 0.45, "accept": 0.06, "commit": 0.07}


def provenance(*, gpu: bool = False, **more: Any) -> dict[str, Any]:
    gpus = [{"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, "memory_mib": 143771}] if gpu else []
    return {
        "kind": "provenance", "date": "2026-11-21T18:00:00+00:00", "command": ["graphspec", "profile", "experiment=demo_tree"],
        "revision": "534ecac9aaae112a109be31cac07bd742c269963-dirty", "graphspec": "0.1.0.dev0", "python": "3.11.7",
        "platform": "Linux-6.18-x86_64", "torch": "2.13.0+cpu", "triton": None, "transformers": "5.23.0", "numpy": "2.4.6",
        "cuda": "13.0" if gpu else None, "driver": None, "gpus": gpus, "cpu": "Example(R) Processor", "cores": 2, "torch_threads": 2,
        "config": {"model": {"path": "models/demo"}, "profile": {"api_key": "secret-key"}, "variant": {"num_steps": 5}}, **more,
    }  # fmt: skip


def spread(random_: random.Random, middle: float, rounds: int = 5) -> dict[str, Any]:
    values = sorted(middle * random_.uniform(0.95, 1.05) for _ in range(rounds))
    return {"median": values[rounds // 2], "p10": values[0], "p90": values[-1], "rounds": values}


def percentiles(middle: float) -> dict[str, float]:
    return {"mean": middle * 1.06, "p50": middle, "p90": middle * 1.3, "p99": middle * 1.9}


def arrivals(random_: random.Random, cycle: float, maximum: int) -> list[list[float]]:
    """Deliveries of one request of 60 tokens or a few more: the prefill's token, then up to ``maximum`` tokens a cycle."""
    found: list[list[float]] = [[6.0, 1]]
    while sum(tokens for _, tokens in found) < 60:
        found.append([found[-1][0] + cycle * random_.uniform(0.9, 1.1), random_.randint(1, maximum)])
    return found


def side(label: str, role: str, batch: int, speed: float, shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """One measured side; ``speed`` in tokens/s, acceptance falls by a fifth with every position."""
    random_ = random.Random(repr((label, batch)))
    conditional = [random_.uniform(0.72, 0.9) * 0.95**k for k in range(shape[0])] if shape else []
    unconditional = [math.prod(conditional[: k + 1]) for k in range(len(conditional))]
    length = 1 + sum(unconditional)
    own = role in ("subject", "none")
    cycle = 1e3 * length * batch / speed
    gaps = sorted(cycle * random_.lognormvariate(0, 0.12) for _ in range(200))
    bursts = {str(n + 1): round(400 / length * random_.uniform(0.6, 1.4)) for n in range(shape[0] + 1 if shape else 1)}
    record: dict[str, Any] = {
        "kind": "side", "case": f"demo_tree x held_out, batch {batch}", "side": label, "role": role, "shape": shape,
        "variant": "eagle3" if shape else "none" if own else None, "runtime": "compiled" if own else None,
        "attention": "torch" if own else None,
        "dtype": "float32", "device": "cpu", "temperature": 0.0, "ignore_eos": True, "batch": batch, "requests": 8, "input_tokens": 64,
        "output_tokens": 128, "equal": True, "equality": "8 of 8 outputs were those of plain decoding", "synthetic": False, "lossy": False,
        "rounds": 5, "tokens_per_second": spread(random_, speed),
        "tokens_per_second_per_user": spread(random_, speed / batch), "ratio": None,
        "ttft_ms": percentiles(6.0 * batch), "tpot_ms": percentiles(1e3 * batch / speed),
        "itl_ms": {"mean": cycle} | {f"p{at}": gaps[2 * at] for at in (50, 90, 99)},
        "e2e_ms": percentiles(128e3 * batch / speed), "itl_samples_ms": gaps,
        "burst_tokens": bursts, "acceptance_length": length if own else None, "acceptance_unconditional": unconditional,
        "acceptance_conditional": conditional,
        "acceptance_by_request": {str(n): length * random_.uniform(0.7, 1.2) for n in range(8)} if shape else {},
        "acceptance_along_text": [length * random_.uniform(0.85, 1.1) for _ in range(16)] if shape else [],
        "stretch_tokens": 8 if shape else 0, "first_request": arrivals(random_, cycle, shape[0] + 1 if shape else 1),
        "drafted_per_second": 900.0, "accepted_per_second": 500.0, "aborted": 0,
        "cycle_ms": {"median": cycle, "p10": cycle * 0.97, "p90": cycle * 1.05} if own else None, "host_us": 210.0 if own else None,
        "gap_ms": None, "nodes": None, "not_measured": {"gap_ms": "no CUDA device", "nodes": "no CUDA graph on a CPU"},
        "stages": [], "floor_ms": None, "percent_of_floor": None, "bandwidth": 9.1e9 if own else None, "build": [], "memory": [],
    }  # fmt: skip
    if own:
        parts = STAGES if shape else {"prepare": 0.1, "verify": 0.8, "commit": 0.1}
        record["stages"] = [
            {
                "name": name,
                "ms": cycle * share,
                "bytes": int(cycle * share * 5e6),
                "floor_ms": cycle * share * 0.55,
                "percent_of_floor": 55.0,
            }
            for name, share in parts.items()
        ]
        record |= {"floor_ms": cycle * 0.62, "percent_of_floor": 62.0}
        record["build"] = [{"program": f"cycle, {batch} lanes", "warm_up_s": 8.25, "capture_s": None, "bytes": None}]
        record["memory"] = [
            {"name": "weights", "bytes": 19_300_000, "estimate": False}, {"name": "KV pool", "bytes": 8_400_000, "estimate": False},
            {"name": "workspace", "bytes": 64_000_000, "estimate": True},
        ]  # fmt: skip
    return record | more


def ratio(to: str, middle: float) -> dict[str, Any]:
    return {"to": to, "median": middle, "rounds": [middle * factor for factor in (0.97, 0.99, 1.0, 1.02, 1.03)]}


def generation(shape: tuple[int, int, int] = (5, 4, 16), seed: int = 0, text: str = CODE, **more: Any) -> dict[str, Any]:
    """A made-up generation of ``text`` whose trees have the shape's depth, branches and nodes."""
    random_ = random.Random(seed)
    tokens = [text[at : at + 4] for at in range(0, len(text), 4)]
    depth, branches, total = shape
    cycles, at, root = [], 1, tokens[0]
    while at < len(tokens):
        run = min(random_.randint(0, depth), len(tokens) - at - 1)
        nodes = [{"token": 5, "text": root, "parent": -1, "depth": 0, "probability": 1.0, "accepted": True}]
        path = [0]
        for level in range(run):
            nodes.append({"token": level, "text": tokens[at + level], "parent": path[-1], "depth": level + 1,
                          "probability": 0.75 ** (level + 1), "accepted": True})  # fmt: skip
            path.append(len(nodes) - 1)
        children = {node: int(node in path[:-1]) for node in range(len(nodes))}
        while len(nodes) < total:
            free = [n for n in range(len(nodes)) if nodes[n]["depth"] < depth and children[n] < branches]
            if not free:
                break
            parent = random_.choice(free)
            children[parent] += 1
            children[len(nodes)] = 0
            nodes.append({"token": 9, "text": random_.choice(["self", "\n    ", " =", "(x", " return", "\t", "for", "."]), "parent": parent,
                          "depth": nodes[parent]["depth"] + 1, "probability": nodes[parent]["probability"] * random_.uniform(0.02, 0.4),
                          "accepted": False})  # fmt: skip
        emitted = tokens[at : at + run + 1]
        cycles.append({"nodes": nodes, "emitted": emitted})
        at, root = at + run + 1, emitted[-1]
    return {
        "kind": "generation",
        "case": "demo_tree x held_out",
        "side": "eagle3 tree (5,4,16)",
        "prompt": PROMPT + tokens[0],
        "cycles": cycles,
    } | more


def records(*, gpu: bool = False) -> list[dict[str, Any]]:
    """A whole file: four sides over four batches, a sweep of shapes, marked and unequal sides, generations, predictions, a plan."""
    lines = [provenance(gpu=gpu)]
    device = {"device": "cuda" if gpu else "cpu"}
    for batch in (1, 2, 4, 8):
        plain = 528.0 * batch**0.8
        for label, role, factor, shape in (
            ("eagle3 tree (5,4,16)", "subject", 1.55 - 0.13 * math.log2(batch), [5, 4, 16]),
            ("eagle3 chain (4,1,5)", "subject", 1.68 - 0.08 * math.log2(batch), [4, 1, 5]),
            ("none", "none", 1.0, None),
            ("HF generate", "hf", 0.52, None),
        ):
            compared = {"ratio": ratio("none", factor)} if role == "subject" else {}
            lines.append(side(label, role, batch, plain * factor, shape, **compared, **device))
    lines.append(side("HF prompt lookup", "hf_lookup", 1, 399.0, ratio=ratio("HF generate", 1.45), **device))
    lines.append(side("eagle3 accepted to 4.0 (5,4,16)", "subject", 1, 999.0, [5, 4, 16], synthetic=True, lossy=True, equal=None,
                      equality="synthetic acceptance: captured == direct", **device))  # fmt: skip
    lines.append(side("HF assisted", "hf_assisted", 1, 777.5, equal=False, equality="7 of 8 outputs differ from plain decoding", **device))
    for steps in (2, 3, 4, 6):
        for nodes in (4, 8, 32):
            factor = 1.75 - 0.05 * (steps - 4) ** 2 - 0.12 * abs(math.log2(nodes / 8))
            lines.append(side(f"eagle3 tree ({steps},4,{nodes})", "subject", 1, 528 * factor, [steps, 4, nodes],
                              ratio=ratio("none", factor), itl_samples_ms=[], stages=[], burst_tokens={}, build=[], memory=[],
                              **device))  # fmt: skip
    lines += [
        {"kind": "prediction", "case": "demo_tree x held_out", "batch": batch, "shape": [5, 4, 16], "predicted_ms": 4.1 * batch**0.4,
         "measured_ms": 4.3 * batch**0.42, "error": -0.05, "stage": stage}
        for batch in (1, 2, 4, 8) for stage in (None,)
    ]  # fmt: skip
    lines.append({"kind": "prediction", "case": "demo_tree x held_out", "batch": 1, "shape": [5, 4, 16], "predicted_ms": 1.9,
                  "measured_ms": 2.2, "error": -0.136, "stage": "verify"})  # fmt: skip
    lines += [
        {"kind": "plan", "batch": batch, "shape": [5, 4, 16], "floor_ms": 3.0 + batch, "predicted_ms": 3.6 + batch,
         "tokens_per_second": 800.0 * batch**0.6, "acceptance_length": 4.1, "fits": batch < 64}
        for batch in (1, 8, 64)
    ]  # fmt: skip
    lines += [
        generation(),
        generation((6, 4, 64), seed=1, side="eagle3 tree (6,4,64)"),
        generation((16, 1, 17), seed=2, side="eagle3 chain (16,1,17)"),
    ]
    lines.append(generation((2, 2, 5), seed=3, text=HOSTILE * 3, side=f"hostile {HOSTILE}", prompt=HOSTILE))
    lines.append({"kind": "of another day", "anything": 1})
    return lines


def write(folder: Path, lines: list[dict[str, Any]], name: str = "results.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def read(tmp_path: Path, lines: list[dict[str, Any]]) -> Results:
    return read_results([str(write(tmp_path, lines))])
