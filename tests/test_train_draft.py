"""The commands that serve any target: training a draft on text files, and the map of frequent ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graphspec.errors import CheckpointError, ConfigError
from recipes import token_map, train_draft
from recipes.drafter import load_target
from recipes.texts import encode_stream, read_documents, split_documents

from ._drafts import tiny_target

FAST = ["text.sets=[[2,4,24]]", "text.prompt=[4,8]", "draft.phases=[[6,4,24]]", "draft.warmup=1", "draft.cooldown=2", "draft.unroll=2"]
FAST += ["acceptance.prompts=2", "acceptance.prompt_length=8", "acceptance.new_tokens=12", "acceptance.shapes=[[2,1,3],[2,2,4]]"]


def save_target(folder: Path, family: str) -> Path:
    """A random model of 288 ids and a byte tokenizer; id 256 ends a text."""
    model = tiny_target(family, vocab_size=288, eos_token_id=256, bos_token_id=256)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(alphabet)}, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of text, with things in it that are none."""
    folder = tmp_path / "texts"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    for number in range(12):
        (folder / "deep" / f"{number:02d}.txt").write_text(f"text {number}: " + "abc abd abe " * 12)
    (folder / "picture.bin").write_bytes(b"\x00\x01\xff")
    (folder / "deep" / ".hidden" / "secret.txt").write_text("hidden")
    (folder / "empty.txt").write_text("\n")
    return folder


@pytest.mark.parametrize(
    ("family", "variant", "network"),
    [
        ("qwen2", "eagle", ["target_dtype=bfloat16"]),
        ("mistral", "eagle3", ["target_dtype=bfloat16", "draft.network.tap_layers=[1,2]", "draft.network.draft_vocab_size=64"]),
        ("qwen3", "mtp", ["target_dtype=bfloat16"]),
        ("llama", "mtp", ["draft.network.num_heads=2"]),
        ("qwen3", "standalone", ["draft.network.hidden_size=16", "draft.network.intermediate_size=24"]),
    ],
)
def test_one_command_trains_any_draft_for_any_family(tmp_path, texts, family, variant, network, capsys):
    target, out, work = save_target(tmp_path / "target", family), tmp_path / "out", tmp_path / "work"
    command = [f"variant={variant}", f"target={target}", f"data=[{texts}]", f"out={out}", f"work={work}", *FAST, *network]
    train_draft.main(command)
    figures = json.loads((out / "training.json").read_text())
    assert figures["training"]["steps"] == 6
    assert figures["data"]["train_documents"] + figures["data"]["held_out_documents"] == 12
    shapes = figures["acceptance"]["shapes"]
    assert len(shapes) == (1 if "draft.network.num_heads=2" in network else 2)
    assert all(1.0 <= shape["tokens_per_cycle"] <= 3.0 for shape in shapes)
    assert f"(2, 1, 3) {shapes[0]['tokens_per_cycle']:.2f}" in capsys.readouterr().out
    weights = (out / "model.safetensors").read_bytes()
    assert {t.dtype for name, t in load_file(out / "model.safetensors").items() if "2" not in name} == {torch.bfloat16}
    # Given again: nothing is trained, the same draft is written.
    (out / "model.safetensors").unlink()
    train_draft.main(command)
    assert (out / "model.safetensors").read_bytes() == weights
    assert "train: done before" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="lr"):
        train_draft.main([*command, "draft.lr=0.5"])
    with pytest.raises(ConfigError, match="held_out"):
        train_draft.main([*command, f"held_out=[{texts}/deep/03.txt]"])


def test_named_held_out_files_are_never_trained_on(tmp_path, texts):
    target, work = save_target(tmp_path / "target", "llama"), tmp_path / "work"
    held_out = texts / "deep" / "03.txt"
    command = ["variant=eagle", f"target={target}", f"data=[{texts}]", f"held_out=[{held_out}]", f"out={tmp_path / 'out'}"]
    train_draft.main([*command, f"work={work}", *FAST])
    data = np.load(work / "data.npz")
    assert len(data["held_out"]) == len(held_out.read_bytes()) + 1
    assert len(data["train"]) == sum(len(f.read_bytes()) + 1 for f in (texts / "deep").glob("*.txt") if f != held_out)
    assert (data["train"] == 256).sum() == 11


def test_raw_text_alone_generates_nothing(tmp_path, texts):
    target, work = save_target(tmp_path / "target", "llama"), tmp_path / "work"
    command = ["variant=mtp", f"target={target}", f"data=[{texts}]", f"out={tmp_path / 'out'}", f"work={work}", *FAST]
    train_draft.main([*command, "text.sets=[]", "draft.raw_share=1"])
    assert not list(work.glob("text_*"))
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["variant=eagle"], "data"),
        (["target=x"], "variant"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "draft.rate=3"], "draft.rate"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "draft.unroll=many"], "draft.unroll"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "draft.network.num_heads=2"], "network.num_heads"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "target_dtype=int8"], "target_dtype"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "held_out_share=2"], "held_out_share"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "text.prompt=[9,4]"], "text.prompt"),
        (["variant=eagle", "target=x", "data=[a]", "out=o", "work=w", "text.sets=[[1,4,64]]"], "text.sets"),
        (["variant=eagle", "--target", "x"], "command line"),
    ],
)
def test_bad_arguments_name_their_key(arguments, key):
    with pytest.raises(ConfigError, match=key):
        train_draft.load_config(arguments)


def test_a_target_that_is_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_target(tmp_path / "nothing")
    folder = save_target(tmp_path / "target", "llama")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}))
    with pytest.raises(CheckpointError, match="model_type"):
        load_target(folder)


def test_documents_are_found_and_split_whole(tmp_path, texts):
    (tmp_path / "nothing_in_it").mkdir()
    documents = read_documents([texts])
    assert [Path(name).name for name in documents] == [f"{number:02d}.txt" for number in range(12)]
    train, held_out = split_documents(documents, 0.2)
    assert 1 <= len(held_out) <= 4
    assert {**train, **held_out} == documents
    assert split_documents(dict(reversed(documents.items())), 0.2)[1] == held_out, "the split does not depend on the order"
    train, held_out = split_documents({"one": "x" * 90 + "y" * 10}, 0.1)
    assert (train, held_out) == ({"one": "x" * 90}, {"one": "y" * 10})
    with pytest.raises(ConfigError, match="data"):
        read_documents([texts / "picture.bin"])
    with pytest.raises(ConfigError, match="held_out"):
        read_documents([texts / "missing"], "held_out")
    with pytest.raises(ConfigError, match="at least one text file"):
        read_documents([tmp_path / "nothing_in_it"])


def test_the_map_holds_the_most_frequent_ids(tmp_path, texts):
    target = save_target(tmp_path / "target", "llama")
    for name in ("map.safetensors", "map.pt"):
        token_map.main([f"target={target}", f"data=[{texts}]", "size=9", f"out={tmp_path / name}"])
    ids = load_file(tmp_path / "map.safetensors")["token_map"]
    assert torch.equal(ids, torch.load(tmp_path / "map.pt"))
    assert ids.dtype == torch.int64
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    stream = encode_stream(tokenizer, list(read_documents([texts]).values()), 256)
    counts = np.bincount(stream, minlength=288)
    assert 256 in ids.tolist()
    chosen = [i for i in ids.tolist() if i != 256]
    left = [i for i in range(288) if i not in ids.tolist()]
    assert min(counts[chosen]) >= max(counts[left])
    assert (np.diff(counts[ids]) <= 0).all()
    for wrong, key in (("size=0", "size"), ("size=999", "size"), ("sise=9", "sise"), ("out=map.npz", "out")):
        with pytest.raises(ConfigError, match=key):
            token_map.main([f"target={target}", f"data=[{texts}]", "size=9", f"out={tmp_path / 'x.pt'}", wrong])
