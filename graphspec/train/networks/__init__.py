"""The draft networks, one file each; the tables here are the only place that lists them."""

from __future__ import annotations

from ..drafter import Drafter
from ...drafters.eagle.training import EagleDraft
from ...drafters.eagle3.training import Eagle3Draft
from ...drafters.mtp.training import MtpDraft
from ...drafters.standalone.training import StandaloneDraft

NETWORKS: dict[str, type[Drafter]] = {network.variant: network for network in (EagleDraft, Eagle3Draft, MtpDraft, StandaloneDraft)}
"""Every network that can be trained, by the name of its variant."""
