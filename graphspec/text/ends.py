"""The tokens that end a text: what the model's configuration, its tokenizer and its chat template say."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import CheckpointError
from ..facts import ModelFacts
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def find_ends(facts: ModelFacts, tokenizer: Callable[[], Tokenizer] | None) -> dict[int, str]:
    """Token ids that end a text, and what says so: first those of the configuration, then those that the tokenizer adds.

    Args:
        facts: of the target, as its configuration has them.
        tokenizer: of the checkpoint; None: it has none. Where it can't be loaded only the configuration counts: token ids as prompts need
            no tokenizer, and a text as prompt gets the error.
    """
    ends = dict.fromkeys(facts.eos_token_ids, "configuration")
    try:
        found = tokenizer().ends if tokenizer is not None else {}
    except CheckpointError as error:
        logger.info("ends of text: those of the model's configuration alone, since its tokenizer can't be read: %s", error)
        found = {}
    return ends | {token: source for token, source in found.items() if token not in ends and token < facts.vocab_size}
