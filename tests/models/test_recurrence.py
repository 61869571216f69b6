"""Verification and commit of recurrent states: for any tree, the states are those of decoding the accepted path token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graphspec.kernels import select_kernels
from graphspec.kernels.recurrent.state_tokens import ancestor_matrix
from graphspec.kernels.registry import KernelSet
from graphspec.models.recurrence import (
    Convolution,
    NodeRecords,
    RecurrentStates,
    RunRecurrence,
    TreeRecurrence,
    commit_path,
)
from tests.kernels.cases.recurrent import random_ancestors
from tests.support.tiny import hybrid_facts, same_bits

LANES, NODES, WIDTH = 3, 9, 6
HYBRID = hybrid_facts().recurrent
assert HYBRID is not None
# 64 channels: an activation of any number of tokens is whole vectors, whatever the instruction set.
FACTS = replace(HYBRID, value_dim=8)
LAYERS, CHANNELS, HEADS = FACTS.count, FACTS.channels, FACTS.value_heads
REFERENCE = select_kernels("reference", "reference", "cpu")
NATIVE = select_kernels("compiled", "auto", "cpu")
ROWS = torch.tensor([2, 0, 3])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = normal(9, LAYERS, CHANNELS, FACTS.taps)


class How(NamedTuple):
    """A rule, and who computes it."""

    kernels: KernelSet
    skip: Tensor | None
    bias: Tensor | None = None

    def convolution(self, layer: int) -> Convolution:
        return Convolution(WEIGHT[layer], self.bias)


SELECTIVE = (normal(8, HEADS), normal(7, CHANNELS))
WAYS = {
    "delta-reference": How(REFERENCE, None),
    "delta-native": How(NATIVE, None),
    "ssm-reference": How(REFERENCE, *SELECTIVE),
    "ssm-native": How(NATIVE, *SELECTIVE),
}
EVERY_WAY = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def states() -> RecurrentStates:
    return RecurrentStates(*(normal(seed, 5, LAYERS, *state.shape) for seed, state in enumerate(FACTS.states)))


def records(nodes: int) -> NodeRecords:
    return NodeRecords(*(torch.full((LAYERS, LANES, nodes, *record.shape), torch.nan) for record in FACTS.records))


def inputs(tokens: int = NODES) -> tuple[Tensor, Tensor]:
    decay, rate = -normal(4, LAYERS, LANES, tokens, HEADS).exp(), normal(5, LAYERS, LANES, tokens, HEADS).sigmoid()
    return normal(3, LAYERS, LANES, tokens, CHANNELS), torch.cat((decay, rate), -1)


def cycle(
    how: How, held: RecurrentStates, mixed: Tensor, gate: Tensor, ancestors: Tensor, path: Tensor, length: Tensor, *, exact: bool
) -> list[Tensor]:
    """One verification and one commit; what every node reads, layer by layer."""
    nodes = mixed.shape[2]
    left = records(nodes)
    node_N = torch.arange(nodes)
    parent_BN = torch.where(ancestor_matrix(ancestors) & (node_N < node_N[:, None]), node_N, -1).amax(-1)
    before = [state.clone() for state in held]
    tree = TreeRecurrence(how.kernels, held, left, ROWS, parent_BN, ancestors, exact)
    out = [tree(layer, mixed[layer], gate[layer], how.convolution(layer), how.skip) for layer in range(LAYERS)]
    assert all(same_bits(state, old) for state, old in zip(held, before, strict=True)), "verification writes no state"
    bias = None if how.bias is None else how.bias.repeat(LAYERS, 1)
    selective = how.skip is not None
    commit_path(how.kernels, held, left, Convolution(WEIGHT, bias), ROWS, path, length, selective=selective)
    return out


def agree(how: How, mine: Tensor, theirs: Tensor, about: str = "") -> None:
    """Native kernels agree bit for bit; the references as near as torch's own exponentials and sums are."""
    if how.kernels is NATIVE:
        assert same_bits(mine, theirs), about
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=about or None)


@EVERY_WAY
@pytest.mark.parametrize("exact", [True, False], ids=["walk", "at-once"])
def test_a_tree_leaves_what_plain_decoding_of_its_path_leaves(exact: bool, how: How) -> None:
    mixed, gate = inputs()
    ancestors = random_ancestors(torch.Generator().manual_seed(1), LANES, NODES)
    for end in range(-1, NODES):
        path = ancestor_matrix(ancestors)[0, end].nonzero()[:, 0][:WIDTH].tolist() if end >= 0 else []
        padded = torch.tensor([path + [NODES - 1] * (WIDTH - len(path))] * LANES)
        tree, plain = states(), states()
        found = cycle(how, tree, mixed, gate, ancestors, padded, torch.tensor([len(path), 0, 0]), exact=exact)
        for node in path:
            one = (mixed[:, :, node : node + 1], gate[:, :, node : node + 1], torch.ones(LANES, 1, 1, dtype=torch.int64))
            read = cycle(how, plain, *one, torch.zeros(LANES, 1, dtype=torch.int64), torch.tensor([1, 0, 0]), exact=exact)
            for layer in range(LAYERS):
                agree(how, found[layer][0, node], read[layer][0, 0])
        for mine, theirs in zip(tree, plain, strict=True):
            agree(how, mine, theirs, f"path {path}")
        assert same_bits(tree.column_RUOE, plain.column_RUOE), "a copy"
        untouched = [row for row in range(5) if row != 2 or not path]
        assert all(same_bits(mine[untouched], old[untouched]) for mine, old in zip(tree, states(), strict=True))


@EVERY_WAY
@pytest.mark.parametrize("exact", [True, False], ids=["scan", "chunk"])
def test_a_prompt_leaves_what_decoding_it_leaves(exact: bool, how: How) -> None:
    """In two chunks, the second padded."""
    mixed, gate = inputs()
    run, plain = states(), states()
    for state in plain:
        state[ROWS] = 0
    for begin, end in ((0, 4), (4, NODES)):
        part = [torch.nn.functional.pad(x[:, :, begin:end], (0, 0, 0, 3), value=torch.nan) for x in (mixed, gate)]
        fresh, length = torch.full((LANES,), begin == 0), torch.full((LANES,), end - begin)
        prompt = RunRecurrence(how.kernels, run, ROWS, length, fresh, exact)
        for layer in range(LAYERS):
            prompt(layer, part[0][layer], part[1][layer], how.convolution(layer), how.skip)
    for node in range(NODES):
        one = (mixed[:, :, node : node + 1], gate[:, :, node : node + 1], torch.ones(LANES, 1, 1, dtype=torch.int64))
        cycle(how, plain, *one, torch.zeros(LANES, 1, dtype=torch.int64), torch.ones(LANES, dtype=torch.int64), exact=True)
    for mine, theirs in zip(run, plain, strict=True):
        agree(how, mine, theirs)


def read(how: How, held: RecurrentStates, mixed: Tensor, gate: Tensor, chunk: int) -> None:
    """Lane 0 reads tokens from the first one on, in chunks whose padding is NaN, from any previous state; the other lanes read nothing."""
    for begin in range(0, mixed.shape[2], chunk):
        part = [x[:, :, begin : begin + chunk] for x in (mixed, gate)]
        count = part[0].shape[2]
        part = [torch.nn.functional.pad(x, (0, 0, 0, chunk - count), value=torch.nan) for x in part]
        prompt = RunRecurrence(how.kernels, held, ROWS, torch.tensor([count, 0, 0]), torch.tensor([begin == 0, False, False]), exact=True)
        for layer in range(LAYERS):
            prompt(layer, part[0][layer], part[1][layer], how.convolution(layer), how.skip)


@EVERY_WAY
def test_a_row_preempted_at_any_cycle_ends_in_the_same_bits(how: How) -> None:
    """Where everything walks: prompt, trees of any shape and the commit, and after a preemption all of it as one prompt."""
    prompt, taken = 5, (1, 3, 2, 4, 1)
    length = prompt + sum(taken)
    (true, gate), drawn = inputs(length), torch.Generator().manual_seed(6)
    whole, at, snapshots = states(), prompt, []
    read(how, whole, true[:, :, :prompt], gate[:, :, :prompt], chunk=4)
    for count in taken:
        ancestors = random_ancestors(drawn, LANES, NODES)
        below = ancestor_matrix(ancestors)[0]
        path = below[int(below.sum(-1).argmax())].nonzero()[:count, 0]
        assert len(path) == count, "a tree that deep"
        nodes = [torch.randn(x.shape[0], LANES, NODES, x.shape[-1], generator=drawn) for x in (true, gate)]
        nodes[1][..., :HEADS] = -nodes[1][..., :HEADS].abs()
        for node, stream in zip(nodes, (true, gate), strict=True):
            node[:, 0, path] = stream[:, 0, at : at + count]
        padded = torch.nn.functional.pad(path, (0, WIDTH - count)).repeat(LANES, 1)
        cycle(how, whole, *nodes, ancestors, padded, torch.tensor([count, 0, 0]), exact=True)
        at += count
        snapshots.append((at, [state[ROWS[0]].clone() for state in whole]))
    for at, kept in snapshots:
        resumed = RecurrentStates(*(torch.full_like(state, torch.nan) for state in whole))
        read(how, resumed, true[:, :, :at], gate[:, :, :at], chunk=7)
        assert all(same_bits(mine[ROWS[0]], theirs) for mine, theirs in zip(resumed, kept, strict=True)), f"preempted after {at} tokens"
