"""Inputs of the console script: all are checked before a model is loaded, most before torch is imported."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from graphspec import SamplingParams
from graphspec.api.llm import LLM
from graphspec.cli import main as cli
from graphspec.config.compose import load_config
from graphspec.config.hints import install_hint
from graphspec.config.paths import check_writable, read_text, user_path
from graphspec.errors import ConfigError
from tests.support.engines import SMALL, add_tokenizer, ids, mirror_pair

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# In a process of their own, for what must not be imported by then.
CHEAP = (
    "import sys; from graphspec.cli.main import main\n"
    "try: main()\nfinally: assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
)


def shell(*words: str, redirect: str = "", stdin: bytes = b"", code: str = CHEAP, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = ["/bin/sh", "-c", f'"$@" {redirect}', "sh", sys.executable, "-c", code, *words]
    return subprocess.run(command, input=stdin, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | env, timeout=120)


def refusal(done: subprocess.CompletedProcess[bytes]) -> str:
    reported = done.stderr.decode()
    assert (done.returncode, done.stdout, reported.count("\n")) == (2, b"", 1) and reported.startswith("graphspec: "), reported
    return reported


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate", "sampling.temperature=-1", "prompt=x"], "sampling.temperature"),
        (["generate", "prompt=\udcff"], "lone surrogate U+DCFF"),
        (["generate", "prompt_file=/dev/zero"], "a pipe or a device"),
        (["generate", "prompt_file=/proc/self/mem"], "prompt_file"),
        (["generate", "model.path=${oc.env:HOME}", "prompt=x"], "model.path: expected a value without ${...}"),
        (["generate", "variant=${oc.env:HOME}", "prompt=x"], "variant: expected a value without ${...}"),
        (["generate", "runtime.debug=5", "prompt=x"], "runtime.debug: expected true or false, found 5"),
        (["generate", "hydra.run.dir=/x", "prompt=x"], "add --multirun"),
        (["generate", "sampling.seed=" + "9" * 5000, "prompt=x"], "sampling.seed=999"),
        (["generate", "sampling.stop_token_ids=" + "[" * 3000, "prompt=x"], "sampling.stop_token_ids=[[["),
        (["generate", "x" * 100000 + "=1", "prompt=x"], "File name too long"),
        (["generate", "prompt=" + "[" * 50000 + "]" * 50000], "a JSON list of strings"),
        (["generate", "--nope"], "unrecognized arguments: --nope"),
        (["generate", "--temperature", "0.5"], "KEY=VALUE: did you mean sampling.temperature"),
        (["serve", "--port", "8000"], "KEY=VALUE: did you mean server.port?"),
        (["generate", "--prompt", "x"], "KEY=VALUE: did you mean prompt=?"),
        (["generate", "def fib(n):"], "found 'def fib(n):' (a prompt is prompt=TEXT)"),
        (["genrate", "prompt=x"], "found 'genrate' (did you mean generate?)"),
        (["profile", "--multirun", "hydra/launcher=submitit_slurm"], "pip install hydra-submitit-launcher"),
        (["generate", "--multirun", "variant=nope,none", "prompt=x"], "variant: found 'nope' (did you mean none?), expected one of"),
        (["generate", "--config-name", "nope", "prompt=x"], "nope"),
        (["diff", "prompt_file=nope"], "No such file"),
        (["profile", "results=/dev/null/x"], "results: expected a place where files can be written"),
        (["tune", "tune.out=/dev/null/x.yaml"], "tune.out: expected a place where files can be written"),
        (["report", "report.files=[/proc/self/mem]"], "files that can be read"),
    ],
    ids=lambda value: " ".join(value)[:50].encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_refused_before_torch_is_imported(words: list[str], part: str) -> None:
    reported = refusal(shell(*words))
    assert part in reported and len(reported) < 2500


def test_standard_streams_that_are_closed_or_full() -> None:
    assert "prompt=TEXT" in refusal(shell("generate", redirect="<&-"))
    assert "it is closed" in refusal(shell("--help", redirect=">&-"))
    assert "No space left on device" in refusal(shell("--help", redirect=">/dev/full"))
    blind = shell("generate", "prompt_file=nope", redirect="2>&-")
    assert (blind.returncode, blind.stdout, blind.stderr) == (2, b"", b"")


def test_standard_input_that_is_no_text() -> None:
    assert "standard input" in refusal(shell("generate", stdin=b"\xff w1", PYTHONIOENCODING="utf-8:strict"))
    assert "lone surrogate U+DCFF" in refusal(shell("generate", stdin=b"\xff w1", PYTHONIOENCODING="utf-8:surrogateescape"))


def test_what_the_terminal_has_no_code_for_is_shown_as_an_escape() -> None:
    echo = "cli.COMMANDS['convert'] = cli.Command(lambda words: print(*words) or 0, '', '', True)"
    code = f"from graphspec.cli import main as cli\n{echo}\ncli.main()"
    done = shell("convert", "é", code=code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9\n", b"")


def test_files_that_are_open_already(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"w1 w2")
    os.close(write)
    assert read_text("prompt_file", f"/dev/fd/{read}") == "w1 w2"
    os.close(read)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a pipe or a device"):
        read_text("prompt_file", str(tmp_path / "pipe"))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "~nobody-of-that-name/x", "\ud800"], ids=["long", "null", "user", "surrogate"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: expected a path that can be looked up") as caught:
        user_path("model.path", name)
    assert len(str(caught.value)) < 400


def test_paths_are_checked_without_leaving_files(tmp_path: Path) -> None:
    assert check_writable("results", str(tmp_path / "a" / "b"), folder=True) == tmp_path / "a" / "b"
    assert check_writable("tune.out", str(tmp_path / "a" / "b.yaml")) == tmp_path / "a" / "b.yaml"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for name, folder in (("file", True), ("file/x", False), ("file/x", True), (".", False)):
        with pytest.raises(ConfigError, match="results"):
            check_writable("results", str(tmp_path / name), folder=folder)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: {path: '${oc.env:HOME}'}", "model.path: expected a value without"),
        ("sampling: {stop_token_ids: ['${sampling.seed}']}", "sampling.stop_token_ids.0: expected a value without"),
        ("runtime: {debug: 7}", "runtime.debug: expected true or false, found 7"),
        ("[" * 20000, "a YAML file that can be read"),
        ("{{{", "a YAML file that can be read"),
    ],
)
def test_experiment_files_that_say_something_else(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(f"experiment={file}")
    assert part in str(caught.value)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = mirror_pair(tmp_path_factory.mktemp("target")).target
    add_tokenizer(made)
    return made


@pytest.fixture(autouse=True)
def _no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def run(target: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", f"model.path={target}", "variant=none", "runtime=eager", "sampling.max_tokens=3", *words])
    reported = capsys.readouterr()
    return exit_.value.code, reported.out, reported.err


def lines(path: Path, *rows: object) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"prompt_file={path}"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What engines did, in order."""
    done: list[str] = []
    for name in ("check", "generate"):
        whole = getattr(LLM, name)

        def noted(self: LLM, *args: Any, _name: str = name, _whole: Any = whole, **kwargs: Any) -> Any:
            done.append(_name)
            return _whole(self, *args, **kwargs)

        monkeypatch.setattr(LLM, name, noted)
    return done


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([{"prompt": "w1", "logprobs": 1000}], ["sampling.logprobs"]),
        ([{"prompt": "w1", "stop_token_ids": [44]}], ["sampling.stop_token_ids"]),
        (["w1 " * 200, {"prompt": "w1", "logit_bias": {"44": 1}}], ["request 0: prompt", "request 1: sampling.logit_bias"]),
    ],
)
def test_requests_that_all_fail_compile_nothing(
    target: Path, tmp_path: Path, built: list[str], capsys: Any, rows: list[object], parts: Sequence[str]
) -> None:
    code, out, err = run(target, capsys, lines(tmp_path / "prompts.jsonl", *rows))
    assert (code, out, built) == (2, "", ["check"])
    reported = err.splitlines()
    assert len(reported) == len(parts) and all(line.startswith(f"graphspec: {part}") for line, part in zip(reported, parts, strict=True))


def test_requests_that_fail_alone_leave_the_others(target: Path, tmp_path: Path, built: list[str], capsys: Any) -> None:
    prompt_file = lines(tmp_path / "prompts.jsonl", "w1 w2", {"prompt": "w1", "logprobs": 1000}, {"prompt": "\ud800"}, "w3")
    code, out, err = run(target, capsys, prompt_file, "format=json")
    outputs = json.loads(out)["outputs"]
    assert code == 0 and built[:2] == ["check", "generate"]
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "error", "length"]
    wanted = ids(LLM(target, variant="none", **SMALL).generate(["w1 w2", "w3"], None))
    assert [output["token_ids"] for output in (outputs[0], outputs[3])] == [tokens[:3] for tokens in wanted]
    assert "request 1: sampling.logprobs" in err and "request 2: prompt: expected text in UTF-8" in err
    code, out, err = run(target, capsys, prompt_file)
    assert code == 0 and out.startswith("--- 0: w1 w2\n") and "\n--- 3: w3\n" in out and "--- 1" not in out


def test_several_outputs_of_a_prompt(target: Path, tmp_path: Path, capsys: Any) -> None:
    hot = ("sampling.temperature=1", "sampling.seed=5")
    code, out, err = run(target, capsys, "prompt=w1 w2", "sampling.n=3", *hot)
    wanted = LLM(target, variant="none", **SMALL).generate("w1 w2", SamplingParams(max_tokens=3, n=3, temperature=1, seed=5))
    assert code == 0 and out == "".join(f"--- 0.{output.sample}: w1 w2\n{output.text}\n" for output in wanted) and "tokens/s" in err
    prompt_file = lines(tmp_path / "prompts.jsonl", "w1 w2", {"prompt": "w3", "n": 1}, {"prompt": "w4", "n": 2, "temperature": 0})
    code, out, err = run(target, capsys, prompt_file, "sampling.n=3", *hot, "format=json")
    rows = json.loads(out)["outputs"]
    assert [row["token_ids"] for row in rows[:3]] == ids(wanted) and [row.get("sample") for row in rows] == [0, 1, 2, None, None]
    assert [row.get("index") for row in rows] == [0, 0, 0, None, None] and [row["finish_reason"] for row in rows[3:]] == ["length", "error"]
    assert code == 0 and "request 2: sampling.n: expected 1 at temperature 0" in err
    code, out, err = run(target, capsys, "prompt=w1", "sampling.n=2")
    assert (code, out) == (2, "") and err.startswith(
        "graphspec: sampling.n: expected 1 at temperature 0, where all outputs would be the same"
    )


def test_the_checkpoint_says_how_it_is_sampled(target: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 2.0, "top_k": 7}')
    seeded = ("prompt=w1 w2", "sampling.seed=5", "sampling.max_tokens=9", "sampling.ignore_eos=true", "format=json")

    def tokens(place: Path, *words: str) -> list[int]:
        code, out, _ = run(place, capsys, *seeded, *words)
        assert code == 0
        return json.loads(out)["outputs"][0]["token_ids"]

    silent = tokens(folder)
    assert silent == tokens(target, "sampling.temperature=2.0", "sampling.top_k=7") != tokens(target)
    assert tokens(folder, "sampling=greedy") == tokens(folder, "model.generation_config=ignore") == tokens(target)
    assert tokens(folder, "sampling=sample") == tokens(target, "sampling=sample") != silent
    with pytest.raises(SystemExit):
        cli.main(["inspect", f"model.path={folder}", "variant=none", "runtime=eager", "prompt=w1"])
    assert "'temperature': 2.0, 'top_k': 7, 'top_p': 1.0" in " ".join(capsys.readouterr().out.split())


def test_an_output_up_to_the_end_of_the_context(target: Path, capsys: Any) -> None:
    words = ("prompt=w1 w2", "sampling.max_tokens=null", "sampling.ignore_eos=true", "model.max_context=20", "format=json")
    code, out, _ = run(target, capsys, *words)
    assert code == 0 and len(json.loads(out)["outputs"][0]["token_ids"]) == 18


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("[" * 100000, "one JSON value per line"),
        ('{"prompt": "w1", "max_tokens": ' + "9" * 5000 + "}", "one JSON value per line"),
        ('{"prompt": "w1", "temperature": NaN}', "NaN is no JSON"),
        ('{"prompt": "w1", "logit_bias": {"1": "2"}}', "token ids and numbers"),
        ('{"prompt": "w1", "logit_bias": {"1_0": 2}}', "token ids and numbers"),
        ('"w1"\u2028"w2"', "one JSON value per line"),
    ],
)
def test_lines_that_are_no_request(target: Path, tmp_path: Path, capsys: Any, line: str, part: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'"w1"\n{line}\n')
    code, out, err = run(target, capsys, f"prompt_file={tmp_path}/prompts.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1) and f"{tmp_path}/prompts.jsonl:2" in err and part in err and len(err) < 500


def test_a_line_ends_where_json_says(target: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "prompts.jsonl").write_text('"w1\u2028w2"\r\n"w3"\r\n', encoding="utf-8", newline="")
    code, out, _ = run(target, capsys, f"prompt_file={tmp_path}/prompts.jsonl", "format=json")
    assert code == 0 and len(json.loads(out)["outputs"]) == 2


def test_overrides_stand_on_both_sides_of_a_flag(target: Path, capsys: Any) -> None:
    code, out, _ = run(target, capsys, "prompt=w1", "--multirun", "sampling.seed=1,2")
    assert code == 0 and len(out.splitlines()) == 2


def test_an_extra_is_installed_by_the_packages_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"pip install 'pydantic\S+' 'starlette\S+' 'uvicorn\S+' 'prometheus-client\S+'", install_hint("serve"))
    assert re.fullmatch(r"pip install 'xgrammar\S+'", install_hint("grammar"))

    def without_metadata(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", without_metadata)
    assert install_hint("serve") == "install the packages of the extra serve"


def test_a_bug_in_a_sweep_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> int:
        raise ValueError("a bug")

    monkeypatch.setitem(cli.COMMANDS, "generate", cli.Command(broken, "", ""))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["generate", "prompt=x", "--multirun", "sampling.seed=1,2"])
