"""Every launch of a fused cycle, in order, found by running its stages on ``meta`` tensors.

Nothing is compiled and nothing runs. Our launchers record what they would launch (:func:`graphspec.kernels.fused.launch.recording`).
Plain torch between two of them becomes kernels of Inductor: one per reduction and at least one, since Inductor fuses elementwise ops into
their neighbours. ``tests/lab/test_latency.py`` compares that rule with the code that Inductor writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...config.catalog import resolve_variant
from ...config.schema import VariantConfig
from ...graphs.programs import program_stages
from ...graphs.stages.mailbox import MailLayout
from ...kernels import OPS
from ...kernels.registry import KernelSet
from ...models.attention import RotaryEmbedding
from ...models.layers import use_kernels
from ...plan.buffers import DTYPES, Arena
from ...shapes import GREEDY, SamplingClass
from ..floor import build_draft, build_target
from .capacity import engine_plan

if TYPE_CHECKING:
    from ...config.catalog import Variant
    from ...config.command_options import LaunchConfig
    from ...kernels.fused.launch import Launch
    from ...kernels.linear.packed import Packed
    from ...models.decoder import Decoder
    from ...plan.plan import Plan
    from ...shapes import CycleShape
    from .model_pair import ModelPair

INDUCTOR, LIBRARY = "inductor", "cublas"
"""Kernels that are not ours: Inductor's between our launches, and the library's products."""
_REDUCTIONS = ("mean", "sum", "amax", "amin", "argmax", "argmin", "cumsum", "any", "all", "topk", "sort", "logsumexp")
_SCATTERS = ("index_put_",)
"""Ops that write into a buffer at computed indices; each is a launch."""
_COPY = "copy_"
"""The op that writes a slot. Slots of different sizes are written by different launches."""
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_FREE = ("empty", "new_empty", "empty_like", "detach", "_unsafe_view")


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    Attributes:
        kernel: its name, :data:`INDUCTOR` or :data:`LIBRARY`.
        launch: of a kernel of ours; its tensors have no data.
        product: weight and rows of a product of the library.
    """

    stage: str
    kernel: str
    launch: Launch | None = None
    product: tuple[Tensor, int] | None = None

    @classmethod
    def of(cls, stage: str, launch: Launch) -> Step:
        """A recorded launch."""
        return cls(stage, launch.kernel.fn.__name__.strip("_"), launch)


class _Between(TorchDispatchMode):
    """Records the kernels that plain torch code becomes, by the number of our launches before it.

    An int counts the reductions of a kernel that can still be fused with; anything else is a product of the library.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = launches
        self.found: dict[int, list[int | tuple[Tensor, int]]] = {}
        self._copied: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in _PRODUCTS:
            tensors = [one for one in args if isinstance(one, Tensor)]
            self.product(max(tensors, key=Tensor.numel), result.numel() // result.shape[-1])
        elif not function.is_view and name not in _FREE:
            here = self.found.setdefault(len(self.launches), [])
            other = name == _COPY and result.numel() != self._copied.setdefault(len(self.launches), result.numel())
            if not here or not isinstance(here[-1], int) or name in _SCATTERS or other:
                here.append(0)
            here[-1] += name in _REDUCTIONS  # type: ignore[operator]
        return result

    def product(self, weight: Tensor, rows: int) -> None:
        """A product that the library computes."""
        self.found.setdefault(len(self.launches), []).append((weight, rows))


def planned_steps(
    config: LaunchConfig, pair: ModelPair, variant: Variant, shape: CycleShape, batch: int, context: int, dtype: str
) -> list[Step] | None:
    """The launches of a cycle of a planned engine; None: it would not run our kernels, or Triton is not installed."""
    if find_spec("triton") is None:
        return None
    if not shape.num_steps:
        variant, pair = resolve_variant("none"), replace(pair, draft=None)
        config = replace(config, variant=VariantConfig(name="none"))
    _, plan = engine_plan(config, pair, shape, batch, context, device="cuda", dtype=dtype, memory=None)
    if plan.kernels != "fused" or plan.attention not in ("auto", "fused") or plan.linear not in ("auto", "fused"):
        return None
    target = build_target(pair.target, plan.tap_layers, DTYPES[dtype])
    draft = None
    if pair.draft is not None:
        draft = build_draft(pair.draft, target, variant, config.variant.token_map, pair.from_config)
    for network in (target, draft):
        if network is not None:
            network.to(DTYPES[dtype])
    return record(plan, target, draft, batch)


def record(plan: Plan, target: Decoder, draft: Any, lanes: int, sampling: SamplingClass = GREEDY) -> list[Step]:
    """The launches of one cycle.

    Args:
        plan: of the engine, for a fused cycle; its device is not used.
        target, draft: networks without data, on ``meta``. Their kernels are replaced by ones that only record.
    """
    from ...kernels.fused.launch import launcher, recording, semaphores
    from ...kernels.linear.fused.linear import Products, fused_linear, linear, linear_summed
    from ...kernels.linear.fused.linear_kv_write import fused_linear_kv_write, linear_kv_write
    from ...kernels.linear.fused.packed_linear import dequantised, fused_packed_linear, packed_linear, packed_linear_summed

    steps: list[Step] = []

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
        rows = x.numel() // x.shape[-1]
        between.product(weight, rows)
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if float32 else x.dtype)

    def matmul_of_codes(x: Tensor, weight: Packed, bias: Tensor | None, float32: bool) -> Tensor:
        return matmul(x, dequantised(weight, x), bias, float32)

    def recorded(numerics: str, drafting: KernelSet | None = None) -> KernelSet:
        ops: dict[str, Any] = {op.name: launcher(op, numerics) for op in OPS}
        ops["linear"] = fused_linear(numerics, products=Products(linear, linear_summed, matmul))
        of_codes = Products(packed_linear, packed_linear_summed, matmul_of_codes)
        ops["packed_linear"] = fused_packed_linear(numerics, products=of_codes)
        ops["linear_kv_write"] = fused_linear_kv_write(numerics, operators=(linear_kv_write, linear_kv_write))
        return KernelSet(**ops, drafting=drafting)

    kernels = recorded(plan.numerics, recorded("fast"))
    use_kernels(kernels, target, draft)
    for network in (target, draft):
        for module in network.modules() if network is not None else ():
            if isinstance(module, RotaryEmbedding):
                module.to("meta")  # tables are made with their data
    with torch.device("meta"):
        arena = Arena(plan, MailLayout.of(plan).size, device="meta")
        arena.allocate(sampling)
        views = arena.views(lanes)
    key = next(key for key in plan.graph_keys(sampling) if key.bucket == lanes)
    # Built once, at its first use: no launch of this cycle.
    semaphores(torch.device("meta"), 0)
    ends: list[tuple[str, int]] = []
    # Weights may be laid out anew as stages are made, which is no launch of this cycle either.
    stages = program_stages(plan, kernels, target, draft, key)
    with recording() as launches, _Between(launches) as between, torch.no_grad():
        for stage in stages:
            stage(views)
            ends.append((stage.name, len(launches)))
    for place in range(len(launches) + 1):
        # Ops after the last launch of a stage are fused with those before the first launch of the next one.
        name = next((name for name, end in ends if place < end), ends[-1][0])
        for one in between.found.get(place, ()):
            steps += [Step(name, INDUCTOR)] * max(one, 1) if isinstance(one, int) else [Step(name, LIBRARY, product=one)]
        if place < len(launches):
            steps.append(Step.of(name, launches[place]))
    return steps
