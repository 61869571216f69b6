"""A whole small language model as drafter: what its ``config.json`` says, checked against the target. Standard library only."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ...facts.draft import DraftFacts
from ...facts.files import find_file
from ...facts.keys import read_config
from ...facts.model import ModelFacts, read_draft_model_facts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneFacts(DraftFacts):
    """A language model that was checked against its target; it reads tokens only."""

    owns_embedding: ClassVar[bool] = True

    @property
    def owns_head(self) -> bool:
        return True


def read_standalone_facts(path: str | Path, target: ModelFacts) -> StandaloneFacts:
    """Facts of a small language model, checked against the target it drafts for.

    Vocabularies of two sizes are one that was padded differently: ids beyond the smaller one mean nothing to a tokenizer. Rows of the draft
    beyond the target's are not read; ids of the target beyond the draft's are zero vectors to it, and it does not propose them.

    Raises:
        CheckpointError: as :func:`read_draft_model_facts`; also a head that is no whole model.
    """
    path = Path(path)
    keys = read_config(path)
    for key in ("draft_vocab_size", "eagle_config", "target_hidden_size"):
        if keys.present(key):
            raise keys.error(key, "a whole language model, without this key", "an EAGLE head belongs to another variant")
    decoder = read_draft_model_facts(path)
    if decoder.recurrent is not None or not all(map(decoder.attends, range(decoder.num_layers))):
        raise keys.error(
            "architectures",
            "a model in which every layer attends and none is recurrent",
            "a draft needs a state after every step of every beam",
        )
    if decoder.vocab_size != target.vocab_size:
        compared = all(find_file(folder / "tokenizer.json") for folder in (path, target.path))
        padded = "taken as padding" if compared else "taken as padding, without two tokenizers to compare"
        message = f"%s: a vocabulary of %d, that of the target is %d: {padded}"
        _LOG.log(logging.INFO if compared else logging.WARNING, message, path, decoder.vocab_size, target.vocab_size)
    if decoder.vocab_size > target.vocab_size:
        decoder = replace(decoder, vocab_size=target.vocab_size, stored_vocab_size=decoder.vocab_size)
    return StandaloneFacts(
        path=path,
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=target.hidden_size,
        begins_vocabulary=decoder.vocab_size < target.vocab_size,
    )
