"""Parses the report's page, for tests of its content."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from graphspec.lab.report import page
from tests.support.report_records import read

WEB = Path(page.__file__).parent / "web"
STUB = "window.Plotly = { react() {} };"


class Document(HTMLParser):
    """Elements with their attributes, texts of scripts, and the text a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id") or f"{tag}{len(self.elements)}"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.words.append(data)
        else:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data


def render(tmp_path: Path, lines: list[dict[str, Any]]) -> tuple[str, Document]:
    text = page.page(read(tmp_path, lines), STUB)
    return text, Document(text)


def charts_of(document: Document) -> dict[str, dict[str, Any]]:
    return {chart["id"]: chart for chart in json.loads(document.scripts["charts-data"])}
