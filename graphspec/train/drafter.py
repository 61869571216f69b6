"""The interface of a draft network in training, and of its target.

Rows follow the same convention as at inference: row ``i`` consumes token ``i + 1`` together with the target's feature of position ``i``,
has RoPE position ``i``, and predicts token ``i + 2``. Token 0 is never consumed. At depth ``k``, counted from 0, row ``i`` predicts token
``i + 2 + k``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ..config.catalog import all_variants, load_object, resolve_variant
from ..config.checks import check_fields
from ..config.paths import reason
from ..errors import CheckpointError, ConfigError
from ..facts.families import all_families
from .blocks import Attend, attend_rows, start_small
from .hybrid import is_hybrid


@dataclass
class NetworkConfig:
    """Settings of a variant's network, ``train.network.*``; each variant has its own subclass."""

    def __post_init__(self) -> None:
        check_fields(self, "train.network")

    @property
    def steps(self) -> tuple[str, int] | None:
        """The key that determines ``train.unroll``, and that depth; None: any depth is possible."""
        return None


class Drafter(nn.Module):
    """A draft network in its published layout.

    ``state_dict`` has the trained parameters. Those shared with the target (embedding, output head) are buffers that are not stored.
    """

    Settings: ClassVar[type[NetworkConfig]]
    about: ClassVar[str]
    """The architecture in a few words for a model card; ``{key}`` stands for a setting."""
    unmixed: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of matrices that map to or from the vocabulary, which AdamW updates."""
    num_heads: int = 1
    """Steps with separate weights; 1: every step uses the same weights."""
    most_steps: int | None = None
    """The deepest it can draft; None: any depth."""
    tap_layers: tuple[int, ...] = ()
    """The features are the target's residual streams entering these layers; empty: its hidden state after the final norm."""
    has_vocab: bool = False
    """Whether it has its own draft vocabulary (:meth:`target_ids`)."""
    stands_alone: bool = False
    """Whether it is a whole model, exported with a tokenizer, the target's."""
    reads_hybrids: bool = False
    """Whether it can be trained for targets with recurrent layers."""
    feeds_feature: bool = False
    """Whether its hidden state predicts the target's feature of the next position, so that the distance can be part of the loss."""
    embedding_VH: Tensor
    head_VH: Tensor

    def share(self, target: PreTrainedModel) -> None:
        """Use the target's embedding and output head."""
        self.register_buffer("embedding_VH", target.model.embed_tokens.weight.detach(), persistent=False)
        self.register_buffer("head_VH", target.lm_head.weight.detach(), persistent=False)

    @classmethod
    def build(cls, target: PreTrainedModel, config: NetworkConfig, counts_V: Tensor | None) -> Drafter:
        """A new network for ``target``. ``counts_V`` (int64): occurrences of each id in the text; None: its weights will be loaded."""
        assert isinstance(config, cls.Settings)
        draft = cls(target, config)
        start_small(draft)
        with torch.no_grad():
            draft.start_from(target, counts_V)
        return draft

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        """Initialise the parameters that don't start as small random numbers, under ``no_grad``."""

    def anchors(self, rows: int, turn: int) -> Tensor:
        """The rows, out of ``rows``, that draft in training step ``turn``: int64 ``[A]``, ascending."""
        del turn
        return torch.arange(rows)

    @abstractmethod
    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Draft ``steps`` deep from the rows ``row_A`` of :meth:`anchors`, on true tokens: yields ``[B, A, H]`` for each depth."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[.., Vd]`` of hidden states ``[.., H]`` from :meth:`drafts`: those of the target's output head."""
        return nn.functional.linear(hidden.to(self.head_VH.dtype), self.head_VH)

    def target_ids(self) -> Tensor | None:
        """``[Vd]`` int64: target id of every draft id; None: the vocabulary is the target's."""
        return None

    @abstractmethod
    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``config.json`` and tensors under their published names."""


def trained_variants() -> tuple[str, ...]:
    """Names of the variants whose network can be trained."""
    return tuple(variant.name for variant in all_variants() if variant.training)


def network_of(variant: str) -> type[Drafter]:
    """The class of the trained network of one of :func:`trained_variants`."""
    network: type[Drafter] = load_object(resolve_variant(variant).training)
    return network


class StepDrafter(Drafter):
    """A network that drafts step by step, each from the token and the hidden state of the step before."""

    def start(self, features_BTF: Tensor) -> Tensor:
        """The hidden states ``[B, T, H]`` of step 0 from the target's features: these themselves."""
        return features_BTF

    @abstractmethod
    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Draft step ``index`` of every row: consumes a token and a hidden state, returns the next hidden state ``[B, T, H]``."""

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Drafts of all rows, see :func:`unrolled`."""
        del row_A
        return unrolled(self, features_BTF, tokens_BT, steps)


class Target:
    """A frozen target, as the source of features and logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False).eval()

    @torch.no_grad()
    def view(self, tokens_BT: Tensor, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """``(features [B, T, F], logits [B, T, V])``: tapped layers' inputs side by side, or without taps the final hidden state.

        Features are converted to fp32, the drafter's dtype; logits keep the target's, because they are large.
        """
        out = self.model.model(tokens_BT, use_cache=False, output_hidden_states=bool(tap_layers))
        last = out.last_hidden_state
        features = torch.cat([out.hidden_states[layer] for layer in tap_layers], -1) if tap_layers else last
        return features.float(), self.model.lm_head(last)


def load_target(
    folder: Path | str, dtype: torch.dtype | str = torch.float32, device: str = "cpu", *, hybrids: bool = True
) -> PreTrainedModel:
    """A frozen target read by transformers; ``dtype="auto"``: the checkpoint's own.

    Args:
        folder: of the checkpoint.
        dtype: of the weights.
        device: where they go.
        hybrids: whether the target may have recurrent layers.

    Raises:
        CheckpointError: no such folder, not a decoder of a supported family, quantised weights, or files that can't be read.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"model.path: {folder}", "a folder with a Hugging Face checkpoint", "no config.json there")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises what its parsers do
        raise CheckpointError(f"{folder / 'config.json'}", "a configuration transformers reads", reason(error)) from error
    readable = [family.name for family in all_families() if family.shaped_like_llama]
    readable += [f"{family.name}_text" for family in all_families() if family.shaped_like_qwen3_5]
    if config.model_type not in readable:
        raise CheckpointError(f"{folder / 'config.json'}: model_type", "one of " + ", ".join(readable), config.model_type)
    if not hybrids and is_hybrid(config):
        able = ", ".join(name for name in trained_variants() if network_of(name).reads_hybrids)
        hint = f"for a target with recurrent layers these are trained: {able}"
        raise CheckpointError(f"{folder / 'config.json'}: layer_types", "attention in every layer", "linear_attention", hint)
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"{folder / 'config.json'}: quantization_config", "none: a draft learns from the weights", "one")
    try:
        with _without_bars():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # so does its reader of weights
        raise CheckpointError(f"{folder}", "weights transformers reads", reason(error)) from error
    return model.to(device).requires_grad_(False).eval()


@contextmanager
def _without_bars() -> Iterator[None]:
    """A context without transformers' progress bars, whose setting is restored."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def default_taps(layers: int) -> list[int]:
    """EAGLE-3's low, middle and high taps ``2, L // 2, L - 3`` (Li et al. 2025).

    Raises:
        ConfigError: the target is too shallow for them, so they must be named.
    """
    taps = [2, layers // 2, layers - 3]
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise ConfigError("train.network.tap_layers", f"named layers, for the rule 2, L // 2, L - 3 fails at L = {layers}", taps)
    return taps


def feature_scale(target: PreTrainedModel, tap_layers: tuple[int, ...]) -> Tensor:
    """``[F]`` fp32: for each tap the power of two closest to 1 / (root mean square of its residual stream on random tokens)."""
    tokens = torch.randint(0, target.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    features, _ = Target(target).view(tokens.to(target.device), tap_layers)
    taps = features.unflatten(-1, (len(tap_layers), -1))
    size = taps.square().mean((0, 1, 3)).sqrt().clamp(min=1e-6)
    return torch.exp2(-size.log2().round()).repeat_interleave(taps.shape[-1]).cpu()


def unrolled(drafter: StepDrafter, features_BTF: Tensor, tokens_BT: Tensor, steps: int) -> Iterator[Tensor]:
    """Draft ``steps`` deep from every row at once, on true tokens and the drafter's own hidden states (training-time test).

    Yields ``[B, T - steps, H]`` for each step. A row of step ``k`` sees the causal prefix of step 0, and only itself in each later step up
    to ``k``: what a branch that starts at this row sees at inference. A network with separate weights per step has one full causal prefix
    per step instead, whose rows are shifted by one token each and keep their positions.
    """
    rows = features_BTF.shape[1] - steps
    index_T = torch.arange(rows, device=tokens_BT.device)
    causal_TT = index_T[:, None] >= index_T
    separate = drafter.num_heads > 1
    prefix: dict[int, tuple[Tensor, Tensor]] = {}
    own: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def first(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prefix[layer], own[layer] = (k, v), ([], [])
        return attend_rows(q, k, v, causal_TT)

    def later(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = own[layer]
        keys.append(k)
        values.append(v)
        return attend_rows(q, *prefix[layer], causal_TT, torch.stack(keys, 3), torch.stack(values, 3))

    hidden = drafter.start(features_BTF[:, :rows])
    for k in range(steps):
        positions = index_T if separate else index_T + k
        hidden = drafter.step(k, tokens_BT[:, 1 + k : 1 + k + rows], hidden, positions, first if k == 0 or separate else later)
        yield hidden
