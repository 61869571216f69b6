"""Verification and commit of recurrent states: whatever the tree, the states are those of decoding the accepted path token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphspec.kernels import select_kernels
from graphspec.kernels.delta_rule import ancestor_matrix, random_ancestors
from graphspec.kernels.registry import KernelSet
from graphspec.models.recurrence import NodeRecords, PathCommit, RecurrentStates, RunRecurrence, TreeRecurrence
from tests.support.tiny import hybrid_facts, same_bits

LANES, NODES, WIDTH = 3, 9, 6
FACTS = hybrid_facts().recurrent
assert FACTS is not None
LAYERS, CHANNELS, HEADS = FACTS.count, FACTS.channels, FACTS.value_heads
REFERENCE = select_kernels("reference", "reference", "cpu")
NATIVE = select_kernels("compiled", "auto", "cpu")
KERNELS = pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=["reference", "native"])
ROWS = torch.tensor([2, 0, 3])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = normal(9, LAYERS, CHANNELS, FACTS.taps)


def states() -> RecurrentStates:
    return RecurrentStates(*(normal(seed, 5, LAYERS, *state.shape) for seed, state in enumerate(FACTS.states)))


def records(nodes: int) -> NodeRecords:
    return NodeRecords(*(torch.full((LAYERS, LANES, nodes, *record.shape), torch.nan) for record in FACTS.records))


def inputs() -> tuple[Tensor, Tensor]:
    decay, rate = -normal(4, LAYERS, LANES, NODES, HEADS).exp(), normal(5, LAYERS, LANES, NODES, HEADS).sigmoid()
    return normal(3, LAYERS, LANES, NODES, CHANNELS), torch.cat((decay, rate), -1)


def cycle(
    kernels: KernelSet, held: RecurrentStates, mixed: Tensor, gate: Tensor, ancestors: Tensor, path: Tensor, length: Tensor, *, exact: bool
) -> list[Tensor]:
    """One verification and one commit; what every node reads, layer by layer."""
    nodes = mixed.shape[2]
    left = records(nodes)
    node_N = torch.arange(nodes)
    parent_BN = torch.where(ancestor_matrix(ancestors) & (node_N < node_N[:, None]), node_N, -1).amax(-1)
    before = [state.clone() for state in held]
    tree = TreeRecurrence(kernels, held, left, ROWS, parent_BN, ancestors, exact)
    out = [tree.gated_delta(layer, mixed[layer], gate[layer], WEIGHT[layer]) for layer in range(LAYERS)]
    assert all(same_bits(state, old) for state, old in zip(held, before, strict=True)), "verification writes no state"
    commit = PathCommit(kernels, held, left, ROWS, parent_BN, path, length)
    for layer in range(LAYERS):
        commit.gated_delta(layer, WEIGHT[layer])
    commit.shift_columns()
    return out


def agree(kernels: KernelSet, mine: Tensor, theirs: Tensor, about: str = "") -> None:
    """Native kernels agree bit for bit; the references as near as torch's own exponentials and sums are."""
    if kernels is NATIVE:
        assert same_bits(mine, theirs), about
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=about or None)


@KERNELS
@pytest.mark.parametrize("exact", [True, False], ids=["walk", "solve"])
def test_a_tree_leaves_what_plain_decoding_of_its_path_leaves(exact: bool, kernels: KernelSet) -> None:
    mixed, gate = inputs()
    ancestors = random_ancestors(torch.Generator().manual_seed(1), LANES, NODES)
    for end in range(-1, NODES):
        path = ancestor_matrix(ancestors)[0, end].nonzero()[:, 0][:WIDTH].tolist() if end >= 0 else []
        padded = torch.tensor([path + [NODES - 1] * (WIDTH - len(path))] * LANES)
        tree, plain = states(), states()
        found = cycle(kernels, tree, mixed, gate, ancestors, padded, torch.tensor([len(path), 0, 0]), exact=exact)
        for node in path:
            one = (mixed[:, :, node : node + 1], gate[:, :, node : node + 1], torch.ones(LANES, 1, 1, dtype=torch.int64))
            read = cycle(kernels, plain, *one, torch.zeros(LANES, 1, dtype=torch.int64), torch.tensor([1, 0, 0]), exact=exact)
            for layer in range(LAYERS):
                agree(kernels, found[layer][0, node], read[layer][0, 0])
        for mine, theirs in zip(tree, plain, strict=True):
            agree(kernels, mine, theirs, f"path {path}")
        assert same_bits(tree.column_RUOE, plain.column_RUOE), "a copy"
        untouched = [row for row in range(5) if row != 2 or not path]
        assert all(same_bits(mine[untouched], old[untouched]) for mine, old in zip(tree, states(), strict=True))


@KERNELS
@pytest.mark.parametrize("exact", [True, False], ids=["scan", "chunk"])
def test_a_prompt_leaves_what_decoding_it_leaves(exact: bool, kernels: KernelSet) -> None:
    """In two chunks, the second padded."""
    mixed, gate = inputs()
    run, plain = states(), states()
    for state in plain:
        state[ROWS] = 0
    for begin, end in ((0, 4), (4, NODES)):
        part = [torch.nn.functional.pad(x[:, :, begin:end], (0, 0, 0, 3), value=torch.nan) for x in (mixed, gate)]
        fresh, length = torch.full((LANES,), begin == 0), torch.full((LANES,), end - begin)
        prompt = RunRecurrence(kernels, run, ROWS, length, fresh, exact)
        for layer in range(LAYERS):
            prompt.gated_delta(layer, part[0][layer], part[1][layer], WEIGHT[layer])
    for node in range(NODES):
        one = (mixed[:, :, node : node + 1], gate[:, :, node : node + 1], torch.ones(LANES, 1, 1, dtype=torch.int64))
        cycle(kernels, plain, *one, torch.zeros(LANES, 1, dtype=torch.int64), torch.ones(LANES, dtype=torch.int64), exact=True)
    for mine, theirs in zip(run, plain, strict=True):
        agree(kernels, mine, theirs)
