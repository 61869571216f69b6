"""Makes the default prompts of ``graphspec profile``: ``python -m recipes.held_out``.

Two pieces of each held-out module of the standard library (:data:`recipes.corpus.HELD_OUT`), from one third and two thirds of the module,
each beginning at a line; a package's ``__init__.py`` counts as a module. Other versions of Python give other pieces, so the file is part of
the package and not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipes.corpus import load_corpus

TARGET = Path(__file__).parents[1] / "graphspec" / "lab" / "measure" / "workloads" / "held_out.jsonl"
CHARACTERS = 700
"""Characters of each prompt; 600 characters of Python are more than 128 tokens of any common tokenizer."""


def cut(text: str, share: float) -> str:
    """``CHARACTERS`` of ``text`` from the first line that begins after ``share`` of it."""
    start = text.index("\n", int(len(text) * share)) + 1
    return text[start : start + CHARACTERS]


def prompts() -> list[dict[str, str]]:
    """``{"source": module, "prompt": text}``, modules in order."""
    documents = sorted(load_corpus().held_out.items())
    cuts = [{"source": name, "prompt": cut(text, share)} for share in (1 / 3, 2 / 3) for name, text in documents]
    return [row for row in cuts if len(row["prompt"]) == CHARACTERS]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m recipes.held_out", description="Cut the prompts of graphspec profile.")
    parser.add_argument("--out", type=Path, default=TARGET, help="the file; default: the package's own")
    target: Path = parser.parse_args().out
    rows = prompts()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts written to {target}")


if __name__ == "__main__":
    main()
