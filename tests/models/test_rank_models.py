"""Targets sharded over ranks, as threads of one process: logits against transformers, and what each rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphspec.errors import ConfigError
from graphspec.facts import read_model_facts
from graphspec.facts.sharding import Shard, sharding_of
from graphspec.models.decoder import Decoder
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, architecture_of, build_hf, write_hf
from tests.support.features import marked
from tests.support.float_law import assert_float_law
from tests.support.moe_checkpoints import build_mixture, mixture_of
from tests.support.rank_threads import count_numbers_read, run_ranks

from .test_models import in_float64

LENGTH = 24
TAPS = (0, 2)
FOUR = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "one-key-head-of-each": ("llama", {**FOUR, "num_key_value_heads": 4}),
    "copies-of-one-key-head": ("llama", {**FOUR, "num_key_value_heads": 1}),
    "key-heads-across-ranks": ("llama", {**FOUR, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}),
    "biases-tied": ("llama", {**FOUR, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qkv-bias": ("qwen2", {**FOUR, "num_key_value_heads": 2, "head_dim": None}),
    "norms-of-heads": ("qwen3", {**FOUR, "num_key_value_heads": 2}),
    "window": ("mistral", {**FOUR, "num_key_value_heads": 2, "sliding_window": 7}),
    "fused-tensors": ("phi3", {**FOUR, "num_key_value_heads": 2}),
    "norms-of-all-heads": ("olmo2", {**FOUR, "num_key_value_heads": 4}),
    "rotated-neighbours": ("glm4", {**FOUR, "num_key_value_heads": 1}),
    "norms-of-copied-heads": ("olmo2", {**FOUR, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}),
    "latent": ("deepseek_v2", {}),
    "latent-compressed-queries": ("deepseek_v3", {"attention_bias": True}),
    "sinks-and-biased-experts": ("gpt_oss", {}),
    "corrected-softmax": ("ernie4_5_moe", {}),
    "norms-of-all-heads-experts": ("olmoe", {"num_key_value_heads": 4}),
}
CASES = DENSE | MIXTURES


def build(name: str, path: Path) -> Any:
    family, overrides = CASES[name]
    model = build_mixture(family, **overrides) if name in MIXTURES else build_hf(family, **overrides)
    write_hf(model, path, shard_size="40KB" if name == "biases-tied" else None)
    return model


def architecture(name: str) -> str:
    """The class of transformers of a case."""
    return (mixture_of if name in MIXTURES else architecture_of)(CASES[name][0])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", marked(CASES, architecture, "ranks"))
def test_ranks_together_have_the_logits_of_transformers(name: str, size: int, tmp_path: Path) -> None:
    model = build(name, tmp_path)
    facts, token_BT = read_model_facts(tmp_path), torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    logits, _, calls = run_ranks(facts, size, TAPS, token_BT, lambda _: DenseAttention.prompt(2, LENGTH))
    blocks = 3 if CASES[name][0] in ("olmo2", "olmoe") else 2  # queries and keys are normed over all ranks
    assert calls == {"sums": 1 + blocks * facts.num_layers, "gathers": 1}
    with torch.inference_mode():
        theirs, exact = (each(token_BT, output_hidden_states=True) for each in (model, in_float64(model)))
    assert_float_law(logits, theirs.logits, exact.logits)
    # Two tokens may be closer than float32 tells apart, and which of them leads then depends on the processor.
    first, second = exact.logits.topk(2).values.unbind(-1)
    apart = first - second > 1e-5
    assert apart.sum() >= apart.numel() - 1
    assert torch.equal(logits.argmax(-1)[apart], theirs.logits.argmax(-1)[apart])


@pytest.mark.parametrize("name", ["biases-tied", "fused-tensors", "experts", "latent", "sinks-and-biased-experts"])
def test_a_rank_reads_its_part_of_the_bytes_and_no_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(name, tmp_path)
    facts, read = read_model_facts(tmp_path), count_numbers_read(monkeypatch)

    def loaded(rank: int, size: int) -> tuple[int, int]:
        read[0] = 0
        model = load_target(facts.of_rank(rank, size), (), LENGTH, torch.float32, "cpu")
        return read[0], sum(parameter.numel() for parameter in model.parameters())

    all_read, all_held = loaded(0, 1)
    assert all_read == all_held
    first, second = loaded(0, 2), loaded(1, 2)
    # 61 tokens: the second rank holds a row of zeros that is not in the file.
    padding = facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    assert first[0] == first[1] and second[0] == second[1] - padding
    assert first[0] < 0.75 * all_read


def test_pickled_checkpoints_are_cut_too(tmp_path: Path) -> None:
    build("fused-tensors", tmp_path)
    facts = read_model_facts(tmp_path)
    models = [load_target(facts.of_rank(1, 2), (), LENGTH, torch.float32, "cpu")]
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    models.append(load_target(facts.of_rank(1, 2), (), LENGTH, torch.float32, "cpu"))
    mine, theirs = (dict(model.named_parameters()) for model in models)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    build("one-key-head-of-each", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 20)  # as wide as one rank's
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj.*\[64, 40\].*\[64, 20\]"):
        load_target(read_model_facts(tmp_path).of_rank(0, 2), (), LENGTH, torch.float32, "cpu")


KEY_HEADS = [(1, 2, 8, 4, (2, 3)), (3, 4, 8, 2, (1,)), (0, 2, 6, 3, (0, 0, 1)), (1, 2, 6, 3, (1, 2, 2)), (2, 4, 12, 3, (1, 1, 2))]


@pytest.mark.parametrize(("rank", "size", "queries", "keys", "heads"), KEY_HEADS)
def test_key_heads_are_those_of_the_query_heads(rank: int, size: int, queries: int, keys: int, heads: tuple[int, ...]) -> None:
    own, group = queries // size, queries // keys
    sharding = sharding_of(rank, size, queries, keys)
    assert sharding.key_heads == heads
    run = own // len(heads)
    assert [heads[query // run] for query in range(own)] == [(rank * own + query) // group for query in range(own)]
    shard = sharding.key_shard(5)
    assert rows_of(shard) == [head * 5 + row for head in heads for row in range(5)] and shard.full_size == keys * 5


@pytest.mark.parametrize(("size", "queries", "keys"), [(2, 8, 4), (4, 8, 2), (2, 6, 3), (4, 12, 3), (6, 12, 4)])
def test_rows_stored_key_head_by_key_head(size: int, queries: int, keys: int) -> None:
    """Of each key head two rows; then of each of its query heads three rows of one projection, and then one of another."""
    group, own = queries // keys, queries // size
    names = [
        row
        for key in range(keys)
        for row in (
            *((key, "shared", 0, place) for place in range(2)),
            *((key, "wide", key * group + query, place) for query in range(group) for place in range(3)),
            *((key, "narrow", key * group + query, 0) for query in range(group)),
        )
    ]
    held: dict[int, int] = {}
    for rank in range(size):
        sharding = sharding_of(rank, size, queries, keys)
        shard = sharding.grouped_shard(2, 3, 1)
        assert shard.full_size == len(names) and shard.size == len(rows_of(shard))
        blocks = torch.tensor(rows_of(shard)).view(len(sharding.key_heads), -1)
        for place, (head, block) in enumerate(zip(sharding.key_heads, blocks.tolist(), strict=True)):
            first = rank * own + place * sharding.run
            queries_of_run = range(first, first + sharding.run)
            assert [names[row] for row in block] == [
                *((head, "shared", 0, row) for row in range(2)),
                *((head, "wide", query, row) for query in queries_of_run for row in range(3)),
                *((head, "narrow", query, 0) for query in queries_of_run),
            ]
        for head in sharding.key_heads[sharding.first_copies]:
            held[head] = held.get(head, 0) + 1
    assert held == dict.fromkeys(range(keys), 1), "every key head has one first copy"


def rows_of(shard: Shard) -> list[int]:
    return [row for begin, length in shard.pieces for row in range(begin, begin + length)]


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("llama", {}, 2, "num_attention_heads = 3"),
    ("llama", {}, 3, "intermediate_size = 40"),
]


@pytest.mark.parametrize(("family", "keys", "size", "named"), REFUSED)
def test_what_does_not_divide_is_refused_by_name(family: str, keys: dict[str, Any], size: int, named: str, tmp_path: Path) -> None:
    facts = read_model_facts(write_hf(build_hf(family, **{"num_hidden_layers": 3, **keys}), tmp_path))
    with pytest.raises(ConfigError, match=f"runtime.tensor_parallel.*{named}"):
        facts.of_rank(0, size)


def test_one_rank_holds_the_model_as_it_was(tmp_path: Path) -> None:
    build("experts", tmp_path)
    facts = read_model_facts(tmp_path)
    assert facts.of_rank(0, 1) is facts
    with torch.device("meta"):
        kinds = {type(module).__name__ for module in Decoder(facts).modules()}
    assert not kinds & {"RowParallelLinear", "VocabParallelLinear", "VocabParallelEmbedding"}
