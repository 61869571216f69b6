"""A decoder stack as one native op: the reference's numbers, a row's bits in any batch, and threads."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphspec import LLM
from graphspec.drafters.eagle.facts import EagleFacts
from graphspec.drafters.eagle.network import EagleDraft
from graphspec.drafters.heads.eagle3_facts import Eagle3Facts
from graphspec.drafters.heads.eagle3_network import Eagle3Draft
from graphspec.drafters.mtp.facts import MTPFacts
from graphspec.drafters.mtp.network import MTPDraft
from graphspec.drafters.standalone.facts import StandaloneFacts
from graphspec.drafters.standalone.network import StandaloneDraft
from graphspec.facts import ModelFacts, RopeFacts
from graphspec.facts.families import LLAMA
from graphspec.facts.multipliers import Multipliers
from graphspec.facts.rope import NO_ROPE
from graphspec.kernels import native, select_kernels
from graphspec.models.attention import ChunkAttention, TreeAttention
from graphspec.models.decoder import Decoder
from graphspec.models.layers import Linear
from graphspec.models.stack import pack_network
from tests.kernels.cases.attention import poison_unseen, visible_slots
from tests.support.engines import mirror_pair
from tests.support.float_law import assert_float_law
from tests.support.moe_checkpoints import write_mixture
from tests.support.plans import plan
from tests.support.tiny import latent_facts, model_facts

PLAN = plan()

COLUMNS, PAGE = 6, 8
LENGTH = COLUMNS * PAGE
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": True, "num_kv_heads": 3},
    "mistral": {"sliding_window": (5, None, 9)},
    "mistral, as wide as a tree": {"sliding_window": (21, None, 33)},
    "gemma norm": {"family": replace(LLAMA, norm="offset"), "qk_norm": True},
    "gated, a part rotated": {
        "family": replace(LLAMA, attention_gate=True),
        "head_dim": 20,
        "rope": RopeFacts(10000.0, partial_rotary_factor=0.6),
    },
    "norms around, GeGLU, three rotations": {
        "family": replace(LLAMA, norms="around", activation="gelu_tanh", norm="offset"),
        "qk_norm": True,
        "sliding_window": (5, None, 9),
        "rope": RopeFacts(500000.0, "linear", factor=2.0),
        "layer_rope": (RopeFacts(10000.0), RopeFacts(500000.0, "linear", factor=2.0), RopeFacts(0.0, NO_ROPE)),
    },
    "sinks, capped scores": {
        "family": replace(LLAMA, attention_sinks=True),
        "multipliers": Multipliers(score_softcap=0.6),
        "sliding_window": (5, None, 9),
    },
    "norms after": {"family": replace(LLAMA, norms="after"), "mlp_bias": True, "output_bias": True},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 29, "head_dim": 10, "num_heads": 5},
    "wide heads": {"head_dim": 72, "num_heads": 2},
    "dynamic": {"rope": RopeFacts(10000.0, "dynamic", factor=2.0, original_max_position_embeddings=16)},
}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def facts(**keys: Any) -> ModelFacts:
    return replace(model_facts(), **{"sliding_window": (None,) * 3, **keys})


def fill(network: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_((1 + 0.2 * noise if "norm" in name else 0.2 * noise).to(dtype))
    return network.eval()


def packed(network: Any) -> Any:
    network = copy.deepcopy(network)
    assert pack_network(network, PLAN) is None
    assert all(module.weight is None for module in network.modules() if isinstance(module, Linear)), "weights are held once"
    return network


@dataclass
class Scene:
    """Rows of some lanes over a random pool: nodes of a tree, or a chunk."""

    pool: Tensor
    table: Tensor
    end: Tensor
    token: Tensor
    position: Tensor
    slot: Tensor
    valid: Tensor
    words: Tensor | None
    shift: int = 0
    """Slots before position 0, which no query sees."""

    @property
    def begin(self) -> Tensor:
        return torch.full_like(self.position, self.shift)

    def attention(self, *, like: torch.dtype = torch.float32) -> Any:
        """Over a copy of the pool."""
        shared = {
            "kernels": select_kernels("reference", "reference", "cpu"), "kv_pool": self.pool.to(like, copy=True), "table_BP": self.table,
            "position_BT": self.position, "valid_BT": self.valid, "slot_BT": self.slot,
        }  # fmt: skip
        if self.words is None:
            return ChunkAttention(**shared, rope_length_BT=self.position + 1, begin_BT=self.begin)
        return TreeAttention(**shared, begin_BT=self.begin, prefix_end_B=self.end, ancestors_BTX=self.words)

    def rows(self, lane: int, *tokens: int) -> Scene:
        """Some rows of one lane by themselves, over the same pool."""
        at = slice(lane, lane + 1), list(tokens)
        words = None if self.words is None else self.words[at]
        return replace(
            self, table=self.table[at[0]], end=self.end[at[0]], token=self.token[at], position=self.position[at], slot=self.slot[at],
            valid=self.valid[at], words=words,
        )  # fmt: skip


def scene(model: ModelFacts, *, tree: bool, lanes: int = 2, tokens: int = 7, layers: int = 3, shift: int = 0, before: int = 0) -> Scene:
    """A last token that is not valid, and otherwise a chain: each row sees the tokens before it. `before`: slots more that it sees."""
    generator = torch.Generator().manual_seed(lanes + tokens)
    columns = COLUMNS + -(-before // PAGE)
    pages = lanes * columns + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32)
    pool = torch.randn(layers, 2, pages, PAGE, model.num_kv_heads, model.head_dim, generator=generator)
    end = before + torch.tensor([17, 6, 30, 1])[:lanes]
    offset = torch.arange(tokens).expand(lanes, tokens)
    valid = offset < tokens - 1
    words = ((1 << (offset + 1)) - 1).masked_fill(~valid, 0)[..., None] if tree else None
    token = torch.randint(0, model.vocab_size, (lanes, tokens), generator=generator)
    position = end[:, None] + offset
    slot = torch.where(valid, position + shift, -3)
    return Scene(pool, table, end + shift, torch.where(valid, token, -1), position, slot, valid, words, shift)


def check_against_float64(native_run: Callable[[], Tensor], run: Callable[[torch.dtype], Tensor]) -> None:
    """Error at most twice that of the reference in float32."""
    oracle, own = run(torch.float64), run(torch.float32)
    assert_float_law(native_run(), own, oracle)


def wide(network: nn.Module, dtype: torch.dtype) -> Any:
    return copy.deepcopy(network).to(dtype)


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chunk"])
@pytest.mark.parametrize(("family", "shift"), [*((family, 0) for family in FAMILIES), ("llama", 1), ("mistral", 1)])
def test_a_target_equals_its_reference(family: str, shift: int, tree: bool) -> None:
    model = facts(**FAMILIES[family])
    network = fill(Decoder(model, (0, 2, 3), 64))  # the last one's output too
    ours, at = packed(network), scene(model, tree=tree, shift=shift)

    def kept(hidden: Tensor, taps: Tensor, pool: Tensor) -> Tensor:
        valid = at.valid[..., None]
        return torch.cat([x.flatten().double() for x in (hidden * valid, taps * valid, pool[:, :, 1:])])

    def run(dtype: torch.dtype) -> Tensor:
        attention = at.attention(like=dtype)
        return kept(*wide(network, dtype)(at.token, attention), attention.kv_pool)

    def run_native() -> Tensor:
        attention = at.attention()
        return kept(*ours(at.token, attention), attention.kv_pool)

    check_against_float64(run_native, run)
    hidden = torch.randn(2, 3, model.hidden_size)
    torch.testing.assert_close(ours.logits(hidden), network.logits(hidden))


def drafts() -> dict[str, Any]:
    common: dict[str, Any] = {"path": model_facts().path, "draft_vocab_size": 61, "target_hidden_size": 48}
    one, three = model_facts(1), {"tap_layers": (0, 1, 2), "feature_size": 144, **common}
    eagle = EagleFacts(**common, decoder=one, feature_size=48, fc_bias=True, layernorms=True)
    heads = MTPFacts(**common, decoder=model_facts(2), feature_size=48, num_heads=2, layout="deepseek", first_index=0)
    return {
        "eagle": EagleDraft(eagle, 64),
        "hass": EagleDraft(eagle, 64, norms=("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")),
        "eagle3": Eagle3Draft(Eagle3Facts(**three, decoder=one), 64),
        "eagle3, three layers": Eagle3Draft(Eagle3Facts(**three, decoder=model_facts(3), norm_before_residual=True, norm_output=True), 64),
        "mtp": MTPDraft(heads, 64),
        "standalone": StandaloneDraft(StandaloneFacts(**common, decoder=model_facts(2)), 64),
    }


@pytest.mark.parametrize("name", list(drafts()))
def test_a_draft_equals_its_reference(name: str) -> None:
    network = fill(drafts()[name])
    ours, at, step = packed(network), scene(network.facts.decoder, tree=True), 1
    hidden = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(3))

    def run(draft: Any, dtype: torch.dtype) -> Tensor:
        attention, written = at.attention(like=dtype), at.attention(like=dtype)
        out = draft(at.token, hidden.to(dtype), attention, step)
        draft.write_kv(at.token, hidden.to(dtype), written, step)
        assert torch.equal(written.kv_pool[:, :, 1:], attention.kv_pool[:, :, 1:]), "the KV alone is the same KV"
        parts = (out * at.valid[..., None], draft.logits(out, step) * at.valid[..., None], attention.kv_pool[:, :, 1:])
        return torch.cat([x.flatten().double() for x in parts])

    check_against_float64(lambda: run(ours, torch.float32), lambda dtype: run(wide(network, dtype), dtype))


@pytest.mark.parametrize("family", ["llama", "mistral, as wide as a tree", "gated, a part rotated", "odd sizes"])
@pytest.mark.parametrize("before", [0, 1100])
def test_a_row_has_the_same_bits_alone_in_a_tree_in_a_chunk_and_in_any_batch(family: str, before: int) -> None:
    model = facts(**FAMILIES[family])
    ours = packed(fill(Decoder(model, (1,), 64)))
    results = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        for tree in (True, False):
            at = scene(model, tree=tree, lanes=3, tokens=20, before=before)
            attention = at.attention()
            hidden, taps = ours(at.token, attention)
            results.append((hidden, taps, ours.logits(hidden), attention.kv_pool[:, :, 1:]))
            for lane, token in ((0, 0), (1, 5), (2, 18)):
                # What the rows before it wrote is there already.
                alone = replace(at, pool=attention.kv_pool.clone()).rows(lane, token)
                if tree:
                    alone = replace(alone, end=at.end[lane : lane + 1] + token, words=torch.ones(1, 1, 1, dtype=torch.int64))
                one, tap = ours(alone.token, alone.attention())
                assert torch.equal(one[0, 0], hidden[lane, token]) and torch.equal(tap[0, 0], taps[lane, token])
                assert torch.equal(ours.logits(one)[0, 0], ours.logits(hidden)[lane, token])
    valid = at.valid
    for hidden, taps, logits, pool in results[1:]:
        assert torch.equal(hidden[valid], results[0][0][valid]) and torch.equal(taps[valid], results[0][1][valid])
        assert torch.equal(logits[valid], results[0][2][valid]) and torch.equal(pool, results[0][3])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 9, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_kept_in_16_bits_give_the_bits_of_float32(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(83, 45, generator=generator) * 0.1).to(dtype).float()
    weight[0, :3] = torch.tensor([2.0**-24, -3 * 2.0**-24, -0.0]) if dtype is torch.float16 else torch.tensor([1e-39, -1e30, -0.0])
    weight[0] = weight[0].to(dtype).float()
    x, norm = torch.randn(rows, 45, generator=generator), torch.rand(45, generator=generator)
    narrow = native.pack_linear(weight)
    assert narrow.dtype is dtype
    full = narrow.float()
    if dtype is torch.bfloat16:  # the halves of a block take turns
        full = full.unflatten(2, (16, 2)).transpose(2, 3).flatten(2)
    for extra in ((None, None, 0.0), (torch.randn(83, generator=generator), norm, 1e-5)):
        assert torch.equal(native.multiply_packed(x, narrow, 83, *extra), native.multiply_packed(x, full, 83, *extra))


def test_a_weight_with_one_other_value_stays_in_float32() -> None:
    weight = torch.ones(3, 4)
    assert native.pack_linear(weight).dtype is torch.bfloat16
    # As bits, for an engine in the same process may have set the processor to flush denormals: 1 + 2^-20, the least denormal, infinity.
    for bits, narrow in ((0x3F800008, False), (1, False), (0x7F800000, True)):
        weight.view(torch.int32)[1, 2] = bits
        assert native.pack_linear(weight).dtype is (torch.bfloat16 if narrow else torch.float32)


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chunk"])
def test_unseen_slots_may_hold_nan(tree: bool) -> None:
    model = facts()
    ours, at = packed(fill(Decoder(model, (), 64))), scene(facts(), tree=tree)
    expected = ours(at.token, at.attention()).hidden_BTH
    ends = at.end + (at.valid.sum(1) if not tree else 0)
    words = at.words if at.words is not None else torch.zeros(2, 7, 1, dtype=torch.int64)
    poison_unseen(at.pool, at.table, visible_slots(at.begin, ends, words, LENGTH))
    assert torch.equal(ours(at.token, at.attention()).hidden_BTH[at.valid], expected[at.valid])


def test_one_layer_of_a_stack_runs_by_itself() -> None:
    """As drafters do that exit early: they share the target's layers."""
    model = facts()
    network = fill(Decoder(model, (1,), 64))
    ours, at = packed(network), scene(model, tree=True)
    x = torch.randn(2, 7, 48)
    rotation = network.rotary(at.position, at.position + 1)
    for index in (0, 2):
        theirs_at, ours_at, kv_at = at.attention(), at.attention(), at.attention()
        expected = network.layers[index](x, rotation, theirs_at)
        torch.testing.assert_close(ours.layers[index](x, rotation, ours_at)[at.valid], expected[at.valid])
        ours.layers[index].write_kv(x, rotation, kv_at)
        assert torch.equal(kv_at.kv_pool[:, :, 1:], ours_at.kv_pool[:, :, 1:])
        torch.testing.assert_close(kv_at.kv_pool[:, :, 1:], theirs_at.kv_pool[:, :, 1:])


def test_networks_without_such_layers_say_why() -> None:
    latent = fill(Decoder(latent_facts(), (), 64))
    assert pack_network(latent, PLAN) == "latent attention" and latent.stack is None
    mixture = latent_facts().experts
    assert pack_network(Decoder(replace(model_facts(), experts=mixture), (), 64), PLAN) == "mixtures of experts"
    assert pack_network(nn.Linear(2, 2), PLAN) == "a network of another package"


def test_an_engine_reports_the_path_of_its_networks(tmp_path: Path) -> None:
    pair = mirror_pair(tmp_path)
    whole, single = "one native op per pass", "op by op: set by kernels.mode, kernels.linear or kernels.attention"
    for path, keys in (
        (whole, {"runtime": "compiled"}),
        (single, {"runtime": "compiled", "linear": "native"}),
        (single, {"runtime": "compiled", "attention": "reference"}),
        (single, {"runtime": "eager"}),
    ):
        assert pair.llm(**keys).decoders == {"target": path, "draft": path}
    target, _ = write_mixture(tmp_path / "mixture", "deepseek_v3", num_hidden_layers=2)
    latent = LLM(target, variant="none", runtime="compiled")
    assert latent.decoders == {"target": "op by op: latent attention"}


def test_a_copy_has_weights_of_its_own() -> None:
    model = facts()
    ours, at = packed(fill(Decoder(model, (), 64))), scene(facts(), tree=True)
    expected = ours(at.token, at.attention()).hidden_BTH
    other = copy.deepcopy(ours)
    ours.stack.weights.zero_()
    del ours
    assert torch.equal(other(at.token, at.attention()).hidden_BTH, expected)
    assert other.layers[0].stack is other.stack


def test_threads_with_networks_of_their_own_run_side_by_side() -> None:
    torch.set_num_threads(2)
    model = facts()
    ours, at = packed(fill(Decoder(model, (), 64))), scene(facts(), tree=True, tokens=33)
    expected = ours(at.token, at.attention()).hidden_BTH
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            torch.set_num_threads(2)
            results = [ours(at.token, at.attention()).hidden_BTH for _ in range(40)]
        wrong.extend(number for result in results if not torch.equal(result, expected))

    callers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


FORKS = """
import os, torch
from graphspec.kernels import native
torch.set_num_threads(3)
weight, x = torch.randn(512, 256), torch.randn(8, 256)
packed = native.pack_linear(weight)
expected = native.multiply_packed(x, packed, 512, None, None, 0.0)
for _ in range(50):
    native.multiply_packed(x, packed, 512, None, None, 0.0)
children = [os.fork() for _ in range(2)]
same = all(torch.equal(native.multiply_packed(x, packed, 512, None, None, 0.0), expected) for _ in range(50))
if 0 in children:
    os._exit(0 if same else 1)
assert same and [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


def test_children_of_a_fork_have_threads_of_their_own_and_exit_waits_for_none() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_signals_reach_the_main_thread() -> None:
    """The team's threads take none: a handler in Python runs where Python runs."""
    torch.set_num_threads(3)
    packed_weight = native.pack_linear(torch.randn(512, 256))
    native.multiply_packed(torch.randn(8, 256), packed_weight, 512, None, None, 0.0)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_denormals_are_treated_alike_by_every_thread() -> None:
    """The mode is the caller's, and a thread's own: others take it over with the work."""
    torch.set_num_threads(3)
    weight, x = torch.full((4096, 64), 1e-20), torch.full((1, 64), 1e-20)
    packed_weight = native.pack_linear(weight)
    try:
        for flush in (True, False, True):
            torch.set_flush_denormal(flush)
            for _ in range(20):
                out = native.multiply_packed(x, packed_weight, 4096, None, None, 0.0)
                assert ((out.view(torch.int32) == 0) == flush).all()
    finally:
        torch.set_flush_denormal(False)


def test_compiled_passes_write_their_pool_in_place_and_in_order() -> None:
    """Two passes in one region, the second over what the first wrote: one op each, and no copy of the pool."""
    from torch._inductor.utils import run_and_get_code

    network = fill(Decoder(facts(), (1,), 64))
    ours, at = packed(network), scene(facts(), tree=True)
    kernels = select_kernels("reference", "reference", "cpu")
    later = replace(at, end=at.end + 6, position=at.position + 6, slot=at.slot + 6)
    path, count = torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1])

    before, after = at.attention(), later.attention()

    def run(model: Any, pool: Tensor) -> tuple[Tensor, Tensor]:
        first, taps = model(at.token, replace(before, kv_pool=pool))
        second, _ = model(later.token, replace(after, kv_pool=pool))
        kernels.kv_move(pool, at.table, at.end, path, count)
        return model.logits(first), torch.cat((second, taps), -1)

    expected_pool, pool = at.pool.clone(), at.pool.clone()
    expected = run(network, expected_pool)
    torch._dynamo.reset()
    found, codes = run_and_get_code(torch.compile(lambda kv: run(ours, kv), fullgraph=True, dynamic=False), pool)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[at.valid], other[at.valid], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool[:, :, 1:], expected_pool[:, :, 1:], rtol=1e-4, atol=1e-4)
    code = "\n".join(codes)
    assert code.count("torch.ops.graphspec_native.decode.default(") == 2
    for allocation in (line for line in code.splitlines() if "= empty_strided" in line):
        shape = [int(x) for x in allocation.split("((")[1].split(")")[0].split(",") if x.strip()]
        assert torch.Size(shape).numel() < pool.numel(), allocation
    assert f"static_cast<int64_t>({pool.numel()}L)" not in code and "aten.clone" not in code and "aten.copy" not in code
