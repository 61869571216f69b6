"""Floors against arithmetic: bytes and operations of published models, written out by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.api.llm import LLM
from graphspec.config.catalog import resolve_variant
from graphspec.config.compose import load_config
from graphspec.config.schema import VariantConfig
from graphspec.errors import ConfigError
from graphspec.facts import ModelFacts, read_model_facts
from graphspec.facts.hybrid_families import QWEN3_5
from graphspec.facts.keys import Keys
from graphspec.facts.quantisation import parse_quantisation
from graphspec.facts.recurrent import read_gated_delta
from graphspec.graphs.memory import parameter_bytes, plan_memory
from graphspec.lab.floor import FloorModel, Hardware, StageCost, build_target, distinct_experts, kv_bytes_per_token
from graphspec.lab.predict.capacity import packs_weights
from graphspec.lab.predict.model_pair import read_model_pair, shape_names
from graphspec.plan.plan import make_plan
from graphspec.shapes import PLAIN, CycleShape
from tests.support.checkpoints import build_hf, edit_json, write_hf
from tests.support.plans import draft_facts, model_facts
from tests.support.quantised_checkpoints import quantise

EAGLE3, MTP = resolve_variant("eagle3"), resolve_variant("mtp")
CONTEXT = 2048
PARTS = ("weights", "experts", "kv", "state", "embedding", "logits", "features")

# Llama-3.1-8B: parameters of its layers and of its head, and what a layer does of attention for one token and one slot.
LLAMA_LAYERS = 32 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 4096
LLAMA_HEAD = 4096 * 128256
# An EAGLE-3 head for it: projection of three tapped streams; one layer that reads two vectors, with three norms and the final one.
FUSE = 3 * 4096 * 4096
DRAFT_LAYER = 2 * 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 4 * 4096
DRAFT_HEAD = 4096 * 32000
# DeepSeek-V3: attention of a layer (query and latent down, norm, query up, norm, keys and values up, out), its two norms.
MLA = 7168 * (1536 + 576) + 1536 + 1536 * 128 * 192 + 512 + 128 * (128 + 128) * 512 + 128 * 128 * 7168 + 2 * 7168
CODES = 7168 * (1536 + 576) + 1536 * 128 * 192 + 128 * 128 * 7168
"""Of these, the numbers that are products in FP8; the factors of keys and values are held in the dtype of the model."""
FP8 = 1 + 4 / 128
"""Bytes of a number: a float32 scale for 128 of them."""
EXPERT = 3 * 7168 * 2048
ROUTER, CORRECTION = 256 * 7168, 256


def floor_model(name: str, variant: str = "eagle3") -> FloorModel:
    entry = resolve_variant(variant)
    pair = read_model_pair(name, VariantConfig(name=variant), entry)
    return FloorModel.of(pair.target, pair.draft, "bfloat16", entry, from_config=True)


@pytest.fixture(scope="module")
def llama() -> FloorModel:
    return floor_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def deepseek() -> FloorModel:
    return floor_model("deepseek-v3", "mtp")


def parts(stage: StageCost) -> dict[str, float]:
    assert set(stage.parts) == set(PARTS)
    return {name: size for name, size in stage.parts.items() if size}


def test_totals_are_those_of_the_published_models(llama: FloorModel, deepseek: FloorModel) -> None:
    assert llama.target_weights.number == 8_030_261_248 == LLAMA_LAYERS + 2 * LLAMA_HEAD
    assert floor_model("llama-3.1-70b", "none").target_weights.number == 70_553_706_496
    dense = 3 * (MLA + 3 * 7168 * 18432)
    mixtures = 58 * (MLA + ROUTER + CORRECTION + 257 * EXPERT)
    assert deepseek.target_weights.number == 671_026_419_200 == dense + mixtures + 7168 + 2 * 7168 * 129280
    # Published with copies of embedding and head, the prediction head makes it 14 billion more.
    assert deepseek.draft_own is not None
    assert deepseek.draft_own.number == 2 * 7168 * 7168 + 3 * 7168 + MLA + ROUTER + CORRECTION + 257 * EXPERT


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("shape", [(7, 1, 8), (5, 4, 16)])
def test_llama_by_hand(llama: FloorModel, shape: tuple[int, int, int], batch: int) -> None:
    steps, fan, nodes = shape
    extend, later, verify = llama.stages(CycleShape(*shape), batch, CONTEXT)
    assert [(s.name, s.passes) for s in (extend, later, verify)] == [("draft_extend", 1), ("draft_steps", steps - 1), ("verify", 1)]

    assert parts(verify) == {
        "weights": 2 * (LLAMA_LAYERS + LLAMA_HEAD),
        "kv": 32 * 2 * 8 * 128 * 2 * (batch * 2048 + batch * nodes),
        "embedding": batch * nodes * 4096 * 2,
        "logits": batch * nodes * 128256 * (4 + 4),
        "features": batch * nodes * 3 * 4096 * 2,
    }
    assert verify.flops == 2 * batch * nodes * (LLAMA_LAYERS + LLAMA_HEAD) + batch * nodes * 2048 * 32 * (32 * 4 * 128)

    rows = steps + 1
    assert parts(extend) == {
        "weights": 2 * (FUSE + DRAFT_LAYER + DRAFT_HEAD),
        "kv": 2 * 8 * 128 * 2 * (batch * 2048 + batch * rows),
        "embedding": batch * rows * 4096 * 2,
        "logits": batch * 32000 * (4 + 4),
        "features": batch * rows * 3 * 4096 * 2,
    }
    assert extend.flops == 2 * batch * rows * (FUSE + DRAFT_LAYER) + 2 * batch * DRAFT_HEAD + batch * rows * 2048 * 32 * 4 * 128

    assert parts(later) == {
        "weights": (steps - 1) * 2 * (DRAFT_LAYER + DRAFT_HEAD),
        "kv": (steps - 1) * 2 * 8 * 128 * 2 * (batch * 2048 + batch * fan),
        "embedding": (steps - 1) * batch * fan * 4096 * 2,
        "logits": (steps - 1) * batch * fan * 32000 * (4 + 4),
    }
    assert later.flops == (steps - 1) * batch * fan * (2 * (DRAFT_LAYER + DRAFT_HEAD) + 2048 * 32 * 4 * 128)


def test_the_floor_is_the_longer_of_the_two(llama: FloorModel) -> None:
    """H200 by its data sheet: reading 15 GB takes 3.2 ms; 32 rows of 16 nodes compute for longer than they read."""
    h200 = Hardware(4.8e12, 989.5e12)
    [plain] = llama.stages(PLAIN, 1, CONTEXT)
    assert plain.floor_ms(h200) == pytest.approx(1e3 * plain.bytes / 4.8e12) == pytest.approx(3.18, abs=0.01)
    assert not plain.compute_bound(h200)
    wide = llama.stages(CycleShape(5, 4, 16), 32, CONTEXT)[-1]
    assert wide.compute_bound(h200) and wide.floor_ms(h200) == pytest.approx(1e3 * wide.flops / 989.5e12)
    assert wide.floor_ms(Hardware(4.8e12)) == pytest.approx(1e3 * wide.bytes / 4.8e12)
    with pytest.raises(ConfigError, match="bandwidth"):
        Hardware(0.0)


@pytest.mark.parametrize("batch", [1, 32])
def test_deepseek_by_hand(deepseek: FloorModel, batch: int) -> None:
    """Rows of 576 latent numbers; of 256 experts those that 8 choices of every token are expected to hit; routers in float32.

    Products and experts are in FP8, as the config says.
    """
    nodes = 4
    tokens = batch * nodes
    extend, later, verify = deepseek.stages(CycleShape(3, 1, nodes), batch, CONTEXT)
    hit = 256 * (1 - (1 - 8 / 256) ** tokens)
    always = 61 * MLA + 3 * 3 * 7168 * 18432 + 58 * EXPERT + 7168
    codes = 61 * CODES + 3 * 3 * 7168 * 18432 + 58 * EXPERT
    found = parts(verify)
    assert found.pop("experts") == pytest.approx(58 * hit * EXPERT * FP8)
    assert found == {
        "weights": FP8 * codes + 2 * (always - codes + 7168 * 129280) + 58 * 4 * (ROUTER + CORRECTION),
        "kv": 61 * 576 * 2 * (batch * 2048 + tokens),
        "embedding": tokens * 7168 * 2,
        "logits": tokens * 129280 * 8,
        "features": tokens * 7168 * 2,
    }
    active = always + 58 * (ROUTER + CORRECTION + 8 * EXPERT) + 7168 * 129280
    assert verify.flops == pytest.approx(2 * tokens * active + tokens * 2048 * 61 * 128 * 2 * (576 + 512))

    # The one prediction head: a whole layer with its mixture between a projection of two vectors and the target's own head.
    head = 2 * (2 * 7168 * 7168 + 3 * 7168 + MLA - CODES + 7168 * 129280) + FP8 * (CODES + EXPERT) + 4 * (ROUTER + CORRECTION)
    for stage, passes, rows in ((extend, 1, nodes), (later, 2, 1)):
        found = parts(stage)
        hit = 256 * (1 - (1 - 8 / 256) ** (batch * rows))
        assert stage.passes == passes
        assert found["weights"] == passes * head
        assert found["experts"] == pytest.approx(passes * hit * EXPERT * FP8)
        assert found["kv"] == passes * 576 * 2 * (batch * 2048 + batch * rows)
        assert found["logits"] == passes * batch * 129280 * 8
    assert kv_bytes_per_token(deepseek.target, 2) == 61 * 576 * 2


def test_experts_that_are_hit() -> None:
    assert distinct_experts(256, 8, 1) == pytest.approx(8)
    assert distinct_experts(256, 8, 10_000) == pytest.approx(256)
    draw = random.Random(0)
    seen = [len({expert for _ in range(12) for expert in draw.sample(range(64), 6)}) for _ in range(400)]
    assert sum(seen) / len(seen) == pytest.approx(distinct_experts(64, 6, 12), rel=0.01)


def test_a_sliding_window_bounds_what_is_read() -> None:
    facts = model_facts(sliding_window=(None, 16))
    [stage] = FloorModel.of(facts, None, "float32").stages(PLAIN, 3, 40)
    row = 2 * 1 * 8 * 4
    assert stage.parts["kv"] == row * (3 * 40 + 3) + row * (3 * 16 + 3)


def test_a_tied_head_is_read_and_counted_once() -> None:
    loose, tied = (FloorModel.of(model_facts(tie_word_embeddings=flag), None, "float32") for flag in (False, True))
    assert loose.target_weights.number - tied.target_weights.number == 50 * 16
    assert tied.target_weights.numbers["head"] == 50 * 16 and tied.target_weights.numbers["embedding"] == 0
    assert [s.parts for s in tied.stages(PLAIN, 2, 10)] == [s.parts for s in loose.stages(PLAIN, 2, 10)]


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-120b", 36, 128), ("gpt-oss-20b", 24, 32)])
def test_gpt_oss_by_hand(name: str, layers: int, experts: int) -> None:
    """Experts in MXFP4, half a byte and a scale of a byte for 32 numbers; everything else in bfloat16, half of the layers with a window."""
    model = floor_model(name, "none")
    attention = 2880 * (4096 + 512 + 512) + (4096 + 512 + 512) + 4096 * 2880 + 2880 + 64
    expert, biases, router = 3 * 2880 * 2880, 5760 + 2880, experts * 2881
    layer = attention + 2 * 2880 + router + experts * biases
    assert model.target_weights.number == layers * (layer + experts * expert) + 2880 + 2 * 201088 * 2880
    [verify] = model.stages(PLAIN, 1, CONTEXT)
    found = parts(verify)
    assert found["experts"] == pytest.approx(layers * 4 * expert * (1 / 2 + 1 / 32))
    assert found["weights"] == 2 * (layers * layer + 2880 + 201088 * 2880)
    assert found["kv"] == 2 * 8 * 64 * 2 * layers // 2 * (2048 + 1 + 128 + 1)
    tokens = model.stages(CycleShape(3, 1, 4), 1, CONTEXT)[-1].parts["experts"] / found["experts"]
    assert tokens == pytest.approx(experts / 4 * (1 - (1 - 4 / experts) ** 4))


def test_one_head_per_step_reads_each_head_once(deepseek: FloorModel) -> None:
    """Three heads instead of one: three passes over the window and the two entries before it, each over one layer of KV."""
    one = deepseek.draft
    assert one is not None and one.decoder.experts is not None
    decoder = replace(
        one.decoder, num_layers=3, sliding_window=(None,) * 3, experts=replace(one.decoder.experts, layers=(True,) * 3),
    )  # fmt: skip
    three = FloorModel.of(deepseek.target, replace(one, decoder=decoder, num_heads=3), "bfloat16", MTP, from_config=True)
    stage, _ = three.stages(CycleShape(3, 1, 4), 1, CONTEXT)
    [single, *_] = deepseek.stages(CycleShape(3, 1, 4), 1, CONTEXT)
    assert (stage.name, stage.passes) == ("head_steps", 3)
    assert stage.parts["weights"] == 3 * single.parts["weights"]
    assert stage.parts["kv"] == 3 * 576 * 2 * (2048 + 6)
    assert three.draft_own is not None and deepseek.draft_own is not None
    assert three.draft_own.number == 3 * deepseek.draft_own.number


def test_a_drafter_without_network_costs_verification_only() -> None:
    model = floor_model("llama-3.1-8b", "ngram")
    [verify] = model.stages(CycleShape(6, 4, 12, "paths"), 2, 100)
    assert verify.name == "verify" and verify.parts["features"] == 0 and model.draft_own is None


SMALL = FloorModel.of(model_facts(), draft_facts(), "float32", EAGLE3, from_config=True)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 60), st.sampled_from(["batch", "context", "steps"]))
def test_more_of_anything_never_costs_less(steps: int, batch: int, context: int, what: str) -> None:
    def cost(steps: int, batch: int, context: int) -> tuple[float, float]:
        stages = SMALL.stages(CycleShape(steps, 1, steps + 1), batch, context)
        return sum(s.bytes for s in stages), sum(s.flops for s in stages)

    less = cost(steps, batch, context)
    more = cost(steps + (what == "steps"), batch + (what == "batch"), context + (what == "context"))
    assert more[0] > less[0] and more[1] > less[1]


@pytest.mark.parametrize("variant", ["none", "eagle", "eagle3", "mtp", "standalone"])
def test_weights_are_those_the_engine_would_load(variant: str) -> None:
    """The memory plan counts the same networks from their checkpoints; besides parameters it counts tables of RoPE and token ids."""
    config = load_config(f"variant={variant}", "hardware=cpu", "runtime=eager")
    entry = resolve_variant(variant)
    pair = read_model_pair("demo", config.variant, entry)
    plan = make_plan(config, pair.target, pair.draft, device="cpu")
    model = FloorModel.of(pair.target, pair.draft, "float32", entry)
    target, draft = parameter_bytes(plan)
    table = 4 * plan.max_positions * pair.target.head_dim
    assert model.target_weights.size + table == target
    own = model.draft_own.size if model.draft_own is not None else 0
    ids = 8 * pair.draft.draft_vocab_size if pair.draft is not None and pair.draft.draft_vocab_size != pair.target.vocab_size else 0
    assert own + (4 * plan.max_positions * pair.draft.decoder.head_dim + ids if pair.draft is not None else 0) == draft
    assert plan_memory(plan, config, (target, draft)) == plan_memory(plan, config)


def test_packed_weights_are_counted_as_they_are_held() -> None:
    """A float32 engine on a CPU holds linear layers in the checkpoint's 16 bits; the rest is widened."""
    config = load_config("variant=eagle3", "hardware=cpu")
    pair = read_model_pair("demo", config.variant, EAGLE3)
    wide, packed = (FloorModel.of(pair.target, pair.draft, "float32", EAGLE3, packed=flag) for flag in (False, True))
    for one, other in ((packed.target_weights, wide.target_weights), (packed.draft_weights[0], wide.draft_weights[0])):
        assert one.numbers == other.numbers and one.sizes["embedding"] == other.sizes["embedding"]
        assert one.sizes["head"] == other.sizes["head"] // 2
    # Of a layer only its two norms are no linear layer; the final norm is one more.
    norms = pair.target.hidden_size * (2 * pair.target.num_layers + 1)
    assert packed.target_weights.sizes["layers"] == 2 * wide.target_weights.numbers["layers"] + 2 * norms
    assert packs_weights(config, "cpu", "float32") and packs_weights(config, "cpu", "bfloat16")
    assert not packs_weights(load_config("variant=eagle3", "hardware=cpu", "runtime=eager"), "cpu", "float32")
    assert not packs_weights(config, "cuda", "float32") and not packs_weights(load_config("runtime=eager"), "cpu", "float32")
    paper = read_model_pair("llama-3.1-8b", VariantConfig(name="none"), resolve_variant("none"))
    assert FloorModel.of(paper.target, None, "float32", packed=True).target_weights.size == 4 * paper_parameters(paper.target)


def paper_parameters(facts: ModelFacts) -> int:
    return sum(parameter.numel() for parameter in build_target(facts).parameters())


def test_a_working_set_has_every_byte_once() -> None:
    """The draft network is read by every pass, and counts once; plain decoding does not touch it."""
    shape, own = CycleShape(5, 1, 6), SMALL.draft_own
    assert own is not None
    for batch, context in ((1, 10), (4, 40)):
        *drafting, verify = SMALL.stages(shape, batch, context)
        assert SMALL.working_set(shape, batch, context) == verify.bytes + own.size - own.sizes["embedding"]
        assert SMALL.working_set(shape, batch, context) < verify.bytes + sum(stage.bytes for stage in drafting)
        assert SMALL.working_set(PLAIN, batch, context) == SMALL.stages(PLAIN, batch, context)[-1].bytes


def test_shapes_on_paper_have_no_weights() -> None:
    assert shape_names() == [
        "deepseek-v3",
        "gpt-oss-120b",
        "gpt-oss-20b",
        "llama-3.1-70b",
        "llama-3.1-8b",
        "llama-3.1-8b-fp8",
        "llama-3.1-8b-int4",
        "qwen3.6-27b",
        "qwen3.6-27b-fp8",
    ]
    with pytest.raises(ConfigError, match="only the shape comes with the package") as error:
        LLM("llama-3.1-8b")
    assert error.value.key == "model.path"


def test_a_static_tree_goes_by_the_name_of_its_stage() -> None:
    stages = SMALL.stages(CycleShape(3, 2, 6, "nodes"), 1, 20)
    assert [(stage.name, stage.passes) for stage in stages] == [("draft_extend", 1), ("static_steps", 2), ("verify", 1)]


def test_a_recurrent_state_is_read_for_verification_and_read_and_written_by_the_commit() -> None:
    """Whatever the tree: nodes add what they record, and no state."""
    values = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
    recurrent = read_gated_delta(Keys(values, "config.json"), 4)
    assert recurrent is not None
    facts = replace(model_facts(num_layers=4), family=QWEN3_5, recurrent=recurrent, sliding_window=(None,) * 4)
    floors = FloorModel.of(facts, None, "bfloat16", resolve_variant("ngram"))
    channels, matrix = 2 * 2 * 8 + 4 * 6, 4 * 8 * 6
    for shape in (PLAIN, CycleShape(3, 2, 7, "paths")):
        stage = floors.stages(shape, 3, 50)[-1]
        state, record = 3 * (matrix * 4 + 3 * channels * 2), channels * 2 + 8 * 4
        assert stage.parts["state"] == 3 * 3 * state + 2 * 3 * shape.num_draft_tokens * 3 * record
        rows = facts.num_kv_heads * facts.head_dim * 2 * 2
        assert stage.parts["kv"] == rows * 3 * (50 + shape.num_draft_tokens), "one layer attends"


@pytest.mark.parametrize(
    "layout", ["float-quantized", "fp8-block", "pack-quantized", "pack-quantized-zeros", "gptq", "awq", "nvfp4-modelopt", "mxfp4"]
)
def test_a_config_alone_is_counted_as_the_tensors_are(layout: str, tmp_path: Path) -> None:
    """Scales in the dtype that is usual for the format, which these files have but for one."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    packed, _ = quantise(write_hf(build_hf("llama", head_dim=16, **sizes), tmp_path / "source"), tmp_path, layout)
    if layout == "pack-quantized-zeros":
        config = json.loads((packed / "config.json").read_text())["quantization_config"]
        config["config_groups"]["group_0"]["weights"]["group_size"] = 16
        edit_json(packed / "config.json", quantization_config=config)
    facts = read_model_facts(packed)
    stored = FloorModel.of(facts, None, "bfloat16").target_weights
    (packed / "model.safetensors").unlink()
    described = FloorModel.of(facts, None, "bfloat16").target_weights
    assert stored.numbers == described.numbers
    wider = stored.numbers["layers"] / 32 if layout == "float-quantized" else 0
    assert stored.sizes["layers"] - wider <= described.sizes["layers"] <= stored.sizes["layers"]
    assert stored.sizes["layers"] < 0.7 * FloorModel.of(replace(facts, path=tmp_path), None, "bfloat16").target_weights.sizes["layers"]


def test_lists_of_layers_that_keep_their_numbers() -> None:
    read = parse_quantisation(
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "*.down_proj"],
         "config_groups": {
             "a": {"targets": ["re:.*gate_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
             "b": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}, "config.json",
    )  # fmt: skip
    found = {name: read.scheme(f"model.layers.0.{name}") for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    codes = {name: scheme and (scheme.code, scheme.group) for name, scheme in found.items()}
    assert codes == {"self_attn.q_proj": None, "mlp.gate_proj": ("e4m3", 0), "mlp.up_proj": ("int4", 32), "mlp.down_proj": None}
    assert read.scheme("lm_head") is None


@pytest.mark.parametrize(("name", "bytes_of"), [("fp8", lambda o, c: o * c + 2 * o), ("int4", lambda o, c: o * c // 2 + 2 * o * c // 128)])
def test_llama_of_low_precision_by_hand(name: str, bytes_of: Callable[[int, int], int]) -> None:
    """Llama-3.1-8B: the projections of its 32 layers are codes; embedding and head keep bfloat16."""
    weights, plain = floor_model(f"llama-3.1-8b-{name}", "none").target_weights, floor_model("llama-3.1-8b", "none").target_weights
    shapes = ((4096 + 2 * 1024, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336))
    saved = sum(2 * outputs * channels - bytes_of(outputs, channels) for outputs, channels in shapes)
    assert weights.numbers == plain.numbers and weights.sizes["head"] == plain.sizes["head"]
    assert plain.sizes["layers"] - weights.sizes["layers"] == 32 * saved


def test_qwen_in_fp8_by_hand() -> None:
    """Qwen3.6-27B: the head, the embedding, and the steps and gates of its 48 recurrent layers keep bfloat16."""
    weights = floor_model("qwen3.6-27b-fp8", "none").target_weights
    plain = floor_model("qwen3.6-27b", "none").target_weights
    mlp, attention = 3 * 5120 * 17408, 5120 * (2 * 24 + 2 * 4) * 256 + 24 * 256 * 5120
    recurrent = 5120 * (2 * 16 * 128 + 48 * 128) + 5120 * 48 * 128 + 48 * 128 * 5120
    codes = 64 * mlp + 16 * attention + 48 * recurrent
    assert weights.numbers == plain.numbers and weights.sizes["head"] == 2 * 5120 * 248320
    assert plain.sizes["layers"] - weights.sizes["layers"] == codes * (2 - FP8)
