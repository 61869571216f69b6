"""Write ``docs/demo.svg``, what ``make demo`` shows: ``python docs/record.py``.

Text and trees are those of any run. Speeds and seconds are those of this one: nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from graphspec.cli.demo import DEMO_WIDTH, run_demo
from graphspec.cli.input import DEMO_PROMPT
from graphspec.config.compose import load_config

OUT = Path(__file__).parent / "demo.svg"
COMMAND = "graphspec demo experiment=demo_chain"
ADDRESSES = re.compile(r"@font-face \{\{.*?\}\}\s*|<!-- .*? -->\s*", re.DOTALL)


def record(*overrides: str, prompt: str = DEMO_PROMPT) -> str:
    """The demo under a configuration as a picture, text and notes in the order in which they came.

    Args:
        overrides: of the command line, after ``demo``.
        prompt: what is continued.
    """
    console = Console(record=True, width=DEMO_WIDTH, file=io.StringIO())
    run_demo(load_config(*overrides), prompt, console, console)
    # Rich's own format asks a network for a font, and names a site; the reader's own font will do.
    return console.export_svg(title=COMMAND, code_format=ADDRESSES.sub("", CONSOLE_SVG_FORMAT), unique_id="demo")


if __name__ == "__main__":
    OUT.write_text(record("experiment=demo_chain"), encoding="utf-8")
