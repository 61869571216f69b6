"""The console script: help without torch, answers on stdout, one line per error, meaningful exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from graphspec.api.outputs import Metrics, Output, StreamEvent, TreeSnapshot
from graphspec.cli import inspect
from graphspec.cli import main as cli
from graphspec.cli.inspect import draw_tree
from graphspec.config.catalog import VARIANTS
from graphspec.errors import ConfigError, RequestError, ResourceError
from graphspec.graphs.capture import CaptureRecord
from graphspec.graphs.memory import MemoryLine, MemoryPlan
from graphspec.host.progress import progress_bars
from graphspec.plan.runtime import resolve_runtime
from graphspec.shapes import NEUTRAL

METRICS = Metrics(
    cycles=7, acceptance_length=2.5, accepted_per_position=[0.9, 0.6], prefill_seconds=0.1, decode_seconds=0.2, tokens_per_second=123.0
)
TREE = TreeSnapshot(
    token_N=[1, 2, 3, 4, -1],
    parent_N=[-1, 0, 0, 1, -1],
    depth_N=[0, 1, 1, 2, 0],
    accepted=[True, True, False, True, False],
    text_N=["def", " f", " [bold]g", "(", ""],
)


class FakeLLM:
    """A stand-in engine with the methods that the command line uses: echoes prompts, or refuses them on demand."""

    made: list[FakeLLM] = []  # noqa: RUF012

    def __init__(self, config):
        self.config, self.metrics, self.calls = config, None, []
        device = "cuda" if config.runtime.name == "captured" else "cpu"
        self.plan = SimpleNamespace(
            describe=lambda: {"buckets": [1, 2], "num_draft_tokens": 16, "accept_width": 6},
            shape=SimpleNamespace(num_steps=5, topk=4, num_draft_tokens=16),
            device=device,
            dtype="bfloat16",
            sampling_defaults=NEUTRAL,
            runtime=resolve_runtime(config.runtime.name, device),
        )
        self.ends = {0: "configuration", 7: "chat template"}
        FakeLLM.made.append(self)

    @classmethod
    def from_config(cls, config, progress=None):
        if callable(progress):
            progress("load", 1, 1)
        return cls(config)

    def token_text(self, token):
        return f"<{token}>"

    def warm_up(self, requests=1, *, sampling=False):
        pass

    def check(self, prompts, params=None):
        return ["prompt: refused early" if "early" in prompt else None for prompt in prompts]

    def generate(self, prompts, params, progress=None):
        prompts = [prompts] if isinstance(prompts, str) else prompts
        params = params if isinstance(params, list) else [params] * len(prompts)
        self.calls.append((prompts, params))
        self.metrics = METRICS
        return [self._output(i, prompt) for i, prompt in enumerate(prompts)]

    def _output(self, index, prompt):
        failed = "refuse" in prompt
        return Output(
            index=index,
            prompt_token_ids=[1],
            token_ids=[] if failed else [5, 6],
            text="" if failed else f"<{prompt}>",
            finish_reason="error" if failed else "stop",
            error="prompt: refused" if failed else None,
            metrics=METRICS,
            seed=index,
        )

    def stream(self, prompt, params):
        if "refuse" in prompt:
            raise RequestError("prompt", "something servable", "refuse")
        self.calls.append(([prompt], [params]))
        self.metrics = METRICS
        for i, piece in enumerate(("one ", "[bold]two")):
            yield StreamEvent(index=0, text=piece, token_ids=[5 + i], finished=i == 1)

    memory = MemoryPlan((MemoryLine("KV pools", 96 * 1024),), 1024**2, 0.5, page_bytes=1024, page_size=16, num_pages=96, min_pages=2)

    def capture_report(self):
        return [CaptureRecord("cycle of 2 lanes", 1.5), CaptureRecord("cycle of 1 lanes", 0.5, 0.25, 2048)]

    decoders: ClassVar[dict[str, str]] = {"target": "one native op per pass", "draft": "op by op: mixtures of experts"}

    def slots(self):
        return [("token_B", (8,), "int64", 64), ("kv", (4, 4), "float32", 3 * 1024**2)]

    def draft_tree(self, prompt):
        return TREE


@dataclass
class FakeReport:
    equal: bool
    launches: int
    cycle: int | None = None
    stage: str | None = None
    slot: str | None = None
    detail: str = ""


def fake_diff(config, left, right, prompt):
    return FakeReport(True, 4) if left == right else FakeReport(False, 4, 3, "verify", "logits_BNV", prompt)


@dataclass
class Run:
    code: int
    out: str
    err: str
    engines: list[FakeLLM] = field(default_factory=list)


@pytest.fixture
def run(monkeypatch, capsys):
    module = ModuleType("graphspec.api.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "graphspec.api.llm", module)
    module = ModuleType("graphspec.api.diff")
    module.diff = fake_diff
    monkeypatch.setitem(sys.modules, "graphspec.api.diff", module)
    monkeypatch.setattr(FakeLLM, "made", [])

    def _run(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_:
            cli.main(words)
        captured = capsys.readouterr()
        return Run(exit_.value.code, captured.out, captured.err, FakeLLM.made)

    return _run


def test_one_prompt_is_streamed_and_speed_goes_to_stderr(run):
    result = run("generate", "prompt=def fib(n):", "variant=none", "sampling.max_tokens=9", "sampling.stop_token_ids=[4]")
    assert (result.code, result.out) == (0, "one [bold]two\n")
    assert result.err == "123.0 tokens/s, 7 cycles, 2.50 tokens per cycle\n"
    [engine] = result.engines
    [(prompts, [params])] = engine.calls
    assert (engine.config.variant.name, prompts, params.max_tokens, params.stop_token_ids) == ("none", ["def fib(n):"], 9, (4,))


def test_json_is_one_document_on_the_last_line(run):
    result = run("generate", "prompt=x", "format=json")
    document = json.loads(result.out.splitlines()[-1])
    assert result.code == 0
    assert document["outputs"] == [{"text": "<x>", "token_ids": [5, 6], "finish_reason": "stop", "seed": 0, "stop_reason": None}]
    assert document["metrics"] == {
        "cycles": 7, "acceptance_length": 2.5, "accepted_per_position": [0.9, 0.6], "prefill_seconds": 0.1, "decode_seconds": 0.2,
        "tokens_per_second": 123.0, "lossy": False, "synthetic": False, "cached_tokens": 0, "numerics": "fast",
        "activations": "full",
    }  # fmt: skip
    assert (document["variant"], document["model"], document["runtime"]) == ("eagle3", "demo", "compiled")


def test_a_bad_request_fails_alone(run):
    result = run("generate", 'prompt=["a", "refuse", "b"]', "format=json")
    outputs = json.loads(result.out)["outputs"]
    assert result.code == 0
    assert [output["finish_reason"] for output in outputs] == ["stop", "error", "stop"]
    assert outputs[1]["error"] == "prompt: refused"
    assert "request 1: prompt: refused" in result.err


def test_exit_code_2_when_all_requests_failed(run):
    assert run("generate", 'prompt=["refuse", "refuse too"]', "format=json").code == 2
    result = run("generate", "prompt=refuse")
    assert (result.code, result.out) == (2, "")
    assert result.err == "graphspec: prompt: expected something servable, found refuse\n"


def test_several_prompts_as_text(run):
    result = run("generate", 'prompt=["a\\nb", "c"]')
    assert result.out == "--- 0: a\n<a\nb>\n--- 1: c\n<c>\n"


def test_prompt_from_standard_input_and_file(run, tmp_path):
    assert run("generate", stdin="def f():\n").engines[0].calls[0][0] == ["def f():\n"]
    (tmp_path / "p.txt").write_text("two\nlines")
    assert run("generate", f"prompt_file={tmp_path}/p.txt").engines[-1].calls[0][0] == ["two\nlines"]


def test_jsonl_requests_carry_their_own_sampling(run, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '"a"\n\n{"prompt": "b", "max_tokens": 3, "temperature": 1, "stop_token_ids": [7], "top_p": 1, '
        '"logit_bias": {"4": -1}, "logprobs": 2}\n'
    )
    [(prompts, params)] = run("generate", f"prompt_file={path}", "sampling.max_tokens=5").engines[0].calls
    assert prompts == ["a", "b"]
    assert [(p.max_tokens, p.temperature, p.stop_token_ids) for p in params] == [(5, None, ()), (3, 1, (7,))]
    assert [(p.logit_bias, p.logprobs) for p in params] == [({}, None), ({4: -1.0}, 2)]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "one JSON value per line"),
        ("3", '"prompt"'),
        ('{"prompt": 3}', '"prompt"'),
        (
            '{"prompt": "a", "top_q": 1}',
            "top_q: found top_q = 1 (did you mean top_p?), expected one of prompt, messages, max_tokens",
        ),
        (
            '{"prompt": "a", "max_new_tokens": 1}',
            "max_new_tokens: found max_new_tokens = 1 (here it is max_tokens, as in vLLM), expected one of prompt",
        ),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "token ids and numbers"),
        ('{"prompt": "a", "logprobs": "x"}', "expected an integer"),
        ('{"prompt": "a", "max_tokens": "many"}', "expected an integer"),
        ('{"prompt": "a", "max_tokens": true}', "expected an integer"),
    ],
)
def test_a_malformed_jsonl_line_is_named(run, tmp_path, line, part):
    path = tmp_path / "requests.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    result = run("generate", f"prompt_file={path}")
    assert (result.code, result.engines) == (2, [])
    assert f"{path}:2" in result.err
    assert part in result.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("generate",), "prompt=TEXT"),
        (("generate", "prompt_file=/no/such/file"), "readable"),
        (
            ("generate", "prompt=x", "variant=eagle9"),
            "one of assistant, dflash, eagle, eagle3, mtp, ngram, ngram_trie, none, p_eagle, standalone",
        ),
        (("teach",), "generate, chat, inspect, diff, demo"),
        (("inspect", 'prompt=["a", "b"]'), "one prompt"),
        (("demo", "variant=none"), "one that speculates"),
    ],
)
def test_complaints_are_one_line_and_exit_code_2(run, words, part):
    result = run(*words)
    assert (result.code, result.out, result.engines) == (2, "", [])
    assert result.err.startswith("graphspec: ")
    assert result.err.count("\n") == 1
    assert part in result.err


def test_inspect_shows_plan_slots_buckets_and_tree(run):
    result = run("inspect")
    assert result.code == 0
    for part in ("token_B", "[8]", "64 B", "3.0 MiB", "2 slots", "num_draft_tokens", "32", "+ ' f'", "- ' [bold]g'"):
        assert part in result.out
    for part in ("ends of text", "0 '<0>' (configuration); 7 '<7>' (chat template)"):
        assert part in result.out
    for part in ("target decoder", "one native op per pass", "draft decoder", "op by op: mixtures of experts"):
        assert part in result.out
    for part in ("96.0 KiB", "512.0 KiB allowed: 0.5 of 1.0 MiB", "that fits: 511", "cycle of 1 lanes", "0.25 s", "2.0 KiB"):
        assert part in result.out


def test_diff_names_the_slot_and_exits_1(run):
    result = run("diff", "left=eager", "right=compiled", "prompt=p")
    assert (result.code, result.err) == (1, "")
    assert "cycle 3" in result.out
    assert "verify" in result.out
    assert "logits_BNV" in result.out
    same = run("diff", "left=eager", "right=eager")
    assert (same.code, same.out) == (0, "eager and eager: no slot differs in 4 launches\n")
    document = json.loads(run("diff", "format=json").out)
    assert (document["left"], document["right"], document["equal"], document["slot"]) == ("eager", "compiled", False, "logits_BNV")


def test_demo_compares_and_draws(run):
    result = run("demo", "model=demo", "prompt=def f", "runtime=captured", "variant.topk=1")
    assert result.code == 0
    engines = [(engine.config.runtime.name, engine.config.variant.name, engine.config.variant.topk) for engine in result.engines]
    assert engines == [("eager", "eagle3", 4), ("captured", "eagle3", 1), ("captured", "none", None)]
    assert "\n\ndef fone [bold]two\n" in result.out
    assert result.out.startswith("From the eager program")
    assert re.search(r"^compiling the cycle of eagle3: [0-9.]+ s$", result.err, re.MULTILINE)
    for part in ("tokens/s", "123.0", "1.00", "2.50", "0.90 0.60", "+ 'def'", "same 2 tokens"):
        assert part in result.out


def test_demo_refuses_to_praise_different_output(run, monkeypatch):
    def differing(self, index, prompt):
        return replace(self._honest_output(index, prompt), token_ids=[len(self.config.variant.name)])

    monkeypatch.setattr(FakeLLM, "_honest_output", FakeLLM._output, raising=False)
    monkeypatch.setattr(FakeLLM, "_output", differing)
    result = run("demo", "model=demo", "runtime=eager")
    assert result.code == 2
    assert "the tokens of none" in result.err
    assert "tokens/s" not in result.out


def test_drawn_tree_has_its_shape():
    console = Console(file=io.StringIO(), width=60)
    console.print(draw_tree(TREE))
    lines = console.file.getvalue().splitlines()
    assert [line.strip() for line in lines] == ["+ 'def'", "├── + ' f'", "│   └── + '('", "└── - ' [bold]g'"]
    with pytest.raises(ResourceError, match="parent_N"):
        draw_tree(TreeSnapshot(token_N=[1, 2], parent_N=[-1, 1], depth_N=[0, 1], accepted=[True, False], text_N=["a", "b"]))


def test_progress_is_silent_without_a_terminal_and_drawn_with_one():
    plain, terminal = (Console(file=io.StringIO(), force_terminal=force, width=80) for force in (False, True))
    for console in (plain, terminal):
        with progress_bars(console) as progress:
            progress("compile", 1, 2)
            progress("compile", 2, 2)
    assert plain.file.getvalue() == ""
    assert "compile" in terminal.file.getvalue()


def test_bytes():
    assert [inspect.spell_bytes(n) for n in (0, 1023, 1536, 5 * 1024**3)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]


# In a process of their own: what a user's shell sees, and what is not imported on the way.
WATCHED = "import sys; from graphspec.cli.main import main\ntry: main()\nfinally: assert not {'torch', 'numpy'} & set(sys.modules)"


def shell(*words, cwd=None, **env):
    command = [sys.executable, "-c", WATCHED, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL, env=os.environ | env, timeout=60)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--help",), "usage: graphspec COMMAND"),
        (("generate", "--help"), "prompt_file=PATH"),
        (("diff", "-h"), "left=eager"),
        (("--version",), "graphspec 0."),
        (("generate", "--cfg", "job", "experiment=demo_tree"), "num_draft_tokens: 16"),
        (("--cfg", "job", "--package", "sampling"), "max_tokens: 128"),
        (("--info", "defaults"), "variant/eagle3"),
        (("--shell-completion", "install=bash"), "hydra_bash_completion"),
    ],
    ids=["help", "generate help", "diff help", "version", "generate cfg", "cfg package", "info", "completion"],
)
def test_help_and_configuration_need_no_torch(words, part, tmp_path):
    result = shell(*words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert part in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_arguments_there_are_five_things_to_try():
    """Every one is a command that composes; groups follow a command's own keys in its help."""
    from graphspec.config.compose import load_config

    result = shell()
    tried = [line.strip().split("  ")[0].split() for line in result.stdout.splitlines() if line.startswith("  graphspec ")]
    assert (result.returncode, len(tried)) == (0, 5)
    for _, command, *words in tried:
        assert command in cli.COMMANDS
        load_config(*(word for word in words if "=" in word and not word.startswith("prompt=")))
    own = shell("chat", "--help").stdout
    assert own.index("system=TEXT") < own.index("groups (GROUP=CHOICE")


def test_bad_words_next_to_a_flag_are_explained_too():
    result = shell("generate", "--cfg", "job", "variant.topkk=1")
    assert result.returncode == 2
    assert result.stderr.startswith("graphspec: variant.topkk: found variant.topkk=1 (did you mean topk?), expected one of draft, ")


def test_the_module_is_the_console_script():
    """Its arguments and exit codes too."""
    words = ["generate", "--cfg", "job", "--package", "model", "model=org/a"]
    done = subprocess.run([sys.executable, "-m", "graphspec", *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "path: org/a\n" in done.stdout
    done = subprocess.run([sys.executable, "-m", "graphspec", "genrate"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(
        "graphspec: command: found 'genrate' (did you mean generate?)"
    )


def test_a_sweep_takes_checkpoints_and_presets(run):
    result = run("generate", "prompt=x", "--multirun", "model=org/a,demo")
    assert (result.code, [engine.config.model.path for engine in result.engines]) == (0, ["org/a", "demo"])


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, "-m", "graphspec", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        (
            "graphspec ",
            {"generate", "chat", "inspect", "diff", "demo", "profile", "plan", "tune", "report", "train", "convert", "fetch", "serve"},
        ),
        ("graphspec ge", {"generate"}),
        ("/opt/generate/graphspec generate variant=", {f"variant={name}" for name in VARIANTS}),
        ("graphspec diff sampling.max_", {"sampling.max_tokens="}),
    ],
)
def test_completion(line, choices):
    result = shell("-sc", "query=bash", COMP_LINE=line)
    assert (result.returncode, set(result.stdout.split())) == (0, choices)


def test_lazy_public_names():
    import graphspec

    assert set(graphspec.__all__) <= set(dir(graphspec))
    assert graphspec.GraphspecError in ConfigError.__mro__
    with pytest.raises(AttributeError, match="load_config"):
        _ = graphspec.load


@pytest.mark.parametrize(
    ("words", "levels"), [((), ["WARNING", "ERROR"]), (("log=error",), ["ERROR"]), (("log=info",), ["INFO", "WARNING", "ERROR"])]
)
def test_the_log_level_can_be_chosen(run, monkeypatch, words, levels):
    def stream(self, prompt, params):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("graphspec.engine"), level)("decided %s", 5)
        return iter([StreamEvent(index=0, text="one", token_ids=[1], finished=True)])

    monkeypatch.setattr(FakeLLM, "stream", stream)
    before = logging.getLogger("graphspec").handlers, logging.getLogger("graphspec").level
    for flag in ((), ("--multirun",)):
        result = run("generate", "prompt=x", *words, *flag)
        assert result.code == 0
        assert [line for line in result.err.splitlines() if "decided" in line] == [f"graphspec: {level}: decided 5" for level in levels]
    assert (logging.getLogger("graphspec").handlers, logging.getLogger("graphspec").level) == before
    assert "log: expected one of error, warning, info, debug, found 'loud'" in run("generate", "prompt=x", "log=loud").err


def test_what_a_program_took_in_words():
    assert CaptureRecord("cycle of 1 lanes", 0.5, 0.25, 2048).sentence == (
        "cycle of 1 lanes, warm in 0.5 s, captured in 0.2 s, 2.0 KiB more in the graphs' pool"
    )
    assert CaptureRecord("cycle of 2 lanes", 1.5).sentence == "cycle of 2 lanes, warm in 1.5 s"
