"""``graphspec profile baseline=openai`` against our own server over HTTP: the command in docs/serving.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from graphspec.cli import main as cli
from graphspec.serve.limits import Keys
from tests.support.serving import MODEL, serving

if TYPE_CHECKING:
    from pathlib import Path

    from graphspec.api.llm import LLM
    from tests.support.engines import Pair

REQUESTS, ROUNDS, TOKENS = 3, 2, 12
KEY = "k3y-of-nobody"


def test_our_server_is_measured_next_to_plain_decoding(
    pair: Pair, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server drafts, the engine next to it does not: the same tokens, in chunks of several, and every one of them was served."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    with serving(llm, Keys([KEY])) as server:
        before = server.metric("vllm:generation_tokens_total")
        words = [
            "profile", "baseline=openai", f"url={server.url}/v1", f"profile.api_key={KEY}", f"model.path={pair.target}", "variant=none",
            "runtime=eager", "runtime.prefill_chunks=[8,16]", "workload=random", f"workload.requests={REQUESTS}", "workload.batch=2",
            "workload.input_tokens=9", f"workload.output_tokens={TOKENS}", f"profile.rounds={ROUNDS}", "profile.warm_up_seconds=0",
            "profile.generations=0", "profile.stages=false",
        ]  # fmt: skip
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        shown = capsys.readouterr()
        assert left.value.code == 0, shown.err
        assert server.metric("vllm:generation_tokens_total") - before == (ROUNDS + 1) * REQUESTS * TOKENS, "a warm-up, and the rounds"
        server.idle()
    [file] = (tmp_path / "results").iterdir()
    text = file.read_text(encoding="utf-8")
    assert KEY not in text + shown.out
    subject, api = (row for line in text.splitlines() if (row := json.loads(line)).get("kind") == "side")
    assert [subject["role"], api["role"]] == ["subject", "openai"] and api["side"] == f"openai {MODEL}"
    assert api["equal"] is True and f"{ROUNDS * REQUESTS} of {ROUNDS * REQUESTS} outputs" in api["equality"]
    assert subject["equal"] is True and subject["ratio"]["to"] == api["side"] and len(subject["ratio"]["rounds"]) == ROUNDS
    # What came with the first token is in no burst.
    assert 0 < sum(int(size) * count for size, count in api["burst_tokens"].items()) <= ROUNDS * REQUESTS * (TOKENS - 1)
    assert max(map(int, api["burst_tokens"])) > 1 and set(subject["burst_tokens"]) == {"1"}
    assert api["ttft_ms"]["count"] == ROUNDS * REQUESTS and api["aborted"] == 0
    assert api["acceptance_length"] is None and "cycle_ms" in api["not_measured"], "what happens inside is not on the wire"
