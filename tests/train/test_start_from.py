"""``train.start_from``: a published draft, in any layout and format, is where a run begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphspec.config.compose import load_config
from graphspec.drafters.convert import convert
from graphspec.drafters.heads.eagle3_training import choose_draft_vocab
from graphspec.errors import CheckpointError, ConfigError
from graphspec.models.quantise import quantise
from graphspec.text.tokenizer import Tokenizer
from graphspec.train.drafter import Drafter, load_target, network_of
from graphspec.train.export import export_draft
from graphspec.train.run import run
from graphspec.train.start import Start
from tests.support.drafts import HYBRID, build, tiny_target
from tests.train.test_train import FAST, save_target, words

SIZES = {"vocab_size": 288, "eos_token_id": 256, "bos_token_id": 256}
CASES = {
    "eagle": ("qwen2", "eagle", {}),
    "eagle3": ("llama", "eagle3", {}),
    "eagle3, all ids": ("mistral", "eagle3", {"draft_vocab_size": 96, "intermediate_size": 40}),
    "mtp": ("qwen3", "mtp", {}),
    "mtp, two heads": ("llama", "mtp", {"num_heads": 2}),
    "mtp, hybrid": (HYBRID, "mtp", {}),
    "p_eagle": ("llama", "p_eagle", {"mask_token_id": 7}),
    "dflash": ("qwen2", "dflash", {"causal": False}),
    "standalone": ("qwen3", "standalone", {}),
}


def publish(folder: Path, variant: str, family: str = "llama", tied: bool = True, **network: object) -> tuple[Path, Path]:
    """Folders of a target and of a draft for it, with random weights."""
    model = tiny_target(family, tie_word_embeddings=tied)
    model.save_pretrained(folder / "target")
    draft = folder / "draft"
    draft.mkdir()
    export_draft(build(variant, load_target(folder / "target"), **network), model, draft)
    return folder / "target", draft


def begun(variant: str, start: Path, target: Path, recounted: bool = False, **network: object) -> tuple[Drafter, str]:
    """A new drafter that begins with a published one, and the digest of its weights. The text's most frequent ids are the highest."""
    model, kind = load_target(target), network_of(variant)
    found = Start.read(variant, str(start), target, recounted)
    torch.manual_seed(1)
    drafter = kind.build(model, kind.Settings(**found.network_settings(network)), torch.arange(96))
    return drafter, found.fill(drafter, model)


def exported(drafter: Drafter, target: Path, out: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    out.mkdir()
    export_draft(drafter, load_target(target), out)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_what_is_published_is_what_a_run_begins_with(tmp_path, case):
    family, variant, network = CASES[case]
    target, draft = publish(tmp_path, variant, family, **network)
    drafter, _ = begun(variant, draft, target)
    tensors, config = exported(drafter, target, tmp_path / "again")
    assert config == json.loads((draft / "config.json").read_text())
    stored = load_file(draft / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(tensors[name], stored[name])] == []


@pytest.mark.parametrize(("variant", "layout"), [("eagle3", "sglang"), ("eagle3", "speculators"), ("eagle", "speculators-old")])
def test_a_head_may_have_any_layout(tmp_path, variant, layout):
    target, draft = publish(tmp_path, variant, **({"bias": True} if variant == "eagle" else {}))
    convert(draft, tmp_path / "other", layout, target)
    theirs, digest = begun(variant, tmp_path / "other", target)
    ours, same = begun(variant, draft, target)
    assert digest == same
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


def test_codes_become_the_numbers_that_they_stand_for(tmp_path):
    target, draft = publish(tmp_path, "eagle3", intermediate_size=64)
    quantise(draft, tmp_path / "packed", "int8", ["layers", "fc", "lm_head"], 32)
    packed, _ = begun("eagle3", tmp_path / "packed", target)
    exact, _ = begun("eagle3", draft, target)
    pairs = list(zip(packed.parameters(), exact.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all((a - b).abs().max() <= b.abs().max() / 100 for a, b in pairs)


def test_the_target_may_be_packed(tmp_path):
    target, draft = publish(tmp_path, "eagle", tied=False)
    quantise(target, tmp_path / "packed", "int8", ["lm_head"], 32)
    exact, _ = begun("eagle", draft, target)
    packed, _ = begun("eagle", draft, tmp_path / "packed")
    assert all(torch.equal(a, b) for a, b in zip(packed.parameters(), exact.parameters(), strict=True))


def test_masks_may_be_learnt_on_an_eagle3_head(tmp_path):
    target, draft = publish(tmp_path, "eagle3")
    head, _ = begun("eagle3", draft, target)
    parallel, _ = begun("p_eagle", draft, target, num_hidden_layers=2)
    own = dict(parallel.network.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in head.network.named_parameters())
    assert {name.split(".")[1] for name in own if name.startswith("layers")} == {"0", "1"}
    assert torch.equal(parallel.target_ids(), head.target_ids())
    # At its first depth, a network of as many layers as the head drafts what the head does.
    same, _ = begun("p_eagle", draft, target, num_hidden_layers=1)
    features, tokens = torch.randn(2, 9, 64), torch.randint(0, 96, (2, 9))
    rows = torch.arange(5)
    first = [next(iter(drafter.drafts(features, tokens, 4, rows))) for drafter in (same, head)]
    assert torch.equal(*first)


@pytest.mark.parametrize(
    ("variant", "size", "wanted"), [("eagle3", 48, None), ("eagle3", 48, 40), ("p_eagle", 40, 48), ("eagle3", 96, 40), ("eagle3", 40, 96)]
)
def test_the_draft_vocabulary_may_be_that_of_the_new_text(tmp_path, variant, size, wanted):
    target, draft = publish(tmp_path, "eagle3", draft_vocab_size=size)
    before, old = begun("eagle3", draft, target)
    after, new = begun(variant, draft, target, recounted=True, **({} if wanted is None else {"draft_vocab_size": wanted}))
    model, ids = load_target(target), after.target_ids()
    size, known = wanted or size, range(96) if before.target_ids() is None else before.target_ids().tolist()
    assert ids is None if size == 96 else torch.equal(ids, choose_draft_vocab(torch.arange(96), size, [model.config.eos_token_id]))
    mine, theirs = after.network.lm_head.weight, before.network.lm_head.weight
    drafted = range(96) if ids is None else ids.tolist()
    assert len(mine) == size and 0 < sum(token in known for token in drafted) < max(size, len(known))
    for row, token in zip(mine, drafted, strict=True):
        assert torch.equal(row, theirs[list(known).index(token)] if token in known else model.lm_head.weight[token])
    own = dict(after.network.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in before.network.named_parameters() if name != "lm_head.weight")
    assert old != new


def test_only_a_draft_vocabulary_can_be_counted_anew(tmp_path):
    target, draft = publish(tmp_path, "mtp")
    with pytest.raises(ConfigError, match=r"train.recount_vocab: expected false: mtp drafts all ids of the target, found True"):
        begun("mtp", draft, target, recounted=True)
    _, whole = publish(tmp_path / "whole", "eagle3", draft_vocab_size=96)
    for given in ({}, {"draft_vocab_size": 96}):
        with pytest.raises(ConfigError, match=r"recount_vocab: expected false, or train.network.draft_vocab_size below 96: .* all ids"):
            begun("eagle3", whole, target, recounted=True, **given)
    with pytest.raises(ConfigError, match=r"train.recount_vocab: expected false without train.start_from, found True"):
        load_config("train.recount_vocab=true")


def change(draft: Path, **keys: object) -> None:
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_drafts_that_would_not_stay_themselves_are_refused(tmp_path):
    target, draft = publish(tmp_path, "eagle3")
    with pytest.raises(ConfigError, match=r"train.network.draft_vocab_size: expected 48.*train.start_from.*found 64"):
        begun("eagle3", draft, target, draft_vocab_size=64)
    change(draft, norm_before_residual=True)
    with pytest.raises(CheckpointError, match=r"train.start_from: .*norm_before_residual: expected False.*found True"):
        begun("eagle3", draft, target)
    change(draft, norm_before_residual=False, rope_theta=500.0)
    with pytest.raises(CheckpointError, match=r"train.start_from: .*rope"):
        begun("eagle3", draft, target)
    change(draft, rope_theta=10000.0)
    begun("eagle3", draft, target)
    with pytest.raises(CheckpointError, match=r"dflash|block"):
        begun("dflash", draft, target)
    with pytest.raises(CheckpointError, match=r"train.start_from: expected a folder.*nothing there"):
        begun("eagle3", tmp_path / "nowhere", target)


def test_an_embedding_must_be_the_targets(tmp_path):
    target, draft = publish(tmp_path, "eagle3")
    model, file = load_target(target), draft / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"embed_tokens.weight": model.model.embed_tokens.weight.bfloat16().clone()}, file)
    begun("eagle3", draft, target)
    save_file(tensors | {"embed_tokens.weight": torch.zeros(96, 32)}, file)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: expected a tensor that drafts trained here have, or the target's"):
        begun("eagle3", draft, target)


def test_more_layers_than_the_network_has_are_refused(tmp_path):
    target, draft = publish(tmp_path, "eagle3")
    found = Start.read("eagle3", str(draft), target)
    found.network.extra = torch.nn.Linear(2, 2)
    model, kind = load_target(target), network_of("eagle3")
    drafter = kind.build(model, kind.Settings(**found.settings), torch.arange(96))
    with pytest.raises(CheckpointError, match=r"extra.weight"):
        found.fill(drafter, model)


def test_one_command_continues_a_published_draft(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number:02d}.txt").write_text(f"text {number}: " + "abc abd abe " * 12)
    target = save_target(tmp_path / "target", "llama")
    base = ["variant=eagle3", f"model.path={target}", *FAST]
    network = ["train.network.tap_layers=[1,2]", "train.network.draft_vocab_size=64"]
    run(load_config(*words(texts, tmp_path / "first", *base, *network)))
    start = f"train.start_from={tmp_path / 'first'}"
    # At the lowest rate nothing moves as far as the next number of 16 bits.
    still = ["train.lr=1e-9", "train.adamw_lr=1e-9"]
    run(load_config(*words(texts, tmp_path / "still", *base, start, *still)))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "still"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Resumed with another start, it is another run.
    shutil.copytree(tmp_path / "still", tmp_path / "other")
    save_file({name: t * 2 if name == "norm.weight" else t for name, t in first.items()}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"start_from.*other settings"):
        run(load_config(*words(texts, tmp_path / "still", *base, *still, f"train.start_from={tmp_path / 'other'}")))
    # Text with few letters of its own: each of them is drafted.
    anew = [start, "train.recount_vocab=true", "train.network.draft_vocab_size=20", f"train.data={tmp_path / 'letters'}"]
    (tmp_path / "letters").mkdir()
    for number in range(12):
        (tmp_path / "letters" / f"{number:02d}.txt").write_text("xyzw " * 60)
    figures = run(load_config(*words(texts, tmp_path / "anew", *base, *anew, *still)))
    assert figures["training"]["draft_vocab_size"] == 20
    ids = load_file(tmp_path / "anew" / "model.safetensors")["d2t"] + torch.arange(20)
    assert set(Tokenizer(target).encode("xyzw ")) <= set(ids.tolist())
    longer = words(texts, tmp_path / "more", *base, start, "train.phases=[[40,4,24]]")
    figures = run(load_config(*longer))
    assert figures["training"]["steps"] == 40 and figures["config"]["start_from"] == str(tmp_path / "first")
    moved = load_file(tmp_path / "more" / "model.safetensors")
    assert torch.equal(moved["d2t"], first["d2t"]) and not torch.equal(moved["fc.weight"], first["fc.weight"])
