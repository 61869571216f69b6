"""Letters, cycle shapes and graph keys. Standard library only.

Suffixes name dimensions throughout the package (``hidden_BAF`` is ``[B, A, F]``):

======  ==============================================================================
``B``   lanes of the bucket (padded batch)
``R``   persistent rows (requests the engine holds); index ``R`` itself is the dummy row
``S``   ``num_steps``: draft depth
``K``   ``topk``: fan-out of a draft step
``N``   ``num_draft_tokens``: verify nodes, root included
``A``   ``A_max = S_max + 1``: widest accepted run, one per engine
``Ac``  window capacity: ``A``, or more where rows may decode at depth 0 before the drafter catches up
``W``   window slots from the root on, ``max(N, A)``, and ``(S-1)*K + 1`` for the beams that have slots
``X``   64-bit ancestor words, ``ceil(W / 64)``
``M``   draft candidates; ``K + (S-1)*K*K`` when every level expands the K best beams
``Y``   lookback: committed entries a drafter reads again before its window
``T``   query tokens per lane of the stage that runs
``C``   tokens of a prefill chunk
``H``   hidden size of the model at hand
``F``   feature width fed to the drafter (H, 3H, or none)
``V``   target vocabulary; ``Vd`` draft vocabulary; ``Vr`` columns of a head that one of several ranks has
``P``   page-table columns
``Q``   query heads, ``G`` key/value heads, ``D`` head dimension
``U``   recurrent layers
======  ==============================================================================

Of recurrent layers: ``H`` value heads, ``K`` and ``V`` widths of a key and a value, ``E`` channels of the convolution, ``O`` inputs
that it keeps, ``G`` gates of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from .errors import ConfigError

WORD_BITS = 64
MASK_BITS = 32
"""Bits of a word of a grammar's mask."""
MAX_WINDOW = 128
PRODUCT_ROWS = 64
"""Most rows of a product that is bound by reading its weight: one tile of fused kernels. With more, ``fast`` numerics have cuBLAS."""


@dataclass(frozen=True, slots=True, order=True)
class CycleShape:
    """Static shape of one speculative cycle: ``(S, K, N)`` and where its candidates come from.

    ``S == 0`` is plain decoding: no draft, ``N == 1``. ``pool`` says how many candidates there are:

    ``beams``      every level expands the K best beams by K tokens each, ``K + (S-1)*K*K`` (EAGLE-2)
    ``marginals``  as many, where one pass gives every depth its distribution: the beams have no slots, for no network runs on them
    ``paths``      K continuations of S tokens each, ``S*K``
    ``nodes``      the N - 1 nodes themselves: a fixed tree, or one the host brings along

    Raises:
        ConfigError: a number is out of range, or ``N`` can't be reached with ``S`` and ``K``.
    """

    _LEVELS: ClassVar[str] = "1 + topk + (num_steps-1)*topk^2"
    _POOLS: ClassVar[dict[str, str]] = {"beams": _LEVELS, "marginals": _LEVELS, "paths": "1 + num_steps*topk", "nodes": "any"}

    num_steps: int
    topk: int
    num_draft_tokens: int
    pool: Literal["beams", "marginals", "paths", "nodes"] = "beams"

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise ConfigError("num_steps", "an integer >= 0", self.num_steps)
        if self.topk < 1:
            raise ConfigError("topk", "an integer >= 1", self.topk)
        if self.num_draft_tokens < 1:
            raise ConfigError("num_draft_tokens", "an integer >= 1 (the root counts)", self.num_draft_tokens)
        if self.num_draft_tokens - 1 > self.num_candidates:
            maximum = self.num_candidates + 1
            raise ConfigError(
                "num_draft_tokens",
                f"at most {maximum} for num_steps={self.num_steps} and topk={self.topk} ({self._POOLS[self.pool]})",
                self.num_draft_tokens,
            )
        if self.num_steps > 0 and self.num_draft_tokens <= self.num_steps and self.pool == "nodes":
            raise ConfigError("num_draft_tokens", f"more than num_steps = {self.num_steps}", self.num_draft_tokens)
        if self.is_chain and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError("num_draft_tokens", f"num_steps + 1 = {self.num_steps + 1} when topk is 1", self.num_draft_tokens)
        if self.window_width > MAX_WINDOW:
            found = f"{self.window_width} slots for num_steps={self.num_steps}, topk={self.topk}, num_draft_tokens={self.num_draft_tokens}"
            raise ConfigError("num_steps, topk, num_draft_tokens", f"beams and nodes in a window of at most {MAX_WINDOW} slots", found)

    def shortened(self, depth: int) -> CycleShape:
        """The same drafter stopped at ``depth``, with as many nodes as that can fill. Its buffers fit into those of this shape."""
        if depth == self.num_steps:
            return self
        if depth == 0:
            return PLAIN
        path = CycleShape(depth, self.topk, depth + 1, self.pool)
        return path if self.is_chain else replace(path, num_draft_tokens=min(self.num_draft_tokens, path.num_candidates + 1))

    @property
    def numbers(self) -> list[int]:
        """``[S, K, N]``."""
        return [self.num_steps, self.topk, self.num_draft_tokens]

    @property
    def is_chain(self) -> bool:
        """Nodes already lie in path order, so no tree is built and no KV is moved."""
        return self.topk == 1

    @property
    def num_candidates(self) -> int:
        """M: draft candidates offered to the tree."""
        if self.num_steps == 0:
            return 0
        if self.pool == "paths":
            return self.num_steps * self.topk
        if self.pool == "nodes":
            return self.num_draft_tokens - 1
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def accept_width(self) -> int:
        """Most tokens one cycle can commit: ``S + 1``."""
        return self.num_steps + 1

    @property
    def window_width(self) -> int:
        """W: slots from the root on that draft or verify may touch."""
        beams = (self.num_steps - 1) * self.topk + 1 if self.pool == "beams" else 0
        return max(self.num_draft_tokens, beams, self.accept_width)

    @property
    def num_words(self) -> int:
        """X: 64-bit ancestor words a node needs."""
        return math.ceil(self.window_width / WORD_BITS)


PLAIN = CycleShape(0, 1, 1)


@dataclass(frozen=True, slots=True, order=True)
class SamplingClass:
    """What the requests of a run ask of the sampler, all together; a program computes and holds what its class needs and nothing else.

    Attributes:
        noise: a temperature above 0. Without it every row is greedy and no noise is computed.
        truncate: top-k, top-p or min-p.
        penalties: repetition, presence or frequency; rows keep counts of their tokens.
        bias: a logit bias or a minimum length.
        logprobs: alternatives reported for each token; -1: no log-probabilities at all.
        allowed: rows may be limited to some tokens.
        bad_words: rows may have sequences of tokens that must not come up; they keep their last tokens.
        prompt_logprobs: the prompt's tokens are scored. Of prefill programs only; cycles are those of the class without.
        grammar: rows may follow a grammar, whose masks the host fills over the draft tree: the program runs in segments around that.
    """

    noise: bool = False
    truncate: bool = False
    penalties: bool = False
    bias: bool = False
    logprobs: int = -1
    allowed: bool = False
    bad_words: bool = False
    prompt_logprobs: bool = False
    grammar: bool = False

    def __or__(self, other: SamplingClass) -> SamplingClass:
        """The class that serves the requests of both."""
        return SamplingClass(*(max(getattr(self, name), getattr(other, name)) for name in self.__slots__))

    @property
    def bans(self) -> bool:
        """Tokens may be banned, by a logit of -inf."""
        return self.bias or self.allowed or self.bad_words or self.grammar

    @property
    def changes_logits(self) -> bool:
        """Logits are changed, or left out, by what other tokens there are; otherwise a token's key follows from its own logit."""
        return self.truncate or self.penalties or self.bans

    @property
    def of_cycles(self) -> SamplingClass:
        """The class of the cycles that follow a prefill of this one."""
        return replace(self, prompt_logprobs=False) if self.prompt_logprobs else self


EVERYTHING = ("noise", "truncate", "penalties", "bias", "allowed", "bad_words", "logprobs")
"""All that runs on the device in one launch."""
SPELLED = (*EVERYTHING, "prompt_logprobs", "grammar")
"""Parts of a class that a configuration can name."""


def sampling_class_of(name: str, logprobs: int, defaults: SamplingDefaults | None = None) -> SamplingClass | None:
    """The class that is spelled ``greedy``, ``default``, or by what it has, joined by ``+``, as ``noise+truncate``; None: no class is.

    Args:
        name: ``everything`` stands for all parts but ``prompt_logprobs``, which is of prefill programs, and ``grammar``, for which a
            program is cut into segments: these may be added, as ``everything+grammar``.
        logprobs: how many alternatives a class has that says ``logprobs``, or ``everything``.
        defaults: of the checkpoint, whose class ``default`` is; None: the neutral ones.
    """
    parts = name.split("+")
    if parts == ["default"]:
        return (defaults or NEUTRAL).sampling_class
    if parts[0] == "everything":
        parts = [*EVERYTHING, *parts[1:]]
    if parts == ["greedy"]:
        parts = []
    if not {*parts} <= {*SPELLED} or len({*parts}) < len(parts):
        return None
    if "truncate" in parts and "noise" not in parts:
        return None
    flags = {part: True for part in parts if part != "logprobs"}
    return SamplingClass(**flags, logprobs=logprobs if "logprobs" in parts else -1)


GREEDY = SamplingClass()
SAMPLED = SamplingClass(noise=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request is sampled with where it says nothing. Made without arguments, the neutral values: greedy, no filter, no penalty."""

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def sampling_class(self) -> SamplingClass:
        """What a request that says nothing asks of the sampler."""
        return drawing_class(self)


NEUTRAL = SamplingDefaults()


def drawing_class(params: Any) -> SamplingClass:
    """What the fields of :class:`SamplingDefaults` ask of the sampler, none of them None. Filters act above temperature 0."""
    hot = params.temperature > 0
    truncate = hot and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return SamplingClass(noise=hot, truncate=truncate, penalties=params.repetition_penalty != 1)


PREPARED = ("greedy", "everything")
"""Names of classes whose programs an engine prepares unless ``runtime.sampling_classes`` says otherwise."""
SERVED = ("greedy", "default", "everything", "everything+prompt_logprobs")
"""Those of a server, unless ``runtime.sampling_classes`` says otherwise."""
SERVED_GRAMMARS = ("everything+grammar", "everything+prompt_logprobs+grammar")
"""More of them where grammars can be compiled."""


def prepared_classes(names: Sequence[str] | None, defaults: SamplingDefaults, logprobs: int) -> tuple[SamplingClass, ...]:
    """Classes whose programs an engine prepares.

    Args:
        names: ``runtime.sampling_classes``; None: :data:`PREPARED`, and that of requests that say nothing.
        defaults: of the checkpoint.
        logprobs: alternatives of a class with log-probabilities.
    """
    spelled = PREPARED if names is None else names
    found = [each for name in spelled if (each := sampling_class_of(name, logprobs, defaults)) is not None]
    if names is None:
        found.insert(1, defaults.sampling_class)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Everything that distinguishes one captured or compiled cycle from another.

    Attributes:
        bucket: lanes.
        shape: S, K, N.
        sampling: what the requests ask of the sampler.
        catch_up: a cycle of depth 0 in front of which the drafter reads the whole window.
    """

    bucket: int
    shape: CycleShape
    sampling: SamplingClass
    catch_up: bool = False


def pick_bucket(buckets: tuple[int, ...], lanes: int) -> int:
    """Smallest bucket that holds ``lanes``; the one place where a bucket is chosen.

    Raises:
        ConfigError: no bucket is large enough.
    """
    for bucket in buckets:
        if bucket >= lanes:
            return bucket
    raise ConfigError("runtime.buckets", f"a bucket of at least {lanes} lanes", list(buckets))


CHUNKS = {"cpu": (16, 64, 256), "cuda": (16, 64, 256, 1024, 2048)}
"""Sizes of prefill chunks by device.

A launch reads all weights, no matter how many tokens it computes: 2048 tokens in one chunk read them once, not eight times. Every size is
a program that a GPU compiles and captures, for each requested sampling class, so there are few, and a prompt that fills none goes into
several.
"""
MAX_PADDING = 256
"""From this much padding on, the rest of a prompt goes into several smaller chunks.

By data sheets an H200 multiplies 206 tokens in the time it reads the weights (989 TFLOPS of bfloat16, 4.8 TB/s): more padding than that
costs more than to read the weights once more.
"""


def prefill_chunks(device: str, max_context: int) -> tuple[int, ...]:
    """Default sizes of prefill chunks: those of the device, without sizes that no prompt fills.

    Args:
        device: ``cpu`` or ``cuda``.
        max_context: tokens a row may have.
    """
    return tuple(size for size in CHUNKS[device] if size - max_context < MAX_PADDING)


def prefill_budget(chunks: tuple[int, ...], given: int | None) -> int:
    """Tokens of prompts, padding included, that may be read before a cycle while rows decode.

    By default ``MAX_PADDING``: on a GPU, as long as reading the weights once more takes, which is about what a cycle takes.

    Raises:
        ConfigError: ``given`` is less than the smallest chunk.
    """
    if given is not None and given < chunks[0]:
        raise ConfigError("runtime.prefill_tokens_per_cycle", f"at least {chunks[0]}, the smallest prefill chunk", given)
    return given or max(MAX_PADDING, chunks[0])
