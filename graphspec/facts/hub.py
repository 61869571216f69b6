"""Checkpoints by name: a folder on disk, or a model of the Hugging Face Hub, whose snapshot is downloaded where the cache lacks it.

``huggingface_hub`` is imported when a name is no folder, so its own environment variables hold: ``HF_HOME``, ``HF_HUB_CACHE``,
``HF_HUB_OFFLINE``, ``HF_TOKEN``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..config.checks import LONG, brief
from ..config.paths import reason, user_path
from ..config.schema import Config
from ..errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=Config)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_REVISIONS = {"model.path": "model.revision", "variant.draft": "variant.draft_revision"}
"""Key of a name to the key of its revision."""

_CONFIGS = ("*.json",)
_FILES = (*_CONFIGS, "*.safetensors", "*.model", "*.txt", "*.jinja")
_PICKLES = ("pytorch_model*.bin",)
_LEFT_OUT = ("*/*", "consolidated*")
"""Folders, and the second copy of the weights that some repositories have."""
_SHARDS = ("*.index.json",)
"""Not downloaded where weights are not: a folder with an index has weights."""


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``organisation/model``; ``./model`` and ``../model`` are folders."""
    return _HUB_ID.fullmatch(name) is not None and not {".", ".."} & set(name.split("/"))


def checkpoint_folder(key: str, name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a checkpoint.

    Args:
        key: ``model.path`` or ``variant.draft``, for messages.
        name: a folder, or a model of the Hub. A folder goes first. One of another form than a model's need not exist.
        revision: branch, tag or commit of a model of the Hub; None: ``main``.
        weights: download them too; False: the configuration alone.

    Raises:
        ConfigError: a revision of a folder; no such model or revision; one that may not be read; or the Hub is out of reach and its cache,
            which the message names, lacks the model.
    """
    folder = user_path(key, name)
    if folder.exists() or not is_hub_id(name):
        if revision is not None:
            raise ConfigError(
                _REVISIONS[key], f"null, or a model of the Hugging Face Hub in {key}", revision, f"{key} is {brief(name, LONG)}"
            )
        return folder
    return _snapshot(key, name, revision, weights)


def pinned(config: ConfigT) -> ConfigT:
    """The same configuration, with the commits of the models of the Hub that it names as their revisions, so that processes started one
    after the other read the same files, and a record tells which.

    Raises:
        ConfigError: as :func:`checkpoint_folder`.
    """
    model, variant = config.model, config.variant
    if (commit := _commit("model.path", model.path, model.revision)) is not None:
        model = replace(model, revision=commit)
    if variant.draft is not None and (commit := _commit("variant.draft", variant.draft, variant.draft_revision)) is not None:
        variant = replace(variant, draft_revision=commit)
    return replace(config, model=model, variant=variant)


def _commit(key: str, name: str, revision: str | None) -> str | None:
    if not is_hub_id(name) or user_path(key, name).exists():
        return None
    return _snapshot(key, name, revision, weights=True).name


def _snapshot(key: str, repository: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    def fetch(wanted: tuple[str, ...], left_out: tuple[str, ...], commit: str | None) -> Path:
        return Path(snapshot_download(repository, revision=commit, allow_patterns=list(wanted), ignore_patterns=list(left_out)))

    try:
        if not weights:
            return fetch(_CONFIGS, (*_LEFT_OUT, *_SHARDS), revision)
        folder = fetch(_FILES, _LEFT_OUT, revision)
        return folder if any(folder.glob("*.safetensors")) else fetch((*_FILES, *_PICKLES), _LEFT_OUT, folder.name)
    except GatedRepoError as error:
        hint = f"accept its terms at https://huggingface.co/{repository}, then log in: hf auth login"
        raise ConfigError(key, "a model that you may read", f"{repository}, which is gated", hint) from error
    except RepositoryNotFoundError as error:
        expected, hint = "a folder that exists, or a model of the Hugging Face Hub", "a private one needs a login: hf auth login"
        raise ConfigError(key, expected, brief(repository, LONG), hint) from error
    except RevisionNotFoundError as error:
        raise ConfigError(_REVISIONS[key], f"a branch, tag or commit of {repository}", repr(revision)) from error
    except LocalEntryNotFoundError as error:
        wanted = f" at revision {revision}" if revision is not None else ""
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub can't be reached"
        expected = f"a folder that exists, or a model of the Hub that is complete in the cache {constants.HF_HUB_CACHE}, for {why}"
        hint = f"where there is a network: hf download {repository}"
        raise ConfigError(key, expected, f"{brief(repository, LONG)}{wanted}", hint) from error
    except Exception as error:  # the Hub's client has a dozen kinds, some of them of its HTTP library
        raise ConfigError(
            key, "a model that can be downloaded", brief(repository, LONG), f"{type(error).__name__}: {reason(error)}"
        ) from error
