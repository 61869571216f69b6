"""Calls of the ops of ``graphspec.kernels.tree`` in the shapes of real models, by file; their kernels are compiled ahead of time."""

from __future__ import annotations

import torch
import triton

from graphspec.kernels.tree.commit_rows import RING_HEADER
from graphspec.kernels.tree.mail_apply import JOIN_WORDS
from tests.kernels.proof.calls import AotCase, aot_case

AOT: dict[str, tuple[AotCase, ...]] = {}
ROWS = {"R": 65, "Ac": 8}


def _chain_layout(name: str, lanes: int, nodes: int) -> AotCase:
    sizes = {"B": lanes, "N": nodes, "X": triton.cdiv(nodes, 64), **ROWS}
    return aot_case(name, "chain_layout", sizes | ({"M": nodes - 1} if nodes > 1 else {}))


AOT["chain_layout"] = (_chain_layout("plain", 8, 1), _chain_layout("s7", 8, 8), _chain_layout("s127", 1, 128))


def _commit_rows(name: str, lanes: int, nodes: int, width: int, features: int = 0, capacity: int = 0, **optional: int) -> AotCase:
    """With a capacity the run is appended. ``optional``: sizes of optional row state."""
    sizes = {"B": lanes, "N": nodes, "A": width, "Ac": capacity or width, "J": width + RING_HEADER, "Z": 3, "R": 65, **optional}
    floats = dict.fromkeys(("feature_BNF", "window_feature_RAcF", "lookback_feature_RYF"), torch.bfloat16)
    return aot_case(name, "commit_rows", sizes | ({"F": features} if features else {}), append=capacity > 0, **floats)


AOT["commit_rows"] = (
    _commit_rows("eagle3-b1-s5-n8", 1, 8, 6, 3 * 4096),
    _commit_rows("eagle3-b8-s5-n64", 8, 64, 6, 3 * 4096),
    _commit_rows("eagle3-b8-s7-chain", 8, 8, 8, 3 * 4096),
    _commit_rows("eagle-b64-s5-n64-penalties", 64, 64, 6, 4096, V=128_256),
    _commit_rows("mtp-b8-heads3", 8, 4, 4, 4096, Y=2),
    _commit_rows("ngram-b8-n128-a128", 8, 128, 128, L=131_072),
    _commit_rows("plain-b8", 8, 1, 1),
    _commit_rows("eagle3-b64-append-c32", 64, 1, 6, 3 * 4096, capacity=32),
)


def _draft_level(name: str, lanes: int, topk: int, level: int, steps: int, num_words: int, beams: bool = True) -> AotCase:
    sizes = {"B": lanes, "E": topk if level > 1 else 1, "K": topk, "S": steps, "X": num_words, "M": topk + (steps - 1) * topk**2, "R": 9}
    return aot_case(name, "draft_level", sizes, level=level, beams=beams, shift=1)


AOT["draft_level"] = (
    _draft_level("k1", 1, 1, 2, 5, 1),
    _draft_level("k4-first", 1, 4, 1, 5, 1),
    _draft_level("k4-b8", 8, 4, 2, 5, 1),
    _draft_level("k8-first", 1, 8, 1, 5, 1),
    _draft_level("k8-b8", 8, 8, 3, 5, 1),
    _draft_level("k8-b8-last", 8, 8, 5, 5, 1, beams=False),
    _draft_level("k32-two-words", 8, 32, 2, 4, 2),
    _draft_level("k63-two-words", 1, 63, 2, 3, 2),
)


def _draft_topk(name: str, lanes: int, rows: int, vocab: int, topk: int, mapped: bool, noisy: bool) -> AotCase:
    absent = (() if mapped else ("target_token_Vd",)) + (() if noisy else ("seed_B", "position_B", "temperature_B"))
    return aot_case(name, "draft_topk", {"B": lanes, "T": rows, "Vd": vocab}, topk=topk, **dict.fromkeys(absent))


def _shard_topk(name: str, lanes: int, rows: int, topk: int, noisy: bool) -> AotCase:
    absent = () if noisy else ("temperature_B", "seed_B", "position_BT")
    return aot_case(name, "shard_topk", {"B": lanes, "T": rows, "Vr": 16032}, topk=topk, **dict.fromkeys(absent))


AOT["draft_topk"] = (
    _draft_topk("vd32000-t1-k8", 1, 1, 32000, 8, True, False),
    _draft_topk("vd32000-t8-k8-b8", 8, 8, 32000, 8, True, True),
    _draft_topk("vd32000-t1-k1", 1, 1, 32000, 1, True, False),
    _draft_topk("v128256-t8-k8", 1, 8, 128256, 8, False, False),
    _draft_topk("v128256-k32-b8", 8, 32, 128256, 32, False, True),
    _shard_topk("shard-t8-k8", 1, 8, 8, False),
    _shard_topk("shard-n8-k1-b8", 8, 8, 1, True),
)


def _draft_window(name: str, lanes: int, width: int, num_words: int = 1, capacity: int = 0, **optional: int) -> AotCase:
    sizes = {"B": lanes, "R": 9, "Ac": capacity or width, **optional}
    floats = dict.fromkeys(("window_feature_RAcF", "lookback_feature_RYF"), torch.bfloat16)
    return aot_case(name, "draft_window", sizes, shift=1, width=width, num_words=num_words, **floats)


AOT["draft_window"] = (
    _draft_window("llama-8b-a6", 1, 6, F=12288),
    _draft_window("llama-8b-b8-a6", 8, 6, F=12288),
    _draft_window("llama-8b-a16-no-features", 8, 16, num_words=2),
    _draft_window("deepseek-y3-a5", 8, 5, F=7168, Y=3),
    _draft_window("llama-8b-b8-a6-of-32", 8, 6, F=12288, capacity=32),
    _draft_window("llama-8b-b64-all-32", 64, 32, F=12288),
)


def _mail_apply(name: str, lanes: int, rows: int, updates: int, joins: int = 0) -> AotCase:
    sizes = {"B": lanes, "R": rows, "P": 514, "E": 8, "V": 128256}
    at = {"lanes_at": 0, "aborts_at": lanes, "pages_at": lanes + rows, "pages_end": lanes + rows + 3 * updates}
    words, joins_at = JOIN_WORDS + sizes["E"], at["pages_end"]
    mail = (torch.int64, joins_at + joins * words + 2053)
    absent = () if joins else ("truncation", "penalties")
    of_joins = {"joins_at": joins_at, "joins": joins, "join_words": words}
    return aot_case(name, "mail_apply", sizes, mail=mail, **at, **of_joins, **dict.fromkeys(absent))


AOT["mail_apply"] = (
    _mail_apply("llama-8b", 1, 2, 130),
    _mail_apply("llama-8b-b8", 8, 9, 131),
    _mail_apply("llama-8b-prompts-all-groups", 4, 9, 131, joins=4),
)


def _marginal_pool(lanes: int, steps: int, topk: int) -> AotCase:
    sizes = {"B": lanes, "S": steps, "K": topk, "M": topk + (steps - 1) * topk**2, "R": 9}
    return aot_case(f"b{lanes}-s{steps}-k{topk}", "marginal_pool", sizes)


AOT["marginal_pool"] = (
    _marginal_pool(1, 7, 1),
    _marginal_pool(1, 8, 8),
    _marginal_pool(8, 16, 7),
    _marginal_pool(1, 20, 16),
    _marginal_pool(1, 5, 63),
)


def _ngram_match(name: str, lanes: int, width: int, num_paths: int, depth: int) -> AotCase:
    sizes = {"B": lanes, "R": lanes + 1, "L": width, "M": num_paths * depth}
    return aot_case(name, "ngram_match", sizes, num_paths=num_paths, depth=depth, min_match=1, max_match=12)


AOT["ngram_match"] = (
    _ngram_match("l8192-k1-s6", 1, 8224, 1, 6),
    _ngram_match("l8192-b8-k4-s6", 8, 8224, 4, 6),
    _ngram_match("l8192-b8-k8-s8", 8, 8224, 8, 8),
    _ngram_match("l131072-b8-k32-s16", 8, 131072, 32, 16),
)


AOT["take_last"] = tuple(
    aot_case(name, "take_last", {"B": lanes, "T": 6, "H": 4096}, hidden_BTH=torch.bfloat16, out_BH=torch.bfloat16)
    for name, lanes in (("llama-8b-a6", 1), ("llama-8b-b8-a6", 8))
)


def _tree_build(lanes: int, steps: int, topk: int, nodes: int) -> AotCase:
    sizes = {"B": lanes, "M": topk + (steps - 1) * topk**2, "N": nodes, "X": triton.cdiv(nodes, 64), **ROWS}
    return aot_case(f"b{lanes}-s{steps}-k{topk}-n{nodes}", "tree_build", sizes, max_depth=steps)


SHAPES = ((1, 5, 4, 8), (8, 5, 8, 64), (8, 5, 10, 60), (8, 9, 8, 128), (1, 5, 32, 128), (1, 2, 127, 128))

AOT["tree_build"] = tuple(_tree_build(*shape) for shape in SHAPES)


def _tree_walk(name: str, lanes: int, nodes: int, width: int) -> AotCase:
    sizes = {"B": lanes, "N": nodes, "X": triton.cdiv(nodes, 64), "R": 65, "E": 8, "A": width}
    return aot_case(name, "tree_walk", sizes, draft_context=2048, **({} if "capped" in name else {"depth_cap_B": None}))


AOT["tree_walk"] = (
    _tree_walk("b1-s5-n8", 1, 8, 6),
    _tree_walk("b8-s5-n64", 8, 64, 6),
    _tree_walk("b8-s7-chain", 8, 8, 8),
    _tree_walk("b8-n128-a128-capped", 8, 128, 128),
)


AOT["verify_rows"] = tuple(
    aot_case(name, "verify_rows", {"B": lanes, "N": nodes, "X": triton.cdiv(nodes, 64), "R": 65})
    for name, lanes, nodes in (("n8", 1, 8), ("b8-n128", 8, 128))
)
