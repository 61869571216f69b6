"""Addresses that the programs of interpreted kernels access, between one barrier and the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import interpreter_builder


@contextmanager
def meetings() -> Iterator[list[str]]:
    """Inside, interpreted programs are watched. Yields what two of a program's operations did to one address with no barrier between.

    Atomic operations are left out: they order themselves.
    """
    found: list[str] = []
    touched: dict[str, set[int]] = {"load": set(), "store": set()}
    place, barrier = interpreter_builder.set_grid_idx, interpreter_builder.create_barrier
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def clear() -> None:
        for addresses in touched.values():
            addresses.clear()

    def begun(*index: int) -> None:
        clear()
        place(*index)

    def waited() -> None:
        clear()
        barrier()

    def note(kind: str, others: tuple[str, ...], pointers: Any, mask: Any) -> None:
        # A loaded boolean is an integer here.
        addresses = set(pointers.data[mask.data.astype(bool)].tolist())
        found.extend(f"{kind} after {other} of {len(met)} places" for other in others if (met := touched[other] & addresses))
        touched[kind] |= addresses

    def loaded(pointers: Any, mask: Any, *rest: Any) -> Any:
        note("load", ("store",), pointers, mask)
        return load(pointers, mask, *rest)

    def stored(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("store", ("load", "store"), pointers, mask)
        return store(pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "set_grid_idx", begun)
        patch.setattr(interpreter_builder, "create_barrier", waited)
        patch.setattr(interpreter_builder, "create_masked_load", loaded)
        patch.setattr(interpreter_builder, "create_masked_store", stored)
        yield found
