"""A whole small language model as drafter: what its ``config.json`` says, checked against the target. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...errors import CheckpointError
from ...facts.draft import DraftFacts
from ...facts.keys import read_config
from ...facts.model import ModelFacts, read_draft_model_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneFacts(DraftFacts):
    """A language model that was checked against its target; it reads tokens only."""

    owns_embedding: ClassVar[bool] = True

    @property
    def owns_head(self) -> bool:
        return True


def read_standalone_facts(path: str | Path, target: ModelFacts) -> StandaloneFacts:
    """Facts of a small language model, checked against the target it drafts for.

    Raises:
        CheckpointError: as :func:`read_draft_model_facts`; also a head that is no whole model, or a vocabulary of another size.
    """
    path = Path(path)
    keys = read_config(path)
    for key in ("draft_vocab_size", "eagle_config", "target_hidden_size"):
        if keys.present(key):
            raise keys.error(key, "a whole language model, without this key", "an EAGLE head belongs to another variant")
    decoder = read_draft_model_facts(path)
    if decoder.recurrent is not None or decoder.kv_layers < decoder.num_layers:
        raise keys.error(
            "architectures",
            "a model in which every layer attends and none is recurrent",
            "a draft needs a state after every step of every beam",
        )
    if decoder.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{path / 'config.json'}: vocab_size",
            f"{target.vocab_size}, as in {target.path}",
            decoder.vocab_size,
            "draft and target must share one vocabulary; one padded to another size is refused as well",
        )
    return StandaloneFacts(
        path=path,
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=target.hidden_size,
    )
