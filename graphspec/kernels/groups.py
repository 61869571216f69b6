"""Arguments of ops that belong together: fields are named as the slots they are (:mod:`graphspec.buffers`).

A group is one parameter of an op and as many arguments of its operator as it has fields; an op says whether it writes it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Lanes(NamedTuple):
    """What a launch knows of its lanes: the row of each, and that row's page table, seed and temperature."""

    lane_row_B: Tensor
    lane_table_BP: Tensor
    lane_seed_B: Tensor
    lane_temperature_B: Tensor


class RowRequest(NamedTuple):
    """What a row knows of its request in every sampling class."""

    status_R: Tensor
    budget_R: Tensor
    seed_R: Tensor
    temperature_R: Tensor
    draft_len_R: Tensor
    stop_id_RE: Tensor
    page_table_RP: Tensor


class Truncation(NamedTuple):
    """Filters of the sampler, of each row."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor


class Penalties(NamedTuple):
    """Penalties of each row, and the tokens they count."""

    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor
    output_count_RV: Tensor
    prompt_seen_RV: Tensor


class Bias(NamedTuple):
    """Biased tokens of each row, and the first position at which it may stop."""

    bias_id_RI: Tensor
    bias_value_RI: Tensor
    stop_from_R: Tensor


class Window(NamedTuple):
    """The tokens each row committed last, with the target's features, and the entries before them that a drafter reads once more."""

    window_len_R: Tensor
    window_token_RAc: Tensor
    window_feature_RAcF: Tensor | None
    lookback_token_RY: Tensor | None
    lookback_feature_RYF: Tensor | None


class Progress(NamedTuple):
    """How far each row is."""

    seq_len_R: Tensor
    budget_R: Tensor
    status_R: Tensor


class Limits(NamedTuple):
    """What ends a row's run."""

    status_R: Tensor
    seq_len_R: Tensor
    draft_len_R: Tensor
    budget_R: Tensor
    stop_id_RE: Tensor


class Candidates(NamedTuple):
    """The candidate pool."""

    candidate_score_BM: Tensor
    candidate_token_BM: Tensor
    candidate_parent_BM: Tensor


class Beams(NamedTuple):
    """What one level of beams leaves to the next."""

    beam_token_BK: Tensor
    beam_index_BK: Tensor
    beam_source_BK: Tensor
    beam_path_BKS: Tensor
    beam_ancestors_BKX: Tensor
    beam_valid_BK: Tensor
    beam_slot_BK: Tensor
    beam_position_BK: Tensor
    beam_end_B: Tensor
    next_position_B: Tensor


class Nodes(NamedTuple):
    """The verify tree."""

    node_token_BN: Tensor
    node_parent_BN: Tensor
    node_depth_BN: Tensor
    node_ancestors_BNX: Tensor


class Run(NamedTuple):
    """What a lane accepted."""

    sample_BN: Tensor
    path_BA: Tensor
    accept_len_B: Tensor
    outcome_B: Tensor
