"""Checkpoint folders by the names of the configuration."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ..config.catalog import Variant
from ..config.checks import LONG, brief
from ..config.paths import user_path
from ..config.schema import Config
from ..errors import CheckpointError, ConfigError
from .gguf_model import gguf_folder
from .hub import checkpoint_folder
from .published import find_published, published

DEMO = "demo"
SHIPPED = {DEMO: "python -m recipes.train_demo", "demo_hybrid": "python -m recipes.train_demo --config hybrid"}
"""Models whose place is a folder of the package, and the command that trains each."""


def model_folder(path: str, revision: str | None = None) -> Path:
    """Folder of a target: one of :data:`SHIPPED` by its name, a published one by its short name, ``org/model`` one of the Hugging Face
    Hub at that revision; a GGUF file has a folder that stands for it.

    Raises:
        ConfigError: a shipped model that this copy of the package is without; the name of a model of which only the shape is shipped, for
            ``graphspec plan``; else as :func:`graphspec.facts.hub.checkpoint_folder`.
        CheckpointError: no such folder.
    """
    package = Path(str(files("graphspec")))
    if path in SHIPPED and revision is None:
        folder = package / path / "target"
        if not (folder / "config.json").is_file():
            raise ConfigError("model.path", f"the model {path} in {folder}", "no checkpoint there", f"{SHIPPED[path]} trains it")
        return folder
    if path in published() and revision is None and not user_path("model.path", path).exists():
        return _existing("model.path", find_published(published()[path]))
    if not user_path("model.path", path).exists() and (package / "lab" / "predict" / "models" / path / "config.json").is_file():
        expected = "a folder with a checkpoint; of this model only the shape comes with the package"
        raise ConfigError("model.path", expected, repr(path), "graphspec plan takes it as it is")
    return named_folder("model.path", path, revision)


def draft_folder(config: Config, variant: Variant, target: Path) -> Path:
    """Folder of a draft: as configured, the shipped model's own, or the target's.

    Args:
        config: of the engine.
        variant: its catalog entry; it has a network.
        target: folder of the target.

    Raises:
        ConfigError: no draft was given; else as :func:`graphspec.facts.hub.checkpoint_folder`.
        CheckpointError: no such folder.
    """
    draft = config.variant.draft
    if draft is not None:
        return named_folder("variant.draft", draft, config.variant.draft_revision)
    if (shipped := shipped_draft(config.model.path, target, variant)) is not None:
        return shipped
    if variant.draft_in_target:
        return target
    own = shipped_drafts(config.model.path, target)
    hint = f"{config.model.path} comes with drafts for variant={', '.join(own)}" if own else "variant=ngram needs none"
    raise ConfigError("variant.draft", f"the folder of a draft checkpoint for {config.model.path}", "no value", hint)


def shipped_draft(path: str, target: Path, variant: Variant) -> Path | None:
    """Folder of the draft of this variant that the package has for a model, ``path`` and ``target`` as given to and by
    :func:`model_folder`; None: it has none.
    """
    names = shipped_drafts(path, target)
    if path in SHIPPED:
        return target.parent / variant.demo_draft if variant.demo_draft in names else None
    return _heads(path)[variant.name] if variant.name in names else None


def shipped_drafts(path: str, target: Path) -> list[str]:
    """Names of the drafts that the package has for a model, ``path`` and ``target`` as for :func:`shipped_draft`."""
    if path not in SHIPPED:
        return sorted(name for name, folder in _heads(path).items() if (folder / "config.json").is_file())
    return sorted(file.parent.name for file in target.parent.glob("*/config.json") if file.parent != target)


def _heads(path: str) -> dict[str, Path]:
    """Folders of drafts for a published model, by variant, whether it goes by its short name or by that on the Hub."""
    rows = [row for name, row in published().items() if path in (name, row.hub)]
    return {variant: Path(str(files("graphspec"))) / folder for row in rows for variant, folder in row.drafts.items()}


def named_folder(key: str, path: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint that is given as a folder, a file, or by its name on the Hub.

    Raises:
        ConfigError: as :func:`graphspec.facts.hub.checkpoint_folder`.
        CheckpointError: no such folder.
    """
    return _existing(key, checkpoint_folder(key, path, revision))


def _existing(key: str, folder: Path) -> Path:
    """``folder``, if it is one."""
    if folder.suffix == ".gguf" and folder.is_file():
        return gguf_folder(folder)
    if not folder.is_dir():
        found = f"{'a file' if folder.exists() else 'nothing there'}: {brief(str(folder), LONG)}"
        raise CheckpointError(key, "a folder with a Hugging Face checkpoint", found)
    if not (folder / "config.json").exists() and (inside := sorted(folder.glob("*.gguf"))):
        expected = "a folder with a config.json, or a GGUF file"
        raise CheckpointError(key, expected, f"a folder of GGUF files: {brief(str(folder), LONG)}", f"{key}={inside[0]}")
    return folder
