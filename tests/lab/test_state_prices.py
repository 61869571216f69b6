"""``graphspec plan`` for recurrent states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphspec.cli.main import main

from .test_planning import plan

NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"], "hidden_size": 4096, "intermediate_size": 21504, "vocab_size": 131072,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128, "max_position_embeddings": 8192,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip


def test_states_of_a_published_hybrid_are_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nemotron-H 8B: what a row's states take, what sixteen nodes record, and what a state per node would take and move."""
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON_H_8B))
    shape = ("variant=ngram", "variant.num_steps=5", "variant.topk=4", "variant.num_draft_tokens=16")
    words = (f"model.path={tmp_path}", "hardware=h200", "kernels=reference", "plan.batches=[1]", *shape)
    found = plan(capsys, *words)
    mixer = 4096 * (8192 + 8192 + 2048 + 128) + (8192 + 2048) * 5 + 3 * 128 + 8192 + 8192 * 4096
    attention, mlp = 4096 * (2 * 4096 + 2 * 1024), 2 * 4096 * 21504
    layers = 24 * mixer + 4 * attention + 24 * mlp + 53 * 4096
    assert found["parameters"]["target"] == layers + 2 * 131072 * 4096
    matrices, columns, record = 24 * 128 * 128 * 64 * 4, 24 * 3 * 10240 * 2, 24 * (10240 * 2 + 2 * 128 * 4)
    state = matrices + columns
    assert matrices == 96 * 2**20 and found["memory"]["kv_per_token"]["target"] == 4 * 2 * 8 * 128 * 2
    nodes = 16
    assert found["memory"]["states"] == {
        "state": state, "records": nodes * record, "snapshots": nodes * state, "traffic": 3 * state + 2 * nodes * record,
        "snapshot_traffic": (3 + nodes) * state,
    }  # fmt: skip
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert "a state per node, which is not kept, would take" in capsys.readouterr().out
