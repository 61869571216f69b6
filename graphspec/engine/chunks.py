"""How prompts are cut into the chunks that prefill programs read."""

from __future__ import annotations

from ..shapes import MOST_PADDING, pick_bucket


def next_chunk(start: int, total: int, sizes: tuple[int, ...]) -> int:
    """Tokens of the chunk that begins at ``start``.

    All that is left, where a size holds it with less than ``MOST_PADDING`` tokens of padding; else up to the next multiple of the largest
    size that what is left reaches. So chunks end where they would end in a prompt that is read from its beginning, unless that costs
    ``MOST_PADDING`` tokens of padding.

    Args:
        start: tokens of the row that were read before.
        total: tokens of the prompt, more than ``start``.
        sizes: of chunks, ascending.
    """
    left = total - start
    # Tokens up to the next multiple of each size.
    room = [size - start % size for size in sizes if start % size < MOST_PADDING]
    if any(tokens >= left for tokens in room) and (left <= sizes[0] or pick_bucket(sizes, left) - left < MOST_PADDING):
        return left
    within = [tokens for tokens in room if tokens <= left] or [size for size in sizes if size <= left]
    return max(within, default=left)


def chunked(start: int, total: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """``(start, length)`` of the chunks that read tokens ``[start, total)`` one after another; see :func:`next_chunk`."""
    chunks = []
    while start < total:
        length = next_chunk(start, total, sizes)
        chunks.append((start, length))
        start += length
    return chunks
