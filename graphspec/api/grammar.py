"""Grammars of requests, by xgrammar (extra ``grammar``), which is imported when a request first asks for one.

A grammar's state follows the tokens of its own request and nothing else: what is drafted is walked and taken back within one call, so
preemption, an interrupt or a new prefill need nothing of it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..config.checks import brief
from ..config.hints import install_hint
from ..engine.request import SamplingParams
from ..errors import CheckpointError, RequestError
from ..plan.plan import Plan
from ..shapes import MASK_BITS
from ..text.grammar_ends import endless_rule
from ..text.structured import KEY, Structured
from ..text.structured_source import prepared
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher

CACHE_BYTES = 1 << 28
"""Most memory for compiled grammars that no request holds; the least recently used make room."""
COMPILER_THREADS = 2
LONGEST_TOKEN = 32
"""Bytes of the longest token that forced text is spelled with."""


class RowGrammar:
    """The grammar of one request, and how far its output has come in it.

    Args:
        compiled: the grammar.
        stop_ids: that may be sampled where the text is complete, and end the request.
        speller: spells forced text.
    """

    def __init__(self, compiled: CompiledGrammar, stop_ids: Sequence[int], speller: Speller) -> None:
        self._compiled, self._stop_ids, self._speller = compiled, tuple(stop_ids), speller
        self._matcher: GrammarMatcher = self._start()
        self._known: int | None = 0
        """Tokens of the output that the matcher has accepted; None while it does: an interrupt may come between."""

    def _start(self) -> GrammarMatcher:
        from xgrammar import GrammarMatcher

        return GrammarMatcher(self._compiled, override_stop_tokens=list(self._stop_ids))

    def again(self) -> RowGrammar:
        """The same for another output."""
        return RowGrammar(self._compiled, self._stop_ids, self._speller)

    def follow(self, output: Sequence[int]) -> bool:
        """Go on to the end of ``output``, from its beginning if need be. False: a token of it is refused."""
        known = self._known
        if known is None or known > len(output):
            self._matcher, known = self._start(), 0
        self._known = None
        for token in output[known:]:
            # A matcher that has accepted a stop id accepts nothing more.
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
        self._known = len(output)
        return True

    def fill(self, token_N: Sequence[int], parent_N: Sequence[int], mask_NVw: Tensor) -> None:
        """See :meth:`graphspec.graphs.grammar.Grammar.fill`. The root is the last token of the output followed."""
        if self._matcher.is_terminated():
            self._only_ends(mask_NVw)
            return
        child, sibling = first_children(token_N, parent_N)
        tokens = torch.tensor([max(token, 0) for token in token_N])
        self._matcher.traverse_draft_tree(torch.tensor(child), torch.tensor(sibling), tokens, mask_NVw)
        # xgrammar allows nothing after the end, which is no distribution; rules that judge a whole draft look at it.
        for node, token in enumerate(token_N):
            if node and token in self._stop_ids:
                self._only_ends(mask_NVw[node])

    def _only_ends(self, mask: Tensor) -> None:
        """Allow the ends and nothing else; int32 ``[..., ceil(V / 32)]``."""
        mask.zero_()
        for stop in self._stop_ids:
            mask[..., stop // MASK_BITS] |= _bit(stop)

    def forced(self, maximum: int) -> list[int]:
        """See :meth:`graphspec.graphs.grammar.Grammar.forced`. The end is part of it where nothing else may follow."""
        if self._matcher.is_terminated():
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:
            # The output ends, or what is forced does, inside a character; xgrammar has text only.
            return []
        run, whole = self._speller.spell(text.encode(), maximum)
        if len(run) == maximum or not whole or len(self._stop_ids) > 1:
            return run
        ahead = self._matcher
        if text:
            ahead = self._matcher.fork()
            ahead.accept_string(text)
        if ahead.is_completed():
            mask_1Vw = torch.zeros(1, self._speller.words, dtype=torch.int32)
            ahead.fill_next_token_bitmask(mask_1Vw)
            [stop] = self._stop_ids
            mask_1Vw[0, stop // MASK_BITS] ^= _bit(stop)
            if not mask_1Vw.any():
                run.append(stop)
        return run


class Speller:
    """Spells text in tokens, always by the longest that fits: about as a tokenizer does, and without waiting for one.

    Args:
        texts: of the tokens; empty ones are not used.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.words = -(-len(texts) // MASK_BITS)
        """Words of a mask."""
        self._token = {text: token for token, text in enumerate(texts) if 0 < len(text) <= LONGEST_TOKEN}

    def spell(self, text: bytes, maximum: int) -> tuple[list[int], bool]:
        """At most ``maximum`` tokens that the text begins with, and whether they are all of it."""
        found: list[int] = []
        begin = 0
        while begin < len(text) and len(found) < maximum:
            ends = range(min(begin + LONGEST_TOKEN, len(text)), begin, -1)
            end = next((end for end in ends if text[begin:end] in self._token), None)
            if end is None:
                break
            found.append(self._token[text[begin:end]])
            begin = end
        return found, begin == len(text)


def _bit(token: int) -> int:
    """The bit of a token in its word, as a signed number."""
    place = token % MASK_BITS
    return 1 << place if place < MASK_BITS - 1 else -(1 << place)


def first_children(token_N: Sequence[int], parent_N: Sequence[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, -1 if it has none; -1 is no token, and no node."""
    child, sibling = [-1] * len(token_N), [-1] * len(token_N)
    for node in range(len(token_N) - 1, 0, -1):
        if token_N[node] >= 0:
            parent = parent_N[node]
            sibling[node], child[parent] = child[parent], node
    return child, sibling


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a compiler of grammars knows of a checkpoint.

    Attributes:
        texts: of all tokens.
        special: tokens that are no text, the ends among them.
        stops: end-of-text ids.
    """

    texts: tuple[bytes, ...]
    special: frozenset[int]
    stops: tuple[int, ...]

    def compiler(self, threads: int, *, tags: bool) -> tuple[GrammarCompiler, Speller]:
        """A compiler, and what spells the text that its grammars force.

        Args:
            threads: of the compiler.
            tags: special tokens are text. A structural tag is made of them; the text of other outputs has none.

        Raises:
            RequestError: xgrammar is not installed, or does not take the tokenizer.
        """
        try:
            from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
        except ImportError as error:
            raise RequestError(KEY, "the package xgrammar", "no such package", install_hint("grammar")) from error
        texts = [text if tags or token not in self.special else b"" for token, text in enumerate(self.texts)]
        try:
            info = TokenizerInfo(texts, VocabType.RAW, vocab_size=len(texts), stop_token_ids=list(self.stops))
        except Exception as error:
            raise RequestError(KEY, "a tokenizer that xgrammar reads", _reason(error)) from error
        compiler = GrammarCompiler(info, max_threads=threads, cache_enabled=True, cache_limit_bytes=CACHE_BYTES // 2)
        return compiler, Speller(info.decoded_vocab)


class Grammars:
    """Compiles the grammars of an engine's requests, each of them once.

    Args:
        plan: of the engine.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._vocabulary: Vocabulary | None = None
        self._compilers: dict[bool, tuple[GrammarCompiler, Speller]] = {}
        """By whether special tokens are text."""
        self._held: WeakValueDictionary[Structured, CompiledGrammar] = WeakValueDictionary()
        """Those of requests that exist."""
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the compiled grammars that requests hold, whether or not the cache of :data:`CACHE_BYTES` has them too."""
        # Another thread may add one meanwhile; a list of references is made in one step.
        held = (reference() for reference in self._held.valuerefs())
        return sum(compiled.memory_size_bytes for compiled in held if compiled is not None)

    def vocabulary(self, tokenizer: Callable[[], Tokenizer]) -> Vocabulary:
        """What compilers know of the checkpoint.

        Args:
            tokenizer: of the checkpoint.

        Raises:
            RequestError: there is no tokenizer.
        """
        if self._vocabulary is None:
            try:
                speech = tokenizer()
            except CheckpointError as error:
                raise RequestError(KEY, "a checkpoint with a tokenizer", str(error)) from error
            stops = self._plan.target.eos_token_ids
            texts = tuple(speech.token_bytes(token) for token in range(self._plan.target.vocab_size))
            self._vocabulary = Vocabulary(texts, speech.special_ids.union(stops), tuple(stops))
        return self._vocabulary

    def load(self, tokenizer: Callable[[], Tokenizer]) -> None:
        """Load the compilers, which the first grammar does otherwise.

        Args:
            tokenizer: of the checkpoint.

        Raises:
            RequestError: xgrammar is not installed or does not take the tokenizer, or there is none.
        """
        for tags in (False, True):
            self._compiler(tokenizer, tags=tags)

    def grammar(self, params: SamplingParams, stop_ids: Sequence[int], tokenizer: Callable[[], Tokenizer]) -> RowGrammar:
        """The grammar of a request at the beginning of its output.

        Args:
            params: of the request, with ``structured``.
            stop_ids: that end it.
            tokenizer: of the checkpoint.

        Raises:
            RequestError: xgrammar is not installed, does not take the grammar or the tokenizer, there is no tokenizer, no special token
                ends the request, or the acceptance rule makes tokens up.
        """
        structured = params.structured
        assert structured is not None, "a request with a grammar"
        if self._plan.accept.synthetic:
            raise RequestError(KEY, "None with accept=synthetic, whose tokens mean nothing", structured.kind)
        compiler, speller = self._compiler(tokenizer, tags=structured.structural_tag is not None)
        # A stop id that is text is sampled where the grammar has that text.
        ends = [stop for stop in stop_ids if stop in self.vocabulary(tokenizer).special]
        if not ends:
            expected = "a special token to end with: an end-of-text id (ignore_eos=False), or one of stop_token_ids"
            raise RequestError(KEY, expected, f"stop ids {list(stop_ids)}")
        # What a request holds is not compiled again, though the cache may have dropped it.
        compiled = self._held.get(structured)
        if compiled is None:
            compiled = self._held.setdefault(structured, compile_grammar(compiler, structured))
        return RowGrammar(compiled, ends, speller)

    def _compiler(self, tokenizer: Callable[[], Tokenizer], *, tags: bool) -> tuple[GrammarCompiler, Speller]:
        with self._lock:
            if tags not in self._compilers:
                self._compilers[tags] = self.vocabulary(tokenizer).compiler(COMPILER_THREADS, tags=tags)
            return self._compilers[tags]


def compile_grammar(compiler: GrammarCompiler, structured: Structured) -> CompiledGrammar:
    """Compile, or find what was compiled before.

    Raises:
        RequestError: it is no grammar, has a part without a text, or asks for what xgrammar does not enforce.
    """
    kind = structured.kind
    key, source = f"{KEY}.{kind}", prepared(structured)
    try:
        if kind in ("json_schema", "json_object"):
            compiled = compiler.compile_json_schema(source, any_whitespace=structured.any_whitespace)
        elif kind == "regex":
            compiled = compiler.compile_regex(source)
        elif kind == "structural_tag":
            compiled = compiler.compile_structural_tag(source)
        else:
            compiled = compiler.compile_grammar(source)
        endless = endless_rule(str(compiled.grammar))
    except Exception as error:  # xgrammar's own reasons, most of them RuntimeError
        raise RequestError(key, "a grammar that xgrammar takes", f"{brief(source)}: {_reason(error)}") from error
    if endless is not None:
        raise RequestError(key, "a text for each of its parts", f"{brief(source)}, where rule {endless} of xgrammar's has none")
    return compiled


def _reason(error: Exception) -> str:
    """What xgrammar says, without time and place in its source."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?", "", text)[:300] or type(error).__name__
