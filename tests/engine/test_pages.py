"""The page allocator against a model of it: a count of owners per page, and the keys under which pages may be found."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphspec.engine.pages import PageAllocator
from graphspec.errors import ResourceError


class Pages(RuleBasedStateMachine):
    """Holders of page lists, allocated or shared, that are given back in any order."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.holders: list[list[int]] = []
        self.kept: dict[bytes, int] = {}
        self.idle: list[int] = []
        """Kept pages without an owner, in the order in which they were given back."""

    @property
    def owners(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        before, unkept = set(self.owners), self.num_pages - 1 - len({*self.owners, *self.kept.values()})
        pages = self.allocator.allocate(count)
        if count > self.num_pages - 1 - len(before):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert not before & set(pages)
        assert all(0 < page < self.num_pages for page in pages), "page 0 is the dummy"
        taken, self.idle = self.idle[: max(0, count - unkept)], self.idle[max(0, count - unkept) :]
        assert set(taken) == set(pages) & {*taken, *self.idle}, "first those that cannot be found, then the least recently used"
        self.kept = {key: page for key, page in self.kept.items() if page not in taken}
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        shared = pages[: data.draw(st.integers(0, len(pages)))]
        self.allocator.retain(shared)
        self.holders.append(list(shared))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def keep(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(self.owners)))
        self.allocator.keep(page, key)
        if page not in self.kept.values():
            self.kept.setdefault(key, page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def take_what_is_kept(self, data: st.DataObject) -> None:
        page = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
        self.allocator.retain([page])
        self.idle = [other for other in self.idle if other != page]
        self.holders.append([page])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.release(pages)
        self.idle += [page for page in reversed(pages) if page in self.kept.values() and page not in self.owners]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back_too_much(self, data: st.DataObject) -> None:
        held = self.owners
        page = data.draw(st.sampled_from(sorted(held) or [0]))
        others = sorted(set(held) - {page})
        with pytest.raises(ResourceError, match=f"page {page}: expected at least {held[page] + 1} owners, found {held[page]}"):
            self.allocator.release([*others, *[page] * (held[page] + 1)])

    @rule(data=st.data())
    def touch_what_nobody_owns(self, data: st.DataObject) -> None:
        free = sorted(set(range(self.num_pages)) - set(self.owners) - set(self.kept.values()))
        page = data.draw(st.sampled_from([*free, self.num_pages, -1]))
        for move in (self.allocator.retain, self.allocator.release, lambda pages: self.allocator.keep(*pages, b"e")):
            with pytest.raises(ResourceError, match=f"page {page}: expected at least 1 owners, found 0"):
                move([page])

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.num_used == len(self.owners)
            assert self.allocator.num_free == self.num_pages - 1 - len(self.owners)
            assert len(self.allocator._key_of) == len(self.kept)
            assert {key: self.allocator.find(key) for key in (b"a", b"b", b"c", b"d")} == {
                key: self.kept.get(key) for key in (b"a", b"b", b"c", b"d")
            }

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for pages in self.holders:
            self.allocator.release(pages)
        assert self.allocator.num_used == 0
        whole = self.allocator.allocate(self.num_pages - 1)
        assert sorted(whole or []) == list(range(1, self.num_pages))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=25)


def test_nothing_is_taken_when_there_are_too_few() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert len(allocator.allocate(3) or []) == 3
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []
