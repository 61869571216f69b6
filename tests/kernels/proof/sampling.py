"""Calls of the ops of ``graphspec.kernels.sampling`` in the shapes of real models, by file; their kernels are compiled ahead of time."""

from __future__ import annotations

from tests.kernels.proof.calls import AotCase, aot_case

AOT: dict[str, tuple[AotCase, ...]] = {}


AOT["filter_logits"] = (
    aot_case("vd32000", "filter_logits", {"B": 1, "T": 1, "V": 32000}),
    aot_case("v128256-t8", "filter_logits", {"B": 8, "T": 8, "V": 128256}),
)


AOT["noise"] = (
    aot_case("v128256-t8", "gumbel_noise", {"B": 8, "T": 8, "V": 128256}),
    aot_case("vd32000", "gumbel_noise", {"B": 1, "T": 1, "V": 32000}),
)


def _sample_tokens(name: str, lanes: int, rows: int, strict: bool = True) -> AotCase:
    absent = [] if "filtered" in name else ["top_k_B", "top_p_B", "min_p_B"]
    absent += ["temperature_B", "seed_B", "position_BT"] if "greedy" in name else []
    return aot_case(name, "sample_tokens", {"B": lanes, "T": rows, "V": 128256}, strict=strict, **dict.fromkeys(absent))


AOT["sample_tokens"] = (
    _sample_tokens("greedy-t1", 1, 1),
    _sample_tokens("greedy-n8-b8", 8, 8),
    _sample_tokens("noisy-n8", 1, 8),
    _sample_tokens("noisy-n64-b8", 8, 64),
    _sample_tokens("filtered-t1", 1, 1),
    _sample_tokens("filtered-n64-b8", 8, 64, strict=False),
)
