"""Requirements of FlashInfer: supported versions, devices and models. Imports neither torch nor FlashInfer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata

from ...config.hints import install_hint
from ...errors import ConfigError

DISTRIBUTION = "flashinfer-python"
MIN, BELOW = "0.6.18", "0.8"
SUPPORTED = f">={MIN},<{BELOW}"
"""The supported versions; the extra ``cuda`` of pyproject.toml repeats them, and a test compares the two."""

CAPABILITIES = (9, 10, 12)
"""Major compute capabilities that ``xqa`` supports (flashinfer/xqa.py); the planned kernels run on all of them."""
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
DIM_STEP, MAX_DIM = 16, 256
"""Head dimensions with more than one query token (flashinfer/jit/xqa.py)."""
MAX_QUERIES_PER_GROUP = 16
PROMPT_DIMS = (64, 128, 256)
"""Head dimensions of the prefill kernels, FA2 and FA3; prompts of other models run on the fused kernel."""
LATENT_RANKS = (128, 256, 512)
ROPE_STEP = 64
"""Compressed sizes, and multiple of the rotated size, that both FA2's and FA3's MLA kernels support (flashinfer/mla of 0.7)."""
LATENT_ROWS = 128
"""Rows (token x head) of a pair of MLA blocks. A number of heads that does not divide it makes kernel and planner round a causal bound
in opposite directions, and a visible key is lost; 0.7 refuses that, 0.6 does not."""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version without trailing zeros: ``0.7.0.post1`` is ``(0, 7)``, a pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_supported(version: str) -> bool:
    """Whether ``version`` is in :data:`SUPPORTED`."""
    return release(MIN) <= release(version) < release(BELOW)


def installed() -> str | None:
    """The installed version; None: there is none. Reads package metadata, imports nothing."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def check_version() -> None:
    """Check that a supported FlashInfer is installed.

    Raises:
        ConfigError: there is none, or it is of another version.
    """
    found = installed()
    if found is None or not is_supported(found):
        what = "not installed" if found is None else found
        raise ConfigError("kernels.attention", f"{DISTRIBUTION} {SUPPORTED} for 'flashinfer'", what, install_hint("cuda"))


def check_capability(capability: tuple[int, int]) -> None:
    """Check that ``xqa`` exists for a device of this compute capability.

    Raises:
        ConfigError: it does not.
    """
    if capability[0] not in CAPABILITIES:
        expected = "fused on this device: 'flashinfer' needs compute capability " + ", ".join(f"{major}.x" for major in CAPABILITIES)
        raise ConfigError("kernels.attention", expected, f"{capability[0]}.{capability[1]}")


def check_pool(
    name: str, page_size: int, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, windows: Sequence[int | None],
    *, latent: tuple[int, int] | None,
) -> None:  # fmt: skip
    """Check that FlashInfer serves a model of this shape.

    Args:
        name: of the network, target or draft, for the message.
        page_size: tokens of a page.
        dtype: of queries and KV.
        num_heads, num_kv_heads, head_dim: query heads, key/value heads, and the width of one.
        windows: sliding window of each layer, None: none.
        latent: with multi-head latent attention the compressed and the rotated part of a row.

    Raises:
        ConfigError: it does not.
    """
    other = "kernels.attention=fused has no such limit"
    if dtype not in DTYPES:
        raise ConfigError("hardware.dtype", "one of " + ", ".join(DTYPES) + " for flashinfer", dtype, other)
    key = f"kernels.attention, {name}"
    if latent is not None:
        _check_latent(key, num_heads, *latent, other)
        return
    if page_size not in PAGE_SIZES:
        raise ConfigError("runtime.page_size", "one of " + ", ".join(map(str, PAGE_SIZES)) + " for flashinfer", page_size, other)
    if head_dim % DIM_STEP or not DIM_STEP <= head_dim <= MAX_DIM:
        raise ConfigError(key, f"a head dimension up to {MAX_DIM}, a multiple of {DIM_STEP}, for flashinfer", head_dim, other)
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_QUERIES_PER_GROUP:
        heads = f"{num_heads} query heads over {num_kv_heads} key/value heads"
        raise ConfigError(key, f"up to {MAX_QUERIES_PER_GROUP} query heads per key/value head, for flashinfer", heads, other)
    if all(window is not None for window in windows) and head_dim not in PROMPT_DIMS:
        raise ConfigError(key, "fused, where every layer has a sliding window", "flashinfer", "it would serve no layer")


def _check_latent(key: str, num_heads: int, rank: int, rope_dim: int, other: str) -> None:
    if rank not in LATENT_RANKS:
        raise ConfigError(key, "latent rows of " + ", ".join(map(str, LATENT_RANKS)) + " compressed channels for flashinfer", rank, other)
    if rope_dim % ROPE_STEP:
        raise ConfigError(key, f"a multiple of {ROPE_STEP} rotated channels of latent rows for flashinfer", rope_dim, other)
    if LATENT_ROWS % num_heads:
        raise ConfigError(key, f"a number of heads that divides {LATENT_ROWS}, for flashinfer over latent rows", num_heads, other)
