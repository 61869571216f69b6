"""Structured configuration: the keys that a user may set, nothing derived. Standard library only.

The dataclasses are the schema of the YAML groups under ``conf/`` and can be built in Python just as well. ``None`` means "derive it"
(:mod:`graphspec.plan.plan` does). Values are checked where they are set; checks that need a checkpoint wait for the plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise

from ..errors import ConfigError
from ..shapes import NEUTRAL, sampling_class_of
from .catalog import resolve_acceptance_rule
from .checks import INT32_MAX, ascending, brief, check_fields, check_sampling, in_range, one_of, usable_temperature

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNTIMES = ("auto", "eager", "compiled", "captured")
KERNELS = ("auto", "reference", "compiled", "fused")
IMPLEMENTATIONS = ("auto", "reference", "native", "fused")
ATTENTIONS = (*IMPLEMENTATIONS, "flashinfer")
HOST_STEP_OVER_LATENT_ROWS = ("flashinfer",)
"""Attention whose kernels for latent rows take a work list from the host, and chains only."""
NUMERICS = ("auto", "fast", "cycle_invariant", "batch_invariant")
ACTIVATIONS = ("full", "int8", "bfloat16")
DRAFT_ACTIVATIONS = ("auto", "full")
DEVICES = ("auto", "cpu", "cuda")
DRAFT_NOISES = ("coupled", "none")
DRAFT_PARALLEL = ("auto", "replicated", "sharded")
NGRAM_MATCHES = ("bfs", "prob")
GENERATION_CONFIGS = ("auto", "ignore")
MODEL_FAMILIES = ("auto", "transformers")

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
MIN, MAX = 1e-9, 1e9
"""Bounds of measured quantities, in any unit."""


@dataclass(kw_only=True)
class NgramSettings:
    """Matching of the n-gram drafters. Depth, breadth and nodes are num_steps, topk and num_draft_tokens."""

    min_window: int = 1
    """Minimum tokens of context that must match."""
    max_window: int = 8
    """Maximum tokens of context to compare; longer matches come first."""
    match: str = "bfs"
    """Trie only. bfs: the most recent continuations first; prob: the most frequent ones."""
    min_breadth: int = 1
    """Trie only, bfs: minimum children kept far below the anchor; topk is the maximum."""
    capacity: int = 1_000_000
    """Trie only: maximum nodes; beyond it the least recently used leaves are evicted."""
    corpus: str | None = None
    """Trie only: a text file, one document per line (.jsonl: a JSON string per line), inserted at load."""

    def __post_init__(self) -> None:
        check_fields(self, "variant.ngram", paths=("corpus",))
        in_range("variant.ngram.min_window", self.min_window, 1, MAX_NGRAM)
        in_range("variant.ngram.max_window", self.max_window, self.min_window, MAX_NGRAM)
        one_of("variant.ngram.match", self.match, NGRAM_MATCHES)
        in_range("variant.ngram.min_breadth", self.min_breadth, 1, MAX_NGRAM)
        in_range("variant.ngram.capacity", self.capacity, 1, INT32_MAX - 1)


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
        in_range("variant.num_steps", self.num_steps, 0, INT32_MAX)
        in_range("variant.topk", self.topk, 1, INT32_MAX)
        in_range("variant.num_draft_tokens", self.num_draft_tokens, 1, INT32_MAX)
        one_of("variant.draft_noise", self.draft_noise, DRAFT_NOISES)


@dataclass(kw_only=True)
class ModelConfig:
    """The target model."""

    path: str = "demo"
    """Folder of a Hugging Face checkpoint, its name on the Hub (``org/model``), a GGUF file, ``demo`` or ``demo_hybrid`` for a model
    shipped with the package, or ``smollm2`` for one that ``graphspec fetch`` brings."""
    revision: str | None = None
    """Branch, tag or commit of a model from the Hub; null: its main branch."""
    family: str = "auto"
    """auto: a family of graphspec, by the architecture in config.json; transformers: the modules of transformers, for a model that has no
    family here. Slower; without compiled and captured cycles, and without drafters that read the target."""
    max_context: int | None = None
    """Longest prompt plus output, in tokens; null: what the checkpoint allows."""
    generation_config: str = "auto"
    """auto: temperature, top_k, top_p, min_p and repetition_penalty default to the checkpoint's generation_config.json; ignore: by
    default they have no effect."""

    def __post_init__(self) -> None:
        check_fields(self, "model", paths=("path",))
        in_range("model.max_context", self.max_context, 2, INT32_MAX)
        one_of("model.generation_config", self.generation_config, GENERATION_CONFIGS)
        one_of("model.family", self.family, MODEL_FAMILIES)


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
    kv_dtype: str = "auto"
    """Dtype of the KV pools: auto, float32, bfloat16 or float16. auto: hardware.dtype; fused kernels have no other. Keys and values are
    rounded when they are written; arithmetic does not change."""
    num_pages: int | None = None
    """KV pages in each pool, without the dummy page; null: what fits, at most max_rows full contexts; rows share them."""
    prefill_chunks: list[int] | None = None
    """Chunk sizes a prompt is cut into, ascending; null: 16, 64, 256, on a GPU 1024 and 2048 too, up to the context and the memory."""
    prefill_lanes: int = 4
    """Prompts whose chunks one launch may read, up to the largest chunk together; 1: one at a time, as always with attention=flashinfer."""
    prefill_tokens_per_cycle: int | None = None
    """Maximum prompt tokens, padding included, read between two decoding cycles. Each launch after the first counts as 256 tokens more.
    null: 256, or the smallest chunk."""
    max_queued: int | None = None
    """Maximum waiting requests, in addition to the max_rows that run; calls beyond it are refused. null: no limit."""
    cycles_in_flight: int = 1
    """Cycles queued on the device, including the one whose result is awaited; 1: launch and read in turn."""
    depth_per_bucket: dict[int, int] = field(default_factory=dict)
    """Draft depth of the cycles of some buckets, at most num_steps, such as {8: 3}; the others have num_steps."""
    memory_fraction: float = 0.9
    """Share of the memory free at start that the engine may use."""
    prefix_cache: bool | None = None
    """Share KV pages between prompts with a common prefix, and compute only the rest; null: if target and drafter allow it. A prompt is
    then read in other chunks, which may flip a near-tie with numerics=fast, like other requests in the batch."""
    tensor_parallel: int = 1
    """Ranks that hold the target together, a GPU or a share of the CPU each; started with the engine, or by torchrun."""
    draft_parallel: str = "auto"
    """With several ranks. replicated: each holds the whole draft network; sharded: each holds a part of its layers and head; auto: shards
    the parts that take longer to read than to sum over ranks, by bandwidth_gbs, link_gbs and sum_us of the hardware, and replicates if they
    are unknown or on a CPU."""
    debug: bool = False
    """Check every buffer before each launch, poison those that live for one cycle, and refuse calls that wait for the device. Several ranks
    also compare what each cycle decided."""
    max_stop_ids: int = 8
    """Maximum stop ids per request."""
    max_logit_bias: int = 300
    """Maximum biased tokens per request."""
    max_logprobs: int = 20
    """Maximum alternatives per token that a request may ask for with logprobs."""
    sampling_classes: list[str] | None = None
    """Sampling features to prepare programs for: greedy; default (what requests with default parameters need); everything (all but
    prompt_logprobs and grammar); or a combination of noise, truncate, penalties, bias, allowed, bad_words, logprobs, prompt_logprobs and
    grammar, such as noise+truncate or everything+grammar. A launch runs the smallest prepared class that covers its rows. Captured cycles
    are built at load, others at first use; graphspec serve builds all at load and refuses requests that need more. null: greedy, default
    and everything; with graphspec serve also everything+prompt_logprobs, and both with grammar if grammars can be compiled."""
    max_bad_words: int = 64
    """Maximum banned token sequences per request; a word makes one or two, with and without a leading space."""
    max_bad_word_tokens: int = 8
    """Maximum tokens of one banned sequence."""

    def __post_init__(self) -> None:
        check_fields(self, "runtime")
        one_of("runtime.name", self.name, RUNTIMES)
        in_range("runtime.tensor_parallel", self.tensor_parallel, 1, MAX_RANKS)
        one_of("runtime.kv_dtype", self.kv_dtype, DTYPES)
        one_of("runtime.draft_parallel", self.draft_parallel, DRAFT_PARALLEL)
        in_range("runtime.max_rows", self.max_rows, 1, MAX_ROWS)
        in_range("runtime.page_size", self.page_size, 1, MAX_PAGE)
        in_range("runtime.num_pages", self.num_pages, 1, INT32_MAX)
        in_range("runtime.cycles_in_flight", self.cycles_in_flight, 1, MAX_IN_FLIGHT)
        in_range("runtime.prefill_lanes", self.prefill_lanes, 1, MAX_ROWS)
        in_range("runtime.prefill_tokens_per_cycle", self.prefill_tokens_per_cycle, 1, INT32_MAX)
        in_range("runtime.max_queued", self.max_queued, 0, INT32_MAX)
        in_range("runtime.memory_fraction", self.memory_fraction, 0, 1, above=True)
        for bucket, depth in self.depth_per_bucket.items():
            in_range("runtime.depth_per_bucket", bucket, 1, MAX_ROWS)
            in_range(f"runtime.depth_per_bucket[{bucket}]", depth, 0, INT32_MAX)
        in_range("runtime.max_stop_ids", self.max_stop_ids, 1, MAX_ENTRIES)
        in_range("runtime.max_logit_bias", self.max_logit_bias, 1, MAX_ENTRIES)
        in_range("runtime.max_logprobs", self.max_logprobs, 1, INT32_MAX)
        in_range("runtime.max_bad_words", self.max_bad_words, 1, MAX_ENTRIES)
        in_range("runtime.max_bad_word_tokens", self.max_bad_word_tokens, 1, MAX_NGRAM)
        ascending("runtime.buckets", self.buckets, 1, MAX_ROWS)
        for place, name in enumerate(self.sampling_classes or ()):
            if sampling_class_of(name, self.max_logprobs) is None:
                parts = "noise, truncate (with noise), penalties, bias, allowed, bad_words, logprobs, prompt_logprobs and grammar"
                expected = f"greedy, everything, everything+grammar, default, or some of {parts}, joined by +"
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
    """batch_invariant: a token's logits depend to the bit on the tokens before it alone; cycle_invariant: on its prompt's KV and on the
    tokens after that, while prompts are read as with fast; fast: sums in the order that measured best for the number of rows; auto:
    batch_invariant on a CPU with native decoders, cycle_invariant on a GPU whose cycles have at most 64 nodes in all, else fast
    (docs/numerics.md)."""
    activations: str = "full"
    """What the target's weights are multiplied by. full: activations in the dtype of arithmetic; int8: with weights of 4 or 8 bits,
    activations rounded to 8 bits, 32 channels to a scale; bfloat16: with weights in bfloat16, activations rounded to bfloat16. The latter
    are faster and change the output a little, with and without drafts alike. Native linear layers on a CPU only (docs/numerics.md)."""
    draft_activations: str = "auto"
    """The same for the draft's weights: other drafts, the same output; under acceptance rules that read draft probabilities the same
    distribution. auto: rounded wherever a native product can, to 8 bits or to bfloat16; full: as above."""
    programmatic_launch: bool | None = None
    """Programmatic dependent launch: a fused kernel starts while the previous one drains. null: if its probe has passed on this machine
    (docs/kernels.md)."""
    compile_around: bool = True
    """Use torch.compile between fused kernels on a GPU. false: loads without waiting for it, but a cycle has more launches."""
    linear_table: str | None = None
    """File of measured choices between our linear kernels and cuBLAS; missing shapes are measured at start and added. null: a heuristic."""

    def __post_init__(self) -> None:
        check_fields(self, "kernels", paths=("linear_table",))
        one_of("kernels.mode", self.mode, KERNELS)
        one_of("kernels.attention", self.attention, ATTENTIONS)
        one_of("kernels.linear", self.linear, IMPLEMENTATIONS)
        one_of("kernels.numerics", self.numerics, NUMERICS)
        one_of("kernels.activations", self.activations, ACTIVATIONS)
        one_of("kernels.draft_activations", self.draft_activations, DRAFT_ACTIVATIONS)
        if self.linear_table is not None and self.numerics in ("cycle_invariant", "batch_invariant"):
            raise ConfigError(
                "kernels.linear_table", f"null with kernels.numerics={self.numerics}, which chooses nothing", self.linear_table
            )


@dataclass(kw_only=True)
class SamplingConfig:
    """How the launcher's requests are sampled. The Python API takes a ``SamplingParams`` per request."""

    max_tokens: int | None = 128
    """Maximum new tokens; null: until the context is full."""
    temperature: float | None = None
    """0 is greedy, at most 1e5; null: the checkpoint's (model.generation_config), as for top_k, top_p, min_p and repetition_penalty."""
    n: int = 1
    """Outputs for each prompt, at a temperature above 0 if more than one."""
    seed: int | None = None
    """64 bits; null: a random seed per request, reported with its output. Output i has the seed seed + i."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a request, in addition to the checkpoint's end-of-text ids."""
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    """Stop strings: the request ends when one occurs in its output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the output."""
    top_k: int | None = None
    """Keep the k most likely tokens; -1 or 0: all."""
    top_p: float | None = None
    """Then keep the smallest set of most likely tokens whose probability reaches this; 1: all."""
    min_p: float | None = None
    """Then keep tokens at least this fraction as likely as the most likely one; 0: all."""
    repetition_penalty: float | None = None
    """Divides positive logits, and multiplies negative logits, of tokens in the prompt or the output; 0.01 to 100; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each of its occurrences in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Sample from these token ids alone; null: from all."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that never occur in the output."""
    min_tokens: int = 0
    """No end-of-text id, stop id or stop string before this many tokens."""
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
        """The same for measurements and comparisons: unset values are neutral, so that no checkpoint's defaults change a figure.

        Raises:
            ConfigError: more than one output of a prompt.
        """
        if self.n != 1:
            raise ConfigError("sampling.n", "1 where requests are measured or compared", self.n)
        silent = {name: value for name, value in asdict(NEUTRAL).items() if getattr(self, name) is None}
        return replace(self, **silent)

    @property
    def stated_temperature(self) -> float:
        """The temperature, or the neutral one if none is set."""
        return NEUTRAL.temperature if self.temperature is None else self.temperature


@dataclass(kw_only=True)
class AcceptConfig:
    """How drafts are accepted. Every built-in rule keeps the target's distribution, except synthetic and thresholds below 1."""

    rule: str = "match"
    """match (sample, then match), target_only (one coin per node), rejection (p/q, chains), synthetic (a forced length), or a package's."""
    threshold_single: float = 1.0
    """target_only: children at least this likely are always accepted; below 1 the output deviates from the target's distribution."""
    threshold_acc: float = 1.0
    """target_only: children's probabilities are divided by this; below 1 the output deviates from the target's distribution."""
    block_verification: bool = False
    """rejection: verify the chain as a block (accepts at least as many tokens on average); false: token by token."""
    synthetic_length: float | None = None
    """synthetic: mean tokens per cycle, the bonus token included, from 1 to num_steps + 1."""
    synthetic_rates: list[float] | None = None
    """synthetic, instead: share of cycles that accept depth 1, 2, ..., falling."""

    def __post_init__(self) -> None:
        check_fields(self, "accept")
        resolve_acceptance_rule(self.rule)
        in_range("accept.threshold_single", self.threshold_single, 0, 1)
        in_range("accept.threshold_acc", self.threshold_acc, MIN, 1)
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
    """Weights, activations and KV; auto: float32 on the CPU, the checkpoint's dtype on CUDA. Compiled kernels on a CPU always compute in
    float32: there a 16-bit dtype is that of weights and KV."""
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
        in_range("hardware.sum_us", self.sum_us, 0, INT32_MAX)
        for key in ("memory_gib", "bandwidth_gbs", "tflops", "capacity_gib", "link_gbs"):
            in_range(f"hardware.{key}", getattr(self, key), MIN, MAX)


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
        ascending("adaptive.depths", self.depths, 0, INT32_MAX, empty=True)
        in_range("adaptive.backlog", self.backlog, 2, INT32_MAX)
        for bucket, times in self.times.items():
            in_range("adaptive.times", bucket, 1, MAX_ROWS)
            for depth, time in times.items():
                in_range(f"adaptive.times[{bucket}]", depth, 0, INT32_MAX)
                in_range(f"adaptive.times[{bucket}][{depth}]", time, MIN, MAX)
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
