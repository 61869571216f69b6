"""Models of the Hugging Face Hub by name: from a cache made here, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from graphspec import LLM, SamplingParams, load_config
from graphspec.cli import main as cli
from graphspec.config.catalog import resolve_variant
from graphspec.errors import ConfigError
from graphspec.facts.hub import checkpoint_folder, is_hub_id, pinned
from graphspec.lab.predict.model_pair import read_model_pair
from tests.support.engines import CHAIN, SMALL, Pair, add_tokenizer, mirror_pair

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "1" * 40, "2" * 40
MODEL, DRAFT = "some-org/target.v1", "some_org/eagle3"
GREEDY = SamplingParams(max_tokens=8)


def put(cache: Path, name: str, commit: str, folder: Path, *branches: str) -> Path:
    """A snapshot as the Hub's own client lays it out: blobs, and links to them."""
    home = cache / ("models--" + name.replace("/", "--"))
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    for branch in branches:
        (home / "refs" / branch).write_text(commit)
    for file in folder.iterdir():
        blob = home / "blobs" / f"{commit}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("mirror"))
    add_tokenizer(made.target)
    return made


@pytest.fixture
def cache(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of a target and one of a draft, and no network."""
    folder = tmp_path / "cache"
    put(folder, MODEL, OLD, pair.target, "v1")
    put(folder, MODEL, NEW, pair.target, "main")
    put(folder, DRAFT, OLD, pair.draft, "main")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


def test_names_of_models_and_of_folders() -> None:
    assert all(map(is_hub_id, (MODEL, DRAFT, "a/b", "Qwen/Qwen2.5-0.5B-Instruct")))
    assert not any(map(is_hub_id, ("demo", "./nope", "../nope", "/a/b", "~/a", "a/b/c", "a/", "/b", "a b/c", "a/b\n", "ü/b", "", "a/..")))


def test_an_engine_from_the_cache(pair: Pair, cache: Path) -> None:
    llm = LLM(MODEL, draft=DRAFT, **SMALL, **CHAIN)
    assert llm.folder == cache / "models--some-org--target.v1" / "snapshots" / NEW
    [by_name] = llm.generate("w1 w2 w3", GREEDY)
    [by_folder] = pair.llm(**CHAIN).generate("w1 w2 w3", GREEDY)
    assert by_name.token_ids == by_folder.token_ids and by_name.text == by_folder.text != ""


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_revision_picks_its_snapshot(cache: Path, revision: str) -> None:
    # The commits differ in what the target allows, which shows which one was read.
    [config] = (cache / "models--some-org--target.v1" / "snapshots" / OLD).glob("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 48}))
    contexts = [LLM(MODEL, variant="none", **SMALL, **options).plan.max_context for options in ({}, {"revision": revision})]
    assert contexts == [96, 48]


def test_a_local_folder_takes_precedence_over_the_hub(pair: Pair, cache: Path) -> None:
    (cache.parent / "some-org").mkdir()
    (cache.parent / MODEL).symlink_to(pair.target)
    assert not checkpoint_folder("model.path", MODEL).is_absolute()
    with pytest.raises(ConfigError, match=r"model.revision: expected null"):
        checkpoint_folder("model.path", MODEL, "v1")


@pytest.mark.parametrize(
    ("name", "revision"), [("some-org/absent", None), (MODEL, "v9"), (MODEL, "3" * 40)], ids=["model", "branch", "commit"]
)
def test_what_the_cache_lacks_is_one_message(cache: Path, name: str, revision: str | None, capsys: Any) -> None:
    words = ["generate", f"model.path={name}", "variant=none", "prompt=x", *([f"model.revision={revision}"] if revision else [])]
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    reported = capsys.readouterr()
    assert (exit_.value.code, reported.out, reported.err.count("\n")) == (2, "", 1)
    for part in ("model.path", str(cache), "HF_HUB_OFFLINE is set", f"hf download {name}", name):
        assert part in reported.err
    assert revision is None or revision in reported.err


def test_a_wrong_path_is_looked_for_on_disk_alone(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("a request to the Hub"))
    for path in ("./nope", "../a/nope", "/some/nope", "nope", "a/b/nope"):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["generate", f"model.path={path}", "variant=none", "prompt=x"])
        reported = capsys.readouterr().err
        assert (
            exit_.value.code == 2
            and reported.count("\n") == 1
            and "model.path: expected a folder with a Hugging Face checkpoint, found nothing there" in reported
        )


RESPONSE = SimpleNamespace(headers={}, status_code=404, request=SimpleNamespace(), text="")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (errors.RepositoryNotFoundError("no\nsuch", response=RESPONSE), "a folder that exists, or a model of the Hugging Face Hub"),
        (errors.GatedRepoError("gated", response=RESPONSE), "which is gated"),
        (errors.RevisionNotFoundError("gone", response=RESPONSE), "model.revision: expected a branch, tag or commit of some-org/other"),
        (errors.LocalEntryNotFoundError("nothing here"), "the Hugging Face Hub can't be reached"),
        (PermissionError(13, "Permission denied"), "PermissionError: Permission denied"),
        (RuntimeError("a client's\nown error"), "RuntimeError: a client's own error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_the_hub_is_one_message(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception, part: str) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", "model.path=some-org/other", "model.revision=v1", "variant=none", "prompt=x"])
    reported = capsys.readouterr().err
    assert exit_.value.code == 2 and reported.count("\n") == 1 and part in reported


class Repository:
    """What the Hub's client downloads: the files that match, into a snapshot."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files, self.revisions = folder / OLD, files, []
        self.folder.mkdir()

    def __call__(self, _: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        self.revisions.append(revision)
        for name in huggingface_hub.utils.filter_repo_objects(self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).touch()
        return str(self.folder)

    @property
    def found(self) -> set[str]:
        return {str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file()}


SMALL_FILES = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model-1.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "consolidated.safetensors"], 2),
        (["pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.bin"], 2),
    ],
    ids=["safetensors", "pickles"],
)
def test_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[str], wanted: int) -> None:
    hub = Repository(tmp_path, [*SMALL_FILES, *weights, "README.md", "original/params.json", "onnx/model.safetensors", "own.py"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    checkpoint_folder("model.path", "org/name", weights=False)
    assert hub.found == {"config.json", "tokenizer.json"}
    checkpoint_folder("model.path", "org/name", "v1")
    assert hub.found == {*SMALL_FILES, *weights[:wanted]}
    # A branch that moves meanwhile moves nothing between two downloads.
    assert hub.revisions in ([None, "v1"], [None, "v1", OLD])


def test_a_run_of_several_processes_reads_one_commit(cache: Path) -> None:
    config = load_config(f"model.path={MODEL}", f"variant.draft={DRAFT}", "variant.draft_revision=main")
    reported = pinned(config)
    assert (reported.model.path, reported.model.revision, reported.variant.draft_revision) == (MODEL, NEW, OLD)
    assert pinned(reported) == reported
    assert pinned(load_config()) == load_config()


def test_plan_takes_models_of_the_hub(cache: Path) -> None:
    config = load_config(f"model.path={MODEL}", f"variant.draft={DRAFT}")
    pair = read_model_pair(MODEL, config.variant, resolve_variant("eagle3"), "v1")
    assert pair.name == MODEL and pair.folder.name == OLD and pair.draft is not None and pair.draft.path.name == OLD


def test_the_environment_names_the_cache(pair: Pair, tmp_path: Path) -> None:
    put(tmp_path / "home" / "hub", MODEL, NEW, pair.target, "main")
    words = ["generate", f"model.path={MODEL}", "variant=none", "runtime=eager", "prompt=w1 w2", "sampling.max_tokens=3", "format=json"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "graphspec", *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["outputs"][0]["token_ids"]) == 3
