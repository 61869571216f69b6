"""``graphspec demo`` on a model that chats: it answers, a draft tree is drawn, and three kinds of prompts are decoded with and without
speculation.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..config.catalog import PLAIN_DECODING, resolve_variant
from ..config.checks import check_text
from ..config.compose import load_config, overrides_of
from ..config.schema import AdaptiveConfig, VariantConfig
from ..errors import ConfigError, GraphspecError, ResourceError
from ..facts.folders import model_folder
from ..host.core_wait import CoreWait, busy_caution
from ..host.terminal import table
from .chat import Chat, conversation_words, figures, show
from .demo import DEMO_WIDTH, WordWrap, measure, working
from .inspect import draw_tree

if TYPE_CHECKING:
    from rich.table import Table

    from ..api.llm import LLM
    from ..api.outputs import Output, TreeSnapshot
    from ..config.command_options import LaunchConfig
    from ..text.conversation import Conversation

SMALL = "experiment=demo_chain"
"""The demo where there is no model that chats."""
QUESTION = "What is a hash map, and when should I use one?"
_CODE = "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)"
PROMPTS = {
    "chat": QUESTION,
    "code": "Write a Python class for a stack with push, pop, peek and is_empty. Answer with code.",
    "edit": f"Rename the function mean to average in this code, and repeat the code:\n\n```python\n{_CODE}\n```",
}
ANSWER_TOKENS, TIMED_TOKENS = 128, 64
REPEATS = 2
LOOK_AT = (1, 2, 4, 8, 16)
"""Cycles whose tree may be drawn: the first of these in which a draft token was accepted."""


def demo_words(words: list[str]) -> list[str]:
    """Words of the command line, completed: a model that chats is asked, as :func:`conversation_words` has it. Another one, and none at
    all, gets the small demo; where the default model isn't on this machine, a line on stderr says how to fetch it.
    """
    completed = conversation_words(words)
    if completed is words:
        return words
    keys = {word.partition("=")[0] for word in words}
    from ..text.tokenizer import Tokenizer

    try:
        config = load_config(*overrides_of(completed))
        if Tokenizer(model_folder(config.model.path, config.model.revision)).has_chat_template:
            return completed
    except GraphspecError as error:
        if not {"model", "model.path"} & keys and isinstance(error, ConfigError) and error.key == "model.path":
            print(f"graphspec: {error.hint} brings the model of this demo; here is the small one", file=sys.stderr)
            return [*words, SMALL]
    return words


def run_conversation_demo(config: LaunchConfig, console: Console | None = None, notes: Console | None = None) -> None:
    """Answer a question, draw a tree, then decode three kinds of prompts with and without speculation. All must give the same tokens.

    Raises:
        ConfigError: the configured variant does not speculate.
        ResourceError: tokens differ, which the runtime promises can't happen.
    """
    variant, plain = config.variant.name, PLAIN_DECODING.name
    if not resolve_variant(variant).speculates:
        raise ConfigError("variant", "one that speculates: the demo compares it with plain decoding", repr(variant))
    question = check_text("prompt", config.prompt[0]) if config.prompt else QUESTION
    console, notes = console or Console(highlight=False), notes or Console(stderr=True, highlight=False)
    console.width = min(console.width, DEMO_WIDTH)
    from ..api.llm import LLM
    from ..engine.request import measured_params

    params = measured_params(config.sampling, max_tokens=config.sampling.max_tokens or ANSWER_TOKENS, seed=config.sampling.seed or 0)
    engines: dict[str, LLM] = {}
    with ExitStack() as opened:

        def load(name: str, wanted: LaunchConfig) -> None:
            with working(f"loading the model, building the cycle of {name}", notes):
                engines[name] = opened.enter_context(LLM.from_config(wanted, progress=False))
                engines[name].warm_up(sampling=params.sampling_class)

        load(variant, config)
        console.print(Text(f"\n> {question}\n", style="bold"))
        answer(Chat(engines[variant], params, config.system), question, console)
        shape = engines[variant].plan.shape
        cycle, tree = first_accepted(engines[variant], conversation(PROMPTS["edit"]))
        console.print(f"\nDraft tree of cycle {cycle} of an edit, S, K, N = {shape.num_steps}, {shape.topk}, {shape.num_draft_tokens}"
                      " (+ accepted, - rejected):")  # fmt: skip
        console.print(draw_tree(tree))
        console.print()
        load(plain, replace(config, variant=VariantConfig(name=plain), adaptive=AdaptiveConfig()))
        timed = replace(params, max_tokens=min(params.max_tokens or TIMED_TOKENS, TIMED_TOKENS))
        rows: dict[str, dict[str, tuple[float, Output]]] = {}
        watch = CoreWait()
        with working(f"{len(PROMPTS)} kinds of prompts, {REPEATS} runs of each after a warm-up", notes):
            for kind, prompt in PROMPTS.items():
                speeds, outputs = measure(engines, conversation(prompt), timed, REPEATS)
                rows[kind] = {name: (speeds[name], outputs[name]) for name in engines}
        busy = busy_caution({"both together": watch.share()})
    for kind, sides in rows.items():
        if sides[variant][1].token_ids != sides[plain][1].token_ids:
            raise ResourceError(f"output of {kind}", f"the tokens of {plain}", f"other tokens from {variant}")
    if busy is not None:
        console.print(Text(busy + "\n"))
    console.print(kinds_table(rows, variant, plain, activations=config.kernels.activations))
    console.print(Text(why(rows, variant, plain)))


def conversation(prompt: str) -> Conversation:
    """A user's message as a prompt."""
    from ..text.conversation import Conversation

    return Conversation([{"role": "user", "content": prompt}])


def answer(chat: Chat, question: str, console: Console) -> None:
    """Stream the answer: in a terminal with accepted draft tokens in another colour."""
    if console.is_terminal:
        show(chat.ask(question), console)
    else:
        wrap = WordWrap(console.width)
        for piece, _ in chat.ask(question):
            console.print(Text(wrap.push(piece)), end="", soft_wrap=True)
        console.print(Text(wrap.push("", last=True)), soft_wrap=True)
    console.print(Text(figures(chat.answers[-1:])), style="dim")


def first_accepted(llm: LLM, prompt: Conversation) -> tuple[int, TreeSnapshot]:
    """The first cycle of :data:`LOOK_AT` that accepted a draft token, and its tree; the last of them if none did."""
    for cycle in LOOK_AT:
        tree = llm.draft_tree(prompt, cycle)
        if any(accepted for accepted, depth in zip(tree.accepted, tree.depth_N, strict=True) if depth):
            break
    return cycle, tree


def kinds_table(rows: dict[str, dict[str, tuple[float, Output]]], variant: str, plain: str, *, activations: str) -> Table:
    """Speeds with and without speculation, by kind of prompt. ``activations`` are those of ``kernels.activations``, for both."""
    cells = [
        (
            kind, f"{sides[plain][0]:.1f}", f"{sides[variant][0]:.1f}", f"{sides[variant][0] / sides[plain][0]:.2f}",
            f"{sides[variant][1].metrics.acceptance_length:.2f}", f"{len(sides[plain][1].token_ids)} equal",
        )
        for kind, sides in rows.items()
    ]  # fmt: skip
    title = "decoding speed, tokens/s" + ("; activations of 8 bits" if activations == "int8" else "")
    return table(title, ("prompt", plain, variant, f"x {plain}", "tokens/cycle", "tokens"), cells, ("prompt",))


def why(rows: dict[str, dict[str, tuple[float, Output]]], variant: str, plain: str) -> str:
    """One sentence on where the difference comes from: what a cycle costs, and what it gives."""

    def cycle_ms(name: str) -> float:
        metrics = [sides[name][1].metrics for sides in rows.values()]
        return 1e3 * sum(m.decode_seconds for m in metrics) / max(1, sum(m.cycles for m in metrics))

    tokens = [len(sides[variant][1].token_ids) - 1 for sides in rows.values()]
    given = sum(tokens) / max(1, sum(sides[variant][1].metrics.cycles for sides in rows.values()))
    slow, fast = cycle_ms(variant), cycle_ms(plain)
    pays = given > slow / fast
    return (
        f"Why it {'pays' if pays else 'does not pay here'}: a cycle that drafts and verifies takes {slow / fast:.2f} times a plain one "
        f"({slow:.1f} against {fast:.1f} ms) and gives {given:.2f} tokens instead of 1, {'more' if pays else 'no more'} than it costs."
    )
