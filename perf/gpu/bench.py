"""An engine with random weights whose rows are at a given context, and the time of its cycles.

Nothing is loaded: time depends on shapes, not on values. Acceptance is forced by ``accept=synthetic``, so the tokens are meaningless. The
``gpu`` tests of the same run (``make gpu-check``) show that captured programs equal their stages, and that the same programs are right with
real acceptance.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphspec.config.catalog import load_object, resolve_variant
from graphspec.config.schema import AcceptConfig, Config, HardwareConfig, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.dflash.facts import DFlashFacts
from graphspec.drafters.dflash.network import DFlashDraft
from graphspec.drafters.heads.eagle3_network import Eagle3Draft
from graphspec.facts import read_model_facts
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.stages.mailbox import Message
from graphspec.kernels import select_kernels
from graphspec.kernels.registry import KernelSet
from graphspec.lab.floor import FloorModel
from graphspec.lab.measure.machine import measure
from graphspec.models.decoder import Decoder
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import DTYPES, Status
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import GREEDY, CycleShape

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
"""Llama-3.1-8B without its RoPE scaling, which changes a table and no shape."""
EAGLE3_8B: dict[str, Any] = {
    **LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
}  # fmt: skip

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 1000000.0, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
JETSPEC_8B: dict[str, Any] = {
    **QWEN3_8B, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "block_size": 17, "causal_head": True},
}  # fmt: skip
"""JetSpec's block drafter for Qwen3-8B, with a block for a depth of 16."""
PEAK = 3200.0
"""Scale of the last norm's weight of a block drafter, times the square root of the hidden size: its distributions are then so narrow that
the best paths are as deep as the block. Random weights alone would give a wide and shallow tree, without long runs to accept."""

BLOCK = 50
"""Most cycles between two readings of the clock."""


@dataclass(frozen=True, slots=True)
class Case:
    """One engine: its drafter, rows and context.

    Attributes:
        name: of its rows in results.
        shape: (S, K, N); S = 0 decodes plainly.
        lanes: rows in the batch; one bucket of this size is captured.
        context: committed tokens of each row.
        length: forced acceptance length.
        keys: further keys of the kernels group (``mode``, ``numerics``, ``programmatic_launch``).
        variant: ``eagle3`` or ``dflash``.
    """

    name: str
    shape: CycleShape
    lanes: int = 1
    context: int = 2048
    length: float = 4.0
    keys: tuple[tuple[str, Any], ...] = ()
    variant: str = "eagle3"


def write_configs(folder: Path, target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Write folders with a ``config.json`` each; no other file is read."""
    for name, values in (("target", target or LLAMA_8B), ("draft", draft or EAGLE3_8B)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder / "target", folder / "draft"


Networks = tuple[Decoder, Eagle3Draft | DFlashDraft]
"""Target and draft."""


def fill_at_random(network: nn.Module, seed: int = 0) -> None:
    """Fill with small normal weights, and norms with ones, so that activations stay finite at any depth."""
    generator: torch.Generator | None = None
    for name, parameter in network.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed)
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)


def draft_of(facts: Any, max_positions: int, target: Decoder) -> Eagle3Draft | DFlashDraft:
    """A draft network without weights that shares with its target what published drafts share."""
    if isinstance(facts, DFlashFacts):
        return DFlashDraft(facts, max_positions, target.embed_tokens, target.lm_head)
    return Eagle3Draft(facts, max_positions, embed_tokens=target.embed_tokens)


class Bench:
    """An engine with random weights, every row at ``case.context``, whose program can be launched repeatedly.

    Args:
        case: what to build.
        target, draft: folders with a ``config.json``.
        device: ``cuda``; ``cpu`` only shows that the code runs.
        runtime: preset of the runtime.
        networks: of an earlier case with the same configs; making weights takes longest.
    """

    def __init__(
        self, case: Case, target: Path, draft: Path, *, device: str = "cuda", runtime: str = "captured",
        networks: Networks | None = None,
    ) -> None:  # fmt: skip
        self.case = case
        self.config = self.config_of(case, target, draft, device, runtime)
        facts = read_model_facts(target)
        head = load_object(resolve_variant(case.variant).facts)(draft, facts)
        speculates = case.shape.num_steps > 0
        self.plan: Plan = make_plan(self.config, facts, head if speculates else None, device=device)
        self.networks = networks or self._networks(self.plan, facts, head, device)
        self._claim_networks()
        self.cycle = Cycle(self.plan, self.networks[0], self.networks[1] if speculates else None, self.kernels_of(self.plan))
        self.key = self.plan.graph_keys(GREEDY)[0]
        self.cycle.prepare([self.key])
        self.message = Message(lanes=list(range(case.lanes)))

    @staticmethod
    def config_of(case: Case, target: Path, draft: Path, device: str, runtime: str) -> Config:
        """The configuration of an engine for ``case``."""
        shape, speculates = case.shape, case.shape.num_steps > 0
        keys = {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens} if speculates else {}
        return Config(
            model=ModelConfig(path=str(target), max_context=case.context + 1024),
            variant=VariantConfig(name=case.variant if speculates else "none", draft=str(draft) if speculates else None, **keys),
            runtime=RuntimeConfig(name=runtime, max_rows=case.lanes, buckets=[case.lanes], page_size=16, cycles_in_flight=2),
            kernels=KernelsConfig(**dict(case.keys)),
            accept=AcceptConfig(rule="synthetic", synthetic_length=min(case.length, shape.num_steps + 1)) if speculates else AcceptConfig(),
            hardware=HardwareConfig(device=device, dtype="bfloat16" if device == "cuda" else "float32"),
        )

    def _claim_networks(self) -> None:
        """Set this engine's kernels and taps in the networks, which an earlier engine may have shared."""
        use_kernels(self.kernels_of(self.plan), *self.networks)
        self.networks[0].tap_layers = self.plan.tap_layers

    @staticmethod
    def kernels_of(plan: Plan) -> KernelSet:
        """The kernels of a plan."""
        return select_kernels(
            plan.kernels, plan.attention, plan.device, linear=plan.linear, dtype=plan.dtype, numerics=plan.numerics,
            programmatic_launch=plan.programmatic_launch is True,
        )  # fmt: skip

    @staticmethod
    def _networks(plan: Plan, facts: Any, head: Any, device: str) -> Networks:
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[plan.dtype])
        try:
            with torch.device(device):
                target = Decoder(facts, head.tap_layers, plan.max_positions)
                draft = draft_of(head, plan.max_positions, target)
        finally:
            torch.set_default_dtype(before)
        for network in (target, draft):
            network.rotary.to(device)
            fill_at_random(network)
        if isinstance(draft, DFlashDraft):
            draft.norm.weight.data.fill_(PEAK / facts.hidden_size**0.5)
        if draft.target_token_Vd is not None:
            generator = torch.Generator().manual_seed(0)
            chosen = torch.randperm(facts.vocab_size, generator=generator)[: head.draft_vocab_size].sort().values
            draft.target_token_Vd = chosen.to(device)
        return target.eval(), draft.eval()

    def rewind(self) -> None:
        """Put every row back to ``case.context``, live, with pages for its whole context."""
        arena, plan, lanes = self.cycle.arena, self.plan, self.case.lanes
        rows = slice(0, lanes)
        arena["seq_len_R"][rows] = self.case.context
        arena["status_R"][rows] = Status.LIVE
        arena["budget_R"][rows] = 1 << 40
        arena["draft_len_R"][rows] = plan.shape.num_steps
        arena["window_len_R"][rows] = 1
        arena["window_token_RAc"][rows] = -1
        arena["window_token_RAc"][rows, 0] = 1
        arena["stop_id_RE"][rows] = -1
        pages = torch.arange(1, 1 + lanes * plan.table_width, device=arena.device, dtype=torch.int32)
        arena["page_table_RP"][rows] = pages.view(lanes, plan.table_width)
        mail = torch.zeros(self.cycle.layout.size, dtype=torch.int64)
        self.cycle.layout.encode(self.message, mail)
        arena["mail"].copy_(mail)

    def cycles_before_rewind(self) -> int:
        """Cycles of a block: few enough for several blocks per second and for every row to stay in its context."""
        return min(BLOCK, 900 // self.plan.accept_width)

    def milliseconds(self, seconds: float = 1.5, warm_up: float = 0.5) -> dict[str, float]:
        """Time of one cycle, replayed back to back: median, 10th and 90th percentile over blocks of replays."""
        return measure(self.cycle.programs[self.key], self.rewind, self.cycles_before_rewind(), self.plan.device, seconds, warm_up)

    def host_microseconds(self, cycles: int = 200) -> float:
        """Host time of one launch and one read, waiting for the device not counted; median."""
        spent = []
        for number in range(cycles):
            if number % self.cycles_before_rewind() == 0:
                self._wait()
                self.rewind()
            began = time.perf_counter()
            ticket = self.cycle.launch(self.key, self.message)
            launched = time.perf_counter()
            self._wait()
            ready = time.perf_counter()
            self.cycle.read(ticket)
            spent.append((launched - began) + (time.perf_counter() - ready))
        return 1e6 * statistics.median(spent)

    def accepted_length(self, cycles: int = 8) -> float:
        """Tokens per row and cycle: the forced length, or less where the tree of random weights is shallower."""
        self._wait()
        self.rewind()
        found = []
        for _ in range(min(cycles, self.cycles_before_rewind())):
            entry = self.cycle.read(self.cycle.launch(self.key, self.message))
            found += [len(tokens) for tokens in entry.tokens[: self.case.lanes]]
        return statistics.mean(found)

    def _wait(self) -> None:
        if self.plan.device == "cuda":
            torch.cuda.synchronize()

    def stage_milliseconds(self, seconds: float = 0.3) -> dict[str, float]:
        """Milliseconds that each stage adds: for every i the first i stages are captured, and differences taken.

        A single stage can't be repeated, because it reads the results of the stages before it. Stages are compiled one by one here, so
        their sum is more than the cycle, where kernels fuse across stages.
        """
        from graphspec.graphs.capture import Capturer

        # Stages are compiled when they are first called.
        self._claim_networks()
        program, found, before = self.cycle.programs[self.key], {}, 0.0
        capturer = Capturer(self.cycle.arena) if self.plan.runtime.captured else None
        for count in range(1, len(program.steps) + 1):

            def prefix(count: int = count) -> None:
                for step in program.steps[:count]:
                    step()

            self.rewind()
            with torch.no_grad():
                prefix()
                run = capturer.capture(prefix) if capturer else prefix
            upto = measure(run, self.rewind, self.cycles_before_rewind(), self.plan.device, seconds, 0.05)["median"]
            found[program.stages[count - 1].name] = upto - before
            before = upto
        self.rewind()
        return found

    def floor_bytes(self) -> int:
        """Bytes one cycle must move, see :mod:`graphspec.lab.floor`."""
        target, draft = self.networks
        plan, case = self.plan, self.case
        head = draft.facts if case.shape.num_steps else None
        model = FloorModel.of_networks(plan.target, target, head, draft if head else None, plan.dtype)
        return round(sum(stage.bytes for stage in model.stages(case.shape, case.lanes, case.context)))
