"""The target's token at every position: filters, noise and argmax over the vocabulary in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .filter_logits import filter_logits
from .noise import gumbel_noise


@kernel_op(native="native.cycle")
def sample_tokens(
    logits_BTV: Tensor, temperature_B: Tensor | None, seed_B: Int64 | None, position_BT: Int64 | None, top_k_B: Int64 | None,
    top_p_B: Tensor | None, min_p_B: Tensor | None, strict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``argmax(filter(logits) + T * noise)`` of every position, and whether its logits are valid.

    Rows at temperature 0 are greedy: neither filtered nor perturbed. Others are filtered as
    ``filter_logits`` says, then perturbed by ``gumbel_noise`` at
    (seed, position, token id), which draws from ``softmax(filtered / T)``. Ties go to the lowest id. Entries that are not finite count as
    -inf; a row without a finite entry gives token 0.

    An implementation computes the noise where it uses it. The bits of the hash are the same everywhere; its logarithms, the ``exp`` of the
    filters, and with them a result that depends on the last bits of two keys, depend on the backend.

    Args:
        logits_BTV: float32.
        temperature_B: float32; None: every row is greedy, and all that follow up to ``strict`` are None.
        seed_B: int64, needed with a temperature.
        position_BT: int64, the position of the token being sampled; needed with a temperature.
        top_k_B, top_p_B, min_p_B: int64, float32, float32; all or none.
        strict: when a row of ``logits`` is valid. True: every entry is finite. False, for logits from which tokens were banned by -inf: no
            entry is NaN or +inf, and at least one is finite.

    Returns:
        token ``[B, T]`` int64; ``[B, T]`` bool, whether the row is valid by ``strict``, before any filter.

    Source: Gumbel-max, Maddison et al. 2014 (arXiv 1411.0030), section 2.
    """
    known_BTV = logits_BTV.isfinite()
    finite_BT = known_BTV.all(-1) if strict else (logits_BTV < torch.inf).all(-1) & known_BTV.any(-1)
    key_BTV = torch.where(known_BTV, logits_BTV, -torch.inf)
    if temperature_B is None:
        return key_BTV.argmax(-1), finite_BT
    assert seed_B is not None and position_BT is not None
    if top_k_B is not None:
        assert top_p_B is not None and min_p_B is not None
        key_BTV = filter_logits(key_BTV, temperature_B, top_k_B, top_p_B, min_p_B)
    temperature_B11 = temperature_B[:, None, None]
    noise_BTV = gumbel_noise(seed_B, position_BT, torch.arange(logits_BTV.shape[-1], device=logits_BTV.device))
    return torch.where(temperature_B11 > 0, key_BTV + temperature_B11 * noise_BTV, key_BTV).argmax(-1), finite_BT
