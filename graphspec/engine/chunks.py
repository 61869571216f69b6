"""Prefill: how prompts are cut into chunks, which prompts share a launch, and the launch's message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graphs.programs import PrefillKey, tokens_of
from ..graphs.stages.mailbox import Chunk, Join, Message, SharedPages
from ..plan.plan import Plan
from ..shapes import MOST_PADDING, pick_bucket
from .request import Request


def next_chunk(start: int, total: int, sizes: tuple[int, ...]) -> int:
    """Length of the chunk that begins at ``start``, in tokens.

    The whole rest, if some size holds it with less than ``MOST_PADDING`` tokens of padding; else up to the next multiple of the largest
    size that the rest reaches. So chunks end where they would in a prompt read from its beginning, unless that costs ``MOST_PADDING``
    tokens of padding.

    Args:
        start: tokens of the row that were read before.
        total: tokens of the prompt, more than ``start``.
        sizes: chunk sizes, ascending.
    """
    left = total - start
    # Tokens up to the next multiple of each size.
    room = [size - start % size for size in sizes if start % size < MOST_PADDING]
    if any(tokens >= left for tokens in room) and (left <= sizes[0] or pick_bucket(sizes, left) - left < MOST_PADDING):
        return left
    within = [tokens for tokens in room if tokens <= left] or [size for size in sizes if size <= left]
    return max(within, default=left)


def choose_prefill(prompts: Sequence[tuple[int, int]], keys: Sequence[PrefillKey], most: int) -> tuple[PrefillKey, list[int]] | None:
    """The program for the next launch, and how many tokens it reads of each of the first prompts.

    Chosen is the program that reads the most tokens per time. A launch is assumed to take as long as its tokens, padding included, plus
    ``MOST_PADDING`` tokens for reading the weights.

    Args:
        prompts: ``(tokens read before, tokens in all)`` of each; the first prompt is part of every launch.
        keys: programs to choose from.
        most: padded tokens the launch may have.

    Returns:
        None if no program is small enough.
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


def prompt_message(plan: Plan, lengths: Mapping[Request, int]) -> Message:
    """The message of a launch that reads the next tokens of some rows, ``lengths`` of each; updates ``prefilled`` of their requests.

    The first message of a row also carries the request's sampling parameters.
    """
    rows, chunks, joins, pages, shared = [], [], [], [], []
    for request, length in lengths.items():
        assert request.row is not None
        start, total = request.prefilled, request.committed
        end = start + length
        known_root = request.output[-1] if request.output else -1
        rows.append(request.row)
        chunks.append(Chunk(request.known(start, end), start, total, known_root, request.shared_tokens, len(request.prompt)))
        if request.begins:
            joins.append(_join(plan, request, request.row))
            if request.shared:
                shared.append(SharedPages(request.row, request.pages[: request.shared], request.known(0, start)))
        upto = len(request.pages) if end == total else plan.pages_for(end)
        pages += [(request.row, column, request.pages[column]) for column in range(request.mapped, upto)]
        request.prefilled, request.mapped = end, upto
    return Message(rows, pages=pages, joins=joins, chunks=chunks, shared=shared)


def _join(plan: Plan, request: Request, row: int) -> Join:
    params = request.params
    return Join(
        row=row,
        budget=request.budget - len(request.output),
        seed=request.seed,
        temperature=params.temperature,
        draft_len=request.depth_of(plan.shape.num_steps),
        stop_ids=request.stop_ids,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )
