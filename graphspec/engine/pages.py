"""Pages of the KV pools: their reference-counted allocator, and the reuse of full pages that another request has computed.

Host side; touches no tensor. Page 0 is the dummy page and is never handed out.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence

from ..errors import ResourceError
from ..plan.plan import Plan
from .request import Request


class PageAllocator:
    """Hands out pages ``1 .. num_pages - 1``.

    Pages are reference-counted so that a prefix can be shared: :meth:`retain` adds an owner, :meth:`release` removes one, and a page
    without an owner is free. A free page that was kept under a key can still be found and retained, until its memory is needed: of those
    pages the least recently used goes first.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """Kept pages without an owner, least recently used first."""

    @property
    def num_free(self) -> int:
        """Pages without an owner, kept or not."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return len(self._owners) - 1 - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one owner each and no key; None, and nothing is taken, if fewer are free."""
        if count > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_of[self._key_of.pop(page)]
        return page

    def keep(self, page: int, key: bytes) -> None:
        """Make ``page`` findable under ``key``. No-op if the key or the page is already in use.

        Raises:
            ResourceError: a page without an owner.
        """
        self._check([page])
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def find(self, key: bytes) -> int | None:
        """The page kept under ``key``; None: there is none."""
        return self._page_of.get(key)

    def retain(self, pages: Sequence[int]) -> None:
        """Add an owner to each page.

        Raises:
            ResourceError: a page that has no owner and is not kept; nothing is retained then.
        """
        self._check([page for page in pages if page not in self._idle])
        for page in pages:
            self._idle.pop(page, None)
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each page.

        Raises:
            ResourceError: a page without an owner; nothing is released then.
        """
        self._check(pages)
        # A page can only be found after those before it, so the last one is evicted first.
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _check(self, pages: Sequence[int]) -> None:
        for page in set(pages):
            owners = self._owners[page] if 0 < page < len(self._owners) else 0
            if owners < pages.count(page):
                raise ResourceError(f"page {page}", f"at least {pages.count(page)} owners", owners)


class PrefixCache:
    """Computes the keys of requests' pages, finds published pages by key, and publishes pages that are final.

    A page's key is a hash chain over the key of the page before, its own tokens, and the Y tokens after them, since the last Y rows of the
    draft KV depend on those if the drafter has one head per step. Nothing else that target and draft KV depend on differs between the
    requests of an engine, except the length of the prompt if RoPE depends on it: then the chain starts with that. The ``cache_salt`` of a
    request is at its start as well, so that pages are shared only among requests that have the same.

    Args:
        plan: every static number.
        allocator: of the pages.
    """

    def __init__(self, plan: Plan, allocator: PageAllocator) -> None:
        self.plan, self.allocator = plan, allocator
        self._lookahead = plan.lookback
        self._unread = plan.window_capacity - 1 if plan.draft_reads_tokens else 0
        """The most committed tokens, in addition to the root, that the drafter has not read when a cycle ends."""
        models = (plan.target, plan.draft.decoder if plan.draft is not None else plan.target)
        self._by_length = any(model.rope.kind == "dynamic" for model in models)

    def find(self, request: Request, length: int) -> list[int]:
        """The longest run of published pages that holds the beginning of the request's first ``length`` tokens. Does not retain them.

        The last token is never covered, since its logits are needed; nor are the Y tokens before it, whose draft KV the first cycle writes.
        Empty for a request that must read its whole prompt, to score its tokens or to count them for penalties.
        """
        pages: list[int] = []
        for index in range(self._findable(request, length)):
            page = self.allocator.find(self._key(request, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def leaders(self, reading: Sequence[Request]) -> list[Request]:
        """``reading`` without the requests that can take their next page from an earlier one once that has filled it: N samples of one
        prompt read it once.

        Args:
            reading: requests whose prompts are not fully read, in the order in which they are served.
        """
        leaders: list[Request] = []
        for request in reading:
            if not request.row.begins or not any(self._will_fill(other, request) for other in leaders):
                leaders.append(request)
        return leaders

    def _will_fill(self, other: Request, request: Request) -> bool:
        """Whether ``other`` has, or is about to fill, the first page that ``request`` lacks."""
        index = request.row.shared
        if index >= self._findable(request, request.committed) or index >= (other.committed - self._lookahead) // self.plan.page_size:
            return False
        return self._key(other, index) == self._key(request, index)

    def _findable(self, request: Request, length: int) -> int:
        """Most pages that :meth:`find` can return."""
        if not self.plan.prefix_cache or request.sampling.penalties or request.scores_prompt:
            return 0
        return (length - max(1, self._lookahead)) // self.plan.page_size

    def begin_after(self, request: Request, pages: int) -> None:
        """Start the prefill of a row after its first ``pages`` pages, which other requests have filled."""
        row = request.row
        row.shared = row.mapped = row.published = pages
        row.publish_at = 0
        row.prefilled = row.shared_tokens = pages * self.plan.page_size
        if not request.output:
            request.metrics.cached_tokens = row.prefilled

    def take_over(self, request: Request) -> None:
        """Replace pages of a row that has read nothing yet by pages that others have filled meanwhile."""
        row = request.row
        shared = self.find(request, request.committed)[row.shared :]
        if shared:
            upto = row.shared + len(shared)
            self.allocator.retain(shared)
            self.allocator.release(row.pages[row.shared : upto])
            row.pages[row.shared : upto] = shared
            self.begin_after(request, upto)

    def publish_prompt(self, request: Request, end: int) -> None:
        """Publish the pages within the first ``end`` tokens, which were launched: launches run in order, so others may use them at once."""
        self._publish(request, end - self._lookahead)

    def publish_output(self, request: Request) -> None:
        """Publish pages after more output was read from results, except the last tokens, whose draft KV later cycles write.

        Sets ``publish_at``, the length of the output from which the next page can be published.
        """
        row = request.row
        if not self.plan.prefix_cache:
            row.publish_at = math.inf
            return
        unread = self._unread + self._lookahead
        self._publish(request, request.committed - unread)
        row.publish_at = (row.published + 1) * self.plan.page_size + unread - len(request.prompt) + 1

    def _publish(self, request: Request, final: int) -> None:
        """Publish the pages within the first ``final`` tokens of a request, whose KV is not written again."""
        if not self.plan.prefix_cache:
            return
        row = request.row
        for index in range(row.published, final // self.plan.page_size):
            self.allocator.keep(row.pages[index], self._key(request, index))
            row.published = index + 1

    def _key(self, request: Request, index: int) -> bytes:
        """Key of a page of the request. All of its tokens, and the Y after it, must be known."""
        keys, size = request.page_keys, self.plan.page_size
        while len(keys) <= index:
            begin = len(keys) * size
            before = keys[-1] if keys else self._start(request)
            tokens = array("q", request.known(begin, begin + size + self._lookahead))
            keys.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=32).digest())
        return keys[index]

    def _start(self, request: Request) -> bytes:
        """What the first page's key depends on in addition to tokens."""
        length = str(len(request.prompt) if self._by_length else 0).encode()
        if request.cache_salt is None:
            return length
        return length + b":" + hashlib.blake2b(request.cache_salt.encode(), digest_size=32).digest()
