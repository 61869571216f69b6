"""What a frozen target computes of each training sequence, kept on disk: a sequence that is read again costs the target nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.paths import unwritable
from .checkpoint import KEY, check_room
from .drafter import Drafter, Target

FILE = "features.bin"
"""In ``train.work`` while a run lasts; a run that resumes writes it again."""


class CachedTarget:
    """A target's features and logits of sequences that a draft reads several times.

    The target reads each sequence alone, so its numbers don't depend on the rest of the batch. All are rounded to ``dtype``, stored or not.
    A resumed run, whose file is empty again, therefore has the same bits.

    Args:
        target: the frozen target.
        drafter: the network in training. Its draft vocabulary is read at the first sequence, after a checkpoint was loaded.
        sequences: those that are kept, int32 ``[N, T]`` by their length T.
        dtype: in which features and hidden states are stored.
        folder: of the file.

    Raises:
        ConfigError: less room than the file needs.
    """

    def __init__(
        self, target: Target, drafter: Drafter, sequences: Mapping[int, list[np.ndarray]], dtype: torch.dtype, folder: Path
    ) -> None:
        self.target, self.drafter, self.dtype = target, drafter, dtype
        self.hidden_size: int = target.model.config.hidden_size
        self.feature_size = (len(drafter.tap_layers) or 1) * self.hidden_size
        # Of a token: its features, its hidden state before the output head, and whether its most likely id is one of the draft's.
        self.columns = self.feature_size + self.hidden_size + 1
        self.place: dict[bytes, int] = {}
        size = 0
        for length, sets in sequences.items():
            for key in (digest(tokens_T) for tokens_NT in sets for tokens_T in tokens_NT):
                if key not in self.place:
                    self.place[key] = size
                    size += length * self.columns
        self.filled: set[bytes] = set()
        self.file = folder / FILE
        self.close()
        check_room(folder, size * dtype.itemsize, "train.cache_features")
        size = max(1, size)
        try:
            with self.file.open("wb") as stream:
                if hasattr(os, "posix_fallocate"):
                    # A mapped file that meets a full disk later would end the process.
                    os.posix_fallocate(stream.fileno(), 0, size * dtype.itemsize)
        except OSError as error:
            self.close()
            raise unwritable(KEY, self.file, error) from error
        self.store = torch.from_file(str(self.file), shared=True, size=size, dtype=dtype)

    def close(self) -> None:
        """Remove the file."""
        self.file.unlink(missing_ok=True)

    @cached_property
    def head_VH(self) -> Tensor:
        """The rows of the target's output head for the ids that the draft has."""
        weight: Tensor = self.target.model.lm_head.weight
        ids = self.drafter.target_ids()
        return weight if ids is None else weight[ids.to(weight.device)]

    @torch.no_grad()
    def view(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features ``[B, T, F]`` float32; logits; and the columns of the logits that are the draft's, int64 ``[Vd]``.

        For a draft with a vocabulary of its own the logits are ``[B, T, Vd + 1]``. The last column stands for all other ids: infinite where
        one of them is more likely than every id of the draft, else minus infinity. Without one they are ``[B, T, V]``, and columns None.
        """
        rows_BTC = torch.stack([self._row(tokens_T).to(tokens_BT.device) for tokens_T in tokens_BT])
        features_BTF, hidden_BTH, inside_BT1 = rows_BTC.split((self.feature_size, self.hidden_size, 1), -1)
        logits_BTV = F.linear(hidden_BTH.to(self.head_VH.dtype), self.head_VH)
        if self.drafter.target_ids() is None:
            return features_BTF.float(), logits_BTV, None
        others_BT1 = torch.where(inside_BT1 > 0, -torch.inf, torch.inf).to(logits_BTV.dtype)
        columns_Vd = torch.arange(len(self.head_VH), device=tokens_BT.device)
        return features_BTF.float(), torch.cat((logits_BTV, others_BT1), -1), columns_Vd

    def _row(self, tokens_T: Tensor) -> Tensor:
        """``[T, C]``: the numbers of one sequence, computed unless they are in the file."""
        key = digest(tokens_T.to("cpu", torch.int32).numpy())
        begin = self.place.get(key)
        if begin is None:
            return self._compute(tokens_T)
        stored_TC = self.store[begin : begin + len(tokens_T) * self.columns].view(len(tokens_T), self.columns)
        if key not in self.filled:
            stored_TC.copy_(self._compute(tokens_T))
            self.filled.add(key)
        return stored_TC

    def _compute(self, tokens_T: Tensor) -> Tensor:
        features_1TF, hidden_1TH = self.target.hidden(tokens_T[None], self.drafter.tap_layers)
        logits_TV = self.target.model.lm_head(hidden_1TH)[0]
        ids = self.drafter.target_ids()
        drafted_TV = logits_TV if ids is None else logits_TV[:, ids]
        inside_T = drafted_TV.amax(-1) >= logits_TV.amax(-1)
        return torch.cat((features_1TF[0], hidden_1TH[0].float(), inside_T[:, None].float()), -1).to(self.dtype)


def digest(tokens_T: np.ndarray) -> bytes:
    """A key of int32 tokens."""
    return hashlib.blake2b(np.ascontiguousarray(tokens_T, dtype=np.int32).tobytes(), digest_size=16).digest()
