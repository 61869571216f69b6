"""Tiny tokenizers in the forms that checkpoints have, and the files around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphspec.text.tokenizer import BYTE_LETTERS

SPECIAL = ("<unk>", "<s>", "</s>", "<mark>")
UNK, BOS, EOS, MARK = range(4)
WORDS = ("Paris", "is", "the", "capital", "of", "France")
LETTERS = "abcdefghijklmnopqrstuvwxyzPFINST.,[]/'0123456789\n"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEMPLATE = "{% for message in messages %}{{ bos_token }}[INST] {{ message.content }} [/INST]{% endfor %}"


def _vocabulary(letters: str, space: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, letters, and words with their merges, with and without a space in front."""
    vocab = {name: token for token, name in enumerate(SPECIAL)}
    for letter in letters + space:
        vocab.setdefault(letter, len(vocab))
    merges = []
    for word in (*(space + word for word in WORDS), *WORDS, "450", "\u0141"):
        text = word[0]
        for letter in word[1:]:
            if text + letter not in vocab:
                merges.append((text, letter))
                vocab[text + letter] = len(vocab)
            text += letter
    return vocab, merges


def _byte_level(split: str | None) -> Tokenizer:
    vocab, merges = _vocabulary("".join(BYTE_LETTERS), "\u0120")
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    splits = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, levels])
    made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(*, prepend: bool) -> Tokenizer:
    """BPE with byte fallback: of Llama 2, which puts a space in front of a text and takes it off again, or of Gemma, which does neither."""
    vocab, merges = _vocabulary(LETTERS, "\u2581")
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prepend else replace
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepend else steps)
    return made


def _metaspace() -> Tokenizer:
    vocab, merges = _vocabulary(LETTERS, "\u2581")
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return made


def _unigram() -> Tokenizer:
    vocab, _ = _vocabulary(LETTERS, "\u2581")
    made = Tokenizer(models.Unigram([(text, -10.0 + len(text)) for text in vocab], unk_id=UNK, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


def _wordpiece() -> Tokenizer:
    pieces = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS, "##ing", "do", "not", "n't")
    made = Tokenizer(models.WordPiece({text: token for token, text in enumerate(dict.fromkeys(pieces))}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def _words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({text: token for token, text in enumerate((*SPECIAL, *WORDS, "."))}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def _suffixes() -> Tokenizer:
    """The end of a word is part of its last token: what a token writes depends on the ones next to it."""
    vocab, _ = _vocabulary(LETTERS, "_")
    vocab |= {f"{text}</w>": len(vocab) + place for place, text in enumerate((*LETTERS, *WORDS))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    return made


FORMS = {
    "byte-level, GPT-2": lambda: _byte_level(None),
    "byte-level, Llama 3": lambda: _byte_level(LLAMA3),
    "byte-level, Qwen": lambda: _byte_level(QWEN),
    "SentencePiece, Llama 2": lambda: _sentencepiece(prepend=True),
    "SentencePiece, Gemma": lambda: _sentencepiece(prepend=False),
    "Metaspace": _metaspace,
    "Unigram": _unigram,
    "WordPiece": _wordpiece,
    "words": _words,
    "suffixes": _suffixes,
}


def make_form(name: str, *, around: bool = False) -> Tokenizer:
    """A tokenizer of :data:`FORMS`.

    Args:
        name: of the form.
        around: it puts its begin token in front of every text.
    """
    made = FORMS[name]()
    made.add_special_tokens(list(SPECIAL))
    if around:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    return made


def write_form(folder: Path, name: str, *, around: bool = False, **config: Any) -> Path:
    """The files of a tokenizer of :data:`FORMS`; ``config`` adds to ``tokenizer_config.json``."""
    folder.mkdir(exist_ok=True, parents=True)
    make_form(name, around=around).save(str(folder / "tokenizer.json"))
    write_config(folder, **config)
    return folder


def write_config(folder: Path, **config: Any) -> None:
    """``tokenizer_config.json`` for such a tokenizer."""
    keys = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
