"""``graphspec chat``: a conversation in the terminal, accepted draft tokens in another colour; through a pipe, lines in and text out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..config.catalog import resolve_variant
from ..config.compose import load_config, overrides_of
from ..errors import ConfigError, GraphspecError
from ..facts.folders import draft_folder, model_folder, shipped_draft
from ..facts.gguf_model import weights_files
from ..plan.numerics import resolve_activations
from ..plan.runtime import resolve_runtime

if TYPE_CHECKING:
    from ..api.llm import LLM
    from ..api.outputs import Metrics
    from ..config.command_options import LaunchConfig
    from ..engine.request import Request, SamplingParams

DRAFTED = "green"
"""Colour of accepted draft tokens."""
PROMPT = "> "
N_GRAMS = ("variant=ngram", "variant.num_steps=2", "variant.topk=1", "variant.num_draft_tokens=3", "adaptive.depths=[0]")
"""The drafter of a model without a head, and of one whose head only pays with other weights. It has no weights. Three nodes cost little
more than one even where weights have 4 bits, and where nothing repeats the cycle is a plain one."""
FEW_BITS = ("kernels.activations=int8", "variant.num_steps=2", "variant.topk=1", "variant.num_draft_tokens=3")
"""What makes a head of ours pay over weights of few bits on a CPU: nodes that cost less, and few of them (docs/benchmarks.md)."""
SHAPE = {"variant.num_steps", "variant.topk", "variant.num_draft_tokens"}
HELP = """\
/system TEXT   begin anew with this system message; without TEXT, without one
/reset         begin anew, and keep the system message
/stats         speed and acceptance, of the last answer and of all
/help          these lines
/quit          leave, as does Ctrl-D; Ctrl-C stops the answer"""


def conversation_words(words: list[str]) -> list[str]:
    """Words of the command line, completed for a conversation: ``experiment=chat`` where none names an experiment, and a drafter that pays
    where none is named. A model with a head for the default variant has that; a GGUF file with a head of ours only where products can round
    activations, with :data:`FEW_BITS`. The others have :data:`N_GRAMS`.
    """
    keys = {word.partition("=")[0] for word in overrides_of(words)}
    if "experiment" in keys:
        return words
    words = [*words, "experiment=chat"]
    if {"variant", "variant.name", "variant.draft"} & keys:
        return words
    with suppress(GraphspecError):
        # What is wrong here is said by who reads the words next.
        config = load_config(*overrides_of(words))
        folder = model_folder(config.model.path, config.model.revision)
        more: tuple[str, ...] = ()
        try:
            variant = resolve_variant(config.variant.name)
            draft_folder(config, variant, folder)
            if weights_files(folder) and shipped_draft(config.model.path, folder, variant) is not None:
                rounds = config.kernels.activations == "int8" or "kernels.activations" not in keys
                more = FEW_BITS if rounds and rounds_activations(config) else N_GRAMS
        except GraphspecError:
            more = N_GRAMS
        given = keys | SHAPE if SHAPE & keys else keys
        return [*words, *(word for word in more if word.partition("=")[0] not in given)]
    return words


def rounds_activations(config: LaunchConfig) -> bool:
    """Whether an engine of this configuration can round activations to 8 bits."""
    from ..engine.device import resolve_device

    device = resolve_device(config.hardware.device)
    runtime = resolve_runtime(config.runtime.name, device)
    mode = runtime.kernels if config.kernels.mode == "auto" else config.kernels.mode
    try:
        resolve_activations(replace(config.kernels, activations="int8"), mode, device=device, dtype="float32")
    except ConfigError:
        return False
    return True


@dataclass
class Answer:
    """One answer while it comes.

    Attributes:
        drafted: of each token, whether it was an accepted draft token.
        cycles: cycles so far.
    """

    text: str = ""
    drafted: list[bool] = field(default_factory=list)
    cycles: int = 0
    metrics: Metrics | None = None
    stopped: bool = False


@dataclass
class Chat:
    """A conversation with one engine. Turns share the pages of what was said before, so only what is new is read.

    Attributes:
        messages: what was said so far, the system message first.
        answers: all so far, those of earlier conversations among them.
    """

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the same system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, question: str) -> Generator[tuple[str, bool], None, None]:
        """The answer, token by token: its text, and whether it was an accepted draft token. Closed or interrupted early, what came so far
        is the answer.

        Raises:
            RequestError: the conversation can't be served; it is as before.
        """
        from ..api.outputs import OutputText
        from ..text.conversation import Conversation

        asked = [*self.messages, {"role": "user", "content": question}]
        stream = self.llm.submit(Conversation(asked), self.params)
        [request] = stream.requests
        text, answer = OutputText(self.llm.tokenizer, request.params, request.prompt), Answer()
        done = False
        try:
            while not stream.ended:
                for event in stream.wait():
                    for token, drafted in zip(event.token_ids, fresh_drafts(request, len(answer.drafted)), strict=False):
                        answer.drafted.append(drafted)
                        answer.cycles = request.metrics.cycles
                        piece = text.push([token])
                        answer.text += piece
                        yield piece, drafted
            done = True
        finally:
            if not done:
                # What the engine has sent meanwhile is not part of the answer.
                stream.abort()
                answer.stopped = True
                while not stream.ended:
                    stream.wait()
            rest = text.push([], last=True)
            answer.text += rest
            if request.error is None:
                answer.metrics = self.llm.metrics
                self.answers.append(answer)
                self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if rest:
            yield rest, False

    def stats(self) -> list[str]:
        """Figures of the last answer, and of all."""
        return [f"last answer: {figures(self.answers[-1:])}", f"all {len(self.answers)}: {figures(self.answers)}"] if self.answers else []


def fresh_drafts(request: Request, begin: int) -> Iterator[bool]:
    """Yields, for each output token from ``begin``, whether it was an accepted draft. The last token of a cycle is the target's own."""
    ends = set(accumulate(count for _, count in request.metrics.bursts))
    for place in range(begin, len(request.output)):
        yield place + 1 not in ends


def figures(answers: list[Answer]) -> str:
    """Tokens, tokens a cycle and speed of these answers together."""
    tokens, cycles = sum(len(answer.drafted) for answer in answers), sum(answer.cycles for answer in answers)
    measured = [answer.metrics for answer in answers if answer.metrics is not None]
    seconds, later = sum(m.decode_seconds for m in measured), sum(m.decode_seconds * m.tokens_per_second for m in measured)
    said = [f"{tokens} tokens", f"{(tokens - len(answers)) / cycles if cycles else 0:.2f} tokens a cycle"]
    said += [f"{later / seconds:.0f} tokens/s"] if seconds else []
    drafted = sum(map(sum, (answer.drafted for answer in answers)))
    read, cached = sum(m.prefill_seconds for m in measured), sum(m.cached_tokens for m in measured)
    return ", ".join([*said, f"{drafted} of them drafted", f"first token after {read:.2f} s ({cached} prompt tokens already read)"])


def command(chat: Chat, line: str, say: Callable[[str], None]) -> bool:
    """Obey a line that begins with ``/``; returns False to leave."""
    name, _, rest = line.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    if name == "/help":
        say(HELP)
    elif name == "/stats":
        say("\n".join(chat.stats() or ["nothing was asked so far"]))
    elif name in ("/reset", "/system"):
        if name == "/system":
            chat.system = rest.strip() or None
        chat.reset()
        say("a new conversation" + ("" if chat.system is None else f", with the system message: {chat.system}"))
    else:
        say(f"no such command: {name}\n{HELP}")
    return True


def run(config: LaunchConfig) -> int:
    """Talk until the input ends; returns the exit code.

    Raises:
        ConfigError: a prompt is given.
        CheckpointError: the model has no chat template.
    """
    if config.prompt or config.prompt_file is not None:
        raise ConfigError("prompt", "nothing: graphspec chat reads what you type, or lines of standard input", "one is given", "graphspec "
                          "generate chat=true answers one question")  # fmt: skip
    from ..api.llm import LLM
    from ..engine.request import configured_params, sampling_class
    from ..text.conversation import Conversation

    params = configured_params(config.sampling)
    llm = LLM.from_config(config)
    try:
        # Refused here if there is no template, before anything is compiled.
        llm.check(Conversation([{"role": "user", "content": "Hi"}]), params)
        llm.warm_up(sampling=sampling_class([params], llm.plan.sampling_defaults))
        chat = Chat(llm, params, config.system)
        if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
            return talk(chat)
        return answer_lines(chat)
    finally:
        llm.close()


def answer_lines(chat: Chat) -> int:
    """Each line of standard input is a question or a command; answers are plain text. Exit code 2 if one could not be answered."""
    code = 0
    for line in sys.stdin or ():
        if not (question := line.strip()):
            continue
        if question.startswith("/"):
            if not command(chat, question, print):
                break
            continue
        try:
            for piece, _ in chat.ask(question):
                print(piece, end="", flush=True)
        except GraphspecError as error:
            print(f"graphspec: {error}", file=sys.stderr)
            code = 2
        else:
            print(flush=True)
    return code


def talk(chat: Chat, console: Console | None = None) -> int:
    """Questions are typed, with line editing where Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it
    console = console or Console(highlight=False)
    config, shape = chat.llm.config, chat.llm.plan.shape
    console.print(Text(f"{config.model.path}, variant={config.variant.name}, S, K, N = {shape.num_steps}, {shape.topk}, "
                       f"{shape.num_draft_tokens}. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves."), style="dim")  # fmt: skip
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            console.print()
            return 0
        except KeyboardInterrupt:
            console.print()
            continue
        if line.startswith("/"):
            if not command(chat, line, lambda said: console.print(Text(said), style="dim")):
                return 0
        elif line:
            try:
                show(chat.ask(line), console)
            except GraphspecError as error:
                console.print(Text(f"{error} (/reset begins anew)"), style="red")
                continue
            console.print(Text(figures(chat.answers[-1:]) + (", stopped" if chat.answers[-1].stopped else "")), style="dim")


def show(pieces: Generator[tuple[str, bool], None, None], console: Console) -> None:
    """Stream an answer. Lines that are full are printed; the last one and the figures so far are drawn anew with every token.

    Ctrl-C stops the answer.
    """
    line, tokens, cycles = Text(), 0, 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            for piece, drafted in pieces:
                tokens += 1
                cycles += not drafted
                line.append(piece, DRAFTED if drafted else None)
                *full, line = lines_of(line, console)
                for one in full:
                    console.print(one, soft_wrap=True)
                rate = (tokens - 1) / max(1, cycles - 1)
                live.update(Group(line, Text(f"{tokens} tokens, {rate:.2f} a cycle", "dim")), refresh=True)
        except KeyboardInterrupt:
            pieces.close()
    console.print(line, soft_wrap=True)


def lines_of(text: Text, console: Console) -> list[Text]:
    """Text broken at its line ends and at the width of the terminal; only the last line may still grow."""
    found = []
    for line in text.split("\n", allow_blank=True):
        broken = list(line.wrap(console, console.width, tab_size=4)) if cell_len(line.plain) > console.width else [line]
        found += broken
    return found or [Text()]
