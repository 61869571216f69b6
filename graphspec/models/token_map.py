"""FR-Spec (arXiv 2502.14856): a draft that proposes only from the most frequent tokens. No training, and no output changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..config.checks import LONG, brief
from ..errors import CheckpointError, ConfigError
from ..facts.files import plain, require_file
from ..facts.keys import is_integer
from .layers import Linear
from .packed_weight import PackedWeight
from .tensor_files import load_pickle, open_tensors
from .vocabulary import set_weight

if TYPE_CHECKING:
    from ..facts import DraftFacts

_TENSOR = "token_map"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _read_ids(file: Path) -> tuple[str, Any]:
    if file.suffix == ".safetensors":
        tensors = open_tensors(file)
        names = [name for name in tensors.names() if name == _TENSOR] or [
            name for name in tensors.names() if tensors.describe(name)[1].startswith(("I", "U"))
        ]
        if len(names) != 1:
            raise CheckpointError(str(file), f"a tensor {_TENSOR}, or one integer tensor", plain(", ".join(names)) or "none")
        return f"{file}: {plain(names[0])}", tensors.tensor(names[0])
    if file.suffix in (".pt", ".bin"):
        return str(file), load_pickle(file)
    raise CheckpointError(str(file), "a token map in a .pt or .safetensors file", file.suffix or "no suffix")


def load_token_map(path: str | Path, vocab_size: int) -> Tensor:
    """Token ids that a draft may propose: int64 ``[Vd]``, ascending, on the CPU.

    Args:
        path: a ``.pt`` file with a list or tensor of ids, in any order, or a ``.safetensors`` file with the tensor ``token_map`` (or one
            integer tensor of another name).
        vocab_size: of the target.

    Raises:
        CheckpointError: no such file, something else in it, an id outside ``[0, vocab_size)``, or one that is there twice.
    """
    file = Path(path)
    require_file(file, "a file with token ids")
    key, found = _read_ids(file)
    expected, within = "a list or one-dimensional tensor of token ids", f"token ids in [0, {vocab_size})"
    foreign = "a map made for another vocabulary?"
    if isinstance(found, list):
        if not all(is_integer(token) for token in found):
            raise CheckpointError(key, expected, "other elements")
        outside = next((token for token in found if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise CheckpointError(key, within, brief(outside, LONG), foreign)
        found = torch.tensor(found, dtype=torch.int64)
    if not isinstance(found, Tensor) or found.dtype not in _INTEGERS or found.dim() != 1 or not found.numel():
        what = f"{found.dtype} of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise CheckpointError(key, expected, what)
    if found.layout != torch.strided or found.device.type != "cpu" or found.is_quantized:
        raise CheckpointError(key, expected, f"{found.layout} on {found.device}")
    if found.numel() > vocab_size:  # before it is copied: a tensor of one element may claim any number of them
        raise CheckpointError(key, f"at most {vocab_size} token ids", found.numel(), foreign)
    token_Vd = found.long().sort().values
    if int(token_Vd[0]) < 0 or int(token_Vd[-1]) >= vocab_size:
        bad = int(token_Vd[0]) if int(token_Vd[0]) < 0 else int(token_Vd[-1])
        raise CheckpointError(key, within, bad, foreign)
    twice = token_Vd[1:][token_Vd.diff() == 0]
    if twice.numel():
        raise CheckpointError(key, "distinct token ids", f"{int(twice[0])} more than once")
    return token_Vd


def apply_token_map(draft: nn.Module, token_Vd: Tensor) -> None:
    """Trim the language-model head of a draft to some tokens: a copy of its rows, so that a head shared with the target stays whole.

    Tokens beyond a vocabulary that is padded to fewer than the target's are left out.

    Sets ``target_token_Vd``, and ``draft_vocab_size`` in the draft's facts. To be called before weights are packed.

    Args:
        draft: any draft network that proposes from the target's whole vocabulary.
        token_Vd: int64 ``[Vd]`` as :func:`load_token_map` gives them.

    Raises:
        ConfigError: a draft without a head, or with a vocabulary map of its own.
    """
    key, facts = "variant.token_map", cast("DraftFacts", draft.facts)
    own = getattr(draft, "target_token_Vd", None)
    if isinstance(own, Tensor) and facts.begins_vocabulary:
        token_Vd = token_Vd[token_Vd < own.numel()]
    elif isinstance(own, Tensor):
        raise ConfigError(key, "a draft that proposes from the whole vocabulary", f"one with a map of its own, of {own.numel()} tokens")
    owners = [module for module in draft.modules() if isinstance(getattr(module, "lm_head", None), Linear)]
    if not owners:
        raise ConfigError(key, "a draft with a language-model head", type(draft).__name__)
    for owner in owners:
        head = owner.lm_head
        assert isinstance(head, Linear) and head.weight is not None, "weights are already packed"
        rows = token_Vd.to(head.weight.device)
        with torch.device("meta"):
            trimmed = Linear(head.weight.shape[1], token_Vd.numel(), bias=head.bias is not None)
        if isinstance(head.weight, PackedWeight):
            set_weight(trimmed, head.weight.take(rows))
        else:
            set_weight(trimmed, nn.Parameter(head.weight[rows], requires_grad=False), head.stored)
        if head.bias is not None:
            trimmed.bias = nn.Parameter(head.bias[rows], requires_grad=False)
        owner.lm_head = trimmed.eval()
        draft.target_token_Vd = rows
    object.__setattr__(draft, "facts", replace(facts, draft_vocab_size=token_Vd.numel(), begins_vocabulary=False))
