"""How prompts are cut into the chunks that prefill programs read, and which prompts share a launch."""

from __future__ import annotations

from collections.abc import Sequence

from ..graphs.programs import PrefillKey, tokens_of
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


def choose_prefill(prompts: Sequence[tuple[int, int]], keys: Sequence[PrefillKey], most: int) -> tuple[PrefillKey, list[int]] | None:
    """The program for the next launch, and the tokens it reads of each of the first prompts.

    The one that reads most for its time, which grows with its tokens, padding included, over that of reading the weights: that of
    ``MOST_PADDING`` tokens.

    Args:
        prompts: of each, tokens read before and tokens in all; the first is part of every launch.
        keys: programs to choose from.
        most: padded tokens the launch may have.

    Returns:
        None where no program is small enough.
    """
    choices: list[tuple[PrefillKey, list[int]]] = []
    alone = {key.chunk: key for key in keys if key.lanes == 1 and key.chunk <= most}
    if alone:
        sizes = tuple(sorted(alone))
        length = next_chunk(*prompts[0], sizes)
        choices.append((alone[pick_bucket(sizes, length)], [length]))
    shared = [key for key in keys if key.lanes > 1 and tokens_of(key) <= most] if len(prompts) > 1 else []
    choices += [(key, [next_chunk(*prompt, (key.chunk,)) for prompt in prompts[: key.lanes]]) for key in shared]
    return max(choices, key=lambda choice: sum(choice[1]) / (MOST_PADDING + tokens_of(choice[0])), default=None)
