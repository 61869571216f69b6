"""The memory plan: its sizes equal the allocations, and it is checked before anything is allocated."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from graphspec.api import llm as llm_module
from graphspec.api.llm import LLM, SamplingParams
from graphspec.cli.inspect import memory_table
from graphspec.config.catalog import load_object
from graphspec.config.schema import Config, HardwareConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
from graphspec.errors import ConfigError, spell_bytes
from graphspec.facts import read_model_facts
from graphspec.facts.folders import model_folder
from graphspec.graphs import memory as memory_module
from graphspec.graphs.memory import GIB, MemoryLine, MemoryPlan, available_bytes, fit_memory, parameter_bytes, plan_memory
from graphspec.models.checkpoint import Checkpoint
from graphspec.plan.plan import make_plan
from graphspec.shapes import SamplingClass
from tests.support.engines import CHAIN, TREE, Pair, mirror_pair, prompts
from tests.support.shapes_8b import llama_8b
from tests.support.tiny import draft_facts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"))


def held(*modules: nn.Module) -> int:
    """Bytes of all parameters and buffers, by storage."""
    found = {t.untyped_storage().data_ptr(): t for m in modules for t in (*m.parameters(), *m.buffers())}
    return sum(t.numel() * t.element_size() for t in found.values())


def size(memory: MemoryPlan, name: str) -> int:
    return sum(line.size for line in memory.lines if line.name.startswith(name))


@pytest.mark.parametrize("keys", [{"variant": "none"}, CHAIN, {**TREE, "cycles_in_flight": 3, "num_pages": 7, "max_rows": 3}])
def test_planned_memory_is_allocated_memory(pair: Pair, keys: dict[str, Any]) -> None:
    llm = pair.llm(**keys)
    memory, arena = llm.memory, llm.cycle.arena
    arena.allocate(SamplingClass(True, True, True, True, 2, True, True, True, True))
    grouped = {slot.name for slot in arena.slots if slot.group}
    slots = {name: count for name, _, _, count in llm.slots()}
    pools = {name: count for name, count in slots.items() if name.endswith("_kv") or name == "page_feature"}
    assert size(memory, "KV pools") == sum(pools.values()) == memory.page_bytes * llm.plan.num_pages
    assert size(memory, "slots of single") == sum(slots[name] for name in grouped) > 0
    assert size(memory, "slots") == sum(slots.values()) - sum(pools.values())
    networks = [llm.cycle.target, *([llm.cycle.draft] if llm.cycle.draft is not None else [])]
    assert size(memory, "target weights") == held(networks[0])  # type: ignore[arg-type]
    assert size(memory, "draft weights") == held(*networks) - held(networks[0])  # type: ignore[arg-type]
    assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2))[0].finish_reason == "length"


@pytest.mark.parametrize("runtime", ["eager", "compiled"])
@pytest.mark.parametrize("variant", ["eagle", "eagle3", "standalone", "mtp", "ngram", "none"])
def test_weights_of_every_variant_are_counted_without_reading_them(variant: str, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo drafts, unpacked and packed; only vocabulary maps and one small tensor that distinguishes kinds of heads are read."""
    read: list[str] = []
    raw = Checkpoint.raw

    def noting(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return raw(self, name)

    config = Config(variant=VariantConfig(name=variant), model=ModelConfig(), runtime=RuntimeConfig(name=runtime))
    llm = LLM(config=config)
    monkeypatch.setattr(Checkpoint, "raw", noting)
    target, draft = parameter_bytes(llm.plan)
    assert target == held(llm.cycle.target)  # type: ignore[arg-type]
    both = held(llm.cycle.target, *([llm.cycle.draft] if llm.cycle.draft is not None else []))  # type: ignore[list-item, arg-type]
    assert draft == both - target
    assert (draft > 0) == llm.plan.variant.has_network
    assert set(read) <= {"d2t", "t2d", "fc.weight"}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_take_what_the_checkpoint_has_them_in(stored: torch.dtype, tmp_path: Path) -> None:
    """Half of the projections' bytes where it has them in 16 bits; padded blocks, and copies of norms, are counted with them."""
    pair = mirror_pair(tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        tensors = load_file(file)
        noisy = {name: (t + torch.rand(t.shape) / 64).to(stored) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(noisy, file)
    llm = pair.llm(**CHAIN, runtime="compiled")
    whole, draft_rounds = "one native op per pass", ", activations in bfloat16 in 6 of 6 products" if stored is torch.bfloat16 else ""
    assert llm.decoders == {"target": whole, "draft": whole + draft_rounds}
    assert (size(llm.memory, "target weights"), size(llm.memory, "draft weights")) == parameter_bytes(llm.plan)
    target, draft = llm.cycle.target, llm.cycle.draft
    assert parameter_bytes(llm.plan)[0] == held(target)  # type: ignore[arg-type]
    assert parameter_bytes(llm.plan)[1] == held(target, draft) - held(target)  # type: ignore[arg-type]
    assert target.lm_head.packed.dtype is stored  # type: ignore[attr-defined]


def config_for(pair: Pair, memory_gib: float | None = None, fraction: float = 0.9, **runtime: Any) -> Config:
    return Config(
        variant=VariantConfig(name="eagle3", draft=str(pair.draft), num_steps=4, topk=1, num_draft_tokens=5),
        model=ModelConfig(path=str(pair.target)),
        runtime=RuntimeConfig(name="eager", prefill_chunks=[8, 16], memory_fraction=fraction, **runtime),
        hardware=HardwareConfig(memory_gib=memory_gib),
    )


def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(llm_module, "load_target", refuse)


def test_too_many_pages_are_refused_before_anything_is_allocated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = LLM(config=config_for(pair, num_pages=100)).memory
    # Room for all but twelve pages and a half.
    gib = (roomy.total - 12 * roomy.page_bytes - roomy.page_bytes // 2) / 0.5 / GIB
    maximum = roomy.num_pages - 1 - 13
    with monkeypatch.context() as patched:
        no_weights(patched)
        with pytest.raises(ConfigError, match=f"runtime.num_pages: expected at most {maximum}, found {roomy.num_pages - 1} ") as caught:
            LLM(config=config_for(pair, gib, 0.5, num_pages=100))
        with pytest.raises(ConfigError, match=r"runtime\.num_pages"):
            LLM(config=config_for(pair, gib, 0.5, num_pages=maximum + 1))
    for name in ("KV pools", "target weights", "draft weights", "slots", "workspace ~", "0.5 of", "a page is"):
        assert name in str(caught.value)
    assert LLM(config=config_for(pair, gib, 0.5, num_pages=maximum)).plan.num_pages == maximum + 1


def test_pools_get_what_fits_and_rows_share_it(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Down to one row of the context; the tokens are those of an engine with room for all."""
    roomy = LLM(config=config_for(pair))
    width = roomy.plan.table_width
    assert roomy.plan.num_pages == 1 + 8 * width, "no more than can be used"
    room = roomy.memory.total - (8 * width - (width + 3)) * roomy.memory.page_bytes
    with caplog.at_level(logging.INFO):
        short = LLM(config=config_for(pair, (room + 1) / 0.9 / GIB))
    assert short.plan.num_pages == 1 + width + 3 and short.memory.total <= short.memory.budget
    assert replace(short.plan, num_pages=roomy.plan.num_pages) == roomy.plan
    tokens = (width + 3) * short.plan.page_size
    assert f"KV pools: {tokens} tokens, shared by 8 rows" in caplog.text
    params = SamplingParams(max_tokens=short.plan.max_context, ignore_eos=True)
    prompt_ids = prompts(3)
    found, expected = short.generate(prompt_ids, params), roomy.generate(prompt_ids, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert {len(prompt) + len(output.token_ids) for prompt, output in zip(prompt_ids, found, strict=True)} == {short.plan.max_context}


def test_a_context_of_which_not_one_row_fits_is_refused_with_the_longest_that_does(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = LLM(config=config_for(pair))
    width = roomy.plan.table_width
    gib = (roomy.memory.total - (7 * width + 3) * roomy.memory.page_bytes) / 0.9 / GIB
    config = config_for(pair, gib)
    with monkeypatch.context() as patched:
        no_weights(patched)
        with pytest.raises(ConfigError, match=rf"model\.max_context: expected at most \d+, .* found {roomy.plan.max_context} ") as caught:
            LLM(config=config)
    longest = int(re.search(r"at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert roomy.plan.max_context - 4 * roomy.plan.page_size < longest < roomy.plan.max_context
    fitting = LLM(config=replace(config, model=replace(config.model, max_context=longest)))
    assert fitting.plan.num_pages > fitting.plan.table_width
    with pytest.raises(ConfigError, match=rf"model\.max_context: expected at most {longest}"):
        LLM(config=replace(config, model=replace(config.model, max_context=longest + 1)))


@pytest.mark.parametrize("memory_gib", [80, 141])
def test_llama_3_1_8b_starts_on_one_gpu_with_its_whole_context(memory_gib: int) -> None:
    """8 rows of 131,072 tokens would take 128 GiB for the target alone."""
    target = replace(llama_8b(32), max_position_embeddings=131072)
    head = replace(
        draft_facts(), decoder=replace(llama_8b(1), max_position_embeddings=131072), draft_vocab_size=32000, target_hidden_size=4096,
        feature_size=3 * 4096, tap_layers=(2, 16, 29),
    )  # fmt: skip
    config = Config(model=ModelConfig(path="8b"), hardware=HardwareConfig(memory_gib=memory_gib))
    plan = make_plan(config, target, head, device="cuda")
    fitted, memory = fit_memory(plan, config, (16 * 10**9, 10**9))
    memory.check()
    assert (fitted.max_context, fitted.max_rows, fitted.prefill_chunks) == (131072, 8, plan.prefill_chunks)
    assert fitted.table_width < fitted.num_pages < plan.num_pages
    assert memory.total > memory.budget - memory.page_bytes, "nothing that a page would fit into is left"


def test_weights_that_do_not_fit_name_the_keys_to_lower(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"memory: expected at least .* even with the fewest pages") as caught:
        LLM(config=config_for(pair, memory_gib=1e-6))
    assert "lower runtime.max_rows, runtime.buckets, variant.num_draft_tokens, model.max_context" in str(caught.value)
    assert caught.value.key == "memory"


def cuda_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch, free: int, *, unused: int = 0, **runtime: Any) -> MemoryPlan:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free * 2))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: unused)
    config = replace(config_for(pair, **runtime), runtime=RuntimeConfig(name="captured", prefill_chunks=[8, 16], **runtime))
    target = read_model_facts(pair.target)
    plan = make_plan(config, target, read_eagle3_facts(pair.draft, target), device="cuda")
    return plan_memory(plan, config)


def test_free_gpu_memory_is_queried_and_graphs_have_a_reserve(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = cuda_memory(pair, monkeypatch, 3 * GIB, unused=GIB)
    assert (memory.available, memory.budget) == (4 * GIB, int(4 * GIB * 0.9))
    memory.check()
    programs = 2 * (4 + 2)  # of two sampling classes
    assert size(memory, "graphs") == memory_module.LIBRARY_RESERVE + programs * memory_module.GRAPH_RESERVE
    tight = cuda_memory(pair, monkeypatch, int((memory.total - memory.page_bytes // 2) / 0.9))
    # As it stands. An engine without a given number makes its pools smaller first (`fit_memory`).
    with pytest.raises(ConfigError, match=f"runtime.num_pages: expected at most {memory.num_pages - 2}, found {memory.num_pages - 1}"):
        tight.check()


def test_the_reference_attention_needs_room_for_what_it_gathers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LLM(config=config_for(pair)).plan
    short, long = (memory_module._workspace(replace(plan, table_width=width), torch.float32) for width in (100, 1000))
    assert long > 5 * short
    short, long = (
        memory_module._workspace(replace(plan, table_width=width, kernels="compiled", attention="native"), torch.float32)
        for width in (100, 1000)
    )
    assert long == short


def test_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes("cpu", 1.5) == available_bytes("cuda", 1.5) == 3 * GIB // 2
    total = available_bytes("cpu", None)
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert total == pytest.approx(int(line.split()[1]) * 1024, rel=0.1)
    assert os.sysconf("SC_PHYS_PAGES") > 0


@pytest.mark.parametrize("excess", [-1, 0, 1, 5, 7])
def test_the_largest_number_of_pages_is_exact(excess: int) -> None:
    lines = (MemoryLine("KV pools", 80, ("runtime.num_pages",)), MemoryLine("rest", 100, ("runtime.max_rows",)))
    memory = MemoryPlan(lines, 180 - excess, 1.0, page_bytes=8, page_size=1, num_pages=10, min_pages=3)
    assert memory.largest_num_pages == 9 - math.ceil(excess / 8)
    if excess > 0:
        with pytest.raises(ConfigError, match=f"expected at most {memory.largest_num_pages}, found 9"):
            memory.check()
    else:
        memory.check()


def test_the_table_has_every_line_of_the_plan(pair: Pair) -> None:
    memory = LLM(config=config_for(pair)).memory
    console = Console(record=True, width=120)
    console.print(memory_table(memory))
    text = console.export_text()
    for line in memory.lines:
        assert line.name in text and spell_bytes(line.size) in text
    assert f"largest num_pages that fits: {memory.largest_num_pages}" in text and spell_bytes(memory.total) in text


def test_keys_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.memory_fraction: expected a number above 0, at most 1, found 0"):
        RuntimeConfig(memory_fraction=0)
    with pytest.raises(ConfigError, match=r"hardware\.memory_gib: expected a number >= 1e-09, at most 1e\+09, found -1\.0"):
        HardwareConfig(memory_gib=-1)


def test_a_loader_meets_the_device_meta(pair: Pair) -> None:
    """Loaders of every variant take it: nothing has data, everything has its shape."""
    llm = pair.llm(**CHAIN)
    target = llm_module.load_target(llm.plan.target, llm.plan.tap_layers, 64, torch.float32, torch.device("meta"))
    draft = load_object(llm.plan.variant.loader)(llm.plan.draft, target, 64, torch.float32, torch.device("meta"), None)
    assert all(p.is_meta for p in (*target.parameters(), *draft.parameters()))
    assert model_folder("demo").is_dir()
