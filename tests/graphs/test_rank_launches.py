"""What Inductor writes for the first of eight ranks: collectives stay in the program's one region and are handed what they were given.

As in ``test_node_budget.py`` the wrapper is written for a GPU that is not there, and nothing is exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphspec.kernels.collectives import ONE_SHOT_BYTES, DeviceComm
from graphspec.shapes import CycleShape
from tests.support.codegen import Launches, launches_of, pretended_gpu
from tests.support.shapes_8b import fake_cycle

pytestmark = pytest.mark.kernels

RANKS = 8
SHAPES = {"tree": CycleShape(5, 4, 8), "none": CycleShape(0, 1, 1)}
LAYER = Counter({"graphspec.linear_kv_write": 1, "graphspec.tree_attention": 1, "graphspec.linear": 3})
"""A layer of one rank: its products leave partial sums, so none of them adds the residual stream."""
SUM = {
    "nccl": Counter({"_c10d_functional.all_reduce_": 1, "_c10d_functional.wait_tensor": 1}),
    "symmetric": Counter({"graphspec.one_shot_sum": 1}),
}
GATHER = Counter({"_c10d_functional.all_gather_into_tensor": 1, "_c10d_functional.wait_tensor": 1})


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[str]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    dist.destroy_process_group()


def count(shape: str, num_layers: int, kind: str, group: str) -> Launches:
    memory = None
    if kind == "symmetric":
        with pretended_gpu(), FakeTensorMode():
            memory = torch.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device="cuda")
    with fake_cycle(SHAPES[shape], num_layers, ranks=RANKS, comm=DeviceComm(RANKS, group, memory)) as cycle:
        return launches_of(*cycle.parts())


@pytest.mark.parametrize("kind", SUM)
def test_a_layer_is_two_sums_and_two_residuals_more(kind: str, group: str) -> None:
    few, many = (count("none", layers, kind, group) for layers in (3, 5))
    sums = SUM[kind] + SUM[kind]
    assert many.ops - few.ops == LAYER + LAYER + sums + sums
    assert many.kinds["triton"] - few.kinds["triton"] == 4, "a residual after each sum"
    assert len(many.kinds) == 2, "no copy, and nothing of a library"
    assert many.host_marks == []


@pytest.mark.parametrize("kind", SUM)
def test_a_speculative_cycle_adds_a_sum_of_the_embedding_and_one_gather(kind: str, group: str) -> None:
    found = count("tree", 3, kind, group)
    exchanged = Counter({name: number for name, number in found.ops.items() if name in SUM["nccl"] + SUM["symmetric"] + GATHER})
    expected = GATHER.copy()
    for _ in range(1 + 2 * 3):
        expected += SUM[kind]
    assert exchanged == expected
    assert found.host_marks == []


def test_every_sum_is_handed_the_shared_memory_itself(group: str) -> None:
    """No copy of it, and no memory that Inductor allocates: other ranks could read neither."""
    found = count("tree", 3, "symmetric", group)
    lines = [line for line in found.code.splitlines() if "graphspec.one_shot_sum.default(" in line]
    assert len(lines) == 7
    handed = {line.split("one_shot_sum.default(")[1].split(",")[0] for line in lines}
    assert len(handed) == 1 and handed.pop().startswith("arg"), "an input of the program"
    assert "empty_strided_p2p(" not in found.code
