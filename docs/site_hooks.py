"""Hooks of mkdocs: what a page links to outside ``docs/`` is a file of the repository, which the site names and does not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links that leave ``docs/`` become the linked file's name next to the words."""
    docs = Path(config["docs_dir"])
    here = (docs / page.file.src_uri).parent

    def name(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        path = target.relative_to(docs.parent).as_posix()
        return match[1] if match[1].strip("`") == path else f"{match[1]} (`{path}`)"

    return _LINK.sub(name, markdown)
