"""Host cost of a grammar per cycle: the walk over the draft tree and the forced text, by nodes and vocabulary.

    python -m perf.grammar_cost [--rounds 200]

One core, no model: ratios to the mask of a single node with the same vocabulary, which is the cost in plain decoding.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import torch
import xgrammar

from graphspec.api.grammar import RowGrammar, Speller
from graphspec.shapes import MASK_BITS

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "text": {"type": "string"}}, "required": ["name", "text"]}'
NODES = (1, 5, 16, 64)
VOCABULARIES = (2_048, 151_936)
INSIDE = b'{"name": "'


def vocabulary(size: int) -> list[bytes]:
    """An end-of-text token, every byte, and random words."""
    rng = random.Random(0)
    words = {bytes(rng.choices(range(97, 123), k=rng.randrange(2, 8))) for _ in range(2 * size)}
    return [b"", *(bytes([byte]) for byte in range(256)), INSIDE, *sorted(words)[: size - 258]]


def timed(call: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return median(found)


def measure(size: int, rounds: int) -> None:
    """Print the ratios of one vocabulary."""
    texts = vocabulary(size)
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(SCHEMA, any_whitespace=False)
    inside, key = (RowGrammar(compiled, [0], Speller(texts)) for _ in range(2))
    inside.follow([texts.index(INSIDE)])
    single = 0.0
    print(f"vocabulary {size}, inside a string of JSON, {len(texts) // MASK_BITS * 4} bytes a node")
    for nodes in NODES:
        rng = random.Random(1)
        tokens = [0, *(258 + place for place in range(nodes - 1))]
        parents = [-1, *(rng.randrange(node) for node in range(1, nodes))]
        mask = torch.full((nodes, -(-size // MASK_BITS)), -1, dtype=torch.int32)
        seconds = timed(lambda mask=mask, tokens=tokens, parents=parents: inside.fill(tokens, parents, mask), rounds)  # type: ignore[misc]
        single = single or seconds
        print(f"  masks of {nodes:3d} nodes: {seconds / single:6.2f}")
    print(f"  forced text of a key, 7 tokens at most: {timed(lambda: key.forced(7), rounds) / single:6.2f}")
    print(f"  nothing is forced: {timed(lambda: inside.forced(7), rounds) / single:6.2f}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for size in VOCABULARIES:
        measure(size, rounds)


if __name__ == "__main__":
    main()
