"""Facts of a model, read from the ``config.json`` of its checkpoint folder. Standard library only."""

from __future__ import annotations

from .draft import DraftFacts, DraftPass
from .generation import read_sampling_defaults
from .latent import LatentFacts
from .model import ModelFacts, read_model_facts
from .moe import ExpertFacts
from .recurrent import RecurrentFacts
from .rope import RopeFacts
from .sharding import Shard, Sharding
from .tokenizer import check_tokenizer, read_tokenizer_config, special_token

__all__ = [
    "DraftFacts",
    "DraftPass",
    "ExpertFacts",
    "LatentFacts",
    "ModelFacts",
    "RecurrentFacts",
    "RopeFacts",
    "Shard",
    "Sharding",
    "check_tokenizer",
    "read_model_facts",
    "read_sampling_defaults",
    "read_tokenizer_config",
    "special_token",
]
