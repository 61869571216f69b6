"""Rows and contexts that fit: the engine's own memory plan, evaluated for one number of rows and one context after another.

Where not even one row fits: how much memory is missing, and alternatives that fit, each with the command that plans it.
"""

from __future__ import annotations

import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...config.compose import load_config
from ...config.schema import Config, ModelConfig, VariantConfig
from ...errors import spell_bytes
from ...graphs.memory import GIB, MemoryPlan, fit_memory, parameter_bytes
from ...kernels import resolve
from ...models.stack import uses_packed_weights
from ...plan.dtypes import resolve_dtypes
from ...plan.plan import Plan, make_plan
from ...plan.runtime import resolve_runtime
from ...shapes import PLAIN
from ..floor import FloorModel, has_tensors, kv_bytes_per_token

if TYPE_CHECKING:
    from ...config.command_options import LaunchConfig
    from ...facts import ModelFacts, RecurrentFacts
    from ...shapes import CycleShape
    from ..floor import FloorModel
    from .model_pair import ModelPair

MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class StateCost:
    """What the recurrent layers of one row cost, in bytes, and what a state kept for each node would.

    Attributes:
        records: of the nodes of a cycle, from verification to commit.
        snapshots: of a state per node, which is not kept.
        traffic: moved in a cycle. Verification reads the state, the commit reads and writes it, and what nodes record is written and read.
        snapshot_traffic: moved with a state per node: read once, written for each node, and copied by the commit.
    """

    state: int
    records: int
    snapshots: int
    traffic: int
    snapshot_traffic: int

    @classmethod
    def of(cls, facts: RecurrentFacts, nodes: int, itemsize: int) -> StateCost:
        """From sizes: nodes of a cycle, and bytes of a number in the dtype of the model."""
        state, records = facts.state_bytes(itemsize), nodes * facts.record_bytes(itemsize)
        return cls(state, records, nodes * state, 3 * state + 2 * records, (3 + nodes) * state)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of the planned engine.

    Attributes:
        parts: memory by use with ``shown_rows`` rows at ``context``: name, bytes, whether it is an estimate.
        shown_rows: rows that ``parts`` is computed for.
        kv_per_token: bytes of a token in the target's pool and in the draft's.
        window: bytes of a row's window, after its committed tokens, in both pools.
        budget: bytes the engine may use; None: the memory of the hardware is not known.
        rows: most rows at ``context``; 0: not even one fits; None: not known.
        chunks: sizes of prefill chunks that ``parts`` is computed for.
        runtime: of the planned engine, and why.
        states: of one row; None: no layer is recurrent.
        served: of the engine with the configured rows and context, where its rows share what fits: ``(rows, context, tokens)``; tokens are
            those of its pools, 0: not even one row fits. None: the memory of the hardware is not known.
    """

    parts: tuple[tuple[str, int, bool], ...]
    shown_rows: int
    context: int
    kv_per_token: tuple[int, int]
    window: int
    budget: int | None
    rows: int | None
    longest: int | None
    chunks: tuple[int, ...]
    runtime: str
    states: StateCost | None = None
    served: tuple[int, int, int] | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size, _ in self.parts)

    def document(self) -> dict[str, Any]:
        """For ``format=json``."""
        return {
            "parts": [{"name": name, "bytes": size, "estimate": estimate} for name, size, estimate in self.parts],
            "total": self.total,
            "rows": self.shown_rows,
            "context": self.context,
            "kv_per_token": {"target": self.kv_per_token[0], "draft": self.kv_per_token[1]},
            "window": self.window,
            "budget": self.budget,
            "rows_that_fit": self.rows,
            "context_that_fits": self.longest,
            "served": dict(zip(("rows", "context", "pool_tokens"), self.served, strict=True)) if self.served else None,
            "prefill_chunks": list(self.chunks),
            "runtime": self.runtime,
            "states": asdict(self.states) if self.states is not None else None,
        }


def capacity(
    config: LaunchConfig,
    pair: ModelPair,
    model: FloorModel,
    shape: CycleShape,
    context: int,
    *,
    device: str,
    dtype: str,
    memory: int | None,
) -> Capacity:
    """Evaluate the memory plan.

    Args:
        config: as composed; its runtime group gives page size, chunks and share of the memory.
        shape: the widest shape to serve; without steps, the variant's automatic one.
        memory: bytes of the hardware; None: not known.
    """
    _, smallest = engine_plan(config, pair, shape, 1, context, device=device, dtype=dtype, memory=memory)
    sizes = _network_sizes(config, pair, model, smallest)

    def at(rows: int, context: int) -> tuple[Plan, MemoryPlan]:
        return _plan(config, pair, sizes, shape, device, dtype, memory, rows, context)

    def fits(rows: int, context: int) -> bool:
        _, found = at(rows, context)
        return found.total <= found.budget

    longest = pair.target.longest_context
    maximum = longest_context = served = None
    if memory is not None:
        maximum = _largest(lambda rows: fits(rows, context), MAX_ROWS)
        page = config.runtime.page_size
        pages = _largest(lambda count: fits(1, min(count * page, longest)), -(-longest // page))
        longest_context = min(pages * page, longest)
        lanes, whole = config.runtime.max_rows, config.model.max_context or longest
        chosen, planned = engine_plan(config, pair, shape, lanes, whole, device=device, dtype=dtype, memory=memory)
        chosen = replace(chosen, runtime=replace(chosen.runtime, num_pages=config.runtime.num_pages))
        fitted, its = fit_memory(planned, chosen, _weights(pair, planned, sizes))
        served = (lanes, whole, (fitted.num_pages - 1) * page if its.total <= its.budget else 0)
    batches = config.plan.batches
    shown = max((batch for batch in batches if maximum is None or batch <= maximum), default=batches[0])
    engine, plan = at(shown, context)
    recurrent = pair.target.recurrent
    per_token = (
        kv_bytes_per_token(pair.target, model.kv_itemsize),
        kv_bytes_per_token(smallest.draft.decoder, model.kv_itemsize) if smallest.draft is not None else 0,
    )
    return Capacity(
        parts=tuple((line.name, line.size, line.estimate) for line in plan.lines),
        shown_rows=shown,
        context=context,
        kv_per_token=per_token,
        window=shape.window_width * sum(per_token),
        budget=plan.budget if memory is not None else None,
        rows=maximum,
        longest=longest_context,
        chunks=engine.prefill_chunks,
        runtime=str(engine.runtime),
        states=StateCost.of(recurrent, shape.num_draft_tokens, model.itemsize) if recurrent is not None else None,
        served=served,
    )


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` for which ``holds``, which fails for every number above one that fails; 0: it never holds."""
    # Powers of two first: an engine far larger than fits can't even be planned.
    high = next((2**power for power in range(limit.bit_length()) if not holds(2**power)), limit + 1)
    return high // 2 + bisect_left(range(high // 2 + 1, high), True, key=lambda number: not holds(number))


def _plan(
    config: LaunchConfig, pair: ModelPair, sizes: tuple[int, int], shape: CycleShape, device: str, dtype: str, memory: int | None,
    rows: int, context: int,
) -> tuple[Plan, MemoryPlan]:  # fmt: skip
    engine, plan = engine_plan(config, pair, shape, rows, context, device=device, dtype=dtype, memory=memory)
    # Rows that are counted have their whole context, so the pools may not be smaller.
    full = replace(engine, runtime=replace(engine.runtime, num_pages=plan.num_pages - 1))
    return fit_memory(plan, full, _weights(pair, plan, sizes))


def _weights(pair: ModelPair, plan: Plan, sizes: tuple[int, int]) -> tuple[int, int]:
    target, draft = (size + table for size, table in zip(sizes, _tables(pair, plan), strict=True))
    return target, draft


def _network_sizes(config: LaunchConfig, pair: ModelPair, model: FloorModel, plan: Plan) -> tuple[int, int]:
    """Bytes of target and draft without their tables; packed ones are those of the checkpoints, where there are any."""
    known = has_tensors(pair.target.path) and (pair.draft is None or not pair.from_config)
    if known and uses_packed_weights(plan):
        target, draft = (
            size - table for size, table in zip(parameter_bytes(plan, config.variant.token_map), _tables(pair, plan), strict=True)
        )
        return target, draft
    return model.target_weights.size, model.draft_own.size if model.draft_own is not None else 0


def packs_weights(config: Config, device: str, dtype: str) -> bool:
    """Whether linear layers of the engine would hold their weights packed."""
    mode = config.kernels.mode if config.kernels.mode != "auto" else resolve_runtime(config.runtime.name, device).kernels
    compute = resolve_dtypes(dtype, "auto", dtype, device, mode).compute
    return device == "cpu" and resolve("kernels.linear", config.kernels.linear, mode, device, compute) == "native"


def kv_dtype_of(config: Config, device: str, dtype: str) -> str:
    """Dtype of the engine's KV pools."""
    mode = config.kernels.mode if config.kernels.mode != "auto" else resolve_runtime(config.runtime.name, device).kernels
    return resolve_dtypes(dtype, config.runtime.kv_dtype, dtype, device, mode).kv


def engine_plan(
    config: LaunchConfig, pair: ModelPair, shape: CycleShape, rows: int, context: int, *, device: str, dtype: str, memory: int | None
) -> tuple[Config, Plan]:
    """Configuration and plan of the engine that would serve ``rows`` rows of ``context`` tokens with cycles of ``shape``.

    Args:
        config, pair, device, dtype, memory: as of :func:`capacity`.
        shape: of its cycles; without steps, the variant's automatic one.
    """
    drafting = config.variant
    if drafting.tree_choices is None and shape.num_steps:
        drafting = replace(drafting, num_steps=shape.num_steps, topk=shape.topk, num_draft_tokens=shape.num_draft_tokens)
    engine = Config(
        variant=drafting,
        model=ModelConfig(path=config.model.path, max_context=max(context, 2)),
        runtime=replace(
            config.runtime,
            max_rows=rows,
            buckets=[*(batch for batch in config.plan.batches if batch < rows), rows],
            num_pages=None,
            depth_per_bucket={},
        ),
        kernels=config.kernels,
        hardware=replace(config.hardware, device=device, dtype=dtype, memory_gib=(memory or GIB) / GIB),
    )
    draft = pair.draft
    if draft is not None:  # a draft made for a shorter context decodes plainly past it, and the plan would repeat that each time
        longer = max(draft.decoder.max_position_embeddings, context)
        draft = replace(draft, decoder=replace(draft.decoder, max_position_embeddings=longer))
    return engine, make_plan(engine, pair.target, draft, device=device)


def _tables(pair: ModelPair, plan: Plan) -> tuple[int, int]:
    return _table(pair.target, plan.max_positions), _table(pair.draft.decoder, plan.max_positions) if pair.draft is not None else 0


def _table(facts: ModelFacts, positions: int) -> int:
    """Bytes of the float32 table of cos and sin."""
    return 4 * positions * facts.rope_columns


@dataclass(frozen=True, slots=True)
class Alternative:
    """An alternative that fits."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why not even one row fits.

    Attributes:
        needed, allowed: bytes of an engine with one row, and bytes that may be used.
    """

    needed: int
    allowed: int
    context: int
    alternatives: list[Alternative] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The first line of the answer."""
        return f"Does not fit: one row of {self.context} tokens needs {spell_bytes(self.needed)}, {spell_bytes(self.allowed)} may be used."


def find_shortfall(
    config: LaunchConfig, pair: ModelPair, model: FloorModel, shape: CycleShape, found: Capacity, dtype: str, memory: int | None
) -> Shortfall | None:
    """None if a row fits, or if the memory is not known."""
    if found.rows != 0 or found.budget is None or memory is None:
        return None
    if shape.num_steps and config.variant.tree_choices is None:
        # The commands plan this shape, even if they would recommend another.
        steps, topk, nodes = shape.num_steps, shape.topk, shape.num_draft_tokens
        config = replace(config, variant=replace(config.variant, num_steps=steps, topk=topk, num_draft_tokens=nodes))
    return Shortfall(found.total, found.budget, found.context, list(_alternatives(config, pair, model, shape, found, dtype, memory)))


def _alternatives(
    config: LaunchConfig, pair: ModelPair, model: FloorModel, shape: CycleShape, found: Capacity, dtype: str, memory: int
) -> Iterator[Alternative]:
    if found.longest:
        yield Alternative(f"a row of at most {found.longest} tokens", _command(config, f"plan.context={found.longest}"))
    plain = replace(config, variant=VariantConfig(name="none"))
    alone = replace(pair, draft=None), replace(model, draft=None, draft_own=None, draft_weights=())
    if pair.draft is not None and _fits(plain, *alone, PLAIN, found.context, dtype, memory):
        yield Alternative("plain decoding, without the draft", _command(plain))
    for name, larger in _known_hardware():
        if name != config.hardware.name and _fits(config, pair, model, shape, found.context, dtype, larger):
            yield Alternative(f"{name}, which has {spell_bytes(larger)}", _command(config, hardware=name))
            return


def _fits(config: LaunchConfig, pair: ModelPair, model: FloorModel, shape: CycleShape, context: int, dtype: str, memory: int) -> bool:
    single_batch = replace(config, plan=replace(config.plan, batches=[1]))
    found = capacity(single_batch, pair, model, shape, context, device="cuda", dtype=dtype, memory=memory)
    return bool(found.rows)


@cache
def _known_hardware() -> tuple[tuple[str, int], ...]:
    """GPUs of the ``hardware`` group with their bytes of memory, the smallest first."""
    names = (file.name.removesuffix(".yaml") for file in files("graphspec.conf").joinpath("hardware").iterdir())
    sizes = {name: load_config(f"hardware={name}").hardware.capacity_gib for name in names if name not in ("auto", "cpu")}
    found = ((name, int(size * 2**30)) for name, size in sizes.items() if size is not None)
    return tuple(sorted(found, key=lambda entry: entry[1]))


def _command(config: LaunchConfig, *words: str, hardware: str | None = None) -> str:
    given = [f"model.path={config.model.path}", f"variant={config.variant.name}", f"hardware={hardware or config.hardware.name}"]
    if hardware is None and config.hardware.memory_gib is not None:
        given.append(f"hardware.memory_gib={config.hardware.memory_gib:g}")
    given += [f"variant.draft={config.variant.draft}"] if config.variant.draft is not None else []
    sizes = {key: getattr(config.variant, key) for key in ("num_steps", "topk", "num_draft_tokens")}
    given += [f"variant.{key}={value}" for key, value in sizes.items() if value is not None]
    if not any(word.startswith("plan.context=") for word in words) and config.plan.context is not None:
        given.append(f"plan.context={config.plan.context}")
    return shlex.join(["graphspec", "plan", *given, *words])
