"""Conversations as training text: files, spelling, packing, shares, and what the target writes itself, resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from graphspec.config.compose import load_config
from graphspec.config.schema import VariantConfig
from graphspec.config.train_options import TrainConfig
from graphspec.errors import CheckpointError, ConfigError
from graphspec.text.tokenizer import Tokenizer
from graphspec.train import written
from graphspec.train.conversations import Sample, pack, read_conversations, spell, split
from graphspec.train.draft import Chats, Texts, draft_losses
from graphspec.train.filters import Known, of_scripts, refuses, repetition, sensible_answer, sensible_prompt
from graphspec.train.loop import unwatched
from graphspec.train.run import run
from tests.support.drafts import build, random_text, tiny_target
from tests.train.test_train import FAST, interrupt_at, save_target, weights_of

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
FORGETFUL = PLAIN.replace("{{ m.content }}", "{% if loop.last or m.role == 'user' %}{{ m.content }}{% else %}...{% endif %}")
END = 256
SHORT = [word for word in FAST if "train.text" not in word and "phases" not in word]
SHORT += ["train.phases=[[6,4,40]]", "train.network.tap_layers=[1,2]", "train.network.draft_vocab_size=64", "train.text.new_tokens=16"]


def chat_target(folder: Path, template: str = PLAIN) -> Path:
    """A random target whose tokenizer has a chat template."""
    save_target(folder, "llama")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def chat(*texts: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def write_lines(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def chats(tmp_path) -> Path:
    """Forty conversations."""
    return write_lines(tmp_path / "chats.jsonl", *({"id": i, "messages": chat(f"ask {i}", "yes " * (i % 4 + 1))} for i in range(40)))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("What is the capital of France?", True), ("Hi there", False), ("Write it, now", True), ("a\x00 control character here", False),
        ("broken \ufffd text of some length", False), ("the cat sat the cat sat the cat sat the cat sat the cat sat", False),
        ("I'm sorry, but I can't help with that.", False), ("Was ist die Hauptstadt von Österreich?", True),
        ("日本の首都はどこですか教えてください", False), ("12345 67890 12345 !!!", False),
    ],
)  # fmt: skip
def test_prompts_that_a_user_may_ask_are_kept(text, good):
    assert sensible_prompt(text, ["LATIN"]) is good


def test_scripts_refusals_and_loops():
    assert of_scripts("日本の首都", ["CJK", "HIRAGANA"]) and not of_scripts("日本の首都", ["LATIN"]) and of_scripts("日本", [])
    assert of_scripts("It says 京 on the sign over there", ["LATIN"]), "a foreign letter among many is no foreign text"
    assert refuses(' "I\u2019m sorry, but no') and not refuses("I mind the gap.")
    assert sensible_answer("Paris.", [1, 2, 3]) and not sensible_answer(" \n", [1]) and not sensible_answer("As an AI, I ...", [1])
    assert not sensible_answer("la la", [1, 2] * 40) and repetition([[1, 2] * 40]) > 0.5


def test_near_duplicates_are_found():
    known, text = Known(), "please write a short story about a fox that crosses the frozen river at night in the deep winter"
    assert known.add(text)
    copied = known.copy()
    assert not known.add(text.upper() + "!") and not known.add(text.replace("winter", "autumn"))
    assert known.add("please write a python function that sorts a list of numbers by their last digit and returns it")
    assert copied.add("please write a python function that sorts a list of numbers by their last digit and returns it")


@pytest.mark.parametrize(
    "line",
    ["[1]", "{}", '{"prompt": "a", "messages": []}', '{"prompt": 3}', '{"messages": []}', '{"messages": [{"role": "user"}]}', "{", "NaN",
     '{"messages": [{"role": "user", "content": "a", "weight": 1}]}'],
)  # fmt: skip
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_conversations(str(file))
    assert str(caught.value).startswith(f"train.data: {file}:3")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="at least one conversation"):
        read_conversations(str(file))


def test_only_answers_are_marked(tmp_path):
    tokenizer = Tokenizer(chat_target(tmp_path / "target"))
    [sample] = spell(tokenizer, chat("one?", "1", "two?", "22"))
    assert tokenizer.decode(sample.tokens) == "[user]one?<end>[assistant]1<end>[user]two?<end>[assistant]22<end>"
    marked = [tokenizer.decode(sample.tokens[begin:end]) for begin, end in sample.answers]
    assert marked == ["1<end>", "22<end>"]
    assert tokenizer.decode(np.array(sample.tokens)[sample.marks()].tolist()) == "1<end>22<end>"
    # What the engine reads before the second answer lacks the first: two samples.
    forgetful = Tokenizer(chat_target(tmp_path / "forgetful", FORGETFUL))
    first, second = spell(forgetful, chat("one?", "1", "two?", "22"))
    assert forgetful.decode(first.tokens) == "[user]one?<end>[assistant]1<end>"
    assert forgetful.decode(second.tokens) == "[user]one?<end>[assistant]...<end>[user]two?<end>[assistant]22<end>"


def test_packing_keeps_every_answer_once():
    generator = np.random.default_rng(0)
    samples = []
    for number, size in enumerate(generator.integers(4, 60, 50)):
        samples.append(Sample([number + 1] * size, [(2, int(size))]))
    tokens, marks = pack(samples, 32)
    assert tokens.shape == marks.shape and tokens.shape[1] == 32
    for number, sample in enumerate(samples):
        assert (tokens[marks] == number + 1).sum() == len(sample.tokens) - 2
    assert not marks[tokens == 0].any()
    total = sum(len(sample.tokens) for sample in samples)
    assert len(tokens) <= 1.1 * total / 32 + 1, "little room is wasted"
    again, _ = pack(samples, 32)
    assert (again == tokens).all()


def test_some_conversations_are_held_out_and_stay_so():
    samples = [Sample([i], [(0, 1)]) for i in range(100)]
    train, held_out = split(samples, 0.1)
    assert len(held_out) == 10 and {s.tokens[0] for s in train}.isdisjoint(s.tokens[0] for s in held_out)
    more, apart = split([*samples, *(Sample([i], [(0, 1)]) for i in range(100, 150))], 0.1)
    assert apart[:10] == held_out and more[: len(train)] == train


def test_the_loss_counts_only_what_is_marked():
    drafter, target = build("eagle3"), tiny_target()
    tokens, row = random_text(2, 20), torch.arange(16)
    generator = torch.Generator().manual_seed(0)
    features, logits = torch.randn(2, 20, 64, generator=generator), torch.randn(2, 20, 96, generator=generator)
    assert target.config.vocab_size == 96
    counted = torch.rand(2, 20, generator=generator) < 0.5
    losses, hits = draft_losses(drafter, features, logits, tokens, row, 4, 0.0, counted)
    other = torch.where(counted[..., None], logits, torch.randn(2, 20, 96, generator=generator))
    again, _ = draft_losses(drafter, features, other, tokens, row, 4, 0.0, counted)
    assert torch.equal(losses, again)
    ids = drafter.target_ids()
    for k, hidden in enumerate(drafter.drafts(features, tokens, 4, row)):
        at = counted[:, 1 + k : 17 + k]
        wide = logits[:, 1 + k : 17 + k][at]
        inside = torch.isin(wide.argmax(-1), ids)
        log = drafter.logits(hidden[at]).log_softmax(-1)
        expected = -(wide[:, ids].softmax(-1) * log).sum(-1)[inside].mean()
        torch.testing.assert_close(losses[k], expected)
        agreed = (ids[log.argmax(-1)] == wide.argmax(-1)).float().mean()
        torch.testing.assert_close(hits[k], agreed)
    losses.sum().backward()
    found = drafter.network.fc.weight.grad.clone()
    drafter.zero_grad()
    total = torch.zeros(())
    for k, hidden in enumerate(drafter.drafts(features, tokens, 4, row)):
        at = counted[:, 1 + k : 17 + k]
        wide = logits[:, 1 + k : 17 + k][at]
        inside = torch.isin(wide.argmax(-1), ids)
        total = total - (wide[:, ids].softmax(-1) * drafter.logits(hidden[at]).log_softmax(-1)).sum(-1)[inside].mean()
    total.backward()
    torch.testing.assert_close(found, drafter.network.fc.weight.grad)
    nothing, none_hit = draft_losses(drafter, features, logits, tokens, row, 4, 0.0, torch.zeros_like(counted))
    assert nothing.tolist() == none_hit.tolist() == [0.0] * 4


def test_a_batch_has_the_shares_of_its_entries():
    def rows(number: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {8: (np.full((3, 8), number, dtype=np.int32), np.tile([False] * 4 + [True] * 4, (3, 1)))}

    texts = Texts(np.full(100, 7, dtype=np.int32), {}, (Chats(0.5, rows(1)), Chats(0.2, rows(2))))
    assert texts.text_share == pytest.approx(0.3)
    found = [texts.batch(10, 8, 1.0, seed) for seed in range(200)]
    share = [float(np.mean([(tokens[:, 0] == number).float().mean() for tokens, _ in found])) for number in (7, 1, 2)]
    assert share == pytest.approx([0.3, 0.5, 0.2], abs=0.03)
    tokens, counted = found[0]
    assert counted is not None and counted[tokens[:, 0] == 7].all()
    # The mark of a token stands where it is predicted.
    assert all(row.tolist() == [False] * 3 + [True] * 4 + [False] for row in counted[tokens[:, 0] == 1])
    again, marks = texts.batch(10, 8, 1.0, 0)
    assert torch.equal(again, tokens) and torch.equal(marks, counted)


def test_shares_of_data():
    entries = [{"path": "a.jsonl", "share": 0.5}, "self", "texts", "more.txt"]
    assert TrainConfig(data=entries).shares() == {"a.jsonl": 0.5, "self": pytest.approx(0.25)}
    assert TrainConfig(data="self").shares() == {"self": 1.0}
    assert TrainConfig(data=[{"path": "texts", "share": 0.75}, "self"]).shares() == {"self": pytest.approx(0.25)}
    for bad, key in (([{"share": 1}], "train.data[0]"), ([3], "train.data[0]"), ([{"path": "a", "share": 2}], "train.data[0].share"),
                     ([{"path": "a", "share": 0.7}, {"path": "b", "share": 0.7}], "train.data")):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            TrainConfig(data=bad)
        assert caught.value.key == key


def test_a_draft_is_trained_on_conversations_and_texts(tmp_path, chats):
    target, prompts = chat_target(tmp_path / "target"), tmp_path / "prompts.jsonl"
    write_lines(prompts, *({"prompt": f"tell me {i}"} for i in range(10)))
    (tmp_path / "text.txt").write_text("abc abd abe " * 60)
    data = f"train.data=[{{path: '{chats}', share: 0.4}}, '{prompts}', '{tmp_path}/text.txt']"
    command = ["variant=eagle3", f"model.path={target}", data, f"train.out={tmp_path}/out", "train.raw_share=1", *SHORT]
    figures = run(load_config(*command))
    one, two = figures["data"]["conversations"]
    assert (one["share"], two["share"]) == (0.4, 0.3) and one["train"] == 38 and one["held_out"] == 2
    assert figures["training"]["conversations"][0]["40"] > 0 and 1 <= two["train"] + two["held_out"] <= 10
    assert figures["acceptance"]["prompts"] == 2, "prompts of conversations, not of the text"
    files = sorted((tmp_path / "out.work" / "conversations").glob("*.jsonl"))
    before = weights_of(tmp_path / "out"), [file.read_bytes() for file in files]
    answers = [json.loads(line) for line in files[0].read_text().split("\n") if line]
    assert all(record["messages"][1]["role"] == "assistant" and record["prompt_tokens"] < len(record["tokens"]) for record in answers)
    # Again from nothing: the same answers, the same weights.
    run(load_config(*command, "train.resume=false"))
    assert (weights_of(tmp_path / "out"), [file.read_bytes() for file in files]) == before
    # What the target wrote can be given as data.
    reused = [word for word in command if not word.startswith(("train.data", "train.out"))]
    again = run(load_config(*reused, f"train.data={files[0]}", f"train.out={tmp_path}/reused"))
    assert sum(again["data"]["conversations"][0][side] for side in ("train", "held_out")) == len(answers)


@pytest.fixture
def lenient(monkeypatch):
    """A random model writes no sense."""
    monkeypatch.setattr(written, "sensible_prompt", lambda text, scripts: len(text) > 1)
    monkeypatch.setattr(written, "sensible_answer", lambda text, tokens: len(tokens) > 1)


def test_what_the_target_writes_is_resumed_bit_for_bit(tmp_path, lenient, monkeypatch):
    target = chat_target(tmp_path / "target")
    # Many ends, so that a random model comes to one.
    for name in ("config.json", "generation_config.json"):
        stated = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(stated | {"eos_token_id": [END, *range(100, 106)]}))
    words = ["variant=eagle3", f"model.path={target}", "train.data=self", "train.text.batch=4", *SHORT[:-1], "train.text.new_tokens=48"]

    def write(work: str, tokens: int) -> dict[str, bytes]:
        folder = tmp_path / work
        folder.mkdir(exist_ok=True)
        config = load_config(*words, f"train.out={tmp_path}/out", f"train.text.tokens={tokens}")
        [entry] = written.gather(config, target, 288, folder, unwatched)
        assert sum(len(sample.tokens) for sample in (*entry.train, *entry.held_out)) >= tokens
        for sample in entry.train:
            [(begin, end)] = sample.answers
            assert Tokenizer(target).decode(sample.tokens[:begin]).startswith("[user]") and end == len(sample.tokens)
        return {file.name: file.read_bytes() for file in sorted((folder / "conversations").glob("self_*.jsonl"))}

    straight = write("straight", 3000)
    assert len(straight) >= 3
    whole, pieces = written.write_whole, []

    def killed(file: Path, *rest: object) -> None:
        pieces.append(file)
        if len(pieces) == 2:
            raise KeyboardInterrupt
        whole(file, *rest)

    monkeypatch.setattr(written, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        write("halves", 3000)
    monkeypatch.setattr(written, "write_whole", whole)
    assert len(list((tmp_path / "halves" / "conversations").glob("self_*.jsonl"))) == 1
    assert write("halves", 3000) == straight
    # More of it later leaves what is there as it is.
    more = write("halves", 6000)
    assert len(more) > len(straight) and straight.items() <= more.items()
    with pytest.raises(ConfigError, match="temperatures"):
        words.append("train.text.temperatures=[0.5]")
        write("halves", 3000)


def test_the_engine_that_writes_has_the_kernels_of_the_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(written.LLM, "from_config", asked.append)
    config = load_config("variant=eagle3", "model.path=any", "kernels.activations=int8", "kernels.numerics=fast")
    written.engine_for(config, "any", VariantConfig(name="none"), rows=4, context=64, tokens=1)
    assert asked[0].kernels == config.kernels and asked[0].kernels.activations == "int8"


def test_a_target_that_writes_nothing_sensible_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "sensible_prompt", lambda text, scripts: False)
    target = chat_target(tmp_path / "target")
    words = ["variant=eagle3", f"model.path={target}", "train.data=self", f"train.out={tmp_path}/out", "train.text.batch=2", *SHORT]
    with pytest.raises(ConfigError, match="a chat model"):
        run(load_config(*words))
    plain = save_target(tmp_path / "plain", "llama")
    with pytest.raises(CheckpointError, match="chat_template"):
        run(load_config(*words, f"model.path={plain}", f"train.out={tmp_path}/other"))


def test_training_on_conversations_resumes_bit_for_bit_and_can_be_prolonged(tmp_path, chats, monkeypatch):
    target = chat_target(tmp_path / "target")
    words = ["variant=eagle3", f"model.path={target}", f"train.data={chats}", *SHORT[:-4], "train.batch=4", "train.sequence_length=40"]
    words += ["train.network.tap_layers=[1,2]", "train.network.draft_vocab_size=64", "train.warmup=2", "train.cooldown=3"]
    run(load_config(*words, f"train.out={tmp_path}/straight", "train.steps=12"))

    def stop() -> None:
        raise KeyboardInterrupt

    interrupt_at(monkeypatch, 7, stop)
    with pytest.raises(KeyboardInterrupt):
        run(load_config(*words, f"train.out={tmp_path}/halves", "train.steps=9", "train.checkpoint_steps=2"))
    monkeypatch.undo()
    # Six steps were made at the full rate, as they are in a schedule of twelve.
    run(load_config(*words, f"train.out={tmp_path}/halves", "train.steps=12"))
    assert weights_of(tmp_path / "halves") == weights_of(tmp_path / "straight")
    # Finished, and gone on with after a restart of the schedule; nothing of what was made may change.
    figures = run(load_config(*words, f"train.out={tmp_path}/halves", "train.steps=20", "train.restarts=[12]"))
    assert figures["training"]["steps"] == 20 and weights_of(tmp_path / "halves") != weights_of(tmp_path / "straight")
    for changed in ("train.restarts=[13]", "train.warmup=3", "train.batch=3"):
        with pytest.raises(CheckpointError):
            run(load_config(*words, f"train.out={tmp_path}/halves", "train.steps=20", "train.restarts=[12]", changed))
