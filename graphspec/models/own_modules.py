"""A target made of transformers' own modules, for models that no family describes: their attention is replaced by ours over paged KV.

transformers lets a function take the place of attention (``AttentionInterface``). Ours gets queries, keys and values as the model has made
them, rotation included, writes keys and values to the pages and attends; trees and chunks are verified in one pass like those of a family.
What a model's layers are is seen in a trial pass without data, and what can't be served is refused there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from ..config.checks import LONG, brief
from ..errors import CheckpointError
from ..facts.families import OWN_MODULES
from ..facts.keys import MAX_HEAD_DIM, Keys, read_config
from ..facts.model import DTYPES, ModelFacts, read_ids
from ..facts.rope import NO_ROPE, RopeFacts
from .attention import HeadTransform, RotaryEmbedding, Weighing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .attention import Attention
    from .recurrence import Convolution

NAME = "graphspec_paged"
"""Name of our attention in transformers' table."""
_TRIAL_TOKENS = 3
_READ = frozenset(("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"))
_HARMLESS = frozenset(("position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values", "return_dict"))
"""Arguments of attention that ours need not read: what they say is in the queries and keys already, or is about what is returned."""
_LAYERS = ("full_attention", "sliding_attention")
_SELF_SCALING = ("dynamic", "longrope")
_HINT = "this model needs a family of its own"


class _Unservable(Exception):  # noqa: N818 - never leaves this file
    """What a model does that paged attention can't; in words."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention: the module that makes it, its heads, and its sliding window."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


class _Trial:
    """Notes the calls of a pass without data in place of attention."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        unknown = sorted(key for key, given in options.items() if key not in _READ | _HARMLESS and not key.startswith("output_") and given)
        if unknown:
            raise _Unservable(f"its attention takes {unknown[0]}")
        if value.shape != key.shape or query.shape[-1] != key.shape[-1]:
            raise _Unservable("its keys and values have different widths")
        if key.shape[2] != query.shape[2]:
            raise _Unservable("its attention reads keys of other tokens than its queries'")
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _Unservable("its attention sees later tokens")
        window = options.get("sliding_window")
        if mask is not None:
            if mask.shape != (1, 1, 1, 1) or mask.dtype != torch.int64:
                raise _Unservable("it makes attention masks of its own")
            window = mask.item() or None
        self.calls.append(_Call(module, query.shape[1], key.shape[1], query.shape[-1], window))
        return query.transpose(1, 2)


class _Paged:
    """Attention of one module over the pages of the pass that is running."""

    def __init__(self, network: OwnModules, layer: int, window: int | None) -> None:
        self.network, self.layer, self.window = network, layer, window

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        del module, mask
        attention = self.network.attention
        assert attention is not None, "a pass of the network that holds the module"
        query_BTQD, key_BTGD, value_BTGD = (part.transpose(1, 2).contiguous() for part in (query, key, value))
        scale, weighing = options.get("scaling"), Weighing(options.get("s_aux"), options.get("softcap") or 0.0)
        heads = HeadTransform(self.network.rotary.of(attention))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attention(self.layer, query_BTQD, key_BTGD, value_BTGD, heads, scale, self.window, weighing)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: ``[B, heads, T, D]`` each, to ``[B, T, Q, D]``."""
    place = cast("_Trial | _Paged", module.paged_place)
    return place.attend(module, query, key, value, attention_mask, options), None


def _mask(mask_function: Callable[..., Any], config: Any, **_: Any) -> Tensor:
    """What transformers calls for a mask, in the trial pass only: the sliding window that the mask means, 0 for none, in one number.

    The function says whether a query sees a key, by batch, head and both positions; it is asked about the last position and some others.
    """
    count = config.max_position_embeddings
    key, zero = torch.arange(count, device="cpu"), torch.tensor(0, device="cpu")

    def seen(query: int) -> Tensor:
        try:
            found = mask_function(zero, zero, torch.tensor(query, device="cpu"), key)
        except Exception as error:
            raise _Unservable("it makes attention masks of its own") from error
        return torch.as_tensor(found).expand(count)

    window = int(seen(count - 1).sum())
    queries = {0, 1, 2, window - 1, window, window + 1, 2 * window, count // 3, count // 2, count - 2, count - 1}
    for query in sorted(query for query in queries if 0 <= query < count):
        if not torch.equal(seen(query), (key <= query) & (key > query - window)):
            raise _Unservable("it makes attention masks of its own")
    return torch.full((1, 1, 1, 1), 0 if window == count else window, dtype=torch.int64, device="cpu")


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _decoder(model: Any) -> nn.Module:
    """The part of a model that gives hidden states, without the head."""
    decoder: nn.Module = model.get_decoder()
    if decoder is model:
        decoder = getattr(model, "model", model)
    if decoder is model:
        raise _Unservable("its layers and its head are one module")
    return decoder


def _refuse_by_config(config: Any, model: Any, decoder: nn.Module) -> None:
    """Check, before a pass, that the model takes positions as an input and that every layer keeps KV and nothing else."""
    if config.get_text_config() is not config:
        raise _Unservable("it does not read texts alone")
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise _Unservable("its positions can't be given")
    if model._is_stateful:  # noqa: SLF001 - what transformers itself asks
        raise _Unservable("it has recurrent layers")
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYERS]
    if kinds:
        raise _Unservable(f"it has layers of kind {kinds[0]}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _Unservable("layers share keys and values")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") in _SELF_SCALING:
            raise _Unservable(f"its rope_type {rope['rope_type']} depends on the length of a text")


def _refuse_by_calls(calls: Sequence[_Call], layers: int) -> None:
    """Refuse a model whose attention is not one call per layer, all of one shape that the kernels have."""
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        raise _Unservable(f"attention of {len(calls)} of its {layers} layers goes through transformers' attention interface")
    if len({(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}) > 1:
        raise _Unservable("its layers have heads of different shapes")
    if calls[0].head_dim % 2 or calls[0].head_dim > MAX_HEAD_DIM:
        raise _Unservable(f"its heads have a width of {calls[0].head_dim}")


def _try(config: Any, model: Any) -> list[_Call]:
    """The attention calls of a pass of a model on ``meta``."""
    decoder = _decoder(model)
    _refuse_by_config(config, model, decoder)
    trial = _Trial()
    for module in model.modules():
        module.paged_place = trial
    token = torch.zeros((1, _TRIAL_TOKENS), dtype=torch.int64, device="meta")
    try:
        output = decoder(
            input_ids=token, attention_mask=torch.ones_like(token), position_ids=token, use_cache=False, return_dict=True
        )  # fmt: skip
        hidden = output.last_hidden_state
    except _Unservable:
        raise
    except Exception as error:
        raise _Unservable(f"a trial pass fails: {_spell(error)}") from error
    _refuse_by_calls(trial.calls, config.num_hidden_layers)
    if hidden.shape[:2] != token.shape or hidden.dim() != 3:
        raise _Unservable("it gives no hidden state for each token")
    return trial.calls


def _spell(error: Exception) -> str:
    """An error of transformers in one line."""
    return f"{type(error).__name__}: {brief(' '.join(str(error).split()), LONG)}"


def _refusal(where: str, keys: Keys, reason: str) -> CheckpointError:
    names = keys.values.get("architectures") or ["a model"]
    return CheckpointError(where, "one that model.family=transformers can serve", f"{names[0]}: {reason}", _HINT)


def _outline(path: Path) -> tuple[Any, Any, list[_Call]]:
    """Config, the model on ``meta``, and the calls of its trial pass.

    Raises:
        CheckpointError: transformers has no such model, or one that paged attention can't serve.
    """
    keys = read_config(path)
    where = f"{keys.where}: architectures"
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):  # a table of attentions of its own
            raise _refusal(where, keys, "its attention does not go through transformers' attention interface") from error
        raise CheckpointError(where, "a language model that transformers has", _spell(error)) from error
    if model._can_set_experts_implementation():  # noqa: SLF001 - what the next line asks, without a warning
        model.set_experts_implementation("batched_mm")  # the one whose shapes don't depend on what the router chooses
    try:
        return config, model, _try(config, model.eval())
    except _Unservable as reason:
        raise _refusal(where, keys, str(reason)) from reason


def read_own_facts(path: Path) -> ModelFacts:
    """Facts of a model that transformers has, from its config and a trial pass without data.

    Raises:
        CheckpointError: no config, no such model, or one that paged attention can't serve; says why.
    """
    keys = read_config(path)
    config, model, calls = _outline(path)
    if getattr(config, "quantization_config", None):
        raise keys.error("quantization_config", "no such key with model.family=transformers")
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    facts = ModelFacts(
        path=path,
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden_size,
        num_layers=len(calls),
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        rms_norm_eps=0.0,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=tuple(call.window for call in calls),
        rope=RopeFacts(0.0, NO_ROPE),
        bos_token_id=None,
        eos_token_ids=(),
        dtype=dtype if dtype in DTYPES else "float32",
        family=OWN_MODULES,
    )
    return read_ids(keys, path, facts)


class _Hidden(BaseModelOutputWithPast):
    """Hidden states alone; whatever else a head looks for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class OwnModules(nn.Module):
    """A model of transformers with the interface of :class:`graphspec.models.decoder.Decoder`.

    Args:
        facts: from :func:`read_own_facts`.
        model: an ``AutoModelForCausalLM`` with our attention.
        places: name of the module that attends in each layer.
    """

    def __init__(self, facts: ModelFacts, model: Any, places: list[str]) -> None:
        super().__init__()
        self.facts, self.model = facts, model
        self.rotary = RotaryEmbedding(facts.rope, facts.head_dim, 1)
        """Rotates by nothing: queries and keys come rotated."""
        self.attention: Attention | None = None
        self._hidden: Tensor | None = None
        self._mask: Tensor
        # transformers returns a mask of four dimensions as it is, and makes none
        self.register_buffer("_mask", torch.ones((1, 1, 1, 1), dtype=torch.int64), persistent=False)
        for layer, place in enumerate(places):
            model.get_submodule(place).paged_place = _Paged(self, layer, facts.sliding_window[layer])
        self._decoder = (_decoder(model),)  # a tuple: the module is registered already
        self._run = self._decoder[0].forward
        self._decoder[0].forward = self._hidden_states

    def _hidden_states(self, *args: Any, **options: Any) -> Any:
        """The decoder's forward pass; while the head is asked for logits, the hidden states that it is asked about."""
        if self._hidden is None:
            return self._run(*args, **options)
        return _Hidden(last_hidden_state=self._hidden)

    def forward(self, token_BT: Tensor, attention: Attention) -> tuple[Tensor, None]:
        """Hidden states ``[B, T, H]`` as the head takes them; no features."""
        self.attention = attention
        position_BT = attention.position_BT.clamp(0, self.facts.max_position_embeddings - 1)
        try:
            output = self._decoder[0](
                input_ids=token_BT.clamp(min=0), attention_mask=self._mask, position_ids=position_BT, use_cache=False, return_dict=True
            )  # fmt: skip
        finally:
            self.attention = None
        return output.last_hidden_state, None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., V]``, with whatever the model does to logits after its head."""
        self._hidden = hidden if hidden.dim() == 3 else hidden.reshape(1, -1, hidden.shape[-1])
        token_BT = torch.zeros(self._hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            logits: Tensor = self.model(input_ids=token_BT, use_cache=False, return_dict=True).logits
        finally:
            self._hidden = None
        return logits.float().reshape(*hidden.shape[:-1], -1)

    def stacked_convolution(self) -> Convolution:
        """None of its layers is recurrent."""
        raise NotImplementedError


def load_own_modules(facts: ModelFacts, dtype: torch.dtype, device: torch.device) -> OwnModules:
    """The model of a checkpoint, read by transformers, in ``dtype`` on ``device``; on ``meta`` without data.

    Raises:
        CheckpointError: a tensor that is missing, of another shape or can't be read.
    """
    _, outline, calls = _outline(facts.path)
    names = {id(module): name for name, module in outline.named_modules()}
    places = [names[id(call.module)] for call in calls]
    if device.type == "meta":
        return OwnModules(facts, outline.to(dtype), places).eval()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            facts.path, dtype=dtype, attn_implementation=NAME, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )  # fmt: skip
    except Exception as error:
        raise CheckpointError(str(facts.path), "weights that transformers can read", _spell(error)) from error
    finally:
        if shown:
            logging.enable_progress_bar()
    for what in ("missing_keys", "mismatched_keys"):
        if found.get(what):
            first = sorted(map(str, found[what]))[0]
            raise CheckpointError(f"{facts.path}: {first}", f"a tensor of {facts.architecture}", what.removesuffix("_keys"))
    return OwnModules(facts, model, places).to(device).eval()
