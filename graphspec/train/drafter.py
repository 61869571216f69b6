"""The interface of a draft network in training, and of its target.

Rows follow one convention, the same as at inference: row ``i`` consumes token ``i + 1`` together with the target's feature of position
``i``, sits at RoPE position ``i``, and predicts token ``i + 2``. Token 0 is never consumed. At depth ``k``, counted from 0, row
``i`` predicts token ``i + 2 + k``.
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

from ..catalog import all_variants, load_object, resolve_variant
from ..checks import check_fields
from ..errors import CheckpointError, ConfigError
from ..facts.families import all_families
from ..paths import reason
from .blocks import Attend, attend_rows, start_small
from .hybrid import is_hybrid


@dataclass
class NetworkConfig:
    """Settings of one variant's network, ``train.network.*``; each variant has a dataclass of its own."""

    def __post_init__(self) -> None:
        check_fields(self, "train.network")

    @property
    def steps(self) -> tuple[str, int] | None:
        """The key that decides ``train.unroll``, and how deep that is; None: any depth will do."""
        return None


class Drafter(nn.Module):
    """A draft network in its published layout.

    ``state_dict`` holds what is trained. What it shares with the target (embedding, output head) are buffers that no checkpoint stores.
    """

    Settings: ClassVar[type[NetworkConfig]]
    about: ClassVar[str]
    """The architecture in a few words for a model card; ``{key}`` stands for a setting."""
    unmixed: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of matrices that map to or from the vocabulary."""
    num_heads: int = 1
    """Steps with weights of their own; 1: the same weights serve every step."""
    most_steps: int | None = None
    """Depth it can draft to at most; None: any."""
    tap_layers: tuple[int, ...] = ()
    """The features are the target's residual streams entering these layers; empty: its hidden state after the final norm."""
    has_vocab: bool = False
    """It has a draft vocabulary of its own (:meth:`target_ids`)."""
    stands_alone: bool = False
    """It is a model with a tokenizer of its own, which must be the target's."""
    reads_hybrids: bool = False
    """It is trained for targets with recurrent layers too."""
    feeds_feature: bool = False
    """Its hidden state stands for the target's feature of the next position, so that it can be trained to be near it."""

    @classmethod
    def build(cls, target: PreTrainedModel, config: NetworkConfig, counts_V: Tensor | None) -> Drafter:
        """A fresh network for ``target``. ``counts_V`` (int64): how often each id occurs in the text; None: it will be loaded."""
        assert isinstance(config, cls.Settings)
        draft = cls(target, config)
        start_small(draft)
        with torch.no_grad():
            draft.start_from(target, counts_V)
        return draft

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        """Initialise what does not start small and random, under ``no_grad``."""

    def anchors(self, rows: int, turn: int) -> Tensor:
        """Rows, of ``rows``, that draft in training step ``turn``: int64 ``[A]``, ascending."""
        del turn
        return torch.arange(rows)

    @abstractmethod
    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Draft ``steps`` deep from the rows that :meth:`anchors` named, on true tokens: for each depth ``[B, A, H]``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``[.., H]`` hidden states out of :meth:`drafts` to ``[.., Vd]``."""

    def target_ids(self) -> Tensor | None:
        """``[Vd]`` int64: target id of every draft id; None: the vocabulary is the target's."""
        return None

    @abstractmethod
    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``config.json`` and tensors as the ecosystem names them."""


def trained_variants() -> tuple[str, ...]:
    """Names of the variants whose network can be trained."""
    return tuple(variant.name for variant in all_variants() if variant.training)


def network_of(variant: str) -> type[Drafter]:
    """The trained network of one of :func:`trained_variants`."""
    network: type[Drafter] = load_object(resolve_variant(variant).training)
    return network


class StepDrafter(Drafter):
    """A network that drafts step by step, each on the token and the hidden state of the one before."""

    @abstractmethod
    def start(self, features_BTF: Tensor) -> Tensor:
        """The hidden states ``[B, T, H]`` of step 0 from the target's features."""

    @abstractmethod
    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Draft step ``index`` of every row: consumes a token and a hidden state, returns the next hidden state ``[B, T, H]``."""

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Of all rows: see :func:`unrolled`."""
        del row_A
        return unrolled(self, features_BTF, tokens_BT, steps)


class Target:
    """A frozen target as its drafters see it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False).eval()

    @torch.no_grad()
    def view(self, tokens_BT: Tensor, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """``(features [B, T, F], logits [B, T, V])``: tapped layers' inputs side by side, or without taps the final hidden state.

        Features are fp32 whatever the target's dtype, for the drafter is; logits are left as they are, for there are many.
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
        hybrids: whether it may have recurrent layers.

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
    """Progress is shown by whoever runs the training, and transformers' own bars stay as they were set."""
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
        ConfigError: the target is so shallow that they coincide or leave it; they must then be named.
    """
    taps = [2, layers // 2, layers - 3]
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise ConfigError("train.network.tap_layers", f"named layers, for the rule 2, L // 2, L - 3 fails at L = {layers}", taps)
    return taps


def feature_scale(target: PreTrainedModel, tap_layers: tuple[int, ...]) -> Tensor:
    """``[F]`` fp32: for each tap the power of two next to 1 / (root mean square of its residual stream on random tokens)."""
    tokens = torch.randint(0, target.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    features, _ = Target(target).view(tokens.to(target.device), tap_layers)
    taps = features.unflatten(-1, (len(tap_layers), -1))
    size = taps.square().mean((0, 1, 3)).sqrt().clamp(min=1e-6)
    return torch.exp2(-size.log2().round()).repeat_interleave(taps.shape[-1]).cpu()


def unrolled(drafter: StepDrafter, features_BTF: Tensor, tokens_BT: Tensor, steps: int) -> Iterator[Tensor]:
    """Draft ``steps`` deep from every row at once, on true tokens and the drafter's own hidden states (training-time test).

    Yields for each step ``[B, T - steps, H]``. A row of step ``k`` sees the causal prefix of step 0, and of each later step up to its
    own only itself: that is what a branch that starts at this row sees at inference. A network with weights of its own for each step
    has one full causal prefix per step instead, made of the rows shifted by one token each, and its positions don't move.
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
