"""A chat model on a CPU against llama.cpp, OpenVINO, ONNX Runtime and transformers, by kind of prompt: ``make race``.

Every side answers the prompts of ``perf/prompts/chat.jsonl`` (five of each of eight kinds; in the last kind the answer repeats much of the
prompt) one at a time, or in batches of ``--batch`` of one column, greedy, with a fixed number of new tokens. Sides take turns batch by
batch, so that a slow phase of the machine affects all of them. The last batch of a column is filled up with its first prompts, which then
count twice. A rate is new tokens by wall time, the prompts included; a side's figure is the median over rounds, its ratio the median over
rounds of the ratio to plain decoding. With ``--prompt-tokens`` a rate is prompt tokens by the time of an answer of one token, or, with
``--decoding`` too, the new tokens after such a prompt by the time from the first of them to the last.

Ours take part once for each ``--activations``, and must give the tokens of plain decoding with the same ones; a side that does not has
no figure. The others round activations, choose 4 bits of their own or sum in another order, so of theirs the share of prompts with the
tokens of our first side is reported.

llama.cpp is ``llama-server`` on the PATH or ``--llama PROGRAM``. It reads the same GGUF file; without one it is left out. Its ``ngram-mod``
drafts from its answers to earlier requests, so its server starts anew for every round. OpenVINO GenAI and ONNX Runtime GenAI are those of
the interpreter ``--peers`` (:mod:`perf.peers`). With OpenVINO's exporter (``--exporter``), its own 4 bits take part too, plainly and with
our EAGLE-3 head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphspec.api.llm import LLM
from graphspec.config.catalog import resolve_variant
from graphspec.config.schema import ACTIVATIONS
from graphspec.engine.request import SamplingParams
from graphspec.errors import CheckpointError
from graphspec.facts.folders import model_folder, shipped_draft, shipped_drafts
from graphspec.host.core_wait import CoreWait, busy_caution
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from perf.llama_server import MODES, LlamaServer, eagle3, server_program
from perf.peer_worker import padded
from perf.peers import CHAT_PEERS, PeerError, PeerProcess, check_installed, exporter_of
from perf.same_bits import write_bfloat16
from perf.speed import busy_programs

PROMPTS = ROOT / "perf" / "prompts" / "chat.jsonl"
GROUPS = {"chat": ("question", "explain", "story", "numbers", "advice", "list"), "code": ("code",), "edit": ("edit",)}
"""Columns of the table, and the kinds of prompts in each."""
LONG = "prompts"
"""The group of prompts that are only read."""
AFTER = "after a prompt"
"""The group of long prompts whose answers are timed without them."""
OURS = "graphspec"
WARM_UP_TOKENS = 4
"""Of a prompt that a server answers after it has forgotten: too few to give an answer that is measured."""
PAUSE = 0.02
"""Seconds between two sides: threads of the previous one may still be spinning."""
SHAPES: dict[str, tuple[tuple[tuple[int, int, int], list[int]], ...]] = {
    "ngram": (((2, 1, 3), [0]), ((6, 1, 7), [0, 2]), ((3, 1, 4), [])),
    "eagle3": (((1, 1, 2), []), ((2, 1, 3), []), ((3, 2, 5), []), ((4, 4, 8), [])),
}
"""Shapes of each drafter, and the other depths that its cycles may have."""


Rows = list[list[int]]


@dataclass(slots=True)
class Side:
    """One way to decode.

    Attributes:
        answer: maps a batch of prompts to the new tokens of each.
        ours: its tokens must be those of its ``plain``.
        plain: plain decoding in the same arithmetic, which may be itself; None: the first side.
        rounds: for every round, the tokens and seconds of each group.
        equal: for every answer, whether its tokens are those of ``plain``.
        length: tokens per cycle of the last batch; None: the side has no cycles.
        lengths: one for every batch.
        forget: makes it forget earlier answers, for a side that drafts from them; None: it doesn't.
        decoding: seconds that the last answer took after its first token; None: the side doesn't tell.
    """

    name: str
    answer: Callable[[Rows], Rows]
    ours: bool = False
    plain: Side | None = field(default=None, repr=False, compare=False)
    version: str | None = None
    rounds: list[dict[str, list[float]]] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    length: Callable[[], float] | None = None
    forget: Callable[[], None] | None = None
    decoding: Callable[[], float] | None = None

    def rates(self, group: str) -> list[float]:
        """Tokens per second in each round."""
        return [tokens / seconds for tokens, seconds in (found[group] for found in self.rounds)]


def our_side(name: str, args: argparse.Namespace, plain: Side | None = None, **overrides: Any) -> Side:
    """An engine. ``plain``: as of :class:`Side`."""
    keys: dict[str, Any] = {
        "max_rows": args.batch,
        "buckets": [rows for rows in (1, 2, 4, 8) if rows < args.batch] + [args.batch],
        "max_context": args.context,
        "prefix_cache": False,
        "generation_config": "ignore",
    }
    llm = LLM(args.model, threads=args.threads, **keys, **overrides)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)

    def length() -> float:
        return llm.metrics.acceptance_length if llm.metrics else 0.0

    def answer(prompts: Rows) -> Rows:
        return [output.token_ids for output in llm.generate(prompts, params)]

    def decoding() -> float:
        return llm.metrics.decode_seconds if llm.metrics else 0.0

    return Side(name, answer, ours=True, plain=plain, length=length, decoding=decoding)


def hf_side(source: Path, args: argparse.Namespace) -> Side:
    """Transformers' ``generate`` on the numbers of the checkpoint, in float32.

    Raises:
        PeerError: a model that drafts can't be trained for: the reader is theirs.
    """
    from graphspec.train.drafter import load_target

    try:
        model = load_target(source)
    except CheckpointError as error:
        raise PeerError(str(error)) from error
    how = {"max_new_tokens": args.max_tokens, "min_new_tokens": args.max_tokens, "do_sample": False, "pad_token_id": 0}

    def answer(prompts: Rows) -> Rows:
        ids = torch.tensor(padded(prompts, 0, left=True))
        mask = torch.tensor(padded([[1] * len(prompt) for prompt in prompts], 0, left=True))
        found: Rows = model.generate(ids, attention_mask=mask, **how)[:, ids.shape[1] :].tolist()
        return found

    return Side("transformers generate, float32", answer)


def batches(prompts: Sequence[tuple[str, list[int]]], size: int) -> list[tuple[str, Rows]]:
    """Prompts of one group each; the last batch of a group is filled up with its first prompts.

    Raises:
        SystemExit: fewer prompts of a group than a batch has.
    """
    made: list[tuple[str, Rows]] = []
    of_group: dict[str, Rows] = {}
    for group, prompt in prompts:
        of_group.setdefault(group, []).append(prompt)
        if len(of_group[group]) % size == 0:
            made.append((group, of_group[group][-size:]))
    for group, rows in of_group.items():
        if len(rows) < size:
            raise SystemExit(f"--batch: at most {len(rows)}, the prompts of {group}, found {size}")
        if rest := len(rows) % size:
            made.append((group, [*rows[-rest:], *rows[: size - rest]]))
    return made


def warm_up(sides: Sequence[Side], batch: Rows, *, decoding: bool = False) -> tuple[list[Side], dict[str, str]]:
    """The sides that answer a batch, with ``decoding`` those that time it without the prompt; for others the reason."""
    able: list[Side] = []
    missing: dict[str, str] = {}
    for side in sides:
        try:
            if decoding and side.decoding is None:
                raise PeerError("it doesn't tell when its first token came")
            side.answer(batch)
        except PeerError as reason:
            missing[side.name] = str(reason)
        else:
            able.append(side)
    return able, missing


def measure(sides: Sequence[Side], prompts: Sequence[tuple[str, Rows]], rounds: int) -> None:
    """Let all sides answer all batches in turn, ``rounds`` times. Ours that decode plainly go first: others are compared with them."""
    for number in range(rounds):
        for side in sides:
            side.rounds.append({group: [0.0, 0.0] for group in {group for group, _ in prompts}})
            if side.forget is not None:
                side.forget()
                side.answer([prompts[0][1][0][:WARM_UP_TOKENS]])
        for group, batch in prompts:
            expected: dict[str, Rows] = {}
            # The second round goes backwards: no side always follows the same other one.
            plains = [side for side in sides if (side.plain or sides[0]) is side]
            others = [side for side in sides if (side.plain or sides[0]) is not side]
            for side in [*plains, *(others if number % 2 == 0 else reversed(others))]:
                time.sleep(PAUSE)
                started = time.perf_counter()
                answers = side.answer(batch)
                seconds = time.perf_counter() - started
                counted = sum(map(len, batch if group == LONG else answers))
                if group == AFTER:
                    assert side.decoding is not None, "others are left out"
                    counted, seconds = counted - len(answers), side.decoding()
                plain = expected.setdefault((side.plain or sides[0]).name, answers)
                side.equal += [answer == tokens for answer, tokens in zip(answers, plain, strict=True)]
                side.rounds[-1][group][0] += counted
                side.rounds[-1][group][1] += seconds
                if side.length is not None:
                    side.lengths.append(side.length())


def records(sides: Sequence[Side], groups: Sequence[str]) -> list[dict[str, Any]]:
    """One record per side, with medians by group; rates and ratios are None for a side of ours with other tokens."""
    out = []
    for side in sides:
        right = all(side.equal) or not side.ours
        rates = {group: side.rates(group) for group in groups}
        ratios = {group: [own / plain for own, plain in zip(rates[group], sides[0].rates(group), strict=True)] for group in groups}
        out.append(
            {
                "side": side.name,
                "tokens_per_second": {group: statistics.median(rates[group]) for group in groups} if right else None,
                "ratio": {group: statistics.median(ratios[group]) for group in groups} if right else None,
                "equal": sum(side.equal) / len(side.equal),
                "acceptance_length": statistics.mean(side.lengths) if side.lengths else None,
                "rounds": {group: [round(rate, 2) for rate in rates[group]] for group in groups},
                **({"version": side.version} if side.version else {}),
            }
        )
    return out


def long_prompts(parts: Sequence[list[int]], length: int, group: str) -> list[tuple[str, list[int]]]:
    """A prompt of ``length`` tokens for each part, which it begins with; the others follow."""
    made = []
    for place in range(len(parts)):
        tokens = [token for part in (*parts[place:], *parts[:place]) for token in part]
        made.append((group, (tokens * -(-length // len(tokens)))[:length]))
    return made


def table(found: Sequence[dict[str, Any]], groups: Sequence[str]) -> str:
    """The records as a Markdown table."""
    lines = [f"| side | {' | '.join(f'{group}, tokens/s' for group in groups)} | same tokens |", f"|---|{'---:|' * (len(groups) + 1)}"]
    for row in found:
        rates, ratios = row["tokens_per_second"], row["ratio"]
        cells = [f"{rates[group]:.0f} ({ratios[group]:.2f}x)" for group in groups] if rates else ["wrong output"] * len(groups)
        lines.append(f"| {row['side']} | {' | '.join(cells)} | {100 * row['equal']:.0f} % |")
    return "\n".join(lines)


def llama_sides(args: argparse.Namespace, source: Path, open_servers: ExitStack) -> tuple[list[Side], dict[str, str]]:
    """llama.cpp's modes, and for those that can't take part the reason."""
    sides: list[Side] = []
    missing: dict[str, str] = {}
    heads = [eagle3(args.llama_draft)] if args.llama_draft else []
    for mode in MODES[:1] if args.plain else (*MODES, *heads):
        try:
            if source.suffix != ".gguf":
                raise PeerError(f"it needs a GGUF file, found {source.name}")
            threads = args.threads or torch.get_num_threads()
            server = LlamaServer(server_program(args.llama), source, mode, threads, args.context, args.batch)
        except PeerError as reason:
            missing[mode.name] = str(reason)
            continue
        open_servers.callback(server.close)
        answer, forget = partial(server.answer, max_tokens=args.max_tokens), server.forget if mode.remembers else None
        sides.append(Side(mode.name, answer, version=server.version, forget=forget, decoding=server.decoding))
    return sides, missing


def peer_sides(args: argparse.Namespace, source: Path, file: Path, open_servers: ExitStack) -> tuple[list[Side], dict[str, str]]:
    """The engines of ``--peers``, and for those that can't take part the reason."""
    sides: list[Side] = []
    missing: dict[str, str] = {}
    head = Path(args.draft) if args.draft else shipped_draft(args.model, source, resolve_variant("eagle3"))
    copy: Path | None = None if file.suffix == ".gguf" else source
    for peer in (peer for peer in CHAT_PEERS if not (args.plain and peer.baseline)):
        try:
            if args.batch > 1 and not peer.batches:
                raise PeerError("it takes one prompt at a time")
            check_installed(peer, args.peers)
            if not peer.model and file.suffix != ".gguf":
                raise PeerError(f"it needs a GGUF file, found {file.name}")
            if peer.model and copy is None:
                copy = Path(open_servers.enter_context(tempfile.TemporaryDirectory()), "copy")
                write_bfloat16(source, copy)
            given = copy if peer.model and copy is not None else file
            threads = args.threads or torch.get_num_threads()
            process = PeerProcess(peer, args.peers, exporter_of(args.exporter), given, threads, head)
        except (PeerError, CheckpointError) as reason:
            missing[peer.side] = str(reason)
            continue
        open_servers.callback(process.close)
        answer = partial(process.generate, max_tokens=args.max_tokens, fixed=True)
        sides.append(Side(peer.side, answer, version=process.version))
    return sides, missing


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, append the records to ``--out``; 1 if a side of ours has other tokens than plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of conf/model, a GGUF file or a folder")
    parser.add_argument("--draft", help="folder of an EAGLE-3 head; without: the one that comes with the model, if any")
    parser.add_argument("--llama", help="llama.cpp's llama-server; default: the one on the PATH")
    parser.add_argument("--llama-draft", help="the head as GGUF, by llama.cpp's converter: its EAGLE-3 takes part as well")
    parser.add_argument("--peers", default=sys.executable, help="interpreter that has OpenVINO GenAI and ONNX Runtime GenAI")
    parser.add_argument("--exporter", help="optimum-cli, which converts for OpenVINO; default: the one on the PATH")
    parser.add_argument("--no-hf", action="store_true", help="without transformers, which is slow")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSONL of {"kind": ..., "prompt": ...}')
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--every", type=int, default=1, help="only every so many prompts")
    parser.add_argument("--prompt-tokens", type=int, help="prompts of this length, made of all of them, and one new token: reading speed")
    parser.add_argument("--decoding", action="store_true", help="speed of decoding after prompts of --prompt-tokens")
    parser.add_argument("--plain", action="store_true", help="without drafters")
    parser.add_argument(
        "--activations", action="append", choices=ACTIVATIONS, help="of our sides, several times (kernels.activations; default: full)"
    )
    parser.add_argument(
        "--shape", type=int, nargs=3, action="append", metavar=("S", "K", "N"), help="of our EAGLE-3 head, in place of the usual ones"
    )
    parser.add_argument("--batch", type=int, default=1, help="prompts that are answered at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024, help="tokens of prompt and answer")
    parser.add_argument("--threads", type=int, help="CPU threads of each side; default: torch's own choice")
    parser.add_argument("--busy", type=int, default=0, help="other programs that keep a core busy each meanwhile")
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    for key in ("every", "batch", "rounds", "max_tokens", "context"):
        if vars(args)[key] < 1:
            parser.error(f"--{key.replace('_', '-')}: expected at least 1, found {vars(args)[key]}")
    if args.decoding and (not args.prompt_tokens or args.batch > 1 or args.max_tokens < 2):
        parser.error("--decoding: expected --prompt-tokens, --batch 1 and --max-tokens of at least 2")

    torch.set_flush_denormal(True)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    source = Path(model_folder(args.model))
    file = next(iter(sorted(source.glob("*.gguf"))), source) if source.is_dir() else source
    lines = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()][:: args.every]
    group_of = {kind: group for group, kinds in GROUPS.items() for kind in kinds}
    probe = LLM(args.model, variant="none", runtime="eager", max_context=args.context)
    asked = [group_of.get(line["kind"], line["kind"]) for line in lines]
    texts = [line["prompt"] for line in lines]
    ask = partial(probe.generate, texts) if args.raw else partial(probe.chat, [[{"role": "user", "content": text}] for text in texts])
    prompts = [(group, out.prompt_token_ids) for group, out in zip(asked, ask({"max_tokens": 1}), strict=True)]
    probe.close()
    if args.prompt_tokens:
        group = AFTER if args.decoding else LONG
        prompts = long_prompts([prompt for _, prompt in prompts], args.prompt_tokens, group)
        asked, args.max_tokens, args.plain = [group], args.max_tokens if args.decoding else 1, True
    groups, questions = list(dict.fromkeys(asked)), batches(prompts, args.batch)
    drafters: dict[str, str | None] = {"ngram": None}
    if args.draft is not None or "eagle3" in shipped_drafts(args.model, source):
        drafters["eagle3"] = args.draft
    shapes = SHAPES if args.shape is None else SHAPES | {"eagle3": tuple(((s, k, n), []) for s, k, n in args.shape)}
    sides: list[Side] = []
    for activations in args.activations or ["full"]:
        ours = OURS if activations == "full" else f"{OURS}, activations {activations}"
        plain = our_side(f"{ours}, plain", args, variant="none", activations=activations)
        plain.plain = plain
        sides.append(plain)
        for variant, draft in () if args.plain else drafters.items():
            for shape, depths in shapes[variant]:
                sizes = dict(zip(("num_steps", "topk", "num_draft_tokens"), shape, strict=True))
                name = f"{ours}, {variant} {'chain' if shape[1] == 1 else 'tree'} {shape}{f', or {depths} steps' if depths else ''}"
                how = {"variant": variant, "draft": draft, "depths": depths, "activations": activations}
                sides.append(our_side(name, args, plain, **how, **sizes))
    with ExitStack() as open_servers:
        others, missing = llama_sides(args, file, open_servers)
        sides += others
        others, reasons = peer_sides(args, source, file, open_servers)
        sides += others
        missing |= reasons
        if not args.no_hf:
            try:
                sides.append(hf_side(source, args))
            except PeerError as reason:
                missing["transformers"] = str(reason)
        sides, reasons = warm_up(sides, questions[0][1], decoding=args.decoding)
        missing |= reasons
        watch = CoreWait()
        with busy_programs(args.busy):
            measure(sides, questions, args.rounds)
        busy = watch.share()
    found = records(sides, groups)
    threads = args.threads or torch.get_num_threads()
    print(table(found, groups))
    print(
        f"\n{Path(args.model).name}, batch {args.batch}, greedy, {threads} CPU threads, {len(prompts)} prompts, "
        f"{args.max_tokens} new tokens, median of {args.rounds} rounds: `make race`."
    )
    for side, reason in missing.items():
        print(f"Missing: {side}: {reason}.")
    if (caution := busy_caution({"all sides": busy})) is not None:
        print(caution)
    files = ("llama", "llama_draft", "draft", "model", "peers", "exporter")
    settings = {key: Path(value).name if key in files and value else value for key, value in vars(args).items()}
    settings |= {key: within_repository(settings[key]) for key in ("out", "prompts")}
    write_jsonl(
        result_file(args.out, "chat-race"),
        [
            provenance(),
            {"kind": "settings", **settings, "threads": threads, "core_wait": busy},
            *found,
            *({"side": side, "missing": reason} for side, reason in missing.items()),
        ],
    )
    return 0 if all(row["tokens_per_second"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
