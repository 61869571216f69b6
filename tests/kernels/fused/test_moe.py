"""Mixture of experts: routers and experts against transformers, and the kernels with few, many, skewed or no choices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels.fused import launch
from graphspec.kernels.linear.fused import moe_mlp as fused
from graphspec.kernels.linear.fused import moe_route as fused_route
from graphspec.kernels.linear.fused import packed_moe_mlp as packed
from graphspec.kernels.linear.moe_mlp import moe_mlp
from graphspec.kernels.linear.moe_route import moe_route
from graphspec.kernels.linear.packed import Packed, dequantise
from tests.support.float_law import assert_float_law, widened

pytestmark = pytest.mark.usefixtures("nan_memory")


def _hf_router(name: str, experts: int, topk: int, groups: int, topk_groups: int, scaling: float, normalize: bool) -> Any:
    """A router of transformers whose logits are its input."""
    import transformers.models.deepseek_v2.modeling_deepseek_v2 as v2
    import transformers.models.deepseek_v3.modeling_deepseek_v3 as v3
    import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss
    import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen

    config = SimpleNamespace(
        num_experts_per_tok=topk, num_experts=experts, num_local_experts=experts, hidden_size=experts, n_group=groups,
        topk_group=topk_groups, routed_scaling_factor=scaling, norm_topk_prob=normalize,
        topk_method="group_limited_greedy" if groups > 1 else "greedy",
    )  # fmt: skip
    router = {
        "v2": v2.DeepseekV2TopkRouter,
        "v3": v3.DeepseekV3TopkRouter,
        "qwen3": qwen.Qwen3MoeTopKRouter,
        "gpt-oss": gpt_oss.GptOssTopKRouter,
    }[name](config)
    router.weight.data = torch.eye(experts)
    return router


@pytest.mark.parametrize("route", [moe_route, fused_route.OP], ids=["reference", "fused"])
@pytest.mark.parametrize(
    ("name", "experts", "topk", "groups", "topk_groups", "scaling", "normalize"),
    [
        ("v3", 256, 8, 8, 4, 2.5, True),
        ("v3", 24, 5, 4, 2, 1.0, False),
        ("v3", 20, 4, 1, 1, 2.0, True),
        ("v2", 64, 6, 1, 1, 1.0, False),
        ("v2", 160, 6, 8, 3, 16.0, False),
        ("qwen3", 128, 8, 1, 1, 1.0, True),
        ("qwen3", 60, 4, 1, 1, 1.0, False),
        ("gpt-oss", 128, 4, 1, 1, 1.0, True),
        ("gpt-oss", 5, 5, 1, 1, 1.0, True),
    ],
)
def test_routes_as_transformers_does(
    route: Callable[..., tuple[Tensor, Tensor]],
    name: str,
    experts: int,
    topk: int,
    groups: int,
    topk_groups: int,
    scaling: float,
    normalize: bool,
) -> None:
    router = _hf_router(name, experts, topk, groups, topk_groups, scaling, normalize)
    bias = None
    if name == "v3":
        bias = torch.randn(experts) * 0.3
        router.e_score_correction_bias.copy_(bias)
    logits = torch.randn(9, experts)
    with torch.no_grad():
        _, expected_weight, expected_index = router(logits)
    best = 2 if name == "v3" else 1
    valid = torch.ones(9, dtype=torch.bool)
    index, weight = route(logits, bias, valid, topk, groups, topk_groups, best, name == "v3", normalize, scaling)
    # transformers leaves the order of the chosen open.
    place, expected_place = index.argsort(-1), expected_index.argsort(-1)
    assert torch.equal(index.gather(1, place), expected_index.gather(1, expected_place))
    torch.testing.assert_close(weight.gather(1, place), expected_weight.gather(1, expected_place))


@pytest.mark.parametrize("route", [moe_route, fused_route.OP], ids=["reference", "fused"])
def test_route_orders_ties_and_survives_what_is_not_finite(route: Callable[..., tuple[Tensor, Tensor]]) -> None:
    logits = torch.zeros(4, 12)
    logits[0, 7] = 1.0
    logits[1] = torch.nan
    logits[2, ::2] = -torch.inf
    valid = torch.tensor([True, True, True, False])
    index, weight = route(logits, None, valid, 4, 1, 1, 1, False, True, 1.0)
    assert index.tolist() == [[7, 0, 1, 2], [0, 1, 2, 3], [1, 3, 5, 7], [-1] * 4]
    assert weight[1:].tolist() == [[0.0] * 4, [0.25] * 4, [0.0] * 4]
    index, _ = route(logits, torch.zeros(12), valid, 4, 3, 1, 2, True, True, 1.0)
    assert index[0].tolist() == [7, 4, 5, 6]


def call(tokens: int, topk: int, experts: int, hidden: int, width: int, seed: int = 0, *, gated: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x_TH": torch.randn(tokens, hidden, generator=generator),
        "index_TK": torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]),
        "weight_TK": torch.rand(tokens, topk, generator=generator),
        "gate_up_EFH": torch.randn(experts, (1 + gated) * width, hidden, generator=generator) / hidden**0.5,
        "down_EHF": torch.randn(experts, hidden, width, generator=generator) / width**0.5,
    }


def assert_right(case: dict[str, Any]) -> Tensor:
    found = fused.OP(**case)
    assert_float_law(found, moe_mlp(**case), moe_mlp(**widened(case)))
    counters = launch.semaphores(torch.device("cpu"), 1)
    assert not counters.any(), "a counter was not given back at 0"
    return found


def assert_theirs(module: torch.nn.Module, case: dict[str, Any]) -> None:
    with torch.no_grad():
        expected = module(case["x_TH"], case["index_TK"], case["weight_TK"])
    torch.testing.assert_close(moe_mlp(**case), expected)
    torch.testing.assert_close(fused.OP(**case), expected)


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(3, 2, 16), (6, 3, 4)])
def test_experts_are_those_of_transformers(tokens: int, topk: int, experts: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    case = call(tokens, topk, experts, 20, 12)
    config = DeepseekV3Config(hidden_size=20, moe_intermediate_size=12, n_routed_experts=experts, num_experts_per_tok=topk)
    config._experts_implementation = "eager"
    module = DeepseekV3Experts(config)
    module.gate_up_proj.data, module.down_proj.data = case["gate_up_EFH"], case["down_EHF"]
    assert_theirs(module, case)


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(3, 2, 16), (6, 3, 4)])
def test_experts_without_a_gate_are_those_of_transformers(tokens: int, topk: int, experts: int) -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    case = call(tokens, topk, experts, 20, 12, gated=False)
    config = NemotronHConfig(hidden_size=20, moe_intermediate_size=12, n_routed_experts=experts, num_experts_per_tok=topk)
    config._experts_implementation = "eager"
    module = NemotronHExperts(config)
    module.up_proj.data, module.down_proj.data = case["gate_up_EFH"], case["down_EHF"]
    assert_theirs(module, case)


GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "relu2"])


@GATED
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "hidden", "width"),
    [(1, 1, 1, 5, 3), (1, 8, 8, 64, 32), (2, 1, 40, 65, 33), (19, 2, 2, 130, 31), (9, 8, 12, 63, 65)],
)
def test_odd_sizes(tokens: int, topk: int, experts: int, hidden: int, width: int, gated: bool) -> None:
    assert_right(call(tokens, topk, experts, hidden, width, gated=gated))


@GATED
def test_all_tokens_on_one_expert_and_the_others_never_read(gated: bool) -> None:
    case = call(37, 1, 3, 24, 16, gated=gated)
    case["index_TK"][:] = 1
    for name in ("gate_up_EFH", "down_EHF"):
        case[name][[0, 2]] = torch.nan
    assert_right(case)


@GATED
@pytest.mark.parametrize("experts", [4, 30])
def test_tokens_without_experts(experts: int, gated: bool) -> None:
    case = call(6, 3, experts, 24, 16, gated=gated)
    case["index_TK"][[0, 3]] = -1
    case["index_TK"][5, 1] = -1
    case["weight_TK"][[0, 3]] = torch.nan
    case["x_TH"][3] = torch.nan
    out = assert_right(case)
    assert not out[[0, 3]].any()


def test_more_choices_than_a_program_looks_through() -> None:
    case = call(260, 2, 3, 24, 16)
    case["index_TK"][::7] = -1
    assert case["index_TK"].numel() > fused.SCANNED
    assert_right(case)


@GATED
def test_bits_of_a_token_do_not_depend_on_the_batch(gated: bool) -> None:
    """Alone a program serves a choice, together it serves an expert and more tokens than a block holds."""
    case = call(18, 2, 3, 40, 24, gated=gated)
    out = fused.OP(**case)
    assert torch.equal(fused.OP(**case), out)
    for token in (0, 7, 17):
        one = {key: value[token : token + 1] if key.endswith(("TH", "TK")) else value for key, value in case.items()}
        assert torch.equal(fused.OP(**one)[0], out[token])


def test_half_precision() -> None:
    case = {k: v.half() if v.is_floating_point() and k != "weight_TK" else v for k, v in call(4, 2, 5, 48, 32).items()}
    oracle = moe_mlp(**widened(case))
    out = fused.OP(**case)
    assert out.dtype == torch.float16
    assert (out.double() - oracle).abs().max() <= 2e-3 * oracle.abs().max()


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(3, 2, 16), (6, 3, 4), (260, 2, 3)])
def test_clamped_experts_with_biases_are_those_of_transformers(tokens: int, topk: int, experts: int) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    case = call(tokens, topk, experts, 20, 12) | clamped(experts, 20, 12)
    config = GptOssConfig(hidden_size=20, intermediate_size=12, num_local_experts=experts, swiglu_alpha=1.5, swiglu_limit=0.5)
    config._experts_implementation = "eager"
    module = GptOssExperts(config)
    turns = torch.arange(24).view(2, 12).t().flatten()  # gate, up, gate, up, ...
    module.gate_up_proj.data = case["gate_up_EFH"][:, turns].transpose(1, 2)
    module.gate_up_proj_bias.data = case["gate_up_bias_EF"][:, turns]
    module.down_proj.data, module.down_proj_bias.data = case["down_EHF"].transpose(1, 2), case["down_bias_EH"]
    assert_theirs(module, case)


def clamped(experts: int, hidden: int, width: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "gate_up_bias_EF": torch.randn(experts, 2 * width, generator=generator),
        "down_bias_EH": torch.randn(experts, hidden, generator=generator),
        "alpha": 1.5,
        "limit": 0.5,
    }


def test_clamped_experts_keep_nan_and_its_token_to_themselves() -> None:
    case = call(4, 2, 3, 24, 16) | clamped(3, 24, 16)
    case["x_TH"][2] = torch.nan
    out = fused.OP(**case)
    assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("code", ["e2m1", "int4", "e4m3"])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 5), (9, 3), (300, 3)])
def test_codes_have_the_bits_of_their_numbers_in_16_bits(tokens: int, experts: int, code: str, dtype: torch.dtype) -> None:
    """Few tokens, an expert for each program, and sorted choices; widths that end inside a step."""
    generator = torch.Generator().manual_seed(tokens)
    hidden, width, bits = 160, 96, 8 if code == "e4m3" else 4

    def weight(rows: int, channels: int) -> Packed:
        codes = torch.randint(0, 256, (rows, channels * bits // 8), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 122, (rows, channels // 32), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        if code == "e4m3":
            numbers = torch.randn(rows, channels, generator=generator)
            return Packed(numbers.to(torch.float8_e4m3fn), scales.float(), code, 32)
        return Packed(codes, scales if code == "e2m1" else scales.float().bfloat16(), code, 32)

    case = {
        "x_TH": torch.randn(tokens, hidden, generator=generator).to(dtype),
        "index_TK": torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)]),
        "weight_TK": torch.rand(tokens, 2, generator=generator),
    }
    gate_up, down = weight(experts * 2 * width, hidden), weight(experts * hidden, width)
    further = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in clamped(experts, hidden, width).items()}
    numbers = (dequantise(one, dtype).unflatten(0, (experts, -1)) for one in (gate_up, down))
    expected = fused.OP(*case.values(), *numbers, **further)
    found = packed.OP(*case.values(), gate_up, down, **further)
    assert expected.isfinite().all() and expected.any()
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
