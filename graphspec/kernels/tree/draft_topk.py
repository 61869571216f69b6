"""The best continuations of every draft row, and the log-probabilities they add to candidates' scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from ..sampling.noise import gumbel_noise
from ..sampling.topk import stable_topk


@kernel_op(native="native.cycle", exact=False)
def draft_topk(
    logits_BTVd: Tensor, topk: int, target_token_Vd: Int64 | None, seed_B: Int64 | None, position_B: Int64 | None,
    temperature_B: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The ``topk`` best draft tokens of a row and the log-probability each adds to its candidate.

    Keys are the logits, or ``logits + temperature * noise`` in lanes whose temperature is positive, where the noise is that of
    ``gumbel_noise`` at (seed, position, *target* id). Keys are ranked (ties by lowest draft id), and the
    increment is their ``log_softmax``: *of the keys that ranked the token*, not of the keys divided by the temperature and not of the
    unperturbed logits. Dividing would change no ranking within a row but would weight the depths differently; plain logits would ignore the
    sampler's noise.

    An implementation computes the noise where it uses it. The bits of the hash are the same everywhere; its logarithms, and with them the
    order of two keys that differ in their last bits, depend on the backend.

    Args:
        logits_BTVd: float32 over the draft vocabulary. Non-finite entries count as -inf.
        topk: K, static, at most Vd.
        target_token_Vd: int64, draft id to target id; None: the vocabularies are one.
        seed_B: int64; None: rank by logits. position_B and temperature_B are needed with it.
        position_B: int64, position of the token to propose, the same for all T.
        temperature_B: float32; 0 is greedy.

    Returns:
        logprob ``[B, T, K]`` float32, descending, -inf for an impossible token; target ids ``[B, T, K]`` int64.
    """
    key_BTVd = torch.where(logits_BTVd.isfinite(), logits_BTVd, -torch.inf)
    if seed_B is not None:
        assert position_B is not None and temperature_B is not None
        vocab = logits_BTVd.shape[-1]
        token_Vd = torch.arange(vocab, device=logits_BTVd.device) if target_token_Vd is None else target_token_Vd
        temperature_B11 = temperature_B[:, None, None]
        noise_B1Vd = gumbel_noise(seed_B, position_B[:, None], token_Vd)
        key_BTVd = torch.where(temperature_B11 > 0, key_BTVd + temperature_B11 * noise_B1Vd, key_BTVd)
    value_BTK, index_BTK = stable_topk(key_BTVd, topk)
    peak_BT1 = value_BTK[..., :1]
    peak_BT1 = torch.where(peak_BT1 == -torch.inf, 0.0, peak_BT1)
    total_BT1 = torch.exp(key_BTVd - peak_BT1).sum(-1, keepdim=True)
    logprob_BTK = torch.where(value_BTK == -torch.inf, -torch.inf, value_BTK - peak_BT1 - torch.log(total_BT1))
    return logprob_BTK, index_BTK if target_token_Vd is None else target_token_Vd[index_BTK]
