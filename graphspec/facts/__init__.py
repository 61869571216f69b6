"""What a checkpoint folder says about its model: ``config.json`` read into frozen facts. Standard library only."""

from __future__ import annotations

from .draft import DraftFacts
from ..drafters.head_config import EagleFacts, read_eagle_facts
from ..drafters.eagle3.facts import Eagle3Facts, read_eagle3_facts
from .latent import LatentFacts
from .model import ModelFacts, read_model_facts
from .moe import ExpertFacts
from ..drafters.mtp.facts import MTPFacts, read_mtp_facts
from .rope import RopeFacts
from ..drafters.standalone.facts import StandaloneFacts, read_standalone_facts
from .tokenizer import check_tokenizer

__all__ = [
    "DraftFacts",
    "Eagle3Facts",
    "EagleFacts",
    "ExpertFacts",
    "LatentFacts",
    "MTPFacts",
    "ModelFacts",
    "RopeFacts",
    "StandaloneFacts",
    "check_tokenizer",
    "read_eagle3_facts",
    "read_eagle_facts",
    "read_model_facts",
    "read_mtp_facts",
    "read_standalone_facts",
]
