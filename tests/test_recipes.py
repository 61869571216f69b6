"""The training recipe on a toy: every stage, the exported layout, and the drafts against a row-by-row recomputation."""

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

from graphspec.errors import ConfigError
from recipes.acceptance import AcceptanceConfig, accepted_lengths, draft_candidates, measure_acceptance, walk
from recipes.card import model_card
from recipes.eagle3 import Eagle3Head, attend, build_head, choose_draft_vocab, load_head, target_view, unrolled_loss
from recipes.generate import continue_text, repetition
from recipes.target import load_target
from recipes.train_demo import REPOSITORY, RecipeConfig, load_config, main

TRAIN = ("abc.py", "bdb.py", "cmd.py", "code.py", "contextlib.py", "copy.py", "dis.py", "enum.py", "functools.py", "glob.py", "keyword.py")
HELD_OUT = ("bisect.py", "heapq.py", "queue.py")


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


@pytest.fixture(scope="module")
def pair(toy: tuple[Path, Path, RecipeConfig]) -> tuple[LlamaForCausalLM, Eagle3Head]:
    work, _, config = toy
    target = load_target(config.target, work)
    return target, load_head(config.head, target, work)


def test_exported_target_loads_unchanged(toy, pair):
    _, out, _ = toy
    loaded = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    assert type(loaded) is LlamaForCausalLM
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, pair[0](tokens).logits)
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


def test_head_has_the_published_layout(toy):
    _, out, config = toy
    folder = out / "eagle3"
    h, i, vd, v = 32, config.head.intermediate_size, config.head.draft_vocab_size, config.target.vocab_size
    q, g = 32, 16
    expected = {
        "fc.weight": (h, 3 * h),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (g, 2 * h),
        "midlayer.self_attn.v_proj.weight": (g, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h),
        "midlayer.mlp.down_proj.weight": (h, i),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (vd, h),
        "d2t": (vd,),
        "t2d": (v,),
    }
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    dtypes = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(t.dtype == dtypes.get(name, torch.bfloat16) for name, t in tensors.items())
    facts = json.loads((folder / "config.json").read_text())
    assert facts["architectures"] == ["LlamaForCausalLMEagle3"]
    assert facts["draft_vocab_size"] == vd
    assert facts["vocab_size"] == v
    assert facts["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in config.head.tap_layers]


def test_draft_vocabulary_maps_are_consistent(toy):
    tensors = load_file(toy[1] / "eagle3" / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())
    assert 0 in ids.tolist()


def test_draft_vocabulary_is_the_most_counted_and_keeps_the_end():
    assert choose_draft_vocab(np.array([0, 5, 9, 1, 7]), 3, (0,)).tolist() == [0, 2, 4]


def test_the_card_is_written_from_figures(toy):
    _, out, _ = toy
    figures = json.loads((out / "training.json").read_text())
    card = (out / "README.md").read_text()
    assert card == model_card(figures)
    assert f"{figures['target']['held_out_bits_per_byte']:.3f} bits per byte" in card
    del figures["acceptance"]["held_out_loss"]
    with pytest.raises(KeyError):
        model_card(figures)


def test_unrolled_training_lowers_the_loss_of_every_depth(toy, pair):
    config = toy[2].head
    target, trained = pair
    torch.manual_seed(0)
    tokens = continue_text(target, torch.randint(0, 384, (4, 8)), 40, 1.0, 0)
    features, logits = target_view(target, tokens, trained.tap_layers)
    embed = target.model.embed_tokens(tokens)
    ids = trained.target_ids()
    soft = logits[..., ids].softmax(-1)
    to_draft = torch.full((384,), -1).scatter(0, ids, torch.arange(len(ids)))
    hard = to_draft[logits.argmax(-1)]
    fresh = build_head(target, config, ids.numpy())
    with torch.no_grad():
        _, before, _ = unrolled_loss(fresh, features, embed, soft, hard, 4, 0.8)
        _, after, _ = unrolled_loss(trained, features, embed, soft, hard, 4, 0.8)
    assert (after < before - 0.5).all(), (before, after)
    figures = json.loads((toy[0] / "head.json").read_text())
    assert figures["steps"] == torch.load(toy[0] / "head.pt")["step"] == sum(phase[0] for phase in config.phases)


def branch_logits(head: Eagle3Head, target: LlamaForCausalLM, features: torch.Tensor, tokens: torch.Tensor, row: int, path: list[int]):
    """Logits after drafting ``path`` from ``row``, one token at a time, every earlier row recomputed."""
    embedding, layer = target.model.embed_tokens, head.midlayer
    cos, sin = head.rope(torch.arange(row + 1))
    fused = head.fc(features[:, : row + 1])
    query, keys, values = layer.project(embedding(tokens[:, 1 : row + 2]), fused, cos, sin)
    seen = torch.ones(1, row + 1, dtype=torch.bool)
    hidden = layer.finish(fused[:, row:], attend(query[:, :, :, row:], keys, values, seen, None, None))
    for step, token in enumerate(path, 1):
        cos, sin = head.rope(torch.tensor([row + step]))
        query, key, value = layer.project(embedding(torch.tensor([[token]])), hidden, cos, sin)
        keys, values = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        seen = torch.ones(1, keys.shape[2], dtype=torch.bool)
        hidden = layer.finish(hidden, attend(query, keys, values, seen, None, None))
    return head.logits(hidden)[0, 0]


def test_unrolled_losses_equal_drafting_row_by_row(pair):
    target, head = pair
    torch.manual_seed(1)
    tokens = torch.randint(0, 384, (1, 14))
    unroll, rows = 4, 10
    features, logits = target_view(target, tokens, head.tap_layers)
    ids = head.target_ids()
    soft = logits[..., ids].softmax(-1)
    hard = torch.zeros_like(tokens)
    with torch.no_grad():
        _, losses, _ = unrolled_loss(head, features, target.model.embed_tokens(tokens), soft, hard, unroll, 0.8)
        for k in range(unroll):
            expected = []
            for row in range(rows):
                path = tokens[0, row + 2 : row + 2 + k].tolist()
                draft = branch_logits(head, target, features, tokens, row, path).double().log_softmax(-1)
                expected.append(-(soft[0, row + 1 + k].double() * draft).sum())
            torch.testing.assert_close(losses[k].double(), torch.stack(expected).mean(), rtol=1e-5, atol=1e-5)


def test_tree_candidates_follow_their_own_branch(pair):
    target, head = pair
    torch.manual_seed(2)
    tokens = torch.randint(0, 384, (2, 12))
    features, _ = target_view(target, tokens, head.tap_layers)
    token, score, parent, level = draft_candidates(head, target.model.embed_tokens, features, tokens, 5, 4, 3)
    assert token.shape == (2, 6, 3 + 3 * 9)
    ids = head.target_ids().tolist()
    for lane, row in ((0, 0), (1, 3), (1, 5)):
        for node in range(token.shape[-1]):
            path, at = [], int(parent[lane, row, node])
            while at >= 0:
                path.insert(0, int(token[lane, row, at]))
                at = int(parent[lane, row, at])
            assert len(path) == int(level[node]) - 1
            before = float(score[lane, row, parent[lane, row, node]]) if path else 0.0
            with torch.no_grad():
                logp = branch_logits(head, target, features[lane : lane + 1], tokens[lane : lane + 1], row + 5, path).log_softmax(-1)
            best = logp.topk(3)
            assert int(token[lane, row, node]) in [ids[i] for i in best.indices.tolist()]
            expected = before + float(logp[ids.index(int(token[lane, row, node]))])
            assert float(score[lane, row, node]) == pytest.approx(expected, abs=1e-4)


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


def test_generation_equals_transformers(pair):
    target, _ = pair
    torch.manual_seed(3)
    prompt = torch.randint(1, 384, (2, 9))
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


def test_a_finished_run_trains_nothing_again(toy, capsys):
    work, out, config = toy
    stamps = {file: file.stat().st_mtime_ns for file in [*work.rglob("*"), *out.rglob("*")] if file.is_file()}
    main(["--work", str(work), "--out", str(out), "--config", "tiny", f"corpus_root={config.corpus_root}"])
    assert capsys.readouterr().out.count("done before") == 6
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}


@pytest.mark.parametrize(
    ("override", "key"),
    [("head.phases=[[1,1,48]]", "head.phases"), ("head.tap_layers=[0,1,1]", "head.tap_layers"), ("head.unroll=2", "acceptance.shapes")],
)
def test_settings_that_contradict_each_other_are_refused(override, key):
    with pytest.raises(ConfigError, match=key):
        load_config("tiny", [override])


def test_measured_chain_equals_running_the_cycles(toy, pair):
    target, head = pair
    settings = AcceptanceConfig(prompts=3, prompt_length=12, new_tokens=20, shapes=[[3, 1, 4]], seed=4)
    stream = np.load(toy[0] / "data.npz")["held_out"]
    figures, text = measure_acceptance(settings, target, head, stream, end_of_text=-1)
    ids = head.target_ids()
    taken: list[int] = []
    for tokens in text.split(1):
        features, _ = target_view(target, tokens, head.tap_layers)
        root = 12
        while root + 4 < tokens.shape[1]:
            path: list[int] = []
            for _ in range(3):
                with torch.no_grad():
                    path.append(int(ids[branch_logits(head, target, features, tokens, root - 1, path).argmax()]))
            truth = tokens[0, root + 1 : root + 4].tolist()
            taken.append(next((i for i in range(3) if path[i] != truth[i]), 3))
            root += taken[-1] + 1
    (measured,) = figures["shapes"]
    assert measured["cycles"] == len(taken)
    assert measured["tokens_per_cycle"] == pytest.approx(1 + sum(taken) / len(taken), abs=1e-4)
    assert 0 < sum(taken) < 3 * len(taken), "the toy must accept some drafts and refuse some"


def test_the_shipped_card_matches_its_figures_and_files():
    demo = REPOSITORY / "graphspec" / "demo"
    figures = json.loads((demo / "training.json").read_text())
    assert (demo / "README.md").read_text() == model_card(figures)
    tensors = load_file(demo / "eagle3" / "model.safetensors")
    kept = sum(t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d"))
    assert kept == figures["head"]["parameters"]
    assert tensors["lm_head.weight"].shape[0] == figures["head"]["draft_vocab_size"]
    assert figures["config"]["head"] == asdict(load_config("demo", []).head)
    assert figures["config"]["target"] == asdict(load_config("demo", []).target)
    assert sum(file.stat().st_size for file in demo.rglob("*.safetensors")) <= 12e6
