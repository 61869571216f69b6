"""The recipe of the demo models on a toy: every stage, what it exports, the card, and the models the package ships."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from graphspec.errors import ConfigError
from recipes.acceptance import accepted_lengths, walk
from recipes.card import model_card
from recipes.draft import DraftConfig, draft_losses, load_draft
from recipes.drafter import Target, load_target
from recipes.generate import continue_text, repetition
from recipes.networks import NETWORKS
from recipes.optim import Optimizers
from recipes.target import trained_target
from recipes.train_demo import REPOSITORY, RecipeConfig, load_config, main

from ._drafts import tiny_target

TRAIN = ("abc.py", "bdb.py", "cmd.py", "code.py", "contextlib.py", "copy.py", "dis.py", "enum.py", "functools.py", "glob.py", "keyword.py")
HELD_OUT = ("bisect.py", "heapq.py", "queue.py")
DEMO = REPOSITORY / "graphspec" / "demo"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, RecipeConfig]:
    """A finished toy run: its work folder, its output folder, its settings."""
    base = tmp_path_factory.mktemp("recipe")
    sources, work, out = base / "sources", base / "work", base / "out"
    sources.mkdir()
    for name in (*TRAIN, *HELD_OUT):
        (sources / name).write_text((Path(sysconfig.get_paths()["stdlib"]) / name).read_text())
    override = f"corpus_root={sources}"
    main(["--work", str(work), "--out", str(out), "--config", "tiny", "--threads", "1", override])
    return work, out, load_config("tiny", [override])


def test_exported_target_loads_unchanged(toy):
    work, out, config = toy
    loaded = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    assert type(loaded) is LlamaForCausalLM
    trained = trained_target(config.target, work)
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
    work, out, config = toy
    model = load_target(out / "target")
    target = Target(model)
    torch.manual_seed(0)
    tokens = continue_text(model, torch.randint(0, 384, (4, 8)), 40, 1.0, 0)
    assert set(config.drafts) == set(NETWORKS)
    for name, settings in config.drafts.items():
        trained = load_draft(settings, model, work / f"{name}.pt")
        _, tensors = trained.published(model)
        written = load_file(out / name / "model.safetensors")
        assert {key: t.shape for key, t in tensors.items()} == {key: t.shape for key, t in written.items()}
        assert all(torch.equal(written[key], t.to(written[key].dtype)) for key, t in tensors.items())
        features, logits = target.view(tokens, trained.tap_layers)
        ids = trained.target_ids()
        torch.manual_seed(settings.seed)
        counts = torch.zeros(384, dtype=torch.int64) if ids is None else torch.zeros(384, dtype=torch.int64).index_fill(0, ids, 1)
        fresh = NETWORKS[settings.variant].build(model, settings.settings(), counts)
        with torch.no_grad():
            before, _ = draft_losses(fresh, features, logits, tokens, settings.unroll)
            after, _ = draft_losses(trained, features, logits, tokens, settings.unroll)
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


def test_accepted_length_follows_one_path():
    # Two levels, fan-out 2: nodes 2, 3 are children of 0, nodes 4, 5 of 1. The target goes 11 -> 20.
    token = torch.tensor([[[10, 11, 20, 21, 20, 22]]])
    score = torch.tensor([[[-0.1, -0.2, -0.3, -0.9, -0.4, -1.9]]])
    parent = torch.tensor([[[-1, -1, 0, 0, 1, 1]]])
    level = torch.tensor([1, 1, 2, 2, 2, 2])
    truth = torch.tensor([[[11, 20]]])
    assert accepted_lengths(token, score, parent, level, truth, 5).tolist() == [[2]]
    # With three drafts offered the match at level two (the fourth best) is not among them; node 2 has the token but the wrong parent.
    assert accepted_lengths(token, score, parent, level, truth, 4).tolist() == [[1]]
    assert walk([2, 0, 0, 1, 4, 0]) == [2, 1, 0]


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 16}), ("qwen2", {}), ("qwen3", {})])
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
    assert repetition(torch.arange(40)[None], 0) == 0.0
    assert repetition(torch.tensor([[1, 2] * 20]), 0) == pytest.approx(23 / 25)


def test_both_optimizers_follow_one_schedule_at_their_own_peaks():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizers = Optimizers(module, 0.1, 20, 4, 5, (), adamw_lr=0.01)
    rates = []
    for step in range(20):
        module(torch.ones(1, 4)).square().sum().backward()
        optimizers.step(step, 1.0)
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers.optimizers])
    assert rates[0] == pytest.approx([0.025, 0.0025])
    assert rates[10] == pytest.approx([0.1, 0.01])
    assert rates[19] == pytest.approx([0.02, 0.002])


def test_a_restart_begins_the_schedule_anew():
    module = torch.nn.Linear(4, 4)
    plain, restarted = Optimizers(module, 1.0, 10, 2, 4, ()), Optimizers(module, 1.0, 18, 2, 4, (), restarts=[10])
    rates = [restarted.factor(step) for step in range(18)]
    assert rates[:10] == [plain.factor(step) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates[10:] == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    with pytest.raises(ConfigError, match="steps between 0 and 400"):
        DraftConfig(restarts=[400])


def test_a_finished_run_trains_nothing_again(toy, capsys):
    work, out, config = toy
    stamps = {file: file.stat().st_mtime_ns for file in [*work.rglob("*"), *out.rglob("*")] if file.is_file()}
    main(["--work", str(work), "--out", str(out), "--config", "tiny", f"corpus_root={config.corpus_root}"])
    assert capsys.readouterr().out.count("done before") == 5 + len(config.drafts)
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("drafts.eagle.phases=[[1,1,48]]", "drafts.eagle.phases"),
        ("drafts.eagle3.network.tap_layers=[0,1,1]", "drafts.eagle3.network.tap_layers"),
        ("drafts.mtp.rate=1", "drafts.mtp.rate"),
        ("acceptance.shapes=[[23,1,24]]", "acceptance.new_tokens"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(override, key):
    with pytest.raises(ConfigError, match=key):
        load_config("tiny", [override])


def test_the_shipped_card_matches_its_figures_and_files():
    figures = json.loads((DEMO / "training.json").read_text())
    assert (DEMO / "README.md").read_text() == model_card(figures)
    config = load_config("demo", [])
    assert set(figures["drafts"]) == set(config.drafts)
    for name, draft in figures["drafts"].items():
        tensors = load_file(DEMO / name / "model.safetensors")
        assert sum(t.numel() for key, t in tensors.items() if key not in ("d2t", "t2d")) == draft["parameters"]
        assert draft["megabytes"] == round((DEMO / name / "model.safetensors").stat().st_size / 1e6, 2)
        assert figures["config"]["drafts"][name] == config.drafts[name].resolved()
        if "draft_vocab_size" in draft:
            assert tensors["lm_head.weight"].shape[0] == draft["draft_vocab_size"]
        chain = next(shape for shape in draft["acceptance"]["shapes"] if shape["topk"] == 1)
        assert chain["tokens_per_cycle"] > 2.0, "the demo must show that drafting pays"
    assert figures["config"]["target"] == asdict(config.target)
    assert figures["config"]["text"] == asdict(config.text)
    assert sum(file.stat().st_size for file in DEMO.rglob("*.safetensors")) <= 21e6
    assert (DEMO / "standalone" / "tokenizer.json").read_bytes() == (DEMO / "target" / "tokenizer.json").read_bytes()
