"""Composes command-line overrides and the YAML groups into one typed, checked configuration object, by Hydra.

Apart from :mod:`graphspec.cli.main` the only module that imports Hydra. No lower layer sees a ``DictConfig``.
"""

from __future__ import annotations

import io
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import resources
from typing import NoReturn

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from ..errors import ConfigError
from .catalog import ACCEPTANCE_RULES, VARIANTS, all_acceptance_rules, all_variants
from .checks import LONG, closest, cut, spell_type, typed
from .command_options import LaunchConfig
from .hints import hint_for_path
from .paths import read_text, user_path

CONFIG_MODULE = "graphspec.conf"
CONFIG_NAME = "config"
VERSION_BASE = "1.3"
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError, RecursionError)
"""Exceptions that Hydra, its parser and OmegaConf raise for invalid arguments."""
PROVIDER = "graphspec"
"""Whose entries of Hydra's store these are."""
NO_INTERPOLATION = "a value without ${...}: nothing is looked up in other keys or in the environment"
FILE_EXPERIMENT = "from_file"
"""Name under which an experiment given as a file is registered."""


def load_config(*overrides: str) -> LaunchConfig:
    """Compose the YAML groups with Hydra overrides; equal to what the command line builds from the same words.

    Works from scripts, notebooks and inside other Hydra applications, any number of times.

    Args:
        overrides: ``variant=none``, ``sampling.max_tokens=64``, ``experiment=demo_tree``, ``experiment=FILE.yaml``, ``prompt=TEXT``, ...

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, a group choice that does not exist.
    """
    for word in overrides:
        if not isinstance(word, str):
            raise ConfigError("overrides", "texts such as 'runtime=eager'", typed(word))
    prompts, words = split_prompts(overrides)
    words = take_checkpoint(take_experiment_file(words))
    refuse_bare_words(words)
    check_words(words)
    for word in words:
        if word.startswith(("+", "~")):
            raise ConfigError(cut(word), "an override without + or ~ (every key exists, and none can be taken away)", cut(word))
        if word.startswith(("hydra.", "hydra/")):
            expected = "a key of the configuration: keys of Hydra's own go next to one of its flags"
            raise ConfigError(cut(word), expected, "no flag", "add --multirun")
        key, _, value = word.partition("=")
        check_flag(key, value.strip().lower() == "true" if value.strip().lower() in ("true", "false") else value)
    try:
        with _private_hydra():
            composed = compose(CONFIG_NAME, overrides=words)
    except HYDRA_ERRORS as error:
        raise explain(error, words) from error
    return to_launch_config(composed, prompts)


def to_launch_config(composed: DictConfig, prompts: Sequence[str] = ()) -> LaunchConfig:
    """The typed object of a composed config; every ``__post_init__`` check runs here."""
    refuse_interpolations(composed)
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error, ()) from error
    if not isinstance(config, LaunchConfig):
        raise ConfigError("defaults", f"the schema of {CONFIG_MODULE}.{CONFIG_NAME} first in the list", type(config).__name__)
    if prompts:
        config.prompt = list(prompts)
        config.__post_init__()
    return config


def check_words(words: Sequence[str]) -> None:
    """Refuse interpolations in arguments; :func:`refuse_interpolations` does it for files."""
    for word in words:
        key, _, value = word.partition("=")
        if "${" in word:
            raise ConfigError(cut(key), NO_INTERPOLATION, cut(value))


def refuse_interpolations(composed: DictConfig) -> None:
    """Refuse interpolations in files: a value is what was written, never looked up in other keys or the environment."""

    def search(key: str, value: object) -> None:
        if isinstance(value, str) and "${" in value:
            raise ConfigError(key, NO_INTERPOLATION, cut(value))
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, entry in entries:
            search(f"{key}.{name}" if key else str(name), entry)

    search("", OmegaConf.to_container(composed, resolve=False))


def check_flag(key: str, value: object) -> None:
    """Refuse other values than true and false for boolean keys; OmegaConf would convert numbers and several words.

    Args:
        key: of the configuration; empty: its root.
        value: what it is set to; a mapping holds keys below it.
    """
    parent, _, leaf = key.rpartition(".")
    schema = _schema_of(parent)
    if schema is not None and typing.get_type_hints(schema).get(leaf) is bool and not isinstance(value, bool):
        raise ConfigError(key, "true or false", cut(str(value)))
    for name, entry in value.items() if isinstance(value, dict) else ():
        check_flag(f"{key}.{name}" if key else str(name), entry)


def sort_words(words: Sequence[str]) -> list[str]:
    """Overrides first, then Hydra's flags with their values, since Hydra accepts overrides in one place only."""

    def refuse(message: str) -> NoReturn:
        flag = re.search(r"--([\w-]+)", message)
        key = flag[1].replace("-", "_") if flag else ""
        known = _all_keys(LaunchConfig)
        near = f"did you mean {key}=?" if key in known else hint_for_path(key, known)
        hint = f"options are words without dashes, KEY=VALUE{near and ': '}{near}" if flag else ""
        raise ConfigError("flags", "those that graphspec --hydra-help lists", cut(message), hint)

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    overrides = parser.parse_intermixed_args(list(words)).overrides
    refuse_bare_words(overrides)
    return [*overrides, *(word for word in words if word not in overrides)]


def overrides_of(words: Sequence[str]) -> list[str]:
    """The words that set keys of the configuration: not Hydra's flags, nor keys of its own."""
    return [word for word in words if "=" in word and not word.startswith(("-", "hydra.", "hydra/"))]


def refuse_bare_words(overrides: Sequence[str]) -> None:
    """Refuse words that set nothing, such as a prompt without ``prompt=``."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError("arguments", "overrides such as sampling.max_tokens=64", repr(cut(word)), "a prompt is prompt=TEXT")


def split_prompts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take ``prompt=`` out of Hydra's arguments, since its grammar interprets brackets, commas, quotes and dollars."""
    given = [word.removeprefix("prompt=") for word in words if word.startswith("prompt=")]
    rest = [word for word in words if not word.startswith("prompt=")]
    if len(given) > 1:
        raise ConfigError("prompt", "prompt= once", f"{len(given)} times", 'prompt=\'["a", "b"]\' gives several')
    if not given:
        return [], rest
    text = given[0]
    if not (text.startswith("[") and text.endswith("]")):
        return [text], rest
    try:
        prompts = json.loads(text)
    except (ValueError, RecursionError):
        prompts = None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("prompt", 'text, or a JSON list of strings: ["a", "b"]', cut(text), "text in brackets goes into a prompt_file")
    return prompts, rest


def take_experiment_file(words: Sequence[str]) -> list[str]:
    """``experiment=FILE.yaml`` becomes a choice of the group, so that an experiment may lie anywhere."""
    taken = []
    for word in words:
        name = word.removeprefix("experiment=")
        if name == word or not name.endswith((".yaml", ".yml")):
            taken.append(word)
            continue
        text = read_text("experiment", name)
        try:
            node = OmegaConf.load(io.StringIO(text))
        except (OSError, YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise ConfigError("experiment", "a name, or a YAML file that can be read", repr(name), _one_line(error)) from error
        if not isinstance(node, DictConfig):
            raise ConfigError("experiment", "a file with keys of the configuration", f"something else in {name!r}")
        check_flag("", OmegaConf.to_container(node, resolve=False))
        ConfigStore.instance().store(group="experiment", name=FILE_EXPERIMENT, node=node, package="_global_", provider=name)
        taken.append(f"experiment={FILE_EXPERIMENT}")
    return taken


def take_checkpoint(words: Sequence[str]) -> list[str]:
    """``model=org/name`` and ``model=FOLDER`` become ``model.path=...``, as several of them in a sweep do; a preset stays a choice.

    A value with a slash is a checkpoint, and so is the name of something that exists. A preset's name is that of its model, so that a
    sweep may have both.
    """
    presets = config_groups()["model"]

    def exists(value: str) -> bool:
        return user_path("model", value).exists()

    def take(word: str) -> str:
        value = word.removeprefix("model=")
        if value == word or value in ("", *presets):
            return word
        others = [one for one in value.split(",") if one not in presets]
        named = exists(value) or (others and all("/" in one or exists(one) for one in others))
        return f"model.path={value}" if named else word

    return [take(word) for word in words]


def config_groups() -> dict[str, tuple[str, ...]]:
    """The groups under ``conf/`` and the choices of each, variants of installed packages among them."""
    root = resources.files(CONFIG_MODULE)
    groups: dict[str, tuple[str, ...]] = {}
    for folder in sorted(root.iterdir(), key=lambda entry: entry.name):
        if folder.is_dir():
            choices = tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))
            if choices:
                groups[folder.name] = choices
    for group, rows in (("variant", all_variants()), ("accept", all_acceptance_rules())):
        groups[group] = tuple(sorted({*groups[group], *(row.name for row in rows)}))
    return groups


def register_schema() -> None:
    """Put the dataclasses into Hydra's store, where ``conf/config.yaml`` finds them as ``schema``, and a choice for each variant and
    acceptance rule from an entry point, and an empty preset of ``train`` for each variant without one.
    """
    store = ConfigStore.instance()
    known = store.repo.get("schema.yaml")
    # Making it takes as long as composing a configuration does. Another application may have a schema of its own.
    if known is None or known.provider != PROVIDER:
        schema = OmegaConf.structured(LaunchConfig)
        # Mappings with keys of the user's choice.
        for mapping in (schema.sampling.logit_bias, schema.runtime.depth_per_bucket, schema.adaptive.times, schema.train.network):
            OmegaConf.set_struct(mapping, False)
        store.store(name="schema", node=schema, provider=PROVIDER)
    trained = config_groups()["train"]
    for variant in all_variants():
        if variant.name not in VARIANTS:
            store.store(group="variant", name=variant.name, node={"name": variant.name}, provider=PROVIDER)
        if variant.name not in trained:
            # conf/config.yaml follows the variant; one that is not trained has no preset.
            store.store(group="train", name=variant.name, node={}, provider=PROVIDER)
    for rule in all_acceptance_rules()[len(ACCEPTANCE_RULES) :]:
        store.store(group="accept", name=rule.name, node={"rule": rule.name}, provider=PROVIDER)


def explain(error: Exception, words: Sequence[str]) -> ConfigError:
    """The key that an exception of Hydra or OmegaConf is about, what it takes, and a hint; else Hydra's own words."""
    groups = config_groups()
    group, _, choice = str(getattr(error, "missing_cfg_file", None) or "").partition("/")
    if group in groups:
        return _explain_choice(group, choice, groups[group])
    full_key = next((key for one in _chain(error) if (key := getattr(one, "full_key", None))), None)
    return _explain_words(error, words, groups) if full_key is None else _explain_value(full_key, words)


def _explain_choice(group: str, choice: str, choices: Sequence[str]) -> ConfigError:
    """A choice of a group that has no file."""
    if choice in choices:  # the catalog has it
        file = resources.files(CONFIG_MODULE) / group / f"{choice}.yaml"
        return ConfigError(f"{group}={choice}", f"the file {file}, with the line name: {choice}", "no such file")
    hint = closest(choice, choices)
    if group == "model":
        hint = f"{hint} a checkpoint is model=./folder, or model=org/name of the Hugging Face Hub".lstrip()
    return ConfigError(group, choices, repr(choice.removesuffix(".yaml")), hint)


def _explain_words(error: Exception, words: Sequence[str], groups: Mapping[str, Sequence[str]]) -> ConfigError:
    """A word that Hydra can't read, in Hydra's words: the one that it names, or the first that sets a group to no choice of it."""
    message = _one_line(error)

    def is_odd(word: str) -> bool:
        key, _, value = word.partition("=")
        return f"'{word}'" in message or (key in groups and value not in groups[key])

    word = getattr(error, "override", None) or next(filter(is_odd, words), " ".join(words) or CONFIG_NAME)
    launcher = re.search(r"Could not find 'hydra/launcher/([^_']+)", message)
    hint = f"pip install hydra-{launcher[1]}-launcher" if launcher else ""
    return ConfigError(cut(word), groups.get(word.partition("=")[0]) or "words that make a configuration", message, hint)


def _explain_value(full_key: str, words: Sequence[str]) -> ConfigError:
    """A key that does not exist, or a value of another type than its key has."""
    while (schema := _schema_of(full_key.rpartition(".")[0])) is None:
        # An entry of a mapping: report the mapping, a key that the user knows.
        full_key = full_key.rpartition(".")[0]
    found, hints = next((word for word in words if word.startswith(full_key + "=")), full_key), typing.get_type_hints(schema)
    annotation = hints.get(full_key.rpartition(".")[2])
    if annotation is None:
        return ConfigError(full_key, sorted(hints), found, hint_for_path(full_key, _all_keys(LaunchConfig)))
    if isinstance(annotation, type) and is_dataclass(annotation):
        names = ", ".join(f.name for f in fields(annotation))
        return ConfigError(full_key, f"one of its keys ({names}) or a choice of the group", found)
    return ConfigError(full_key, spell_type(annotation), found)


@contextmanager
def _private_hydra() -> Iterator[None]:
    """Hydra is a process-wide singleton: use it, then restore the state of another application."""
    register_schema()
    instance = GlobalHydra.instance()
    before = instance.hydra
    instance.clear()
    try:
        with initialize_config_module(CONFIG_MODULE, job_name="graphspec", version_base=VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def _schema_of(dotted: str) -> type | None:
    schema: type = LaunchConfig
    for name in filter(None, dotted.split(".")):
        found = typing.get_type_hints(schema).get(name)
        if not (isinstance(found, type) and is_dataclass(found)):
            return None
        schema = found
    return schema


def _all_keys(schema: type, group: str = "") -> list[str]:
    """Every key of the configuration with its group; groups themselves are keys too."""
    keys = []
    for name, annotation in typing.get_type_hints(schema).items():
        keys.append(group + name)
        if isinstance(annotation, type) and is_dataclass(annotation):
            keys += _all_keys(annotation, f"{group}{name}.")
    return keys


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _one_line(error: BaseException) -> str:
    return cut(" ".join(str(error).split()) or type(error).__name__, 2 * LONG)
