"""Byte-level BPE tokenizer, saved in the hub's format (``tokenizer.json``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from graphspec.train.checkpoint import write_json, write_whole

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Iterable[str], vocab_size: int, out: Path) -> None:
    """Train a BPE of ``vocab_size`` entries on ``documents`` and write ``tokenizer.json`` and ``tokenizer_config.json`` to ``out``.

    The first entry, :data:`END_OF_TEXT`, ends a text.
    """
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
    text = tokenizer.to_str(pretty=True)
    write_whole(out / "tokenizer.json", lambda stream: stream.write(text.encode()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    write_json(out / "tokenizer_config.json", settings)
