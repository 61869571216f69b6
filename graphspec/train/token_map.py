"""Makes a token map from a text: ``python -m graphspec.train.token_map --target DIR --data a.txt dir --size 32768 --out map.safetensors``.

A drafter that shares its target's output head spends much of its time on that one matrix; reading only the rows of the most frequent
ids does not change the target's output and costs little acceptance (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). The file has these ids,
most frequent first, as int64 ``token_map [size]``: a safetensors file, or, if the name ends in ``.pt``, a torch file of the tensor alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from ..errors import ConfigError
from ..text.tokenizer import Tokenizer
from .checkpoint import write_whole
from .export import save_weights
from .texts import encode_stream, read_documents


def most_frequent(stream: np.ndarray, vocab_size: int, size: int, always: Sequence[int]) -> Tensor:
    """``[size]`` int64: ``always`` and the ids that occur most often, most frequent first, ties by id.

    Raises:
        ConfigError: ``size`` is not in ``1..vocab_size``, or too small for ``always``.
    """
    minimum = max(1, len(set(always)))
    if not minimum <= size <= vocab_size:
        raise ConfigError("--size", f"{minimum}..{vocab_size}", size)
    counts = np.bincount(stream, minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ConfigError("--target", f"a tokenizer with ids below vocab_size = {vocab_size}", len(counts) - 1)
    order = np.argsort(-counts, kind="stable")
    kept = np.zeros(vocab_size, dtype=bool)
    kept[list(always)] = True
    # End-of-text ids are kept even if they are rare: without them, a draft misses once at the end of every text.
    kept[order[~kept[order]][: size - int(kept.sum())]] = True
    return torch.from_numpy(order[kept[order]].astype(np.int64))


def make_token_map(target: Path, data: Sequence[str | Path], size: int, out: Path) -> Tensor:
    """Count the ids of ``data`` under the tokenizer of ``target``, write the map to ``out``, and return it.

    Raises:
        ConfigError: no such target or text, a size out of range, or a file of another kind.
        CheckpointError: the target has no tokenizer, or a damaged one.
    """
    if not (target / "config.json").is_file():
        raise ConfigError("--target", "a folder with a Hugging Face checkpoint", str(target))
    if out.suffix not in (".pt", ".safetensors"):
        raise ConfigError("--out", "a name that ends in .safetensors or .pt", str(out))
    facts = AutoConfig.from_pretrained(target, trust_remote_code=False)
    tokenizer = Tokenizer(target)
    end = facts.eos_token_id
    ends = end if isinstance(end, list) else [] if end is None else [end]
    stream = encode_stream(tokenizer, list(read_documents(data, "--data").values()), tokenizer.eos_token_id)
    ids = most_frequent(stream, facts.vocab_size, size, ends)
    if out.suffix == ".pt":
        write_whole(out, lambda file: torch.save(ids, file), "--out")
    else:
        save_weights({"token_map": ids}, out)
    share = float(np.isin(stream, ids.numpy()).mean())
    print(f"{len(ids)} of {facts.vocab_size} ids, {100 * share:.2f} % of {len(stream)} tokens: {out}", flush=True)
    return ids


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m graphspec.train.token_map", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target; its config and tokenizer are read")
    parser.add_argument("--data", nargs="+", required=True, help="text files, or folders of them: text of the kind that will be generated")
    parser.add_argument("--size", type=int, required=True, help="how many ids are kept")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, .safetensors or .pt")
    options = parser.parse_args(arguments)
    make_token_map(options.target, options.data, options.size, options.out)


if __name__ == "__main__":
    main()
