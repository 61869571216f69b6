"""Which layers of a network are rounded, and how many of their channels share a scale: ``modules`` and ``group`` of ``graphspec convert``
and of ``train.qat``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from ..errors import ConfigError
from .rounding import Rounded

LAYERS, EXPERTS = "layers", "experts"
GROUPS = (128, 64, 32)
"""The best first: what kernels elsewhere take."""
_PROJECTION = re.compile(r"\w+_proj(_with_mqa|_qkvz?|_z)?")
"""Linear layers of decoder layers by the last part of their names. Gates and steps of recurrent layers (``in_proj_ba``) are small, and
published checkpoints keep them."""


def chosen_layers(key: str, modules: Sequence[str], leaves: Mapping[str, str], experts: Collection[str] | None = None) -> set[str]:
    """The names of the layers that ``modules`` asks for.

    Args:
        key: of ``modules``, for messages.
        modules: last parts of names, such as ``lm_head`` or ``fc``; ``layers``: the projections of all decoder layers; ``experts``.
        leaves: the last part of the name of each linear layer.
        experts: names of the linear layers of routed experts, which are not among ``leaves``; None: ``experts`` is no module.

    Raises:
        ConfigError: a module that no layer has.
    """
    chosen: set[str] = set()
    for module in modules:
        found = {name for name, leaf in leaves.items() if leaf == module or (module == LAYERS and _PROJECTION.fullmatch(leaf))}
        if module == EXPERTS and experts is not None:
            found = set(experts)
        if not found:
            known = f"{LAYERS}{'' if experts is None else f', {EXPERTS} where they are stored one by one,'} or names of linear layers: "
            raise ConfigError(key, known + ", ".join(sorted(set(leaves.values()))), repr(module))
        chosen |= found
    return chosen


def group_size(key: str, row: Rounded, asked: int | None, channels: Mapping[str, int]) -> int:
    """Channels that share a scale; 0: all of a row.

    Args:
        key: of the group, for messages.
        row: of :data:`graphspec.weights.rounding.ROUNDED`.
        asked: None: what the format fixes, or the largest of :data:`GROUPS` that divides all of the layers.
        channels: of the inputs of each layer.

    Raises:
        ConfigError: a group that doesn't divide a layer, is no multiple of 8, or that the format fixes otherwise.
    """
    if row.group is not None and asked not in (None, row.group):
        raise ConfigError(key, f"{row.group or 'none'}, as the format fixes it", asked)
    if row.group == 0:
        return 0
    size = row.group or asked
    if size is not None and (size < 8 or size % 8):
        raise ConfigError(key, "a multiple of 8", size)
    sizes = GROUPS if size is None else (size,)
    odd = [next((name for name, count in channels.items() if count % size), None) for size in sizes]
    if (last := odd[-1]) is not None:
        raise ConfigError(key, f"a divisor of the {channels[last]} channels of {last}", size or "none of " + ", ".join(map(str, GROUPS)))
    return sizes[odd.index(None)]
