"""The interface of a draft network in training, and of its target.

Rows follow the same convention as at inference: row ``i`` consumes token ``i + 1`` together with the target's feature of position ``i``,
has RoPE position ``i``, and predicts token ``i + 2``. Token 0 is never consumed. At depth ``k``, counted from 0, row ``i`` predicts token
``i + 2 + k``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..config.catalog import all_variants, load_object, resolve_variant
from ..config.checks import check_fields
from ..config.paths import reason
from ..errors import CheckpointError
from ..facts.draft import DraftFacts
from ..facts.families import all_families
from ..facts.files import MAX_CONFIG, read_json
from ..facts.gguf_model import weights_files
from ..facts.layouts import Layout
from ..facts.model import ModelFacts
from ..facts.quantisation import read_quantisation
from ..models.checkpoint import Checkpoint, tensor_sources
from ..models.layers import Linear, RMSNorm
from ..models.packed_weight import PackedWeight
from .attention import KeyValues, SequenceAttention
from .facts import is_hybrid


@dataclass
class NetworkConfig:
    """Settings of a variant's network, ``train.network.*``; each variant has its own subclass."""

    def __post_init__(self) -> None:
        check_fields(self, "train.network")

    @property
    def steps(self) -> tuple[str, int] | None:
        """The key that determines ``train.unroll``, and that depth; None: any depth is possible."""
        return None


class SharedEmbedding(nn.Module):
    """The target's embedding, frozen and no part of the draft's checkpoint; its vectors are float32, the draft's dtype."""

    weight: Tensor

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.register_buffer("weight", target.model.embed_tokens.weight.detach(), persistent=False)

    def forward(self, token_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """``[B, T, H]``; in training every token is valid."""
        del valid_BT
        return F.embedding(token_BT, self.weight).float()


class SharedHead(nn.Module):
    """The target's output head, frozen and no part of the draft's checkpoint; it multiplies in its own dtype."""

    weight: Tensor

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.register_buffer("weight", target.lm_head.weight.detach(), persistent=False)

    def forward(self, x: Tensor, norm: RMSNorm | None = None, *, float32: bool) -> Tensor:
        """Logits ``[.., V]`` of hidden states ``[.., H]``."""
        del float32  # the losses are
        return F.linear((x if norm is None else norm(x)).to(self.weight.dtype), self.weight)


def shared_with(target: PreTrainedModel, *, head: bool = True) -> dict[str, Any]:
    """Arguments of a draft network: positions of its RoPE table, the target's embedding, and ``head``: the target's output head."""
    shared: dict[str, Any] = {"max_positions": target.config.max_position_embeddings, "embed_tokens": SharedEmbedding(target)}
    return shared | ({"lm_head": SharedHead(target)} if head else {})


def begin_stream(projection: Linear, scale_F: Tensor | None = None) -> None:
    """Make a projection begin the residual stream: its output is float32 whatever the product is, and its input is scaled.

    A matrix whose input is ten times too large, or whose halves must differ that much in size, learns slowly. It is trained on scaled
    inputs and published for unscaled ones (:func:`named_tensors`).
    """
    if scale_F is not None:
        projection.register_buffer("input_scale", scale_F, persistent=False)
        projection.register_forward_pre_hook(lambda module, given: (given[0] * module.input_scale, *given[1:]))
    projection.register_forward_hook(lambda module, given, out: out.float())


class Drafter(nn.Module):
    """A draft network in training: the network of inference, with attention over whole sequences.

    ``state_dict`` has the trained parameters. Those shared with the target (embedding, output head) are buffers that are not stored.

    Args:
        network: a :class:`~graphspec.graphs.stages.stage.DraftModel` with ``facts``; its parameters are not initialised yet.
    """

    Settings: ClassVar[type[NetworkConfig]]
    about: ClassVar[str]
    """The architecture in a few words for a model card; ``{key}`` stands for a setting."""
    unmixed: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of matrices that map to or from the vocabulary, which AdamW updates."""
    stands_alone: bool = False
    """Whether it is a whole model, exported with a tokenizer, the target's."""
    reads_hybrids: bool = False
    """Whether it can be trained for targets with recurrent layers."""
    feeds_feature: bool = False
    """Whether its hidden state predicts the target's feature of the next position, so that the distance can be part of the loss."""
    starts_from: ClassVar[tuple[str, ...]] = ()
    """Other variants whose published drafts its training may start from."""
    config: Any
    """The settings that it was built with, a :attr:`Settings`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    @property
    def facts(self) -> DraftFacts:
        """Facts of the network."""
        return cast("DraftFacts", self.network.facts)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The features are the target's residual streams entering these layers; empty: its hidden state after the final norm."""
        return self.facts.tap_layers

    @property
    def num_heads(self) -> int:
        """Steps with separate weights; 1: every step uses the same weights."""
        return self.facts.num_heads

    @property
    def max_steps(self) -> int | None:
        """The deepest it can draft; None: any depth."""
        return self.num_heads if self.num_heads > 1 else self.facts.max_steps

    @classmethod
    @abstractmethod
    def of(cls, target: PreTrainedModel, config: Any) -> Drafter:
        """The drafter of these settings, its parameters uninitialised. Does not run the target.

        Raises:
            ConfigError: settings that don't fit the target.
        """

    @classmethod
    def build(cls, target: PreTrainedModel, config: NetworkConfig, counts_V: Tensor | None) -> Drafter:
        """A new network for ``target``. ``counts_V`` (int64): occurrences of each id in the text; None: its weights will be loaded."""
        assert isinstance(config, cls.Settings)
        draft = cls.of(target, config)
        draft.config = config
        start_small(draft.network)
        with torch.no_grad():
            draft.start_from(target, counts_V)
        return draft

    @classmethod
    @abstractmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        """The :attr:`Settings` that build the network of a published draft, of this variant or one of :attr:`starts_from`.

        Raises:
            CheckpointError: no settings do.
        """

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        """Set the scale of the features, and the parameters that don't start as small random numbers, under ``no_grad``."""

    def adopt(self, published: nn.Module) -> set[str]:
        """Take the weights of a loaded network that this one has, under ``no_grad``: the inverse of :meth:`published`; returns their names.
        Those that it lacks, or has from the target, stay as they started.
        """
        taken = set()
        for name, parameter in self.network.named_parameters():
            if (found := weight_of(published, name)) is None:
                continue
            owner = self.network.get_submodule(name.rpartition(".")[0])
            scaled = hasattr(owner, "input_scale") and parameter.ndim == 2
            parameter.copy_(found.view_as(parameter) / (owner.get_buffer("input_scale") if scaled else 1.0))
            taken.add(name)
        if (ids := self.target_ids()) is not None:
            ids.copy_(published.get_buffer("target_token_Vd"))
        return taken

    def anchors(self, rows: int, turn: int) -> Tensor:
        """The rows, out of ``rows``, that draft in training step ``turn``: int64 ``[A]``, ascending."""
        del turn
        return torch.arange(rows)

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Draft ``steps`` deep from the rows ``row_A`` of :meth:`anchors`, on true tokens: yields ``[B, A, H]`` for each depth.

        A network that drafts step by step drafts from all rows, see :func:`unrolled`.
        """
        del row_A
        return unrolled(self, features_BTF, tokens_BT, steps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[.., Vd]`` of hidden states ``[.., H]`` from :meth:`drafts`."""
        return self.network.logits(hidden)

    def target_ids(self) -> Tensor | None:
        """``[Vd]`` int64: target id of every draft id; None: the vocabulary is the target's."""
        return self.network.target_token_Vd

    @abstractmethod
    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``config.json`` and tensors under their published names, see :func:`named_tensors`."""


def named_tensors(network: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The trained parameters of a network under the names that a checkpoint of this layout has: the inverse of
    :func:`graphspec.models.checkpoint.fill`. A projection that was trained on scaled inputs is that of unscaled ones.
    """
    named: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        owner, tensor = network.get_submodule(name.rpartition(".")[0]), parameter.detach()
        sources = tensor_sources(layout, name, ())
        if hasattr(owner, "input_scale") and tensor.ndim == 2:
            tensor = tensor * owner.get_buffer("input_scale")
        rows = owner.stored_parts if isinstance(owner, Linear) and len(sources) > 1 else [len(tensor)]
        named |= dict(zip(sources, tensor.split(list(rows)), strict=True))
    return named


def stored_names(network: nn.Module) -> list[str]:
    """The weights of a loaded network that are its own."""
    owners = [name for name, _ in network.named_parameters()]
    owners += [name for name, module in network.named_modules() if isinstance(module, PackedWeight)]
    return [name for name in owners if weight_of(network, name) is not None]


def weight_of(network: nn.Module, name: str) -> Tensor | None:
    """A weight of a loaded network as float32 numbers; None: it has none of this name, or it is the target's."""
    owner: Any = network
    for part in name.split("."):
        owner = getattr(owner, part, None)
    if not isinstance(owner, PackedWeight | Tensor) or owner.device.type == "meta":
        return None
    return owner.dequantise() if isinstance(owner, PackedWeight) else owner.detach()


def start_small(network: nn.Module, std: float = 0.02) -> None:
    """Make the parameters of a network trainable: normal matrices of standard deviation ``std``, zero biases, norms that don't scale."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)
            if isinstance(module, RMSNorm):
                nn.init.constant_(parameter, 0.0 if module.offset else 1.0)
            elif parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)


def trained_variants() -> tuple[str, ...]:
    """Names of the variants whose network can be trained."""
    return tuple(variant.name for variant in all_variants() if variant.training)


def network_of(variant: str) -> type[Drafter]:
    """The class of the trained network of one of :func:`trained_variants`."""
    network: type[Drafter] = load_object(resolve_variant(variant).training)
    return network


class Target:
    """A frozen target, as the source of features and logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False).eval()

    def store_products(self, dtype: torch.dtype) -> None:
        """Keep the matrices in the dtype in which autocast multiplies, which it would otherwise make of them in each step."""
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)

    @torch.no_grad()
    def view(self, tokens_BT: Tensor, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """``(features [B, T, F], logits [B, T, V])``: tapped layers' inputs side by side, or without taps the final hidden state.

        Features are converted to fp32, the drafter's dtype; logits keep the target's, because they are large.
        """
        features_BTF, hidden_BTH = self.hidden(tokens_BT, tap_layers)
        return features_BTF, self.model.lm_head(hidden_BTH)

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The features of :meth:`view`, and the hidden state ``[B, T, H]`` that the output head multiplies."""
        out = self.model.model(tokens_BT, use_cache=False, output_hidden_states=bool(tap_layers))
        last = out.last_hidden_state
        features = torch.cat([out.hidden_states[layer] for layer in tap_layers], -1) if tap_layers else last
        return features.float(), last


def load_target(
    folder: Path | str, dtype: torch.dtype | str = torch.float32, device: str = "cpu", *, hybrids: bool = True
) -> PreTrainedModel:
    """A frozen target as a model of transformers. Weights of low precision, GGUF among them, become the numbers that they stand for.

    Args:
        folder: of the checkpoint.
        dtype: of the weights; ``auto``: the one that the checkpoint names.
        device: where they go.
        hybrids: whether the target may have recurrent layers.

    Raises:
        CheckpointError: no such folder, not a decoder of a supported family, or files that can't be read.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"model.path: {folder}", "a folder with a Hugging Face checkpoint", "no config.json there")
    config = target_config(folder)
    readable = [family.name for family in all_families() if family.shaped_like_llama]
    readable += [f"{family.name}_text" for family in all_families() if family.shaped_like_qwen3_5]
    if config.model_type not in readable:
        raise CheckpointError(f"{folder / 'config.json'}: model_type", "one of " + ", ".join(readable), config.model_type)
    if not hybrids and is_hybrid(config):
        able = ", ".join(name for name in trained_variants() if network_of(name).reads_hybrids)
        hint = f"for a target with recurrent layers these are trained: {able}"
        raise CheckpointError(f"{folder / 'config.json'}: layer_types", "attention in every layer", "linear_attention", hint)
    read: Callable[..., PreTrainedModel] = partial(AutoModelForCausalLM.from_pretrained, folder)
    if weights_files(folder) or read_quantisation(folder) is not None:
        # transformers reads some of these formats, each with a package of its own; ours are the numbers that the engine multiplies by.
        checkpoint = Checkpoint(folder)
        stored = config.dtype if dtype == "auto" else dtype
        weights = {name: checkpoint.raw(name).to(stored) for name in checkpoint.names()}
        read = partial(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained, None, state_dict=weights)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    try:
        with _without_bars():
            model = read(config=config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # transformers raises what its readers of weights do
        raise CheckpointError(f"{folder}", "weights transformers reads", reason(error)) from error
    return model.to(device).requires_grad_(False).eval()


def target_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a target, as transformers has it.

    Raises:
        CheckpointError: transformers can't read it.
    """
    file = folder / "config.json"
    try:
        if not weights_files(folder):
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # That of a GGUF file names the class of the model alone.
        [name] = read_json(file, MAX_CONFIG)["architectures"]
        found: PreTrainedConfig = getattr(transformers, name).config_class.from_pretrained(folder)
    except Exception as error:  # transformers raises what its parsers do
        raise CheckpointError(f"{file}", "a configuration transformers reads", reason(error)) from error
    return found


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


def feature_scale(target: PreTrainedModel, tap_layers: tuple[int, ...]) -> Tensor:
    """``[F]`` fp32: for each tap the power of two closest to 1 / (root mean square of its residual stream on random tokens)."""
    tokens = torch.randint(0, target.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    features, _ = Target(target).view(tokens.to(target.device), tap_layers)
    taps = features.unflatten(-1, (len(tap_layers), -1))
    size = taps.square().mean((0, 1, 3)).sqrt().clamp(min=1e-6)
    return torch.exp2(-size.log2().round()).repeat_interleave(taps.shape[-1]).cpu()


def unrolled(drafter: Drafter, features_BTF: Tensor, tokens_BT: Tensor, steps: int) -> Iterator[Tensor]:
    """Draft ``steps`` deep from every row at once, on true tokens and the drafter's own hidden states (training-time test).

    Yields ``[B, T - steps, H]`` for each step. A row of step ``k`` sees the causal prefix of step 0, and only itself in each later step up
    to ``k``: what a branch that starts at this row sees at inference. A network with separate weights per step has one full causal prefix
    per step instead, whose rows are shifted by one token each and keep their positions.
    """
    rows = features_BTF.shape[1] - steps
    index_T = torch.arange(rows, device=tokens_BT.device)
    causal_TT = index_T[:, None] >= index_T
    first = attention = SequenceAttention(index_T, causal_TT)
    hidden_BTH = drafter.network.fuse(features_BTF[:, :rows])
    own: KeyValues = {}
    for k in range(steps):
        if k and drafter.num_heads == 1:
            attention = SequenceAttention(index_T + k, causal_TT, first.prefix, own)
        hidden_BTH = drafter.network(tokens_BT[:, 1 + k : 1 + k + rows], hidden_BTH, attention, k)
        yield hidden_BTH
