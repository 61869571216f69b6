"""Damaged and hostile checkpoints: each is refused in one message or used, and no code in it is ever run."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.drafters.mtp.facts import read_mtp_facts
from graphspec.facts import read_model_facts

from ._bench import DRAFT, MAP, SMALL, TARGET, Bench, Evil, Use, keys, pickled, sharded, tensors, vocabularies, write
from ._checkpoints import listed_cases
from ._harness import Case, choose, faults, judge
from ._tokenizers import invent_tokenizer, tokenizer_cases

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 10**7, 10**12, 10**400, 0.0, -0.0, 1e-300, 0.5, 2.0, 1e308, float("nan"), float("inf"),
    "", "x", "44", "\x00", "../x", "/etc/passwd", "\ud800", "os.system", [], [0], [1, 1], [[]], [None], [1.5], ["x"], {}, {"a": 1},
    {"": []},
    [0] * 5000,
]  # fmt: skip
INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
OTHERS = (
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "architectures", "hidden_act", "dtype", "torch_dtype", "eos_token_id",
    "bos_token_id", "quantization_config", "sliding_window", "model_type", "auto_map", "initializer_range",
)  # fmt: skip
DRAFT_KEYS = (
    "eagle_config", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output", "bias", "speculators_model_type", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "num_experts",
    "is_causal", "mask_token_id", "layer_types", "partial_rotary_factor", "use_sliding_window", "use_aux_hidden_state", "kv_lora_rank",
)  # fmt: skip
ROPE = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip


DEFAULTS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "num_beams")


def _is_wrong(key: str, value: Any) -> bool:
    """No checkpoint may have this value under this key."""
    if key in INTEGERS:
        return value is not None and (type(value) is not int or not 1 <= value <= 2**24)
    if key in FLAGS:
        return value is not None and type(value) is not bool
    return key == "rms_norm_eps" and (type(value) not in (int, float) or not 0 < value <= 1)


def _odd_key(bench: Bench, rng: random.Random, number: int) -> Case:
    which, value = rng.choice((TARGET, DRAFT, SMALL)), rng.choice(ODD)
    key = rng.choice((*INTEGERS, *FLAGS, *OTHERS, *(DRAFT_KEYS if which == DRAFT else ())))
    return bench.case(f"{number}: {key} = {value!r:.40}", keys({key: value}), which, wrong=_is_wrong(key, value))


def _odd_default(bench: Bench, rng: random.Random, number: int) -> Case:
    """A sampling default that is no number, out of range, or fair: then it is what the request, which says nothing, is sampled with."""
    key, value = rng.choice(DEFAULTS), rng.choice(ODD)
    kinds = {"do_sample": (bool,), "top_k": (int,), "max_new_tokens": (object,), "num_beams": (object,)}.get(key, (int, float))
    wrong = value is not None and object not in kinds and type(value) not in kinds
    changes = keys({"do_sample": True, key: value}, "generation_config.json")
    return bench.case(f"{number}: generation_config.json: {key} = {value!r:.40}", changes, wrong=wrong)


def _odd_rope(bench: Bench, rng: random.Random, number: int) -> Case:
    kind, key, value = rng.choice(("default", "linear", "dynamic", "yarn", "llama3", "mrope")), rng.choice(ROPE), rng.choice(ODD)
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        key: value,
    }
    if rng.random() < 0.4:
        kind, rope = f"nested: {kind}", {"full_attention": rope, rng.choice(("sliding_attention", "x")): rng.choice((rope, value, {}))}
    return bench.case(f"{number}: {kind}: {key} = {value!r:.40}", keys({"rope_parameters": rope}), rng.choice((TARGET, SMALL, DRAFT)))


def _odd_file(bench: Bench, rng: random.Random, number: int) -> Case:
    """A json file with one value somewhere in it replaced."""
    which, file = rng.choice(((TARGET, "generation_config.json"), (SMALL, "tokenizer.json"), (DRAFT, "config.json")))
    values = json.loads((_origin(bench, which, file)).read_text())
    path, at = [], values
    while isinstance(at, dict | list) and at:
        step = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        path.append(step)
        if rng.random() < 0.2 or not isinstance(at[step], dict | list) or not at[step]:
            at[step] = rng.choice(ODD)
            break
        at = at[step]
    name = f"{number}: {file}: {'.'.join(map(str, path))} = {at[path[-1]]!r:.40}"
    return bench.case(name, write(json.dumps(values), file), which, use=_use(file))


def _odd_bytes(bench: Bench, rng: random.Random, number: int) -> Case:
    """A file of which some bytes are others, or that ends early."""
    which, file = rng.choice(
        ((TARGET, "model.safetensors"), (DRAFT, "model.safetensors"), (TARGET, "config.json"), (SMALL, "tokenizer.json"))
    )
    data = _origin(bench, which, file).read_bytes()
    reach = 8 + struct.unpack("<Q", data[:8])[0] if file == "model.safetensors" else len(data)
    what, damaged = _damage(rng, data, reach)
    return bench.case(f"{number}: {file}: {what}", write(damaged, file), which, use=_use(file))


def _odd_head(bench: Bench, rng: random.Random, number: int) -> Case:
    """A language-model head that is the embedding, another matrix, another kind of tensor or absent, next to any flag."""
    which, tied = rng.choice((TARGET, SMALL)), rng.choice((True, False, None))
    weights = bench.tensors
    embedding, own = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    heads: dict[str, torch.Tensor | None] = {
        "its own": own, "a copy": embedding.clone(), "a rounded copy": embedding.half(), "NaN": embedding * float("nan"), "absent": None,
        "the only one": own, "shorter": own[1:], "integers": own.to(torch.int8), "no matrix": own[0], "empty": own[:, :0],
    }  # fmt: skip
    kind = rng.choice(list(heads))
    head = heads[kind]

    def mutate(folder: Path) -> None:
        changed = {name: value.clone() for name, value in weights.items() if name != "lm_head.weight"}
        if kind == "the only one":
            del changed["model.embed_tokens.weight"]
        tensors(lambda _: changed if head is None else changed | {"lm_head.weight": head.contiguous()})(folder)
        keys({"tie_word_embeddings": tied})(folder)

    wrong = kind in ("shorter", "integers", "no matrix", "empty") or (kind in ("absent", "the only one") and tied is not True)
    return bench.case(f"{number}: tie_word_embeddings = {tied}, the head is {kind}", mutate, which, wrong=wrong)


def _odd_vocabulary(bench: Bench, rng: random.Random, number: int) -> Case:
    """A small draft whose embedding and head have another number of rows than the target's; the config may tell of a third."""
    rows, stated = rng.choice((2, 30, 43, 45, 300)), rng.choice((None, None, 1, 44, 10**6))

    def mutate(folder: Path) -> None:
        sized = {
            n: torch.cat([w] * 8)[:rows].clone() for n, w in bench.tensors.items() if n in ("model.embed_tokens.weight", "lm_head.weight")
        }
        tensors(lambda weights: weights | sized)(folder)
        keys({"vocab_size": stated or rows, "eos_token_id": None, "bos_token_id": None})(folder)
        (folder / "generation_config.json").unlink()

    return bench.case(f"{number}: {rows} rows, vocab_size = {stated}", mutate, SMALL, wrong=stated is not None)


def _odd_pickle(bench: Bench, rng: random.Random, number: int) -> Case:
    legacy = rng.random() < 0.5
    whole = bench.folder / "whole.bin"
    torch.save(bench.tensors, whole, _use_new_zipfile_serialization=not legacy)
    data = whole.read_bytes()
    what, damaged = _damage(rng, data, 2000 if rng.random() < 0.7 else len(data))
    return bench.case(f"{number}: bin{', legacy' * legacy}: {what}", pickled(lambda t, _: damaged, plain=True))


def _odd_index(bench: Bench, rng: random.Random, number: int) -> Case:
    steps = ("..", ".", "a", "sub", "", "/", "a.safetensors", "a.bin", "\0", "~", "x" * 300, "config.json", "\\", "\n")
    name = "/".join(rng.choice(steps) for _ in range(rng.randrange(1, 5)))
    inside = str(Path("/x") / name) == "/x/a.safetensors"
    return bench.case(f"{number}: index: {name!r:.60}", sharded(name, place="a.safetensors"), wrong=not inside)


def _origin(bench: Bench, which: str, file: str) -> Path:
    return (bench.words if file == "tokenizer.json" else bench.good / which) / file


def _use(file: str) -> Use | None:
    return vocabularies if file == "tokenizer.json" else None


def _damage(rng: random.Random, data: bytes, reach: int) -> tuple[str, bytes]:
    if rng.random() < 0.3:
        length = rng.randrange(len(data))
        return f"cut to {length} bytes", data[:length]
    places = {rng.randrange(reach): rng.randrange(256) for _ in range(rng.choice((1, 1, 2, 5, 20)))}
    return f"bytes {places}", bytes(places.get(i, byte) for i, byte in enumerate(data))


INVENTIONS = (
    _odd_key,
    _odd_key,
    _odd_key,
    _odd_default,
    _odd_rope,
    _odd_file,
    _odd_bytes,
    _odd_bytes,
    _odd_pickle,
    _odd_index,
    _odd_head,
    _odd_vocabulary,
)


def invent(bench: Bench, rng: random.Random, number: int) -> Case:
    return rng.choice(INVENTIONS)(bench, rng, number)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("checkpoints"))


def test_damaged_and_hostile_checkpoints(bench: Bench, request: pytest.FixtureRequest) -> None:
    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    cases = choose(listed_cases(bench), lambda rng, number: invent(bench, rng, number), seed=seed, budget=budget)
    assert not faults(cases)


def test_damaged_and_hostile_tokenizers(bench: Bench, request: pytest.FixtureRequest) -> None:
    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    cases = choose(tokenizer_cases(bench), lambda rng, number: invent_tokenizer(bench, rng, number), seed=seed, budget=budget)
    assert not faults(cases)


def test_odd_keys_of_other_architectures(bench: Bench, request: pytest.FixtureRequest) -> None:
    """Facts alone: latent attention, mixtures of experts, prediction heads."""
    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    shapes = Path(__file__).parents[2] / "graphspec" / "lab" / "predict" / "models"
    good = json.loads((shapes / "deepseek-v3" / "config.json").read_text()) | {"quantization_config": None}
    target = read_model_facts(bench.good / TARGET)
    assert judge(bench.case("good", write(json.dumps(good)), use=lambda folder: read_model_facts(folder / TARGET))).kind == "accepted"

    def invented(rng: random.Random, number: int) -> Case:
        architecture = rng.choice(("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM"))
        more = {"architectures": [architecture], "num_experts": 8, "mlp_only_layers": [], "layer_types": None, "use_sliding_window": True}
        key, value = rng.choice([*good, *more, "text_config", "num_mtp_layers"]), rng.choice(ODD)
        values = {**good, **more, key: value}
        if rng.random() < 0.3:
            key = f"rope_scaling: {rng.choice(ROPE)}"
            scaling = {**good["rope_scaling"], key.removeprefix("rope_scaling: "): value}
            kinds = rng.choice(((), ("full_attention",), ("full_attention", "sliding_attention")))
            values = {**good, **more, "rope_scaling": dict.fromkeys(kinds, scaling) or scaling}
        heads = rng.random() < 0.3

        def read(folder: Path) -> object:
            return read_mtp_facts(folder / TARGET, target) if heads else read_model_facts(folder / TARGET)

        return bench.case(
            f"{number}: {architecture}: {key} = {value!r:.40}", write(json.dumps(values)), wrong=_is_wrong(key, value), use=read
        )

    assert not faults(choose([], invented, seed=seed, budget=budget))


def test_the_canary_shows_what_ran(bench: Bench) -> None:
    file = "map.pt"
    case = bench.case(
        "unpickled for once",
        lambda folder: (folder / file).write_bytes(pickle.dumps(Evil(folder))),
        MAP,
        use=lambda folder: pickle.loads((folder / MAP / file).read_bytes()),
    )
    assert judge(case).detail.startswith("CodeRanError")


def test_undamaged_copies_are_accepted(bench: Bench) -> None:
    for which in (TARGET, SMALL):
        assert judge(bench.case("undamaged", lambda folder: None, which)).kind == "accepted"
