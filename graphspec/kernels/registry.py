"""The implementations of all ops that a cycle runs: chosen once, by name, before anything is built, and without fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .host_step import BoundCall, HostStep, PreparedCall
from .linear.linear import Hidden

Scope = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One callable per op of the catalog (:data:`graphspec.kernels.OPS`), with the signature of its reference.

    A backend that serves some calls of an op by other kernels is a subclass; the methods here return that there are none.
    """

    rope_kv_write: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]
    chunk_attention: Callable[..., Tensor]
    draft_topk: Callable[..., tuple[Tensor, Tensor]]
    tree_build: Callable[..., None]
    chain_layout: Callable[..., None]
    tree_walk: Callable[..., None]
    kv_move: Callable[..., None]
    page_feature_write: Callable[..., None]
    commit_rows: Callable[..., None]
    gumbel_noise: Callable[..., Tensor]
    linear: Callable[..., Hidden]
    packed_linear: Callable[..., Hidden]
    ngram_match: Callable[..., None]
    mail_apply: Callable[..., None]
    draft_window: Callable[..., tuple[Tensor, ...]]
    draft_level: Callable[..., None]
    take_last: Callable[..., None]
    filter_logits: Callable[..., Tensor]
    sample_tokens: Callable[..., tuple[Tensor, Tensor]]
    shard_topk: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    latent_attention: Callable[..., Tensor]
    latent_chunk_attention: Callable[..., Tensor]
    latent_kv_write: Callable[..., Tensor]
    moe_route: Callable[..., tuple[Tensor, Tensor]]
    moe_mlp: Callable[..., Tensor]
    verify_rows: Callable[..., tuple[Tensor, ...]]
    marginal_pool: Callable[..., None]
    tree_conv: Callable[..., Tensor]
    conv_shift: Callable[..., None]
    delta_walk: Callable[..., Tensor]
    delta_solve: Callable[..., Tensor]
    delta_scan: Callable[..., Tensor]
    delta_chunk: Callable[..., Tensor]
    ssm_walk: Callable[..., Tensor]
    ssm_dual: Callable[..., Tensor]
    ssm_scan: Callable[..., Tensor]
    ssm_chunk: Callable[..., Tensor]
    state_commit: Callable[..., None]
    scope: Scope | None = field(default=None, kw_only=True)
    """A context that every program of the engine runs and is captured in: its launches share what no other engine's may touch. None: they
    share nothing."""

    def own_window(
        self, table_BP: Tensor, page_size: int, prefix_end_B: Tensor, ancestors_BTX: Tensor
    ) -> Callable[[Tensor, Tensor, int, float], Tensor] | None:
        """``tree_attention`` of T queries over their prefix, from slot 0 on, and exactly the T slots after it, by a specialised kernel.

        More restricted than :func:`~graphspec.kernels.attention.tree_attention.tree_attention`: no bit from T on is set, the table covers
        ``prefix_end + T`` slots wherever a query is valid, and slots that no query sees have finite values.

        Args:
            table_BP: int32.
            page_size: tokens of a page.
            prefix_end_B: int64.
            ancestors_BTX: int64 words; T is the number of queries.

        Returns:
            ``(query_BTQD, kv_pool, layer, scale) -> [B, T, Q, D]``, for layers without a sliding window; None: ``tree_attention`` serves.
        """
        return None

    serves_windows: ClassVar[bool] = False
    """Whether :meth:`own_window` may return a kernel."""
    records: ClassVar[bool] = False
    """Whether a program whose ops are all native becomes a tape (:mod:`graphspec.kernels.native.tape`)."""

    def carry(self, hidden_BEH: Tensor, source_BK: Tensor, valid_BK: Tensor) -> Tensor:
        """Hidden states of the rows that beams came from, zero for beams that are not valid.

        Args:
            hidden_BEH: of the draft rows.
            source_BK: int64, in 0..E-1. valid_BK: bool.

        Returns:
            ``[B, K, H]`` in the dtype of ``hidden``.
        """
        carried_BKH = hidden_BEH.gather(1, source_BK[..., None].expand(-1, -1, hidden_BEH.shape[-1]))
        return carried_BKH.masked_fill(~valid_BK[..., None], 0)

    def sampled_positions(self, lane_row_B: Tensor, seq_len_R: Tensor, depth_BN: Tensor) -> Tensor:
        """The position whose token is sampled at each node: ``seq_len + 1 + depth``, int64 ``[B, N]``; all arguments int64."""
        return seq_len_R[lane_row_B][:, None] + 1 + depth_BN

    def bind_call(self, call: PreparedCall) -> BoundCall | None:
        """``call`` by a kernel that needs a host step before each launch; None: use the general op.

        Called when a stage is built. A stage with a bound call declares it, see :class:`graphspec.graphs.stages.stage.Stage`.
        """
        return None

    def host_step(self) -> HostStep | None:
        """The host step that bound calls need; None: there are no bound calls."""
        return None

    def check_model(
        self, name: str, page_size: int, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, windows: Sequence[int | None],
        *, latent: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        """Check that these kernels serve a model of this shape.

        Args:
            name: of the network, for the message.
            page_size: tokens of a page.
            dtype: of weights and KV.
            num_heads, num_kv_heads, head_dim: query heads, key/value heads, and the width of one.
            windows: sliding window of each layer, None: none.
            latent: with multi-head latent attention the compressed and the rotated part of a row.

        Raises:
            ConfigError: they don't.
        """
        return
