"""Determines the licence of a package from the text of its licence files alone."""

from __future__ import annotations

import re
from importlib.metadata import Distribution
from pathlib import PurePosixPath

ACCEPTED = {
    "MIT": "Permission is hereby granted, free of charge, to any person obtaining a copy",
    "BSD": "Redistribution and use in source and binary forms, with or without modification, are permitted",
    "Apache-2.0": "Apache License Version 2.0",
    "PSF-2.0": "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
}
"""Text that only this licence contains, with white space normalised."""
REFUSED = re.compile(
    r"GNU (LESSER |AFFERO |LIBRARY )?GENERAL PUBLIC LICENSE\W+Version|Mozilla Public Licen[sc]e|Eclipse Public License|"
    r"Creative Commons|Common Development and Distribution|proprietary|All rights reserved\. Redistribution is prohibited"
)
"""Further terms that exclude a package although it has an accepted licence."""
NAMES = ("LICENSE", "LICENCE", "COPYING")


def licence_of(text: str) -> str | None:
    """The accepted licence of ``text``, several joined; None: another licence, or an accepted one with further terms."""
    plain = " ".join(text.split())
    if REFUSED.search(plain):
        return None
    found = [name for name, words in ACCEPTED.items() if words.lower() in plain.lower()]
    return " and ".join(found) or None


def main_licences(distribution: Distribution) -> list[str]:
    """The texts of the licence files in a package's metadata folder, or in its subfolder ``licenses``."""
    texts = []
    for file in sorted(distribution.files or [], key=str):
        parts = PurePosixPath(str(file)).parts
        inside = parts[0].endswith(".dist-info") and (len(parts) == 2 or (len(parts) == 3 and parts[1] == "licenses"))
        path = distribution.locate_file(file)
        if inside and parts[-1].upper().startswith(NAMES):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts
