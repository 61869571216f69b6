"""The launch-and-latency model: launches equal the engine's, bytes equal the floor's, and costs are monotone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.config.catalog import resolve_variant
from graphspec.config.command_options import LaunchConfig
from graphspec.config.schema import KernelsConfig
from graphspec.kernels import OPS
from graphspec.kernels.attention.fused._blocks import blocks_in_turn, round_trips
from graphspec.kernels.fused.hopper import resident
from graphspec.kernels.fused.launch import launcher
from graphspec.lab.floor import FloorModel, Hardware, kv_bytes_per_token
from graphspec.lab.predict.latency import HOPPER, Situation, Work, by_kernel, estimate, estimate_cycle, places, work_of
from graphspec.lab.predict.launches import INDUCTOR, Step, planned_steps
from graphspec.lab.predict.model_pair import ModelPair, read_model_pair
from graphspec.shapes import PLAIN, CycleShape
from tests.support.codegen import launches_of
from tests.support.gemma4 import BASE, INPUTS
from tests.support.shapes_8b import fake_cycle

from .test_state_prices import NEMOTRON_H_8B

pytest.importorskip("triton")

H200 = Hardware(4.8e12, 989e12, None, "h200")
CHAIN, TREE = CycleShape(7, 1, 8), CycleShape(5, 4, 8)


def planned(model: str, variant: str, numerics: str = "auto") -> tuple[LaunchConfig, ModelPair, FloorModel]:
    entry, config = resolve_variant(variant), LaunchConfig(kernels=KernelsConfig(mode="fused", numerics=numerics))
    config = replace(config, model=replace(config.model, path=model), variant=replace(config.variant, name=variant))
    pair = read_model_pair(model, config.variant, entry)
    return config, pair, FloorModel.of(pair.target, pair.draft, "bfloat16", entry, None, pair.from_config)


def steps_of(model: str, variant: str, shape: CycleShape, batch: int = 1, context: int = 2048, numerics: str = "auto") -> list[Step]:
    config, pair, _ = planned(model, variant, numerics)
    found = planned_steps(config, pair, resolve_variant(variant), shape, batch, context, "bfloat16")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with Mamba-2 layers."""
    path = tmp_path_factory.mktemp("hybrid")
    (path / "config.json").write_text(json.dumps(NEMOTRON_H_8B))
    return str(path)


@pytest.mark.parametrize("numerics", ["fast", "cycle_invariant"])
@pytest.mark.parametrize("shape", [TREE, PLAIN, CHAIN])
def test_launches_are_those_of_the_code_inductor_writes(shape: CycleShape, numerics: str) -> None:
    """Operators of several launches are counted as such here, and as one there. With so few nodes the law has one, ``fast`` none."""
    variant = "eagle3" if shape.num_steps else "none"
    steps = steps_of("llama-3.1-8b", variant, shape, numerics=numerics)
    with fake_cycle(shape, 3, numerics=numerics) as cycle:
        written = launches_of(*cycle.parts())
    layer, squares_of_the_first = 5, numerics != "fast"
    assert len(steps) == len(written) + 29 * layer + squares_of_the_first
    assert sum(step.kernel == INDUCTOR for step in steps) == written.kinds["triton"]


@pytest.mark.parametrize(
    ("model", "variant", "shape", "batch"),
    [
        ("llama-3.1-8b", "none", PLAIN, 1),
        ("llama-3.1-8b", "eagle3", CHAIN, 1),
        ("llama-3.1-8b", "eagle3", CycleShape(5, 4, 32), 8),
        ("llama-3.1-70b", "eagle3", TREE, 4),
        ("deepseek-v3", "mtp", CycleShape(1, 1, 2), 1),
        ("deepseek-v3", "mtp", CycleShape(3, 1, 4), 8),
    ],
)
def test_bytes_are_those_of_the_floor(model: str, variant: str, shape: CycleShape, batch: int) -> None:
    """Two ways to count: parameters of modules by group there, tensors that kernels are given here."""
    config, pair, floor = planned(model, variant)
    steps = planned_steps(config, pair, resolve_variant(variant), shape, batch, 2048, "bfloat16")
    assert steps is not None
    found = sum(work_of(step, Situation(2048)).bytes for step in steps)
    assert found == pytest.approx(sum(stage.bytes for stage in floor.stages(shape, batch, 2048)), rel=0.01)


@pytest.mark.parametrize(
    ("shape", "numerics", "verify"), [(PLAIN, "fast", "walk_nodes"), (TREE, "fast", "block_nodes"), (TREE, "auto", "walk_nodes")]
)
def test_states_are_read_by_verification_and_read_and_written_by_the_commit(
    hybrid: str, shape: CycleShape, numerics: str, verify: str
) -> None:
    found: Counter[str] = Counter()
    for step in steps_of(hybrid, "ngram" if shape.num_steps else "none", shape, batch=2, numerics=numerics):
        if step.launch is not None and "matrix" in step.launch.values:
            found[step.kernel] += int(work_of(step, Situation(2048)).bytes)
    matrices = 2 * 24 * 128 * 128 * 64 * 4
    assert found == {verify: matrices, "commit_states": 2 * matrices}


def test_layers_of_two_shapes_attend_over_two_pools(tmp_path: Path) -> None:
    """Layers that read another layer's keys and values write none; a token's bytes are those of the layers that do."""
    sizes = {"hidden_size": 64, "head_dim": 32, "global_head_dim": 64, "sliding_window": 512}
    config = {**BASE, **INPUTS, **sizes, "max_position_embeddings": 4096, "architectures": ["Gemma4ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Counter(step.kernel for step in steps_of(str(tmp_path), "ngram", CycleShape(3, 2, 6)))
    assert (found["position_attention"], found["rope_kv_write"], found["kv_move"]) == (7, 4, 2)
    _, pair, floor = planned(str(tmp_path), "ngram")
    row = 2 * 2 * (3 * 32 + 64) * 2
    assert kv_bytes_per_token(pair.target, 2) == row
    [stage] = floor.stages(PLAIN, 1, 2048)
    # Four layers have a window of 512; only the first four have keys and values of their own to write.
    assert stage.parts["kv"] == 2 * 2 * 2 * (4 * 32 * 512 + 3 * 64 * 2048) + row


@pytest.mark.parametrize("unit", [1, 8, 16])
@pytest.mark.parametrize("programs", [1, 3, 16, 33])
def test_the_longest_turn_of_attention_is_counted(unit: int, programs: int) -> None:
    for blocks in (1, 7, 8, 9, 16, 33, 128, 129, 257, 513):
        turns = [0] * programs
        for block in range(blocks):
            turns[block // unit % programs] += 1
        assert blocks_in_turn(blocks, unit, programs) == max(turns)
    assert round_trips(9, 128) == 5 and round_trips(9, 256) == 9


def test_every_op_has_a_launcher_of_its_name() -> None:
    assert all(callable(launcher(op)) for op in OPS)


def test_kernels_that_no_greedy_cycle_launches_declare_their_work() -> None:
    """The others are seen by the test below."""
    from graphspec.kernels.linear.fused import _linear
    from graphspec.kernels.sampling.fused import _thresholds

    filters = ("_peaks", "_histogram", "_kth_largest", "_least")
    assert all(hasattr(getattr(_thresholds, name), "work") for name in filters) and hasattr(_linear._dequantise, "work")


@pytest.mark.parametrize("name", ["int4", "fp8-channel", "nvfp4", "q4-k"])
def test_codes_are_priced_by_their_bytes(name: str) -> None:
    """A product reads codes and all fields, and multiplies as many numbers as there are codes."""
    from graphspec.kernels.fused.launch import recording
    from graphspec.kernels.linear.fused.packed_linear import dequantised, packed_linear
    from tests.kernels.proof.linear import FORMATS

    weight, x = FORMATS[name].without_data(4096, 14336), torch.empty(8, 14336, dtype=torch.bfloat16, device="meta")
    with recording() as launches:
        packed_linear(x, weight)
        dequantised(weight, x)
    product, whole = (work_of(Step.of("", launch), Situation(0)) for launch in launches)
    assert product.bytes == weight.nbytes and product.flops == 2 * 8 * 4096 * 14336
    assert product.programs * product.in_flight < 8 * weight.nbytes
    assert whole.bytes == weight.nbytes + 2 * 4096 * 14336


def test_what_is_not_small_is_described(hybrid: str) -> None:
    """No kernel that is taken for a small one is given a weight or a pool."""
    large = 1 << 20
    for args in (("llama-3.1-8b", "eagle3", TREE), ("deepseek-v3", "mtp", CycleShape(1, 1, 2)), (hybrid, "ngram", TREE)):
        for step in steps_of(*args):
            if step.launch is None or hasattr(step.launch.kernel, "work"):
                continue
            names = {name for name, value in step.launch.values.items() if hasattr(value, "numel") and value.numel() > large}
            # RoPE tables, and pools, columns and records that a few rows are read from or written to.
            small = {"pool", "keys", "kv", "cos_sin", "latent_pool", "table", "cos", "sin", "column", "inputs"}
            assert names <= small, (step.kernel, names)


@pytest.mark.parametrize("programmatic", [False, True])
def test_more_of_anything_never_costs_less(programmatic: bool) -> None:
    times = [
        sum(
            estimate(step, Situation(context, programmatic), H200).seconds
            for step in steps_of("llama-3.1-8b", "eagle3", TREE, batch, context)
        )
        for batch, context in ((1, 512), (1, 4096), (4, 4096), (4, 16384))
    ]
    assert times == sorted(times)


def test_an_estimate_by_hand() -> None:
    """Four programs a multiprocessor at most: 1056 programs are two waves, and memory keeps up with neither's requests."""
    step, work = Step("verify", "linear"), Work(bytes=1056 * 65536, programs=1056, in_flight=1024, memory=1, cache=2, alone=1e6)
    room = places(step)
    waves = -(-1056 // room)
    rate = room * 1024 / HOPPER.memory
    assert rate < H200.bandwidth
    full, left = divmod(1056, room)
    expected_stream = full * room * 65536 / rate + (left * 65536 / (left * 1024 / HOPPER.memory) if left else 0)
    found = _priced(step, work)
    assert found.gap == HOPPER.gap
    assert found.exposed == pytest.approx(waves * (HOPPER.memory + 2 * HOPPER.cache))
    assert found.stream == pytest.approx(expected_stream)
    assert found.alone == pytest.approx(1e6 / HOPPER.link)
    assert found.seconds == pytest.approx(found.gap + found.exposed + found.stream + found.alone)


def _priced(step: Step, work: Work) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphspec.lab.predict.latency.work_of", lambda *_: work)
        return estimate(step, Situation(2048), H200)


@pytest.mark.parametrize(
    ("used", "programs"),
    [
        ({"registers": 32, "shared": 0, "warps": 4}, 16),
        ({"registers": 64, "shared": 81920, "warps": 4}, 2),
        ({"registers": 255, "shared": 81920, "warps": 4}, 2),
        ({"registers": 255, "shared": 0, "warps": 8}, 1),
        ({"registers": 16, "shared": 0, "warps": 1}, 32),
    ],
)
def test_programs_that_a_multiprocessor_holds(used: dict[str, int], programs: int) -> None:
    """By hand, from the limits of compute capability 9.0: 64 Ki registers, 228 KiB of shared memory, 64 warps, 32 blocks."""
    assert resident(used) == programs


def test_programmatic_launch_never_costs() -> None:
    steps = steps_of("llama-3.1-8b", "eagle3", TREE)
    plain, early = (estimate_cycle(steps, TREE, 1, 2048, 4.0, H200, programmatic=flag) for flag in (False, True))
    assert early.whole.seconds < plain.whole.seconds
    # Inductor's kernels wait as before.
    assert next(p for p in early.parts if p.name == INDUCTOR) == next(p for p in plain.parts if p.name == INDUCTOR)


def test_parts_add_up_to_the_whole() -> None:
    steps = steps_of("deepseek-v3", "mtp", CycleShape(1, 1, 2))
    found = estimate_cycle(steps, CycleShape(1, 1, 2), 1, 2048, 4.0, H200, programmatic=False)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.whole.seconds)
    assert found.whole.launches == len(steps)
    assert [part.name for part in by_kernel(estimate(step, Situation(2048), H200) for step in steps)] == [part.name for part in found.parts]
    assert json.loads(json.dumps(found.record()))["launches"] == len(steps)


def test_other_kernels_have_no_estimate() -> None:
    config, pair, _ = planned("llama-3.1-8b", "eagle3")
    for keys in (KernelsConfig(mode="reference"), KernelsConfig(mode="fused", attention="flashinfer")):
        assert planned_steps(replace(config, kernels=keys), pair, resolve_variant("eagle3"), TREE, 1, 2048, "bfloat16") is None
