"""What a checkpoint folder says about its model: ``config.json`` read into frozen facts. Standard library only."""

from __future__ import annotations

from .draft import DraftFacts
from .eagle import Eagle3Facts, read_eagle3_facts
from .model import ModelFacts, RopeFacts, read_model_facts

__all__ = ["DraftFacts", "Eagle3Facts", "ModelFacts", "RopeFacts", "read_eagle3_facts", "read_model_facts"]
