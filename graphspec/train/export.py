"""Writes targets and drafts as checkpoints in Hugging Face's format and bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..config.paths import make_folder, unwritable
from .checkpoint import write_json
from .drafter import Drafter
from .facts import decoder_facts

OUT = "train.out"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def save_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the usual permissions (the library's writer lets only the owner read it).

    Raises:
        ConfigError: it can't be written.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)
    except (OSError, SafetensorError) as error:
        raise unwritable(OUT, path, error) from error


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer files that exist in ``source``."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def export_target(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    """Write config, generation config, weights (a tied embedding once) and tokenizer to ``out``."""
    make_folder(OUT, out)
    write_json(out / "config.json", {"architectures": [type(model).__name__], **decoder_facts(model), "use_cache": True}, OUT)
    ids = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    write_json(out / "generation_config.json", {**ids, "do_sample": False}, OUT)
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters() if name != "lm_head.weight"}
    save_weights(tensors, out / "model.safetensors")
    copy_tokenizer(tokenizer, out)


def export_draft(drafter: Drafter, target: PreTrainedModel, out: Path, tokenizer: Path | None = None) -> None:
    """Write config and weights of a draft in its published layout; for a whole model, the target's tokenizer too."""
    make_folder(OUT, out)
    facts, tensors = drafter.published(target)
    write_json(out / "config.json", facts, OUT)
    stored = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    save_weights({name: t.cpu().contiguous() for name, t in stored.items()}, out / "model.safetensors")
    if tokenizer is not None and drafter.stands_alone:
        copy_tokenizer(tokenizer, out)


def size_in_megabytes(folder: Path) -> float:
    """Size of all weight files under ``folder``, in units of 1e6 bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / 1e6
