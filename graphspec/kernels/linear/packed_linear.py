"""Linear layer of a few rows whose weight has low precision."""

from __future__ import annotations

from torch import Generator, Tensor, bfloat16, float8_e4m3fn, float16, float32, int8, rand, randint, randn, uint8

from ..op import Case, KernelOp
from .linear import Hidden, linear
from .packed import CODES, Packed, dequantise


def packed_linear(
    x: Hidden,
    weight: Packed,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Hidden | None = None,
    gated: bool = False,
    float32: bool = False,
) -> Hidden:
    """:func:`~graphspec.kernels.linear.linear.linear` of the weight that :func:`~graphspec.kernels.linear.packed.dequantise` gives.

    An implementation converts codes where it uses them and computes exactly what its own product of the dequantised weight does, bit for
    bit: every value is rounded once to the dtype of ``x``, and products are added in the same order.

    Args:
        x: ``[..., K]``, or a stream of that shape.
        weight: ``[N, K]``.
        bias, norm_weight, norm_eps, norm_offset, residual, gated, float32: as of ``linear``.

    Returns:
        As ``linear``.
    """
    values = dequantise(weight, (x if isinstance(x, Tensor) else x.hidden).dtype)
    return linear(x, values, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32)


def _cases(generator: Generator) -> list[Case]:
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


OP = KernelOp(packed_linear, _cases, native="native", exact=False)
