"""The recipe of the demo models on a toy: every stage, what it exports, the card, and the models the package ships."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from graphspec.config.catalog import all_variants
from graphspec.config.train_options import TrainConfig
from graphspec.errors import ConfigError
from graphspec.train.draft import Recipe, draft_losses
from graphspec.train.drafter import Target, load_target, network_of, trained_variants
from graphspec.train.filters import repetition
from graphspec.train.generate import cut_prompts
from graphspec.train.optim import Optimizers
from recipes.card import model_card
from recipes.continuation import continue_text
from recipes.target import build_target
from recipes.train_demo import CONF, REPOSITORY, Demo, main
from tests.support.drafts import HYBRID, load_draft, tiny_target

TRAIN = ("abc.py", "bdb.py", "cmd.py", "code.py", "contextlib.py", "copy.py", "dis.py", "enum.py", "functools.py", "glob.py", "keyword.py")
HELD_OUT = ("bisect.py", "heapq.py", "queue.py")
DEMO = REPOSITORY / "graphspec" / "demo"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Demo]:
    """A finished toy run: its work folder, its output folder, the run itself."""
    base = tmp_path_factory.mktemp("recipe")
    sources, work, out = base / "sources", base / "work", base / "out"
    sources.mkdir()
    for name in (*TRAIN, *HELD_OUT):
        (sources / name).write_text((Path(sysconfig.get_paths()["stdlib"]) / name).read_text())
    words = [f"corpus.root={sources}"]
    main(["--work", str(work), "--out", str(out), "--config", "tiny", "--threads", "1", *words])
    return work, out, Demo("tiny", work, out, words)


def test_exported_target_loads_unchanged(toy):
    work, out, demo = toy
    loaded = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    assert type(loaded) is LlamaForCausalLM
    trained = build_target(demo.target_settings.target, 0)
    trained.load_state_dict(torch.load(work / "target.work" / "target.pt", weights_only=True)["model"])
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name).bfloat16().float()), name
    tensors = load_file(out / "target" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert "model.embed_tokens.weight" in tensors
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(out / "target").dtype == torch.bfloat16


def test_tokenizer_round_trip(toy):
    tokenizer = AutoTokenizer.from_pretrained(toy[1] / "target")
    for text in ("def f(x):\n\treturn {x: 'é ☃'}  # done\n", "", "   \n\n  a\r\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == json.loads((toy[1] / "target" / "config.json").read_text())["eos_token_id"] == 0
    assert (toy[1] / "standalone" / "tokenizer.json").read_bytes() == (toy[1] / "target" / "tokenizer.json").read_bytes()


def test_every_draft_is_written_and_learned(toy):
    work, out, demo = toy
    model = load_target(out / "target")
    target = Target(model)
    # Text of the kind that the drafts were trained on, which they have not seen.
    prompts = cut_prompts(np.load(work / "drafts.work" / "train.npy"), 16, 8, seed=77)
    tokens = continue_text(model, prompts, 40, 1.0, 77)
    assert set(demo.drafts) == set(trained_variants())
    for name, config in demo.drafts.items():
        made = Recipe(name, config.train)
        trained = load_draft(made, model, work / "drafts.work" / f"{name}.pt")
        _, tensors = trained.published(model)
        written = load_file(out / name / "model.safetensors")
        assert {key: t.shape for key, t in tensors.items()} == {key: t.shape for key, t in written.items()}
        assert all(torch.equal(written[key], t.to(written[key].dtype)) for key, t in tensors.items())
        features, logits = target.view(tokens, trained.tap_layers)
        ids = trained.target_ids()
        torch.manual_seed(config.train.seed)
        counts = torch.zeros(384, dtype=torch.int64) if ids is None else torch.zeros(384, dtype=torch.int64).index_fill(0, ids, 1)
        fresh = network_of(name).build(model, made.network(), counts)
        with torch.no_grad():
            row_A = fresh.anchors(tokens.shape[1] - config.train.unroll, 0)
            before, _ = draft_losses(fresh, features, logits, tokens, row_A, config.train.unroll)
            after, _ = draft_losses(trained, features, logits, tokens, row_A, config.train.unroll)
        assert (after < before - 0.5).all(), (name, before, after)


def test_the_card_is_written_from_figures(toy):
    _, out, _ = toy
    figures = json.loads((out / "training.json").read_text())
    card = (out / "README.md").read_text()
    assert card == model_card(figures)
    assert f"{figures['target']['held_out_bits_per_byte']:.3f} bits per byte" in card
    for name, draft in figures["drafts"].items():
        row = next(line for line in card.splitlines() if line.startswith(f"| `{name}/` |"))
        assert [cell.strip() for cell in row.split("|")[2:-1]] == [
            f"{draft['parameters']:,}",
            f"{draft['megabytes']:.2f}",
            *(f"{shape['tokens_per_cycle']:.2f}" for shape in draft["acceptance"]["shapes"]),
        ]
    del figures["target"]["published"]["held_out_loss"]
    with pytest.raises(KeyError):
        model_card(figures)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 16}), ("qwen2", {}), ("qwen3", {}), (HYBRID, {})]
)
def test_generation_equals_transformers(family, changes):
    target = tiny_target(family, **changes)
    torch.manual_seed(3)
    prompt = torch.randint(1, 96, (2, 9))
    ours = continue_text(target, prompt, 40, 0.0, 0)
    reference = target.generate(
        prompt, max_new_tokens=31, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(prompt)
    )
    assert torch.equal(ours, reference)
    assert torch.equal(continue_text(target, prompt, 40, 1.0, 5), continue_text(target, prompt, 40, 1.0, 5))
    assert not torch.equal(continue_text(target, prompt, 40, 1.0, 5), continue_text(target, prompt, 40, 1.0, 6))


def test_repetition_counts_runs_seen_before():
    assert repetition([list(range(40))]) == 0.0
    assert repetition([[1, 2] * 20]) == pytest.approx(23 / 25)


def rates_of(module: torch.nn.Module, **settings: object) -> list[list[float]]:
    config = TrainConfig(**settings)
    optimizers, rates = Optimizers(module, config, ()), []
    for _ in range(config.total_steps):
        rates.append(optimizers.rates)
        module(torch.ones(1, 4)).square().sum().backward()
        optimizers.step()
    return rates


def test_both_optimizers_follow_one_schedule_at_their_own_peaks():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    rates = rates_of(module, lr=0.1, adamw_lr=0.01, steps=20, warmup=4, cooldown=5)
    assert rates[0] == pytest.approx([0.025, 0.0025])
    assert rates[10] == pytest.approx([0.1, 0.01])
    assert rates[19] == pytest.approx([0.02, 0.002])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 10, "warmup": 2, "cooldown": 4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ({"steps": 12, "warmup": 2, "cooldown": 3, "restarts": [6]}, [0.5, 1, 1, 1, 2 / 3, 1 / 3] * 2),
        # Too short for both ways: in proportion, and from where the way down begins.
        ({"steps": 6, "warmup": 2, "cooldown": 8}, [0.625, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ({"steps": 18, "warmup": 2, "cooldown": 4, "restarts": [12]}, [0.5, *[1] * 7, 1, 0.75, 0.5, 0.25, 0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"steps": 4, "warmup": 0, "schedule": "constant"}, [1, 1, 1, 1]),
        ({"steps": 6, "warmup": 1, "schedule": "cosine"}, [1, 1, 0.8565, 0.51, 0.1635, 0.02]),
        # Nothing named: a tenth up, half down.
        ({"steps": 20}, [0.5, *[1] * 10, *(left / 10 for left in range(9, 0, -1))]),
    ],
)
def test_the_schedules_of_the_learning_rate(settings, expected):
    rates = [rate for rate, _ in rates_of(torch.nn.Linear(4, 4), lr=1.0, adamw_lr=None, **settings)]
    assert rates == pytest.approx(expected, abs=1e-4)


def test_a_finished_run_trains_nothing_again(toy, capsys):
    work, out, demo = toy
    stamps = {file: file.stat().st_mtime_ns for file in work.rglob("*") if file.is_file()}
    weights = {file: file.read_bytes() for file in out.rglob("*.safetensors")}
    main(["--work", str(work), "--out", str(out), "--config", "tiny", f"corpus.root={demo.corpus_config.root}"])
    assert capsys.readouterr().out.count("done before") == 2 + len(demo.drafts)
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}
    assert weights == {file: file.read_bytes() for file in weights}


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("train.rate=1", "train.rate"),
        ("train.acceptance.shapes=[[23,1,24]]", "train.acceptance.new_tokens"),
        ("train.unroll=0", "train.unroll"),
        ("corpus.roof=/", "corpus.roof"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(word, key, tmp_path):
    with pytest.raises(ConfigError, match=key):
        Demo("tiny", tmp_path, tmp_path, [word])
    with pytest.raises(ConfigError, match="--config"):
        Demo("huge", tmp_path, tmp_path, [])


@pytest.mark.parametrize("name", sorted(folder.name for folder in CONF.iterdir()))
def test_every_recipe_composes(name, tmp_path):
    demo = Demo(name, tmp_path, tmp_path, [])
    hybrid = demo.target_settings.target.architecture != "llama"
    assert set(demo.drafts) == {name for name in trained_variants() if network_of(name).reads_hybrids or not hybrid}
    lengths = {length for config in demo.drafts.values() for _, _, length in config.train.schedule_phases}
    assert all(lengths <= {length for _, _, length in config.train.text.sets} for config in demo.drafts.values())
    assert max(lengths) <= demo.target_settings.target.max_position_embeddings


def test_the_shipped_card_matches_its_figures_and_files():
    figures = json.loads((DEMO / "training.json").read_text())
    assert (DEMO / "README.md").read_text() == model_card(figures)
    demo = Demo("demo", DEMO, DEMO, [])
    settings = demo.settings()
    assert set(figures["drafts"]) == {variant.name for variant in all_variants() if variant.training and variant.demo_draft}
    for name, draft in figures["drafts"].items():
        tensors = load_file(DEMO / name / "model.safetensors")
        assert sum(t.numel() for key, t in tensors.items() if key not in ("d2t", "t2d")) == draft["parameters"]
        assert draft["megabytes"] == round((DEMO / name / "model.safetensors").stat().st_size / 1e6, 2)
        recorded = figures["config"]["drafts"][name]
        assert recorded == recorded | {key: value for key, value in settings["drafts"][name].items() if key in recorded}
        if "draft_vocab_size" in draft:
            assert tensors["lm_head.weight"].shape[0] == draft["draft_vocab_size"]
        lengths = {shape["topk"]: shape["tokens_per_cycle"] for shape in draft["acceptance"]["shapes"]}
        assert lengths[1] > 2.0 and lengths[4] > 2.5, "the demo must show that drafting pays"
        assert name != "eagle3" or (lengths[1] >= 2.5 and lengths[4] >= 3.0), "the draft of README's speeds"
    alike = {(draft["tokens"], str(draft["sequences"])) for draft in figures["drafts"].values()}
    assert len(alike) == 1, "rows of the acceptance table compare methods"
    against_loops = asdict(demo.target_settings.unlikelihood)
    assert against_loops["steps"] > 0 and figures["target"]["unlikelihood"] | against_loops == figures["target"]["unlikelihood"]
    for part in ("target", "text"):
        recorded = figures["config"][part]
        assert recorded == recorded | {key: value for key, value in settings[part].items() if key in recorded}
    assert sum(file.stat().st_size for file in DEMO.rglob("*.safetensors")) <= 21e6
    assert (DEMO / "standalone" / "tokenizer.json").read_bytes() == (DEMO / "target" / "tokenizer.json").read_bytes()
