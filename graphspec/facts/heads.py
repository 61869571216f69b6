"""Keys and values that differ from layer to layer: their heads, and layers that have none of their own. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .keys import MAX_HEAD_DIM, MAX_HEADS, Keys


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Key and value heads of one layer."""

    count: int
    dim: int
    """Elements of a head, of queries too."""
    keys_are_values: bool = False
    """There is no projection of values: they are the projected keys, before norm and rotation."""

    @property
    def shape(self) -> LayerHeads:
        """Count and width alone: layers that are alike in these share a KV pool and the tables of their rotation."""
        return replace(self, keys_are_values=False)


def read_gemma4_heads(keys: Keys, windows: Sequence[int | None]) -> tuple[LayerHeads, ...]:
    """Gemma 4's: layers that see everything have ``global_head_dim``, and with ``attention_k_eq_v`` also ``num_global_key_value_heads`` and
    no values of their own. ``per_layer_config`` of transformers says the same layer by layer.

    Raises:
        CheckpointError: a number that is none, or another per-layer key.
    """
    usual = LayerHeads(keys.integer("num_key_value_heads", maximum=MAX_HEADS), keys.integer("head_dim", minimum=2, maximum=MAX_HEAD_DIM))
    shared = keys.flag("attention_k_eq_v", False)
    if keys.present("per_layer_config"):
        found = _read_each(keys, len(windows), usual)
    else:
        heads, wide = "num_global_key_value_heads", keys.integer("global_head_dim", 512, minimum=2, maximum=MAX_HEAD_DIM)
        count = keys.integer(heads, usual.count, maximum=MAX_HEADS) if shared else usual.count
        found = [replace(usual, count=count, dim=wide) if window is None else usual for window in windows]
    return tuple(replace(one, keys_are_values=shared and window is None) for one, window in zip(found, windows, strict=True))


def read_shared_layers(keys: Keys, windows: Sequence[int | None]) -> tuple[int, ...]:
    """Layer by layer, the one whose keys and values it reads. The last ``num_kv_shared_layers`` read those of the last layer before them
    that is of their kind, with a window or without; the others have their own. Empty: all have.

    Raises:
        CheckpointError: there is no such layer.
    """
    name, layers = "num_kv_shared_layers", len(windows)
    first = layers - keys.integer(name, 0, minimum=0, maximum=layers)
    if first == layers:
        return ()
    found = list(range(first))
    for window in windows[first:]:
        own = [layer for layer in range(first) if windows[layer] == window]
        if not own:
            raise keys.error(name, "at least one layer of each kind before those that share")
        found.append(own[-1])
    return tuple(found)


def read_shared_mlp_factor(keys: Keys) -> int:
    """2 where ``use_double_wide_mlp`` says so.

    Raises:
        CheckpointError: no flag.
    """
    return 2 if keys.flag("use_double_wide_mlp", False) else 1


def _read_each(keys: Keys, layers: int, usual: LayerHeads) -> list[LayerHeads]:
    listed, found = keys.values["per_layer_config"], [usual] * layers
    if not isinstance(listed, dict) or not all(key.isdecimal() and int(key) < layers for key in listed):
        raise keys.error("per_layer_config", f"an object with layer numbers below {layers} as keys")
    for key, values in listed.items():
        where = f"{keys.where}: per_layer_config: {key}"
        if not isinstance(values, dict) or values.keys() - {"head_dim", "num_key_value_heads"}:
            raise keys.error("per_layer_config", "head_dim and num_key_value_heads of each layer")
        own = Keys(values, where)
        count = own.integer("num_key_value_heads", usual.count, maximum=MAX_HEADS)
        found[int(key)] = LayerHeads(count, own.integer("head_dim", usual.dim, minimum=2, maximum=MAX_HEAD_DIM))
    return found
