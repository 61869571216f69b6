"""The block-drafting network of DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...facts.layouts import Layout, TensorRule, decoder_rules
from ...kernels.linear.linear import Hidden, ResidualStream, hidden_of
from ...models.attention import HeadTransform
from ...models.checkpoint import Checkpoint, Progress
from ...models.decoder import DecoderLayer
from ...models.layers import Embedding, Linear, RMSNorm, SelfAttention
from ...models.stack import DecoderStack, KeyValueStack, packing_obstacle
from ..heads.network import DraftNetwork
from ..heads.tensors import check_kind, fill_head, read_vocab_map, settle_decoder

if TYPE_CHECKING:
    from ...models.attention import Attention
    from ...models.decoder import Decoder
    from .facts import DFlashFacts


class DFlashDraft(DraftNetwork):
    """``write_kv`` for the context, from the target's features; :meth:`block` for the anchor and the masks after it.

    Args:
        facts: the draft's sizes and options.
        max_positions, embed_tokens, lm_head: of :class:`~graphspec.drafters.heads.network.DraftNetwork`.
    """

    first_pass_only: ClassVar[tuple[str, ...]] = ("fc", "hidden_norm", "context_proj")
    facts: DFlashFacts

    def __init__(
        self, facts: DFlashFacts, max_positions: int, embed_tokens: Embedding | None = None, lm_head: Linear | None = None
    ) -> None:
        super().__init__(facts, max_positions, embed_tokens, lm_head)
        decoder = facts.decoder
        key = decoder.num_kv_heads * decoder.head_dim
        self.fc = Linear(facts.feature_size, decoder.hidden_size)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        # Keys and values of all layers: the features are the same for each, so they are one product. The block's own come from the layers.
        self.context_proj = Linear(decoder.hidden_size, *[key] * (2 * decoder.num_layers))
        if decoder.sharding.sharded:
            self.context_proj.shard_rows(*[decoder.sharding.key_shard(decoder.head_dim)] * (2 * decoder.num_layers))
        self.layers = nn.ModuleList(DecoderLayer(decoder, layer) for layer in range(decoder.num_layers))
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.stack: DecoderStack | None = None
        self.context_stack: KeyValueStack | None = None

    def pack_stack(self) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        layers = cast("list[DecoderLayer]", list(self.layers))
        if (reason := packing_obstacle(layers) or KeyValueStack.obstacle(self.context_proj)) is not None:
            return reason
        attentions = [cast("SelfAttention", layer.self_attn) for layer in layers]
        self.context_stack = KeyValueStack(self.context_proj, self.hidden_norm, attentions, self.rotary.rotary_dim)
        norms = [layer.input_layernorm for layer in layers]
        self.stack = DecoderStack(layers, norms, self.rotary.rotary_dim, whole=[not causal for causal in self.facts.causal])
        return None

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """``[B, T, H]`` from the target's tapped residual streams, un-normed: the input of the context's keys and values in all layers."""
        hidden_BTH: Tensor = self.fc(feature_BTF)
        return hidden_BTH

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> None:
        """Write keys and values of the context in every layer. They follow from the features alone; the tokens are not used."""
        del token_BT, step
        rotation = self.rotary.of(attention)
        if self.context_stack is not None:
            self.context_stack(hidden_BTH, rotation, attention)
            return
        parts = (
            self.context_proj(hidden_BTH, self.hidden_norm)
            .unflatten(-1, (-1, self.facts.decoder.head_dim))
            .split(self.facts.decoder.num_kv_heads, dim=2)
        )
        for layer, (key_BTGD, value_BTGD) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            own = cast("SelfAttention", cast("DecoderLayer", self.layers[layer]).self_attn)
            norm = None if own.k_norm is None else own.k_norm.weight
            heads = HeadTransform(rotation, norm, norm, self.norm.eps)
            # There are no queries here, but the op rotates some too: those of the first key head stand in.
            attention.write(layer, key_BTGD[:, :, :1], key_BTGD, value_BTGD, heads)

    def block(self, token_BT: Tensor, full: Attention, causal: Attention) -> Hidden:
        """Un-normed hidden states ``[B, T, H]`` of a block, the anchor first, as the last layer returns them.

        Args:
            token_BT: int64.
            full, causal: attention for layers in which rows see the whole block, and for those in which they see the rows before them. A
                packed network needs the second only.
        """
        rotation = self.rotary.of(causal)
        if self.stack is not None:
            return self.stack(self.embed_tokens(token_BT, causal.valid_BT), rotation, causal)[0]
        residual_BTH: Hidden = ResidualStream(self.embed_tokens(token_BT, full.valid_BT))
        for layer, is_causal in zip(self.layers, self.facts.causal, strict=True):
            residual_BTH = layer(residual_BTH, rotation, causal if is_causal else full)
        return residual_BTH

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Attention, step: int = 0) -> Tensor:
        """A block with one attention for all layers, causal or not; see :meth:`block`."""
        del hidden_BTH, step
        return hidden_of(self.block(token_BT, attention, attention))

    def output_norm(self) -> RMSNorm | None:
        """The final norm."""
        return self.norm


def dflash_layout(num_layers: int) -> Layout:
    """Tensor names of a draft; the key and value projections of the layers are read twice, once for ``context_proj``."""
    context = tuple(f"layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(num_layers) for kind in "kv")
    names = ("fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight")
    rules = (
        *(TensorRule(name, (name,)) for name in names),
        TensorRule("context_proj.weight", context),
        *decoder_rules("layers.*.", "layers.*."),
    )
    return Layout(rules, ("layers.*.self_attn.rotary_emb.inv_freq", "t2d", "d2t"))


def dflash_checkpoint(facts: DFlashFacts) -> tuple[Checkpoint, DFlashFacts]:
    """The tensors of a draft, and its facts with all that the tensors settle.

    Raises:
        CheckpointError: another kind of checkpoint, another number of tapped layers, or biases.
    """
    checkpoint = Checkpoint(facts.path)
    check_kind(checkpoint, "a block drafter, with fc.weight and hidden_norm.weight", "fc.weight", "hidden_norm.weight")
    facts = replace(facts, decoder=settle_decoder(checkpoint, facts.decoder))
    if facts.decoder.attention_bias:
        raise CheckpointError(f"{checkpoint.path}: attention_bias", "no biases of queries, keys and values", "biases")
    checkpoint.check("fc.weight", (facts.decoder.hidden_size, facts.feature_size))  # first: a wrong number of taps shows in its shape
    return checkpoint, facts


def load_dflash(
    facts: DFlashFacts,
    target: Decoder,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> DFlashDraft:
    """The block drafter of a checkpoint, in ``dtype`` on ``device``. Its embedding is the target's, and so is its head unless it has one.

    Raises:
        CheckpointError: another kind of checkpoint, or tensors that do not fit the config.
    """
    checkpoint, facts = dflash_checkpoint(facts)
    own_head = "lm_head.weight" in checkpoint
    if not own_head and facts.draft_vocab_size != facts.decoder.vocab_size:
        raise CheckpointError(f"{checkpoint.path}: lm_head.weight", f"a head of {facts.draft_vocab_size} tokens", "no such tensor")
    with torch.device("meta"):
        draft = DFlashDraft(facts, max_positions, target.embed_tokens, None if own_head else target.lm_head)
    shared = {"embed_tokens.weight", *(() if own_head else ("lm_head.weight",))}
    token_Vd = read_vocab_map(checkpoint, facts.decoder.vocab_size, facts.draft_vocab_size)
    fill_head(draft, checkpoint, dflash_layout(facts.decoder.num_layers), shared, dtype, device, progress)
    draft.name_columns(token_Vd, device)
    return draft.eval()
