"""The end of a cycle: the accepted run becomes the row's next window, its counters and one entry of the output ring."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Progress, Run, Window
from ..op import Int32, Int64, Written, kernel_op

RING_HEADER = 2
"""Words of a lane in the ring before its tokens: how many there are, and the row's status."""


@kernel_op(native="native.cycle")
def commit_rows(
    lane_row_B: Int64,
    run: Run,
    feature_BNF: Tensor | None,
    cycle_1: Written[Int64],
    ring_ZBJ: Written[Int64],
    window: Written[Window],
    progress: Written[Progress],
    history_RL: Written[Int64] | None,
    output_count_RV: Written[Int32] | None,
    append: bool,
) -> None:
    """Commit every lane's run: ``sample[path[a]]`` for ``a < accept_len``, the last of which is the row's new root. In place.

    Ring: slot ``cycle % Z`` gets ``accept_len, outcome, tokens`` of every lane, and ``cycle`` counts 1 up. Row: ``status = outcome``, and
    where the run is not empty ``seq_len += accept_len`` and ``budget -= accept_len``. Ring entries past the run are -1.

    Window, where the run is not empty: the run replaces it, ``window_len = accept_len``, and the rest of its first A entries becomes -1,
    and 0 for features; later entries stay. With ``append`` the run is written after the ``window_len >= 1`` present entries,
    ``window_len += accept_len``, and nothing else of it changes; the caller guarantees ``window_len + accept_len <= Ac``.

    A lane with an empty run changes nothing of its row but the status. Several lanes may share a row, as padded lanes do: then their runs
    are empty and their outcome is the row's status, so that nothing changes.

    Args:
        lane_row_B: int64, the row of each lane.
        sample_BN: int64, the token sampled at each node.
        path_BA: int64, the accepted nodes from the root on, each in ``[0, N)``.
        accept_len_B: int64, ``0..A``; with ``append`` at most N, the number of nodes.
        outcome_B: int64, the row's status from now on.
        feature_BNF: any dtype, the target's features at each node; None: the drafter reads none.
        cycle_1: int64, launches so far, never negative; written.
        ring_ZBJ: int64, ``J = 2 + A``, written; lanes may be a part of a wider buffer.
        window_token_RAc, window_len_R, seq_len_R, budget_R, status_R: int64, written.
        window_feature_RAcF: dtype of the features, written; None without features. ``Ac >= A``.
        lookback_token_RY: int64, written: the last Y entries before the window, that is, the end of old lookback and old window
            concatenated. None: there is no lookback. Changes only where the run is not empty, like the rest of the row, and not with
            ``append``, where the window begins where it did.
        lookback_feature_RYF: the features of those entries, written; None without lookback.
        history_RL: int64, written: the run at positions ``seq_len + 1 ..`` of the row's own tokens; entries past L are dropped. None: not
            kept.
        output_count_RV: int32, written: number of times that the row has emitted each token. None: not kept.
        append: static.
    """
    sample_BN, path_BA, accept_len_B, outcome_B = run
    window_len_R, window_token_RAc, window_feature_RAcF, lookback_token_RY, lookback_feature_RYF = window
    seq_len_R, budget_R, status_R = progress
    rows, lanes, width = lane_row_B, lane_row_B.shape[0], path_BA.shape[1]
    entry_A = torch.arange(width, device=rows.device)
    valid_BA = entry_A < accept_len_B[:, None]
    token_BA = torch.where(valid_BA, sample_BN.gather(1, path_BA), -1)

    slot_1 = cycle_1 % ring_ZBJ.shape[0]
    ring_ZBJ.index_copy_(0, slot_1, torch.cat([accept_len_B[:, None], outcome_B[:, None], token_BA], 1)[None])
    cycle_1.add_(1)

    # Inert lanes write back the old value, so that lanes which share a row write the same one.
    moved_B = accept_len_B > 0
    if not append and lookback_token_RY is not None and lookback_feature_RYF is not None and window_feature_RAcF is not None:
        entry_Y = torch.arange(lookback_token_RY.shape[1], device=rows.device)
        index_BY = torch.where(moved_B, window_len_R[rows], 0)[:, None] + entry_Y
        token_BU = torch.cat((lookback_token_RY[rows], window_token_RAc[rows]), 1)
        lookback_token_RY.index_copy_(0, rows, token_BU.gather(1, index_BY))
        feature_BUF = torch.cat((lookback_feature_RYF[rows], window_feature_RAcF[rows]), 1)
        lookback_feature_RYF.index_copy_(0, rows, feature_BUF.gather(1, index_BY[..., None].expand(-1, -1, feature_BUF.shape[-1])))
    if history_RL is not None:
        position_BA = seq_len_R[rows][:, None] + 1 + entry_A
        kept_BA = valid_BA & (position_BA < history_RL.shape[1])
        # Entries that are not part of the run write position 0, the prompt's first token, which no run reaches, with its old value.
        position_BA = torch.where(kept_BA, position_BA, 0)
        old_BA = history_RL[rows].gather(1, position_BA)
        new_BA = torch.where(kept_BA, token_BA, old_BA)
        history_RL.index_put_((rows[:, None].expand(lanes, width), position_BA), new_BA)
    if output_count_RV is not None:
        index_BA = rows[:, None] * output_count_RV.shape[1] + token_BA.clamp(min=0)
        output_count_RV.view(-1).scatter_add_(0, index_BA.flatten(), valid_BA.to(output_count_RV.dtype).flatten())
    feature_BAF = None
    if feature_BNF is not None:
        feature_BAF = feature_BNF.gather(1, path_BA[..., None].expand(-1, -1, feature_BNF.shape[-1]))
    before_B = torch.where(moved_B, window_len_R[rows], 0)
    if append:
        # Entries that are not part of the run write entry 0 with its old value; no run reaches it, since a row that decodes has an entry.
        # A run has at most as many tokens as there are nodes, and plain cycles, which append, have one node.
        reach = min(width, sample_BN.shape[1])
        place_BA = before_B[:, None] + entry_A[:reach]
        kept_BA = valid_BA[:, :reach] & (place_BA < window_token_RAc.shape[1])
        place_BA = torch.where(kept_BA, place_BA, 0)
        at_BA = (rows[:, None].expand(lanes, reach), place_BA)
        window_token_RAc.index_put_(at_BA, torch.where(kept_BA, token_BA[:, :reach], window_token_RAc[at_BA]))
        if feature_BAF is not None and window_feature_RAcF is not None:
            window_feature_RAcF.index_put_(at_BA, torch.where(kept_BA[..., None], feature_BAF[:, :reach], window_feature_RAcF[at_BA]))
        new_len_B = before_B + accept_len_B
    else:
        token_RA = window_token_RAc[:, :width]
        token_RA.index_copy_(0, rows, torch.where(moved_B[:, None], token_BA, token_RA[rows]))
        if feature_BAF is not None and window_feature_RAcF is not None:
            feature_RAF = window_feature_RAcF[:, :width]
            feature_BAF = torch.where(valid_BA[..., None], feature_BAF, 0)
            feature_RAF.index_copy_(0, rows, torch.where(moved_B[:, None, None], feature_BAF, feature_RAF[rows]))
        new_len_B = accept_len_B
    window_len_R.index_copy_(0, rows, torch.where(moved_B, new_len_B, window_len_R[rows]))
    seq_len_R.index_copy_(0, rows, seq_len_R[rows] + accept_len_B)
    budget_R.index_copy_(0, rows, budget_R[rows] - accept_len_B)
    status_R.index_copy_(0, rows, outcome_B)
