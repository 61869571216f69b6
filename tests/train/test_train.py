"""``graphspec train``: any draft for any family, resuming with the same bits, and errors."""

from __future__ import annotations

import io
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graphspec.cli import main as cli
from graphspec.config.compose import load_config
from graphspec.errors import CheckpointError, ConfigError
from graphspec.host.progress import progress_bars
from graphspec.text.tokenizer import Tokenizer as CheckpointTokenizer
from graphspec.train import checkpoint, token_map
from graphspec.train.drafter import load_target
from graphspec.train.optim import Optimizers
from graphspec.train.run import run
from graphspec.train.texts import encode_stream, read_documents, split_documents
from tests.support.drafts import HYBRID, tiny_target

ROOT = Path(__file__).resolve().parents[2]
FAST = ["train.text.sets=[[2,4,24]]", "train.text.prompt=[4,8]", "train.phases=[[6,4,24]]", "train.unroll=2", "hardware.device=cpu"]
FAST += ["train.acceptance.prompts=2", "train.acceptance.prompt_length=8", "train.acceptance.new_tokens=12"]
FAST += ["train.acceptance.shapes=[[2,1,3],[2,2,4]]"]


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


def words(texts: Path, out: Path, *more: str) -> list[str]:
    return [f"train.data=['{texts}']", f"train.out='{out}'", *more]


@pytest.mark.parametrize(
    ("family", "variant", "network"),
    [
        ("qwen2", "eagle", ["hardware.dtype=bfloat16"]),
        ("mistral", "eagle3", ["train.dtype=bfloat16", "train.network.tap_layers=[1,2]", "train.network.draft_vocab_size=64"]),
        (HYBRID, "mtp", []),
        ("qwen3", "mtp", ["hardware.dtype=bfloat16", "train.dtype=bfloat16"]),
        ("llama", "mtp", ["train.network.num_heads=2"]),
        ("qwen2", "dflash", ["train.network.block_size=3", "train.network.num_hidden_layers=1", "train.network.tap_layers=[1,2]"]),
        ("llama", "p_eagle", ["train.network.num_hidden_layers=2", "train.network.tap_layers=[1,2]", "train.network.draft_vocab_size=64"]),
        ("qwen3", "standalone", ["train.network.hidden_size=16", "train.network.intermediate_size=24"]),
    ],
)
def test_one_command_trains_any_draft_for_any_family(tmp_path, texts, family, variant, network):
    target, out = save_target(tmp_path / "target", family), tmp_path / "out"
    command = words(texts, out, f"variant={variant}", f"model.path={target}", *FAST, *network)
    notes: list[str] = []
    figures = run(load_config(*command), lambda stage, done, total, note="": notes.append(f"{stage} {done}/{total} {note}"))
    assert json.loads((out / "training.json").read_text()) == figures
    assert figures["training"]["steps"] == 6 and figures["training"]["tokens"] == 6 * 4 * 24
    assert figures["data"]["train_documents"] + figures["data"]["held_out_documents"] == 12
    for measured in (figures["acceptance"], figures["acceptance"]["sampled"]):
        assert len(measured["shapes"]) == (1 if "train.network.num_heads=2" in network else 2)
        assert all(1.0 <= shape["tokens_per_cycle"] <= 3.0 for shape in measured["shapes"])
    [shown] = [note for note in notes if note.startswith(f"{variant} 6/6")]
    assert "tokens/s" in shown and "loss" in shown and "left" in shown
    records = [json.loads(line) for line in (tmp_path / "out.work" / f"{variant}.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [6]
    assert records[0]["loss"] == figures["training"]["loss_by_depth"]
    weights = (out / "model.safetensors").read_bytes()
    assert {t.dtype for name, t in load_file(out / "model.safetensors").items() if "2" not in name} == {torch.bfloat16}
    # Given again: nothing is trained, the same draft is written.
    (out / "model.safetensors").unlink()
    stamp = (tmp_path / "out.work" / f"{variant}.pt").stat().st_mtime_ns
    run(load_config(*command))
    assert (out / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "out.work" / f"{variant}.pt").stat().st_mtime_ns == stamp
    with pytest.raises(CheckpointError, match="lr"):
        run(load_config(*command, "train.lr=0.5"))
    with pytest.raises(ConfigError, match="held_out"):
        run(load_config(*command, f"train.held_out=['{texts}/deep/03.txt']"))
    with pytest.raises(ConfigError, match="temperatures"):
        run(load_config(*command, "train.text.temperatures=[0.5]"))


def test_named_held_out_files_are_never_trained_on(tmp_path, texts):
    target, work = save_target(tmp_path / "target", "llama"), tmp_path / "work"
    held_out = texts / "deep" / "03.txt"
    more = [f"train.work={work}", f"train.held_out=['{held_out}']", "variant=eagle", f"model.path={target}"]
    run(load_config(*words(texts, tmp_path / "out", *more, *FAST)))
    train = np.load(work / "train.npy")
    assert len(np.load(work / "held_out.npy")) == len(held_out.read_bytes()) + 1
    assert len(train) == sum(len(f.read_bytes()) + 1 for f in (texts / "deep").glob("*.txt") if f != held_out)
    assert (train == 256).sum() == 11


def test_raw_text_alone_generates_nothing_and_a_restart_discards_checkpoints(tmp_path, texts):
    target, work = save_target(tmp_path / "target", "llama"), tmp_path / "out.work"
    fast = [word for word in FAST if "text.sets" not in word]
    command = words(texts, tmp_path / "out", "variant=mtp", f"model.path={target}", *fast, "train.raw_share=1")
    run(load_config(*command))
    assert not list(work.glob("text_*.npy"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    (texts / "deep" / "03.txt").write_text("something else " * 20)
    with pytest.raises(ConfigError, match=r"train\.(data|held_out)"):
        run(load_config(*command))
    run(load_config(*command, "train.resume=false", "train.lr=0.1"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before


def test_how_much_the_target_writes_follows_from_the_schedule(tmp_path, texts):
    target = save_target(tmp_path / "target", "llama")
    fast = [word for word in FAST if "text.sets" not in word and "phases" not in word]
    more = ["train.steps=9", "train.batch=4", "train.sequence_length=20", "variant=mtp", f"model.path={target}"]
    figures = run(load_config(*words(texts, tmp_path / "out", *more, *fast)))
    assert figures["training"]["sequences"] == {"20": 12}, "a third of 9 x 4"


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, act) -> None:
    """Do ``act`` inside a step of the next training."""
    update, steps = Optimizers.step, []

    def acting(self: Optimizers) -> None:
        steps.append(1)
        if len(steps) == step:
            act()
        update(self)

    monkeypatch.setattr(Optimizers, "step", acting)


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_killed_process_goes_on_to_the_same_bits(tmp_path, texts):
    draft = ["variant=mtp", f"model.path={save_target(tmp_path / 'target', 'llama')}", *FAST, "hardware.threads=1"]
    command = words(texts, tmp_path / "killed", *draft, "train.checkpoint_steps=2", "train.log_steps=1")
    # It kills itself when the second checkpoint is half on the disk, which no handler hears of.
    code = f"""
import os, signal
from graphspec.train import checkpoint
whole, saved = checkpoint.torch.save, []
def save(state, stream):
    saved.append(1)
    if len(saved) == 2:
        stream.write(b"half of it"); stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    whole(state, stream)
checkpoint.torch.save = save
from graphspec.cli.main import main
main(["train", *{command!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert torch.load(tmp_path / "killed.work" / "mtp.pt")["step"] == 2
    threads = torch.get_num_threads()
    try:
        run(load_config(*command))
        run(load_config(*words(texts, tmp_path / "straight", *draft)))
    finally:
        torch.set_num_threads(threads)
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "straight")


def test_a_full_disk_is_reported_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    file = tmp_path / "x.pt"
    checkpoint.save(file, {"step": 1, "numbers": torch.zeros(8)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"train\.work: expected a place where files can be written"):
            checkpoint.save(file, {"step": 2, "numbers": torch.zeros(10**6)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.load(file, torch.device("cpu"))["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.pt"]
    with pytest.raises(ConfigError, match="room for checkpoints"):
        checkpoint.check_room(tmp_path, 2**62)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"train\.resume=false"):
        checkpoint.load(file, torch.device("cpu"))


def test_a_rate_that_diverges_is_named(tmp_path, texts):
    more = ["train.lr=1e8", "train.adamw_lr=1e8", "train.clip=1e8", "train.phases=[[24,4,24]]", "train.checkpoint_steps=8"]
    draft = ["variant=standalone", f"model.path={save_target(tmp_path / 'target', 'llama')}", *FAST[:2], *FAST[3:]]
    command = words(texts, tmp_path / "out", *draft, *more)
    with pytest.raises(ConfigError, match=r"train\.lr: expected a rate at which the loss stays finite"):
        run(load_config(*command))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["variant=eagle", "train.out=o"], "train.data"),
        (["variant=eagle", "train.data=[TEXTS]"], "train.out"),
        (["variant=ngram", "train.data=[TEXTS]", "train.out=o"], "variant"),
        (["variant=eagle", "train.data=[/nothing/here]", "train.out=o"], "train.data"),
        (["variant=eagle", "train.data=[TEXTS]", "train.out=o", "model.path=/nothing/here"], "model.path"),
        (["variant=eagle", "train.data=[TEXTS]", "train.out=TEXTS/empty.txt"], "train.out"),
        (["variant=eagle", "train.data=[TEXTS]", "train.out=o", "train.network.num_heads=2"], "train.network.num_heads"),
        (["variant=eagle", "train.data=[TEXTS]", "train.out=o", "hardware.device=cuda"], "hardware.device"),
        (["variant=none", "train.data=[TEXTS]", "train.out=o"], "variant"),
        (["variant=mtp", "train.data=[TEXTS]", "train.out=o", "model.path=TARGET"], "train.acceptance.prompt_length"),
        (["train.rate=3"], "train.rate"),
        (["train.unroll=many"], "train.unroll"),
        (["train.dtype=int8"], "train.dtype"),
        (["train.held_out_share=2"], "train.held_out_share"),
        (["train.text.prompt=[9,4]"], "train.text.prompt"),
        (["train.text.sets=[[1,4,64]]"], "train.text.sets"),
    ],
)
def test_bad_settings_name_their_key(arguments, key, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = ["train.acceptance.prompt_length=4096", "hardware.device=cpu"] if key == "train.acceptance.prompt_length" else []
    target = save_target(tmp_path / "target", "llama") if small else tmp_path
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        run(load_config(*(word.replace("TEXTS", str(texts)).replace("TARGET", str(target)) for word in arguments), *small))
    assert caught.value.key == key


def test_a_target_that_is_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_target(tmp_path / "nothing")
    folder = save_target(tmp_path / "target", "llama")
    facts = json.loads((folder / "config.json").read_text())
    for changes, key in (
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, "model_type"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    ):
        (folder / "config.json").write_text(json.dumps({**facts, **changes}))
        with pytest.raises(CheckpointError, match=key):
            load_target(folder)
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="weights transformers reads"):
        load_target(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, texts):
    target = save_target(tmp_path / "target", "llama")
    model = tiny_target("llama", vocab_size=128)
    model.save_pretrained(target)
    (texts / "high.txt").write_text("é" * 200)
    with pytest.raises(ConfigError, match="a tokenizer with ids below the model's vocab_size = 128"):
        run(load_config(*words(texts, tmp_path / "out", "variant=eagle", f"model.path={target}", *FAST)))


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
        read_documents([texts / "missing"], "train.held_out")
    with pytest.raises(ConfigError, match="at least one text file"):
        read_documents([tmp_path / "nothing_in_it"])


def test_the_map_holds_the_most_frequent_ids(tmp_path, texts):
    target = save_target(tmp_path / "target", "llama")
    for name in ("map.safetensors", "map.pt"):
        token_map.main(["--target", str(target), "--data", str(texts), "--size", "9", "--out", str(tmp_path / name)])
    ids = load_file(tmp_path / "map.safetensors")["token_map"]
    assert torch.equal(ids, torch.load(tmp_path / "map.pt"))
    assert ids.dtype == torch.int64
    stream = encode_stream(CheckpointTokenizer(target), list(read_documents([texts]).values()), 256)
    counts = np.bincount(stream, minlength=288)
    assert 256 in ids.tolist()
    chosen = [i for i in ids.tolist() if i != 256]
    left = [i for i in range(288) if i not in ids.tolist()]
    assert min(counts[chosen]) >= max(counts[left])
    assert (np.diff(counts[ids]) <= 0).all()
    for size, out, key in ((0, "x.pt", "--size"), (999, "x.pt", "--size"), (9, "x.npz", "--out")):
        with pytest.raises(ConfigError, match=key):
            token_map.make_token_map(target, [texts], size, tmp_path / out)
    with pytest.raises(ConfigError, match="--target"):
        token_map.make_token_map(tmp_path, [texts], 9, tmp_path / "x.pt")


def test_the_command_shows_progress_and_reports_its_output(tmp_path, texts, capsys):
    draft = ["variant=mtp", f"model.path={save_target(tmp_path / 'target', 'llama')}", *FAST]
    command = words(texts, tmp_path / "out", *draft)
    for form in ("text", "json"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", *command, f"format={form}"])
        assert ended.value.code == 0
        out, err = capsys.readouterr()
        if form == "text":
            assert out.startswith("held-out tokens per cycle, greedy") and f"mtp draft written to {tmp_path / 'out'}" in out
            assert "mtp 6/6 loss" in err and "tokens/s" in err
        else:
            assert json.loads(out) == json.loads((tmp_path / "out" / "training.json").read_text())
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *command, "train.clip=2.0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("graphspec: ")


def test_bars_carry_a_note():
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with progress_bars(console, lines=True) as watch:
        watch("eagle3", 0, 10)
        watch("eagle3", 4, 10, "loss 2.000, 5 tokens/s, 0:00:06 left")
    shown = console.file.getvalue()
    assert "4/10" in shown and "loss 2.000, 5 tokens/s, 0:00:06 left" in shown
