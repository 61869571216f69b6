"""The Python API: ``LLM(...).generate(...)`` and ``.stream(...)``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from ..config.catalog import load_object, resolve_variant
from ..config.paths import user_path
from ..config.schema import Config
from ..engine import ranks
from ..engine.depth import AdaptiveDepth, DeepestCycles, DepthPolicy
from ..engine.device import prepare_device
from ..engine.driver import Exclusive
from ..engine.engine import Engine
from ..engine.kernel_choice import choose_kernels, load_native
from ..engine.launcher import Launcher
from ..engine.meter import AcceptanceTest
from ..engine.proposer import Proposer
from ..engine.request import Request, SamplingParams
from ..engine.tuning import tune_program
from ..errors import ConfigError
from ..facts import check_tokenizer, read_sampling_defaults
from ..facts.folders import DEMO, draft_folder, model_folder
from ..graphs.capture import CaptureRecord
from ..graphs.cycle import Cycle
from ..graphs.memory import fit_memory
from ..graphs.programs import Key
from ..graphs.ranks import FollowingCycle, LeadingCycle
from ..host.progress import Display, Progress, display_of
from ..models.layers import join_ranks, use_kernels
from ..models.stack import pack_network, round_networks, round_weights, uses_packed_weights
from ..models.target import load_target, read_target_facts
from ..models.token_map import apply_token_map, load_token_map
from ..plan.buffers import DTYPES
from ..plan.plan import Plan, make_plan
from ..shapes import GREEDY, NEUTRAL, SamplingClass
from ..text.conversation import Conversation, conversations
from ..text.ends import find_ends
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_files import has_tokenizer
from .events import Stream
from .grammar import Grammars
from .outputs import Metrics, Output, OutputText, StreamEvent, TreeSnapshot, make_output, summarise
from .overrides import Overrides, engine_config
from .prompts import (
    CacheSalt,
    Deadline,
    Params,
    Priority,
    Prompt,
    check_cycles,
    check_progress,
    check_warm_up,
    make_requests,
    one_of_params,
    set_call_options,
)

logger = logging.getLogger(__name__)

WEIGHTS_FOR = {"int8": "of 4 or 8 bits with scales for groups of 16 channels or more", "bfloat16": "stored in bfloat16"}
"""What a target needs for ``kernels.activations``."""


class LLM:
    """An engine for one target and one way to draft.

    Args:
        model: folder of a Hugging Face checkpoint, its name on the Hub (``org/model``, with ``revision=``), or ``demo``.
        variant: an entry of the catalog (``eagle3``, ``none``).
        draft: folder of the draft checkpoint, or its name on the Hub; None for the demo model's own draft.
        runtime: ``eager``, ``compiled`` or ``captured``; ``auto`` is captured on a GPU, compiled on a CPU. ``plan.runtime`` has the choice.
        config: a complete configuration in place of the arguments above.
        progress: None: progress bars on stderr while checkpoints load and programs are built; outside a terminal or notebook, INFO log
            lines of ``graphspec``. False: nothing. A function is called as ``progress(phase, done, total)`` in the waiting thread.
        overrides: any other configuration key by its bare name, except those of ``sampling``, which belong to requests
            (``num_steps=5, topk=4, num_draft_tokens=16, page_size=1``).

    Raises:
        ConfigError: a bad value.
        CheckpointError: a checkpoint is missing or damaged, or target and draft do not fit together.
    """

    def __init__(
        self,
        model: str | Path = DEMO,
        variant: str = "eagle3",
        draft: str | Path | None = None,
        runtime: str = "auto",
        *,
        config: Config | None = None,
        progress: Progress | bool | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        self.config = engine_config(config, overrides, model=model, variant=variant, draft=draft, runtime=runtime)
        check_progress(progress, ConfigError)
        self.folder = model_folder(self.config.model.path, self.config.model.revision)
        """Folder of the target's checkpoint."""
        self._has_tokenizer = has_tokenizer(self.folder)
        self.ends: dict[int, str] = {}
        """Ids that end a text, and what says so: the model's configuration, its tokenizer or the tokenizer's chat template."""
        size = self.config.runtime.tensor_parallel
        self.ranks: ranks.Ranks | None = None
        """The processes that hold the target together; None: this one alone."""
        if size > 1:
            self.ranks = ranks.existing_ranks(size, self.config.hardware.device)
        # One rank shows what all of them do.
        shown = progress if callable(progress) or self.ranks is None or self.ranks.rank == 0 else False
        self._new_display = display_of(shown)
        planned = self._plan(0 if self.ranks is None else self.ranks.rank)
        if size > 1 and self.ranks is None:
            self.ranks = ranks.start(self.config, planned.device)
        try:
            self._open(planned, progress if callable(progress) else None)
        except BaseException:
            if self.ranks is not None:
                self.ranks.end(at_once=True)
            raise

    def _open(self, planned: Plan, progress: Progress | None) -> None:
        with closing(self._new_display()) as display:
            load_native(planned, display)
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
        with closing(self._new_display()) as display:
            self.cycle = self._load(display)
        self._close_ranks = self.ranks.lead_or_follow(self.cycle) if self.ranks is not None else None
        self.metrics: Metrics | None = None
        self._engine = Engine(self.cycle, self._load_proposer(), self._adaptive_depth(), progress, self._new_display)
        self.load = self._engine.load
        """What there is to do now, as :class:`graphspec.engine.meter.Load`; any thread may ask."""
        self.ping, self.check_class = self._engine.ping, self._engine.check_class
        self._acceptance_test = AcceptanceTest(self.plan)
        self.grammars = Grammars(self.plan)
        """Compiles those of requests."""
        if self.plan.runtime.captured:
            # Capturing a class later would make all other callers wait.
            self._engine.prepare(self.plan.max_rows, *self.plan.sampling_classes)

    @classmethod
    def from_config(cls, config: Config, progress: Progress | bool | None = None) -> LLM:
        """An engine from a whole configuration, as :func:`graphspec.load_config` gives it."""
        return cls(config=config, progress=progress)

    def _plan(self, rank: int = 0) -> Plan:
        device = prepare_device(self.config.hardware, self.config.runtime.tensor_parallel)
        variant = resolve_variant(self.config.variant.name)
        target = read_target_facts(self.config, self.folder)
        self.ends = find_ends(target, (lambda: self.tokenizer) if self._has_tokenizer else None)
        target = replace(target, eos_token_ids=tuple(self.ends))
        draft = None
        if variant.has_network:
            folder = draft_folder(self.config, variant, self.folder)
            draft = load_object(variant.facts)(folder, target)
            check_tokenizer(folder, self.folder)
        elif self.config.variant.draft is not None:
            raise ConfigError(
                "variant.draft", f"nothing for variant {variant.name!r}, which has no draft network", self.config.variant.draft
            )
        defaults = read_sampling_defaults(self.folder) if self.config.model.generation_config == "auto" else NEUTRAL
        ranks_target = target.of_rank(rank, self.config.runtime.tensor_parallel)
        return make_plan(self.config, ranks_target, draft, device=device, defaults=defaults)

    def _load(self, display: Display) -> Cycle:
        plan = self.plan
        dtype, device = DTYPES[plan.dtype], torch.device(plan.device)

        def report(phase: str) -> Callable[[int, int], None]:
            return lambda done, total: display(phase, done, total)

        kernels, self.programmatic_launch, table = choose_kernels(self.config, plan)
        """Fused kernels start while the one before them drains."""
        target = load_target(plan.target, plan.tap_layers, plan.max_positions, dtype, device, report("load target"))
        draft = None
        if plan.draft is not None:
            draft = load_object(plan.variant.loader)(plan.draft, target, plan.max_positions, dtype, device, report("load draft"))
            if (token_map := self.config.variant.token_map) is not None:
                apply_token_map(draft, load_token_map(user_path("variant.token_map", token_map), plan.target.vocab_size))
        networks = {"target": target} if draft is None else {"target": target, "draft": draft}
        for network in networks.values():
            round_weights(network, plan)
        if self.ranks is not None:
            comm = self.ranks.comm(device, plan.numerics)
            for network in networks.values():
                join_ranks(network, comm)
        native = uses_packed_weights(plan)
        rounded = round_networks(target, draft, plan)
        if plan.activations != "full" and not rounded["target"]:
            expected = f"full, unless the target has weights {WEIGHTS_FOR[plan.activations]}"
            raise ConfigError("kernels.activations", expected, plan.activations)
        self.decoders: dict[str, str] = {}
        """How the decoder layers of target and draft run, in words."""
        if not native:
            use_kernels(kernels, target, draft)
        for name, network in networks.items():
            reason = pack_network(network, plan) if native else "set by kernels.mode, kernels.linear or kernels.attention"
            self.decoders[name] = f"op by op: {reason}" if reason else "one native op per pass"
            if rounded.get(name):
                self.decoders[name] += f", {rounded[name]}"
            if native and name == "target" and reason and plan.numerics != "fast":
                # Torch's ops between the native ones may sum in another order for another number of rows.
                if self.config.kernels.numerics != "auto":
                    raise ConfigError("kernels.numerics", f"auto or fast: the target runs {self.decoders[name]}", repr(plan.numerics))
                self.plan = plan = replace(plan, numerics="fast")
        # A second team of threads would compete for the same cores, and little work is left between native ops.
        loop_threads = 1 if native else None
        tuner = partial(tune_program, *table, tuple(networks.values()), device) if table is not None else None
        make: Callable[..., Cycle] = Cycle
        if self.ranks is not None:
            make = partial(FollowingCycle, comm=comm) if self.ranks.rank else partial(LeadingCycle, comm=comm, channel=self.ranks.channel)
        return make(plan, target, draft, kernels, memory=self.memory, tuner=tuner, loop_threads=loop_threads)

    @property
    def depth_policy(self) -> DepthPolicy | None:
        """Chooses the draft depth of each cycle, learning from the traffic as long as the engine lives. None: fixed depth."""
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
        """The checkpoint's tokenizer. Prompts given as token ids work without one.

        Raises:
            CheckpointError: the tokenizer is missing or damaged.
        """
        return Tokenizer(self.folder)

    def capture_report(self) -> list[CaptureRecord]:
        """Seconds and bytes that each program took to build, in build order."""
        return self.cycle.capture_report()

    def slots(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """``(name, shape, dtype, bytes)`` of every static buffer."""
        return self.cycle.arena.describe()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        progress: Progress | bool | None = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> list[Output]:
        """Generate for every prompt. A request that can't be served has ``finish_reason="error"``; the others finish.

        Any number of calls may run at once, from any threads. Their requests are batched together; each result is as if run alone.

        Args:
            prompts: a text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; or a list of these.
            params: a ``SamplingParams`` or a mapping of its fields, one for all prompts or one per prompt. Default: 128 tokens, sampled
                as the checkpoint's ``generation_config.json`` says, greedy without one.
            progress: called as ``progress("generate", tokens, maximum)``.
            sampling_params: alias of ``params``.
            priority: requests with a lower number get a row first, across calls; one for all prompts, or one per prompt.
            deadline: seconds after which a request ends with what it has, ``finish_reason="deadline"``; one for all or one per prompt.
            cache_salt: prefix pages are shared only between requests with the same salt (None is one too); one for all or one per prompt.

        Returns:
            The outputs in the order of the prompts, ``params.n`` for each.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            ResourceError: more requests would wait than ``runtime.max_queued``; the engine is closed, belongs to another process or is
                called by its own thread; or memory ran out.
        """
        check_progress(progress)
        requests = self._requests(prompts, one_of_params(params, sampling_params))
        set_call_options(requests, priority, deadline, cache_salt)
        maximum = sum(r.budget for r in requests)
        changed = (lambda: progress("generate", sum(len(r.output) for r in requests), maximum)) if callable(progress) else None
        return self._finish(requests, changed=changed)

    def _finish(self, requests: list[Request], alone: Exclusive | None = None, changed: Callable[[], None] | None = None) -> list[Output]:
        """Run requests to their end."""
        self._engine.run([r for r in requests if r.finish_reason is None], exclusive=alone, changed=changed)
        self._note(requests)
        return self.outputs(requests)

    def outputs(self, requests: Sequence[Request]) -> list[Output]:
        """The outputs of requests that have ended."""
        return [make_output(r, self._text(r), self.plan) for r in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> Iterator[StreamEvent]:
        """Like :meth:`generate`, but yields tokens as they are accepted. Closing the iterator aborts unfinished requests.

        Raises:
            RequestError: the single prompt of the call can't be served.
        """
        stream = self.submit(prompts, one_of_params(params, sampling_params), priority=priority, deadline=deadline, cache_salt=cache_salt)
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
        cache_salt: CacheSalt = None,
    ) -> Stream:
        """Queue every prompt and return at once. Dropping the returned stream aborts its requests.

        Args:
            prompts: as for :meth:`generate`.
            params: as for :meth:`generate`.
            priority, deadline, cache_salt: as for :meth:`generate`.
            notify: called by the engine's thread when there are new events; it must not block.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            ResourceError: the engine is closed.
        """
        requests = self._requests(prompts, params)
        set_call_options(requests, priority, deadline, cache_salt)
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
        progress: Progress | bool | None = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> list[Output]:
        """Like :meth:`generate` for conversations: returns the assistant's next turn, using the checkpoint's chat template.

        Args:
            messages: one conversation, a list of ``{"role": "user", "content": "..."}``, oldest first; or a list of conversations.
            params: as for :meth:`generate`.
            progress: called as ``progress("generate", tokens, maximum)``.
            sampling_params: alias of ``params``.
            priority, deadline, cache_salt: as for :meth:`generate`.

        Raises:
            CheckpointError: the checkpoint has no chat template, or a broken one.
            RequestError: the single conversation of the call can't be served.
        """
        prompts, params = conversations(messages), one_of_params(params, sampling_params)
        return self.generate(prompts, params, progress, priority=priority, deadline=deadline, cache_salt=cache_salt)

    def stream_chat(
        self,
        messages: Any,
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> Iterator[StreamEvent]:
        """Like :meth:`stream`, for conversations as :meth:`chat` takes them."""
        return self.stream(
            conversations(messages), one_of_params(params, sampling_params), priority=priority, deadline=deadline, cache_salt=cache_salt
        )

    def check(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[str | None]:
        """Check requests like :meth:`generate`, without compiling or running anything.

        Returns:
            For each prompt the error message, or None if it can be served.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            CheckpointError: text or a conversation that the checkpoint has no tokenizer or template for.
        """
        return [request.error for request in self._requests(prompts, params) if request.sample == 0]

    def _requests(self, prompts: Prompt | Sequence[Prompt], params: Params, *, one: bool = False) -> list[Request]:
        return make_requests(prompts, params, self.plan, self._encode, one=one, tokenizer=lambda: self.tokenizer, grammars=self.grammars)

    def close(self) -> None:
        """End the engine's thread. Open calls end with an error and new ones are refused. Memory is freed with the last reference."""
        self._engine.close()
        if self._close_ranks is not None:
            self._close_ranks()

    def __repr__(self) -> str:
        if "plan" not in vars(self):
            return f"LLM(model={self.config.model.path!r}), not loaded" if "config" in vars(self) else "LLM(), not loaded"
        plan, shape = self.plan, f"({', '.join(map(str, self.plan.shape.numbers))})"
        return (
            f"LLM(model={self.config.model.path!r}, variant={plan.variant.name!r}, shape={shape}, runtime={plan.runtime.name!r}, "
            f"device={plan.device!r}, dtype={plan.weight_dtype!r}, buckets={list(plan.buckets)})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, requests: int = 1, *, sampling: SamplingClass = GREEDY) -> None:
        """Build, compile and capture what ``requests`` concurrent requests need, so that the first call doesn't wait for it.

        Args:
            requests: number of concurrent requests.
            sampling: the sampling features they use, combined (:func:`graphspec.engine.request.sampling_class`).

        With adaptive depth, cycles without a configured time are timed too, once per bucket.
        """
        self._engine.prepare(check_warm_up(requests, sampling, self.plan), sampling)

    def seal(self) -> None:
        """Build the programs of greedy requests, of those that say nothing and of ``runtime.sampling_classes``, and none after that.

        From then on no call waits for another one's programs. A request is served by the smallest class that covers it, and one that none
        covers is refused.

        Raises:
            ResourceError: the engine is closed, or memory ran out.
        """
        self._engine.seal(GREEDY, self.plan.sampling_defaults.sampling_class, *self.plan.sampling_classes)

    def keys(self, requests: int, sampling: SamplingClass) -> list[Key]:
        """Programs that ``requests`` requests may need: every bucket up to the one they fill, and every chunk size."""
        return self._engine.keys(requests, sampling)

    def _encode(self, prompt: str | Conversation, *, add_special_tokens: bool = True, special_tokens_as_text: bool = False) -> list[int]:
        if isinstance(prompt, Conversation):
            return self.tokenizer.chat(prompt)
        encode = self.tokenizer.encode if add_special_tokens else self.tokenizer.words
        return encode(prompt, special_tokens_as_text=special_tokens_as_text)

    def _text(self, request: Request) -> OutputText | None:
        """The text of a request from its beginning; None: it has none."""
        # A prompt that was refused may be no tokens.
        if not (self._has_tokenizer and request.params.detokenize and request.budget):
            return None
        return OutputText(self.tokenizer, request.params, request.prompt)

    def token_text(self, token: int) -> str:
        """What a token adds to a text; empty without a tokenizer."""
        return self.tokenizer.token_text(token) if self._has_tokenizer else ""

    def draft_tree(self, prompt: Prompt, cycles: int = 1) -> TreeSnapshot:
        """Run ``cycles`` cycles on ``prompt`` and return the last one's nodes, with the path that was accepted.

        Raises:
            RequestError: not one prompt, one that can't be served, or more cycles than the context holds tokens.
            ResourceError: another call is open on this engine.
        """
        cycles = check_cycles(cycles, self.plan)
        params = SamplingParams(max_tokens=(cycles + 1) * self.plan.accept_width, ignore_eos=True).resolve()
        requests = self._requests(prompt, params, one=True)
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
            text_N=[self.token_text(token_N[n]) for n in used],
        )


def generate_through(llm: LLM, launcher: Launcher, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Output]:
    """:meth:`LLM.generate` with a recorder or a comparison in front of the cycle, while no other call is open. For measurements."""
    return llm._finish(llm._requests(prompts, params), Exclusive(launcher))  # noqa: SLF001 - no part of the public signature
