"""Page allocator: reference-counted pages of the KV pools. Page 0 is the dummy page and is never handed out."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ResourceError


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
