"""The tokenizer of a GGUF file as the ``tokenizer.json`` that a Hugging Face checkpoint would have, and its chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.checks import brief
from ..errors import CheckpointError
from .gguf import GgufHeader

_MODEL, _TOKENS, _TYPES, _MERGES, _SCORES, _PRE = (
    f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type", "merges", "scores", "pre")
)
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Token types that :data:`_TYPES` has."""
_ENDS = ("eos", "eot", "eom")
_TEMPLATE = "tokenizer.chat_template"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, others: str = _OTHERS) -> str:
    """Pattern that splits words, contractions and runs of digits; ``digits`` is a regex quantifier for the length of a run."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|{others}"


def _cased(digits: str, contractions: str) -> str:
    """The same pattern, but a word also ends where a lowercase letter is followed by an uppercase one."""
    begin, others = r"[^\r\n\p{L}\p{N}]?", _OTHERS.replace(r"[\r\n]*", r"[\r\n/]*")
    parts = (f"{begin}{_UPPER}*{_LOWER}+{contractions}", f"{begin}{_UPPER}+{_LOWER}*{contractions}")
    return "|".join((*parts, rf"\p{{N}}{digits}", others))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How texts are cut before byte-pair encoding.

    Attributes:
        cut: the step, as ``tokenizer.json`` has it.
        whole_words: a word that is a token is that token, whatever its merges.
        begins: texts begin with ``bos`` unless the file says otherwise.
        composed: texts are normalised to Unicode's form C first.
    """

    cut: dict[str, Any]
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


def _by(pattern: str) -> dict[str, Any]:
    return _sequence(_split(pattern), _byte_level(use_regex=False))


_GPT2 = PreTokenizer(_byte_level(use_regex=True))
_DIGITS = PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _GPT2.cut))
_LLAMA3 = PreTokenizer(_by(_words("{1,3}")), whole_words=True, begins=True)
_DBRX, _GLM4 = PreTokenizer(_LLAMA3.cut), PreTokenizer(_LLAMA3.cut, whole_words=True)
_QWEN2 = PreTokenizer(_by(_words("")), composed=True)
_QWEN35 = PreTokenizer(
    _by(_words("").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")), composed=True
)
_SEED = PreTokenizer(_by(_words("{1}", _OTHERS.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"))))
_TEKKEN = PreTokenizer(_by(_cased("", "")), whole_words=True, begins=True)
_GPT4O = PreTokenizer(_by(_cased("{1,3}", f"{_CONTRACTIONS}?")))
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "olmo", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": _QWEN35, "seed-coder": _SEED, "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}  # fmt: skip
"""By ``tokenizer.ggml.pre``. Source: ``llama-vocab.cpp`` of llama.cpp, with the patterns of the models' own ``tokenizer.json``."""
_HARMONY = ("<|return|>", "<|call|>")
"""Tokens that end a message of gpt-oss to the user and to a function. ``<|end|>``, which files name as well, ends a channel."""


def _ids(header: GgufHeader, name: str) -> int | None:
    token = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = header.metadata.get(_TOKENS)
    count = len(tokens) if isinstance(tokens, list) else 0
    if token is None or token == 2**32 - 1:
        return None
    if type(token) is not int or not 0 <= token < count:
        raise header.error(f"tokenizer.ggml.{name}_token_id", f"a token from 0 to {count - 1}")
    return token


def special_ids(header: GgufHeader) -> dict[str, int]:
    """``bos_token_id`` and ``eos_token_id`` as ``config.json`` has them."""
    found = {f"{name}_token_id": _ids(header, name) for name in ("bos", "eos")}
    return {key: token for key, token in found.items() if token is not None}


def ends_of(header: GgufHeader) -> list[int]:
    """Tokens that end an answer: of a text, of a turn, of a message."""
    tokens = header.metadata.get(_TOKENS)
    if isinstance(tokens, list) and all(token in tokens for token in _HARMONY):
        text = _ids(header, "eos")
        return list(dict.fromkeys([*([] if text is None else [text]), *map(tokens.index, _HARMONY)]))
    return list(dict.fromkeys(token for name in _ENDS if (token := _ids(header, name)) is not None))


def chat_templates(header: GgufHeader) -> str | list[dict[str, str]] | None:
    """The chat template, or several by name, as ``tokenizer_config.json`` has them; None: the file has none."""
    found = {key.removeprefix(f"{_TEMPLATE}."): value for key, value in header.metadata.items() if key.startswith(f"{_TEMPLATE}.")}
    default = header.metadata.get(_TEMPLATE)
    for name, value in {**found, **({"default": default} if default is not None else {})}.items():
        if not isinstance(value, str):
            raise header.error(_TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}", "a text")
    if not found:
        return default
    named = {"default": default, **found} if default is not None else found
    return [{"name": name, "template": template} for name, template in named.items()]


def read_gguf_tokenizer(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """``tokenizer.json`` and ``tokenizer_config.json``, without chat templates; None: the file has no tokenizer.

    Raises:
        CheckpointError: a kind of tokenizer that isn't supported, or lists that don't fit together.
    """
    kind = header.metadata.get(_MODEL)
    if kind in (None, "none"):
        return None
    if kind not in ("gpt2", "llama", "gemma4"):
        raise header.error(_MODEL, "gpt2, llama or gemma4", "pass token ids as prompts with a folder that has no tokenizer")
    tokens = header.metadata.get(_TOKENS)
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{header.file}: {_TOKENS}", "a list of texts", brief(type(tokens).__name__))
    types = header.metadata.get(_TYPES) or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens) or not set(map(type, types)) <= {int}:
        raise CheckpointError(f"{header.file}: {_TYPES}", f"{len(tokens)} kinds", brief(types, 40))
    added = [
        {
            "id": place, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kind_of != _USER_DEFINED,
        }
        for place, (token, kind_of) in enumerate(zip(tokens, types, strict=True))
        if kind_of in (_CONTROL, _USER_DEFINED) or (kind_of == _UNKNOWN and kind != "gpt2")
    ]  # fmt: skip
    document: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    document |= _byte_pairs(header, tokens) if kind == "gpt2" else _sentence_pieces(header, tokens, types)
    begins = _flag(header, "add_bos_token", kind != "gpt2" or _pre(header).begins)
    around = {
        name: token
        for name, wanted in (("bos", begins), ("eos", _flag(header, "add_eos_token", False)))
        if wanted and (token := _ids(header, name)) is not None
    }
    if around:
        document["post_processor"] = _around(tokens, around.get("bos"), around.get("eos"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        if (token := _ids(header, name)) is not None:
            settings[f"{name}_token"] = tokens[token]
    return document, settings


def _flag(header: GgufHeader, name: str, default: bool) -> bool:
    value = header.metadata.get(f"tokenizer.ggml.{name}", default)
    if value not in (True, False):
        raise header.error(f"tokenizer.ggml.{name}", "true or false")
    return bool(value)


def _around(tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any]:
    """Puts tokens around each text."""

    def one(name: str, number: int) -> list[dict[str, Any]]:
        before, after = ([{"SpecialToken": {"id": tokens[t], "type_id": number}}] if t is not None else [] for t in (bos, eos))
        return [*before, {"Sequence": {"id": name, "type_id": number}}, *after]

    special = {tokens[t]: {"id": tokens[t], "ids": [t], "tokens": [tokens[t]]} for t in (bos, eos) if t is not None}
    return {"type": "TemplateProcessing", "single": one("A", 0), "pair": one("A", 0) + one("B", 1), "special_tokens": special}


def _pre(header: GgufHeader) -> PreTokenizer:
    name = header.metadata.get(_PRE, "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise header.error(_PRE, "one of " + ", ".join(PRE_TOKENIZERS))
    return PRE_TOKENIZERS[name]


def _listed_merges(header: GgufHeader) -> list[list[str]]:
    merges = header.metadata.get(_MERGES)
    if not isinstance(merges, list) or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise CheckpointError(f"{header.file}: {_MERGES}", "a list of pairs", brief(merges, 40))
    return [merge.split(" ") for merge in merges]


def _byte_pairs(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    pre = _pre(header)
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
        "byte_fallback": False, "ignore_merges": pre.whole_words, "vocab": {token: place for place, token in enumerate(tokens)},
        "merges": _listed_merges(header),
    }  # fmt: skip
    return {
        "normalizer": {"type": "NFC"} if pre.composed else None, "pre_tokenizer": pre.cut, "post_processor": None,
        "decoder": {**_byte_level(use_regex=True), "add_prefix_space": True}, "model": model,
    }  # fmt: skip


def _sentence_pieces(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece's byte-pair encoding: pairs merge in the order of the scores of what they make, or as the file lists them (Gemma 4)."""
    unknown, place = _ids(header, "unknown"), {token: number for number, token in enumerate(tokens)}
    model = {
        "type": "BPE", "dropout": None, "unk_token": tokens[unknown] if unknown is not None else None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": place,
        "merges": _listed_merges(header) if header.metadata[_MODEL] == "gemma4" else _scored_merges(header, tokens, types, place),
    }  # fmt: skip
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    strip = []
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    decoder = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoder}, "model": model,
    }  # fmt: skip


def _scored_merges(header: GgufHeader, tokens: list[str], types: list[int], place: dict[str, int]) -> list[list[str]]:
    """Pairs of tokens that make a token, those with the best score of what they make first."""
    scores = header.metadata.get(_SCORES)
    if not isinstance(scores, list) or len(scores) != len(tokens) or not set(map(type, scores)) <= {int, float}:
        raise CheckpointError(f"{header.file}: {_SCORES}", f"{len(tokens)} scores", brief(scores, 40))
    merges = []
    for number, token in enumerate(tokens):
        if types[number] in (_CONTROL, _BYTE, _UNKNOWN):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in place and pair[1] in place]
        merges += [(scores[number], *pair) for pair in sorted(known, key=lambda pair: (place[pair[0]], place[pair[1]]))]
    merges.sort(key=lambda merge: -merge[0])
    return [[left, right] for _, left, right in merges]
