"""Do a draft and its target speak of the same tokens? Standard library only."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .keys import read_json


def _read_tokens(file: Path) -> dict[int, str]:
    """Token text of each id in a ``tokenizer.json``: the model's vocabulary, then the added tokens."""
    keys = read_json(file)
    model = keys.values.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        tokens = {token_id: text for text, token_id in vocab.items()}
    elif isinstance(vocab, list) and all(isinstance(entry, list) and entry for entry in vocab):  # Unigram: [text, score] in id order
        tokens = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    else:
        raise CheckpointError(f"{file}: model.vocab", "the vocabulary of a tokenizer", type(vocab).__name__)
    added = keys.values.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) and {"id", "content"} <= set(entry) for entry in added):
        raise CheckpointError(f"{file}: added_tokens", "a list of objects with id and content", repr(added)[:80])
    return tokens | {entry["id"]: entry["content"] for entry in added}


def check_tokenizer(draft_folder: str | Path, target_folder: str | Path) -> None:
    """Compare the vocabularies of ``tokenizer.json`` in both folders; nothing to compare where one has none.

    Raises:
        CheckpointError: the first id, ascending, that means another token to the draft, or none; or a damaged file.
    """
    draft_file, target_file = Path(draft_folder) / "tokenizer.json", Path(target_folder) / "tokenizer.json"
    if not draft_file.is_file() or not target_file.is_file() or draft_file.samefile(target_file):
        return
    draft, target = _read_tokens(draft_file), _read_tokens(target_file)
    different = [token_id for token_id in draft.keys() | target.keys() if draft.get(token_id) != target.get(token_id)]
    if not different:
        return
    first = min(different)
    expected = f"{target[first]!r}, as in {target_file}" if first in target else f"no such token, as in {target_file}"
    found = repr(draft[first]) if first in draft else "no such token"
    hint = f"{len(different)} ids differ; draft and target must share one tokenizer"
    raise CheckpointError(f"{draft_file}: token {first}", expected, found, hint)
