"""Settings of the target, and how settings of the recipes are read: from files of ``recipes/conf``, then from words ``key=value``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphspec.config.checks import INT32_MAX, check, check_fields, in_range, one_of
from graphspec.config.schema import MAX, MIN
from graphspec.config.train_options import LONGEST
from graphspec.errors import ConfigError

TARGETS = ("llama", "qwen3_5")
Settings = TypeVar("Settings")


@dataclass(kw_only=True)
class UnlikelihoodConfig:
    """Training a target against loops, after its schedule: it continues prompts of its text greedily, and tokens that repeat a run become
    less likely (Welleck et al. 2020, arXiv 1908.04319).
    """

    steps: int = 0
    """Optimizer steps; 0: none. Each also reads a batch of text as the first phase does."""
    lr: float = 0.0006
    """Peak learning rate of Muon and AdamW, which falls linearly to 0."""
    weight: float = 1.0
    """Weight of the unlikelihood relative to the loss on text."""
    width: int = 16
    """A token becomes less likely if it ends a run of this many tokens that occurred earlier in the same continuation."""
    refresh: int = 8
    """Steps after which new continuations are written."""
    sequences: int = 128
    """Continuations that are written at once."""
    batch: int = 16
    """Continuations per step."""
    prompt: int = 64
    """Tokens of a prompt."""
    length: int = 224
    """Tokens of a continuation with its prompt."""

    def __post_init__(self) -> None:
        check_fields(self, "unlikelihood")
        in_range("unlikelihood.steps", self.steps, 0, INT32_MAX)
        in_range("unlikelihood.lr", self.lr, MIN, MAX)
        in_range("unlikelihood.weight", self.weight, MIN, MAX)
        for key in ("refresh", "sequences", "prompt"):
            in_range(f"unlikelihood.{key}", getattr(self, key), 1, LONGEST)
        in_range("unlikelihood.batch", self.batch, 1, self.sequences)
        in_range("unlikelihood.width", self.width, 2, LONGEST)
        maximum = self.prompt + self.width
        check("unlikelihood.length", maximum < self.length <= LONGEST, f"above prompt + width = {maximum}", self.length)


RECURRENT_KEYS = (
    "head_dim", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
HYBRID_KEYS = ("architecture", *RECURRENT_KEYS)
"""Keys of ``target`` that records of a Llama omit."""


@dataclass(kw_only=True)
class TargetConfig:
    """Shape of a target that is trained from nothing; its embedding is also its output head."""

    architecture: str = "llama"
    """``llama``, or ``qwen3_5``: gated delta nets, and gated attention in every ``full_attention_interval``-th layer."""
    vocab_size: int = 2048
    """Entries of the byte-level BPE that is trained on the same data."""
    hidden_size: int = 192
    intermediate_size: int = 448
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    max_position_embeddings: int = 1024
    head_dim: int = 32
    """``qwen3_5``: width of an attention head, of which a quarter is rotated; elsewhere ``hidden_size / num_attention_heads``."""
    full_attention_interval: int = 4
    linear_num_key_heads: int = 2
    """``qwen3_5``, like the three below: heads of a gated delta net and their widths."""
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32

    def __post_init__(self) -> None:
        check_fields(self, "target")
        one_of("target.architecture", self.architecture, TARGETS)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", *RECURRENT_KEYS):
            in_range(f"target.{key}", getattr(self, key), 1, LONGEST)
        # 256 bytes and the end of a text.
        in_range("target.vocab_size", self.vocab_size, 257, LONGEST)
        in_range("target.max_position_embeddings", self.max_position_embeddings, 2, LONGEST)
        heads = self.num_attention_heads
        whole = self.architecture != "llama" or self.hidden_size % (2 * heads) == 0
        check("target.hidden_size", whole, f"a multiple of 2 x {heads} heads", self.hidden_size)
        grouped = heads % self.num_key_value_heads == 0
        check("target.num_key_value_heads", grouped, f"a divisor of num_attention_heads = {heads}", self.num_key_value_heads)
        if self.architecture == "llama":
            return
        check("target.head_dim", self.head_dim % 8 == 0, "a multiple of 8, for pairs of a quarter of it are rotated", self.head_dim)
        keys, values, every = self.linear_num_key_heads, self.linear_num_value_heads, self.full_attention_interval
        check("target.linear_num_value_heads", values % keys == 0, f"a multiple of linear_num_key_heads = {keys}", values)
        both = 2 <= every <= self.num_hidden_layers
        expected = f"2..num_hidden_layers = {self.num_hidden_layers}, so that there are layers of both kinds"
        check("target.full_attention_interval", both, expected, every)

    def shape(self) -> dict[str, Any]:
        """The keys that its architecture has."""
        return {key: value for key, value in asdict(self).items() if self.architecture != "llama" or key not in HYBRID_KEYS}


@dataclass(kw_only=True)
class TargetSettings:
    """What a target is trained by, next to the options of ``graphspec train``."""

    target: TargetConfig = field(default_factory=TargetConfig)
    unlikelihood: UnlikelihoodConfig = field(default_factory=UnlikelihoodConfig)


def read_settings(kind: type[Settings], file: Path | None, words: Sequence[str], prefix: str = "") -> Settings:
    """``kind`` from a YAML file, if there is one, and words ``key=value``.

    Raises:
        ConfigError: a key that is none, or a value of another type; the error names it after ``prefix``.
    """
    stored = OmegaConf.load(file) if file is not None and file.exists() else {}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), stored, OmegaConf.from_dotlist(list(words)))
        return cast("Settings", OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key, expected = f"{prefix}{error.full_key or '?'}", "a setting of the recipes"
        raise ConfigError(key, expected, str(error).splitlines()[0]) from error
