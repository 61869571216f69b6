"""What only a GPU can show: that a replayed graph does, to the bit, what its kernels do when launched one by one, and that nothing waits.

Run by ``make gpu-check``.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.errors import CaptureError
from graphspec.facts.folders import model_folder
from graphspec.graphs.capture import Captured
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key, PrefillKey
from graphspec.graphs.stages.mailbox import Chunk, Join, Message
from graphspec.kernels import select_kernels
from graphspec.models.layers import use_kernels
from graphspec.shapes import SAMPLED, GraphKey, SamplingClass
from tests.gpu.limits import seconds
from tests.support.tiny import SHAPES, STRUCTURES, move, same_bits, structure_plan, tiny_networks

# The versions on a GPU machine are its own, and so are their warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
KINDS = ("mail", "state", "lane", "ring", "kv")
BUCKETS = {"reference": [1, 2, 4, 8], "compiled": [4], "fused": [1, 4]}
PROMPTS = [
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n    parser = ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]
RUNTIME = "captured"


def build(
    shape: str, mode: str, *, runtime: str = RUNTIME, cycles_in_flight: int = 1, budget: int = 80, sampling: SamplingClass = SAMPLED
) -> Cycle:
    """A cycle of the tiny pair with three requests after their prefill: two sampled, one greedy; filters where the class has them."""
    plan = structure_plan(
        shape, device=DEVICE, runtime=runtime, mode=mode, cycles_in_flight=cycles_in_flight, buckets=BUCKETS[mode],
        max_rows=BUCKETS[mode][-1],
    )  # fmt: skip
    networks = tiny_networks(plan)
    move(networks.target, DEVICE)
    move(networks.draft, DEVICE)
    kernels = select_kernels(plan.kernels, plan.attention, DEVICE, linear=plan.linear)
    use_kernels(kernels, networks.target, networks.draft)
    cycle = Cycle(plan, networks.target, networks.draft, kernels)
    prefill: Key = PrefillKey(16, sampling)
    cycle.prepare([*plan.graph_keys(sampling), prefill])
    for row, temperature in enumerate((0.9, 0.0, 0.6)):
        tokens = [(7 * row + 3 * i) % 61 for i in range(9 + row)]
        join = Join(
            row=row, budget=budget, seed=row, temperature=temperature, draft_len=plan.shape.num_steps, stop_ids=(),
            top_k=40, top_p=0.8, min_p=0.001, repetition=1.2, presence=0.3, frequency=0.1,
        )  # fmt: skip
        if sampling.bias:
            ids, added = torch.full((2, plan.max_logit_bias), -1).numpy()
            ids[:2], added[:2] = (5, 6), (1, -2)
            cycle.write_row(row, {"bias_id_RI": ids, "bias_value_RI": added})
        pages = [(row, column, 1 + row * plan.table_width + column) for column in range(plan.table_width)]
        while pages:
            part, pages = pages[: plan.page_updates], pages[plan.page_updates :]
            cycle.read(cycle.launch(prefill, Message(lanes=(row,), pages=part, joins=[join], chunks=[Chunk(tokens, 0, len(tokens))])))
    return cycle


def contents(cycle: Cycle) -> dict[str, Tensor]:
    """Every slot; the pools without the dummy page, where suppressed writes land in any order."""
    return {name: tensor[:, :, 1:] if name.endswith("_kv") else tensor for name, tensor in cycle.arena.snapshot(KINDS).items()}


def shuffled(cycle: Cycle, launches: int, sampling: SamplingClass = SAMPLED) -> Iterator[tuple[GraphKey, Message]]:
    """Launches over all buckets in random order, each with a random choice of lanes."""
    order = random.Random(0)
    for _ in range(launches):
        bucket = order.choice(cycle.plan.buckets)
        rows = order.sample(range(3), order.randint(1, min(bucket, 3)))
        yield GraphKey(bucket, cycle.plan.shape, sampling), Message(lanes=rows)


def run_directly(cycle: Cycle, key: GraphKey, message: Message) -> dict[str, Tensor]:
    """The kernels of a program launched one by one on ``message``, as a cycle gets it; returns the content of every slot."""
    mail = torch.zeros(cycle.layout.size, dtype=torch.int64)
    cycle.layout.encode(message, mail)
    cycle.arena["mail"][: cycle.layout.joins].copy_(mail[: cycle.layout.joins])
    with torch.no_grad():
        cycle.programs[key].direct()
    return contents(cycle)


DECIDES = [("none", "fused"), ("chain", "fused"), ("tree", "fused"), ("tree", "reference")]
"""Captured against direct: what the core of the checks looks at."""


def marked(shape: str, mode: str) -> Any:
    """One case; ``core`` where it decides."""
    return pytest.param(shape, mode, marks=[pytest.mark.core] if (shape, mode) in DECIDES else [])


@pytest.mark.parametrize(
    ("shape", "mode"),
    [marked(shape, mode) for mode in ("reference", "fused") for shape in STRUCTURES] + [("none", "compiled"), ("tree", "compiled")],
)
def test_captured_equals_direct_bitwise(shape: str, mode: str) -> None:
    """The same kernels from the same state: launched one by one, then replayed. Buckets come in random order."""
    cycle = build(shape, mode)
    grown = 0
    for key, message in shuffled(cycle, 12):
        before = cycle.arena.snapshot(KINDS)
        direct = run_directly(cycle, key, message)
        cycle.arena.restore(before)
        assert isinstance(cycle.programs[key].replay, Captured)
        entry = cycle.read(cycle.launch(key, message))
        captured = contents(cycle)
        assert [name for name in direct if not same_bits(direct[name], captured[name])] == [], key
        grown += sum(map(len, entry.tokens))
    assert grown > 12


@pytest.mark.parametrize("mode", ["reference", "fused"])
@pytest.mark.parametrize("shape", ["none", "tree"])
def test_filters_give_the_same_bits_every_time(shape: str, mode: str) -> None:
    """Top-p is a sum over the vocabulary: every replay and every direct launch from one state must cut alike."""
    every = SamplingClass(True, True, True, True, 2, True, True, True)
    cycle = build(shape, mode, sampling=every)
    for key, message in shuffled(cycle, 4, every):
        before = cycle.arena.snapshot(KINDS)
        first = run_directly(cycle, key, message)
        for _ in range(10):
            cycle.arena.restore(before)
            cycle.programs[key]()
            assert [name for name, tensor in contents(cycle).items() if name != "mail" and not same_bits(first[name], tensor)] == [], key
            cycle.arena.restore(before)
            again = run_directly(cycle, key, message)
            assert [name for name in first if not same_bits(first[name], again[name])] == [], key
        cycle.arena.restore(before)
        cycle.read(cycle.launch(key, message))


@pytest.mark.parametrize("shape", SHAPES)
def test_captured_equals_eager_tokens(shape: str) -> None:
    """Two engines over the same kernels, one replaying, one launching; nothing shared but the weights."""
    captured, direct = build(shape, "reference"), build(shape, "reference", runtime="eager")
    for key, message in shuffled(captured, 12):
        entries = [cycle.read(cycle.launch(key, message)) for cycle in (captured, direct)]
        lanes = len(message.lanes)
        assert entries[0].tokens[:lanes] == entries[1].tokens[:lanes]
        assert entries[0].status[:lanes] == entries[1].status[:lanes]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """The host may launch in here, and wait for nothing."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("runtime", "mode"),
    [
        ("captured", "reference"),
        ("captured", "compiled"),
        pytest.param("captured", "fused", marks=pytest.mark.core),
        ("eager", "reference"),
    ],
)
@pytest.mark.parametrize("shape", ["none", "tree"])
def test_a_launch_never_waits_and_a_replay_never_allocates(shape: str, runtime: str, mode: str) -> None:
    cycle = build(shape, mode, runtime=runtime, cycles_in_flight=3)
    launches = list(shuffled(cycle, 9))
    tickets = []
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):  # the detector detects
        torch.ones(1, device=DEVICE).item()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for key, message in launches:
        if len(tickets) == 3:
            cycle.read(tickets.pop(0))
        with waiting_is_an_error():
            tickets.append(cycle.launch(key, message))
    if runtime == "captured":
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    for ticket in tickets:
        cycle.read(ticket)


def test_a_moved_buffer_is_noticed() -> None:
    cycle = build("chain", "reference")
    keys = cycle.plan.graph_keys(SAMPLED)
    cycle.prepare(keys)
    cycle.arena._tensors["seq_len_R"] = cycle.arena["seq_len_R"].clone()
    with pytest.raises(CaptureError, match="seq_len_R"):
        cycle.prepare(keys)


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("shape", ["none", "tree"])
def test_cycles_queued_ahead_read_in_order(shape: str, run_ahead: int) -> None:
    """A message and a ring entry belong to their launch, however late they are read. One bucket, so every GEMM has one shape."""
    ahead, plain = (build(shape, "reference", cycles_in_flight=n + 1, budget=8) for n in (run_ahead, 0))
    order, tickets, queued, read = random.Random(1), [], [], []
    for _ in range(15):
        key, message = GraphKey(4, plain.plan.shape, SAMPLED), Message(lanes=order.sample(range(3), order.randint(1, 3)))
        read.append(plain.read(plain.launch(key, message)))
        if len(tickets) > run_ahead:
            queued.append(ahead.read(tickets.pop(0)))
        tickets.append(ahead.launch(key, message))
    queued += [ahead.read(ticket) for ticket in tickets]
    assert queued == read
    assert {status for entry in read for status in entry.status} >= {1, 3}, "no row was live, or none reached its budget"


def demo(shape: str, **keys: object) -> LLM:
    """The demo model in float32; without programmatic launch, whatever the default.

    Nothing is captured at load: a check has time for the class it needs.
    """
    wanted = SHAPES[shape]
    keys = {"programmatic_launch": False, "sampling_classes": [], **keys}
    if wanted.num_steps:
        keys |= {"num_steps": wanted.num_steps, "topk": wanted.topk, "num_draft_tokens": wanted.num_draft_tokens}
    return LLM(variant="eagle3" if wanted.num_steps else "none", device=DEVICE, dtype="float32", **keys)  # type: ignore[arg-type]


def greedy_by_transformers() -> list[list[int]]:
    """Of the same weights, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(DEVICE)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer.encode(prompt)], device=DEVICE)
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=64)
        found.append(out[0, tokens.shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy_by_transformers()


@pytest.mark.parametrize(
    ("shape", "runtime", "mode"),
    [(shape, "captured", mode) for mode in ("reference", "compiled") for shape in ("none", "chain", "tree")]
    + [pytest.param(shape, "captured", "fused", marks=pytest.mark.core) for shape in ("none", "chain", "tree")],
)
def test_greedy_tokens_equal_transformers(shape: str, runtime: str, mode: str, expected: list[list[int]]) -> None:
    llm = demo(shape, runtime=runtime, mode=mode, buckets=[4], max_rows=4)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS[::-1]):
        outputs = llm.generate(prompts, params)
        assert [out.token_ids for out in outputs] == (expected if prompts is PROMPTS else expected[::-1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_run_ahead_changes_no_token(temperature: float) -> None:
    params = [SamplingParams(max_tokens=48, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    tokens = []
    for run_ahead in (0, 1):
        llm = demo("tree", runtime="captured", mode="reference", buckets=[4], max_rows=4, cycles_in_flight=run_ahead + 1)
        tokens.append([out.token_ids for out in llm.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1]
    assert [len(t) for t in tokens[0]] == [48] * len(PROMPTS)


VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("eagle", {"num_steps": 4, "topk": 4, "num_draft_tokens": 16}),
    ("eagle", {"tree_choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}),
    ("mtp", {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}),
    ("standalone", {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}),
    ("ngram", {}),
    ("ngram_trie", {}),
)


@pytest.mark.parametrize(("variant", "keys"), VARIANTS)
@pytest.mark.parametrize("mode", ["reference", "fused"])
def test_every_variant_gives_the_targets_own_tokens(mode: str, variant: str, keys: dict[str, object], expected: list[list[int]]) -> None:
    common: dict[str, Any] = {
        "device": DEVICE,
        "dtype": "float32",
        "runtime": RUNTIME,
        "buckets": [4],
        "max_rows": 4,
        "sampling_classes": [],
    }
    llm = LLM(variant=variant, mode=mode, **common, **keys)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=64, ignore_eos=True))
    assert [out.token_ids for out in outputs] == expected


CHAINS: tuple[tuple[str, dict[str, object]], ...] = (
    ("eagle3", {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}),
    ("eagle", {"num_steps": 7, "topk": 1, "num_draft_tokens": 8}),
    ("mtp", {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}),
    ("standalone", {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}),
)
TREES: tuple[tuple[str, dict[str, object]], ...] = (
    ("eagle3", {"num_steps": 4, "topk": 4, "num_draft_tokens": 16}),
    ("ngram", {"num_steps": 4, "topk": 4, "num_draft_tokens": 16}),
)


def invariant(variant: str, keys: dict[str, object]) -> list[dict[str, Any]]:
    """An engine that decodes plainly and one that drafts, both under batch-invariant numerics."""
    common = {"device": DEVICE, "dtype": "bfloat16", "runtime": RUNTIME, "mode": "fused", "numerics": "batch_invariant", "max_rows": 4}
    common["sampling_classes"] = []
    return [{"variant": "none", "buckets": [1, 4], **common}, {"variant": variant, "buckets": [4], **common, **keys}]


@pytest.mark.seconds(lambda variant, keys, temperature: seconds(invariant(variant, keys)))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("variant", "keys"), (*CHAINS, *TREES))
def test_bfloat16_drafts_repeat_plain_decoding_under_batch_invariant_numerics(
    variant: str, keys: dict[str, object], temperature: float
) -> None:
    """One order of summation for every number of rows: what is verified with a token does not reach its logits."""
    params = [SamplingParams(max_tokens=96, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    plain, drafted = ([out.token_ids for out in LLM(**engine).generate(PROMPTS, params)] for engine in invariant(variant, keys))
    assert plain == drafted


@pytest.mark.core
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_poison_between_launches_changes_no_token(shape: str, expected: list[list[int]]) -> None:
    """Debug mode spoils every buffer that lives for one cycle before each replay, and refuses a call that waits."""
    llm = demo(shape, runtime="captured", mode="fused", buckets=[4], max_rows=4, debug=True)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=64, ignore_eos=True))
    assert [out.token_ids for out in outputs] == expected


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer comes with the CUDA toolkit")
@pytest.mark.seconds(200)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_small_kernels_are_clean_under_the_sanitizer(tool: str) -> None:
    """Out-of-bounds accesses and shared-memory races of the kernels that decide tokens, on their smallest cases."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7", sys.executable, "-m", "tests.gpu.smallest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
