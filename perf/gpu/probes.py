"""Probes of a GPU machine: ``python -m perf.gpu.probes`` tries every part once, on small inputs, each in its own process.

Probed are kernels against their references, a capture that works and two that fail, engines with every kind of kernels against the eager
one, and the profiler. Probes show what is broken, with its message; only the tests show that everything is right. A probe that crashes or
hangs costs the others only time, and there is one deadline for all. ``--only NAME...`` runs some, ``--list`` names them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from graphspec.kernels import op_of
from perf.gpu.processes import run_command

SECONDS = 150.0
"""Seconds for all probes together; then running ones are killed, and no more are started."""
SHORTEST = 15.0
"""A probe is not started with fewer seconds left: imports alone may take that long."""
AT_ONCE = 12
ESSENTIAL = ("device", "graph", "engine-reference")
"""If one of these fails, no later result is meaningful."""
EARLY = (*ESSENTIAL, "engine-classes")
"""What runs before anything is measured, with the kernels."""
MANY_PROGRAMS = ("engine-classes", "engine-defaults")
"""Probes whose Triton kernels are compiled by several processes; the others have one core each."""
MIN = {"engine-defaults": 150.0}
"""Seconds without which a probe is not started, where :data:`SHORTEST` are too few: it compiles every program of an engine on one core."""
KERNEL = "kernel-"
"""Prefix of the names of probes of single kernels."""
PROMPT = [11, 45, 210, 7, 93, 18, 400, 31, 5, 77, 64, 12]
OPTIONS = {"device": "cuda", "dtype": "float32", "max_rows": 2, "buckets": [1, 2], "prefill_chunks": [16], "sampling_classes": []}
SHAPES: dict[str, dict[str, Any]] = {
    "none": {"variant": "none"},
    "chain": {"variant": "eagle3", "num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    "tree": {"variant": "eagle3", "num_steps": 5, "topk": 4, "num_draft_tokens": 16},
}


def device() -> str:
    """A device is present, multiplies matrices, and copies memory both ways."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    left = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    assert (left @ left).isfinite().all(), "a matrix product is not finite"
    pinned = torch.arange(1000, pin_memory=True)
    there, back, event = torch.empty(1000, dtype=torch.int64, device="cuda"), torch.zeros(1000, dtype=torch.int64, pin_memory=True), None
    there.copy_(pinned, non_blocking=True)
    back.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert torch.equal(pinned, back), "pinned memory came back changed"
    free = torch.cuda.mem_get_info()[0] / 2**30
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}, Python {sys.version.split()[0]}"
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {free:.0f} GiB free; {versions}"


def graph() -> str:
    """Captures in one pool: one that works, one that waits for the device, one that runs out of memory, one more; events time a replay."""
    import torch

    from graphspec.graphs.capture import Capturer, ran_out_of_memory

    capturer: Any = Capturer(SimpleNamespace(device=torch.device("cuda")))  # type: ignore[arg-type]
    x, marks = torch.zeros(1 << 20, device="cuda"), [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]

    def adds() -> None:
        marks[0].record()
        x.add_(x * 0 + 1)
        marks[1].record()

    def waits() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()

    def needs() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**50, dtype=torch.uint8, device="cuda")

    kept = [capturer.capture(adds)]
    for wrong, memory in ((waits, False), (needs, True)):
        try:
            capturer.capture(wrong)
        except Exception as error:  # noqa: BLE001 - the probe checks which error it is
            assert ran_out_of_memory(error) == memory, f"taken for {'other' if memory else 'missing memory'}: {error!r}"
        else:
            raise AssertionError(f"{wrong.__name__}: captured, though it can't be")
    kept.append(capturer.capture(adds))
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "a capture left its stream current"
    x.zero_()
    for replay in (*kept, *kept):
        replay()
    torch.cuda.synchronize()
    assert (x == 4).all(), f"four replays added {x[0].item()}"
    began = time.perf_counter()
    for _ in range(1000):
        kept[0]()
    host = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    return f"replay: host {host:.1f} us, marks {1e3 * marks[0].elapsed_time(marks[1]):.1f} us apart"


def kernel(name: str, implementation: str) -> str:
    """An op's implementation against its reference, on its first case."""
    import torch

    from tests.kernels.cases import cases_of

    op = op_of(name)
    case = cases_of(op, torch.Generator().manual_seed(0))[0]

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        given = {k: v.cuda().clone() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        result = op.call(function, given)
        results = result if isinstance(result, tuple | list) else [result]
        tensors = [t for t in (*results, *(given.get(name) for name in op.mutates)) if isinstance(t, torch.Tensor)]
        # The dummy page of a KV pool has arbitrary content.
        return [t[:, :, 1:] if t.dim() == 6 else t for t in tensors]

    worst = 0.0
    for number, (found, expected) in enumerate(zip(run(op.implementation(implementation)), run(op.reference), strict=True)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), f"result {number}: {found.dtype} {list(found.shape)}"
        if not found.is_floating_point():
            different = int((found != expected).sum())
            assert not different, f"result {number}: {different} of {found.numel()} elements differ"
            continue
        assert torch.equal(found.isfinite(), expected.isfinite()), f"result {number}: not finite elsewhere than the reference"
        finite = expected.isfinite()
        scale = max(1e-6, float(expected[finite].abs().max())) if finite.any() else 1.0
        apart = float((found - expected)[finite].abs().max()) / scale if finite.any() else 0.0
        allowed = 1e-4 if found.dtype == torch.float32 else 3e-2
        assert apart <= allowed, f"result {number}: {apart:.2e} of the largest value apart, at most {allowed:g}"
        worst = max(worst, apart)
    return f"{worst:.1e} apart" if worst else "equal"


def tokens(shape: str, runtime: str, **keys: Any) -> tuple[Any, list[list[int]]]:
    """An engine of the demo model, and its tokens for two prompts."""
    from graphspec.api.llm import LLM
    from graphspec.engine.request import SamplingParams

    llm = LLM(runtime=runtime, **{**OPTIONS, **SHAPES[shape], **keys})
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True).resolve() for t in (0.0, 0.8)]
    return llm, [out.token_ids for out in llm.generate([PROMPT, PROMPT[:5]], params)]


def engine(shape: str, mode: str, **keys: Any) -> str:
    """A captured engine gives the tokens of the eager one."""
    _, expected = tokens(shape, "eager", mode="reference")
    llm, found = tokens(shape, "captured", mode=mode, **keys)
    assert found == expected, f"tokens differ: {found} against {expected}"
    report = llm.capture_report()
    built, captured = sum(r.warm_up_seconds for r in report), sum(r.capture_seconds or 0 for r in report)
    return f"tokens equal; {len(report)} programs built in {built:.1f} s, captured in {captured:.1f} s"


def classes() -> str:
    """An engine compiles the classes of requests that it prepares by default, and serves one request of each."""
    from graphspec.api.llm import LLM

    with _kernels_found() as found:
        llm = LLM(max_rows=1, buckets=[1], prefill_chunks=[16])
        served = _served(llm)
    return f"{served}; {sum(found)} of {len(found)} kernels compiled before their launch"


def defaults() -> str:
    """An engine loads with no setting at all."""
    from graphspec.api.llm import LLM

    return _served(LLM())


@contextmanager
def _kernels_found() -> Iterator[list[bool]]:
    """Whether Triton found each kernel of ours in its cache, in the order in which they were launched."""
    import triton

    found: list[bool] = []

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        if getattr(getattr(src, "fn", None), "__module__", "").startswith("graphspec"):
            found.append(cache_hit)

    triton.knobs.compilation.listener = listen
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = None


def _served(llm: Any) -> str:
    from graphspec.engine.request import SamplingParams
    from graphspec.graphs.programs import describe_class

    several = {"temperature": 0.8, "seed": 3, "top_k": 40, "repetition_penalty": 1.1, "bad_words": ["no such word"], "logprobs": 2}
    for keys in ({}, several):
        [output] = llm.generate([PROMPT], SamplingParams(max_tokens=24, ignore_eos=True, **keys))
        assert len(output.token_ids) == 24, f"{len(output.token_ids)} tokens of 24, with {keys or 'defaults'}"
    report = llm.capture_report()
    for wanted in map(describe_class, llm.plan.sampling_classes):
        assert any(record.name.endswith(f", {wanted}") for record in report), f"no program of the class {wanted}"
    built = sum(record.warm_up_seconds for record in report)
    return f"{len(report)} programs built in {built:.1f} s; {llm.plan.num_pages - 1} pages of {llm.plan.page_size} tokens"


def profiler() -> str:
    """Torch's profiler sees the nodes of a replay, and events between the stages give times."""
    import torch

    from graphspec.graphs.stages.mailbox import Message
    from graphspec.lab.measure.recorder import inert, stage_timer
    from graphspec.lab.measure.stages import kernel_timeline
    from graphspec.shapes import GREEDY

    llm, _ = tokens("tree", "captured", mode="reference")
    cycle, key = llm.cycle, llm.plan.key(2, GREEDY)
    llm.warm_up(2)
    timer = stage_timer(cycle, key)
    cycle.read(cycle.launch(key, Message(lanes=())))
    with inert(cycle):
        timer()
        torch.cuda.synchronize()
        found = kernel_timeline(cycle.programs[key], lambda: None)
    times = timer.milliseconds()
    assert len(times) == len(cycle.programs[key].stages) and all(time > 0 for time in times), f"stages: {times}"
    assert found["nodes"] > 10, f"the profiler saw {found['nodes']} nodes"
    return f"{found['nodes']} nodes, {found['gap_ms']:.3f} ms of gaps; stages {sum(times):.3f} ms"


def all_probes() -> dict[str, Callable[[], str]]:
    """Every probe by name, the most informative first."""
    from graphspec.kernels import OPS

    found: dict[str, Callable[[], str]] = {"device": device, "graph": graph}
    found["engine-reference"] = partial(engine, "tree", "reference")
    for shape in ("none", "tree", "chain"):
        found[f"engine-fused-{shape}"] = partial(engine, shape, "fused")
    found["engine-compiled"] = partial(engine, "tree", "compiled")
    found["engine-debug"] = partial(engine, "tree", "fused", debug=True)
    found["engine-classes"], found["engine-defaults"] = classes, defaults
    found["engine-ahead"] = partial(engine, "chain", "reference", cycles_in_flight=3)
    found["profiler"] = profiler
    for op in OPS:
        for implementation in op.fused_names:
            found[f"{KERNEL}{op.name}{'' if implementation == 'fused' else '-law'}"] = partial(kernel, op.name, implementation)
    return found


def early_probes(names: Iterable[str]) -> list[str]:
    """The probes that run before anything is measured: :data:`EARLY`, then those of the kernels."""
    return [name for name in names if name in EARLY] + [name for name in names if name.startswith(KERNEL)]


def attempt(name: str, ends: float) -> dict[str, Any]:
    """Run one probe in its own process; returns ``name``, ``outcome`` (passed, failed or not_run), ``seconds``, ``message``.

    Args:
        name: of the probe.
        ends: its deadline by ``time.monotonic``.
    """
    began, record = time.monotonic(), {"kind": "probe", "name": name}
    seconds = ends - began
    if seconds < MIN.get(name, SHORTEST):
        return {**record, "outcome": "not_run", "seconds": 0.0, "message": "the seconds for all probes were over"}
    threads = "4" if name in MANY_PROGRAMS else "1"
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": threads, "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory() as folder:
        printed, errors = Path(folder) / "out", Path(folder) / "err"
        code = run_command(
            [sys.executable, "-m", "perf.gpu.probes", "--probe", name], seconds, printed, errors=errors, environment=environment
        )
        output, wrong = (file.read_text(encoding="utf-8", errors="replace").strip() for file in (printed, errors))
    if code == 0:
        message = output
    else:
        why = f"exit code {code}" if code is not None else f"not over after {seconds:.0f} seconds"
        message = f"{why}: {wrong[-3000:]}"
    outcome = "passed" if code == 0 else "failed"
    return {**record, "outcome": outcome, "seconds": round(time.monotonic() - began, 1), "message": message}


def try_all(names: Iterable[str], put: Callable[[dict[str, Any]], None], seconds: float = SECONDS) -> bool:
    """Run probes, several at once, within ``seconds``; ``put`` gets each record as it comes. True when all passed."""
    sound, ends = True, time.monotonic() + seconds
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        for done in as_completed([pool.submit(attempt, name, ends) for name in names]):
            put(done.result())
            sound &= done.result()["outcome"] == "passed"
    return sound


def line(record: dict[str, Any]) -> str:
    """A record as a line of text; for a failure with the last line of its message."""
    words = record["message"].strip().splitlines()
    return f"{record['outcome']:7} {record['seconds']:6.1f} s  {record['name']:24} {words[-1][:160] if words else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0: every probe passed."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.probes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these probes")
    parser.add_argument("--list", action="store_true", help="name the probes, run none")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of them (default: {SECONDS:.0f})")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    known = all_probes()
    for name in (options.only or []) + ([options.probe] if options.probe else []):
        if name not in known:
            parser.error(f"expected one of {', '.join(known)}, found {name!r}")
    if options.list:
        print("\n".join(known))
        return 0
    if options.probe:
        print(known[options.probe]())
        return 0

    def put(record: dict[str, Any]) -> None:
        print(line(record), flush=True)
        if record["outcome"] != "passed":
            print(json.dumps(record["message"])[:1500], flush=True)

    return 0 if try_all(options.only or known, put, options.seconds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
