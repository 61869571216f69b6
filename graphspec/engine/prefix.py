"""Prefix sharing: full pages whose tokens another request had are found again instead of being computed. Host side; touches no tensor."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence

from ..plan import Plan
from .pages import PageAllocator
from .request import Request


class PrefixCache:
    """Names the pages of requests, finds those that are there, and keeps those that are final.

    A page's name is a hash chain: of the name of the page before, of its own tokens, and of the Y tokens after them, on which a drafter
    with one head per step makes the last Y rows of its KV depend. Everything else that target and draft KV follow from is the same for all
    requests of an engine, but for the length of the prompt where RoPE depends on it: there the chain starts with it.

    Args:
        plan: every static number.
        allocator: of the pages.
    """

    def __init__(self, plan: Plan, allocator: PageAllocator) -> None:
        self.plan, self.allocator = plan, allocator
        self._lookahead = plan.lookback
        self._unread = plan.window_capacity - 1 if plan.draft is not None else 0
        """Most committed tokens that the drafter has yet to read when a cycle ends, in addition to the root."""
        models = (plan.target, plan.draft.decoder if plan.draft is not None else plan.target)
        self._by_length = any(model.rope.kind == "dynamic" for model in models)

    def find(self, request: Request, length: int) -> list[int]:
        """Pages that hold the front of the request's first ``length`` tokens, none of which is missing. They are not retained.

        The last token is never among them, since its logits are needed; nor are the Y before it, whose draft KV the first cycle writes.
        Empty for a request that has to read its whole prompt: to score its tokens, or to count them for penalties.
        """
        pages: list[int] = []
        for index in range(self._findable(request, length)):
            page = self.allocator.find(self._key(request, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def leaders(self, reading: Sequence[Request]) -> list[Request]:
        """Without requests that can have their next page of one before them, once that has read it: N samples of one prompt read it once.

        Args:
            reading: whose prompts are not read yet, in the order in which they are served.
        """
        leaders: list[Request] = []
        for request in reading:
            if not request.begins or not any(self._will_fill(other, request) for other in leaders):
                leaders.append(request)
        return leaders

    def _will_fill(self, other: Request, request: Request) -> bool:
        """Whether the first page that ``request`` lacks is one that ``other`` has, or is about to fill."""
        index = request.shared
        if index >= self._findable(request, request.committed) or index >= (other.committed - self._lookahead) // self.plan.page_size:
            return False
        return self._key(other, index) == self._key(request, index)

    def _findable(self, request: Request, length: int) -> int:
        """Most pages that :meth:`find` can return."""
        if not self.plan.prefix_cache or request.sampling.penalties or request.scores_prompt:
            return 0
        return (length - max(1, self._lookahead)) // self.plan.page_size

    def begin_after(self, request: Request, pages: int) -> None:
        """Let prefill of a row begin after that many pages, which others have filled."""
        request.shared = request.mapped = request.published = pages
        request.publish_at = 0
        request.prefilled = request.shared_tokens = pages * self.plan.page_size
        if not request.output:
            request.metrics.cached_tokens = request.prefilled

    def take_over(self, request: Request) -> None:
        """Exchange pages of a row of which nothing was read for those that others have filled since it got them."""
        shared = self.find(request, request.committed)[request.shared :]
        if shared:
            upto = request.shared + len(shared)
            self.allocator.retain(shared)
            self.allocator.release(request.pages[request.shared : upto])
            request.pages[request.shared : upto] = shared
            self.begin_after(request, upto)

    def publish_prompt(self, request: Request, end: int) -> None:
        """The launches so far read the first ``end`` tokens of the request; launches run in order, so others may rely on it."""
        self._publish(request, end - self._lookahead)

    def publish_output(self, request: Request) -> None:
        """More tokens of the request were read from results. Draft KV of the last ones is left to later cycles.

        Notes in the request how long its output must be for the next page: before that a call changes nothing.
        """
        if not self.plan.prefix_cache:
            request.publish_at = math.inf
            return
        unread = self._unread + self._lookahead
        self._publish(request, request.committed - unread)
        request.publish_at = (request.published + 1) * self.plan.page_size + unread - len(request.prompt) + 1

    def _publish(self, request: Request, final: int) -> None:
        """Let others find the pages within the first ``final`` tokens of a request, whose KV is not written again."""
        if not self.plan.prefix_cache:
            return
        for index in range(request.published, final // self.plan.page_size):
            self.allocator.keep(request.pages[index], self._key(request, index))
            request.published = index + 1

    def _key(self, request: Request, index: int) -> bytes:
        """Name of a page of the request, all of whose tokens are known, the Y after it too."""
        keys, size = request.page_keys, self.plan.page_size
        while len(keys) <= index:
            begin = len(keys) * size
            before = keys[-1] if keys else str(len(request.prompt) if self._by_length else 0).encode()
            tokens = array("q", request.known(begin, begin + size + self._lookahead))
            keys.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=32).digest())
        return keys[index]
