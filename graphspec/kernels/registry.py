"""The implementations of all ops that a cycle runs: chosen once, by name, before anything is built, and without fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..shapes import WORD_BITS
from .groups import LogprobRing
from .host_step import BoundCall, HostStep, PreparedCall
from .op import KernelOp

Scope = Callable[[], AbstractContextManager[None]]
ROOMS = ("attention", "linear", "recurrent", "sampling", "tree")


def _declared() -> tuple[KernelOp, ...]:
    """The ops that :func:`.op.kernel_op` declares in the modules of the rooms."""
    package = __name__.rpartition(".")[0]
    rooms = [import_module(f"{package}.{room}") for room in ROOMS]
    modules = [import_module(f"{room.__name__}.{found.name}") for room in rooms for found in iter_modules(room.__path__) if not found.ispkg]
    functions = (value for module in modules for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    return tuple(op for function in functions if isinstance(op := getattr(function, "kernel_op", None), KernelOp))


OPS = _declared()
"""Every op."""
_BY_NAME = {op.name: op for op in OPS}


def op_of(name: str) -> KernelOp:
    """The op of a name.

    Raises:
        KeyError: there is none.
    """
    return _BY_NAME[name]


if TYPE_CHECKING:

    class _Callables:
        def __init__(self, **callables: Callable[..., Any]) -> None: ...
        def __getattr__(self, name: str) -> Callable[..., Any]: ...
else:
    _Callables = make_dataclass("_Callables", [(op.name, Callable[..., Any]) for op in OPS], frozen=True, slots=True)


@dataclass(frozen=True, slots=True)
class KernelSet(_Callables):
    """One callable per op of :data:`OPS`, with the signature of its reference.

    A backend that serves some calls of an op by other kernels is a subclass; the methods here return that there are none.
    """

    scope: Scope | None = field(default=None, kw_only=True)
    """A context that every program of the engine runs and is captured in: its launches share what no other engine's may touch. None: they
    share nothing."""
    compiling_ahead: Callable[[int], AbstractContextManager[Callable[[], object]]] | None = field(default=None, kw_only=True)
    """A context in which other processes compile the kernels of everything that is traced; it gives a function that waits for them. Takes
    the number of engines on this machine that do so at once. None: these kernels need no compiler."""
    stored: Callable[[Sequence[Tensor]], Sequence[Tensor]] = field(default=tuple, kw_only=True)
    """The same values, computed once: for what many ops of a pass read, such as the slots of its tokens. The compiler would compute them
    anew, in a launch of its own, for every op that is opaque to it."""
    drafting: KernelSet | None = field(default=None, kw_only=True)
    """Those of draft networks; None: these."""
    linear_kv_write: Callable[..., Tensor | None] | None = field(default=None, kw_only=True)
    """``linear`` and ``rope_kv_write`` in one launch: arguments of the first up to those of its norm, then :class:`.groups.Heads`. Returns
    the queries; None: these shapes need both ops. None instead of a function: there is no such kernel."""

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

    @property
    def for_drafts(self) -> KernelSet:
        """The kernels of draft networks. Drafts choose no tokens, so the law of numerics does not hold them to an order of summation."""
        return self if self.drafting is None else self.drafting

    serves_windows: ClassVar[bool] = False
    """Whether :meth:`own_window` may return a kernel."""
    records: ClassVar[bool] = False
    """Whether a program whose ops are all native becomes a tape (:mod:`graphspec.kernels.native.call`)."""

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

    def take_rows(self, x_R: Tensor, row_B: Tensor) -> Tensor:
        """``x[row]``: of a slot of all rows, those of the lanes; ``row``: int64."""
        return x_R[row_B]

    def node_paths(self, token_BN: Tensor, ancestors_BNX: Tensor) -> Tensor:
        """Tokens on the way to every node, itself included and the root not: int64 ``[B, N, N]``, -1 where a node is not on the way.

        Args:
            token_BN: int64.
            ancestors_BNX: int64 words, bit j: node j is above the node, or is it.
        """
        node_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        word_BNN = ancestors_BNX[..., node_N // WORD_BITS]
        on_way_BNN = ((word_BNN >> (node_N % WORD_BITS)) & 1).bool() & (node_N > 0)
        return torch.where(on_way_BNN, token_BN[:, None], -1)

    def log_probabilities(self, logits_BTV: Tensor, token_BT: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probability of a token at every position, and the most likely tokens there, in one pass over the logits.

        Args:
            logits_BTV: float32.
            token_BT: int64; -1 is no token, and what is found for it has no meaning.
            alternatives: how many most likely tokens, static.

        Returns:
            float32 ``[B, T]``; float32, descending, and int64 ``[B, T, alternatives]``.
        """
        value_BTO, likely_BTO = self.draft_topk(logits_BTV, max(alternatives, 1), None, None, None, None)
        logit_BT2 = logits_BTV.gather(-1, torch.stack((token_BT.clamp(min=0), likely_BTO[..., 0]), -1))
        # The best token's log-probability is minus the logarithm of the sum that the op divides by: equal logits have equal figures.
        chosen_BT = logit_BT2[..., 0] - logit_BT2[..., 1] + value_BTO[..., 0]
        return chosen_BT, value_BTO[..., :alternatives], likely_BTO[..., :alternatives]

    def note_logprobs(
        self, logits_BNV: Tensor, path_BA: Tensor, sample_BN: Tensor, cycle_1: Tensor, ring: LogprobRing, alternatives: int
    ) -> None:
        """Write what :meth:`log_probabilities` finds for the samples of a path to the ring slot of a cycle, its first A entries.

        Args:
            logits_BNV: float32.
            path_BA: int64, nodes.
            sample_BN: int64, the token after each node; -1: none, and its entry has no meaning.
            cycle_1: int64; its slot is ``cycle % Z``.
            ring: written.
            alternatives: how many most likely tokens, static; the ring's places after them stay as they are.
        """
        logits_BAV = logits_BNV.gather(1, path_BA[..., None].expand(-1, -1, logits_BNV.shape[-1]))
        chosen_BA, value_BAO, likely_BAO = self.log_probabilities(logits_BAV, sample_BN.gather(1, path_BA), alternatives)
        slot_1, length = cycle_1 % ring.ring_logprob_ZBA.shape[0], path_BA.shape[1]
        ring.ring_logprob_ZBA[:, :, :length].index_copy_(0, slot_1, chosen_BA[None])
        if alternatives:
            ring.ring_top_logprob_ZBAO[:, :, :length, :alternatives].index_copy_(0, slot_1, value_BAO[None])
            ring.ring_top_token_ZBAO[:, :, :length, :alternatives].index_copy_(0, slot_1, likely_BAO[None])

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
