"""Every op of the catalog: implementations against references, references compiled, exact laws."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import loop_body
from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.errors import ConfigError
from graphspec.kernels import OPS, KernelOp, op_of, select_kernels
from graphspec.kernels.linear.packed import Packed, dequantise
from graphspec.kernels.sampling.noise import counter_hash, gumbel_noise, mix32
from graphspec.kernels.sampling.topk import stable_topk
from graphspec.models.layers import RMSNorm, use_kernels
from tests.kernels.cases import cases_of
from tests.kernels.cases.attention import visible_slots
from tests.support.fake_cuda import NoHostTraffic, load_cuda_guard
from tests.support.float_law import assert_float_law, widened
from tests.support.interpreter import interpreter_warnings

PAIRS = [
    pytest.param(op, name, id=f"{op.name}-{name}", marks=[pytest.mark.kernels, *interpreter_warnings(op)] if name in op.fused_names else [])
    for op in OPS
    for name in op.implementations
]
BY_OP = [pytest.param(op, id=op.name) for op in OPS]


def cases(op: KernelOp, seed: int = 0) -> list[dict[str, Any]]:
    return cases_of(op, torch.Generator().manual_seed(seed))


def outputs(op: KernelOp, function: Callable[..., Any], case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Everything a call leaves: results, then written arguments without the dummy page. Read-only arguments must not change."""
    own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in case.items()}
    result = op.call(function, own)
    for key, value in case.items():
        if isinstance(value, torch.Tensor) and key not in op.mutates:
            kept = (own[key], value) if value.element_size() > 1 else (own[key].view(torch.uint8), value.view(torch.uint8))
            assert torch.equal(*(tensor.nan_to_num() for tensor in kept)), f"{op.name} wrote its argument {key}"
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    written = [key for key in op.mutates if own[key] is not None]
    return (*results, *(own[key][:, :, 1:] if own[key].dim() == 6 else own[key] for key in written))


KEEP_NAN = ("ban_words", "bias_logits", "mask_tokens", "penalise")
"""Ops whose results have a NaN where a logit is invalid: that is how the sampler finds the row."""


def assert_same(op: KernelOp, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values; NaN only from the ops of :data:`KEEP_NAN`, in the same places."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=op.name in KEEP_NAN)


PACKED = {"packed_linear": "linear", "packed_moe_mlp": "moe_mlp"}
"""Ops on weights of low precision, and those on numbers whose bits they have."""


def of_numbers(packed: str, name: str) -> Callable[..., Any]:
    """An op of :data:`PACKED` by an implementation of the op on numbers."""
    [op] = [op for op in OPS if op.name == PACKED[packed]]

    def multiply(x: Any, weight: Packed, *rest: Any, **named: Any) -> Any:
        return op.implementation(name)(x, dequantise(weight, x.dtype), *rest, **named)

    def mix(x_TH: Any, index_TK: Any, weight_TK: Any, gate_up: Packed, down: Packed, **named: Any) -> Any:
        experts = down.shape[0] // x_TH.shape[1]
        numbers = (dequantise(weight, x_TH.dtype).unflatten(0, (experts, -1)) for weight in (gate_up, down))
        return op.implementation(name)(x_TH, index_TK, weight_TK, *numbers, **named)

    return multiply if packed == "packed_linear" else mix


@pytest.mark.parametrize(("op", "name"), PAIRS)
@pytest.mark.parametrize("seed", range(4))
def test_implementation_equals_reference(op: KernelOp, name: str, seed: int) -> None:
    # The law of these is the stricter one: their implementations have the bits of their own products of the numbers.
    packed = op.name in PACKED
    exact, expected = op.exact or packed, of_numbers(op.name, name) if packed else op.reference
    for case in cases(op, seed):
        reference = outputs(op, expected, case)
        found = outputs(op, op.implementation(name), case)
        oracle = reference if exact else outputs(op, op.reference, widened(case))
        for f, r, o in zip(found, reference, oracle, strict=True):
            assert f.dtype == r.dtype and f.shape == r.shape
            if exact or f.dtype == torch.bool:
                assert_same(op, f, r)
            else:
                assert_float_law(f, r, o, dtype=torch.float32, partly=True)


@pytest.mark.kernels
@pytest.mark.parametrize("op", BY_OP)
def test_reference_compiles_whole_and_agrees(op: KernelOp) -> None:
    case = cases(op)[1]
    torch._dynamo.reset()
    compiled = torch.compile(op.reference, fullgraph=True, dynamic=False)
    oracle = outputs(op, op.reference, widened(case)) if op.name in ("tree_attention", "chunk_attention", "draft_topk") else None
    for i, (found, expected) in enumerate(zip(outputs(op, compiled, case), outputs(op, op.reference, case), strict=True)):
        # Index results are exact even of float ops: they decide tokens.
        if op.exact or not expected.is_floating_point():
            assert_same(op, found, expected)
        elif oracle is not None:
            assert_float_law(found, expected, oracle[i], dtype=torch.float32, partly=True)
        else:
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("op", BY_OP)
def test_reference_reads_nothing_on_the_host(op: KernelOp) -> None:
    """On fake CUDA tensors a host read, a data-dependent shape, a copy between devices and a tensor left on the CPU all raise."""
    load_cuda_guard()
    for case in cases(op):
        shapes = [(k, v.shape, v.dtype) for k, v in case.items() if isinstance(v, torch.Tensor)]
        with FakeTensorMode(), NoHostTraffic() as watch:
            fake = {**case, **{k: torch.empty(shape, dtype=dtype, device="cuda") for k, shape, dtype in shapes}}
            result = op.call(op.reference, fake)
        assert watch.ops > 3
        for tensor in () if result is None else result if isinstance(result, tuple) else (result,):
            assert tensor.device.type == "cuda"


@pytest.mark.parametrize("op", BY_OP)
def test_contract_is_written_down(op: KernelOp) -> None:
    assert len(op.contract) > 200 and len(cases_of(op, torch.Generator())) >= 3


@pytest.mark.parametrize("op", BY_OP)
def test_flat_arguments_are_those_of_the_case(op: KernelOp) -> None:
    case, names = cases(op)[1], [argument.name for argument in op.signature.arguments]
    flat = op.signature.flatten((), op.signature.gather(case))
    assert case.keys() <= set(names) and set(op.mutates) <= set(names)
    assert all(flat[names.index(name)] is value for name, value in case.items())


def test_a_call_with_wrong_arguments_is_refused() -> None:
    take_last = op_of("take_last").signature
    for arguments, named in (((1, 2), {}), ((1, 2, 3, 4), {}), ((1, 2), {"out": 3}), ((1, 2, 3), {"out_BH": 3})):
        with pytest.raises(TypeError):
            take_last.flatten(arguments, named)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in op.fused_names if "linear" not in op.name])
def test_fakes_of_operators_are_the_results_of_the_reference(op: KernelOp, name: str) -> None:
    """A fused linear layer is no operator itself: it chooses one."""
    for case in cases(op):
        with FakeTensorMode() as mode:
            fake = {key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for key, value in case.items()}
            found, expected = op.call(op.implementation(name), fake), op.call(op.reference, fake)
        if expected is None:
            assert found is None
            continue
        for f, e in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
            assert (f.shape, f.dtype, f.device) == (e.shape, e.dtype, e.device) and f.is_contiguous()


@pytest.mark.parametrize("op", BY_OP)
def test_dtypes_are_annotated(op: KernelOp) -> None:
    """Of every argument but the fields of packed weights, whose formats differ; a plain tensor is of floating point."""
    dtypes = {
        one.name: one.dtype for one in op.signature.arguments if one.group not in ("weight", "gate_up", "down") and one.dtype is not None
    }
    for case in cases(op):
        for name, dtype in dtypes.items():
            if isinstance(value := case.get(name), torch.Tensor):
                assert value.dtype == dtype, name


def test_a_case_without_data_has_the_shapes_of_its_names() -> None:
    commit = op_of("commit_rows")
    sizes = {"B": 2, "N": 3, "A": 4, "Ac": 9, "J": 6, "Z": 3, "R": 5, "F": 7}
    case = commit.without_data(sizes, feature_BNF=torch.bfloat16, append=True)
    shapes = {key: list(value.shape) for key, value in case.items() if isinstance(value, torch.Tensor)}
    assert shapes["window_token_RAc"] == [5, 9] and shapes["cycle_1"] == [1] and shapes["window_feature_RAcF"] == [5, 9, 7]
    assert case["history_RL"] is None and case["output_count_RV"] is None, "no L and no V"
    assert (case["feature_BNF"].dtype, case["seq_len_R"].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(KeyError, match="append"):
        commit.without_data(sizes)
    with pytest.raises(KeyError, match="lane_row_B"):
        commit.without_data({}, append=True)


def test_cold_import_builds_nothing() -> None:
    code = (
        "import dataclasses, sys, subprocess; subprocess.Popen = None; import graphspec.kernels as k; "
        "assert [op.name for op in k.OPS] == [f.name for f in dataclasses.fields(k.KernelSet) if not f.kw_only]; "
        "bad = {'triton', 'graphspec.kernels.native'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_select_kernels() -> None:
    reference = {op.name: op.reference for op in OPS}
    for kernels in (select_kernels("reference", "auto", "cpu"), select_kernels("compiled", "auto", "cuda:0")):
        for name, function in reference.items():
            assert getattr(kernels, name) is function
    for kernels in (select_kernels("compiled", "auto", "cpu"), select_kernels("reference", "native", "cpu")):
        assert kernels.tree_attention is not reference["tree_attention"]
        assert kernels.chunk_attention is not reference["chunk_attention"]
    assert kernels.tree_walk is reference["tree_walk"], "native attention alone"
    assert select_kernels("compiled", "auto", "cpu").tree_walk is not reference["tree_walk"]
    assert select_kernels("compiled", "reference", "cpu").tree_attention is reference["tree_attention"]


def test_only_the_target_has_kernels_that_keep_the_law() -> None:
    """Layers that a draft has from it run as the target's, whichever network has them as a module."""
    fast, law = (select_kernels("fused", "auto", "cuda", dtype="bfloat16", numerics=numerics) for numerics in ("fast", "batch_invariant"))
    assert fast.for_drafts is fast
    for name in ("tree_attention", "chunk_attention", "latent_attention", "sum_squares", "head_product"):
        assert getattr(law, name) is op_of(name).implementation("invariant")
        assert getattr(law.for_drafts, name) is getattr(fast, name) is not getattr(law, name)
    target, draft = nn.ModuleDict({"head": RMSNorm(4, 1e-5)}), nn.ModuleDict({"own": RMSNorm(4, 1e-5)})
    draft["head"] = target["head"]
    use_kernels(law, target, draft)
    assert [module.sum_squares is law.sum_squares for module in (target["head"], draft["head"], draft["own"])] == [True, True, False]


@pytest.mark.parametrize(
    ("mode", "attention", "device", "words"),
    [
        ("quick", "auto", "cpu", ("quick", "reference, compiled, fused")),
        ("compiled", "fused", "cuda", ("kernels.attention", "fused", "kernels.mode=compiled")),
        ("compiled", "native", "cuda", ("native", "CPU only")),
        ("compiled", "flash", "cpu", ("flash", "native")),
    ],
)
def test_select_kernels_refuses(mode: str, attention: str, device: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        select_kernels(mode, attention, device)
    assert all(word in str(error.value) for word in words)


def test_unknown_implementation_names_the_known() -> None:
    with pytest.raises(ConfigError, match="reference, native"):
        op_of("tree_attention").implementation("triton")


@pytest.mark.parametrize(
    ("length", "k", "compiled"),
    [
        *((1, 1, False), (7, 7, False), (9, 3, False), (300, 5, False), (40, 25, False), (5, 0, False)),
        *(pytest.param(*case, marks=pytest.mark.kernels) for case in [(7, 5, True), (300, 3, True)]),
    ],
)
def test_stable_topk_orders_ties_by_index(length: int, k: int, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randint(-2, 3, (6, length), generator=generator).float()
    x[1] = -torch.inf
    x[2, ::2] = torch.nan
    x[3, 1:] = -torch.inf
    x[4] = torch.where(torch.arange(length) % 2 == 0, 0.0, -0.0)
    function = torch.compile(stable_topk, fullgraph=True, dynamic=False) if compiled else stable_topk
    values, index = function(x, k)
    assert values.shape == index.shape == (6, k)
    for row, found, kept in zip(x.tolist(), index.tolist(), values.tolist(), strict=True):
        clean = [-math.inf if math.isnan(v) else v for v in row]
        expected = sorted(range(length), key=lambda i, clean=clean: (-clean[i], i))[:k]
        assert found == expected
        assert kept == [clean[i] for i in expected]


def test_tree_attention_sees_what_the_contract_says() -> None:
    """One query at a time through torch's own dense attention over the visible slots only."""
    op = op_of("tree_attention")
    for case in cases(op, 3):
        out = op.reference(**case)
        query, pool, table = case["query_BTQD"], case["kv_pool"][case["layer"]], case["table_BP"].long()
        size, repeat = pool.shape[2], query.shape[2] // pool.shape[3]
        visible = visible_slots(case["prefix_begin_BT"], case["prefix_end_B"], case["ancestors_BTX"], table.shape[1] * size)
        for lane in range(query.shape[0]):
            for token in range(query.shape[1]):
                slot = visible[lane, token].nonzero()[:, 0]
                rows = pool[:, table[lane, slot // size], slot % size].repeat_interleave(repeat, 2)
                score = torch.einsum("qd,lqd->ql", query[lane, token], rows[0]) * case["scale"]
                if cap := case.get("softcap", 0.0):
                    score = cap * torch.tanh(score / cap)
                sink = case.get("sink_Q", torch.full(query.shape[2:3], -torch.inf))[:, None]  # a key without a value
                weight = torch.cat((score, sink), 1).softmax(-1)[:, :-1] if len(slot) else score
                expected = torch.einsum("ql,lqd->qd", weight, rows[1])
                torch.testing.assert_close(out[lane, token], expected, rtol=1e-5, atol=1e-5)


def test_draft_topk_scores_with_the_keys_that_drew() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(3, 2, 11, generator=generator), torch.arange(11) * 3
    temperature, seed, position = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([5, -6, 7]), torch.tensor([1, 2, 3])
    noise = gumbel_noise(seed, position[:, None], ids)
    draft_topk = op_of("draft_topk").reference
    logprob, token = draft_topk(logits, 4, ids, seed, position, temperature)
    for lane in range(3):
        keys = logits[lane] if lane == 0 else logits[lane] + temperature[lane] * noise[lane]
        expected, index = keys.log_softmax(-1).topk(4)
        torch.testing.assert_close(logprob[lane], expected)
        assert torch.equal(token[lane], 3 * index)


def test_draft_topk_of_a_dead_row_is_impossible_not_nan() -> None:
    draft_topk = op_of("draft_topk").reference
    logprob, token = draft_topk(torch.tensor([[[torch.nan] * 5, [torch.inf] * 4 + [1.0]]]), 2, None, None, None, None)
    assert logprob.tolist() == [[[-math.inf] * 2, [0.0, -math.inf]]]
    assert token.tolist() == [[[0, 1], [4, 0]]]


def test_mix32_is_a_bijection_on_a_sample_and_matches_c() -> None:
    assert mix32(torch.tensor([0, 1, 2, 0xFFFFFFFF])).tolist() == [_mix(x) for x in (0, 1, 2, 0xFFFFFFFF)]
    assert mix32(torch.arange(1 << 18)).unique().numel() == 1 << 18


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _hash(seed: int, position: int, token: int) -> int:
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    a = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ position)
    b = _mix(_mix(_mix(position ^ 0x7F4A7C15) ^ low) ^ high)
    return _mix(_mix(token ^ a) + b & 0xFFFFFFFF)


def test_counter_hash_equals_python_integers() -> None:
    seeds, positions, tokens = [0, 1, -1, 2**63 - 1, -(2**63), 1 << 32], [[0, 7]] * 6, [0, 1, 128255]
    found = counter_hash(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens))
    assert found.tolist() == [[[_hash(s, p, t) for t in tokens] for p in (0, 7)] for s in seeds]


GOLDEN = [
    [[3559323298, 2856837032, 2230910891], [2151434563, 1394845487, 2721214510]],
    [[2316816848, 3336117547, 1477562608], [4218203801, 1250622464, 2527290546]],
    [[474661382, 2296375886, 1054695404], [3701889043, 3061212086, 2816563404]],
]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.kernels)])
def test_counter_hash_golden(compiled: bool) -> None:
    """These bits are an interface: recorded outputs depend on them."""
    function = torch.compile(counter_hash, fullgraph=True, dynamic=False) if compiled else counter_hash
    found = function(torch.tensor([0, 1234567890123456789, -1]), torch.tensor([[0, 1], [5, 4096], [2, 3]]), torch.tensor([0, 1, 50000]))
    assert found.tolist() == GOLDEN


@pytest.mark.kernels
def test_inductor_traces_every_mixer_of_the_hash_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inlined into each other they are tens of thousands of operations, and a cycle that samples takes ten minutes to compile."""
    traced: list[int] = []
    init = loop_body.LoopBody.__init__

    def watch(self: Any, *inputs: Any, **keys: Any) -> None:
        init(self, *inputs, **keys)
        traced.append(len(self.root_block.graph.nodes))

    monkeypatch.setattr(loop_body.LoopBody, "__init__", watch)
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(gumbel_noise, fullgraph=True, dynamic=False)(torch.arange(3), torch.arange(6).view(3, 2), torch.arange(50))
    assert 0 < max(traced) < 1500 and sum(traced) < 6000


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(4), torch.arange(8).expand(4, 8), torch.arange(8000)).double()
    count = noise.numel()
    mean, var = 0.5772156649015329, math.pi**2 / 6
    assert abs(noise.mean() - mean) < 5 * math.sqrt(var / count)
    assert abs(noise.var() - var) < 5 * var * math.sqrt(4.4 / count)
    # Kolmogorov-Smirnov against exp(-exp(-x)).
    cdf = torch.exp(-torch.exp(-noise.flatten().sort().values))
    step = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert (cdf - step).abs().max() < 2.0 / math.sqrt(count)


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import graphspec.kernels.sampling.noise as module

    ends = torch.tensor([[[0, 1, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFF00]]])
    monkeypatch.setattr(module, "counter_hash", lambda *_: ends)
    noise = module.gumbel_noise(torch.zeros(1), torch.zeros(1, 1), torch.zeros(5))
    assert noise.isfinite().all() and noise.min() > -2.82 and noise.max() < 22.88


def test_hash_bits_are_fair_and_avalanche() -> None:
    seeds, positions, tokens = torch.arange(16), torch.arange(32).expand(16, 32), torch.arange(256)
    bits = counter_hash(seeds, positions, tokens)
    count = bits.numel()
    ones = ((bits[..., None] >> torch.arange(32)) & 1).flatten(0, -2).double().sum(0)
    assert ((ones - count / 2) ** 2 / (count / 4)).sum() < 62.5  # chi-square, 32 degrees of freedom, p = 0.001
    buckets = torch.bincount(bits.flatten() >> 24, minlength=256).double()
    assert ((buckets - count / 256) ** 2 / (count / 256)).sum() < 330.5  # 255 degrees of freedom, p = 0.001
    base = counter_hash(seeds, positions, tokens)
    for changed in (
        counter_hash(seeds ^ 1, positions, tokens),
        counter_hash(seeds ^ (1 << 45), positions, tokens),
        counter_hash(seeds, positions ^ 1, tokens),
        counter_hash(seeds, positions, tokens ^ 1),
    ):
        flips = ((base ^ changed)[..., None] >> torch.arange(32)) & 1
        assert (flips.double().flatten(0, -2).mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(count / 2)


def test_noise_of_neighbours_is_uncorrelated() -> None:
    noise = gumbel_noise(torch.arange(8), torch.arange(16).expand(8, 16), torch.arange(1024)).double()
    noise = (noise - noise.mean()) / noise.std()
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[..., 1:], noise[..., :-1])):
        assert abs((a * b).mean()) < 5 / math.sqrt(a.numel())


def test_argmax_with_noise_draws_from_softmax() -> None:
    logits, temperature = torch.tensor([1.0, 0.0, -0.5, 2.0, 0.3]), 0.7
    noise = gumbel_noise(torch.arange(200), torch.arange(100).expand(200, 100), torch.arange(5))
    drawn = (logits + temperature * noise).argmax(-1).flatten()
    expected = (logits / temperature).softmax(-1).double() * drawn.numel()
    assert ((torch.bincount(drawn, minlength=5) - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p = 0.001
