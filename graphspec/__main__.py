"""``python -m graphspec``, the same as the console script."""

from __future__ import annotations

from .cli.main import main

main()
