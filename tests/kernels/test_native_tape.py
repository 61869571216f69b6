"""Tapes of native ops: which ops they may hold, equality with the recorded run, and programs that are partly tapes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from graphspec import LLM, SamplingParams, Structured
from graphspec.errors import ConfigError
from graphspec.graphs.compile import Region
from graphspec.graphs.programs import Program
from graphspec.kernels import select_kernels
from graphspec.kernels.native import cycle, multiply_packed, pack_linear
from graphspec.kernels.native.call import Calls, Tape, copy, record
from graphspec.kernels.registry import KernelSet
from graphspec.plan.buffers import Views
from graphspec.shapes import GraphKey

KERNELS = select_kernels("compiled", "auto", "cpu")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(slots: Any, seed: int) -> None:
    slots.x.copy_(draw(2, 3, 8, seed=seed))
    slots.index.copy_(torch.randint(0, 3, (2, 2), generator=torch.Generator().manual_seed(seed)))


class Native(nn.Module):
    """Rows taken, multiplied and copied: views, allocations, native ops and one copy."""

    name: ClassVar[str] = "native"
    kernels: ClassVar[KernelSet] = KERNELS

    def __init__(self) -> None:
        super().__init__()
        self.weight = pack_linear(draw(17, 8))

    def forward(self, v: Any) -> None:
        taken = self.kernels.carry(v.x, v.index, v.valid)
        v.y.copy_(multiply_packed(taken, self.weight, 17, None, None, 0.0))


class Torch(nn.Module):
    """Something that no native op does."""

    name: ClassVar[str] = "torch"
    kernels: ClassVar[KernelSet] = KERNELS

    def forward(self, v: Any) -> None:
        v.z.copy_(v.y * 2 + 1)


class Back(nn.Module):
    """One copy."""

    name: ClassVar[str] = "back"
    kernels: ClassVar[KernelSet] = KERNELS

    def forward(self, v: Any) -> None:
        v.y.copy_(v.z)


@pytest.fixture
def slots() -> Any:
    """The part of an arena that these stages use."""
    shapes = {"x": (2, 3, 8), "y": (2, 2, 17), "z": (2, 2, 17)}
    made = Views({name: torch.zeros(shape) for name, shape in shapes.items()})
    made.add({"index": torch.zeros(2, 2, dtype=torch.int64), "valid": torch.tensor([[True, False], [True, True]])})
    fill(made, 0)
    return made


def expected(slots: Any, stage: Native) -> Tensor:
    out = KernelSet.carry(KERNELS, slots.x, slots.index, slots.valid)
    return multiply_packed(out, stage.weight, 17, None, None, 0.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_tape_repeats_the_run_on_current_slot_values(slots: Any, threads: int) -> None:
    before = torch.get_num_threads()
    stage = Native()
    calls = record(lambda: stage(slots))
    assert isinstance(calls, Calls)
    tape = Tape([calls, calls])
    assert len(calls.made) == 3 and len(tape) == 6
    torch.set_num_threads(threads)
    try:
        for seed in (1, 2):
            fill(slots, seed)
            wanted = expected(slots, stage)
            tape()
            assert torch.equal(slots.y, wanted) and wanted.any()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("aten.mul", lambda v: v.y.copy_(v.y * 2)),
        ("aten.copy_", lambda v: v.index.copy_(v.x[:, :2, 0])),
        ("aten.arange", lambda v: v.index.copy_(torch.arange(2))),
        ("aten.clone", lambda v: v.y.transpose(0, 1).contiguous()),
        ("aten.fill_", lambda v: v.y.fill_(0)),
    ],
)
def test_what_a_tape_cannot_repeat_is_named(slots: Any, name: str, run: Any) -> None:
    found = record(lambda: run(slots))
    assert isinstance(found, str) and found.startswith(name)


def test_only_native_kernel_sets_record() -> None:
    assert KERNELS.records
    for other in (select_kernels("reference", "auto", "cpu"), select_kernels("compiled", "native", "cpu", linear="native")):
        assert not other.records


def test_a_program_is_a_tape_where_its_stages_are_native(slots: Any) -> None:
    program = Program([Native(), Back()], slots, compiled=True)  # type: ignore[list-item]
    fill(slots, 3)
    program()
    assert isinstance(program.direct, Tape) and [type(step) for step in program.steps] == [Tape, Tape]


def test_stages_between_native_ones_are_compiled_and_run_in_their_place(slots: Any) -> None:
    native = Native()
    program = Program([native, Torch(), Back()], slots, compiled=True)  # type: ignore[list-item]
    for seed in (4, 5, 6):
        fill(slots, seed)
        wanted = expected(slots, native) * 2 + 1
        program()
        torch.testing.assert_close(slots.y, wanted)
    assert [type(step) for step in program.steps] == [Tape, Region, Tape]
    for step in program.steps:
        step()
    torch.testing.assert_close(slots.y, wanted)


@pytest.mark.parametrize(
    ("to", "x"),
    [
        (torch.zeros(3, 4, 5), draw(3, 4, 5)),
        (torch.zeros(5, 4, 3).transpose(0, 2), draw(3, 4, 5)),
        (torch.zeros(3, 4, 5), draw(3, 1, 5).expand(3, 4, 5)),
        (torch.zeros(2, 3, 8)[:, :, 2:7], draw(5)),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True])),
        (torch.zeros(4, 0), draw(4, 0)),
        (torch.zeros(()), draw(1)[0]),
        (torch.zeros(6, 4)[::2], draw(4, 3).t()),
    ],
)
def test_copies_of_any_strides(to: Tensor, x: Tensor) -> None:
    wanted = to.clone().copy_(x)
    copy(to, x)
    assert torch.equal(to, wanted)


def test_copies_that_would_convert_are_refused() -> None:
    with pytest.raises(ConfigError, match="native copy"):
        copy(torch.zeros(2), torch.zeros(2, dtype=torch.int64))


def test_rows_between_passes_are_those_of_torch() -> None:
    token = torch.tensor([[3, -1, 7], [0, 6, 2]])
    valid = torch.tensor([[True, True, True], [False, True, True]])
    weight, hidden = draw(7, 10), draw(2, 3, 10, seed=1)
    hidden[1, 0] = torch.nan
    embedding = torch.where((valid & (token >= 0) & (token < 7))[..., None], weight[token.clamp(0, 6)], 0.0)
    assert torch.equal(cycle.embed(token, valid, weight, weight.shape[1]), embedding)
    masked = torch.where(valid[..., None], hidden, 0.0)
    for first in (False, True):
        side, alone = cycle.enter(token, valid, weight, hidden, None, None, 0.0, first)
        assert torch.equal(side, torch.cat((masked, embedding) if first else (embedding, masked), -1)) and torch.equal(alone, masked)
    norms = draw(10, seed=2), draw(10, seed=3)
    side, alone = cycle.enter(token, valid, weight, hidden, *norms, 1e-5, False)
    normed = [nn.functional.rms_norm(x, (10,), norm, 1e-5) for x, norm in zip((embedding, masked), norms, strict=True)]
    torch.testing.assert_close(side, torch.cat(normed, -1))
    assert torch.equal(alone, masked)
    source = torch.tensor([[2, 0], [1, 1]])
    arguments = hidden, source, torch.tensor([[True, True], [True, False]])
    assert torch.equal(KERNELS.carry(*arguments), KernelSet.carry(KERNELS, *arguments))
    lanes = torch.tensor([1, 0]), torch.tensor([40, 2**40]), torch.tensor([[0, 1, 1], [0, 3, 2]])
    assert torch.equal(KERNELS.sampled_positions(*lanes), KernelSet.sampled_positions(KERNELS, *lanes))
    for slot in (draw(3), torch.tensor([5, -1, 2**40]), torch.arange(6, dtype=torch.int32).view(3, 2)):
        assert torch.equal(KERNELS.take_rows(slot, lanes[0]), slot[lanes[0]])
    tree = torch.tensor([[3, 4, 5]]), torch.tensor([[[1, 0], [3, 0], [5, 0]]])
    assert KERNELS.node_paths(*tree).tolist() == KernelSet.node_paths(KERNELS, *tree).tolist() == [[[-1, -1, -1], [-1, 4, -1], [-1, -1, 5]]]


@pytest.mark.parametrize("kernels", [KERNELS, select_kernels("reference", "auto", "cpu")], ids=["native", "reference"])
def test_a_forced_token_comes_first_and_scores_stay_sorted(kernels: KernelSet) -> None:
    score = torch.tensor([[[-1.0, -2.0, -3.0]] * 4])
    token = torch.tensor([[[7, 8, 9]] * 4])
    found = kernels.put_first(score, token, torch.tensor([[-1, 8, 5, 7]]), None)
    assert found[1].tolist() == [[[7, 8, 9], [8, 7, 9], [5, 7, 8], [7, 8, 9]]]
    assert found[0].tolist() == [[[-1.0, -2.0, -3.0], [0.0, -1.0, -3.0], [0.0, -1.0, -2.0], [0.0, -2.0, -3.0]]]
    # Rows that were drafted off the forced path keep what they have; so does all of a lane after its run.
    score, token = score[:, :2].repeat(2, 1, 1), token[:, :2].repeat(2, 1, 1)
    path = torch.tensor([[[4, 6], [4, 5]], [[4, 6], [4, 5]]])
    found = kernels.put_first(score, token, torch.tensor([[4, 5, 9], [4, 5, -1]]), path)
    assert found[1].tolist() == [[[7, 8, 9], [9, 7, 8]], [[7, 8, 9], [7, 8, 9]]]
    found = kernels.put_first(score[:, :1, :1], token[:, :1, :1], torch.tensor([[4, 5, 9], [-1, 5, 9]]), path[:, :1, :0])
    assert found[1].tolist() == [[[4]], [[7]]] and found[0].tolist() == [[[0.0]], [[-1.0]]]


FORMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "filters": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "log-probabilities": {"logprobs": 3},
    "allowed tokens": {"allowed_token_ids": list(range(8, 40))},
    "bias and minimum length": {"logit_bias": {9: 2.0}, "min_tokens": 3},
    "bad words": {"bad_words": ["def", "self."]},
    "grammar": {"structured": Structured(regex="(x7){6}")},
}
"""What a cycle does without a region of the compiler."""


@pytest.mark.parametrize("variant", ["none", "ngram", "ngram_trie", "eagle", "eagle3", "mtp", "standalone", "p_eagle", "dflash"])
def test_a_cycle_of_any_form_of_sampling_is_one_tape(variant: str) -> None:
    """With a grammar it is one between any two steps of the host."""
    shape = {} if variant in ("none", "ngram_trie") else {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
    with LLM(variant=variant, runtime="compiled", max_rows=1, prefill_chunks=[16], **shape) as llm:
        assert llm.cycle is not None
        known: set[Any] = set()
        for form, params in FORMS.items():
            llm.generate("a = ", SamplingParams(max_tokens=6, **params))
            [key] = [key for key in llm.cycle.programs if isinstance(key, GraphKey) and key not in known]
            known.add(key)
            segments = llm.cycle.programs[key].segments
            assert segments and all(segment.on_host or isinstance(segment.run, Tape) for segment in segments), form
            assert form == "grammar" or len(segments) == 1, form
