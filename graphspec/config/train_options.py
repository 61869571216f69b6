"""Options of ``graphspec train``, which :mod:`graphspec.train` implements. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .checks import INT32_MAX, INT64_MAX, SEEDS, brief, check, check_fields, in_range, one_of, path, real
from .schema import MAX, MIN

DTYPES = ("float32", "bfloat16")
CROSS_ENTROPY, LK_ALPHA, LK_LAMBDA = "cross_entropy", "lk_alpha", "lk_lambda"
LOSSES = (CROSS_ENTROPY, LK_ALPHA, LK_LAMBDA)
QAT_FORMATS = ("int4", "int8", "fp8")
SCHEDULES = ("linear", "cosine", "constant")
DEFAULT_STEPS = 600
TEMPERATURES = (1e-5, 1e5)
"""Bounds of a temperature above 0, by which logits are divided."""
MAX_WARM_UP = 40
"""Default steps of the warm-up, at most a tenth of the schedule."""
LONGEST = 2**20
"""Longest sequence that is accepted."""


SELF = "self"
"""The entry of ``train.data`` that is no file: conversations written by the target alone."""
CONVERSATIONS = ".jsonl"
"""How the names of files of conversations end."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """An entry of ``train.data``: ``path``, which may be :data:`SELF`, and its share of each batch; None: an equal part of the rest."""

    path: str
    share: float | None = None

    @property
    def is_text(self) -> bool:
        """It is a text file, or a folder of them."""
        return self.path != SELF and not self.path.endswith(CONVERSATIONS)


def read_sources(value: object) -> list[DataSource]:
    """The entries of ``train.data``, which may be one entry alone.

    Raises:
        ConfigError: an entry of another kind, a share that is none, or shares that are more than 1 together.
    """
    key, found = "train.data", []
    for place, entry in enumerate(value if isinstance(value, list | tuple) else [value]):
        where = f"{key}[{place}]"
        given = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        check(where, {"path"} <= set(given) <= {"path", "share"}, "a path, or {path: ..., share: ...}", brief(entry))
        share = None if given.get("share") is None else real(f"{where}.share", given["share"])
        check(f"{where}.share", share is None or 0 < share <= 1, "a share above 0, at most 1", share)
        found.append(DataSource(path(where, given["path"]), share))
    total = sum(source.share or 0.0 for source in found)
    check(key, total <= 1 + 1e-9, "shares of at most 1 together", total)
    return found


def _triples(key: str, rows: list[list[int]], names: str) -> None:
    fine = all(len(row) == 3 and all(1 <= number <= INT32_MAX for number in row) for row in rows)
    check(key, fine, f"{names} lists of positive integers", brief(rows))


@dataclass(kw_only=True)
class TextConfig:
    """The text that the target writes for its draft."""

    sets: list[list[int]] | None = None
    """[batches, sequences per batch, tokens per sequence], the prompt included; null: for every length of the schedule, a third of the
    tokens that are trained on."""
    prompt: list[int] = field(default_factory=lambda: [16, 64])
    """Shortest and longest prompt, in tokens of the data."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0, 0.0, 0.8])
    """Batches use these in turn; 0 is greedy. A draft has to predict both low-entropy greedy text and varied sampled text."""
    tokens: int | None = None
    """Tokens of the conversations that the target writes alone (``train.data=self``), prompts included; null: a third of the tokens of
    theirs that are trained on. More of them may be asked for later: those that are there stay."""
    new_tokens: int = 384
    """Most tokens of an answer of the target; the longest prompt that it writes for itself has a quarter."""
    scripts: list[str] = field(default_factory=lambda: ["LATIN"])
    """Writing systems of the prompts that the target writes for itself, by Unicode's names (LATIN, CYRILLIC, HIRAGANA, CJK); empty: any."""
    batch: int = 32
    """Requests that the target answers at once."""
    seed: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "train.text")
        in_range("train.text.tokens", self.tokens, 1, INT64_MAX)
        in_range("train.text.new_tokens", self.new_tokens, 4, LONGEST)
        in_range("train.text.batch", self.batch, 1, 4096)
        fine = len(self.prompt) == 2 and 1 <= self.prompt[0] <= self.prompt[1] <= LONGEST
        check("train.text.prompt", fine, "[shortest, longest], both at least 1", brief(self.prompt))
        in_range("train.text.seed", self.seed, 0, INT32_MAX)
        _triples("train.text.sets", self.sets or [], "[batches, sequences, length]")
        for sizes in self.sets or []:
            check("train.text.sets", sizes[2] > self.prompt[1], f"lengths above train.text.prompt's {self.prompt[1]}", brief(sizes))
        fine = bool(self.temperatures) and all(t == 0 or TEMPERATURES[0] <= t <= TEMPERATURES[1] for t in self.temperatures)
        check("train.text.temperatures", fine, f"a list of 0 and numbers from {TEMPERATURES[0]:g}", brief(self.temperatures))


@dataclass(kw_only=True)
class AcceptanceConfig:
    """How the acceptance of a finished draft is measured, on held-out text."""

    prompts: int = 128
    prompt_length: int = 64
    new_tokens: int = 160
    shapes: list[list[int]] = field(default_factory=lambda: [[4, 1, 5], [5, 4, 16]])
    """[S, K, N]: draft depth, fan-out, verify nodes with the root."""
    temperature: float = 0.7
    """Temperature measured in addition to greedy decoding; 0: greedy decoding alone."""
    batch: int = 8
    """Prompts per batch."""
    samples: int = 2
    """Continuations kept as text."""
    seed: int = 3

    def __post_init__(self) -> None:
        check_fields(self, "train.acceptance")
        _triples("train.acceptance.shapes", self.shapes, "[S, K, N]")
        for key in ("prompts", "prompt_length", "new_tokens", "batch"):
            in_range(f"train.acceptance.{key}", getattr(self, key), 1, LONGEST)
        in_range("train.acceptance.samples", self.samples, 0, LONGEST)
        in_range("train.acceptance.seed", self.seed, 0, INT32_MAX)
        fine = self.temperature == 0 or TEMPERATURES[0] <= self.temperature <= TEMPERATURES[1]
        check("train.acceptance.temperature", fine, f"0, or a number from {TEMPERATURES[0]:g}", self.temperature)
        deepest = max((shape[0] for shape in self.shapes), default=0)
        check(
            "train.acceptance.new_tokens",
            self.new_tokens > deepest + 1,
            f"more than the deepest draft + 1 = {deepest + 1}",
            self.new_tokens,
        )


@dataclass(kw_only=True)
class QatConfig:
    """Quantisation-aware training: the draft computes with weights rounded to a format, and learns to be good with them. The finished
    checkpoint has the rounded numbers in bfloat16; ``graphspec convert`` with the same format, group and modules, and ``observer=mse`` for
    int4, finds their codes again.
    """

    format: str | None = None
    """int4, int8 or fp8; null: weights are not rounded."""
    group: int | None = None
    """Channels that share a scale; null: the largest of 128, 64 and 32 that divides all of these layers."""
    modules: list[str] = field(default_factory=lambda: ["layers"])
    """Linear layers by the last part of their names, such as ``fc`` or ``lm_head``; ``layers``: the projections of decoder layers."""

    def __post_init__(self) -> None:
        check_fields(self, "train.qat")
        if self.format is not None:
            one_of("train.qat.format", self.format, QAT_FORMATS)
        check("train.qat.group", self.group is None or (self.group >= 8 and self.group % 8 == 0), "a multiple of 8", self.group)


@dataclass(kw_only=True)
class TrainConfig:
    """Options of ``graphspec train``. The group's choices are presets, one for each variant that is trained."""

    data: Any = field(default_factory=list)
    """What is trained on, one entry or several: ``self``: conversations that the target writes alone; a ``.jsonl`` file of conversations
    (``messages``) or of prompts that the target answers (``prompt``); text files, or folders of them. An entry may be
    ``{path: ..., share: ...}``: its share of each batch."""
    held_out: list[str] = field(default_factory=list)
    """Text that is never trained on; empty: ``held_out_share`` of ``data``, in whole files and whole conversations."""
    held_out_share: float = 0.05
    out: str | None = None
    """Folder of the finished checkpoint."""
    work: str | None = None
    """Folder of intermediate files, from which an interrupted run resumes; runs for one target on the same data may share it. null: the
    path of ``out`` followed by ``.work``."""
    start_from: str | None = None
    """A published draft of the same variant for the same target whose weights the run begins with: a folder, or a name on the Hub. It may
    have any layout and low precision; ``train.network`` is as it says. P-EAGLE may start from an EAGLE-3 head. null: a new network."""
    recount_vocab: bool = False
    """With ``start_from``: choose the draft vocabulary anew, the ids that are most frequent in this run's text. The output head keeps the
    draft's rows of ids that stay, and begins with the target's for others; ``train.network.draft_vocab_size`` may be another than the
    draft's. false: the draft's vocabulary."""
    resume: bool = True
    """Resume from the checkpoint in ``work``, if there is one; false: start again."""
    steps: int | None = None
    """Optimizer steps; null: those of ``tokens``, and 600 without."""
    tokens: int | None = None
    """Tokens to train on, instead of ``steps``; a token counts each time it is read."""
    batch: int = 16
    """Sequences per step."""
    sequence_length: int = 256
    """Tokens per sequence."""
    phases: list[list[int]] = field(default_factory=list)
    """[steps, batch, sequence length] of consecutive phases, instead of the four keys above; such as long sequences after short ones."""
    lr: float = 0.014
    """Peak learning rate of Muon, which updates the matrices."""
    adamw_lr: float | None = 0.003
    """Peak learning rate of AdamW, which updates everything else; null: ``lr``."""
    schedule: str = "linear"
    """Learning rate after the warm-up. linear: flat, then linearly down over ``cooldown`` steps; cosine: half a cosine; constant: flat."""
    warmup: int | None = None
    """Steps of a linear warm-up; null: a tenth of the steps, at most 40."""
    cooldown: int | None = None
    """linear: steps of the decay; null: half of the steps. If fewer steps are left after the warm-up, only the end of the decay is used."""
    restarts: list[int] = field(default_factory=list)
    """Steps at which the schedule restarts, to continue training after a cool-down."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    dtype: str = "float32"
    """Dtype of products in linear layers, attention and Muon's iterations: float32, or bfloat16, which is faster if the hardware has
    bfloat16 arithmetic. Weights and optimizer states stay in float32."""
    compile: bool = False
    """Compile the forward pass; that of a draft only for phases with enough steps. Pays from some hundred steps on."""
    cache_features: bool = False
    """Drafts: keep what the target computes of each conversation and each text of its own in a file of ``work`` during the run, so that it
    reads them once. Pays where they are trained on several times."""
    seed: int = 2
    checkpoint_steps: int = 50
    """Steps between two checkpoints."""
    log_steps: int = 20
    """Steps between two records of progress."""
    unroll: int = 5
    """steps that are unrolled on the network's own hidden states; a draft is only good to this depth."""
    decay: float = 0.8
    """the weight of unrolled step ``k`` is ``decay ** k``."""
    loss: str = CROSS_ENTROPY
    """Of a draft step. cross_entropy: against the target's distribution; lk_alpha: minus the logarithm of the acceptance rate; lk_lambda: a
    mix of cross-entropy and one minus the acceptance rate, with less of the first as acceptance rises (arXiv 2602.23881)."""
    feature_weight: float = 0.0
    """Drafts whose hidden state predicts the target's next feature: weight of the SmoothL1 distance to it."""
    raw_share: float = 0.0
    """share of each batch that is cut from the data; the rest is text written by the target."""
    qat: QatConfig = field(default_factory=QatConfig)
    network: dict[str, Any] = field(default_factory=dict)
    """settings of the variant's network, such as ``draft_vocab_size``, ``tap_layers``, ``num_heads``."""
    text: TextConfig = field(default_factory=TextConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        check_fields(self, "train", paths=("held_out", "out", "work", "start_from"))
        self.data = list(self.data) if isinstance(self.data, list | tuple) else [self.data]
        read_sources(self.data)
        for group in (self.text, self.acceptance, self.qat):
            group.__post_init__()
        check("train.held_out_share", 0 < self.held_out_share < 0.5, "a share above 0, below 0.5", self.held_out_share)
        one_of("train.dtype", self.dtype, DTYPES)
        one_of("train.loss", self.loss, LOSSES)
        one_of("train.schedule", self.schedule, SCHEDULES)
        for key, maximum in {"steps": INT32_MAX, "tokens": INT64_MAX, "batch": LONGEST, "sequence_length": LONGEST}.items():
            in_range(f"train.{key}", getattr(self, key), 1, maximum)
        for key in ("checkpoint_steps", "log_steps", "unroll"):
            in_range(f"train.{key}", getattr(self, key), 1, INT32_MAX)
        for key in ("lr", "adamw_lr", "clip"):
            in_range(f"train.{key}", getattr(self, key), MIN, MAX)
        in_range("train.seed", self.seed, 0, min(SEEDS[1], INT32_MAX))
        in_range("train.decay", self.decay, 0, 1)
        in_range("train.feature_weight", self.feature_weight, 0, MAX)
        in_range("train.raw_share", self.raw_share, 0, 1)
        _triples("train.phases", self.phases, "[steps, batch, sequence length]")
        for key in ("steps", "tokens"):
            given = getattr(self, key)
            check(f"train.{key}", given is None or not self.phases, "null with train.phases", given)
        check("train.tokens", self.tokens is None or self.steps is None, "null with train.steps", self.tokens)
        check("train.recount_vocab", self.start_from is not None or not self.recount_vocab, "false without train.start_from", True)
        self._check_schedule()

    def _check_schedule(self) -> None:
        total = self.total_steps
        check(
            "train.cooldown", self.cooldown is None or self.schedule == "linear", f"null with train.schedule={self.schedule}", self.cooldown
        )
        inside = all(0 < step < total for step in self.restarts) and all(a < b for a, b in pairwise(self.restarts))
        check("train.restarts", inside, f"ascending steps between 0 and {total}", brief(self.restarts))
        in_range("train.cooldown", self.cooldown, 0, INT32_MAX)
        in_range("train.warmup", self.warmup, 0, max(self.periods()))

    @property
    def sources(self) -> list[DataSource]:
        """The entries of ``data``."""
        return read_sources(self.data)

    def shares(self) -> dict[str, float]:
        """The share of a batch of each entry of ``data`` that is conversations, by its path. All texts together are one entry."""
        sources = self.sources
        texts = [source for source in sources if source.is_text]
        stated = [source.share for source in texts if source.share is not None]
        parts = {source.path: source.share for source in sources if not source.is_text}
        whole = parts | ({"": sum(stated) if stated else None} if texts else {})
        left = 1.0 - sum(share or 0.0 for share in whole.values())
        equal = left / max(1, sum(share is None for share in whole.values()))
        return {name: equal if share is None else share for name, share in parts.items()}

    @property
    def total_tokens(self) -> int:
        """Tokens that are trained on, each as often as it is read."""
        return sum(steps * batch * length for steps, batch, length in self.schedule_phases)

    @property
    def schedule_phases(self) -> list[list[int]]:
        """``[steps, batch, sequence length]`` of the phases, at least one."""
        if self.phases:
            return self.phases
        each = self.batch * self.sequence_length
        steps = self.steps if self.steps is not None else DEFAULT_STEPS if self.tokens is None else -(-self.tokens // each)
        return [[steps, self.batch, self.sequence_length]]

    @property
    def total_steps(self) -> int:
        return sum(phase[0] for phase in self.schedule_phases)

    def periods(self) -> list[int]:
        """Steps of each period of the learning-rate schedule, one more than there are restarts."""
        return [end - begin for begin, end in pairwise([0, *self.restarts, self.total_steps])]

    def warm_up_of(self, length: int) -> int:
        """Steps of the warm-up in a period of ``length`` steps; a period too short for warm-up and decay has both in proportion."""
        if self.warmup is None:
            return min(MAX_WARM_UP, length // 10)
        ways = self.warmup + self.cool_down_of(length)
        return self.warmup if ways <= length else length * self.warmup // ways

    def cool_down_of(self, length: int) -> int:
        """Steps of the decay in a period of ``length`` steps."""
        if self.schedule != "linear":
            return 0
        return self.cooldown if self.cooldown is not None else length // 2
