"""Page allocator: reference-counted pages of the KV pools. Page 0 is the dummy page and is never handed out."""

from __future__ import annotations

from ..errors import ResourceError


class PageAllocator:
    """Hands out pages ``1 .. num_pages - 1``.

    Pages are reference-counted so that a prefix can be shared: :meth:`retain` adds an owner, :meth:`release` removes one, and the page is
    free again when it has no owner.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return len(self._owners) - 1 - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one owner each, or None when there are not as many (nothing is taken then)."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def retain(self, pages: list[int]) -> None:
        """Add an owner to each page.

        Raises:
            ResourceError: a page without an owner.
        """
        self._check(pages)
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Remove an owner from each page.

        Raises:
            ResourceError: a page without an owner; nothing is released then.
        """
        self._check(pages)
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _check(self, pages: list[int]) -> None:
        for page in set(pages):
            owners = self._owners[page] if 0 < page < len(self._owners) else 0
            if owners < pages.count(page):
                raise ResourceError(f"page {page}", f"at least {pages.count(page)} owners", owners)
