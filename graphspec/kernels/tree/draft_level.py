"""One level of beam drafting: the likeliest tokens of each beam go into the pool, the best of them become the next step's beams."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import LIVE, Beams, Candidates
from ..op import Int64, Written, kernel_op
from ..sampling.noise import gumbel_noise
from ..sampling.topk import stable_topk
from .tree_build import bit_words


@kernel_op(native="native.cycle")
def draft_level(
    increment_BEK: Tensor,
    next_BEK: Int64,
    level: int,
    beams: bool,
    shift: int,
    lane_row_B: Int64,
    status_R: Int64,
    seq_len_R: Int64,
    candidates: Written[Candidates],
    carried: Written[Beams],
) -> None:
    """Score the candidates of one level, write them to the pool, and choose the K beams that are expanded next (EAGLE-2, arXiv 2406.16858).

    A candidate's score is its beam's score plus its increment; -inf in a lane that is not live, below a beam that is not valid, and
    instead of NaN. The K best of the level, ties by index, become the next beams. A beam is valid when its score is above -inf. With sorted
    increments, the K candidates of level 1 become the beams in their order.

    The pool has level 1 in entries 0..K-1 and level l in the K*K entries from ``K + (l-2)*K*K`` on. Parents are pool indices, -1: the
    root. The beam slots of the level before are read and overwritten; level 1 reads none of them. Step s drafts level s + 1 from the beams
    of level s, which occupy the slots after the root: ``seq_len + 1 + (s-1)*K + b``.

    Args:
        increment_BEK: float32 log-probabilities; E is 1 at level 1, K later.
        next_BEK: int64 target ids.
        level: from 1, static. Levels come in order: level l reads what level l - 1 wrote.
        beams: static; False at the last level, which has no next beams: the beam slots stay as they are.
        shift: static, RoPE position = slot - shift.
        lane_row_B: int64 row of each lane.
        status_R, seq_len_R: int64.
        candidates: written; float32, int64, int64. Contiguous, ``M >= K + (level-1)*K*K``.
        carried: written. Of its fields:
        beam_token_BK: int64, -1 where not valid.
        beam_index_BK: int64, the beam's pool index.
        beam_source_BK: int64 in 0..E-1, the row of this level's increments that it came from.
        beam_path_BKS: int64, tokens on the path to the beam, its own in column ``level - 1``, valid or not; later columns stay as they are.
            S >= level.
        beam_ancestors_BKX: int64, bit j: it sees slot ``beam_end + j``; its own bit included, 0 where not valid. ``64*X >= level*K``.
        beam_valid_BK: bool.
        beam_slot_BK, beam_position_BK: int64, the slot of its KV, and its RoPE position.
        beam_end_B: int64 ``seq_len + 1``, end of the prefix that all beams see.
        next_position_B: int64 ``seq_len + 1 + level``, the position of the tokens to propose next.
    """
    candidate_score_BM, candidate_token_BM, candidate_parent_BM = candidates
    beam_token_BK, beam_index_BK, beam_source_BK, beam_path_BKS, beam_ancestors_BKX, beam_valid_BK = carried[:6]
    beam_slot_BK, beam_position_BK, beam_end_B, next_position_B = carried[6:]
    lanes, rows, topk = increment_BEK.shape
    row_B = lane_row_B
    live_B, seq_B = status_R[row_B] == LIVE, seq_len_R[row_B]
    next_BC = next_BEK.flatten(1)
    begin = topk + (level - 2) * topk * topk if level > 1 else 0
    end = begin + rows * topk
    if level > 1:
        above_BE = beam_index_BK
        score_BE = candidate_score_BM.gather(1, above_BE)
        valid_BE = live_B[:, None] & (score_BE > -torch.inf)
        level_BEK = torch.where(valid_BE[..., None], score_BE[..., None] + increment_BEK, -torch.inf)
    else:
        above_BE = torch.full_like(next_BEK[..., 0], -1)
        level_BEK = torch.where(live_B[:, None, None], increment_BEK, -torch.inf)
    level_BC = level_BEK.flatten(1)
    level_BC = torch.where(level_BC.isnan(), -torch.inf, level_BC)
    parent_BC = above_BE[..., None].expand(lanes, rows, topk).flatten(1)
    candidate_score_BM[:, begin:end] = level_BC
    candidate_token_BM[:, begin:end] = next_BC
    candidate_parent_BM[:, begin:end] = parent_BC
    if beams:
        score_BK, chosen_BK = stable_topk(level_BC, topk)
        valid_BK = live_B[:, None] & (score_BK > -torch.inf)
        source_BK = chosen_BK // topk
        token_BK = next_BC.gather(1, chosen_BK)
        bit_K = (level - 1) * topk + torch.arange(topk, device=row_B.device)
        words_BKX = bit_words(bit_K, beam_ancestors_BKX.shape[-1]).expand_as(beam_ancestors_BKX)
        if level > 1:
            words_BKX = words_BKX | beam_ancestors_BKX.gather(1, source_BK[..., None].expand_as(words_BKX))
            path_BKs = beam_path_BKS[..., : level - 1]
            beam_path_BKS[..., : level - 1] = path_BKs.gather(1, source_BK[..., None].expand_as(path_BKs))
        beam_path_BKS[..., level - 1] = token_BK
        beam_ancestors_BKX.copy_(words_BKX.masked_fill(~valid_BK[..., None], 0))
        beam_token_BK.copy_(torch.where(valid_BK, token_BK, -1))
        beam_index_BK.copy_(begin + chosen_BK)
        beam_source_BK.copy_(source_BK)
        beam_valid_BK.copy_(valid_BK)
        beam_slot_BK.copy_(seq_B[:, None] + 1 + bit_K)
        beam_position_BK.copy_((seq_B + level - shift)[:, None].expand(lanes, topk))
        beam_end_B.copy_(seq_B + 1)
        next_position_B.copy_(seq_B + 1 + level)


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
