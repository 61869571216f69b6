"""Write ``docs/demo.svg``, what ``make demo`` shows: ``python docs/record.py``, after ``graphspec fetch smollm2``.

Text and trees are those of any run. Speeds and seconds are those of this one: nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from graphspec.cli.demo import DEMO_WIDTH
from graphspec.cli.demo_chat import demo_words, run_conversation_demo
from graphspec.config.compose import load_config

OUT = Path(__file__).parent / "demo.svg"
COMMAND = "graphspec demo"
ADDRESSES = re.compile(r"@font-face \{\{.*?\}\}\s*|<!-- .*? -->\s*", re.DOTALL)


def record(*words: str) -> str:
    """The demo as a picture, text and notes in the order in which they came.

    Args:
        words: of the command line, after ``demo``; they name a model that chats, or the default one is here.
    """
    console = Console(record=True, width=DEMO_WIDTH, file=io.StringIO(), highlight=False)
    run_conversation_demo(load_config(*demo_words(list(words))), console, console)
    # Rich's own format asks a network for a font, and names a site; the reader's own font will do.
    return console.export_svg(title=COMMAND, code_format=ADDRESSES.sub("", CONSOLE_SVG_FORMAT), unique_id="demo")


if __name__ == "__main__":
    OUT.write_text(record(), encoding="utf-8")
