"""The hybrid demo's recipe on a toy: from text to ``model=demo_hybrid``, whose drafts change no token; shipped and missing files."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM

from graphspec import LLM, SamplingParams, load_config
from graphspec.config.train_options import TextConfig
from graphspec.errors import ConfigError
from graphspec.facts import folders
from graphspec.lab.predict.model_pair import config_folder
from recipes.card import model_card
from recipes.train_demo import REPOSITORY, Demo, main

MODULES = ("abc.py", "bdb.py", "cmd.py", "code.py", "contextlib.py", "copy.py", "dis.py", "enum.py", "glob.py", "keyword.py")
HELD_OUT = ("bisect.py", "heapq.py", "queue.py")
PROMPTS = ["def heappush(heap, item):", "class Queue:\n    def __init__(self", "import"]
SMALL = {"runtime": "eager", "max_rows": 3, "buckets": [1, 3]}
SHIPPED = REPOSITORY / "graphspec" / "demo_hybrid"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``demo_hybrid`` as in the package, made by the recipe."""
    base = tmp_path_factory.mktemp("hybrid")
    sources = base / "sources"
    sources.mkdir()
    for name in (*MODULES, *HELD_OUT):
        (sources / name).write_text((Path(sysconfig.get_paths()["stdlib"]) / name).read_text())
    main(
        [
            "--work",
            str(base / "work"),
            "--out",
            str(base / "demo_hybrid"),
            "--config",
            "tiny_hybrid",
            "--threads",
            "1",
            f"corpus.root={sources}",
        ]
    )
    return base


@pytest.fixture
def shipped(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "files", lambda _: package)
    return package / "demo_hybrid"


def test_target_and_head_learned_something(package: Path) -> None:
    figures = json.loads((package / "demo_hybrid" / "training.json").read_text())
    assert figures["target"]["held_out_loss"] < 5.5, "384 ids drawn alike have 5.95 nats"
    records = [json.loads(line) for line in (package / "work" / "drafts.work" / "mtp.jsonl").read_text().splitlines()]
    assert all(after < before for before, after in zip(records[0]["loss"], records[-1]["loss"], strict=True))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=4)],
    ids=["greedy", "seeded"],
)
def test_drafts_change_no_token(shipped: Path, params: SamplingParams) -> None:
    def tokens(**shape: object) -> list[list[int]]:
        with LLM(model="demo_hybrid", **SMALL, **shape) as llm:
            return [output.token_ids for output in llm.generate(PROMPTS, params)]

    plain = tokens(variant="none")
    assert tokens(variant="mtp", num_steps=3, topk=1, num_draft_tokens=4) == plain
    assert tokens(variant="mtp", num_steps=4, topk=2, num_draft_tokens=8) == plain
    if params.temperature == 0:
        tokenizer = AutoTokenizer.from_pretrained(shipped / "target")
        model = AutoModelForCausalLM.from_pretrained(shipped / "target", dtype=torch.float32)
        assert type(model) is Qwen3_5ForCausalLM
        for prompt, found in zip(PROMPTS, plain, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            assert model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist() == found


def test_the_yaml_names_it(shipped: Path) -> None:
    config = load_config("model=demo_hybrid", "variant=mtp")
    assert folders.model_folder(config.model.path) == config_folder(config.model.path) == shipped / "target"
    assert folders.shipped_drafts(config.model.path, shipped / "target") == ["mtp"]


def test_a_draft_that_does_not_come_with_it_is_refused_with_those_that_do(shipped: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"variant\.draft: .* demo_hybrid, found no value \(demo_hybrid comes with drafts for variant=mtp\)"
    ):
        LLM(model="demo_hybrid", variant="eagle3", **SMALL)


def test_a_package_without_it_says_how_to_train_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "files", lambda _: tmp_path)
    for load in (lambda: LLM(model="demo_hybrid", variant="mtp", **SMALL), lambda: config_folder("demo_hybrid")):
        with pytest.raises(
            ConfigError, match=r"model\.path: .*no checkpoint there \(python -m recipes\.train_demo --config hybrid trains it\)"
        ):
            load()


def test_the_card_is_written_from_figures(package: Path) -> None:
    figures = json.loads((package / "demo_hybrid" / "training.json").read_text())
    card = (package / "demo_hybrid" / "README.md").read_text()
    assert card == model_card(figures)
    assert "Qwen3.5, 4 layers, hidden 32" in card and "--config hybrid" in card
    assert "Llama" not in card and "eagle3`" not in card and "The drafts had" not in card


def test_kinds_of_models_have_separate_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Path, Path]] = []

    class Recorded:
        def __init__(self, name: str, work: Path, out: Path, words: list[str]) -> None:
            calls.append((name, work, out))

        def train(self, stages: list[str]) -> None:
            assert stages == []

    monkeypatch.setattr("recipes.train_demo.Demo", Recorded)
    for name in ("demo", "hybrid"):
        main(["--config", name])
    assert [(name, work.name, out.name) for name, work, out in calls] == [
        ("demo", "train-demo", "demo"), ("hybrid", "train-demo_hybrid", "demo_hybrid"),
    ]  # fmt: skip


def test_what_is_shipped_matches_its_card_and_figures() -> None:
    folder = SHIPPED
    if not folder.exists():
        with pytest.raises(ConfigError, match="trains it"):
            folders.model_folder("demo_hybrid")
        return
    figures = json.loads((folder / "training.json").read_text())
    assert (folder / "README.md").read_text() == model_card(figures)
    demo = Demo("hybrid", folder, folder, [])
    now = json.loads(json.dumps(demo.settings()))
    assert set(figures["drafts"]) == set(demo.drafts) == {"mtp"}
    assert figures["config"]["target"] == now["target"]
    # Keys that came later have their defaults.
    assert {**asdict(TextConfig()), **figures["config"]["text"]} == now["text"]
    recorded = figures["config"]["drafts"]["mtp"]
    assert recorded == now["drafts"]["mtp"]
    tensors = load_file(folder / "mtp" / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == figures["drafts"]["mtp"]["parameters"]
    chain = next(shape for shape in figures["drafts"]["mtp"]["acceptance"]["shapes"] if shape["topk"] == 1)
    assert chain["tokens_per_cycle"] > 2.0, "the demo must show that drafting pays"
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) <= 7e6
