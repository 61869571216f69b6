"""The published draft whose weights a training run begins with, ``train.start_from``.

The loaders of the engine read it, so it may have any layout and any format of low precision. Its architecture must be one that is trained:
what the command writes could not express another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config.catalog import load_object, resolve_variant
from ..config.checks import brief
from ..errors import CheckpointError, ConfigError
from ..facts import read_model_facts
from ..facts.draft import DraftFacts
from ..facts.folders import named_folder
from ..facts.model import ModelFacts
from ..models import target as targets
from .drafter import Drafter, network_of, stored_names, weight_of

KEY = "train.start_from"
_OF_A_FILE = {"path", "decoder", "layout", "first_index", "mask_token_id"}
"""Facts of a draft that say where its tensors are, or that its decoder or its settings have."""
_RECOUNTED = frozenset({"draft_vocab_size"})
"""Facts of a draft that ``train.recount_vocab`` changes."""
_OF_A_LAYER = (
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "attention_bias", "output_bias",
    "mlp_bias", "qk_norm", "rope", "latent", "experts", "recurrent", "multipliers",
)  # fmt: skip
"""Facts of its decoder that do."""
_VOCABULARY = {"embed_tokens.weight": "model.embed_tokens", "lm_head.weight": "lm_head"}
"""Tensors of which a draft may have a copy, and the target's modules."""


@dataclass(frozen=True)
class Start:
    """A draft that was loaded to be trained on.

    Attributes:
        folder: its own.
        network: of inference, its weights as they are stored; ``meta`` tensors are the target's.
        settings: ``train.network`` of it.
        recounted: whether the run chooses its own draft vocabulary.
    """

    folder: Path
    network: nn.Module
    settings: Mapping[str, Any]
    recounted: bool = False

    @classmethod
    def read(cls, variant: str, path: str, target: Path, recounted: bool = False) -> Start:
        """The draft in a folder, or of the Hub, for the target in another folder.

        Raises:
            CheckpointError: a draft of another variant or for another target, or one that can't be read.
            ConfigError: as :func:`graphspec.facts.folders.named_folder`; ``recounted`` of a variant without a draft vocabulary.
        """
        if recounted and "draft_vocab_size" not in network_of(variant).Settings.__dataclass_fields__:
            raise ConfigError("train.recount_vocab", f"false: {variant} drafts all ids of the target", True)
        folder, model = named_folder(KEY, path), read_model_facts(target)
        nowhere = targets.load_target(model, (), 1, torch.float32, torch.device("meta"))
        refusals: list[CheckpointError] = []
        for name in (variant, *network_of(variant).starts_from):
            kind = resolve_variant(name)
            try:
                facts = load_object(kind.facts)(folder, model)
            except CheckpointError as refusal:
                refusals.append(refusal)
                continue
            network = load_object(kind.loader)(facts, nowhere, 1, torch.float32, torch.device("cpu"), None)
            return cls(folder, network, network_of(variant).settings_of(network.facts, model), recounted)
        raise refusals[0]

    def network_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``train.network`` as given and as the draft has it.

        Raises:
            ConfigError: the two contradict each other, or leave no draft vocabulary to choose.
        """
        fixed = {key: value for key, value in self.settings.items() if not (self.recounted and key == "draft_vocab_size")}
        for key, value in fixed.items():
            if key in given and given[key] != value:
                raise ConfigError(f"train.network.{key}", f"{value}, as the draft in {KEY} has it", brief(given[key]))
        settings = {**self.settings, **given, **fixed}
        everything = cast("DraftFacts", self.network.facts).decoder.vocab_size
        if self.recounted and self.settings["draft_vocab_size"] == settings["draft_vocab_size"] == everything:
            expected = f"false, or train.network.draft_vocab_size below {everything}: the draft in {KEY} drafts all ids"
            raise ConfigError("train.recount_vocab", expected, True)
        return settings

    @torch.no_grad()
    def fill(self, drafter: Drafter, target: PreTrainedModel) -> str:
        """Give the draft's weights to a new network with its settings; returns a digest of all weights that the run begins with.

        Raises:
            CheckpointError: a draft with an option that is not trained, or with tensors that the network has no place for.
        """
        check_same(drafter.facts, cast("DraftFacts", self.network.facts), self.folder, _RECOUNTED if self.recounted else frozenset())
        if self.recounted:
            take_vocabulary(self.network, drafter)
        taken = drafter.adopt(self.network)
        for name in stored_names(self.network):
            if name not in taken and not self._is_a_copy(name, target):
                expected = "a tensor that drafts trained here have, or the target's"
                raise CheckpointError(f"{KEY}: {self.folder}: {name}", expected, "another one")
        found = hashlib.blake2b(digest_size=16)
        for _, tensor in sorted(drafter.state_dict().items()):
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return found.hexdigest()

    def _is_a_copy(self, name: str, target: PreTrainedModel) -> bool:
        """Whether a tensor is the target's, rounded to the 16 bits in which drafts are published."""
        if name not in _VOCABULARY:
            return False
        theirs = weight_of(self.network, name)
        ours = target.get_submodule(_VOCABULARY[name]).get_parameter("weight")
        return theirs is not None and torch.equal(theirs.bfloat16(), ours.to("cpu", torch.bfloat16))


def check_same(trained: DraftFacts, published: DraftFacts, folder: Path, own: frozenset[str] = frozenset()) -> None:
    """Check that a published draft computes what the one in training does, but for facts that are the latter's ``own``.

    Raises:
        CheckpointError: it doesn't; names the first fact that differs.
    """
    known = {field.name for field in fields(published)} - _OF_A_FILE - own
    pairs: list[tuple[str, DraftFacts | ModelFacts, DraftFacts | ModelFacts]]
    pairs = [(field.name, trained, published) for field in fields(trained) if field.name in known]
    pairs += [(name, trained.decoder, published.decoder) for name in _OF_A_LAYER]
    for name, ours, theirs in pairs:
        expected, found = getattr(ours, name), getattr(theirs, name)
        # What a config doesn't state is not there.
        if expected != found and (expected or found):
            raise CheckpointError(f"{KEY}: {folder}: {name}", f"{expected}, as drafts that are trained here have it", found)
    if any(published.decoder.sliding_window):
        raise CheckpointError(f"{KEY}: {folder}: sliding_window", "none: drafts in training see their whole prefix", "windows")


def take_vocabulary(published: nn.Module, drafter: Drafter) -> None:
    """Give a loaded network the draft vocabulary of a new drafter. Rows of ``lm_head`` for ids that it didn't draft are the drafter's."""
    begun, found = drafter.network.lm_head.get_parameter("weight").detach().clone(), weight_of(published, "lm_head.weight")
    if found is not None:
        old, new = cast("Tensor | None", published.target_token_Vd), drafter.target_ids()
        row_V = torch.full((drafter.facts.decoder.vocab_size,), -1)
        row_V[slice(None) if old is None else old] = torch.arange(len(found))
        row_Vd = row_V if new is None else row_V[new]
        begun[row_Vd >= 0] = found[row_Vd[row_Vd >= 0]]
        published.lm_head = head = nn.Linear(begun.shape[1], begun.shape[0], bias=False)
        head.weight = nn.Parameter(begun)
    published.register_buffer("target_token_Vd", drafter.target_ids())
