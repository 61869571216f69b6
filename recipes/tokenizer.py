"""Byte-level BPE tokenizer, saved in the hub's format (``tokenizer.json``)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Iterable[str], vocab_size: int, out: Path) -> Tokenizer:
    """Train a BPE of ``vocab_size`` entries on ``documents`` and write ``tokenizer.json`` and ``tokenizer_config.json`` to ``out``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> np.ndarray:
    """One stream ``[tokens]`` int64: every document followed by the end-of-text id."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, "the tokenizer was trained with it"
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents)):
        stream.extend(encoding.ids)
        stream.append(end)
    return np.asarray(stream, dtype=np.int64)
