"""Errors of graphspec: one message each, naming the key, what was expected and what was found."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class GraphspecError(Exception):
    """Base of every error graphspec raises on purpose.

    Args:
        key: what is wrong: a config key, a tensor name, a slot, a request field.
        expected: what would have been right; a list or tuple: one of these.
        found: what was there.
        hint: what to do about it, optional.
    """

    def __init__(self, key: str, expected: object, found: object, hint: str = "") -> None:
        choices = isinstance(expected, list | tuple)
        if isinstance(expected, list | tuple):
            expected = "one of " + ", ".join(map(str, expected))
        self.key, self.expected, self.found, self.hint = key, expected, found, hint
        what, instead = f"found {found}" + (f" ({hint})" if hint else ""), f"expected {expected}"
        # A list may be long, and what follows it is not read.
        super().__init__(f"{key}: " + ", ".join((what, instead) if choices and hint else (instead, what)))


class ConfigError(GraphspecError, ValueError):
    """A configuration value that is unknown, out of range or contradicts another one."""


class CheckpointError(GraphspecError, ValueError):
    """A checkpoint that is missing, damaged, of another architecture, or does not fit its partner. ``key`` names file and tensor."""


class RequestError(GraphspecError, ValueError):
    """A request that can't be served; it fails alone, the rest of the batch goes on."""


class CaptureError(GraphspecError, RuntimeError):
    """A static program that no longer matches its buffers: shape, dtype, address, or a recompilation after warm-up."""


class ResourceError(GraphspecError, RuntimeError):
    """A fixed resource (pages, rows, ring slots) used beyond what exists, or returned twice."""


def spell_bytes(size: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in UNITS[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {UNITS[-1]}"
