"""EAGLE-3 heads with other attention and other inputs than the first published ones: equations, features, and whole engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from graphspec.api.llm import LLM, SamplingParams
from graphspec.drafters.eagle3.facts import read_eagle3_facts
from graphspec.drafters.eagle3.loading import load_eagle3
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import (
    LATENT,
    MODELOPT,
    VOCAB_SIZE,
    DenseAttention,
    build_hf,
    eagle3_tensors,
    latent_eagle3_tensors,
    publish_eagle3,
    write_hf,
)
from tests.support.eagle_reference import eagle3_fuse, eagle3_step
from tests.support.engines import SMALL, prompts

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LAYERS, WINDOW, THETA = 4, 5, 500.0
SLIDING, FULL = "sliding_attention", "full_attention"
MLA = {**LATENT, "q_lora_rank": 10, "num_attention_heads": 4, "model_type": "deepseek_v3"}
ROPE = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLMEagle3"], "layer": MLA}
ALONE = {"taps": None, "eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}}
LAST = (1, 2, LAYERS)


def alone(**sizes: Any) -> dict[str, Tensor]:
    """Without a projection: the head reads one hidden state."""
    tensors = eagle3_tensors(**sizes)
    del tensors["fc.weight"]
    return tensors


def strong(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With an attention that weighs more than the rest, so that what it sees decides on the draft."""
    factors = {name: 6 if name.endswith("o_proj.weight") else 2 if name.endswith("proj.weight") else 1 for name in tensors}
    return {name: tensor * factors[name] if "self_attn" in name else tensor for name, tensor in tensors.items()}


HEADS: dict[str, tuple[dict[str, Tensor], str, dict[str, Any], dict[str, Any]]] = {
    # name: tensors, layout, arguments of publish_eagle3, options of the equations
    "sliding": (eagle3_tensors(), "speculators", {"layer": {"layer_types": [SLIDING], "sliding_window": WINDOW}}, {"windows": (WINDOW,)}),
    "sliding in one of two layers": (
        eagle3_tensors(num_layers=2),
        "sglang",
        {"layer": {"layer_types": [FULL, SLIDING], "sliding_window": WINDOW, "use_sliding_window": False}},
        {"windows": (None, WINDOW)},
    ),
    "a window that is off": (eagle3_tensors(), "sglang", {"layer": {"sliding_window": WINDOW, "use_sliding_window": False}}, {}),
    "partial rotary": (eagle3_tensors(), "sglang", {"layer": {"partial_rotary_factor": 0.25}}, {"rotary": 4}),
    "partial rotary of transformers 5": (eagle3_tensors(), "speculators", {"layer": ROPE}, {"rotary": 8}),
    "latent": (latent_eagle3_tensors(), "sglang", DEEPSEEK, {"latent": LATENT}),
    "latent, queries not compressed": (
        latent_eagle3_tensors(query_rank=None),
        "sglang",
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "layer": {**MLA, "q_lora_rank": None, "n_routed_experts": 384}},
        {"latent": LATENT},
    ),
    "the last layer": (eagle3_tensors(), "sglang", {"taps": LAST}, {}),
    "the final hidden state": (alone(), "sglang", ALONE, {}),
    "the final hidden state, projected": (eagle3_tensors(num_taps=1), "modelopt", ALONE, {}),
    "two layers of ModelOpt": (eagle3_tensors(num_layers=2), "sglang, numbered", {"eagle_config": MODELOPT}, {}),
}


def publish(path: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    """A head of the table, with these tensors."""
    _, layout, arguments, _ = HEADS[name]
    layer = {"max_position_embeddings": 96, **arguments.get("layer", {})}
    folder = publish_eagle3(path, tensors, layout.removesuffix(", numbered"), **{"taps": (1, 2, 3), **arguments, "layer": layer})
    if layout.endswith(", numbered"):
        # Megatron numbers the layers under midlayer, and calls the norm before every attention hidden_norm.
        names = {key: key.replace("midlayer.", "midlayer.0.").replace("layers.", "midlayer.") for key in tensors}
        later = "midlayer.1.input_layernorm"
        save_file(
            {names[key].replace(later, "midlayer.1.hidden_norm"): value for key, value in tensors.items()}, folder / "model.safetensors"
        )
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = build_hf("llama", num_hidden_layers=LAYERS, max_position_embeddings=96)
    return write_hf(model, tmp_path_factory.mktemp("target")), model


def load(path: Path, target_path: Path) -> Any:
    target_facts = read_model_facts(target_path)
    facts = read_eagle3_facts(path, target_facts)
    network = load_target(target_facts, facts.tap_layers, 96, torch.float32, "cpu")
    return load_eagle3(facts, network, 96, torch.float32, "cpu"), network


@torch.inference_mode()
@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_the_equations(name: str, tmp_path: Path, target: tuple[Path, Any]) -> None:
    raw, _, _, options = HEADS[name]
    draft, network = load(publish(tmp_path, name, raw), target[0])
    feature = torch.randn(1, 7, draft.facts.feature_size, generator=torch.Generator().manual_seed(5))
    tokens, attention = torch.tensor([[4, 9, 60, 0, 9, 33, 2]]), DenseAttention.prompt(1, 7)
    attention.position_BT = attention.position_BT + 40
    found, expected = draft.fuse(feature), eagle3_fuse(raw, feature[0], 48)
    for step in range(2):
        found = draft(tokens, found, attention, step)
        expected, normed = eagle3_step(raw, network.embed_tokens.weight[tokens[0]], expected, 40, theta=THETA, **options)
        torch.testing.assert_close(found[0], expected)
        torch.testing.assert_close(draft.logits(found, step)[0], normed @ raw["lm_head.weight"].T)


def features(model: Any, name: str, tokens: list[int]) -> Tensor:
    """What a head of the table reads of tokens, by transformers: streams between layers, or the state after the final norm."""
    streams: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, inputs, out: streams.append(out)) for layer in model.model.layers]
    out = model.model(torch.tensor([tokens])).last_hidden_state
    for hook in hooks:
        hook.remove()
    if HEADS[name][2].get("taps", ()) is None:
        return out[0].double()
    taps = HEADS[name][2].get("taps", (1, 2, 3))
    return torch.cat([streams[tap - 1][0] for tap in taps], -1).double()


def drafted(model: Any, name: str, tokens: list[int], steps: int) -> list[int]:
    """The chain that the equations draft after ``tokens``, the last of which is the root: every row recomputed, in float64."""
    raw, _, _, options = HEADS[name]
    w = {key: tensor.double() for key, tensor in strong(raw).items()}
    embedding_VH, hidden = model.model.embed_tokens.weight.double(), eagle3_fuse(w, features(model, name, tokens[:-1]), 48)
    known, chain = list(tokens[1:]), []
    for _ in range(steps):
        out, normed = eagle3_step(w, embedding_VH[known], hidden, 0, theta=THETA, **options)
        index = int((normed[-1] @ w["lm_head.weight"].T).argmax())
        chain.append(index + int(raw["d2t"][index]))
        hidden, known = torch.cat((hidden, out[-1:])), [*known, chain[-1]]
    return chain


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_engines_draft_what_the_equations_draft(name: str, tmp_path: Path, target: tuple[Path, Any]) -> None:
    """Over a prompt of several chunks; and the output is that of plain decoding."""
    path, model = target
    settings = {**SMALL, "page_size": 4, "num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    llm = LLM(path, variant="eagle3", draft=publish(tmp_path, name, strong(HEADS[name][0])), **settings)
    prompt = prompts(1, (19,), VOCAB_SIZE)[0]
    tree = llm.draft_tree(prompt)
    assert list(tree.token_N[1:]) == drafted(model, name, [*prompt, tree.token_N[0]], 3)
    params = [SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=4)]
    plain = LLM(path, variant="none", **SMALL)
    assert [out.token_ids for out in llm.generate([prompt] * 2, params)] == [out.token_ids for out in plain.generate([prompt] * 2, params)]
