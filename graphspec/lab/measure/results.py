"""Reads result files: the JSON lines of ``graphspec profile``, ``plan`` and ``tune`` as sides, generations, predictions and plans.

A side whose output differs from plain decoding keeps the fields that identify it and loses every figure here, so that no reader of results
can show its speed. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...config.checks import LONG, brief
from ...config.command_options import CLOSED
from ...config.paths import reason, user_path
from ...errors import ConfigError
from ...facts.keys import is_number
from ...shapes import PLAIN
from .metrics import percentile

IDENTITY = (
    "case", "side", "role", "variant", "shape", "runtime", "attention", "dtype", "device", "temperature", "ignore_eos", "batch", "requests",
    "input_tokens", "output_tokens", "arrivals", "equal", "equality", "synthetic", "lossy", "rounds",
)  # fmt: skip
"""Fields that a side whose output is wrong keeps."""
SPEEDS = ("tokens_per_second", "tokens_per_second_per_user", "ratio", "cycle_ms")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
SAMPLES = ("itl_samples_ms", "acceptance_unconditional", "acceptance_conditional", "acceptance_along_text")
SIDE_KEYS: dict[str, tuple[type, ...]] = {
    "case": (str,), "side": (str,), "role": (str,), "batch": (int,), "equal": (bool, type(None)),
}  # fmt: skip
BY_REQUEST = "acceptance_by_request"
FIRST_REQUEST = "first_request"
ONCE = "n=1"
"""Mark of a side that was measured in one round only: its spread is unknown."""


@dataclass(slots=True)
class Line:
    """One record, its place (``file:line``), and the provenance record before it."""

    place: str
    record: dict[str, Any]
    provenance: dict[str, Any]

    def fail(self, key: str, expected: str, found: object) -> NoReturn:
        """Raise the error for a malformed record."""
        raise ConfigError(f"{self.place}: {key}", expected, found)

    def get(self, key: str, default: Any = None) -> Any:
        """``record[key]``; ``default`` if it is missing or null."""
        value = self.record.get(key)
        return default if value is None else value


def percent_of_floor(floor_ms: float, milliseconds: float) -> float | None:
    """Share of the floor's speed that was reached; None where it was beaten, so that it is no floor, or there is no time."""
    return 100 * floor_ms / milliseconds if milliseconds > 0 and floor_ms <= milliseconds else None


@dataclass(slots=True)
class SideRecord(Line):
    """One measured side of a case. ``label`` is its name, with what distinguishes it from others of that name."""

    label: str = ""

    @property
    def equal(self) -> bool | None:
        """Whether its tokens were those of plain decoding; None if that can't be decided."""
        return self.record["equal"]

    @property
    def batch(self) -> int:
        """Requests at once."""
        return int(self.record["batch"])

    @property
    def subject(self) -> bool:
        """Whether it is the subject of its case; the others are baselines."""
        return self.record["role"] == "subject"

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(S, K, N) of a side that speculates."""
        return None if self.record.get("shape") is None else tuple(self.record["shape"])

    @property
    def own(self) -> bool:
        """Whether it ran in this engine."""
        return bool(self.shape or self.get("variant"))

    @property
    def rounds(self) -> int | None:
        """Measured rounds; None if the record does not say."""
        rounds = self.get("rounds")
        return rounds if isinstance(rounds, int) else len(self.get("tokens_per_second", {}).get("rounds") or []) or None

    @property
    def caveats(self) -> list[str]:
        """Marks of figures that can't be compared with those of other sides."""
        marks = ["SYNTHETIC"] * bool(self.get("synthetic")) + ["LOSSY"] * bool(self.get("lossy"))
        if self.equal is not True:
            marks.append("not equal" if self.equal is False else "not compared")
        return marks

    @property
    def marks(self) -> list[str]:
        """Caveats, and further marks that are shown with its figures."""
        return self.caveats + [ONCE] * (self.rounds == 1 and self.equal is not False)

    @property
    def open_loop(self) -> dict[str, Any]:
        """Figures of an open loop; empty for a closed one."""
        found: dict[str, Any] = self.get("open_loop", {})
        return found

    @property
    def speed(self) -> float | None:
        """Median tokens/s of all requests together; None in an open loop, where they follow from the load."""
        return None if self.open_loop else self.number("tokens_per_second", "median")

    @property
    def floor_ms(self) -> float | None:
        """Milliseconds a cycle takes at least; None if that is not known, or if cycles are faster, so that it is no floor."""
        return None if self.beats_floor else self.number("floor_ms")

    @property
    def percent_of_floor(self) -> float | None:
        """Share of the floor's speed that cycles reach; as :attr:`floor_ms`."""
        return None if self.beats_floor else self.number("percent_of_floor")

    @property
    def beats_floor(self) -> bool:
        """Cycles are faster than their floor."""
        floor, cycle = self.number("floor_ms"), self.number("cycle_ms", "median")
        return floor is not None and cycle is not None and percent_of_floor(floor, cycle) is None

    def lower_end(self, key: str) -> float | None:
        """10th percentile over the rounds of ``key``; None with fewer than two rounds, which have no spread."""
        rounds = self.get(key, {}).get("rounds") or []
        return percentile(rounds, 10) if len(rounds) > 1 else None

    def number(self, key: str, part: str | None = None) -> float | None:
        """``record[key]``, or its ``part``; None if it was not measured."""
        value = self.record.get(key)
        if part is not None and isinstance(value, Mapping):
            value = value.get(part)
        return float(value) if is_number(value) else None

    @property
    def hardware(self) -> str:
        """Name of the GPU, or of the processor, that ran it."""
        return hardware(self.provenance, self.get("device"))


@dataclass(slots=True)
class Results:
    """The contents of result files."""

    files: list[Path]
    sides: list[SideRecord] = field(default_factory=list)
    generations: list[Line] = field(default_factory=list)
    predictions: list[Line] = field(default_factory=list)
    plans: list[Line] = field(default_factory=list)
    provenances: list[dict[str, Any]] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)
    """Chrome traces that were written next to the measurements; they need not exist any more."""
    replaced: int = 0
    """Measurements left out because the files hold a newer one of the same side."""

    def predicted(self, line: Line) -> list[SideRecord]:
        """The sides that a prediction is for: those of its case, batch and shape (plain decoding: ``[0, 1, 1]``); if none, the subjects."""
        about = (line.record.get("case"), line.record.get("batch"))
        sides = [side for side in self.sides if (side.record["case"], side.batch) == about]
        same = [side for side in sides if side.own and (side.get("shape") or PLAIN.numbers) == line.record.get("shape")]
        return same or [side for side in sides if side.subject]


def hardware(provenance: Mapping[str, Any], device: str | None = None) -> str:
    """Hardware of a run: names and number of its GPUs, or the processor and its threads where the device is a CPU."""
    gpus = [str(gpu.get("name")) for gpu in provenance.get("gpus") or [] if isinstance(gpu, Mapping)]
    if gpus and not str(device or "cuda").startswith("cpu"):
        return " + ".join(f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus))
    cpu, threads = provenance.get("cpu"), provenance.get("torch_threads")
    return (str(cpu) + (f", {threads} thread{'s' * (threads != 1)}" if threads else "")) if cpu else str(device or "unknown hardware")


def on_cpu(side: SideRecord) -> bool:
    """Whether the side ran on a CPU here; unknown, hence False, for a server."""
    return str(side.get("device", "")).startswith("cpu")


def find_files(names: Sequence[str]) -> list[Path]:
    """The given files, and every ``.jsonl`` file below the given folders."""
    files: list[Path] = []
    for name in names:
        path = user_path("report.files", name)
        if not path.is_dir() and not path.is_file():
            raise ConfigError("report.files", "result files, or folders of them", f"no file or folder {brief(name, LONG)}")
        files += sorted(file for file in path.rglob("*.jsonl") if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise ConfigError("report.files", "result files, or folders of them", f"no .jsonl file in {list(names)}")
    return list(dict.fromkeys(files))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def read_lines(file: Path) -> Iterator[Line]:
    """The records of one file. Empty lines are skipped."""
    provenance: dict[str, Any] = {}
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError("report.files", "files that can be read", brief(str(file), LONG), reason(error)) from error
    for number, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        place = f"{file}:{number}"
        try:
            record = json.loads(text.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise ConfigError(place, "a JSON object on one line", f"{brief(text.decode('utf-8', 'replace'))}: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(place, "a JSON object on one line", repr(record)[:60])
        if record.get("kind") == "provenance":
            provenance = record
        yield Line(place, record, provenance)


def read_results(names: Sequence[str]) -> Results:
    """Read files and folders. Unknown kinds, and lines without one, are ignored."""
    results = Results(find_files(names))
    kinds: dict[str, Callable[[Line], None]] = {
        "provenance": lambda line: _provenance(line, results),
        "side": lambda line: results.sides.append(_side(line)),
        "generation": lambda line: results.generations.append(_generation(line)),
        "prediction": lambda line: results.predictions.append(_numbers(line, "predicted_ms", "measured_ms")),
        "plan": lambda line: results.plans.append(_numbers(line, "batch")),
    }
    for file in results.files:
        for line in read_lines(file):
            kind = line.record.get("kind")
            if isinstance(kind, str) and kind in kinds:
                kinds[kind](line)
    if not (results.sides or results.generations or results.predictions or results.plans):
        found = f"none in {', '.join(map(str, results.files))[:200]}"
        raise ConfigError("report.files", 'lines whose "kind" is side, generation, prediction or plan', found)
    _withhold(results)
    _keep_newest(results)
    _label(results.sides)
    return results


def _provenance(line: Line, results: Results) -> None:
    results.provenances.append(line.record)
    if (trace := line.get("trace")) is not None:
        if not isinstance(trace, str):
            line.fail("trace", "a path relative to the file", repr(trace)[:60])
        results.traces.append(Path(line.place.rpartition(":")[0]).parent / trace)


def _side(line: Line) -> SideRecord:
    record = line.record
    for key, types in SIDE_KEYS.items():
        if key not in record or not isinstance(record[key], types):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            line.fail(key, expected, repr(record[key]) if key in record else "nothing")
    shape = record.get("shape")
    if shape is not None and not (isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) for n in shape)):
        line.fail("shape", "[num_steps, topk, num_draft_tokens] or null", repr(shape))
    _check_parts(line)
    if record["equal"] is False:
        record = {key: record[key] for key in IDENTITY if key in record}
    return SideRecord(line.place, record, line.provenance)


def _number_or_none(value: object) -> bool:
    return value is None or is_number(value)


Part = tuple[type[list[Any] | dict[str, Any]], Callable[[Any], bool], str]
"""A list or an object, what each of its entries or items must be, and both in words."""


def _row(name: str, *numbers: str) -> Part:
    """A part that is a list of objects: each with a text, and with numbers or nulls for the other keys."""

    def is_row(row: object) -> bool:
        return isinstance(row, dict) and isinstance(row.get(name), str) and all(_number_or_none(row.get(key)) for key in numbers)

    return list, is_row, f"a list of objects with the text {name}, and numbers for {', '.join(numbers)}"


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))


def _is_spread(item: tuple[str, Any]) -> bool:
    return item[0] != "rounds" or (isinstance(item[1], list) and all(map(is_number, item[1])))


def _is_figure(item: tuple[str, Any]) -> bool:
    return all(map(_number_or_none, item[1].values() if isinstance(item[1], dict) else item[1:]))


_PARTS: dict[str, Part] = {
    "stages": _row("name", "ms", "bytes", "floor_ms", "percent_of_floor"),
    "build": _row("program", "warm_up_s", "capture_s", "bytes"),
    "memory": _row("name", "bytes"),
    **dict.fromkeys(SAMPLES, (list, _number_or_none, "a list of numbers")),
    FIRST_REQUEST: (list, _is_pair, "a list of pairs of milliseconds and tokens"),
    "burst_tokens": (dict, lambda item: item[0].isdecimal() and isinstance(item[1], int), "an object of numbers by burst size"),
    BY_REQUEST: (dict, lambda item: item[0].isdecimal() and is_number(item[1]), "an object of numbers by request"),
    **dict.fromkeys((*SPEEDS, *LATENCIES), (dict, _is_spread, "an object whose rounds are a list of numbers")),
    "open_loop": (dict, _is_figure, "an object of numbers, nulls, and objects of numbers"),
}
"""What a side may have."""


def _check_parts(line: Line) -> None:
    """Check every list and object of a side. One that is missing or null was not measured."""
    for key, (kind, ok, expected) in _PARTS.items():
        value = line.get(key, kind())
        if not isinstance(value, kind):
            line.fail(key, expected, repr(value)[:80])
        for entry in value.items() if isinstance(value, dict) else value:
            if not ok(entry):
                line.fail(key, expected, repr(entry)[:80])
    if not _number_or_none(line.record.get("stretch_tokens")):
        line.fail("stretch_tokens", "a number", repr(line.record["stretch_tokens"])[:60])


def _numbers(line: Line, *keys: str) -> Line:
    for key in keys:
        if not is_number(line.record.get(key)):
            line.fail(key, "a number", repr(line.record.get(key)))
    return line


def _generation(line: Line) -> Line:
    cycles = line.record.get("cycles")
    if not isinstance(cycles, list):
        line.fail("cycles", "a list", repr(cycles)[:60])
    for number, cycle in enumerate(cycles):
        nodes = cycle.get("nodes") if isinstance(cycle, dict) else None
        if not isinstance(nodes, list) or not isinstance(cycle.get("emitted"), list):
            line.fail(f"cycles[{number}]", "an object with the lists nodes and emitted", repr(cycle)[:60])
        for index, node in enumerate(nodes):
            parent = node.get("parent") if isinstance(node, dict) else None
            root = index == 0 and parent == -1
            if isinstance(parent, bool) or not isinstance(parent, int) or not (root or (index and 0 <= parent < index)):
                line.fail(f"cycles[{number}].nodes[{index}].parent", "-1 for node 0, an earlier node for others", repr(parent))
    return line


def _identity(side: SideRecord) -> tuple[object, ...]:
    # One baseline serves every shape of a sweep, so the case is not part of its identity.
    keys = [key for key in IDENTITY if key not in ("equal", "equality", "rounds", "requests") and (side.subject or key != "case")]
    place = (side.hardware, side.provenance.get("revision"), model(side.provenance))
    # Records older than open loops have no such key: their loop is closed.
    return (*(json.dumps(side.record.get(key, CLOSED if key == "arrivals" else None)) for key in keys), *place)


def _keep_newest(results: Results) -> None:
    newest: dict[tuple[object, ...], SideRecord] = {}
    for side in sorted(results.sides, key=lambda side: str(side.provenance.get("date") or "")):
        newest[_identity(side)] = side
    kept = {id(side) for side in newest.values()}
    results.replaced = sum(side.subject and id(side) not in kept for side in results.sides)
    results.sides = [side for side in results.sides if id(side) in kept]


def _withhold(results: Results) -> None:
    """Remove ratios to sides whose output is wrong, and measured times of their predictions: both would reveal their speed."""
    unequal = {(side.record["case"], side.record["side"]) for side in results.sides if side.equal is False}
    for side in results.sides:
        ratio = side.get("ratio", {})
        if (side.record["case"], ratio.get("to")) in unequal:
            side.record = {**side.record, "ratio": None}

    matched = [(line, results.predicted(line)) for line in results.predictions]
    results.predictions = [line for line, sides in matched if not sides or any(side.equal is not False for side in sides)]


def model(provenance: Mapping[str, Any]) -> str | None:
    """Name of the measured model, where the configuration was recorded."""
    config = provenance.get("config")
    name = config.get("model") if isinstance(config, Mapping) else None
    name = name.get("path") if isinstance(name, Mapping) else name
    return str(name).rstrip("/").rsplit("/", 1)[-1] if name else None


FACETS: tuple[Callable[[SideRecord], str], ...] = (
    lambda side: model(side.provenance) or "",
    lambda side: side.hardware,
    lambda side: f"T={side.record['temperature']:g}" if isinstance(side.record.get("temperature"), int | float) else "",
    lambda side: str(side.get("dtype", "")),
    lambda side: str(side.get("runtime", "")),
    lambda side: str(side.get("attention", "")),
    lambda side: f"{side.number('input_tokens') or 0:g} in, {side.number('output_tokens') or 0:g} out",
    lambda side: {True: "end ignored", False: "end kept"}.get(side.get("ignore_eos"), ""),
    lambda side: str(side.provenance.get("revision") or "")[:7],
    lambda side: str(side.record.get("shape") or ""),
    lambda side: str(side.record["case"]),
    lambda side: " ".join(side.caveats[:1]),
    lambda side: str(side.provenance.get("date") or ""),
)
"""Properties that may distinguish two sides of one name, most significant first."""


def _label(sides: list[SideRecord]) -> None:
    """Set every ``label``: the side's name, and those of :data:`FACETS` in which sides of one name and batch differ."""
    for name in dict.fromkeys(side.record["side"] for side in sides):
        same = [side for side in sides if side.record["side"] == name]
        for side in same:
            side.label = name
        for facet in FACETS:
            groups: dict[tuple[str, int], list[SideRecord]] = {}
            for side in same:
                groups.setdefault((side.label, side.batch), []).append(side)
            if any(len({facet(side) for side in group}) > 1 for group in groups.values()):
                for side in same:
                    side.label = ", ".join(filter(None, (side.label, facet(side))))
        seen: dict[tuple[str, int], int] = {}
        for side in same:
            count = seen[side.label, side.batch] = seen.get((side.label, side.batch), 0) + 1
            side.label += f" #{count}" if count > 1 else ""


def unique(values: Iterable[str | None]) -> list[str]:
    """The distinct non-empty values, in order."""
    return list(dict.fromkeys(value for value in values if value))
