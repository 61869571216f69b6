"""Groups of arguments of ops; fields have the names of their slots (:mod:`graphspec.plan.buffers`).

A group is one parameter of an op, and as many arguments of its operator as it has fields; the op declares whether it writes it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Lanes(NamedTuple):
    """The lanes of a launch: the row of each, and that row's page table, seed and temperature."""

    lane_row_B: Tensor
    lane_table_BP: Tensor
    lane_seed_B: Tensor
    lane_temperature_B: Tensor


class RowRequest(NamedTuple):
    """Parameters of a row's request in every sampling class."""

    status_R: Tensor
    budget_R: Tensor
    seed_R: Tensor
    temperature_R: Tensor
    draft_len_R: Tensor
    stop_id_RE: Tensor
    page_table_RP: Tensor


class Truncation(NamedTuple):
    """The sampler's filters of each row."""

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


class Window(NamedTuple):
    """The tokens that each row committed last, with the target's features, and the entries before them that a drafter reads again."""

    window_len_R: Tensor
    window_token_RAc: Tensor
    window_feature_RAcF: Tensor | None
    lookback_token_RY: Tensor | None
    lookback_feature_RYF: Tensor | None


class Progress(NamedTuple):
    """The progress of each row."""

    seq_len_R: Tensor
    budget_R: Tensor
    status_R: Tensor


class Limits(NamedTuple):
    """Conditions that end a row's run."""

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
    """The beams that one level passes to the next."""

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
    """The accepted run of a lane."""

    sample_BN: Tensor
    path_BA: Tensor
    accept_len_B: Tensor
    outcome_B: Tensor
