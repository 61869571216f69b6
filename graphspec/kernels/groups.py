"""Groups of arguments of ops; fields have the names of their slots (:mod:`graphspec.plan.buffers`).

A group is one parameter of an op, and as many arguments of its operator as it has fields; the op declares whether it writes it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .op import Bool, Int8, Int32, Int64, Written

LIVE = 1
"""``status_R`` of a row that decodes (:class:`graphspec.plan.buffers.Status`)."""


class Lanes(NamedTuple):
    """The lanes of a launch: the row of each, and that row's page table, seed and temperature."""

    lane_row_B: Int64
    lane_table_BP: Int32
    lane_seed_B: Int64
    lane_temperature_B: Tensor


class Heads(NamedTuple):
    """What becomes of projected heads: norms of queries and keys, RoPE, and where keys and values are written.

    Fields are arguments of :func:`graphspec.kernels.attention.rope_kv_write.rope_kv_write`, whose ``norm_eps`` and ``norm_offset`` are
    ``head_eps`` and ``head_offset`` here: a product has a norm of its own.
    """

    rope_LD: Tensor
    rope_row_BT: Int64
    kv_pool: Written[Tensor]
    layer: int
    table_BP: Int32
    slot_BT: Int64
    valid_BT: Bool
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    head_eps: float = 0.0
    head_offset: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Heads of keys, and the channels of a head."""
        return self.kv_pool.shape[4], self.kv_pool.shape[5]


class RowRequest(NamedTuple):
    """Parameters of a row's request in every sampling class."""

    status_R: Int64
    budget_R: Int64
    seed_R: Int64
    temperature_R: Tensor
    draft_len_R: Int64
    stop_id_RE: Int64
    page_table_RP: Int32


class Truncation(NamedTuple):
    """The sampler's filters of each row."""

    top_k_R: Int64
    top_p_R: Tensor
    min_p_R: Tensor


class Penalties(NamedTuple):
    """Penalties of each row, and the tokens they count."""

    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor
    output_count_RV: Int32
    prompt_seen_RV: Int8


class Biases(NamedTuple):
    """What is added to the logits of single tokens, and the stop ids that a row may sample from a position on."""

    bias_id_RI: Int64
    bias_value_RI: Tensor
    stop_id_RE: Int64
    stop_from_R: Int64


class Window(NamedTuple):
    """The tokens that each row committed last, with the target's features, and the entries before them that a drafter reads again."""

    window_len_R: Int64
    window_token_RAc: Int64
    window_feature_RAcF: Tensor | None
    lookback_token_RY: Int64 | None
    lookback_feature_RYF: Tensor | None


class Progress(NamedTuple):
    """The progress of each row."""

    seq_len_R: Int64
    budget_R: Int64
    status_R: Int64


class LogprobRing(NamedTuple):
    """The output ring's log-probabilities: of the new tokens, and of the most likely ones at their positions."""

    ring_logprob_ZBA: Tensor
    ring_top_logprob_ZBAO: Tensor
    ring_top_token_ZBAO: Int64


class Limits(NamedTuple):
    """Conditions that end a row's run."""

    status_R: Int64
    seq_len_R: Int64
    draft_len_R: Int64
    budget_R: Int64
    stop_id_RE: Int64


class Candidates(NamedTuple):
    """The candidate pool."""

    candidate_score_BM: Tensor
    candidate_token_BM: Int64
    candidate_parent_BM: Int64


class Beams(NamedTuple):
    """The beams that one level passes to the next."""

    beam_token_BK: Int64
    beam_index_BK: Int64
    beam_source_BK: Int64
    beam_path_BKS: Int64
    beam_ancestors_BKX: Int64
    beam_valid_BK: Bool
    beam_slot_BK: Int64
    beam_position_BK: Int64
    beam_end_B: Int64
    next_position_B: Int64


class Nodes(NamedTuple):
    """The verify tree."""

    node_token_BN: Int64
    node_parent_BN: Int64
    node_depth_BN: Int64
    node_ancestors_BNX: Int64


class Run(NamedTuple):
    """The accepted run of a lane."""

    sample_BN: Int64
    path_BA: Int64
    accept_len_B: Int64
    outcome_B: Int64
