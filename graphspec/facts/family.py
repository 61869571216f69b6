"""What a row of :mod:`graphspec.facts.families` says. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .heads import LayerHeads
from .keys import Keys
from .latent import LatentFacts
from .layer_inputs import LayerInputs
from .layer_kinds import Windows, no_window
from .layouts import QWEN3_5_LAYOUT, SPLIT_LAYOUT, Layout
from .mamba import Mixer
from .moe import ExpertFacts
from .multipliers import Multipliers
from .recurrent import RecurrentFacts
from .rope import ROPE_KINDS, RopeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. The defaults are a pre-norm decoder with SwiGLU and grouped queries, without biases and sliding windows."""

    name: str
    """``model_type`` in ``config.json``; of an entry point, its name."""
    architectures: tuple[str, ...]
    """Names in ``architectures`` of ``config.json``; ``*`` stands for any end of a name."""
    refused: str = ""
    """Why such a checkpoint can't be a target, where only a draft may have layers of this family."""
    layout: Layout = SPLIT_LAYOUT
    attention_bias: Literal["none", "stated", "apart", "qkv"] = "none"
    """``stated``: ``attention_bias`` says whether all four projections have one; ``apart``: whether all but the output's, and
    ``attention_out_bias`` whether that; ``qkv``: always, all but the output's."""
    mlp_bias: bool = False
    """``mlp_bias`` says whether the MLP has biases."""
    qk_norm: Literal["none", "head", "stated", "projection"] = "none"
    """RMSNorm of queries and keys before RoPE: over each head; where ``use_qk_norm`` says so; or over all heads together."""
    norms: Literal["before", "after", "around"] = "before"
    """Where attention and MLP have their norms: before them; after them, before their results are added (OLMo 2, arXiv 2501.00656); both
    (Gemma 2, arXiv 2408.00118)."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """MLPs and experts: SwiGLU; GeGLU with the tanh approximation; ``down(relu(up x)^2)``, without a gate (arXiv 2109.08668)."""
    norm: Literal["plain", "offset", "float32"] = "plain"
    """``offset``: norm weights are stored minus 1 (Gemma). ``float32``, and with an offset: scaled before the cast back, not after it."""
    attention_sinks: bool = False
    """Each head has a score more, of no key (gpt-oss)."""
    attention_gate: bool = False
    """The query projection gives each head a gate next to its query; the sigmoid of it scales the attention's output."""
    multi_head: bool = False
    """Without ``num_key_value_heads`` every query head has keys and values of its own; elsewhere the key is required."""
    heads: Callable[[Keys, Sequence[int | None]], tuple[LayerHeads, ...]] | None = None
    """Reads key and value heads of every layer, from config and windows, where they differ; None: all alike."""
    kv_sources: Callable[[Keys, Sequence[int | None]], tuple[int, ...]] | None = None
    """Reads which layer's keys and values each layer attends over, from config and windows; None: its own."""
    value_norm: bool = False
    """RMSNorm of values over each head, without weights."""
    layer_scale: bool = False
    """Each layer multiplies the residual stream that leaves it by a stored number."""
    layer_inputs: Callable[[Keys], LayerInputs | None] | None = None
    """Reads inputs that each layer has for itself; None: there are none."""
    shared_mlp_factor: Callable[[Keys], int] | None = None
    """Reads how many times wider the MLP is in layers without keys and values of their own; None: once."""
    head_dim: int | None = None
    """Width of a head where the config doesn't say; None: ``hidden_size`` over the number of heads."""
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    """The :data:`~graphspec.facts.rope.ROPE_KINDS` whose names mean the same here."""
    partial_rotary: float | None = None
    """Rotated part of a head where the config doesn't say; None: all of it, and a config that says otherwise is refused."""
    window: Windows = no_window
    latent: Callable[[Keys, int, RopeFacts], LatentFacts] | None = None
    """Reads multi-head latent attention from config, number of heads and RoPE; None: keys and values."""
    experts: Callable[[Keys, int], ExpertFacts | None] | None = None
    """Reads mixtures of experts from config and number of layers; None: every MLP is dense."""
    drafts_trees: bool = False
    """Drafters that choose a shape by themselves choose a tree, not a chain."""
    recurrent: Callable[[Keys, int], RecurrentFacts | None] | None = None
    """Reads recurrent layers from config and number of layers; None: every layer attends."""
    nested: str = ""
    """Key under which a config may have those of the language model, where the model also sees images."""
    language_families: tuple[str, ...] = ()
    """Names of other rows, of which that model may be by its own ``model_type``."""
    grouped_projection: bool = False
    """Projections of recurrent layers are stored key head by key head (Qwen3-Next), not part by part."""
    usual: Callable[[Keys], Keys] | None = None
    """The config under the names that all other readers use; None: it has them."""
    mixers: Callable[[Keys, int], tuple[Mixer, ...]] | None = None
    """Reads what each layer holds, where it holds one net after one norm; None: attention or a recurrent net, and an MLP."""
    side_by_side: bool = False
    """Every recurrent layer attends too: both read one input, and both results are added."""
    interleaved: bool = False
    """Rotated pairs are channels (2i, 2i + 1) of a head, not (i, i + R/2). They are put apart when queries and keys are loaded."""
    rotates: bool | None = True
    """Queries and keys are rotated; None: ``position_embedding_type`` says whether."""
    rotating: Callable[[Keys, Sequence[int | None]], tuple[bool, ...]] | None = None
    """Reads which layers rotate, from config and windows, where some don't (NoPE, arXiv 2305.19466); None: all alike."""
    tied: bool = False
    """What ``tie_word_embeddings`` is where the config doesn't say."""
    ties: bool = True
    """``tie_word_embeddings`` may say that the language-model head is the embedding; otherwise the key means nothing."""
    max_positions: int | None = None
    """``max_position_embeddings`` of a config that doesn't say, as in transformers; None: the key is required."""
    multipliers: Callable[[Keys], Multipliers] | None = None
    """Reads constants that streams are multiplied by; None: there are none."""
    own_modules: bool = False
    """The layers are modules of transformers (:mod:`graphspec.models.own_modules`); no other field says anything about them."""

    @property
    def shaped_like_llama(self) -> bool:
        """Layers of keys and values and dense MLPs, each after its norm, in separate tensors: ``graphspec train`` can read them."""
        unusual = (
            self.refused,
            self.attention_gate,
            self.attention_sinks,
            self.latent,
            self.interleaved,
            self.experts,
            self.recurrent,
            self.multipliers,
            self.rotating,
            self.heads,
            self.layer_inputs,
        )
        usual = self.layout is SPLIT_LAYOUT and self.norms == "before" and self.activation == "silu"
        return usual and not any(unusual)

    @property
    def shaped_like_qwen3_5(self) -> bool:
        """Gated delta nets, gated attention and dense MLPs under Qwen3.5's names: ``graphspec train`` can make and read them."""
        return self.layout is QWEN3_5_LAYOUT and not self.experts
