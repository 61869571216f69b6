"""Count which ids a text uses: ``python -m recipes.token_map target=DIR data='[a.txt,dir]' size=32768 out=map.safetensors``.

A drafter that shares its target's output head spends much of its time on that one matrix; reading only the rows of the most frequent
ids leaves the target's choice alone and costs little acceptance (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). The file holds those ids,
most frequent first, as int64 ``token_map [size]``: a safetensors file, or a torch file with the tensor alone when the name ends in
``.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from graphspec.errors import ConfigError
from graphspec.train.export import save_weights
from graphspec.train.texts import encode_stream, read_documents


@dataclass
class TokenMapConfig:
    """What is counted, and what is kept."""

    target: str = MISSING
    """Folder of the target, in Hugging Face format; its config and tokenizer are read."""
    data: list[str] = MISSING
    """Text files, or folders of them: text of the kind that will be generated."""
    size: int = MISSING
    """How many ids are kept."""
    out: str = MISSING
    """The file to write."""


def most_frequent(stream: np.ndarray, vocab_size: int, size: int, always: Sequence[int]) -> Tensor:
    """``[size]`` int64: ``always`` and the ids that occur most often, most frequent first, ties by id.

    Raises:
        ConfigError: ``size`` is not in ``1..vocab_size``, or too small for ``always``.
    """
    least = max(1, len(set(always)))
    if not least <= size <= vocab_size:
        raise ConfigError("size", f"{least}..{vocab_size}", size)
    counts = np.bincount(stream, minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ConfigError("target", f"a tokenizer with ids below vocab_size = {vocab_size}", len(counts) - 1)
    order = np.argsort(-counts, kind="stable")
    kept = np.zeros(vocab_size, dtype=bool)
    kept[list(always)] = True
    # The end-of-text ids stay however rare they are: a draft that can't end costs one miss at every end.
    kept[order[~kept[order]][: size - int(kept.sum())]] = True
    return torch.from_numpy(order[kept[order]].astype(np.int64))


def make_token_map(config: TokenMapConfig) -> Tensor:
    """Count, write ``config.out``, and return the ids."""
    if not (Path(config.target) / "config.json").is_file():
        raise ConfigError("target", "a folder with a Hugging Face checkpoint", config.target)
    facts, tokenizer = (
        AutoConfig.from_pretrained(config.target, trust_remote_code=False),
        AutoTokenizer.from_pretrained(config.target, trust_remote_code=False),
    )
    end = facts.eos_token_id
    ends = end if isinstance(end, list) else [] if end is None else [end]
    stream = encode_stream(tokenizer, list(read_documents(config.data).values()), tokenizer.eos_token_id)
    ids = most_frequent(stream, facts.vocab_size, config.size, ends)
    file = Path(config.out)
    if file.suffix == ".pt":
        torch.save(ids, file)
    elif file.suffix == ".safetensors":
        save_weights({"token_map": ids}, file)
    else:
        raise ConfigError("out", "a name that ends in .safetensors or .pt", config.out)
    share = float(np.isin(stream, ids.numpy()).mean())
    print(f"{len(ids)} of {facts.vocab_size} ids, {100 * share:.2f} % of {len(stream)} tokens: {file}", flush=True)
    return ids


def load_config(arguments: list[str]) -> TokenMapConfig:
    """``key=value`` arguments as a configuration.

    Raises:
        ConfigError: an unknown or a missing key, or a value of the wrong type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TokenMapConfig), OmegaConf.from_dotlist(arguments))
        for key in sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(key, "a value", "none given")
        return cast("TokenMapConfig", OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "command line", "a setting of recipes.token_map", str(error).splitlines()[0]) from error


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or {"-h", "--help"} & set(given):
        print(__doc__)
        return
    make_token_map(load_config(given))


if __name__ == "__main__":
    main()
