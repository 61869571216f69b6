"""The console script. The first word is a command, the rest are Hydra overrides and Hydra's own flags.

Answers on stdout, progress and complaints on stderr. Exit codes: 0 done; 1 ``diff`` found a difference; 2 a wrong configuration, checkpoint
or request, or a ``generate`` whose requests all failed (a request that fails among others is reported in its own output). Imports no torch
until a command really runs a model, so help and completion are immediate.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import SamplingConfig
from .errors import ConfigError, GraphspecError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from .engine.llm import LLM
    from .engine.outputs import Metrics, Output
    from .engine.request import SamplingParams
    from .launch import LaunchConfig

DEMO_PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'


@dataclass(frozen=True, slots=True)
class Command:
    """One first word."""

    run: Callable[..., int]
    """Takes the composed configuration, or its own words."""
    summary: str
    usage: str
    own_words: bool = False
    """It has nothing to configure: its words go to it as they are."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what its line of a ``.jsonl`` file says differently from the ``sampling`` group."""

    prompt: str
    sampling: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except GraphspecError as error:
        code = _complain(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader left (`| head`); keep the interpreter from complaining when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _complain(error: GraphspecError) -> int:
    print("graphspec: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def _dispatch(words: list[str]) -> int:
    from . import __version__

    if words[:1] == ["--version"]:
        print(f"graphspec {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, rest = (words[0], words[1:]) if not words[0].startswith("-") else ("generate", words)
    if name not in COMMANDS:
        raise ConfigError("command", "one of " + ", ".join(COMMANDS), repr(name), "graphspec --help")
    if "-h" in rest or "--help" in rest:
        print(_command_help(name))
        return 0
    if COMMANDS[name].own_words:
        return COMMANDS[name].run(rest)
    if any(word.startswith("-") for word in rest):
        return _hydra(name, rest)
    from .compose import load_config

    return COMMANDS[name].run(load_config(*rest))


def _hydra(name: str, words: list[str]) -> int:
    """Hand the words to Hydra's own launcher: ``--cfg``, ``--info``, ``--multirun``, ``--shell-completion``, ..."""
    import hydra

    from .compose import CONFIG_MODULE, CONFIG_NAME, VERSION_BASE, load_config, register_schema, split_prompts, to_launch_config
    from .compose import take_experiment_file as take_file

    if _completing(words):
        return 0
    if any(word in ("--cfg", "-c") for word in words):
        load_config(*(word for word in words if "=" in word and not word.startswith("-")))
    prompts, words = split_prompts(words)
    words = take_file(words)
    codes: list[int] = []

    def task(composed: DictConfig) -> None:
        # Inside Hydra an exception would become a traceback and exit code 1.
        try:
            codes.append(COMMANDS[name].run(to_launch_config(composed, prompts)))
        except GraphspecError as error:
            codes.append(_complain(error))

    register_schema()
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME, version_base=VERSION_BASE)(task)()
    finally:
        sys.argv = before
    return max(codes, default=0)


def _completing(words: list[str]) -> bool:
    """Serve a completion of the first word, or hide it from Hydra, which completes overrides only. True when nothing is left to do."""
    line = os.environ.get("COMP_LINE")
    if line is None or not any(word.startswith("query=") for word in words):
        return False
    typed = line.split()
    if len(typed) > 2 or (len(typed) == 2 and line[-1:].isspace()):
        program, rest = line.split(maxsplit=1)
        if typed[1] in COMMANDS:
            os.environ["COMP_LINE"] = program + rest.removeprefix(typed[1])
        return False
    prefix = typed[1] if len(typed) == 2 else ""
    print(" ".join(name for name in COMMANDS if name.startswith(prefix)))
    return True


def _generate(config: LaunchConfig) -> int:
    requests = read_requests(config)
    from .engine.llm import LLM
    from .engine.request import sampling_class
    from .report import progress_bars

    streaming = config.format == "text" and len(requests) == 1
    params = [_params(config, request) for request in requests]
    with progress_bars() as progress:
        llm = LLM.from_config(config, progress=progress)
        llm.warm_up(len(requests), sampling=sampling_class(params))
        outputs = [] if streaming else llm.generate([request.prompt for request in requests], params, progress=progress)
    if streaming:
        for event in llm.stream(requests[0].prompt, params[0]):
            print(event.text, end="", flush=True)
        print()
        failed = 0
    else:
        failed = _print_outputs(config, requests, outputs, llm)
    if llm.metrics is not None and failed < len(requests):
        print(_summary(llm.metrics), file=sys.stderr)
    return 2 if failed == len(requests) else 0


def _print_outputs(config: LaunchConfig, requests: list[Request], outputs: list[Output], llm: LLM) -> int:
    """Print all of them; returns how many failed."""
    failed = [output for output in outputs if output.finish_reason == "error"]
    if config.format == "json":
        setting = {"variant": config.variant.name, "model": config.model.path, "runtime": config.runtime.name, "plan": llm.plan.describe()}
        metrics = asdict(llm.metrics) if llm.metrics is not None else None
        print(json.dumps({"outputs": [_row(output) for output in outputs], "metrics": metrics, **setting}, default=str))
    else:
        for i, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            if output.finish_reason != "error":
                first_line = next(iter(request.prompt.splitlines()), "")
                print(f"--- {i}: {first_line}\n{output.text}")
    for i, output in enumerate(outputs):
        if output.finish_reason == "error":
            print(f"graphspec: request {i}: {output.error}", file=sys.stderr)
    return len(failed)


def _inspect(config: LaunchConfig) -> int:
    prompt = _one_prompt(config)
    from .engine.llm import LLM
    from .inspect import show
    from .report import progress_bars

    with progress_bars() as progress:
        llm = LLM.from_config(config, progress=progress)
    show(llm, prompt)
    return 0


def _diff(config: LaunchConfig) -> int:
    from .engine.diff import diff

    report = diff(config, config.left, config.right, _one_prompt(config))
    if config.format == "json":
        print(json.dumps({"left": config.left, "right": config.right} | asdict(report)))
    elif report.equal:
        print(f"{config.left} and {config.right}: no slot differs in {report.launches} launches")
    else:
        where = f"cycle {report.cycle}, first after stage {report.stage}, slot {report.slot}"
        print(f"{config.left} and {config.right} differ in {where}: {report.detail}")
    return 0 if report.equal else 1


def _demo(config: LaunchConfig) -> int:
    from .report import run_demo

    run_demo(config, _one_prompt(config))
    return 0


def _profile(config: LaunchConfig) -> int:
    from .lab.profile import run

    return run(config)


def _plan(config: LaunchConfig) -> int:
    from .lab.planning import run

    return run(config)


def _tune(config: LaunchConfig) -> int:
    from .lab.tune import run

    return run(config)


def _report(config: LaunchConfig) -> int:
    from .lab.page import run

    return run(config)


def _convert(words: Sequence[str]) -> int:
    from .convert import run

    return run(words)


def read_requests(config: LaunchConfig) -> list[Request]:
    """The prompts of ``prompt``, else of ``prompt_file``, else of standard input when it is not a terminal.

    Raises:
        ConfigError: none of the three holds one, or a line of a ``.jsonl`` file is no request.
    """
    if config.prompt:
        return [Request(prompt, {}) for prompt in config.prompt]
    if config.prompt_file is not None:
        path = Path(config.prompt_file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("prompt_file", "a readable UTF-8 file", repr(config.prompt_file), str(error)) from error
        if path.suffix == ".jsonl":
            requests = [_parse_line(f"{path}:{n}", line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            requests = [Request(text, {})] if text else []
        if not requests:
            raise ConfigError("prompt_file", "at least one prompt", f"none in {path}")
        return requests
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    if not text:
        raise ConfigError("prompt", "prompt=TEXT, prompt_file=PATH, or text on standard input", "none of them")
    return [Request(text, {})]


def _parse_line(where: str, line: str) -> Request:
    defaults = asdict(SamplingConfig())
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(where, "one JSON value per line", line[:60], str(error)) from error
    if isinstance(row, str):
        return Request(row, {})
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(where, 'a string, or an object with "prompt"', line[:60])
    for key, value in row.items():
        if key != "prompt" and key not in defaults:
            raise ConfigError(where, "keys prompt, " + ", ".join(defaults), repr(key))
        nullable = key in ("logprobs", "seed")
        wanted = str if key == "prompt" else int if nullable else type(defaults[key])
        if type(value) is not wanted and not (wanted is float and type(value) is int) and not (nullable and value is None):
            raise ConfigError(f"{where}: {key}", f"a value of type {wanted.__name__}", repr(value))
    if "logit_bias" in row:
        row["logit_bias"] = _parse_bias(f"{where}: logit_bias", row["logit_bias"])
    return Request(row["prompt"], {key: value for key, value in row.items() if key != "prompt"})


def _parse_bias(where: str, bias: dict[str, Any]) -> dict[int, float]:
    """JSON has no integer keys."""
    try:
        return {int(token): float(value) for token, value in bias.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(where, "an object of token ids and numbers", repr(bias)) from error


def _params(config: LaunchConfig, request: Request) -> SamplingParams:
    from .engine.request import configured_params

    return configured_params(config.sampling, **request.sampling)


def _one_prompt(config: LaunchConfig) -> str:
    requests = read_requests(config) if config.prompt or config.prompt_file is not None else [Request(DEMO_PROMPT, {})]
    if len(requests) > 1:
        raise ConfigError("prompt", "one prompt", f"{len(requests)}")
    return requests[0].prompt


def _row(output: Output) -> dict[str, Any]:
    row: dict[str, Any] = {"text": output.text, "token_ids": list(output.token_ids), "finish_reason": output.finish_reason}
    row["seed"] = output.seed
    if output.logprobs is not None:
        row["logprobs"] = [asdict(entry) for entry in output.logprobs]
    return row | ({"error": output.error} if output.finish_reason == "error" else {})


def _summary(metrics: Metrics) -> str:
    mark = "SYNTHETIC acceptance, the text means nothing: " if metrics.synthetic else "LOSSY acceptance: " if metrics.lossy else ""
    return f"{mark}{metrics.tokens_per_second:.1f} tokens/s, {metrics.cycles} cycles, {metrics.acceptance_length:.2f} tokens per cycle"


def _help() -> str:
    commands = "\n".join(f"  {name:10}{command.summary}" for name, command in COMMANDS.items())
    return f"""usage: graphspec COMMAND [GROUP=CHOICE | KEY=VALUE | --flag] ...

commands:
{commands}

{_groups()}
  graphspec COMMAND --help                       what a command takes
  graphspec COMMAND --cfg job [override ...]     the whole configuration, as the command would see it
  graphspec --hydra-help                         Hydra's own flags (--multirun, --info, ...)
  eval "$(graphspec --shell-completion install=bash)"   completion of commands, groups and keys (also zsh, fish)
  graphspec --version"""


def _command_help(name: str) -> str:
    command = COMMANDS[name]
    if command.own_words:
        return f"usage: graphspec {name}{command.usage}\n"
    return f"usage: graphspec {name} [GROUP=CHOICE | KEY=VALUE | --flag] ...\n\n{command.summary}\n\n{command.usage}\n\n{_groups()}"


def _groups() -> str:
    from .compose import config_groups

    lines = "\n".join(f"  {group:12}{', '.join(choices)}" for group, choices in config_groups().items())
    return f"groups (GROUP=CHOICE; a key of a group is GROUP.KEY=VALUE):\n{lines}\n"


COMMANDS: dict[str, Command] = {
    "generate": Command(
        _generate,
        "generate text; one prompt is streamed",
        """\
  prompt=TEXT              taken word for word; prompt='["a", "b"]' is a JSON list of several
  prompt_file=PATH         one prompt; or, ending in .jsonl, one request per line: a string, or an object with prompt and sampling keys
                           (with neither of the two, the prompt is read from standard input)
  format=text|json         json: one document as the last line of stdout
  sampling.max_tokens=64 sampling.temperature=0.8 sampling.seed=1 model.path=/folder variant.draft=/folder ...

  graphspec generate variant=eagle3 model=demo prompt='def fib(n):' sampling.max_tokens=64""",
    ),
    "inspect": Command(
        _inspect,
        "print the plan, the slots, the buckets and one draft tree",
        "  prompt=TEXT              the text the tree continues",
    ),
    "diff": Command(
        _diff,
        "run two runtimes side by side and name the first slot that differs",
        "  left=eager right=compiled prompt=TEXT format=text|json    exit code 1 when they differ",
    ),
    "demo": Command(
        _demo,
        "generate with and without speculation, compare, draw a draft tree",
        "  prompt=TEXT              another prompt",
    ),
    "profile": Command(
        _profile,
        "measure latency and acceptance, beside baselines in the same run",
        """\
  workload=held_out|random|file     what is asked: workload.batch=1 workload.requests=8 workload.input_tokens=64 workload.output_tokens=128
  baseline=none                     none, self, hf, hf_assisted, hf_lookup, openai (url=ADDRESS), or a list: baseline=[none,hf]
  profile.rounds=5 profile.trace=FILE results=FOLDER format=text|json
  --multirun variant.num_steps=2,4  one case after the other, each in processes of its own

  graphspec profile experiment=demo_tree baseline=[none,hf]""",
    ),
    "plan": Command(
        _plan,
        "what fits, how long a cycle must take, which shape to choose; needs a config.json and no GPU",
        """\
  model.path=FOLDER hardware=h200   the target's config.json and where it would run
  plan.context=2048 plan.batches=[1,8,32] plan.acceptance=[0.8,0.7,0.6] plan.measured=FILE plan.measure=true format=text|json

  graphspec plan model=llama-3.1-8b hardware=h200""",
    ),
    "tune": Command(
        _tune,
        "run the plan's short list on the real models and write the winner as an experiment",
        """\
  tune.out=FILE tune.candidates=6 tune.batches=[1,4] tune.adaptive=true workload=...

  graphspec tune model=demo variant=eagle3 tune.out=tuned.yaml""",
    ),
    "report": Command(
        _report,
        "turn result files into one HTML page",
        """\
  report.files=[results] report.out=report.html    files or folders; the page needs no network""",
    ),
    "convert": Command(
        _convert,
        "rewrite a draft checkpoint into another published layout",
        """ SRC DST layout=NAME [target=FOLDER]

rewrite a draft checkpoint into another published layout

  SRC DST                  folder of an EAGLE head; a folder that doesn't exist yet
  layout=NAME              EAGLE-3: safeailab, sglang, speculators, modelopt; EAGLE-1/2: safeailab, hass, speculators-old
  target=FOLDER            the target model, which tells default tapped layers from others""",
        own_words=True,
    ),
}


if __name__ == "__main__":
    main()
