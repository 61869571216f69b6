"""transformers' ``generate`` on the same weights as a measured side: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ...api.outputs import OutputText
from ...config.catalog import Variant, all_variants, resolve_variant
from ...config.command_options import LaunchConfig
from ...config.paths import user_path
from ...config.schema import SamplingConfig
from ...engine.request import SamplingParams
from ...errors import CheckpointError, ConfigError
from ...facts import read_model_facts
from ...facts.folders import DEMO, model_folder
from ...facts.hub import checkpoint_folder
from ...plan.buffers import DTYPES
from ...text.ends import find_ends
from ...text.tokenizer import Tokenizer
from .metrics import Timeline
from .workload import WorkloadRequest, describe_outsider, make_workload

LABELS = {"hf": "HF generate", "hf_assisted": "HF assisted", "hf_lookup": "HF prompt lookup"}
LOOKUP_TOKENS = 4
"""``prompt_lookup_num_tokens``: the most tokens that transformers proposes from the prompt."""
UNDERSTOOD = ("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "top_k", "top_p", "min_p", "repetition_penalty")
"""Keys of the ``sampling`` group that mean the same to transformers."""
NOT_MEASURED = "transformers does not report it"


def is_whole_model(variant: Variant) -> bool:
    """Whether its draft is a complete model, one that reads only tokens."""
    return variant.has_network and variant.feature_source not in ("hidden", "taps")


class Clock:
    """A streamer that records when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.bursts: list[tuple[float, torch.Tensor]] = []

    def put(self, token_ids: torch.Tensor) -> None:
        if self.prompt_seen:
            self.bursts.append((time.perf_counter(), token_ids.flatten()))
        self.prompt_seen = True

    def end(self) -> None:
        """Required by the interface."""


class HfSide:
    """One way to call ``generate``.

    Raises:
        ConfigError: a sampling key without an equivalent in transformers, or no assistant.
        CheckpointError: transformers can't load a folder.
    """

    def __init__(self, role: str, config: LaunchConfig, dtype: str, device: str) -> None:
        defaults = SamplingConfig()
        for key in (f.name for f in fields(SamplingConfig) if f.name not in UNDERSTOOD):
            if getattr(config.sampling, key) != getattr(defaults, key):
                raise ConfigError(f"sampling.{key}", f"its default with baseline={role}", getattr(config.sampling, key))
        self.role, self.config, self.dtype, self.device = role, config, dtype, device
        folder = model_folder(config.model.path, config.model.revision)
        facts = read_model_facts(folder)
        self.tokenizer = Tokenizer(folder)
        self.workload = make_workload(config, self.tokenizer.encode, facts.vocab_size)
        self.model = self._load(folder)
        ends = find_ends(facts, lambda: self.tokenizer)
        self.stops = [*config.sampling.stop_token_ids, *(() if self.workload.ignore_eos else ends)]
        self.model.generation_config.eos_token_id = self.stops or None
        self.how: dict[str, Any] = {}
        if role == "hf_assisted":
            self.how["assistant_model"] = self._load(self._assistant())
        elif role == "hf_lookup":
            self.how["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    def _load(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[self.dtype], trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(folder), "a model transformers can load", str(error).splitlines()[0]) from error
        return model.to(self.device).eval()

    def _assistant(self) -> Path:
        """The folder of the assistant model."""
        config = self.config
        if config.profile.assistant is not None:
            return user_path("profile.assistant", config.profile.assistant)
        variant = resolve_variant(config.variant.name)
        if config.variant.draft is not None and is_whole_model(variant):
            return checkpoint_folder("variant.draft", config.variant.draft, config.variant.draft_revision)
        whole = next((v.demo_draft for v in all_variants() if is_whole_model(v) and v.demo_draft), None)
        if config.model.path != DEMO or whole is None:
            raise ConfigError("profile.assistant", "the folder of a model of the same vocabulary with baseline=hf_assisted", None)
        return model_folder(DEMO).parent / whole

    def describe(self) -> dict[str, Any]:
        """See :class:`graphspec.lab.measure.worker.Runner`."""
        attention = self.model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
        how = {"runtime": "transformers", "attention": attention, "dtype": self.dtype, "device": self.device}
        return describe_outsider(self.config, self.workload, LABELS[self.role], NOT_MEASURED, **how)

    def round(self) -> dict[str, Any]:
        """See :class:`graphspec.lab.measure.worker.Runner`. Requests run in groups of ``workload.batch``, padded on the left."""
        requests, size = self.workload.requests, self.workload.batch
        timelines: list[Timeline] = []
        tokens: list[list[int]] = []
        for start in range(0, len(requests), size):
            times, found = self._generate(requests[start : start + size])
            timelines += times
            tokens += found
        after = (OutputText(self.tokenizer, SamplingParams(), request.prompt) for request in requests)
        texts = [text.push(ids, last=True) for text, ids in zip(after, tokens, strict=True)]
        return {"timelines": [timeline.to_json() for timeline in timelines], "tokens": tokens, "texts": texts}

    def _generate(self, requests: list[WorkloadRequest]) -> tuple[list[Timeline], list[list[int]]]:
        width = max(len(request.prompt) for request in requests)
        padded = [[0] * (width - len(request.prompt)) + request.prompt for request in requests]
        seen = [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in requests]
        clock = Clock()
        torch.manual_seed(requests[0].seed)
        began = time.perf_counter()
        token_BT = torch.tensor(padded, device=self.device)
        self.model.generate(
            token_BT,
            attention_mask=torch.tensor(seen, device=self.device),
            max_new_tokens=self.workload.output_tokens,
            pad_token_id=0,
            streamer=clock,
            **self._sampling(),
            **self.how,
        )
        ended = time.perf_counter()
        rows = [self._row(clock, row, len(requests)) for row in range(len(requests))]
        return [self._timeline(began, ended, bursts) for bursts, _ in rows], [tokens for _, tokens in rows]

    def _sampling(self) -> dict[str, Any]:
        sampling = self.workload.sampling
        how: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty}
        if sampling.temperature == 0:
            return how | {"do_sample": False}
        filters = {"top_k": max(sampling.top_k or 0, 0), "top_p": sampling.top_p, "min_p": sampling.min_p or None}
        return how | {"do_sample": True, "temperature": sampling.temperature, **filters}

    def _row(self, clock: Clock, row: int, rows: int) -> tuple[list[tuple[float, int]], list[int]]:
        """Bursts and tokens of one row of a group, up to its end; a finished row is padded until all have ended."""
        bursts: list[tuple[float, int]] = []
        tokens: list[int] = []
        for moment, given in clock.bursts:
            fresh = given.tolist() if rows == 1 else [int(given[row])]
            bursts.append((moment, len(fresh)))
            tokens += fresh
            if tokens[-1] in self.stops:
                break
        return bursts, tokens

    def _timeline(self, began: float, ended: float, bursts: list[tuple[float, int]]) -> Timeline:
        count = sum(tokens for _, tokens in bursts)
        reason = "length" if count >= self.workload.output_tokens else "stop"
        # generate() returns when the slowest row of the group has ended; a row ends at its last token.
        return Timeline(began, bursts, bursts[-1][0] if bursts else ended, reason)
