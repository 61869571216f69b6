"""Third-party clients: OpenAI's own, lm-eval, guidellm and aiperf. ``make test-clients`` installs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.api.llm import LLM, model_folder
from graphspec.serve.limits import Keys
from recipes.corpus import load_corpus
from tests.support.serving import MODEL, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.clients
HERE = Path(__file__).parent
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LIMIT = 900
"""Seconds for one client."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, which has no chat template, with one."""
    folder = tmp_path_factory.mktemp("demo") / "target"
    shutil.copytree(model_folder("demo"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def engines(target: Path) -> Iterator[dict[str, LLM]]:
    draft = model_folder("demo").parent / "eagle3"
    common = {"runtime": "eager", "max_rows": 8}
    with LLM(target, variant="eagle3", draft=draft, **common) as eagle3, LLM(target, variant="none", **common) as none:
        yield {"eagle3": eagle3, "none": none}


def run(words: list[str | Path], folder: Path, **variables: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none", **variables}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def test_openai(clients: Path, engines: dict[str, LLM], tmp_path: Path) -> None:
    with serving(engines["eagle3"]) as server, serving(engines["eagle3"], Keys(["right"])) as guarded:
        out = run([clients / "python", HERE / "openai_client.py", f"{server.url}/v1", f"{guarded.url}/v1"], tmp_path)
        server.idle()
    print(out)


def tasks(folder: Path, count: int = 24) -> None:
    """Two tasks over held-out code: choosing the next line, and continuing the text."""
    texts = [text for text in load_corpus().held_out.values() if len(text) > 1200][:count]
    lines = [[line for line in text[300:1200].splitlines() if line.strip()] for text in texts]
    rows = []
    for place, own in enumerate(lines):
        others = [lines[(place + step) % len(lines)][3] for step in (1, 2, 3)]
        choices = sorted({own[3], *others})
        rows.append({"context": "\n".join(own[:3]) + "\n", "choices": choices, "gold": choices.index(own[3]), "next": own[3].strip()})
    (folder / "rows.json").write_text(json.dumps(rows))
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files: {folder / 'rows.json'}\ntest_split: train\ndoc_to_text: '{{{{context}}}}'\n"
    choice = (
        "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    until = (
        "output_type: generate_until\ndoc_to_target: next\n"
        "generation_kwargs:\n  until: ['\\n\\n']\n  max_gen_toks: 32\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    (folder / "next_line.yaml").write_text(f"task: next_line\n{head}target_delimiter: ''\n{choice}")
    (folder / "go_on.yaml").write_text(f"task: go_on\n{head}target_delimiter: ''\n{until}")


def scores(clients: Path, server: Served, target: Path, folder: Path, name: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Scores by task, and what every sample was answered."""
    arguments = (
        f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={target},num_concurrent=4,tokenized_requests=True,max_length=512"
    )
    out = folder / name
    words = ["--model", "local-completions", "--model_args", arguments, "--tasks", "next_line,go_on", "--include_path", folder]
    run([clients / "lm_eval", "run", *words, "--output_path", out, "--log_samples", "--batch_size", "1"], folder)
    [results] = out.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    answers = {}
    for file in out.rglob("samples_*.jsonl"):
        rows = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row["doc_id"])
        answers["go_on" if "go_on" in file.name else "next_line"] = [row["resps"] for row in rows]
    figures = {task: {key: value for key, value in values.items() if isinstance(value, float)} for task, values in found.items()}
    return figures, answers


def test_lm_eval_scores_are_those_of_plain_decoding(clients: Path, engines: dict[str, LLM], target: Path, tmp_path: Path) -> None:
    """By log-probabilities of given lines, and by generated ones; not only the scores are equal, every generated text is."""
    tasks(tmp_path)
    found = {}
    for name, llm in engines.items():
        with serving(llm) as server:
            found[name] = scores(clients, server, target, tmp_path, name)
            server.idle()
    print(json.dumps(found["eagle3"][0]))
    assert found["eagle3"][0] == found["none"][0] and set(found["none"][0]) == {"next_line", "go_on"}
    assert found["eagle3"][1]["go_on"] == found["none"][1]["go_on"]
    assert engines["eagle3"].metrics is not None


def test_guidellm(clients: Path, engines: dict[str, LLM], target: Path, tmp_path: Path) -> None:
    """A concurrent run, whose token counts come from usage."""
    count, new = 16, 24
    with serving(engines["eagle3"]) as server:
        words = [
            "run", "--backend", f"kind=openai_http,target={server.url}",
            "--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={new}", "--profile", "kind=concurrent,streams=4",
            "--tokenizer", f"kind=huggingface_auto,model={target}",
            "--constraint", f"kind=max_requests,count={count}", "--disable-progress",
        ]  # fmt: skip
        run([clients / "guidellm", *words], tmp_path)
        server.idle()
        assert server.metric("vllm:generation_tokens_total") >= count * new
        assert server.metric("vllm:request_success_total", finished_reason="length") >= count


def test_aiperf_reads_acceptance(clients: Path, engines: dict[str, LLM], target: Path, tmp_path: Path) -> None:
    """From ``metrics.speculative_decoding`` of every stream, as from vLLM; all of them together are the server's own counters."""
    count, new = 12, 24
    with serving(engines["eagle3"]) as server:
        words = [
            "profile", "--model", MODEL, "--url", server.url, "--endpoint-type", "completions", "--streaming", "--concurrency", "4",
            "--request-count", str(count), "--isl", "48", "--osl", str(new), "--tokenizer", target, "--extra-inputs", "ignore_eos:true",
            "--use-server-token-count", "--workers-max", "1", "--ui-type", "simple", "--no-gpu-telemetry", "--no-server-metrics",
            "--artifact-dir", tmp_path / "out",
        ]  # fmt: skip
        # Offline it takes a name for a folder of the cache alone.
        run([clients / "aiperf", *words], tmp_path, HF_HUB_OFFLINE="")
        server.idle()
        totals = {
            "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
            "total_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
            "total_spec_decode_steps": "vllm:spec_decode_num_drafts_total",
        }
        [export] = (tmp_path / "out").rglob("profile_export_aiperf.json")
        found = json.loads(export.read_text())
        assert {name: found[name]["avg"] for name in totals} == {name: server.metric(metric) for name, metric in totals.items()}
        assert found["spec_decode_acceptance_length"]["avg"] > 1 and found["total_spec_decode_steps"]["avg"] > count
