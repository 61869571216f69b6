"""The demo's drafts sharded over ranks: each rank reads only its part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphspec.config.catalog import load_object, resolve_variant
from graphspec.facts import read_model_facts
from graphspec.facts.folders import model_folder
from graphspec.models.target import load_target
from graphspec.models.vocabulary import sharded_head
from graphspec.plan.draft_parallel import of_rank
from tests.support.rank_threads import count_numbers_read

OWN_HEADS = ("eagle3", "p_eagle", "standalone")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "standalone", "p_eagle", "dflash"])
def test_a_rank_reads_the_bytes_of_a_draft_that_it_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_numbers_read(monkeypatch)
    variant, folder = resolve_variant(name), model_folder("demo", None)
    facts = read_model_facts(folder)
    whole = load_object(variant.facts)(folder.parent / str(variant.demo_draft), facts)

    def loaded(rank: int, size: int) -> tuple[int, int, nn.Module, nn.Module]:
        """Numbers read, numbers held that are not the target's, and both networks."""
        target = load_target(facts.of_rank(rank, size), whole.tap_layers, 64, torch.float32, "cpu")
        shared = {id(parameter) for parameter in target.parameters()}
        draft = whole if size == 1 else of_rank(whole, rank, size, layers=True, head=True)
        read[0] = 0
        network = load_object(variant.loader)(draft, target, 64, torch.float32, "cpu", None)
        return read[0], sum(p.numel() for p in network.parameters() if id(p) not in shared), network, target

    all_read, all_held, _, _ = loaded(0, 1)
    heads = []
    for rank in range(2):
        own_read, own_held, network, target = loaded(rank, 2)
        assert all_read - own_read == all_held - own_held and own_held < 0.8 * all_held
        head = sharded_head(network)
        assert head is not None and (head is not sharded_head(target)) == (name in OWN_HEADS)
        heads.append(head.token_Vr)
    # Together the ranks know every token that the draft can propose, under its target id.
    ids = torch.cat(heads)
    expected = network.target_token_Vd if network.target_token_Vd is not None else torch.arange(2048)
    assert torch.equal(ids, expected)
