"""What a checkpoint's tokenizer files say: its tokens, and the names of special ones. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.checks import LONG, brief
from ..errors import CheckpointError
from .files import MAX_CONFIG, MAX_TOKENIZER, find_file, read_json
from .keys import MAX_VOCAB, is_integer

SPECIAL_NAMES = ("bos_token", "eos_token")
"""Keys of special tokens that mean something to an engine."""


def _read_tokens(file: Path) -> dict[int, str]:
    """Token text of each id in a ``tokenizer.json``: the model's vocabulary, then the added tokens."""
    values = read_json(file, MAX_TOKENIZER)
    model = values.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        tokens = _checked(list(vocab.values()), list(vocab), f"{file}: model.vocab")
    elif isinstance(vocab, list) and all(isinstance(entry, list) and entry for entry in vocab):  # Unigram: [text, score] in id order
        tokens = _checked(list(range(len(vocab))), [entry[0] for entry in vocab], f"{file}: model.vocab")
    else:
        raise CheckpointError(f"{file}: model.vocab", "the vocabulary of a tokenizer", type(vocab).__name__)
    added = values.get("added_tokens")
    if added is None:
        return tokens
    if not isinstance(added, list) or not all(isinstance(entry, dict) and {"id", "content"} <= set(entry) for entry in added):
        raise CheckpointError(f"{file}: added_tokens", "a list of objects with id and content", brief(added, LONG))
    return tokens | _checked([entry["id"] for entry in added], [entry["content"] for entry in added], f"{file}: added_tokens")


def _checked(ids: list[Any], texts: list[Any], where: str) -> dict[int, str]:
    # a vocabulary has 100,000 entries and more: no loop in Python unless one of them is wrong
    if set(map(type, ids)) <= {int} and set(map(type, texts)) <= {str} and (not ids or (min(ids) >= 0 and max(ids) < MAX_VOCAB)):
        return dict(zip(ids, texts, strict=True))
    wrong = next(
        (token_id, text)
        for token_id, text in zip(ids, texts, strict=True)
        if not is_integer(token_id) or not 0 <= token_id < MAX_VOCAB or not isinstance(text, str)
    )
    raise CheckpointError(where, f"texts with ids in [0, {MAX_VOCAB})", f"{brief(wrong[1], LONG)} with id {brief(wrong[0], LONG)}")


def check_tokenizer(draft_folder: str | Path, target_folder: str | Path) -> None:
    """Compare the vocabularies of ``tokenizer.json`` in both folders; nothing to compare where one has none.

    Raises:
        CheckpointError: the first id, ascending, that means another token to the draft, or none; or a damaged file.
    """
    draft_file, target_file = Path(draft_folder) / "tokenizer.json", Path(target_folder) / "tokenizer.json"
    if not find_file(draft_file) or not find_file(target_file) or draft_file.samefile(target_file):
        return
    draft, target = _read_tokens(draft_file), _read_tokens(target_file)
    different = [token_id for token_id in draft.keys() | target.keys() if draft.get(token_id) != target.get(token_id)]
    if not different:
        return
    first = min(different)
    expected = f"{brief(target[first], LONG)}, as in {target_file}" if first in target else f"no such token, as in {target_file}"
    found = brief(draft[first], LONG) if first in draft else "no such token"
    hint = f"{len(different)} ids differ; draft and target must share one tokenizer"
    raise CheckpointError(f"{draft_file}: token {first}", expected, found, hint)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, with the special tokens of ``special_tokens_map.json``; empty: the folder has neither.

    As transformers has it, the map counts unless the configuration lists the added tokens itself.

    Raises:
        CheckpointError: a damaged file, a special token without text, or a ``model_max_length`` that is no number.
    """
    found: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not find_file(file) or "added_tokens_decoder" in found:
            continue
        values = read_json(file, MAX_CONFIG)
        for key in SPECIAL_NAMES:
            if (value := values.get(key)) is not None and not isinstance(_token_text(value), str):
                raise CheckpointError(f"{file}: {key}", "the text of a token, an object with it as content, or null", brief(value, LONG))
        if not isinstance(longest := values.get("model_max_length", 0), int | float):
            raise CheckpointError(f"{file}: model_max_length", "a number", brief(longest, LONG))
        found |= values
    return found


def special_token(config: dict[str, Any], key: str) -> str | None:
    """The text of a special token that :func:`read_tokenizer_config` found, one of :data:`SPECIAL_NAMES`; None: it names none."""
    value = config.get(key)
    return None if value is None else str(_token_text(value))


def _token_text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value
