"""The number of graphs compiled for one engine. Kept apart so that counting does not import a compiler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Compilations:
    """Counts the graphs given to the compiler.

    Dynamo's own count covers the whole process, in which another engine or a training loop may be compiling in another thread.
    """

    graphs: int = 0
