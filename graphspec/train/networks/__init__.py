"""The draft networks, one file each; the tables here are the only place that lists them."""

from __future__ import annotations

from ..drafter import Drafter
from .eagle import EagleDraft
from .eagle3 import Eagle3Draft
from .mtp import MtpDraft
from .standalone import StandaloneDraft

NETWORKS: dict[str, type[Drafter]] = {network.variant: network for network in (EagleDraft, Eagle3Draft, MtpDraft, StandaloneDraft)}
"""Every network that can be trained, by the name of its variant."""
