"""The models that ``graphspec plan`` works on: facts of a target and its draft, of which there may be nothing but a ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from ...config.catalog import Variant, load_object
from ...config.paths import user_path
from ...config.schema import VariantConfig
from ...errors import CheckpointError, ConfigError
from ...facts import DraftFacts, ModelFacts, read_model_facts
from ...facts.hub import checkpoint_folder, is_hub_id
from ..floor import has_tensors

SHAPES = Path(str(files("graphspec"))) / "lab" / "predict" / "models"
"""Folder of the ``config.json`` files of published models, without weights."""


@dataclass(slots=True)
class ModelPair:
    """Target and draft as facts.

    Attributes:
        name: of the model: its folder's, or its name on the Hub.
        target: its facts.
        draft: facts of the draft; None if the drafter is no network.
        from_config: there is no checkpoint of the draft: its facts come from a config, or are assumed.
    """

    name: str
    folder: Path
    target: ModelFacts
    draft: DraftFacts | None = None
    described: str = ""
    from_config: bool = True
    notes: list[str] = field(default_factory=list)


def shape_names() -> list[str]:
    """Names of the models whose config comes with the package."""
    return sorted(folder.name for folder in SHAPES.iterdir() if (folder / "config.json").is_file())


def config_folder(path: str, revision: str | None = None) -> Path:
    """Folder of a config: the user's own, the demo model's, one of :func:`shape_names`, or of a model of the Hub, without its weights."""
    from ...facts.folders import SHIPPED, model_folder

    local = user_path("model.path", path)
    if path in SHIPPED or local.is_dir() or (local.suffix == ".gguf" and local.is_file()):
        return model_folder(path, revision)
    if path in shape_names():
        return SHAPES / path
    folder = checkpoint_folder("model.path", path, revision, weights=False)
    if folder.is_dir():
        return folder
    raise ConfigError("model.path", f"a folder with a config.json, or one of {', '.join([*SHIPPED, *shape_names()])}", repr(path))


def read_model_pair(model_path: str, config: VariantConfig, variant: Variant, revision: str | None = None) -> ModelPair:
    """Facts of the target and of its draft, which are assumed if there is none.

    Raises:
        ConfigError: no such folder; a draft for a drafter without a network; a drafter whose network can't be assumed.
        CheckpointError: a config that is missing, wrong or not supported.
    """
    folder = config_folder(model_path, revision)
    pair = ModelPair(model_path if is_hub_id(model_path) else folder.name, folder, read_model_facts(folder))
    if not variant.has_network:
        if config.draft is not None:
            raise ConfigError("variant.draft", f"nothing for variant {variant.name!r}, which has no draft network", config.draft)
        pair.described = "no network"
        return pair
    draft_folder = _draft_folder(folder, model_path, config, variant)
    if draft_folder is not None:
        _read_draft(pair, draft_folder, variant)
    else:
        _assume_draft(pair, variant)
    return pair


def _draft_folder(folder: Path, model_path: str, config: VariantConfig, variant: Variant) -> Path | None:
    from ...facts.folders import shipped_draft

    if config.draft is not None:
        return checkpoint_folder("variant.draft", config.draft, config.draft_revision, weights=False)
    return shipped_draft(model_path, folder, variant) or (folder if variant.draft_in_target else None)


def _read_draft(pair: ModelPair, folder: Path, variant: Variant) -> None:
    """Read a draft as the engine does where its folder has tensors, else from its config."""
    pair.described = "in the target's own checkpoint" if folder == pair.folder else str(folder)
    if has_tensors(folder):
        pair.draft, pair.from_config = load_object(variant.facts)(folder, pair.target), False
        return
    try:
        facts = load_object(variant.facts)(folder, pair.target)
    except CheckpointError:
        # Tensor names say which heads there are; without tensors, the config's count is used.
        if not variant.draft_in_target or not variant.assumed:
            raise
        facts, words = load_object(variant.assumed)(folder, pair.target)
        pair.notes.append(words)
    pair.draft = facts


def _assume_draft(pair: ModelPair, variant: Variant) -> None:
    """Assume a draft of the kind that is usually trained for such a target."""
    if not variant.assumed or variant.draft_in_target:
        expected = f"a folder with the config.json of a draft: the draft of variant {variant.name} can't be guessed"
        raise ConfigError("variant.draft", expected, "no value")
    pair.draft, words = load_object(variant.assumed)(Path("assumed"), pair.target)
    pair.described = f"assumed: {words}"
    pair.notes.append(f"no variant.draft was given; {pair.described}; layers of the target's width")
