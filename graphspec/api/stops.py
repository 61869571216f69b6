"""The text of a request as it grows, and the stop texts that end it.

A stop text may begin and end inside tokens, and inside the run of a cycle. It is looked for after each token, in text that is final; the
tokens after the one in which it ended never become part of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import compress

from ..engine.request import SamplingParams
from ..plan.buffers import Status
from ..text.tokenizer import Detokenizer, Tokenizer

ENDS = (Status.STOPPED, Status.LENGTH, Status.FAILED)


class StopTexts:
    """Stop texts in a growing text, found in a time per character that does not depend on how many there are.

    The automaton of Aho and Corasick (Communications of the ACM 18(6), 1975). A state is the longest end of the text that a stop text
    begins with; 0 is the empty one.

    Args:
        stops: the texts, none of them empty.

    Attributes:
        ends: by state, the longest stop text that ends there; empty: none does.
        held: by state, the most characters at the end with which a stop text begins, not all of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.ends, self.held, self._fail = [""], [0], [0]
        self._children: list[dict[str, int]] = [{}]
        for stop in stops:
            state = 0
            for character in stop:
                found = self._children[state].setdefault(character, len(self.ends))
                if found == len(self.ends):
                    self.ends.append("")
                    self.held.append(0)
                    self._fail.append(0)
                    self._children.append({})
                state = found
            self.ends[state] = stop
        # By depth: what a state falls back to is shorter.
        level, depth = [0], 0
        while level:
            below = []
            for state in level:
                fail = self._fail[state]
                self.ends[state] = self.ends[state] or self.ends[fail]
                self.held[state] = depth if self._children[state] else self.held[fail]
                for character, child in self._children[state].items():
                    self._fail[child] = self.step(fail, character) if state else 0
                    below.append(child)
            level, depth = below, depth + 1

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(character, 0)


automaton = lru_cache(maxsize=4)(StopTexts)
"""The automaton of a tuple of stop texts, cached: a request asks several times for its own."""


class OutputText:
    """Text of one request's output, token by token: what was returned is final, and what might begin a stop text is held back.

    Stop texts are looked for in the text with its special tokens, also where the text that is returned leaves them out.

    Args:
        tokenizer: the checkpoint's.
        params: of the request. Its seed does not matter.
        prompt: of the request; the output's text continues the prompt's, which comes first if the request wants an echo.

    Attributes:
        count: tokens so far, at most up to the one in which a stop text ended.
        stop: that stop text; None: none was found.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._stops = automaton(tuple(params.stop)) if params.stop else None
        self._state = 0
        self._pieces = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_tokens=params.kept_special_tokens,
            prompt=() if params.echo else prompt,
        )
        self._held = ""
        self._seen: list[bool] = []
        """Whether each character that is held is part of the text."""
        self._echo = "".join(map(self._pieces.push, prompt)) if params.echo else ""
        self.count = 0
        self.stop: str | None = None

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Append tokens of the output; returns the text that is final now.

        Args:
            tokens: read up to the one in which a stop text ends.
            last: none follow, so nothing is held back any more.
        """
        text, self._echo = self._echo, ""
        for token in tokens:
            if self.stop is not None:
                break
            self.count += 1
            if token in self._pieces.hidden:
                text += self._search(self._tokenizer.token_text(token), seen=False) if self._stops else ""
            else:
                text += self._search(self._pieces.push(token))
        if last and self.stop is None:
            text += self._search(self._pieces.rest())
            text, self._held, self._seen = text + "".join(compress(self._held, self._seen)), "", []
        return text

    def _search(self, fresh: str, *, seen: bool = True) -> str:
        """The part of the held text and the fresh one that is final; notes a stop text that ends in the fresh one.

        Args:
            fresh: follows the held text.
            seen: it is part of the text that is returned.
        """
        if self._stops is None:
            return fresh
        text, known = self._held + fresh, len(self._held)
        self._seen += [seen] * len(fresh)
        wanted = self.count > self._params.min_tokens
        for place, character in enumerate(fresh, known + 1):
            self._state = self._stops.step(self._state, character)
            if wanted and (stop := self._stops.ends[self._state]):
                self.stop, self._held, begin = stop, "", place - len(stop)
                return "".join(compress(text[:begin], self._seen)) + (stop if self._params.include_stop_str_in_output else "")
        final = len(text) - self._stops.held[self._state]
        shown = "".join(compress(text[:final], self._seen))
        self._held, self._seen = text[final:], self._seen[final:]
        return shown


class StopCheck:
    """Looks for a request's stop texts where its tokens come in.

    Args:
        make: its text from the beginning.
    """

    def __init__(self, make: Callable[[], OutputText]) -> None:
        self._make = make
        self._text = make()

    def again(self) -> StopCheck:
        """The same for another output."""
        return StopCheck(self._make)

    def cut(self, output: Sequence[int], tokens: list[int], status: int) -> tuple[list[int], int]:
        """The tokens of a run up to the end of a stop text, and the row's status: ``Status.STOPPED`` if there is one.

        Args:
            output: of the request before the run.
            tokens: of the run.
            status: of the row after it.
        """
        before = len(output)
        if self._text.count != before:
            # An interrupt came between this and the output.
            self._text = self._make()
            self._text.push(output)
        self._text.push(tokens, last=status in ENDS)
        return (tokens, status) if self._text.stop is None else (tokens[: self._text.count - before], Status.STOPPED)


class NothingNew:
    """Ends a request that wants no new token where its prompt has been read."""

    def again(self) -> NothingNew:
        """The same for another output."""
        return self

    def cut(self, output: Sequence[int], tokens: list[int], status: int) -> tuple[list[int], int]:
        """No token, and the row's status: ``Status.LENGTH`` unless the row failed or lives."""
        return [], Status.LENGTH if status == Status.STOPPED else status


def overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins, not all of it."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
