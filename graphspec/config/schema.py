"""Structured configuration: the keys that a user may set, nothing derived. Standard library only.

The dataclasses are the schema of the YAML groups under ``conf/`` and can be built in Python just as well. ``None`` means "derive it"
(:mod:`graphspec.plan.plan` does). Values are checked where they are set; checks that need a checkpoint wait for the plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from ..errors import ConfigError
from ..shapes import NEUTRAL, sampling_class_of
from .catalog import resolve_acceptance_rule
from .checks import FLOAT32_LEAST, INT32_MOST, INT64_MOST, Errors, ascending, brief, check_fields, in_range, one_of, usable_temperature

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNTIMES = ("auto", "eager", "compiled", "captured")
KERNELS = ("auto", "reference", "compiled", "fused")
IMPLEMENTATIONS = ("auto", "reference", "native", "fused")
ATTENTIONS = (*IMPLEMENTATIONS, "flashinfer")
HOST_STEP_OVER_LATENT_ROWS = ("flashinfer",)
"""Attention whose kernels for latent rows take a work list from the host, and chains only."""
NUMERICS = ("auto", "fast", "batch_invariant")
DEVICES = ("auto", "cpu", "cuda")
DRAFT_NOISES = ("coupled", "none")
DRAFT_PARALLEL = ("auto", "replicated", "sharded")
NGRAM_MATCHES = ("bfs", "prob")
GENERATION_CONFIGS = ("auto", "ignore")

MAX_ROWS = 65536
"""Most rows or lanes; like the bounds below far above real use, to refuse typing errors before memory is counted."""
MAX_RANKS = 64
MAX_PAGE = 65536
MAX_CHUNK = 2**20
MAX_IN_FLIGHT = 64
MAX_ENTRIES = 65536
"""Most stop ids or biased tokens of a request."""
MAX_NGRAM = 1024
MAX_THREADS = 4096
MOST_SAMPLES = 65536
"""Most outputs of one prompt. Far above real use, to catch typing errors."""
TEMPERATURES = (0, 1e5)
"""Bounds of a temperature; noise multiplied by the largest stays finite in float32."""
REPETITIONS = (0.01, 100.0)
"""Bounds of the repetition penalty: what it makes of a logit is finite in float32 up to logits of 3e36."""
PENALTY_LIMIT = 2.0
BIAS_LIMIT = 100.0
SEEDS = (-(2**63), 2**64 - 1)
LEAST, MOST = 1e-9, 1e9
"""Bounds of measured quantities, in any unit."""


def check_defaults(params: Any, prefix: str, error: Errors) -> None:
    """Check the bounds of the fields of :class:`SamplingDefaults`; their types are checked already. None passes: it says nothing.

    Raises:
        GraphspecError: of class ``error``; names ``prefix`` and the field.
    """
    in_range(f"{prefix}temperature", params.temperature, *TEMPERATURES, error=error)
    in_range(f"{prefix}top_k", params.top_k, -1, INT64_MOST, error=error)
    in_range(f"{prefix}repetition_penalty", params.repetition_penalty, *REPETITIONS, error=error)
    if params.top_p is not None and not FLOAT32_LEAST <= params.top_p <= 1:
        raise error(f"{prefix}top_p", f"a number above 0 ({FLOAT32_LEAST:.0e} or more), at most 1", params.top_p)
    if params.min_p and not FLOAT32_LEAST <= params.min_p <= 1:
        raise error(f"{prefix}min_p", f"0, or a number of {FLOAT32_LEAST:.0e} or more, at most 1", params.min_p)


def check_sampling(params: Any, error: Errors) -> None:
    """Check the bounds of :class:`SamplingConfig` and ``SamplingParams`` that depend on no engine; their types are checked already.

    Raises:
        GraphspecError: of class ``error``; names ``sampling.<field>``.
    """
    check_defaults(params, "sampling.", error)
    # Without a new token there is still a prompt to return.
    scores = getattr(params, "echo", False) or getattr(params, "prompt_logprobs", None) is not None
    limits: dict[str, tuple[float, float]] = {
        "max_tokens": (0 if scores else 1, INT64_MOST),
        "presence_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
        "frequency_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
    }
    for name, (least, most) in limits.items():
        in_range(f"sampling.{name}", getattr(params, name), least, most, error=error)
    if params.seed is not None and not SEEDS[0] <= params.seed <= SEEDS[1]:
        raise error("sampling.seed", "null, or a 64-bit integer", brief(params.seed))
    in_range("sampling.n", params.n, 1, MOST_SAMPLES, error=error)
    if params.n > 1 and params.temperature == 0:
        raise error("sampling.n", "1 at temperature 0, where all outputs would be the same", params.n)
    longest = INT64_MOST if params.max_tokens is None else params.max_tokens
    most = min(longest, INT32_MOST)
    if not 0 <= params.min_tokens <= most:
        whose = " = max_tokens" if most == longest else ""
        raise error("sampling.min_tokens", f"an integer >= 0, at most {most}{whose}", brief(params.min_tokens))
    in_range("sampling.logprobs", params.logprobs, 0, INT32_MOST, error=error)
    for name in ("stop_token_ids", "allowed_token_ids"):
        for place, token in enumerate(getattr(params, name) or ()):
            in_range(f"sampling.{name}[{place}]", token, 0, INT64_MOST, error=error)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise error("sampling.allowed_token_ids", "null, or at least one token id", [])
    for name in ("stop", "bad_words"):
        for place, text in enumerate(getattr(params, name) or ()):
            if not text.strip() if name == "bad_words" else not text:
                raise error(f"sampling.{name}[{place}]", "text that is not empty", repr(text))
    for token, value in (params.logit_bias or {}).items():
        in_range("sampling.logit_bias", token, 0, INT64_MOST, error=error)
        in_range(f"sampling.logit_bias[{token}]", value, -BIAS_LIMIT, BIAS_LIMIT, error=error)


@dataclass(kw_only=True)
class NgramSettings:
    """What the n-gram drafters match. Depth, breadth and nodes are num_steps, topk and num_draft_tokens."""

    min_window: int = 1
    """Fewest tokens of context that must match."""
    max_window: int = 8
    """Most tokens of context that are compared; a longer match comes first."""
    match: str = "bfs"
    """Trie only. bfs: the most recent continuations first; prob: the most frequent ones."""
    min_breadth: int = 1
    """Trie only, bfs: children kept far below the anchor; topk is the most."""
    capacity: int = 1_000_000
    """Trie only: nodes before the least recently used leaves go."""
    corpus: str | None = None
    """Trie only: a text file, one document per line (.jsonl: a JSON string per line), inserted at load."""

    def __post_init__(self) -> None:
        check_fields(self, "variant.ngram", paths=("corpus",))
        in_range("variant.ngram.min_window", self.min_window, 1, MAX_NGRAM)
        in_range("variant.ngram.max_window", self.max_window, self.min_window, MAX_NGRAM)
        one_of("variant.ngram.match", self.match, NGRAM_MATCHES)
        in_range("variant.ngram.min_breadth", self.min_breadth, 1, MAX_NGRAM)
        in_range("variant.ngram.capacity", self.capacity, 1, INT32_MOST - 1)


@dataclass(kw_only=True)
class VariantConfig:
    """The drafter, and the shape of its drafts."""

    name: str = "eagle3"
    """An entry of the variant catalog."""
    draft: str | None = None
    """Folder of the draft checkpoint, or its name on the Hugging Face Hub; null: the draft shipped with a demo model."""
    draft_revision: str | None = None
    """Branch, tag or commit of a draft from the Hub; null: its main branch."""
    num_steps: int | None = None
    """S, draft depth. Of num_steps, topk and num_draft_tokens, those that are unset come from the variant's automatic shape, adapted to
    the ones that are set: num_steps=6 alone changes the depth and nothing else, topk=1 alone makes a chain."""
    topk: int | None = None
    """K, fan-out per draft step; 1 is a chain."""
    num_draft_tokens: int | None = None
    """N, verify nodes, root included. Unset: num_steps + 1 for a chain; for a tree the automatic number, at least 8 and num_steps + 1, or
    all candidates if there are fewer."""
    tree_choices: list[list[int]] | None = None
    """A static tree instead (EAGLE-1): paths of ranks, such as [[0], [1], [0, 0]]; null: the tree is built anew every cycle."""
    token_map: str | None = None
    """File of target token ids (.pt, .safetensors) the draft's head is trimmed to (FR-Spec); null: the whole vocabulary."""
    ngram: NgramSettings = field(default_factory=NgramSettings)
    """Settings of the n-gram drafters."""
    draft_noise: str = "coupled"
    """coupled: the drafter ranks with the sampler's own noise (more acceptance at temperature > 0); none: without."""

    def __post_init__(self) -> None:
        check_fields(self, "variant", paths=("draft", "token_map"))
        self.ngram.__post_init__()
        in_range("variant.num_steps", self.num_steps, 0, INT32_MOST)
        in_range("variant.topk", self.topk, 1, INT32_MOST)
        in_range("variant.num_draft_tokens", self.num_draft_tokens, 1, INT32_MOST)
        one_of("variant.draft_noise", self.draft_noise, DRAFT_NOISES)


@dataclass(kw_only=True)
class ModelConfig:
    """The target model."""

    path: str = "demo"
    """Folder of a Hugging Face checkpoint, its name on the Hub (``org/model``), a GGUF file, ``demo`` or ``demo_hybrid`` for a model
    shipped with the package, or ``smollm2`` for one that ``graphspec fetch`` brings."""
    revision: str | None = None
    """Branch, tag or commit of a model from the Hub; null: its main branch."""
    max_context: int | None = None
    """Longest prompt plus output, in tokens; null: what the checkpoint allows."""
    generation_config: str = "auto"
    """auto: where a request says nothing, temperature, top_k, top_p, min_p and repetition_penalty are those of the checkpoint's
    generation_config.json; ignore: they are neutral."""

    def __post_init__(self) -> None:
        check_fields(self, "model", paths=("path",))
        in_range("model.max_context", self.max_context, 2, INT32_MOST)
        one_of("model.generation_config", self.generation_config, GENERATION_CONFIGS)


@dataclass(kw_only=True)
class RuntimeConfig:
    """How the cycle is built and launched, and its capacity."""

    name: str = "auto"
    """eager, compiled or captured: presets over the two axes kernels and launch; auto: captured on a GPU, compiled on a CPU."""
    max_rows: int = 8
    """R, requests held at once."""
    buckets: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Lane counts for which a cycle exists, ascending."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int | None = None
    """KV pages in each pool, without the dummy page; null: what fits, at most max_rows full contexts; rows share them."""
    prefill_chunks: list[int] | None = None
    """Chunk sizes a prompt is cut into, ascending; null: 16, 64, 256, on a GPU 1024 and 2048 too, up to the context and the memory."""
    prefill_lanes: int = 4
    """Prompts whose chunks one launch may read, up to the largest chunk together; 1: one at a time, as always with attention=flashinfer."""
    prefill_tokens_per_cycle: int | None = None
    """Tokens of prompts, padding included, that may be read between two cycles of rows that decode, where each launch after the first
    counts as 256 more; null: 256, or the smallest chunk."""
    max_queued: int | None = None
    """Requests that may wait, in addition to the max_rows that run; a call with more is refused. null: any number."""
    cycles_in_flight: int = 1
    """Cycles queued on the device, including the one whose result is awaited; 1: launch and read in turn."""
    depth_per_bucket: dict[int, int] = field(default_factory=dict)
    """Draft depth of the cycles of some buckets, at most num_steps, such as {8: 3}; the others have num_steps."""
    memory_fraction: float = 0.9
    """Share of the memory free at start that the engine may use."""
    prefix_cache: bool | None = None
    """Prompts that begin alike share KV pages, and only the rest of a later one is computed; null: if target and drafter allow it. A
    prompt is then read in other chunks: with numerics=fast that may flip a near-tie, as other requests in the batch may."""
    tensor_parallel: int = 1
    """Ranks that hold the target together, a GPU or a share of the CPU each; started with the engine, or by torchrun."""
    draft_parallel: str = "auto"
    """Of several ranks. replicated: each holds all of the draft network; sharded: a part of its layers, and of its own head; auto: a part
    of what takes longer to read than the sums between ranks take, by bandwidth_gbs, link_gbs and sum_us of the hardware; without them, and
    on a CPU, all."""
    debug: bool = False
    """Check every buffer before each launch, poison those that live for one cycle, and refuse calls that wait for the device. Several ranks
    also compare what each cycle decided."""
    max_stop_ids: int = 8
    """Stop ids a request may have."""
    max_logit_bias: int = 300
    """Tokens a request may bias."""
    max_logprobs: int = 20
    """Alternatives a request may ask for with each token's log-probability."""
    sampling_classes: list[str] | None = None
    """What the sampler does for requests: greedy, everything, or some of noise, truncate, penalties, bias, allowed, bad_words, logprobs and
    grammar, such as noise+truncate; everything is all but grammar, and everything+grammar has that too. A launch runs the smallest class
    prepared that covers its rows. Captured cycles of these are made at load; elsewhere programs are made at their first use. null: greedy,
    everything, and the class of requests that say nothing, by the checkpoint's sampling defaults."""
    max_bad_words: int = 64
    """Token sequences that a request's bad words may make; a word makes one or two, with a space in front of it and without."""
    max_bad_word_tokens: int = 8
    """Tokens of the longest of them."""

    def __post_init__(self) -> None:
        check_fields(self, "runtime")
        one_of("runtime.name", self.name, RUNTIMES)
        in_range("runtime.tensor_parallel", self.tensor_parallel, 1, MAX_RANKS)
        one_of("runtime.draft_parallel", self.draft_parallel, DRAFT_PARALLEL)
        in_range("runtime.max_rows", self.max_rows, 1, MAX_ROWS)
        in_range("runtime.page_size", self.page_size, 1, MAX_PAGE)
        in_range("runtime.num_pages", self.num_pages, 1, INT32_MOST)
        in_range("runtime.cycles_in_flight", self.cycles_in_flight, 1, MAX_IN_FLIGHT)
        in_range("runtime.prefill_lanes", self.prefill_lanes, 1, MAX_ROWS)
        in_range("runtime.prefill_tokens_per_cycle", self.prefill_tokens_per_cycle, 1, INT32_MOST)
        in_range("runtime.max_queued", self.max_queued, 0, INT32_MOST)
        in_range("runtime.memory_fraction", self.memory_fraction, 0, 1, above=True)
        for bucket, depth in self.depth_per_bucket.items():
            in_range("runtime.depth_per_bucket", bucket, 1, MAX_ROWS)
            in_range(f"runtime.depth_per_bucket[{bucket}]", depth, 0, INT32_MOST)
        in_range("runtime.max_stop_ids", self.max_stop_ids, 1, MAX_ENTRIES)
        in_range("runtime.max_logit_bias", self.max_logit_bias, 1, MAX_ENTRIES)
        in_range("runtime.max_logprobs", self.max_logprobs, 1, INT32_MOST)
        in_range("runtime.max_bad_words", self.max_bad_words, 1, MAX_ENTRIES)
        in_range("runtime.max_bad_word_tokens", self.max_bad_word_tokens, 1, MAX_NGRAM)
        ascending("runtime.buckets", self.buckets, 1, MAX_ROWS)
        for place, name in enumerate(self.sampling_classes or ()):
            if sampling_class_of(name, self.max_logprobs) is None:
                parts = "noise, truncate (with noise), penalties, bias, allowed, bad_words, logprobs and grammar"
                expected = f"greedy, everything, everything+grammar, or some of {parts}, joined by +"
                raise ConfigError(f"runtime.sampling_classes[{place}]", expected, repr(name))
        if self.prefill_chunks is not None:
            ascending("runtime.prefill_chunks", self.prefill_chunks, 1, MAX_CHUNK)


@dataclass(kw_only=True)
class KernelsConfig:
    """Which implementation of each op runs. An explicit choice never falls back."""

    mode: str = "auto"
    """reference: plain torch; compiled: torch.compile; fused: Triton kernels, compiled together; auto: that of the runtime preset."""
    attention: str = "auto"
    """reference: plain torch; native: C++ for the CPU; fused: Triton; flashinfer: in a fused cycle FlashInfer's kernels where
    they apply, and fused elsewhere; auto: fused for a fused cycle, native for a compiled float32 cycle on the CPU, else reference."""
    linear: str = "auto"
    """The same choice for linear layers, without flashinfer; native ones hold their weights packed. If this and attention are both auto and
    both resolve to native, the decoder layers of a pass are one op; if either is set to native, they are separate ops."""
    numerics: str = "auto"
    """batch_invariant: a token's logits depend to the bit on the tokens before it alone; fast: sums in the order that measured best for
    the number of rows; auto: the former where it is free and proved, on a CPU by native kernels, else fast (docs/numerics.md)."""
    programmatic_launch: bool | None = None
    """Fused kernels may start while the one before them drains. null: if its probe has passed on this machine (docs/kernels.md)."""
    compile_around: bool = True
    """torch.compile what lies between fused kernels on a GPU. false: a cycle has more launches, and nothing to wait for at load."""
    linear_table: str | None = None
    """Measured choices between our linear layers and cuBLAS; what the file lacks is measured at start and added. null: a rule of thumb."""

    def __post_init__(self) -> None:
        check_fields(self, "kernels", paths=("linear_table",))
        one_of("kernels.mode", self.mode, KERNELS)
        one_of("kernels.attention", self.attention, ATTENTIONS)
        one_of("kernels.linear", self.linear, IMPLEMENTATIONS)
        one_of("kernels.numerics", self.numerics, NUMERICS)
        if self.linear_table is not None and self.numerics == "batch_invariant":
            raise ConfigError(
                "kernels.linear_table", f"null with kernels.numerics={self.numerics}, which chooses nothing", self.linear_table
            )


@dataclass(kw_only=True)
class SamplingConfig:
    """How the launcher's requests are sampled. The Python API takes a ``SamplingParams`` per request."""

    max_tokens: int | None = 128
    """Most new tokens; null: up to the end of the context."""
    temperature: float | None = None
    """0 is greedy, at most 1e5; null: the checkpoint's (model.generation_config), as for top_k, top_p, min_p and repetition_penalty."""
    n: int = 1
    """Outputs for each prompt, at a temperature above 0 if more than one."""
    seed: int | None = None
    """64 bits that decide every draw; null: a fresh one for each request, reported with its output. Output i has the seed seed + i."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a request, in addition to the checkpoint's end-of-text ids."""
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    """Texts that end a request when they occur in its output."""
    include_stop_str_in_output: bool = False
    """The text that ended a request is part of its output."""
    top_k: int | None = None
    """Keep the k most likely tokens; -1 or 0: all."""
    top_p: float | None = None
    """Of those, keep the most likely ones that together hold this share; 1: all."""
    min_p: float | None = None
    """Of those, keep the ones at least this share as likely as the most likely; 0: all."""
    repetition_penalty: float | None = None
    """Divides positive logits, multiplies negative ones, of tokens in the prompt or the output, 0.01 to 100; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each of its occurrences in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Sample from these token ids alone; null: from all."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that never occur in the output; their last token is not sampled after the others."""
    min_tokens: int = 0
    """No stop id, and no text of stop, before this many tokens."""
    speculate: bool = True
    """false: decode these requests plainly, one token per cycle."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output's text."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives; null: none."""

    def __post_init__(self) -> None:
        check_fields(self, "sampling")
        self.temperature = usable_temperature(self.temperature)
        check_sampling(self, ConfigError)

    def stated(self) -> SamplingConfig:
        """The same for what is measured or compared: neutral where it says nothing, so that no checkpoint's defaults change a figure.

        Raises:
            ConfigError: more than one output of a prompt.
        """
        if self.n != 1:
            raise ConfigError("sampling.n", "1 where requests are measured or compared", self.n)
        silent = {name: value for name, value in asdict(NEUTRAL).items() if getattr(self, name) is None}
        return replace(self, **silent)

    @property
    def stated_temperature(self) -> float:
        """That of :meth:`stated`."""
        return NEUTRAL.temperature if self.temperature is None else self.temperature


@dataclass(kw_only=True)
class AcceptConfig:
    """How drafted tokens are accepted. Ours leave the target's distribution as it is, but for synthetic, and target_only below 1.0."""

    rule: str = "match"
    """match (sample, then match), target_only (one coin per node), rejection (p/q, chains), synthetic (a forced length), or a package's."""
    threshold_single: float = 1.0
    """target_only: a child at least this likely is accepted without a coin; below 1 the output deviates from the target's."""
    threshold_acc: float = 1.0
    """target_only: the children's probabilities count divided by this; below 1 the output deviates from the target's."""
    block_verification: bool = False
    """rejection: judge the drafted chain as a whole, which accepts no fewer tokens on average; otherwise token by token."""
    synthetic_length: float | None = None
    """synthetic: mean tokens per cycle, the bonus token included, from 1 to num_steps + 1."""
    synthetic_rates: list[float] | None = None
    """synthetic, instead: share of cycles that accept depth 1, 2, ..., falling."""

    def __post_init__(self) -> None:
        check_fields(self, "accept")
        resolve_acceptance_rule(self.rule)
        in_range("accept.threshold_single", self.threshold_single, 0, 1)
        in_range("accept.threshold_acc", self.threshold_acc, LEAST, 1)
        if self.rule != "target_only" and (self.threshold_single, self.threshold_acc) != (1.0, 1.0):
            raise ConfigError("accept.threshold_single, accept.threshold_acc", f"1.0: rule {self.rule} knows no thresholds", "less")
        if self.block_verification and self.rule != "rejection":
            raise ConfigError("accept.block_verification", f"false: rule {self.rule} rejects no draft by its probability", True)
        forced = [self.synthetic_length, self.synthetic_rates]
        if (self.rule == "synthetic") != (sum(value is not None for value in forced) == 1):
            expected = "one of the two" if self.rule == "synthetic" else f"null: rule {self.rule} forces nothing"
            raise ConfigError("accept.synthetic_length, accept.synthetic_rates", expected, forced)
        in_range("accept.synthetic_length", self.synthetic_length, 1)
        rates = [1.0, *(self.synthetic_rates or [])]
        if any(not 0 <= later <= rate for rate, later in pairwise(rates)):
            raise ConfigError("accept.synthetic_rates", "falling shares from 0 to 1", self.synthetic_rates)


@dataclass(kw_only=True)
class HardwareConfig:
    """Device, dtype and the figures of the hardware."""

    name: str = "auto"
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is a GPU."""
    dtype: str = "auto"
    """Weights, activations and KV; auto: float32 on the CPU, the checkpoint's dtype on CUDA."""
    threads: int | None = None
    """CPU threads; null: torch's choice."""
    memory_gib: float | None = None
    """Memory that the engine may assume, in GiB; null: what is free on the GPU, or the machine's memory."""
    bandwidth_gbs: float | None = None
    """Memory bandwidth in GB/s (10^9 bytes), for ``graphspec plan`` and runtime.draft_parallel; null: not known."""
    tflops: float | None = None
    """Dense operations in ``dtype``, 10^12 per second, for ``graphspec plan``; null: not known."""
    capacity_gib: float | None = None
    """Nominal memory of the device, in GiB, for ``graphspec plan`` if memory_gib is unset."""
    link_gbs: float | None = None
    """What a device reads from others, in GB/s and one direction, for ``graphspec plan`` and runtime.draft_parallel; null: not known."""
    sum_us: float = 8.0
    """Microseconds that a sum over several ranks takes without data, for the same. The default is an assumption that was not
    measured."""

    def __post_init__(self) -> None:
        check_fields(self, "hardware")
        one_of("hardware.device", self.device, DEVICES)
        one_of("hardware.dtype", self.dtype, DTYPES)
        in_range("hardware.threads", self.threads, 1, MAX_THREADS)
        in_range("hardware.sum_us", self.sum_us, 0, INT32_MOST)
        for key in ("memory_gib", "bandwidth_gbs", "tflops", "capacity_gib", "link_gbs"):
            in_range(f"hardware.{key}", getattr(self, key), LEAST, MOST)


@dataclass(kw_only=True)
class AdaptiveConfig:
    """Draft depth that adapts from cycle to cycle. It never changes the output."""

    depths: list[int] = field(default_factory=list)
    """Depths with cycles in addition to num_steps, ascending, such as [0, 2]; empty: the depth is fixed. 0 decodes plainly."""
    backlog: int = 32
    """Tokens a row may decode at depth 0 before the drafter reads them in one wide pass."""
    times: dict[int, dict[int, float]] = field(default_factory=dict)
    """Time of a cycle by bucket and depth, in any unit; a bucket that is missing is measured at warm-up. ``graphspec tune`` writes them."""
    rates: list[float] = field(default_factory=list)
    """Share of drafts accepted at depth 1, 2, ..., given the ones before, assumed at start; empty: drafting is tried first."""

    def __post_init__(self) -> None:
        check_fields(self, "adaptive")
        ascending("adaptive.depths", self.depths, 0, INT32_MOST, empty=True)
        in_range("adaptive.backlog", self.backlog, 2, INT32_MOST)
        for bucket, times in self.times.items():
            in_range("adaptive.times", bucket, 1, MAX_ROWS)
            for depth, time in times.items():
                in_range(f"adaptive.times[{bucket}]", depth, 0, INT32_MOST)
                in_range(f"adaptive.times[{bucket}][{depth}]", time, LEAST, MOST)
        if any(not 0 <= rate <= 1 for rate in self.rates):
            raise ConfigError("adaptive.rates", "shares from 0 to 1", brief(self.rates))


@dataclass(kw_only=True)
class Config:
    """The whole configuration; ``graphspec --cfg job`` prints one."""

    variant: VariantConfig = field(default_factory=VariantConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    accept: AcceptConfig = field(default_factory=AcceptConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)

    def __post_init__(self) -> None:
        check_fields(self, "")
        # Groups can be changed after they were made: what an engine is built from is checked again.
        for f in fields(self):
            recheck = getattr(getattr(self, f.name), "__post_init__", None)
            if recheck is not None:
                recheck()
