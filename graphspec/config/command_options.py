"""Options of single commands, in addition to the engine's :class:`~graphspec.config.schema.Config`. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .checks import INT32_MAX, INT64_MAX, ascending, brief, check, check_fields, in_range, one_of, path, typed
from .schema import MAX, MAX_ROWS, MIN, RUNTIMES, Config
from .server_options import ServerConfig
from .train_options import TrainConfig

FORMATS = ("text", "json")
LOG_LEVELS = ("error", "warning", "info", "debug")
SOURCES = ("held_out", "file", "random")
CLOSED = "closed"
ARRIVALS = (CLOSED, "poisson", "bursts", "trace")
BASELINES = ("none", "self", "hf", "hf_assisted", "hf_lookup", "openai")
API_PROMPTS = ("tokens", "text")

MAX_REQUESTS = 10**6
MAX_PROMPT = 2**20
MAX_RANDOM = 2**26
"""Most random token ids that one workload draws."""
MAX_ROUNDS = 10**6
MAX_STEPS = 128
MAX_RATE = 1e6


@dataclass(kw_only=True)
class WorkloadConfig:
    """The requests that measured sides serve."""

    source: str = "held_out"
    """held_out: prompts that come with the package and that the demo models were not trained on; file: the user's; random: token ids."""
    file: str | None = None
    """file: one prompt, or, ending in .jsonl, one per line (a string, or an object with "prompt")."""
    requests: int = 8
    """Requests of one round; prompts are used again from the first if there are fewer."""
    batch: int = 1
    """Requests at once."""
    input_tokens: int | None = 64
    """Prompts are cut to this length in tokens; random: their length; null: not cut."""
    input_spread: float = 0.0
    """random: lengths are drawn evenly from input_tokens * (1 - spread) to input_tokens * (1 + spread)."""
    output_tokens: int = 128
    """Most new tokens of a request."""
    ignore_eos: bool = True
    """End-of-text ids do not end a request, so that all sides do the same work."""
    seed: int = 0
    """Seed of random prompts and arrivals; the sampling seed of request i is seed + i."""
    arrivals: str = CLOSED
    """closed: each of ``batch`` users sends the next request when the last one is answered; poisson, bursts: requests arrive at ``rate``,
    alone or in groups, whether or not earlier ones are answered; trace: when ``trace`` says. In an open loop ``batch`` is the number of
    rows."""
    rate: float | None = None
    """poisson, bursts: requests per second."""
    burst: int = 4
    """bursts: requests that arrive together."""
    trace: str | None = None
    """trace: a .jsonl file, per line an object with "arrival" in seconds, either "prompt" or "input_tokens", and optionally
    "output_tokens"."""
    long_every: int = 0
    """poisson, bursts: one request in this many has a prompt of ``long_input_tokens``; 0: none."""
    long_input_tokens: int = 1000
    """Length of those prompts; texts are repeated until they are that long."""
    ttft_limit_ms: float = 500.0
    """Goodput: the first token of a request comes within this time."""
    itl_limit_ms: float = 100.0
    """Goodput: no gap before the next tokens of a request is longer than this."""

    def __post_init__(self) -> None:
        check_fields(self, "workload", paths=("file", "trace"))
        one_of("workload.source", self.source, SOURCES)
        for key, maximum in {"requests": MAX_REQUESTS, "batch": MAX_ROWS, "output_tokens": INT32_MAX}.items():
            in_range(f"workload.{key}", getattr(self, key), 1, maximum)
        in_range("workload.input_tokens", self.input_tokens, 1, MAX_PROMPT)
        in_range("workload.seed", self.seed, -(2**63), INT64_MAX)
        check("workload.input_spread", 0 <= self.input_spread < 1, "a number from 0, below 1", self.input_spread)
        check("workload.file", self.file is None or self.source == "file", f"null with workload.source={self.source}", self.file)
        if self.source == "random":
            check("workload.input_tokens", self.input_tokens is not None, "a number with workload.source=random", None)
            drawn = self.requests * (self.input_tokens or 0)
            check("workload.requests", drawn <= MAX_RANDOM, f"requests of at most {MAX_RANDOM} random tokens together", f"{drawn} tokens")
        one_of("workload.arrivals", self.arrivals, ARRIVALS)
        drawn_arrivals = self.arrivals in ("poisson", "bursts")
        expected = f"{'requests per second' if drawn_arrivals else 'null'} with workload.arrivals={self.arrivals}"
        check("workload.rate", (self.rate is not None) == drawn_arrivals, expected, self.rate)
        in_range("workload.rate", self.rate, MIN, MAX_RATE)
        expected = f"{'the path of a file' if self.arrivals == 'trace' else 'null'} with workload.arrivals={self.arrivals}"
        check("workload.trace", (self.trace is not None) == (self.arrivals == "trace"), expected, self.trace)
        in_range("workload.burst", self.burst, 1, MAX_REQUESTS)
        in_range("workload.long_every", self.long_every, 0, MAX_REQUESTS if drawn_arrivals else 0)
        in_range("workload.long_input_tokens", self.long_input_tokens, 1, MAX_PROMPT)
        for key in ("ttft_limit_ms", "itl_limit_ms"):
            in_range(f"workload.{key}", getattr(self, key), MIN, MAX)


@dataclass(kw_only=True)
class ProfileConfig:
    """Options of ``graphspec profile``."""

    rounds: int = 5
    """Rounds of the workload on every side, taking turns; figures are medians over them."""
    warm_up_seconds: float = 2.0
    """Each side runs the workload for this long, and at least once, before the first round."""
    interleave: bool = True
    """All sides stay loaded and take turns round by round; false: one after the other, for models that fit once only."""
    stages: bool = True
    """Also time every stage of the cycle, in a separate run."""
    generations: int = 1
    """Generations recorded cycle by cycle for the tree viewer of ``graphspec report``."""
    trace: str | None = None
    """Write host and stage spans of one round to this file, for Perfetto or chrome://tracing."""
    assistant: str | None = None
    """hf_assisted: folder of the assistant model; null: the draft, if it is a whole model, or the demo model's."""
    api_model: str | None = None
    """openai: the model's name there; null: the first one the server lists."""
    api_key: str | None = None
    """openai: bearer token; null: none."""
    api_prompts: str = "tokens"
    """openai: prompts are sent as token ids, so that all sides read the same tokens, or as text."""
    timeout_seconds: float = 1800.0
    """Longest time for a side to get ready, or for one round."""

    def __post_init__(self) -> None:
        check_fields(self, "profile", paths=("trace", "assistant"))
        in_range("profile.rounds", self.rounds, 1, MAX_ROUNDS)
        in_range("profile.warm_up_seconds", self.warm_up_seconds, 0, MAX)
        in_range("profile.generations", self.generations, 0, MAX_ROUNDS)
        one_of("profile.api_prompts", self.api_prompts, API_PROMPTS)
        in_range("profile.timeout_seconds", self.timeout_seconds, MIN, MAX)


@dataclass(kw_only=True)
class PlanningConfig:
    """Options of ``graphspec plan``."""

    context: int | None = None
    """Committed tokens of every row; null: 2048, or what the checkpoint allows."""
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    acceptance: list[float] | None = None
    """Share of drafts accepted at depth 1, 2, ..., given that the ones before were; null: that of ``measured``, or a stated guess."""
    measured: str | None = None
    """A file that ``graphspec profile`` wrote: its acceptance and bandwidth are used, and its cycle times compared with the prediction."""
    measure: bool = False
    """Take the figures of this machine: on a CPU passes and cycles of the model, timed once and kept, else copy bandwidth and a product."""
    out: str | None = None
    """Write the records to this JSON-lines file."""

    def __post_init__(self) -> None:
        check_fields(self, "plan", paths=("measured", "out"))
        in_range("plan.context", self.context, 1, INT32_MAX)
        ascending("plan.batches", self.batches, 1, MAX_ROWS)
        shares = self.acceptance is None or (0 < len(self.acceptance) <= MAX_STEPS and all(0 <= share <= 1 for share in self.acceptance))
        check("plan.acceptance", shares, f"a non-empty list of at most {MAX_STEPS} shares from 0 to 1, or null", brief(self.acceptance))


@dataclass(kw_only=True)
class TuneConfig:
    """Options of ``graphspec tune``."""

    out: str | None = None
    """The experiment file it writes, for experiment=FILE; null: ``tuned.yaml`` in the working folder."""
    candidates: int = 6
    """Shapes (num_steps, topk, num_draft_tokens) that are run, best predictions first."""
    rounds: int = 3
    """Rounds of the workload for each of them."""
    batches: list[int] | None = None
    """Batch sizes; null: the buckets of the configuration."""
    adaptive: bool = True
    """Also write the table from which the engine chooses its draft depth while it runs."""

    def __post_init__(self) -> None:
        check_fields(self, "tune", paths=("out",))
        in_range("tune.candidates", self.candidates, 1, MAX_ROUNDS)
        in_range("tune.rounds", self.rounds, 1, MAX_ROUNDS)
        if self.batches is not None:
            ascending("tune.batches", self.batches, 1, MAX_ROWS)
        check("tune.out", self.out is None or self.out.endswith((".yaml", ".yml")), "a name that ends in .yaml", repr(self.out))


@dataclass(kw_only=True)
class ReportConfig:
    """Options of ``graphspec report``."""

    files: list[str] = field(default_factory=lambda: ["results"])
    """Result files, or folders of them."""
    out: str = "report.html"

    def __post_init__(self) -> None:
        check_fields(self, "report", paths=("files", "out"))


@dataclass(kw_only=True)
class LaunchConfig(Config):
    """A :class:`~graphspec.config.schema.Config` plus the options of the commands."""

    prompt: list[str] = field(default_factory=list)
    """Prompts, word for word; on the command line ``prompt=TEXT`` for one, ``prompt='["a", "b"]'`` (JSON) for several."""
    prompt_file: str | None = None
    """A file that is one prompt; or, ending in ``.jsonl``, one request per line: a string, or ``{"prompt": ..., "max_tokens": ...}``, or
    ``{"messages": [{"role": ..., "content": ...}], ...}``."""
    chat: bool = False
    """generate: each prompt is a user's message; the checkpoint's chat template turns it into text."""
    system: str | None = None
    """generate, with chat=true: the system message before each prompt."""
    format: str = "text"
    """text: for people; json: one document as the last line of stdout."""
    log: str = "warning"
    """Log level on stderr: error, warning, info, debug."""
    left: str = "eager"
    """diff: the reference runtime."""
    right: str = "auto"
    """diff: the runtime compared with it."""
    baseline: Any = "none"
    """profile: what the configured engine is compared with, one of none, self (the same once more), hf, hf_assisted, hf_lookup,
    openai, or a list of them."""
    url: str | None = None
    """profile: base address of the server for ``baseline=openai``, such as http://localhost:8000/v1."""
    results: str = "results"
    """profile, tune: folder of the result files."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    plan: PlanningConfig = field(default_factory=PlanningConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results = path("results", self.results)
        self.prompt_file = path("prompt_file", self.prompt_file) if self.prompt_file is not None else None
        names = [] if self.baseline is None else self.baseline if isinstance(self.baseline, list | tuple) else [self.baseline]
        check("baseline", all(isinstance(name, str) for name in names), "a name, or a list of names", typed(self.baseline))
        self.baseline = list(names)
        one_of("format", self.format, FORMATS)
        one_of("log", self.log, LOG_LEVELS)
        for key in ("left", "right"):
            one_of(key, getattr(self, key), RUNTIMES)
        check("prompt_file", not self.prompt or self.prompt_file is None, "null with prompt=", repr(self.prompt_file))
        check("system", self.system is None or self.chat, "null without chat=true", self.system)
        for name in self.baseline:
            check("baseline", name in BASELINES, "one of " + ", ".join(BASELINES) + ", or a list of them", repr(name))
        check("url", "openai" not in self.baseline or self.url is not None, "the server's address with baseline=openai", None)
        named = self.url is None or self.url.startswith(("http://", "https://"))
        check("url", named, "an address such as http://localhost:8000/v1", repr(self.url))

    def with_shape(self, shape: Sequence[int]) -> LaunchConfig:
        """The same with this (S, K, N)."""
        steps, topk, nodes = shape
        return replace(self, variant=replace(self.variant, num_steps=steps, topk=topk, num_draft_tokens=nodes))
