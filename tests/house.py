"""The size of the house: ``python -m tests.house`` prints rooms, arrows between them, tokens of each, and what a warm call enters."""

from __future__ import annotations

import sys
import threading
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "graphspec"
UNCOUNTED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


def room_of(module: str) -> str:
    """The entry of the package's folder that a module belongs to; ``__init__``: the package itself."""
    return module.split(".")[1] if "." in module else "__init__"


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports from the second, wherever the import stands."""
    graph = grimp.build_graph("graphspec", cache_dir=None)
    pairs = {(room_of(a), room_of(b)) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)}
    return {(a, b) for a, b in pairs if a != b}


def rooms() -> set[str]:
    """Folders and files at the top of the package that hold code."""
    files = {path.stem for path in PACKAGE.glob("*.py")}
    return files | {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}


def tokens(path: Path) -> int:
    """Tokens of a file as ``tokenize`` counts them, without comments and layout."""
    with tokenize.open(path) as file:
        return sum(token.type not in UNCOUNTED for token in tokenize.generate_tokens(file.readline))


def entered(runtime: str) -> list[str]:
    """Files of the package that have a function called by one warm ``generate()`` of the demo's chain, in any thread, in order."""
    from graphspec import LLM, SamplingParams

    found: dict[str, None] = {}
    watching = False

    def note(frame: FrameType, event: str, _: object) -> None:
        if watching and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.setdefault(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    llm = LLM("demo", variant="eagle3", num_steps=4, topk=1, runtime=runtime)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    llm.generate(["def f(x):"], params)
    # A thread takes a profile from itself alone, or when it begins: the engine's own thread, this one, and those that come.
    llm._engine.between_steps(lambda: sys.setprofile(note))
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        watching = True
        llm.generate(["def f(x):"], params)
        watching = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    llm.close()
    return list(found)


def main() -> None:
    """Print the figures."""
    counted: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else path.stem
        counted[room] += tokens(path)
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    for room, count in counted.most_common():
        print(f"{room:12} {count:8,} tokens {lines[room]:7,} lines")
    print(f"{'package':12} {counted.total():8,} tokens {lines.total():7,} lines, {len(rooms())} rooms, {len(arrows())} arrows")
    for folder in ("tests", "perf", "recipes"):
        found = list((ROOT / folder).rglob("*.py"))
        print(f"{folder:12} {sum(map(tokens, found)):8,} tokens {sum(len(f.read_text().splitlines()) for f in found):7,} lines")
    for runtime in ("compiled", "eager"):
        files = entered(runtime)
        print(f"one warm generate(), {runtime}: {len(files)} files: {' '.join(files)}")


if __name__ == "__main__":
    main()
