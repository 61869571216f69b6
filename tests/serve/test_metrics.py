"""Metrics: vLLM's names, and figures that agree with the outputs."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphspec import SamplingParams
from tests.support.engines import CHAIN
from tests.support.serving import MODEL, PATIENCE, raw_post, serving, wait_for

if TYPE_CHECKING:
    from tests.support.engines import Pair

SCRAPED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits", "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_preemptions", "vllm:request_success",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos", "graphspec:cycle_seconds",
    "graphspec:programs", "graphspec:build_seconds", "graphspec:requests_refused", "graphspec:requests_preparing",
}  # fmt: skip
"""Names that dashboards, aiperf and ``vllm bench serve`` look for, and ours."""
PARAMS = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
PROMPTS = ["w7 w8", "w9 w10 w11", "w12"]


def test_counters_match_the_outputs(pair: Pair) -> None:
    with pair.llm(**CHAIN, max_rows=2) as llm, serving(llm) as server:
        outputs = llm.generate(PROMPTS, SamplingParams(**PARAMS))
        before = llm.load().cycles
        for prompt in PROMPTS:
            server.complete(prompt=prompt, **PARAMS)
        server.idle()
        lines = server.client.get("/metrics").text.splitlines()
        drafts = [line for line in lines if line.startswith("vllm:spec_decode_num_drafts_total")]
        found = {f"vllm:{name}": server.metric(f"vllm:{name}_total") for name in ("prompt_tokens", "generation_tokens")}
        assert found == {"vllm:prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs), "vllm:generation_tokens": 60}
        runs = [tokens for output in outputs for tokens in output.timing.cycle_tokens]
        assert drafts == [f'vllm:spec_decode_num_drafts_total{{model_name="{MODEL}"}} {float(len(runs))}']
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") == 4 * len(runs)
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") == sum(runs) - len(runs) > 0
        positions = [server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(depth)) for depth in range(4)]
        assert positions == [sum(tokens > depth + 1 for tokens in runs) for depth in range(4)]
        assert server.metric("vllm:request_success_total", finished_reason="length") == 3
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert server.metric(f"vllm:{name}_seconds_count") == 3
        assert server.metric("vllm:inter_token_latency_seconds_count") == 57
        counted = sum(times.count for times in llm.load().cycles.values()) - sum(times.count for times in before.values())
        assert counted >= len(runs)
        shown = sum(
            server.metric("graphspec:cycle_seconds_count", bucket=str(bucket), depth=str(depth)) for bucket, depth in llm.load().cycles
        )
        assert shown == counted + sum(times.count for times in before.values())


def test_every_name_is_there_with_the_models_label(pair: Pair) -> None:
    with pair.llm(**CHAIN, max_rows=2) as llm, serving(llm) as server:
        server.complete(prompt="w7", max_tokens=3)
        server.client.get("/nothing")
        response = server.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert set(families) >= SCRAPED
        assert all(sample.labels["model_name"] == MODEL for family in families.values() for sample in family.samples)


def test_gauges_follow_the_engine(pair: Pair) -> None:
    from tests.support.serving import held_after_the_first_token

    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm) as server:
        with held_after_the_first_token(llm):
            streams = [
                server.client.send(server.client.build_request("POST", "/v1/completions", json=body), stream=True)
                for body in [{"prompt": "w7", "stream": True, **PARAMS}] * 2
            ]
            wait_for(lambda: llm.load().waiting == 1)
            assert (server.metric("vllm:num_requests_running"), server.metric("vllm:num_requests_waiting")) == (1, 1)
            assert 0 < server.metric("vllm:kv_cache_usage_perc") <= 1
            for stream in streams:
                stream.close()
        server.idle()
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2


def test_acceptance_of_one_response(pair: Pair) -> None:
    """The fields that vLLM has, which sum up to the counters; in a stream they come with the usage."""
    with pair.llm(**CHAIN, max_rows=2) as llm, serving(llm) as server:
        found = server.complete(prompt=PROMPTS[0], **PARAMS)["metrics"]["speculative_decoding"]
        [output] = llm.generate([PROMPTS[0]], SamplingParams(**PARAMS))
        runs = output.timing.cycle_tokens
        histogram = [sum(tokens == accepted + 1 for tokens in runs) for accepted in range(5)]
        accepted, drafted = sum(runs) - len(runs), 4 * len(runs)
        assert accepted > 0
        assert found == {
            "mean_acceptance_length": 1 + accepted / len(runs),
            "draft_acceptance_rate": accepted / drafted,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {"4": histogram},
            "num_spec_steps": len(runs),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": 4,
        }
        counters = {
            "num_drafts": "num_spec_steps",
            "num_draft_tokens": "num_draft_tokens",
            "num_accepted_tokens": "num_accepted_draft_tokens",
        }
        for counter, name in counters.items():
            assert server.metric(f"vllm:spec_decode_{counter}_total") == found[name]
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = server.chunks("/v1/completions", prompt=PROMPTS[0], **PARAMS, **usage)
        assert [chunk.get("metrics") for chunk in chunks] == [None] * (len(chunks) - 1) + [{"speculative_decoding": found}]
        message = [{"role": "user", "content": "w7"}]
        assert server.chat(messages=message, **PARAMS)["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
        assert "metrics" not in server.complete(prompt=PROMPTS, **PARAMS)
        plain = server.complete(prompt=PROMPTS[0], speculate=False, **PARAMS)["metrics"]["speculative_decoding"]
        assert (plain["num_spec_steps"], plain["acceptance_histogram"], plain["mean_acceptance_length"]) == (0, [0] * 5, 1.0)


def test_what_waits_before_the_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that has not come, and a text that is being encoded."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm) as server:
        go, encode = threading.Event(), llm.tokenizer.encode
        monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **options: [go.wait(PATIENCE), encode(text, **options)][1])
        half, whole = server.connect(), server.connect()
        half.sendall(raw_post(b"{", length=100))
        whole.sendall(raw_post(json.dumps({"prompt": "w7", **PARAMS}).encode()))
        for stage in ("reading", "encoding"):
            wait_for(lambda stage=stage: server.metric("graphspec:requests_preparing", stage=stage) == 1)
        assert server.metric("graphspec:requests_preparing", stage="compiling") == 0
        go.set()
        half.close()
        assert whole.recv(65536).startswith(b"HTTP/1.1 200 ")
        whole.close()
        for stage in ("reading", "encoding"):
            wait_for(lambda stage=stage: server.metric("graphspec:requests_preparing", stage=stage) == 0)
        server.idle()
