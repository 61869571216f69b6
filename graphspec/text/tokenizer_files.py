"""Files of a checkpoint's tokenizer, read by ``tokenizers`` or, where they are of an older kind, converted by transformers."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, spell_bytes
from ..facts.files import MAX_TOKENIZER, find_file, open_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

logger = logging.getLogger(__name__)
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has files of a tokenizer."""
    return any((folder / name).exists() for name in FILES)


def load_tokenizer(folder: Path) -> tuple[Library, Any]:
    """The tokenizer of a folder, and transformers' object where that had to convert it."""
    from tokenizers import Tokenizer as Library

    file, expected = folder / "tokenizer.json", "tokenizer files (or pass token ids as prompts)"
    if find_file(file):
        with open_file(file) as stream:
            data = stream.read(MAX_TOKENIZER + 1)
        if len(data) > MAX_TOKENIZER:
            raise CheckpointError(str(file), f"a json file of at most {spell_bytes(MAX_TOKENIZER)}", "a larger one")
        try:
            return Library.from_buffer(data), None
        except Exception as error:  # whatever the library raises, the file is at fault
            raise CheckpointError(str(folder), expected, one_line(error)) from error
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if not converted.is_fast:
            converted = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        library = copy.deepcopy(converted.backend_tokenizer)
    except Exception as error:  # whatever its files make transformers raise, the files are at fault
        if (code := _own_code(folder)) is not None:
            own = "a tokenizer that transformers has; code of a checkpoint is never run"
            raise CheckpointError(f"{folder}: auto_map", own, code, "or pass token ids as prompts") from error
        raise CheckpointError(str(folder), expected, one_line(error)) from error
    logger.warning("%s has no tokenizer.json: transformers converted its tokenizer files (%s)", folder, type(converted).__name__)
    return library, converted


def _own_code(folder: Path) -> str | None:
    """The tokenizer class that the checkpoint's own code would provide; None: its files name none."""
    for name in ("tokenizer_config.json", "config.json"):
        try:
            keys = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        classes = keys.get("auto_map") if isinstance(keys, dict) else None
        if isinstance(classes, dict) and "AutoTokenizer" in classes:
            return str(classes["AutoTokenizer"])
    return None


def one_line(error: BaseException) -> str:
    """What a library raised, in one line of a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
