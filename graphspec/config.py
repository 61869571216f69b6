"""Structured configuration: what a user may say, and nothing derived. Standard library only.

The dataclasses are the schema of the YAML groups under ``conf/`` and can be built in Python just as well. ``None`` means "derive it"
(:mod:`graphspec.plan` does). Values are checked where they are set; checks that need a checkpoint wait for the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from .errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNTIMES = ("eager", "compiled", "captured")
KERNELS = ("auto", "reference", "compiled", "fused")
IMPLEMENTATIONS = ("auto", "reference", "native")
DEVICES = ("auto", "cpu", "cuda")
DRAFT_NOISES = ("coupled", "none")


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(key, "one of " + ", ".join(allowed), repr(value))


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(key, f"a number >= {least}", value)


@dataclass(kw_only=True)
class VariantConfig:
    """Which drafter proposes tokens, and how much it proposes per cycle."""

    name: str = "eagle3"
    """An entry of the variant catalog."""
    draft: str | None = None
    """Folder of the draft checkpoint; None: the draft shipped with the demo model."""
    num_steps: int | None = None
    """S, draft depth. Set all of num_steps, topk, num_draft_tokens, or none of them."""
    topk: int | None = None
    """K, fan-out per draft step; 1 is a chain."""
    num_draft_tokens: int | None = None
    """N, verify nodes, root included."""
    draft_noise: str = "coupled"
    """coupled: the drafter ranks with the sampler's own noise (more acceptance at temperature > 0); none: without."""

    def __post_init__(self) -> None:
        _at_least("variant.num_steps", self.num_steps, 0)
        _at_least("variant.topk", self.topk, 1)
        _at_least("variant.num_draft_tokens", self.num_draft_tokens, 1)
        _choice("variant.draft_noise", self.draft_noise, DRAFT_NOISES)


@dataclass(kw_only=True)
class ModelConfig:
    """The target model."""

    path: str = "demo"
    """Folder of a Hugging Face checkpoint, or ``demo`` for the model shipped with the package."""
    max_context: int | None = None
    """Longest prompt plus output, in tokens; None: what the checkpoint allows."""

    def __post_init__(self) -> None:
        _at_least("model.max_context", self.max_context, 2)


@dataclass(kw_only=True)
class RuntimeConfig:
    """How the cycle is built and launched, and how much it holds."""

    name: str = "compiled"
    """eager, compiled or captured: presets over the two axes kernels and launch."""
    max_rows: int = 8
    """R, requests held at once."""
    buckets: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Lane counts for which a cycle exists, ascending."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int | None = None
    """KV pages in each pool, without the dummy page; None: enough for max_rows full contexts."""
    prefill_chunks: list[int] = field(default_factory=lambda: [16, 64, 256])
    """Chunk sizes a prompt is cut into, ascending."""
    run_ahead: int = 0
    """Cycles launched before the host has read an earlier one's result."""
    max_stop_ids: int = 8
    """Stop ids a request may have."""

    def __post_init__(self) -> None:
        _choice("runtime.name", self.name, RUNTIMES)
        _at_least("runtime.max_rows", self.max_rows, 1)
        _at_least("runtime.page_size", self.page_size, 1)
        _at_least("runtime.num_pages", self.num_pages, 1)
        _at_least("runtime.run_ahead", self.run_ahead, 0)
        _at_least("runtime.max_stop_ids", self.max_stop_ids, 1)
        for key, sizes in (("runtime.buckets", self.buckets), ("runtime.prefill_chunks", self.prefill_chunks)):
            if not sizes or sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
                raise ConfigError(key, "a non-empty ascending list of positive sizes", list(sizes))


@dataclass(kw_only=True)
class KernelsConfig:
    """Which implementation of each op runs. An explicit choice never falls back."""

    mode: str = "auto"
    """reference: plain torch; compiled: torch.compile; fused: hand-written kernels; auto: what the runtime preset means."""
    attention: str = "auto"
    """reference: plain torch; native: C++ for the CPU; auto: native for a compiled float32 cycle on the CPU, else reference."""
    linear: str = "auto"
    """The same choice for linear layers; native ones hold their weights packed."""

    def __post_init__(self) -> None:
        _choice("kernels.mode", self.mode, KERNELS)
        _choice("kernels.attention", self.attention, IMPLEMENTATIONS)
        _choice("kernels.linear", self.linear, IMPLEMENTATIONS)


@dataclass(kw_only=True)
class SamplingConfig:
    """How the launcher's requests are sampled. The Python API takes a ``SamplingParams`` per request."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a request, besides the checkpoint's end-of-text ids."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _at_least("sampling.max_tokens", self.max_tokens, 1)
        _at_least("sampling.temperature", self.temperature, 0.0)


@dataclass(kw_only=True)
class HardwareConfig:
    """Where it runs."""

    name: str = "auto"
    device: str = "auto"
    """cpu, cuda, or auto: cuda when there is one."""
    dtype: str = "auto"
    """Weights, activations and KV; auto: float32 on the CPU, the checkpoint's own on CUDA."""
    threads: int | None = None
    """CPU threads; None: torch's own choice."""

    def __post_init__(self) -> None:
        _choice("hardware.device", self.device, DEVICES)
        _choice("hardware.dtype", self.dtype, DTYPES)
        _at_least("hardware.threads", self.threads, 1)


@dataclass(kw_only=True)
class Config:
    """The whole configuration; ``graphspec --cfg job`` prints one."""

    variant: VariantConfig = field(default_factory=VariantConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def replaced(self, **overrides: Any) -> Config:
        """A copy with leaf fields replaced by their bare names (``num_steps=5, page_size=1``).

        Raises:
            ConfigError: a name that no group has, or that more than one has.
        """
        groups = {f.name: getattr(self, f.name) for f in fields(self) if is_dataclass(getattr(self, f.name))}
        changes: dict[str, dict[str, Any]] = {}
        for name, value in overrides.items():
            owners = [g for g, node in groups.items() if name != "name" and any(f.name == name for f in fields(node))]
            if len(owners) != 1:
                known = sorted({f.name for node in groups.values() for f in fields(node)} - {"name"})
                raise ConfigError(name, "a configuration key, one of " + ", ".join(known), f"{name}={value!r}")
            changes.setdefault(owners[0], {})[name] = value
        return replace(self, **{g: replace(groups[g], **values) for g, values in changes.items()})
