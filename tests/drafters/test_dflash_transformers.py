"""A block drafter of ours in transformers' own DFlash decoding: the same drafts in the same cycles.

transformers has the backbone as the assistant of Muse-Glimmer, under other names for the projection of the context; its blocks are
bidirectional, as DFlash's are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import SMALL, prompts
from tests.support.parallel_checkpoints import HIDDEN, MASK, TAPS, THETA, dflash_tensors, favouring_target, write_dflash

if TYPE_CHECKING:
    from pathlib import Path

BLOCK, NEW = 6, 30
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant(tensors: dict[str, torch.Tensor]) -> Any:
    """The draft as transformers runs it."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": THETA}, max_position_embeddings=96,
        layer_types=["full_attention"] * 2, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[i - 1 for i in TAPS],
        bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict({RENAMED.get(name, name): tensor for name, tensor in tensors.items()})
    return model


@torch.no_grad()
def test_transformers_drafts_the_same_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    pair = favouring_target(tmp_path)
    tensors = dflash_tensors(pair)
    tensors["norm.weight"][0] *= 4  # none but favourites are drafted, so that some are right
    draft = write_dflash(tmp_path / "draft", tensors, block=BLOCK)
    llm = LLM(pair.target, variant="dflash", draft=draft, **{**SMALL, "num_steps": BLOCK - 1, "topk": 1, "num_draft_tokens": BLOCK})
    drafted: list[tuple[list[int], list[int]]] = []
    propose = DFlashTokenCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = propose(self, input_ids, *args, **kwargs)
        if found[0].shape[1] > input_ids.shape[1]:
            drafted.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    lengths = set()
    for prompt in prompts(2, (9, 17), VOCAB_SIZE):
        drafted.clear()
        ids_T = torch.tensor([prompt])
        # Without a mask, transformers takes token 0 of the prompt for padding.
        theirs = pair.hf.generate(
            ids_T, attention_mask=torch.ones_like(ids_T), assistant_model=assistant(tensors), speculation_type="dflash",
            max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=NEW, ignore_eos=True))
        assert output.token_ids == theirs == pair.greedy(prompt, NEW, ignore_eos=True)
        runs = [after - before for before, after in pairwise(len(known) for known, _ in drafted)]
        # The last ones may be cut, each in its own way.
        assert output.timing.cycle_tokens[: len(runs) - 1] == runs[:-1] and len(runs) > 8
        lengths |= set(runs)
        for known, tokens in drafted[:8]:
            tree = llm.draft_tree(known[:-1])
            assert tree.token_N[0] == known[-1]
            assert tree.token_N[1:] == tokens
    assert len(lengths) > 1
