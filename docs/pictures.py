"""Draw ``docs/images/cycle.svg`` and ``docs/images/house.svg`` from the code's own declarations: ``python docs/pictures.py``.

The cycle: which stage reads and writes which slot, as the stages of the demo model's EAGLE-3 tree declare it. The house: the rooms of the
package from top to bottom, as the layer law in ``pyproject.toml`` states it, each with the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLOURS = {"mail": "#9a6700", "state": "#0969da", "lane": "#1a7f37", "ring": "#8250df", "kv": "#cf222e"}
MEANINGS = {
    "mail": "from the host",
    "state": "kept per row",
    "lane": "lives for one cycle",
    "ring": "to the host",
    "kv": "KV pool",
}
FONT = 'font-family="ui-sans-serif, system-ui, sans-serif"'


def _text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#1f2328", anchor: str = "start", weight: str = "400") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def _svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} role="img"><title>{escape(title)}</title>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def cycle_picture() -> str:
    """One column per stage, one row per slot: a full dot where a stage writes, a ring where it reads, a line while the value is needed."""
    from graphspec import LLM
    from graphspec.shapes import GREEDY

    llm = LLM(model="demo", variant="eagle3", num_steps=3, topk=2, num_draft_tokens=6, max_rows=1, buckets=[1], runtime="eager")
    stages = llm.cycle.stages(llm.plan.graph_keys(GREEDY)[0])
    kinds = {slot.name: slot.kind for slot in llm.cycle.arena.slots}
    touched: dict[str, tuple[list[int], list[int]]] = {}
    for i, stage in enumerate(stages):
        for slot in stage.reads:
            touched.setdefault(slot, ([], []))[0].append(i)
        for slot in stage.writes:
            touched.setdefault(slot, ([], []))[1].append(i)
    order = {kind: i for i, kind in enumerate(COLOURS)}
    rows = sorted(touched, key=lambda slot: (order[kinds[slot]], min(touched[slot][0] + touched[slot][1]), slot))
    left, top, column, line = 190, 116, 84, 19
    width, height = left + column * len(stages) + 8, top + line * len(rows) + 16
    parts = [_text(12, 24, "One cycle: stages and the slots they declare", size=16, weight="600")]
    for i, kind in enumerate(COLOURS):
        x = 12 + 158 * i
        parts += [f'<circle cx="{x + 5}" cy="44" r="4.5" fill="{COLOURS[kind]}"/>', _text(x + 15, 48, f"{kind}: {MEANINGS[kind]}", size=11)]
    parts.append(_text(12, 70, "full dot: written; ring: read; line: the value is needed", size=11, colour="#59636e"))
    for i, stage in enumerate(stages):
        x = left + column * i + column / 2
        parts.append(_text(x, 98, stage.name, size=12, anchor="middle", weight="600"))
        parts.append(f'<line x1="{x:g}" y1="106" x2="{x:g}" y2="{height - 12:g}" stroke="#eaeef2"/>')
    for j, slot in enumerate(rows):
        reads, writes = touched[slot]
        y, colour = top + line * j + 8, COLOURS[kinds[slot]]
        parts.append(_text(left - 16, y + 4, slot, size=11, anchor="end"))
        lasts = kinds[slot] in ("state", "kv")
        begin = left if reads and (not writes or min(reads) <= min(writes)) else left + column * min(writes) + column / 2
        end = left + column * len(stages) if lasts and writes else left + column * max(reads + writes) + column / 2
        parts.append(f'<line x1="{begin:g}" y1="{y:g}" x2="{end:g}" y2="{y:g}" stroke="{colour}" stroke-opacity="0.35" stroke-width="2"/>')
        for i in sorted({*reads, *writes}):
            x = left + column * i + column / 2
            fill = colour if i in writes else "#ffffff"
            parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>')
    return _svg(width, height, "Stages of a cycle and the slots they read and write", parts)


def _first_sentence(module: str) -> str:
    """Of a module's or package's docstring, without markup."""
    base = ROOT / "graphspec" / module
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()), maxsplit=1)[0]
    return re.sub(r":\w+:`[~.]*([^`]+)`|`+([^`]+)`+", lambda m: m[1] or m[2], first).rstrip(".:")


def layers() -> list[Sequence[str]]:
    """Rooms from top to bottom, those of one layer together."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    law = next(contract for contract in contracts if contract.get("containers") == ["graphspec"])
    return [[name.strip("() ") for name in re.split(r"[:|]", layer)] for layer in law["layers"]]


def house_picture() -> str:
    """A box for each layer, the command line on top; a room imports only from those below it."""
    width, line, y = 860, 20, 64
    parts = [
        _text(12, 26, "The rooms of graphspec", size=16, weight="600"),
        _text(12, 46, "A file imports from its own box and the boxes below it.", size=11, colour="#59636e"),
    ]
    for layer in layers():
        height = line * len(layer) + 10
        parts.append(f'<rect x="12" y="{y}" width="{width - 24}" height="{height}" rx="6" fill="#f6f8fa" stroke="#d1d9e0"/>')
        for i, room in enumerate(layer):
            folder = (ROOT / "graphspec" / room).is_dir()
            base = y + line * (i + 1)
            said = _first_sentence(room)
            said = said if len(said) <= 105 else said[:104].rsplit(" ", 1)[0] + " ..."
            parts.append(_text(24, base, room + ("/" if folder else ""), weight="600" if folder else "500"))
            parts.append(_text(170, base, said, size=11, colour="#59636e"))
        y += height + 6
    return _svg(width, y + 6, "Layers of the package", parts)


def pictures() -> dict[str, str]:
    """File name to SVG."""
    return {"cycle.svg": cycle_picture(), "house.svg": house_picture()}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
