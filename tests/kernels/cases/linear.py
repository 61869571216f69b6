"""Small inputs of the ops of ``graphspec.kernels.linear``, odd sizes included, by name; drawn on the CPU."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, bfloat16, float8_e4m3fn, float16, float32, int8, rand, randint, randn, uint8

from graphspec.kernels.linear.packed import CODES
from graphspec.kernels.op import Case


def linear(generator: Generator) -> list[Case]:
    def case(rows: tuple[int, ...], channels: int, outputs: int, *parts: str) -> Case:
        made: Case = {
            "x": randn(*rows, channels, generator=generator),
            "weight": randn(outputs, channels, generator=generator) / channels**0.5,
        }
        if "bias" in parts:
            made["bias"] = randn(outputs, generator=generator)
        if "norm" in parts or "offset" in parts:
            made |= {"norm_weight": randn(channels, generator=generator), "norm_eps": 1e-5, "norm_offset": "offset" in parts}
        if "gated" in parts:
            made["gated"] = True
        if "residual" in parts:
            made["residual"] = randn(*rows, outputs // 2 if "gated" in parts else outputs, generator=generator)
        return made

    return [
        case((1,), 33, 17),
        case((2, 3), 48, 40, "norm"),
        case((16,), 20, 130, "residual"),
        case((7,), 8, 16, "norm", "gated"),
        case((1,), 64, 1100, "bias", "residual"),
        case((13,), 96, 900, "offset", "gated", "bias"),
        case((5,), 40, 24, "norm", "residual", "bias"),
    ]


def moe_mlp(generator: Generator) -> list[Case]:
    def case(
        tokens: int, topk: int, experts: int, hidden: int, width: int, *, only: int | None = None, gated: bool = True,
        clamped: bool = False, gelu: bool = False,
    ) -> Case:  # fmt: skip
        index = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
        if only is not None:
            index[:, 0] = only
        if tokens > 2:
            index[1] = -1
        made: Case = {
            "x_TH": torch.randn(tokens, hidden, generator=generator),
            "index_TK": index,
            "weight_TK": torch.rand(tokens, topk, generator=generator),
            "gate_up_EFH": torch.randn(experts, (1 + gated) * width, hidden, generator=generator) / hidden**0.5,
            "down_EHF": torch.randn(experts, hidden, width, generator=generator) / width**0.5,
        }
        made |= {"gelu": True} if gelu else {}
        return made | (_clamped(experts, (1 + gated) * width, hidden, generator) if clamped else {})

    return [
        case(1, 1, 1, 8, 4),
        case(3, 2, 9, 33, 17),
        case(5, 3, 4, 40, 24),
        case(17, 1, 3, 24, 40, only=2),
        case(2, 8, 16, 70, 65),
        case(3, 2, 9, 33, 17, gated=False),
        case(17, 1, 3, 24, 40, only=2, gated=False),
        case(3, 2, 9, 33, 17, clamped=True),
        case(17, 2, 3, 24, 40, clamped=True),
        case(3, 2, 9, 33, 17, gelu=True),
        case(17, 2, 3, 24, 40, gelu=True),
    ]


def _clamped(experts: int, entering: int, hidden: int, generator: Generator) -> Case:
    """Biases, and a limit that some numbers exceed."""
    return {
        "gate_up_bias_EF": torch.randn(experts, entering, generator=generator),
        "down_bias_EH": torch.randn(experts, hidden, generator=generator),
        "alpha": 1.702,
        "limit": 0.75,
    }


def packed_moe_mlp(generator: Generator) -> list[Case]:
    def weight(name: str, outputs: int, channels: int, code: str, group: int, kind: str) -> Case:
        groups, bits = -(-channels // group), 4 if code in ("int4", "uint4", "e2m1") else 8
        bytes_ = randint(0, 256, (outputs, channels * bits // 8), generator=generator, dtype=uint8)
        codes = randn(outputs, channels, generator=generator).to(float8_e4m3fn) if code == "e4m3" else bytes_.view(CODES[code])
        largest = {"int8": 128, "e4m3": 3, "e2m1": 6}.get(code, 16)
        made = {"codes": codes, "code": code, "group": group, "scales": rand(outputs, groups, generator=generator) / largest}
        if kind == "powers":
            made["scales"] = randint(121, 126, (outputs, groups), generator=generator, dtype=uint8).view(torch.float8_e8m0fnu)
        elif kind == "global":
            made |= {"scales": made["scales"].to(float8_e4m3fn), "super_scales": rand(outputs, 1, generator=generator)}
        elif kind == "zeros":
            made |= {"scales": made["scales"].to(float16), "zeros": randint(0, 16, (outputs, groups), generator=generator, dtype=uint8)}
        else:
            made["scales"] = made["scales"].to(bfloat16)
        return {f"{name}_{field}": value for field, value in made.items()}

    def case(
        tokens: int, topk: int, experts: int, hidden: int, width: int, code: str, group: int, kind: str = "", *, gated: bool = True,
        clamped: bool = False, gelu: bool = False,
    ) -> Case:  # fmt: skip
        index = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
        if tokens > 2:
            index[1] = -1
        return {
            **({"gelu": True} if gelu else {}),
            "x_TH": randn(tokens, hidden, generator=generator),
            "index_TK": index,
            "weight_TK": rand(tokens, topk, generator=generator),
            **weight("gate_up", experts * (1 + gated) * width, hidden, code, group, kind),
            **weight("down", experts * hidden, width, code, group, kind),
            **(_clamped(experts, (1 + gated) * width, hidden, generator) if clamped else {}),
        }

    return [
        case(1, 2, 5, 64, 32, "e2m1", 32, "powers", clamped=True),
        case(3, 2, 9, 96, 64, "e2m1", 32, "powers", clamped=True),
        case(17, 2, 3, 32, 96, "e2m1", 32, "powers", clamped=True),
        case(5, 3, 4, 48, 32, "e2m1", 16, "global"),
        case(3, 2, 9, 70, 34, "e4m3", 16),
        case(17, 1, 3, 40, 24, "e4m3", 128),
        case(4, 2, 6, 64, 32, "int4", 32),
        case(4, 2, 6, 64, 32, "uint4", 32, "zeros", gated=False),
        case(2, 2, 3, 33, 20, "int8", 33),
        case(3, 2, 9, 70, 34, "e4m3", 16, gelu=True),
    ]


def moe_route(generator: Generator) -> list[Case]:
    def case(
        tokens: int, experts: int, topk: int, groups: int, topk_groups: int, sigmoid: bool, normalize: bool, coarse: bool,
        corrected: bool = False,
    ) -> Case:  # fmt: skip
        logits = torch.randn(tokens, experts, generator=generator)
        if coarse:
            # Many ties.
            logits = logits.round()
        if not sigmoid:
            logits[-1, : experts // 2] = torch.nan
        valid = torch.rand(tokens, generator=generator) < 0.8
        return {
            "logits_TE": logits,
            "bias_E": torch.randn(experts, generator=generator).mul(4).round() / 4 if sigmoid or corrected else None,
            "valid_T": valid | (torch.arange(tokens) == 0),
            "topk": topk,
            "groups": groups,
            "topk_groups": topk_groups,
            "group_best": 2 if sigmoid else 1,
            "sigmoid": sigmoid,
            "normalize": normalize,
            "scaling": 2.5 if groups > 1 else 1.0,
        }

    return [
        case(1, 1, 1, 1, 1, False, True, False),
        case(5, 16, 6, 8, 3, True, True, False),
        case(3, 30, 4, 5, 2, False, False, True),
        case(4, 60, 8, 1, 1, False, True, True),
        case(7, 64, 8, 8, 4, True, True, False),
        case(2, 6, 6, 3, 3, True, False, False),
        case(6, 24, 5, 1, 1, False, True, False, corrected=True),
    ]


def packed_linear(generator: Generator) -> list[Case]:
    def case(rows: tuple[int, ...], channels: int, outputs: int, code: str, group: int, *parts: str) -> Case:
        groups = -(-channels // group)

        def factors(dtype: object, columns: int = groups) -> Tensor:
            return (rand(outputs, columns, generator=generator) / 4).to(dtype)  # type: ignore[call-overload]

        bits = 4 if code in ("int4", "uint4", "e2m1") else 8
        bytes_ = randint(0, 256, (outputs, channels * bits // 8), generator=generator, dtype=uint8)
        if code == "e4m3":
            codes = randn(outputs, channels, generator=generator).to(float8_e4m3fn)
        else:
            codes = bytes_.view(int8) if CODES[code] is int8 else bytes_
        made: Case = {"x": randn(*rows, channels, generator=generator), "codes": codes, "code": code, "group": group}
        made["scales"] = factors(float16)
        if "bfloat16" in parts:
            made["scales"] = factors(bfloat16)
        if "zeros" in parts:
            made["zeros"] = randint(0, 16, (outputs, groups), generator=generator, dtype=uint8)
        if "minimums" in parts:
            made["minimums"] = -factors(float16)
        if "super" in parts:
            made["scales"] = randint(0, 64, (outputs, groups), generator=generator, dtype=uint8)
            made["super_scales"] = factors(float16, 1)
            made["minimums"] = randint(0, 64, (outputs, groups), generator=generator, dtype=uint8)
            made["super_minimums"] = -factors(float16, 1)
        if "global" in parts:
            made["scales"] = factors(float8_e4m3fn)
            made["super_scales"] = factors(float32, 1)
        if "bias" in parts:
            made["bias"] = randn(outputs, generator=generator)
        if "norm" in parts:
            made |= {"norm_weight": randn(channels, generator=generator), "norm_eps": 1e-5, "norm_offset": False}
        if "gated" in parts:
            made["gated"] = True
        if "residual" in parts:
            made["residual"] = randn(*rows, outputs // 2 if "gated" in parts else outputs, generator=generator)
        return made

    return [
        case((1,), 64, 17, "uint4", 32, "minimums"),
        case((2, 3), 48, 40, "int8", 32, "norm", "residual"),
        case((5,), 256, 34, "int4", 128, "bfloat16", "gated"),
        case((16,), 70, 21, "uint4", 32, "zeros", "bias"),
        case((7,), 256, 16, "uint4", 32, "super"),
        case((3,), 256, 19, "int8", 16),
        case((4,), 64, 33, "e2m1", 16, "global", "residual"),
        case((1,), 33, 20, "e4m3", 33, "norm", "gated"),
        case((6,), 130, 20, "e4m3", 128, "bfloat16"),
        case((2,), 64, 8, "uint8", 32, "minimums"),
    ]


def sum_squares(generator: Generator) -> list[Case]:
    heads = randn(2, 3, 4 * 18, generator=generator)
    return [
        {"x": randn(5, 33, generator=generator)},
        {"x": randn(2, 3, 70, generator=generator)},
        {"x": heads[..., : 3 * 18].unflatten(-1, (3, 18))},
        {"x": randn(1, 1, 4100, generator=generator)},
        {"x": randn(2, 40, 3, generator=generator).transpose(1, 2)},
    ]


def head_product(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, heads: int, inputs: int, outputs: int, dense: str) -> Case:
        # Queries lie next to what is rotated.
        x = randn(lanes, tokens, heads, inputs + 5, generator=generator)[..., :inputs]
        weight = randn(heads, *((inputs, outputs) if dense == "outputs" else (outputs, inputs)), generator=generator) / inputs**0.5
        return {"x_BTQK": x, "weight_QKO": weight if dense == "outputs" else weight.transpose(1, 2)}

    return [
        case(1, 1, 2, 8, 24, "outputs"),
        case(2, 3, 3, 70, 33, "outputs"),
        case(1, 5, 4, 40, 130, "inputs"),
        case(3, 25, 2, 24, 10, "inputs"),
    ]
