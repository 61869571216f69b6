"""Facts of a decoder, read from the ``config.json`` of its checkpoint folder. Standard library only.

Both spellings in circulation are read: ``rope_theta`` plus ``rope_scaling`` (with ``type`` or ``rope_type``), and the ``rope_parameters``
of transformers 5. A key that would change the computation and isn't supported is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from .families import LLAMA, all_families, find_family, target_architectures
from .family import Family
from .files import find_file
from .generation import FILE as GENERATION_FILE
from .heads import LayerHeads
from .keys import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_IDS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Keys,
    is_integer,
    read_architecture,
    read_config,
    read_keys,
)
from .latent import LatentFacts, rope_dim
from .layer_inputs import LayerInputs
from .mamba import Mixer
from .moe import ExpertFacts
from .multipliers import NO_MULTIPLIERS, Multipliers
from .quantisation import parse_quantisation
from .recurrent import RecurrentFacts
from .rope import LAYER_KINDS, NO_ROPE, RopeFacts, distinct_ropes, read_position_embedding, read_rope, rotating_kinds
from .sharding import UNSHARDED, Sharding, sharding_of

DTYPES = ("float32", "bfloat16", "float16")
OTHERWISE = "model.family=transformers may run it, slower"
"""What can be done about an architecture that no family has."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder of one of the families in :mod:`graphspec.facts.families`: its row, and what its config and tensors add."""

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """1 with latent attention."""
    head_dim: int
    """With latent attention only the part that is rotated."""
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    """The language-model head is the embedding, as the config states it. Of a checkpoint with tensors, these decide:
    :func:`graphspec.models.target.settle_head`."""
    attention_bias: bool
    """q, k and v projections have a bias."""
    output_bias: bool
    """The attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of queries and keys before RoPE, over what the family's row says."""
    sliding_window: tuple[int | None, ...]
    """Per layer: a query at p sees positions > p - window; None: all."""
    rope: RopeFacts
    """The rotation of all layers, or of those without an entry in ``layer_rope``."""
    bos_token_id: int | None
    """This and the next of a target only."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Dtype of the stored weights, as the config states it; float32 where it doesn't."""
    family: Family = LLAMA
    latent: LatentFacts | None = None
    """Multi-head latent attention in every layer."""
    experts: ExpertFacts | None = None
    """Mixtures of experts in some layers."""
    recurrent: RecurrentFacts | None = None
    """Layers with a recurrent state, in place of keys and values or next to them."""
    layer_rope: tuple[RopeFacts, ...] = ()
    """Per layer, where they are rotated differently; empty: all by ``rope``."""
    layer_heads: tuple[LayerHeads, ...] = ()
    """Per layer, where they differ; empty: ``num_kv_heads`` of ``head_dim`` in all."""
    kv_sources: tuple[int, ...] = ()
    """Per layer, the one whose keys and values it reads; empty: its own in all. -1: one of another network."""
    shared_mlp_factor: int = 1
    """By which the MLP is wider in layers without keys and values of their own."""
    layer_inputs: LayerInputs | None = None
    """Inputs of each layer's own."""
    mixers: tuple[Mixer, ...] | None = None
    """What each layer holds, where it is one net; None: attention or a recurrent net, and an MLP."""
    multipliers: Multipliers = NO_MULTIPLIERS
    sharding: Sharding = UNSHARDED
    """Heads and widths are those of one rank; vocabulary and hidden size are the whole model's."""
    vocabulary: Sharding = UNSHARDED
    """How embedding and language-model head are sharded."""
    stored_vocab_size: int | None = None
    """Rows of embedding and language-model head in the file, of which the first ``vocab_size`` are read; None: that many."""

    def heads(self, layer: int) -> LayerHeads:
        """Key and value heads of a layer, without latent attention."""
        return self.layer_heads[layer] if self.layer_heads else LayerHeads(self.num_kv_heads, self.head_dim)

    @property
    def pool_heads(self) -> tuple[LayerHeads, ...]:
        """The different heads of the layers, in the order of the layers; each kind has a KV pool of its own, all over one page table."""
        return tuple(dict.fromkeys(one.shape for one in self.layer_heads or (self.heads(0),)))

    def pool(self, layer: int) -> int:
        """The number of the KV pool that a layer attends over."""
        return self.pool_heads.index(self.heads(layer).shape) if self.layer_heads else 0

    @property
    def kv_rows(self) -> tuple[tuple[int, int, int], ...]:
        """By pool, the shape of a token's row in a layer: sides (keys and values, or one latent row), heads, and the width of each."""
        if self.latent is not None:
            return ((1, 1, self.latent.row_dim),)
        return tuple((2, heads.count, heads.dim) for heads in self.pool_heads)

    def pool_layers(self, pool: int) -> int:
        """Layers that keep keys and values in a pool."""
        own = self.pool_heads[pool]
        return sum(self.keeps(layer) and self.heads(layer).shape == own for layer in range(self.num_layers))

    def is_recurrent(self, layer: int) -> bool:
        """The layer keeps a recurrent state."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def attends(self, layer: int) -> bool:
        """The layer has attention."""
        if self.mixers is not None:
            return self.mixers[layer] == "attention"
        return self.family.side_by_side or not self.is_recurrent(layer)

    def keeps(self, layer: int) -> bool:
        """The layer attends, and over keys and values of its own."""
        return self.attends(layer) and (not self.kv_sources or self.kv_sources[layer] == layer)

    def mlp_size(self, layer: int) -> int:
        """Width of a layer's dense MLP."""
        return self.intermediate_size * (1 if self.keeps(layer) or not self.attends(layer) else self.shared_mlp_factor)

    def place(self, layer: int) -> int:
        """The layer's number among the layers of its kind: in the recurrent states, or in its KV pool, that of the layer whose keys and
        values it reads.
        """
        if self.is_recurrent(layer):
            return sum(self.is_recurrent(before) for before in range(layer))
        own, source = self.heads(layer).shape, self.kv_sources[layer] if self.kv_sources else layer
        return sum(self.keeps(before) and self.heads(before).shape == own for before in range(source))

    @property
    def ropes(self) -> tuple[tuple[RopeFacts, ...], ...]:
        """By pool, the different rotations of its layers, ``rope`` first; each pool's are a table of angles for every position."""
        if not self.layer_heads:
            return (distinct_ropes((self.rope, *self.layer_rope), self.head_dim),)
        each = self.layer_rope or (self.rope,) * self.num_layers
        kinds = [(own, [rope for rope, one in zip(each, self.layer_heads, strict=True) if one.shape == own]) for own in self.pool_heads]
        return tuple(distinct_ropes(ropes, heads.dim) for heads, ropes in kinds)

    @property
    def rope_columns(self) -> int:
        """Cosines and sines of one position in all tables of angles."""
        if self.rope.kind == "dynamic":  # computed, not looked up
            return 0
        return sum(len(ropes) * ropes[0].rotary_dim(heads.dim) for ropes, heads in zip(self.ropes, self.pool_heads, strict=True))

    def rotated_alike(self, where: str) -> ModelFacts:
        """The same with one rotation for all layers, as draft networks have it.

        Raises:
            CheckpointError: the layers have different ones.
        """
        if len(set(self.layer_rope)) > 1:
            raise CheckpointError(f"{where}: rope_parameters", "one rotation for all layers of a draft", "different ones by kind of layer")
        return replace(self, rope=self.layer_rope[0], layer_rope=()) if self.layer_rope else self

    def rope_index(self, layer: int) -> int:
        """The place of a layer's rotation among those of its pool."""
        return self.ropes[self.pool(layer)].index(self.layer_rope[layer]) if self.layer_rope else 0

    @property
    def longest_context(self) -> int:
        """Tokens that the model can see, with scaled RoPE."""
        return self.rope.context(self.max_position_embeddings)

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(self.keeps(layer) for layer in range(self.num_layers))

    def score_scale(self, layer: int) -> float:
        """Factor of a layer's attention scores, without latent attention."""
        stated = self.multipliers.attention
        return (self.heads(layer).dim ** -0.5 if stated is None else stated) * self.multipliers.scores

    def has_experts(self, layer: int) -> bool:
        """The MLP of this layer is a mixture."""
        return self.experts is not None and self.experts.layers[layer]

    def norms_over_ranks(self, layer: int) -> bool:
        """The layer norms numbers together that lie on several ranks: the queries of all heads, or a group of recurrent heads."""
        if self.recurrent is not None and self.is_recurrent(layer):
            return self.recurrent.splits_groups
        return self.sharding.sharded and self.attends(layer) and self.family.qk_norm == "projection"

    @property
    def blocks(self) -> int:
        """Attentions, recurrent nets, MLPs and mixtures: all that is added to the residual stream."""
        return self.num_layers if self.mixers is not None else 2 * self.num_layers

    def of_rank(self, rank: int, size: int) -> ModelFacts:
        """What one of ``size`` ranks holds; a single one holds everything.

        Raises:
            ConfigError: that many ranks can't hold the model together.
        """
        if size == 1:
            return self
        reason = ""
        if self.family.side_by_side:
            reason = "has attention and a recurrent net side by side"
        if self.layer_heads:
            reason = "has heads that differ from layer to layer"
        if reason:
            raise ConfigError("runtime.tensor_parallel", f"1 for {self.architecture}, which {reason}", size)
        _check_ranks(self, size)
        sharding = sharding_of(rank, size, self.num_heads, self.num_kv_heads)
        experts = self.experts and replace(
            self.experts,
            intermediate_size=self.experts.intermediate_size // size,
            shared_size=self.experts.shared_size // size,
        )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=len(sharding.key_heads) if self.latent is None else 1,
            intermediate_size=self.intermediate_size // size,
            experts=experts,
            recurrent=self.recurrent and self.recurrent.of_rank(rank, size),
            sharding=sharding,
            vocabulary=sharding,
        )

    def layers_from(self, first: int) -> ModelFacts:
        """The same without its first layers."""
        experts = self.experts and replace(self.experts, layers=self.experts.layers[first:])
        recurrent = self.recurrent and self.recurrent.layers_from(first)
        assert not self.kv_sources, "layers that each have their own keys and values"
        return replace(
            self,
            num_layers=self.num_layers - first,
            sliding_window=self.sliding_window[first:],
            layer_rope=self.layer_rope[first:],
            layer_heads=self.layer_heads[first:],
            experts=experts,
            recurrent=recurrent,
            mixers=self.mixers and self.mixers[first:],
        )


def _check_ranks(facts: ModelFacts, size: int) -> None:
    widths = [("num_attention_heads", facts.num_heads), ("intermediate_size", facts.intermediate_size)]
    if facts.experts is not None:
        widths += [("moe_intermediate_size", facts.experts.intermediate_size), ("the shared experts' width", facts.experts.shared_size)]
    if facts.recurrent is not None:
        widths.append(("the heads of recurrent layers", facts.recurrent.value_heads))
    for name, width in widths:
        if width % size:
            raise ConfigError("runtime.tensor_parallel", f"a divisor of {name} = {width}", size)


def _read_eos(keys: Keys, vocab_size: int) -> tuple[int, ...] | None:
    value = keys.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_IDS or not all(is_integer(token) and 0 <= token < vocab_size for token in ids):
        raise keys.error("eos_token_id", f"token ids in [0, {vocab_size}), one or a list of at most {MAX_IDS}, or null")
    return tuple(dict.fromkeys(ids))


def read_ids(keys: Keys, path: Path, facts: ModelFacts) -> ModelFacts:
    """The facts with the ids that begin and end a text; those of ``generation_config.json`` take precedence.

    Raises:
        CheckpointError: ids that are none.
    """
    generation = path / GENERATION_FILE
    eos, stated = _read_eos(keys, facts.vocab_size), None
    if find_file(generation):
        stated = _read_eos(read_keys(generation), facts.vocab_size)
    bos = keys.integer("bos_token_id", minimum=0) if keys.present("bos_token_id") else None
    return replace(facts, bos_token_id=bos, eos_token_ids=(eos or ()) if stated is None else stated)


def _read_dtype(keys: Keys) -> str:
    found = []
    for key in ("dtype", "torch_dtype"):
        if keys.present(key):
            found.append(str(keys.values[key]).removeprefix("torch."))
            if found[-1] not in DTYPES:
                raise keys.error(key, "one of " + ", ".join(DTYPES))
    return found[0] if found else "float32"


def _read_ropes(
    keys: Keys, family: Family, max_position_embeddings: int, head_dim: int, windows: tuple[int | None, ...], heads: Sequence[LayerHeads]
) -> tuple[RopeFacts, tuple[RopeFacts, ...]]:
    """``rope`` and ``layer_rope`` of :class:`ModelFacts`; ``heads``: its ``layer_heads``."""
    none = RopeFacts(0.0, NO_ROPE)
    if not read_position_embedding(keys, family.rotates):
        return none, ()
    kinds = rotating_kinds(keys, windows)
    dims = {LAYER_KINDS[window is not None]: one.dim for window, one in zip(windows, heads, strict=bool(heads))}
    found = read_rope(keys, max_position_embeddings, head_dim, family.rope_kinds, family.partial_rotary, kinds, dims)
    rotates = family.rotating(keys, windows) if family.rotating is not None else (True,) * len(windows)
    each = [found.get(LAYER_KINDS[window is not None], next(iter(found.values()))) for window in windows]
    layers = tuple(rope if turns else none for rope, turns in zip(each, rotates, strict=True))
    first = found.get(LAYER_KINDS[0], next(iter(found.values())))
    if family.latent is not None and len(set(layers)) > 1:
        expected = "one rotation for all layers with latent attention"
        raise keys.error("rope_scaling" if keys.present("rope_scaling") else "rope_parameters", expected)
    if len(set(layers)) == 1:
        return layers[0], ()
    if len({one.dim for one in heads}) > 1:
        if any(rope.kind == "dynamic" for rope in layers):
            raise keys.error("rope_parameters", "no dynamic scaling where heads have several widths")
        return first, layers
    try:
        return distinct_ropes((first, *layers), head_dim)[0], layers
    except ValueError as error:
        raise keys.error("rope_parameters", str(error)) from error


def read_decoder(keys: Keys, path: Path, architecture: str, family: Family) -> ModelFacts:
    """Facts of decoder layers that compute as those of ``family`` do, whatever the checkpoint calls itself. They have no token ids: a draft
    reads none.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    if keys.values.get("quantization_config") not in (None, {}):
        parse_quantisation(keys.values["quantization_config"], f"{keys.where}: quantization_config")
    activation = "gelu_pytorch_tanh" if family.activation == "gelu_tanh" else "silu"
    if keys.values.get("hidden_act", activation) != activation:
        raise keys.error("hidden_act", repr(activation))
    hidden_size = keys.integer("hidden_size", maximum=MAX_WIDTH)
    num_layers = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = keys.integer("num_attention_heads", maximum=MAX_HEADS)
    kv = "num_key_value_heads"
    if family.latent is not None:
        num_kv_heads = 1
    elif keys.values.get(kv) is None and (family.multi_head or kv in keys.values):
        num_kv_heads = num_heads
    else:
        num_kv_heads = keys.integer(kv, maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise keys.error(kv, f"a divisor of num_attention_heads = {num_heads}")
    if family.head_dim is not None and not keys.present("head_dim"):
        head_dim = family.head_dim
    elif family.latent is not None:
        head_dim = rope_dim(keys)
    elif keys.present("head_dim"):
        head_dim = keys.integer("head_dim", minimum=2, maximum=MAX_HEAD_DIM)
    elif hidden_size % num_heads:
        raise keys.error("head_dim", f"a head_dim, since hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"{keys.where}: head_dim", f"an even number (RoPE rotates pairs), at most {MAX_HEAD_DIM}", head_dim)
    positions = "max_position_embeddings"
    if family.max_positions is None or keys.present(positions):
        max_position_embeddings = keys.integer(positions, maximum=MAX_POSITIONS)
    else:
        max_position_embeddings = family.max_positions
    vocab_size = keys.integer("vocab_size", maximum=MAX_VOCAB)
    if family.attention_gate and not keys.flag("attn_output_gate", True):
        raise keys.error("attn_output_gate", "true")
    experts = family.experts(keys, num_layers) if family.experts is not None else None
    # Where every MLP is a mixture, a config need not have the width of a dense one.
    if not keys.present("intermediate_size") and experts is not None and all(experts.layers):
        width = experts.intermediate_size
    else:
        width = keys.integer("intermediate_size", maximum=MAX_WIDTH)
    bias = keys.flag("attention_bias", False) and family.attention_bias in ("stated", "apart")
    output_bias = bias if family.attention_bias != "apart" else keys.flag("attention_out_bias", False)
    windows = family.window(keys, num_layers)
    heads = family.heads(keys, windows) if family.heads is not None else ()
    for one in heads:
        if num_heads % one.count:
            raise keys.error("num_global_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
        if one.dim % 2:
            raise keys.error("global_head_dim", "an even number (RoPE rotates pairs)")
    sources = family.kv_sources(keys, windows) if family.kv_sources is not None else ()
    if any(heads[layer].shape != heads[source].shape for layer, source in enumerate(sources if heads else ())):
        raise keys.error("per_layer_config", "the same heads in layers that share keys and values")
    rope, layer_rope = _read_ropes(keys, family, max_position_embeddings, head_dim, windows, heads)
    return ModelFacts(
        path=path,
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", maximum=1.0),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tied) and family.ties,
        attention_bias=bias or family.attention_bias == "qkv",
        output_bias=output_bias,
        mlp_bias=keys.flag("mlp_bias", False) and family.mlp_bias,
        qk_norm=keys.flag("use_qk_norm", False) if family.qk_norm == "stated" else family.qk_norm != "none",
        sliding_window=windows,
        rope=rope,
        layer_rope=layer_rope,
        layer_heads=heads,
        kv_sources=sources,
        shared_mlp_factor=family.shared_mlp_factor(keys) if family.shared_mlp_factor is not None else 1,
        layer_inputs=family.layer_inputs(keys) if family.layer_inputs is not None else None,
        bos_token_id=None,
        eos_token_ids=(),
        dtype=_read_dtype(keys),
        family=family,
        latent=family.latent(keys, num_heads, rope) if family.latent is not None else None,
        experts=experts,
        recurrent=family.recurrent(keys, num_layers) if family.recurrent is not None else None,
        mixers=family.mixers(keys, num_layers) if family.mixers is not None else None,
        multipliers=family.multipliers(keys) if family.multipliers is not None else NO_MULTIPLIERS,
    )


def _language_model(keys: Keys, family: Family) -> Keys:
    """The keys of the language model, completed by the outer ones that it lacks; ``tie_word_embeddings`` is always the outer one."""
    if not family.nested or not keys.present(family.nested):
        return keys
    inner, around = keys.values[family.nested], dict(keys.values)
    if not isinstance(inner, dict):
        raise keys.error(family.nested, "an object")
    del around[family.nested]
    whole = {key: around[key] for key in ("tie_word_embeddings",) if around.get(key) is not None}
    return Keys({**around, **inner, **whole}, f"{keys.where}: {family.nested}")


def _language_family(keys: Keys, family: Family) -> Family:
    """The row of a language model: that of its checkpoint's architecture, or one of those that this row names."""
    name = keys.values.get("model_type")
    own = next((row for row in all_families() if row.name == name and name in family.language_families), None)
    return family if own is None else replace(own, tied=family.tied)


def _read_whole(path: str | Path) -> tuple[ModelFacts, Keys]:
    """Facts of a whole model, without token ids, and the keys of its language model."""
    path = Path(path)
    keys = read_config(path)
    expected = "one of " + ", ".join(target_architectures())
    architecture = read_architecture(keys, expected)
    family = find_family(architecture)
    if family is None or family.refused:
        raise keys.error("architectures", expected, family.refused if family is not None else OTHERWISE)
    keys = _language_model(keys, family)
    family = _language_family(keys, family)
    return read_decoder(keys if family.usual is None else family.usual(keys), path, architecture, family), keys


def read_model_facts(path: str | Path) -> ModelFacts:
    """Facts of a target checkpoint in Hugging Face layout.

    Raises:
        CheckpointError: no folder, no or invalid ``config.json``, a missing or wrong key, an architecture, activation, quantization or RoPE
            type that isn't supported. The message names file and key, what was expected and what was found.
    """
    facts, keys = _read_whole(path)
    return read_ids(keys, facts.path, facts)


def read_draft_model_facts(path: str | Path) -> ModelFacts:
    """The same of a whole model that drafts: its token ids are not read, since the target says where a text ends.

    Raises:
        CheckpointError: as :func:`read_model_facts`, except for token ids.
    """
    return _read_whole(path)[0]
