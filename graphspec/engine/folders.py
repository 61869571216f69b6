"""Checkpoint folders by the names of the configuration."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ..catalog import Variant
from ..config import Config
from ..errors import ConfigError
from ..hub import checkpoint_folder
from ..paths import user_path

DEMO = "demo"


def model_folder(path: str, revision: str | None = None) -> Path:
    """Folder of a target: ``demo`` is the one shipped with the package, ``org/model`` one of the Hugging Face Hub at that revision.

    Raises:
        ConfigError: the name of a model of which only the shape is shipped, for ``graphspec plan``; else as
            :func:`graphspec.hub.checkpoint_folder`.
    """
    package = Path(str(files("graphspec")))
    if path == DEMO and revision is None:
        return package / "demo" / "target"
    if not user_path("model.path", path).exists() and (package / "lab" / "predict" / "models" / path / "config.json").is_file():
        expected = "a folder with a checkpoint; of this model only the shape comes with the package"
        raise ConfigError("model.path", expected, repr(path), "graphspec plan takes it as it is")
    return checkpoint_folder("model.path", path, revision)


def draft_folder(config: Config, variant: Variant, target: Path) -> Path:
    """Folder of a draft: as configured, the demo model's own, or the target's.

    Args:
        config: of the engine.
        variant: its catalog entry; it has a network.
        target: folder of the target.

    Raises:
        ConfigError: no draft was given; else as :func:`graphspec.hub.checkpoint_folder`.
    """
    draft = config.variant.draft
    if draft is not None:
        return checkpoint_folder("variant.draft", draft, config.variant.draft_revision)
    if config.model.path == DEMO and variant.demo_draft is not None:
        return target.parent / variant.demo_draft
    if variant.draft_in_target:
        return target
    raise ConfigError("variant.draft", f"the folder of a draft checkpoint for {config.model.path}", "no value")
