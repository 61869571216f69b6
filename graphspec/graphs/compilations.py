"""How many graphs were compiled for one engine. Imports nothing, least of all a compiler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Compilations:
    """Counts graphs that were handed to the compiler.

    Dynamo counts for the whole process, where another engine, or a training loop, may compile in a thread of its own.
    """

    graphs: int = 0
