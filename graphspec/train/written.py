"""Conversations that the target writes: whole ones, or answers to given prompts, by the engine in large batches.

A chat model that reads its template up to where a user's message begins goes on with a message, and answers it when the template says so
(Magpie, Xu et al. 2024, arXiv 2406.08464). What a draft is trained on is then the target's own distribution, from nothing but the target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from ..api.llm import LLM
from ..api.outputs import Output
from ..config.command_options import LaunchConfig
from ..config.schema import Config, RuntimeConfig, VariantConfig
from ..config.train_options import SELF, DataSource, TextConfig
from ..engine.device import resolve_device
from ..engine.request import SamplingParams
from ..errors import ConfigError
from ..facts import read_model_facts
from ..host.native_build import compiler_on_path
from ..text.conversation import Conversation
from ..text.tokenizer import Tokenizer
from .checkpoint import check_text_settings, write_whole
from .conversations import ANSWERS, Sample, has_answer, read_conversations, spell, split
from .filters import Known, sensible_answer, sensible_prompt
from .loop import Watch

REUSE = 3
"""How often a draft reads each token that its target wrote, which determines the default amount of text."""
NATIVE_PAYS = 4096
"""Number of tokens above which native programs on a CPU save more time than building them takes."""
BATCHES = 8
"""Requests of a piece, in batches. A batch is refilled while there are requests, so that few rows are idle."""
Messages = list[dict[str, Any]]
PROBES = ("Ask", "17", "how")
"""Beginnings of a user's message with no token in common."""


def engine_for(config: LaunchConfig, target: str, variant: VariantConfig, *, rows: int, context: int, tokens: int) -> LLM:
    """An engine with the checkpoint ``target`` for ``rows`` requests at once: native on a CPU for many ``tokens``, else eager."""
    model = replace(config.model, path=target, max_context=context, generation_config="ignore")
    on_cpu = resolve_device(config.hardware.device) == "cpu"
    native = on_cpu and compiler_on_path() is not None and tokens >= NATIVE_PAYS
    # A smaller bucket for the last requests of a piece.
    runtime = RuntimeConfig(name="compiled" if native else "eager", max_rows=rows, buckets=sorted({max(1, rows // 4), rows}))
    return LLM.from_config(Config(variant=variant, model=model, runtime=runtime, kernels=config.kernels, hardware=config.hardware))


def user_prefix(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the first message of a user begins.

    Raises:
        CheckpointError: no chat template, or a broken one.
    """
    spelled = [tokenizer.chat(Conversation([{"role": "user", "content": probe}], continued=True)) for probe in PROBES]
    return [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*spelled, strict=False))]


@dataclass(frozen=True)
class Gathered:
    """The conversations of an entry of ``train.data``: its share of each batch, and those that are trained on and held out."""

    share: float
    train: list[Sample]
    held_out: list[Sample]


def gather(config: LaunchConfig, folder: Path, vocab_size: int, work: Path, watch: Watch) -> list[Gathered]:
    """The conversations that ``train.data`` names, with the answers that the target has to write; one entry for each of its own.

    Args:
        config: of the run.
        folder: of the target's checkpoint.
        vocab_size: of the target.
        work: folder of what the target writes.
        watch: called with progress.

    Raises:
        ConfigError: files that are no conversations, or a target that writes nothing sensible.
        CheckpointError: a target without a chat template.
    """
    train = config.train
    sources = [source for source in train.sources if not source.is_text]
    if not sources:
        return []
    shares, tokenizer = train.shares(), Tokenizer(folder)
    apart = [name for name in train.held_out if not DataSource(name).is_text]
    held_out = [
        sample for name in apart for messages in read_conversations(name, "train.held_out") for sample in spell(tokenizer, messages)
    ]
    writer = Writer(lambda longest: _engine(config, folder, longest), tokenizer, train.text, work / "conversations")
    found: list[Gathered] = []
    for source in sources:
        if source.path == SELF:
            goal = train.text.tokens or max(1, round(train.total_tokens * shares[source.path] / REUSE))
            samples = writer.alone(goal, watch)
        else:
            messages = read_conversations(source.path)
            samples = [sample for known in messages if has_answer(known) for sample in spell(tokenizer, known)]
            if asked := [known for known in messages if not has_answer(known)]:
                samples += writer.answers(asked, watch)
        highest = max((max(sample.tokens) for sample in samples), default=0)
        if highest >= vocab_size:
            raise ConfigError("model.path", f"a tokenizer with ids below the model's vocab_size = {vocab_size}", highest)
        if len(samples) < 2:
            raise ConfigError("train.data", f"at least two conversations with answers in {source.path}", len(samples))
        train_samples, apart_samples = (samples, held_out) if held_out else split(samples, train.held_out_share)
        found.append(Gathered(shares[source.path], train_samples, apart_samples))
    writer.close()
    return found


def _engine(config: LaunchConfig, folder: Path, longest: int) -> LLM:
    """An engine for answers to prompts of up to ``longest`` tokens."""
    context = min(longest + config.train.text.new_tokens, read_model_facts(folder).longest_context)
    return engine_for(
        config, config.model.path, VariantConfig(name="none"), rows=config.train.text.batch, context=context, tokens=NATIVE_PAYS
    )


class Writer:
    """Pieces of conversations in a folder, each written once: ``self_00000.jsonl``, or the digest of the prompts in place of ``self``.

    Args:
        engine: takes the longest prompt in tokens, and returns an engine without a draft. Called only if a piece is missing.
        tokenizer: the target's.
        config: how they are written.
        folder: where.
    """

    def __init__(self, engine: Callable[[int], LLM], tokenizer: Tokenizer, config: TextConfig, folder: Path) -> None:
        self._make = engine
        self._llm: LLM | None = None
        self.tokenizer, self.config, self.folder = tokenizer, config, folder
        self.size = BATCHES * config.batch
        self.longest = self._made_for = 0
        folder.mkdir(exist_ok=True)

    @property
    def llm(self) -> LLM:
        """The engine, made when it is first needed."""
        if self._llm is None or self._made_for < self.longest:
            self.close()
            self._llm, self._made_for = self._make(self.longest), self.longest
        return self._llm

    def close(self) -> None:
        """End the engine."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def alone(self, tokens: int, watch: Watch) -> list[Sample]:
        """At least ``tokens`` tokens of conversations that the target writes alone.

        Raises:
            ConfigError: conversations of other settings in the folder, or a target that writes nothing sensible.
        """
        prefix, known, total = user_prefix(self.tokenizer), Known(), 0
        found: list[Sample] = []
        self._check("self", {"prefix": prefix})
        self.longest = max(self.longest, len(prefix) + self.config.new_tokens)
        for piece in count():
            watch("conversations", min(total, tokens), tokens, f"{len(found)} conversations")
            if total >= tokens:
                return found
            file = self.folder / f"self_{piece:05d}.jsonl"
            records = _read(file)
            if records is None:
                records = self._write(file, list(self._asked(prefix, piece, known.copy())), piece)
            if not records:
                raise ConfigError("train.data", "a chat model, which writes prompts when it reads its template", "nothing sensible")
            for record in records:
                known.add(record["messages"][0]["content"])
            found += [_sample(record) for record in records]
            total = sum(len(sample.tokens) for sample in found)
        raise AssertionError

    def answers(self, conversations: Sequence[Messages], watch: Watch) -> list[Sample]:
        """The target's answers to conversations that end with a question, those that are sensible."""
        name = hashlib.sha256(json.dumps(conversations).encode()).hexdigest()[:12]
        self._check(name, {})
        self.longest = max(self.longest, *(len(self.tokenizer.chat(Conversation(messages))) for messages in conversations))
        found: list[Sample] = []
        for piece, begin in enumerate(range(0, len(conversations), self.size)):
            watch("answers", begin, len(conversations))
            file = self.folder / f"{name}_{piece:05d}.jsonl"
            records = _read(file)
            if records is None:
                records = self._write(file, conversations[begin : begin + self.size], piece)
            found += [_sample(record) for record in records]
        watch("answers", len(conversations), len(conversations))
        return found

    def _asked(self, prefix: list[int], piece: int, known: Known) -> Iterator[Messages]:
        """The sensible ones of a piece's questions, which are like none that is known."""
        params = [self._params(piece, number, 1.0, self.config.new_tokens // 4) for number in range(self.size)]
        for output in self.llm.generate([prefix] * self.size, params):
            _check_served(output)
            special = any(token in self.tokenizer.special_ids for token in output.token_ids[:-1])
            text = output.text.strip()
            if output.finish_reason == "stop" and not special and sensible_prompt(text, self.config.scripts) and known.add(text):
                yield [{"role": "user", "content": text}]

    def _params(self, piece: int, number: int, temperature: float, maximum: int) -> SamplingParams:
        # One seed for each request, so that its text does not depend on what it shares a batch with.
        seed = (self.config.seed * 1_000_003 + piece) * 2 * self.size + number
        return SamplingParams(max_tokens=maximum, temperature=temperature, seed=seed)

    def _write(self, file: Path, conversations: Sequence[Messages], piece: int) -> list[dict[str, Any]]:
        """Answer the conversations of a piece."""
        temperatures = self.config.temperatures
        heat = [temperatures[number % len(temperatures)] for number in range(len(conversations))]
        params = [self._params(piece, self.size + number, t, self.config.new_tokens) for number, t in enumerate(heat)]
        records = []
        outputs = self.llm.chat(conversations, params) if conversations else []
        for output, temperature in zip(outputs, heat, strict=True):
            _check_served(output)
            if sensible_answer(output.text, output.token_ids):
                messages = [*conversations[output.index], {"role": ANSWERS, "content": output.text}]
                tokens = [*output.prompt_token_ids, *output.token_ids]
                records.append(
                    {"messages": messages, "temperature": temperature, "prompt_tokens": len(output.prompt_token_ids), "tokens": tokens}
                )
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_whole(file, lambda stream: stream.write(lines.encode()))
        return records

    def _check(self, name: str, more: dict[str, Any]) -> None:
        """Compare the settings of the texts in the folder with those of the run."""
        keys = ("temperatures", "new_tokens", "scripts", "batch", "seed")
        settings = {key: getattr(self.config, key) for key in keys} | more
        check_text_settings(self.folder / f"{name}.json", settings)


def _check_served(output: Output) -> None:
    if output.error is not None:
        raise ConfigError("train.data", "conversations that the target can answer", output.error)


def _read(file: Path) -> list[dict[str, Any]] | None:
    """The records of a piece; None: it is not written yet."""
    if not file.exists():
        return None
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _sample(record: dict[str, Any]) -> Sample:
    return Sample(record["tokens"], [(record["prompt_tokens"], len(record["tokens"]))])
