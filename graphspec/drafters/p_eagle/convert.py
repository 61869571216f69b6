"""The layouts of P-EAGLE heads: two of EAGLE-3's, with a mask token."""

from __future__ import annotations

from dataclasses import replace

from ...facts.keys import read_config
from ..heads.eagle3_convert import EAGLE3, EAGLE3_LAYOUTS
from ..heads.written import Fact, speculator
from .facts import p_eagle_config

_OWN = {
    "sglang": {"architectures": ["PeagleLlamaForCausalLM"], "mask_token_id": Fact("mask_token_id")},
    "speculators": speculator("peagle", "PEagleDraftModel") | {"mask_token_id": Fact("mask_token_id")},
}
P_EAGLE = replace(
    EAGLE3,
    name="P-EAGLE head",
    marks=("mask_hidden",),
    lacks=(),
    layouts={name: replace(EAGLE3_LAYOUTS[name], config=EAGLE3_LAYOUTS[name].config | own) for name, own in _OWN.items()},
    config=lambda path, _: p_eagle_config(path, read_config(path)),
)
