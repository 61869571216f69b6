"""The Python API: ``LLM(...).generate(...)`` and ``.stream(...)``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch

from ..buffers import DTYPES
from ..catalog import load_object, resolve_variant
from ..config import Config
from ..errors import ConfigError
from ..facts import check_tokenizer, read_model_facts
from ..graphs.capture import CaptureRecord
from ..graphs.cycle import Cycle, Progress
from ..graphs.memory import fit_memory
from ..graphs.programs import Key
from ..graphs.ranks import FollowingCycle, LeadingCycle
from ..kernels import resolve, select_kernels
from ..models.layers import join_ranks, use_kernels
from ..models.stack import pack_network, uses_packed_weights
from ..models.target import load_target
from ..models.token_map import apply_token_map, load_token_map
from ..paths import user_path
from ..plan import Plan, make_plan
from ..shapes import GREEDY, SamplingClass
from . import ranks
from .arguments import check_cycles, check_launcher, check_progress, check_warm_up, engine_config
from .calls import Exclusive
from .depth import AdaptiveDepth, DeepestCycles, DepthPolicy
from .device import resolve_device
from .engine import Engine
from .events import Stream
from .folders import DEMO, draft_folder, model_folder
from .grammar import Grammars
from .launcher import Launcher
from .outputs import Metrics, Output, StreamEvent, TreeSnapshot, make_output, summarise
from .priority import Deadline, Priority, set_priority_and_deadline
from .programmatic import resolve as resolve_programmatic
from .prompts import Params, Prompt, make_requests, one_of_params
from .proposer import Proposer
from .request import Request, SamplingParams
from .self_test import AcceptanceTest
from .stops import OutputText
from .text import Conversation, Tokenizer, conversations, has_tokenizer
from .tuning import read_table, tune_program

logger = logging.getLogger(__name__)


class LLM:
    """An engine for one target and one way to draft.

    Args:
        model: folder of a Hugging Face checkpoint, its name on the Hub (``org/model``, with ``revision=``), or ``demo``.
        variant: an entry of the catalog (``eagle3``, ``none``).
        draft: folder of the draft checkpoint, or its name on the Hub; None for the demo model's own draft.
        runtime: ``eager``, ``compiled`` or ``captured``; ``auto`` is captured on a GPU, compiled on a CPU. ``plan.runtime`` has the choice.
        config: a whole configuration instead of the arguments above.
        progress: called as ``progress(phase, done, total)`` during load and compilation, in the thread that waits for them.
        overrides: any other configuration key by its bare name, those of ``sampling`` apart, which belong to each request
            (``num_steps=5, topk=4, num_draft_tokens=16, page_size=1``).

    Raises:
        ConfigError: a bad value. CheckpointError: a checkpoint that is missing, damaged or does not fit.
    """

    def __init__(
        self,
        model: str | Path = DEMO,
        variant: str = "eagle3",
        draft: str | Path | None = None,
        runtime: str = "auto",
        *,
        config: Config | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        self.config = engine_config(config, overrides, model=model, variant=variant, draft=draft, runtime=runtime)
        check_progress(progress, ConfigError)
        self.progress = progress
        self.folder = model_folder(self.config.model.path, self.config.model.revision)
        """Of the target's checkpoint."""
        size = self.config.runtime.tensor_parallel
        self.ranks: ranks.Ranks | None = None
        """The processes that hold the target together; None: this one alone."""
        if size > 1:
            self.ranks = ranks.existing_ranks(size, self.config.hardware.device)
        planned = self._plan(0 if self.ranks is None else self.ranks.rank)
        if size > 1 and self.ranks is None:
            self.ranks = ranks.start(self.config, planned.device)
        try:
            self._open(planned, progress)
        except BaseException:
            if self.ranks is not None:
                self.ranks.end(at_once=True)
            raise

    def _open(self, planned: Plan, progress: Progress | None) -> None:
        self.plan, self.memory = fit_memory(planned, self.config)
        if self.ranks is not None:
            # Another rank may have less memory.
            chunks, pages = self.ranks.agree(self.plan.prefill_chunks, self.plan.num_pages)
            self.plan = replace(self.plan, prefill_chunks=chunks, num_pages=pages)
        self.memory.check()
        if self.plan.prefill_chunks != planned.prefill_chunks:
            logger.warning(
                "memory is short: prompts are read in chunks of up to %d tokens, not %d (lower runtime.num_pages, or set "
                "runtime.prefill_chunks)", self.plan.prefill_chunks[-1], planned.prefill_chunks[-1],
            )  # fmt: skip
        logger.info("runtime: %s", self.plan.runtime)
        logger.info("memory: %s", self.memory.text())
        tokens, rows = (self.plan.num_pages - 1) * self.plan.page_size, (self.plan.num_pages - 1) / self.plan.table_width
        logger.info("KV pools: %d tokens, shared by %d rows; %.1f rows of %d", tokens, self.plan.max_rows, rows, self.plan.max_context)
        self.cycle = self._load()
        self._close_ranks = self.ranks.lead_or_follow(self.cycle) if self.ranks is not None else None
        self.metrics: Metrics | None = None
        self._engine = Engine(self.cycle, self._load_proposer(), self._adaptive_depth(), progress)
        self.load = self._engine.load
        """What there is to do now, as :class:`graphspec.engine.meter.Load`; any thread may ask."""
        self._acceptance_test = AcceptanceTest(self.plan)
        self._has_tokenizer = has_tokenizer(self.folder)
        self._grammars = Grammars(self.plan)
        if self.plan.runtime.captured:
            # Capturing a class later would make all other callers wait.
            self._engine.prepare(self.plan.max_rows, *self.plan.sampling_classes)

    @classmethod
    def from_config(cls, config: Config, progress: Progress | None = None) -> LLM:
        """An engine from a whole configuration, as :func:`graphspec.load_config` gives it."""
        return cls(config=config, progress=progress)

    def _plan(self, rank: int = 0) -> Plan:
        hardware = self.config.hardware
        device = resolve_device(hardware.device)
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("hardware.device", "cpu or auto (torch sees no CUDA device)", "cuda")
        if hardware.threads is not None:
            torch.set_num_threads(hardware.threads)
        elif device == "cpu" and self.config.runtime.tensor_parallel > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // self.config.runtime.tensor_parallel))
        if device == "cpu":
            # Denormals make CPU kernels many times slower and carry no information here.
            torch.set_flush_denormal(True)
        variant = resolve_variant(self.config.variant.name)
        target = read_model_facts(self.folder)
        draft = None
        if variant.has_network:
            folder = draft_folder(self.config, variant, self.folder)
            draft = load_object(variant.facts)(folder, target)
            check_tokenizer(folder, self.folder)
        elif self.config.variant.draft is not None:
            raise ConfigError(
                "variant.draft", f"nothing for variant {variant.name!r}, which has no draft network", self.config.variant.draft
            )
        return make_plan(self.config, target.of_rank(rank, self.config.runtime.tensor_parallel), draft, device=device)

    def _load(self) -> Cycle:
        plan = self.plan
        dtype, device = DTYPES[plan.dtype], torch.device(plan.device)

        def report(phase: str) -> Callable[[int, int], None] | None:
            return (lambda done, total: self.progress(phase, done, total)) if self.progress else None  # type: ignore[misc]

        table = None
        if (table_path := self.config.kernels.linear_table) is not None:
            if resolve("kernels.linear", plan.linear, plan.kernels, plan.device, plan.dtype) != "fused":
                raise ConfigError(
                    "kernels.linear_table", f"null with kernels.mode={plan.kernels}, unless linear layers are fused", table_path
                )
            place = user_path("kernels.linear_table", table_path)
            table = read_table(place, device)
        self.programmatic_launch = resolve_programmatic(plan.programmatic_launch, plan.kernels, device)
        """Fused kernels start while the one before them drains."""
        kernels = select_kernels(
            plan.kernels,
            plan.attention,
            plan.device,
            linear=plan.linear,
            dtype=plan.dtype,
            numerics=plan.numerics,
            programmatic_launch=self.programmatic_launch,
            linear_table=table,
        )
        for name, facts in (("target", plan.target), ("draft", plan.draft.decoder if plan.draft is not None else None)):
            # Where the drafter skips tokens, its attention stays with the general kernels, except over latent rows with a host step.
            if facts is not None and (
                name == "target" or plan.variant.shift == 0 or (plan.cycles_need_host_step and facts.latent is not None)
            ):
                heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
                latent = (facts.latent.rank, facts.latent.rope_dim) if facts.latent is not None else None
                kernels.check_model(name, plan.page_size, plan.dtype, *heads, facts.sliding_window, latent=latent)
        target = load_target(plan.target, plan.tap_layers, plan.max_positions, dtype, device, report("load target"))
        draft = None
        if plan.draft is not None:
            draft = load_object(plan.variant.loader)(plan.draft, target, plan.max_positions, dtype, device, report("load draft"))
            if (token_map := self.config.variant.token_map) is not None:
                apply_token_map(draft, load_token_map(user_path("variant.token_map", token_map), plan.target.vocab_size))
        networks = {"target": target} if draft is None else {"target": target, "draft": draft}
        if self.ranks is not None:
            comm = self.ranks.comm(device)
            for network in networks.values():
                join_ranks(network, comm)
        native = uses_packed_weights(plan)
        self.decoders: dict[str, str] = {}
        """In words, how the decoder layers of target and draft run."""
        for name, network in networks.items():
            reason = pack_network(network, plan) if native else "set by kernels.mode, kernels.linear or kernels.attention"
            if not native:
                use_kernels(network, kernels)
            self.decoders[name] = f"op by op: {reason}" if reason else "one native op per pass"
        # A second team of threads would compete for the same cores, and little work is left between native ops.
        loop_threads = 1 if native else None
        tuner = partial(tune_program, table, place, tuple(networks.values()), device) if table is not None else None
        make: Callable[..., Cycle] = Cycle
        if self.ranks is not None:
            make = partial(FollowingCycle, comm=comm) if self.ranks.rank else partial(LeadingCycle, comm=comm, channel=self.ranks.channel)
        return make(plan, target, draft, kernels, memory=self.memory, tuner=tuner, loop_threads=loop_threads)

    @property
    def depth_policy(self) -> DepthPolicy | None:
        """Chooses the draft depth of every cycle; what it learns of the traffic lasts as long as the engine. None: it never changes."""
        return self._engine.policy

    @depth_policy.setter
    def depth_policy(self, policy: DepthPolicy | None) -> None:
        self._engine.set_policy(policy)

    def _adaptive_depth(self) -> AdaptiveDepth | None:
        plan, adaptive = self.plan, self.config.adaptive
        if not adaptive.depths:
            return None
        depths = {bucket: plan.depths_of(bucket) for bucket in plan.buckets}
        return AdaptiveDepth(depths, adaptive.times, adaptive.rates, self.config.runtime.depth_per_bucket)

    def _load_proposer(self) -> Proposer | None:
        """The drafter on the host, shared by every request of this engine; None if the device drafts."""
        if not self.plan.variant.proposer:
            return None
        proposer: Proposer = load_object(self.plan.variant.proposer)(self.plan, self._encode)
        return proposer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; loaded when text is first used, token ids never need it.

        Raises:
            CheckpointError: the folder has none, or a damaged one.
        """
        return Tokenizer(self.folder)

    def capture_report(self) -> list[CaptureRecord]:
        """What it took to build each program so far, in the order they were built."""
        return self.cycle.capture_report()

    def slots(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """``(name, shape, dtype, bytes)`` of every static buffer."""
        return self.cycle.arena.describe()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        progress: Progress | None = None,
        launcher: Launcher | None = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> list[Output]:
        """Generate for every prompt; a request that can't be served comes back with ``finish_reason="error"``, the others finish.

        Any number of calls may be open on one engine, of this and of :meth:`stream`, from any threads: their requests share its rows and
        its launches, and none of their tokens depend on that.

        Args:
            prompts: a text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; or a list of these.
            params: one for all prompts, or one per prompt; default greedy, 128 tokens.
            progress: called as ``progress("generate", tokens, most tokens)``.
            launcher: what launches the programs, default the engine's own cycle; a comparison or a recorder may stand in front of it, and
                then no other call may be open.
            sampling_params: another name of ``params``.
            priority: the lower, the earlier requests get a row, before those of other calls too; one for all prompts, or one per prompt.
            deadline: seconds after which requests end with what they have, ``finish_reason="deadline"``; the same.

        Returns:
            The outputs in the order of the prompts, ``params.n`` for each.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            ResourceError: more requests would wait than ``runtime.max_queued``; the engine is closed, belongs to another process or is
                called by its own thread (a launcher); or memory ran out.
        """
        check_progress(progress)
        check_launcher(launcher)
        requests = self._requests(prompts, one_of_params(params, sampling_params))
        set_priority_and_deadline(requests, priority, deadline)
        most = sum(r.budget for r in requests)
        exclusive = Exclusive(launcher) if launcher is not None else None
        served = [r for r in requests if r.finish_reason is None]
        changed = (lambda: progress("generate", sum(len(r.output) for r in requests), most)) if progress is not None else None
        self._engine.run(served, exclusive=exclusive, changed=changed)
        self._note(requests)
        return [make_output(r, self._text(r), self.plan) for r in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> Iterator[StreamEvent]:
        """Like :meth:`generate`, but yields tokens as they are accepted. Closing the iterator early aborts what is left.

        Raises:
            RequestError: the single prompt of the call can't be served.
        """
        stream = self.submit(prompts, one_of_params(params, sampling_params), priority=priority, deadline=deadline)
        try:
            while not stream.ended:
                yield from stream.wait()
        finally:
            stream.abort()

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        notify: Callable[[], None] | None = None,
        *,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> Stream:
        """Queue every prompt and return at once; the engine's own thread serves them. Dropping what is returned aborts them.

        Args:
            prompts: as for :meth:`generate`.
            params: as for :meth:`generate`.
            priority: as for :meth:`generate`.
            deadline: as for :meth:`generate`.
            notify: called by the engine's thread whenever there is something to take; it may not block.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            ResourceError: the engine is closed.
        """
        requests = self._requests(prompts, params)
        set_priority_and_deadline(requests, priority, deadline)
        served = [request for request in requests if request.finish_reason is None]
        handle = self._engine.submit(served, notify=notify) if served else None
        return Stream(requests, handle, self._text, self._note)

    def _note(self, requests: Sequence[Request]) -> None:
        """Update the acceptance test and the metrics after a call has ended."""
        self._acceptance_test.observe(requests)
        self.metrics = summarise(requests, self.plan)

    def chat(
        self,
        messages: Any,
        params: Params = None,
        progress: Progress | None = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> list[Output]:
        """Like :meth:`generate`, for conversations: the assistant's next turn, by the checkpoint's own chat template.

        Args:
            messages: one conversation, a list of ``{"role": "user", "content": "..."}``, oldest first; or a list of conversations.
            params: one for all conversations, or one per conversation; default greedy, 128 tokens.
            progress: called as ``progress("generate", tokens, most tokens)``.
            sampling_params: another name of ``params``.
            priority: as for :meth:`generate`.
            deadline: as for :meth:`generate`.

        Raises:
            CheckpointError: the checkpoint has no chat template, or a broken one.
            RequestError: the single conversation of the call can't be served.
        """
        prompts, params = conversations(messages), one_of_params(params, sampling_params)
        return self.generate(prompts, params, progress, priority=priority, deadline=deadline)

    def stream_chat(
        self,
        messages: Any,
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> Iterator[StreamEvent]:
        """Like :meth:`stream`, for conversations as :meth:`chat` takes them."""
        return self.stream(conversations(messages), one_of_params(params, sampling_params), priority=priority, deadline=deadline)

    def check(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[str | None]:
        """Check requests as :meth:`generate` does, without compiling or running anything.

        Returns:
            For each request the error message, or None if it can be served.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            CheckpointError: text or a conversation that the checkpoint has no tokenizer or template for.
        """
        return [request.error for request in self._requests(prompts, params)]

    def _requests(self, prompts: Prompt | Sequence[Prompt], params: Params, *, one: bool = False) -> list[Request]:
        return make_requests(prompts, params, self.plan, self._encode, one=one, tokenizer=lambda: self.tokenizer, grammars=self._grammars)

    def close(self) -> None:
        """End the engine's thread. Open calls end with an error, later ones are refused; memory is given back with the last reference."""
        self._engine.close()
        if self._close_ranks is not None:
            self._close_ranks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, requests: int = 1, *, sampling: SamplingClass = GREEDY) -> None:
        """Build, compile and capture now what a run of ``requests`` requests needs; otherwise the first run does.

        Args:
            requests: how many at once.
            sampling: what they ask of the sampler, all together (:func:`graphspec.engine.request.sampling_class`).

        Where the draft depth adapts, cycles whose times are in no configuration are timed as well, once per bucket.
        """
        self._engine.prepare(check_warm_up(requests, sampling, self.plan), sampling)

    def keys(self, requests: int, sampling: SamplingClass) -> list[Key]:
        """Programs that ``requests`` requests can need: every bucket up to the one they fill, every chunk size."""
        return self._engine.keys(requests, sampling)

    def _encode(self, prompt: str | Conversation) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.chat(prompt)

    def _text(self, request: Request) -> OutputText | None:
        """The text of a request from its beginning; None: it has none."""
        if not (self._has_tokenizer and request.params.detokenize):
            return None
        return OutputText(self.tokenizer, request.params, request.prompt if request.params.echo else ())

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if self._has_tokenizer else ""

    def draft_tree(self, prompt: Prompt, cycles: int = 1) -> TreeSnapshot:
        """Run ``cycles`` cycles on ``prompt`` and return the last one's nodes, with the path that was accepted.

        Raises:
            RequestError: not one prompt, one that can't be served, or more cycles than the context holds tokens.
            ResourceError: another call is open on this engine.
        """
        cycles = check_cycles(cycles, self.plan)
        requests = self._requests(prompt, SamplingParams(max_tokens=(cycles + 1) * self.plan.accept_width, ignore_eos=True), one=True)
        bucket = self.cycle.buckets(GREEDY)[0]
        shape = self.plan.key(bucket, GREEDY, self.plan.depths_of(bucket)[-1]).shape
        found: list[tuple[list[int], list[int], list[int], set[int]]] = []

        def look() -> bool:
            """Between two steps, before anything else is launched over the nodes."""
            if requests[0].metrics.cycles < cycles:
                return False
            v = self.cycle.arena.views(1, shape)
            nodes = v.node_token_BN[0].tolist(), v.node_parent_BN[0].tolist(), v.node_depth_BN[0].tolist()
            found.append((*nodes, set(v.path_BA[0, : int(v.accept_len_B[0])].tolist())))
            return True

        self._engine.run(requests, exclusive=Exclusive(policy=DeepestCycles(self.plan), until=look))
        token_N, parent_N, depth_N, path = found[0]
        used = [n for n, token in enumerate(token_N) if token >= 0]
        place = {n: i for i, n in enumerate(used)}
        return TreeSnapshot(
            token_N=[token_N[n] for n in used],
            parent_N=[place.get(parent_N[n], -1) for n in used],
            depth_N=[depth_N[n] for n in used],
            accepted=[n in path for n in used],
            text_N=[self._decode([token_N[n]]) for n in used],
        )
