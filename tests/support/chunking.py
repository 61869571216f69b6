"""The chunks of a whole prompt, as the engine cuts them one after another."""

from __future__ import annotations

from graphspec.engine.admission import next_chunk


def chunked(start: int, total: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """``(start, length)`` of the chunks that read tokens ``[start, total)``; see :func:`graphspec.engine.admission.next_chunk`."""
    chunks = []
    while start < total:
        length = next_chunk(start, total, sizes)
        chunks.append((start, length))
        start += length
    return chunks
