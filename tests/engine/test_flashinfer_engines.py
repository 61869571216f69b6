"""Whole engines with planned attention: every token is the one that the reference engine emits, whatever joins, leaves or waits.

Kernels are the references, FlashInfer's wrappers the stand-ins, so a plan that is late, missing or of other lengths shows in the tokens. It
shows sooner in attention itself: where nothing is captured, every planned call is compared with the general op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.api.diff import diff
from graphspec.api.llm import LLM, generate_through
from graphspec.config.schema import Config, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.engine import kernel_choice
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError, ResourceError
from graphspec.graphs import compile as compile_module
from graphspec.graphs import memory
from graphspec.graphs.programs import PrefillKey
from graphspec.graphs.stages.mailbox import Message
from graphspec.kernels import select_kernels
from graphspec.kernels.flashinfer import version
from graphspec.kernels.flashinfer.kernels import FlashInferKernels
from graphspec.kernels.flashinfer.planner import Planner
from graphspec.models.attention import ChunkAttention, TreeAttention
from graphspec.plan.plan import Plan
from graphspec.shapes import GREEDY
from tests.support.checkpoints import VOCAB_SIZE, build_hf, write_hf
from tests.support.depths import Launches, ScriptedDepth
from tests.support.engines import Pair, ids, prompts, random_pair, watch_schedulers
from tests.support.flashinfer_wrappers import StandIns, install
from tests.support.gemma4 import build_gemma4
from tests.support.moe_checkpoints import YARN, add_heads, head_tensors, write_mixture
from tests.support.planned import generate, self_drafting
from tests.support.tape import TapeCapturer

CHAIN = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
SMALL = {"runtime": "eager", "prefill_chunks": [4, 8], "page_size": 4}
LENGTH, LAYERS = 12, 2
Engine = Callable[..., LLM]


def write_deepseek(path: Path, *, easy: bool) -> Path:
    """A target and its prediction head. An easy one is often predicted; of another every token hangs on attention."""
    keys = {"rope_parameters": YARN, "max_position_embeddings": 96}
    path, _ = write_mixture(path, "deepseek_v3", easy=easy, num_hidden_layers=LAYERS, **keys)
    return add_heads(path, head_tensors("deepseek_v3", LAYERS, **keys))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("deepseek"), easy=True)


@pytest.fixture(scope="module")
def attentive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("attentive"), easy=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return random_pair(tmp_path_factory.mktemp("llama"), build_hf("llama", num_hidden_layers=3, eos_token_id=VOCAB_SIZE - 1))


@pytest.fixture(params=[True], ids=["0.7"])
def stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    for name, value in (
        ("DTYPES", ("float32",)),
        ("PROMPT_DIMS", (16,)),
        ("LATENT_RANKS", (12,)),
        ("ROPE_STEP", 4),
        ("PAGE_SIZES", (4, 16)),
    ):
        monkeypatch.setattr(version, name, value)
    return install(monkeypatch, new=request.param)


@pytest.fixture
def engine(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Engines of one configuration, by FlashInfer or (``attention="auto"``) without."""

    def kernels(mode: str, attention: str, *_: Any, **__: Any) -> Any:
        references = select_kernels("reference", "reference", "cpu")
        functions = {f.name: getattr(references, f.name) for f in fields(references)}
        return FlashInferKernels(**functions, planner=Planner("cpu")) if attention == "flashinfer" else references

    monkeypatch.setattr(kernel_choice, "select_kernels", kernels)
    # Other callers of the choice would raise that FlashInfer needs a GPU.
    for module in (kernel_choice, memory):
        monkeypatch.setattr(module, "resolve", lambda *_: "reference")

    def build(path: Path, attention: str = "flashinfer", **keys: Any) -> LLM:
        return LLM(path, attention=attention, **{**SMALL, **keys})

    return build


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every planned call against the general op over the same pool; a name for each that had a valid query."""
    seen: list[str] = []
    for kind, method, without in ((TreeAttention, "latent", None), (ChunkAttention, "latent", {}), (ChunkAttention, "__call__", {})):
        original = getattr(kind, method)

        def both(self: Any, *arguments: Any, original: Any = original, without: Any = without) -> Tensor:
            found = original(self, *arguments)
            if self.bound:
                general = original(replace(self, bound=without), *arguments)
                torch.testing.assert_close(found[self.valid_BT], general[self.valid_BT], rtol=3e-6, atol=3e-6)
                assert not found[~self.valid_BT].any()
                seen.extend([type(self).__name__] if self.valid_BT.any() else [])
            return found

        monkeypatch.setattr(kind, method, both)
    return seen


SAMPLED = [SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=seed, top_p=0.9 if seed else 1.0) for seed in range(4)]


def both(engine: Engine, path: Path, prompt_ids: list[list[int]], params: Any, **keys: Any) -> LLM:
    """The engine with FlashInfer, after it emitted what the one without does."""
    planned, plain = engine(path, **keys), engine(path, attention="auto", **keys)
    assert plain.cycle.preparation is None and planned.cycle.preparation is not None
    assert ids(planned.generate(prompt_ids, params)) == ids(plain.generate(prompt_ids, params))
    return planned


@pytest.mark.parametrize(("stand_ins", "rows"), [(False, 3), (True, 1), (True, 3)], ids=["0.6-3", "0.7-1", "0.7-3"], indirect=["stand_ins"])
def test_a_chain_over_latent_rows(engine: Engine, compared: list[str], stand_ins: StandIns, deepseek: Path, rows: int) -> None:
    """Four requests on one or three rows: they join and leave; prompts are longer than a chunk and as short as one token."""
    prompt_ids = prompts(4, (9, 1, 13, 5), VOCAB_SIZE)
    llm = both(engine, deepseek, prompt_ids, SamplingParams(max_tokens=LENGTH), variant="mtp", **CHAIN, max_rows=rows)
    # Draft-extend and verification of 4 tokens, two draft steps of 1, chunks of the target; the head's own chunks stay with the general op.
    assert {run for run, _ in stand_ins.runs} == {"latent"} and {tokens for _, tokens in stand_ins.runs} == {1, 4, 8}
    assert not stand_ins.calls, "xqa has nothing to do with latent rows"
    cycles = [stage for program in llm.cycle.programs.values() for stage in program.stages if stage.prepared_calls]
    assert {stage.name: len(stage.prepared_calls) for stage in cycles} == {"draft_extend": 1, "draft_steps": 2, "verify": 1, "prefill": 1}
    assert llm.metrics is not None and 1.3 < llm.metrics.acceptance_length < 3.95, "runs of several lengths, or windows were not tested"
    assert compared.count("TreeAttention") > 40 and compared.count("ChunkAttention") > 5


def test_seeded_sampling(engine: Engine, compared: list[str], attentive: Path) -> None:
    both(engine, attentive, prompts(4, (9, 1, 13, 5), VOCAB_SIZE), SAMPLED, variant="mtp", **CHAIN, max_rows=3)
    assert {"TreeAttention", "ChunkAttention"} <= set(compared) and len(compared) > 40


@pytest.mark.parametrize(
    ("variant", "keys", "served"),
    [
        ("none", {}, {1, 4, 8}),
        ("none", {"page_size": 16}, {1, 4, 8}),
        ("ngram", {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}, {3, 4, 8}),
        # The target drafts for itself, from slot 0 on, and so its own chunks are planned too.
        ("standalone", {**CHAIN, "page_size": 1}, {1, 4, 8}),
    ],
)
def test_other_drafters_of_a_latent_target(
    engine: Engine, compared: list[str], stand_ins: StandIns, deepseek: Path, variant: str, keys: dict[str, Any], served: set[int]
) -> None:
    draft = {"draft": deepseek} if variant == "standalone" else {}
    llm = both(
        engine, deepseek, prompts(3, (9, 2, 6), VOCAB_SIZE), SamplingParams(max_tokens=8), variant=variant, max_rows=2, **keys, **draft
    )
    assert {tokens for _, tokens in stand_ins.runs} == served
    if variant == "standalone":
        prefill = next(stage for stage in llm.cycle.programs[PrefillKey(4, GREEDY)].stages if stage.name == "prefill")
        assert [call.pool for call in prefill.prepared_calls] == ["target", "draft"]


@pytest.mark.parametrize(
    ("variant", "served"),
    [
        # The KV of one layer follows from what it reads: catching up attends to nothing, and has nothing planned.
        ("mtp", {1, 3, 4, 8}),
        ("standalone", {1, 3, 4, 8, 10}),
    ],
)
def test_changing_depths_and_catching_up(
    engine: Engine,
    compared: list[str],
    stand_ins: StandIns,
    deepseek: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    served: set[int],
) -> None:
    """Plain cycles append to the window, the catch-up reads all of it: ten entries wide, of which four, or up to nine, count."""
    monkeypatch.setattr(LLM, "_adaptive_depth", lambda llm: ScriptedDepth([3, 2, 0, 0, 0, 3, 0, 2, *[0] * 12, 3]))
    prompt_ids, params = prompts(2, (9, 2), VOCAB_SIZE), SamplingParams(max_tokens=30, ignore_eos=True)
    keys = {"variant": variant, **CHAIN, "max_rows": 2, "depths": [0, 2], "backlog": 10, "max_context": 60}
    keys |= {"draft": deepseek} if variant == "standalone" else {}
    expected = ids(engine(deepseek, attention="auto", **keys).generate(prompt_ids, params))
    llm = engine(deepseek, **keys)
    launches = Launches(llm.cycle)
    assert ids(generate_through(llm, launches, prompt_ids, params)) == expected
    assert launches.depths == {-1, 0, 2, 3} and {tokens for _, tokens in stand_ins.runs} == served
    (catching_up,) = (p for key, p in llm.cycle.programs.items() if key == llm.plan.key(2, GREEDY, catch_up=True))
    (stage,) = (stage for stage in catching_up.stages if stage.name == "catch_up")
    assert [call.extent for call in stage.prepared_calls] == ([10] if variant == "standalone" else [])


def test_preemption(engine: Engine, compared: list[str], deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that gave its pages away comes back to others, and its window with one entry."""
    seen = watch_schedulers(monkeypatch)
    prompt_ids = prompts(4, (9, 12, 5, 16), VOCAB_SIZE)
    both(engine, deepseek, prompt_ids, SamplingParams(max_tokens=LENGTH, ignore_eos=True), variant="mtp", **CHAIN, num_pages=16, max_rows=4)
    assert seen[0].preempted > 0


@pytest.mark.parametrize("model", ["deepseek", "llama"])
def test_captured_programs_follow_the_plans(engine: Engine, stand_ins: StandIns, attentive: Path, llama: Pair, model: str) -> None:
    """Recorded operations alone, no Python of a program: nothing is planned inside, and replays see the lengths of their launch."""
    path, keys = (attentive, {"variant": "mtp", **CHAIN}) if model == "deepseek" else (llama.target, {"variant": "none", "page_size": 16})
    prompt_ids = prompts(3, (9, 1, 13), VOCAB_SIZE)
    expected = ids(engine(path, attention="auto", max_rows=2, **keys).generate(prompt_ids, SAMPLED[:3]))
    llm = engine(path, max_rows=2, **keys)
    llm.cycle._capturer = TapeCapturer(llm.cycle.arena)
    llm.warm_up(3)
    before = len(stand_ins.plans)
    assert all(program.replay is not None for program in llm.cycle.programs.values())
    assert ids(llm.generate(prompt_ids, SAMPLED[:3])) == expected
    launches = sum(program.replay.replays for program in llm.cycle.programs.values())  # type: ignore[union-attr]
    assert launches > 5 and len(stand_ins.plans) - before >= (launches if model == "deepseek" else 3)


def test_launches_outside_the_scheduler_are_planned_too(engine: Engine, attentive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readied beforehand, a launch is planned for the rows it then has, and planning it again changes nothing."""
    reported: list[list[tuple[int, int, list[int]]]] = []
    original = Planner.prepare

    def note(self: Planner, calls: Any, *arguments: Any) -> None:
        reported.append([(span.end, span.known, span.pages.tolist()) for spans in calls.values() for span in spans])
        original(self, calls, *arguments)

    monkeypatch.setattr(Planner, "prepare", note)
    llm = engine(attentive, variant="mtp", **CHAIN, max_rows=2)
    launch, pairs = llm.cycle.launch, []

    def readied(key: Any, message: Message) -> int:
        llm.cycle.ready(key, message)
        before = reported[-1]
        ticket = launch(key, message)
        pairs.append((before, reported[-1]))
        return ticket

    prompt_ids = prompts(3, (9, 1, 13), VOCAB_SIZE)
    expected = ids(engine(attentive, attention="auto", variant="mtp", **CHAIN, max_rows=2).generate(prompt_ids, SAMPLED[:3]))
    llm.warm_up(3)
    monkeypatch.setattr(llm.cycle, "launch", readied)
    assert ids(llm.generate(prompt_ids, SAMPLED[:3])) == expected
    assert len(pairs) > 5 and all(before == after != [] for before, after in pairs)


@pytest.mark.parametrize("structure", ["heads", "latent"])
def test_a_target_that_drafts_for_itself(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the GPU's test, in the sizes its kernels have: every draft is accepted, captured or not."""
    monkeypatch.setattr(version, "DTYPES", ("float32",))
    install(monkeypatch)

    def kernels(_: Plan) -> FlashInferKernels:
        references = select_kernels("reference", "reference", "cpu")
        return FlashInferKernels(**{f.name: getattr(references, f.name) for f in fields(references)}, planner=Planner("cpu"))

    keys = {"device": "cpu", "runtime": "eager", "mode": "reference", "dtype": "float32", "kernels": kernels}
    direct, captured = (generate(self_drafting(structure, **keys, capturer=c), (40, 3, 9, 1), 10) for c in (None, TapeCapturer))
    assert [r.output for r in direct] == [r.output for r in captured]
    assert all(r.metrics.cycle_tokens == [4, 4, 1] for r in direct)


@pytest.mark.parametrize("model", [pytest.param("deepseek", marks=pytest.mark.full), "llama"])
def test_programs_compile_whole(
    engine: Engine, stand_ins: StandIns, attentive: Path, llama: Pair, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage traced without a break, prompts included, and the traced code follows the plans; no code is generated."""

    class Direct:
        pool_bytes = 0

        def __init__(self, program: Callable[[], None]) -> None:
            self._program = program

        def __call__(self) -> None:
            self._program()

    class Capturer:
        def capture(self, program: Callable[[], None]) -> Direct:
            return Direct(program)

    monkeypatch.setattr(compile_module, "lookup_backend", lambda _: lambda module, inputs: module.forward)
    chain = {"variant": "mtp", "num_steps": 2, "topk": 1, "num_draft_tokens": 3}
    path, keys = (attentive, chain) if model == "deepseek" else (llama.target, {"variant": "none", "page_size": 16})
    keys |= {"max_rows": 1, "buckets": [1], "prefill_chunks": [8]}
    prompt_ids, params = prompts(2, (9, 3), VOCAB_SIZE), SamplingParams(max_tokens=8)
    expected = ids(engine(path, attention="auto", **keys).generate(prompt_ids, params))
    llm = engine(path, **{**keys, "runtime": "compiled"})
    llm.cycle._capturer = Capturer()
    assert ids(llm.generate(prompt_ids, params)) == expected and stand_ins.runs


def test_a_launch_on_the_plans_of_the_one_before_is_seen(engine: Engine, attentive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of these tests would show a plan that was not renewed."""
    prompt_ids = prompts(2, (9, 5), VOCAB_SIZE)
    expected = ids(engine(attentive, attention="auto", variant="none", max_rows=2).generate(prompt_ids, SAMPLED[:2]))
    original = Planner.prepare
    planned: set[Any] = set()

    def once(self: Planner, calls: Any, lanes: int, *rest: Any) -> None:
        # The inert plan while programs are built, then one more.
        fresh = {call for call in calls if (call, lanes, bool(calls[call])) not in planned}
        planned.update((call, lanes, bool(calls[call])) for call in calls)
        if fresh:
            original(self, {call: calls[call] for call in fresh}, lanes, *rest)

    monkeypatch.setattr(Planner, "prepare", once)
    assert ids(engine(attentive, variant="none", max_rows=2).generate(prompt_ids, SAMPLED[:2])) != expected


@pytest.mark.parametrize(
    ("variant", "rows", "pools"),
    # EAGLE's drafter skips token 0: its chunks stay with the general op. A small model as drafter reads all.
    [("none", 1, ["target"]), ("eagle3", 3, ["target"]), ("standalone", 3, ["target", "draft"])],
)
def test_prompts_of_heads(
    engine: Engine, compared: list[str], stand_ins: StandIns, llama: Pair, variant: str, rows: int, pools: list[str]
) -> None:
    draft = {"eagle3": {"draft": llama.draft, **CHAIN}, "standalone": {"draft": llama.target, **CHAIN}}.get(variant, {})
    keys = {"variant": variant, "max_rows": rows, "page_size": 16, "cycles_in_flight": 2, **draft}
    llm = both(engine, llama.target, prompts(4, (9, 1, 21, 8), VOCAB_SIZE), SAMPLED, **keys)
    assert {run for run, _ in stand_ins.runs} == {"prefill"} and {tokens for _, tokens in stand_ins.runs} == {4, 8}
    assert stand_ins.calls, "cycles run on xqa, several in flight"
    for key, program in llm.cycle.programs.items():
        planned = [call.pool for stage in program.stages for call in stage.prepared_calls]
        assert planned == (pools if isinstance(key, PrefillKey) else [])


def test_prompts_under_sliding_windows(engine: Engine, compared: list[str], stand_ins: StandIns, tmp_path: Path) -> None:
    """One plan for the layers with a window, one for those without."""
    keys = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
    pair = random_pair(tmp_path, build_hf("qwen2", head_dim=None, **keys, eos_token_id=VOCAB_SIZE - 1))
    llm = both(engine, pair.target, prompts(2, (19, 6), VOCAB_SIZE), SamplingParams(max_tokens=6), variant="none", max_rows=1, page_size=16)
    stage = next(stage for stage in llm.cycle.programs[PrefillKey(8, GREEDY)].stages if stage.name == "prefill")
    assert [call.window for call in stage.prepared_calls] == [None, 5] and stand_ins.runs.count(("prefill", 8)) % 3 == 0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cycles_in_flight": 2}, ("runtime.cycles_in_flight", "1 with kernels.attention=flashinfer", "host step")),
        (
            {"num_steps": 3, "topk": 2, "num_draft_tokens": 6},
            ("variant.topk", "1 with kernels.attention=flashinfer", "tree mask", "found 2"),
        ),
        ({"tree_choices": [[0], [1], [0, 0]]}, ("variant.topk", "1 with kernels.attention=flashinfer", "tree mask")),
    ],
)
def test_refused_over_latent_rows(engine: Engine, deepseek: Path, keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        engine(deepseek, **{"variant": "mtp", **keys})
    assert all(word in str(error.value) for word in words)


def test_shapes_refused(engine: Engine, deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "LATENT_RANKS", (512,))
    with pytest.raises(ConfigError, match=r"kernels\.attention, target.*512 compressed channels.*found 12"):
        engine(deepseek, variant="none")


def test_a_cycle_is_not_planned_over_one_in_flight(engine: Engine, deepseek: Path) -> None:
    llm = engine(deepseek, variant="none", max_rows=1)
    llm.cycle.plan = replace(llm.cycle.plan, ring_depth=3)
    llm.warm_up()
    key = llm.plan.key(1, GREEDY)
    llm.cycle.launch(key, Message(lanes=()))
    with pytest.raises(ResourceError, match="nothing in flight when the host prepares"):
        llm.cycle.launch(key, Message(lanes=()))


def test_comparing_runtimes_is_refused(engine: Engine, deepseek: Path) -> None:
    runtime = RuntimeConfig(name="eager", max_rows=1, buckets=[1])
    model, variant = ModelConfig(path=str(deepseek)), VariantConfig(name="none")
    config = Config(model=model, variant=variant, runtime=runtime, kernels=KernelsConfig(attention="flashinfer"))
    with pytest.raises(ConfigError, match=r"kernels\.attention.*without a host step"):
        diff(config, "eager", "eager", [1, 2])


def test_heads_of_several_shapes_are_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kernels\.attention: expected another implementation, since layers of the target have heads of"):
        engine(write_hf(build_gemma4("dense"), tmp_path), variant="none")
