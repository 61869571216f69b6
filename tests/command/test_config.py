"""Configuration: every valid choice composes, every invalid one is refused in one message with its key."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.overrides import engine_config
from graphspec.config.catalog import VARIANTS
from graphspec.config.command_options import LaunchConfig
from graphspec.config.compose import config_groups, load_config, split_prompts, take_checkpoint
from graphspec.config.schema import RUNTIMES, Config, SamplingConfig
from graphspec.errors import ConfigError
from tests import snapshots

CHOICES = [(group, choice) for group, choices in config_groups().items() for choice in choices]


def test_defaults_of_yaml_are_those_of_the_dataclasses():
    assert load_config() == LaunchConfig()


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{group}={choice}" for group, choice in CHOICES])
def test_every_choice_composes(group, choice):
    config = load_config(f"{group}={choice}")
    node = getattr(config, group, None)
    if hasattr(node, "name"):
        assert node.name == choice


def test_catalog_and_groups_agree():
    groups = config_groups()
    assert set(groups["variant"]) == set(VARIANTS)
    assert set(groups["runtime"]) == set(RUNTIMES)


def test_a_variant_without_its_file_is_told_which(monkeypatch: pytest.MonkeyPatch):
    """The catalog has it, ``conf/variant`` does not."""
    from graphspec.config import catalog, compose

    known = catalog.all_variants()
    monkeypatch.setitem(VARIANTS, "successors", "graphspec.config.catalog:PLAIN_DECODING")
    monkeypatch.setattr(compose, "all_variants", lambda: (*known, replace(catalog.PLAIN_DECODING, name="successors")))
    with pytest.raises(ConfigError, match=r"variant=successors: expected the file .*variant/successors\.yaml.*found no such file"):
        load_config("variant=successors")


def test_overrides_reach_their_fields():
    config = load_config(
        "variant=none", "sampling=sample", "sampling.max_tokens=64", "model.path=/a b/c", "runtime.buckets=[2,4]", "hardware.threads=3"
    )
    assert (config.variant.name, config.sampling.temperature, config.sampling.max_tokens) == ("none", 1.0, 64)
    assert (config.model.path, config.runtime.buckets, config.hardware.threads) == ("/a b/c", [2, 4], 3)
    assert isinstance(config, Config)
    assert isinstance(config.sampling, SamplingConfig)


def test_an_experiment_yields_to_later_words():
    config = load_config("experiment=demo_tree", "variant.topk=2", "hardware=auto")
    assert (config.variant.num_steps, config.variant.topk, config.hardware.device) == (5, 2, "auto")


@pytest.mark.parametrize("experiment", config_groups()["experiment"])
def test_snapshot(experiment):
    assert (snapshots.FOLDER / f"{experiment}.yaml").read_text(encoding="utf-8") == snapshots.resolved(experiment), "run `make snapshots`"


def test_no_stale_snapshots():
    assert {path.stem for path in snapshots.FOLDER.iterdir()} == set(config_groups()["experiment"])


BAD = {
    "variant=eagle9": (
        "variant",
        "one of assistant, dflash, eagle, eagle3, mtp, ngram, ngram_trie, none, p_eagle, standalone",
        "'eagle9'",
        "did you mean eagle?",
    ),
    "model=llama-3.1-8": ("model", "did you mean llama-3.1-8b?", "model=./folder, or model=org/name", "one of deepseek-v3, demo"),
    "model=dmeo,org/name": ("model", "Ambiguous value", "add --multirun"),
    "model=org/a,org/b": ("model.path", "Ambiguous value", "add --multirun"),
    "variant=[nothing]": ("variant", "one of assistant, dflash, eagle, eagle3, mtp, ngram, ngram_trie, none, p_eagle, standalone"),
    "sampling=3": ("sampling=3", "sampling=3: expected one of auto, greedy, sample", "found Config group override must be a string"),
    "experiment=nothing": ("experiment", "demo_tree"),
    "variant.topkk=1": ("variant.topkk", "num_draft_tokens", "topkk=1", "did you mean topk?"),
    "topk=1": ("topk", "variant", "topk=1", "did you mean variant.topk?"),
    "max_tokens=1": ("max_tokens", "did you mean sampling.max_tokens or server.max_tokens?"),
    "temprature=1": ("temprature", "did you mean sampling.temperature or train.acceptance.temperature?"),
    "runtime.max_context=64": ("runtime.max_context", "did you mean model.max_context?"),
    "max_model_len=64": ("max_model_len", "here it is model.max_context"),
    "gpu_memory_utilization=0.5": ("gpu_memory_utilization", "here it is runtime.memory_fraction"),
    "runtime.block_size=16": ("runtime.block_size", "here it is runtime.page_size"),
    "max_new_tokens=3": ("max_new_tokens", "here it is sampling.max_tokens"),
    "speculative_config=x": ("speculative_config", "here it is variant= and variant.draft="),
    "lora_paths=x": ("lora_paths", "adapters are not supported"),
    "variant.topk=abc": ("variant.topk", "an integer or null", "abc"),
    "sampling.presence_penalty=null": ("sampling.presence_penalty", "a number", "null"),
    "runtime.buckets=8": ("runtime.buckets", "a list of integers", "8"),
    "runtime.buckets=[4,1]": ("runtime.buckets", "ascending", "[4, 1]"),
    "variant.topk=0": ("variant.topk", ">= 1", "0"),
    "sampling.temperature=-1": ("sampling.temperature", "a number >= 0", "-1"),
    "sampling.temperature=nan": ("sampling.temperature", "a finite number", "nan"),
    "sampling.n=0": ("sampling.n", ">= 1", "0"),
    "model.generation_config=often": ("model.generation_config", "one of auto, ignore"),
    "sampling.max_new_tokens=3": ("sampling.max_new_tokens", "(here it is sampling.max_tokens), expected one of allowed_token_ids"),
    "sampling.num_beams=3": ("sampling.num_beams", "(beam search is not supported), expected one of allowed_token_ids"),
    "sampling.temperature=1e39": ("sampling.temperature", "at most 100000", "1e+39"),
    "sampling.top_p=2": ("sampling.top_p", "above 0", "at most 1", "2.0"),
    "sampling.top_k=10000000000000000000": ("sampling.top_k", "at most 2^63 - 1", "10000000000000000000"),
    "sampling.repetition_penalty=1e-45": ("sampling.repetition_penalty", ">= 0.01", "1e-45"),
    "sampling.seed=18446744073709551616": ("sampling.seed", "a 64-bit integer", "18446744073709551616"),
    "sampling.logit_bias={4: 101}": ("sampling.logit_bias[4]", "at most 100", "101.0"),
    "runtime.memory_fraction=nan": ("runtime.memory_fraction", "a finite number", "nan"),
    "runtime.max_rows=1000000000": ("runtime.max_rows", "at most 65536", "1000000000"),
    "runtime.buckets=[1000000000]": ("runtime.buckets", "at most 65536", "[1000000000]"),
    "workload.requests=100000000000": ("workload.requests", "at most 1000000", "100000000000"),
    "model.path=": ("model.path", "a path, not empty", "''"),
    "sampling.max_tokens=0": ("sampling.max_tokens", ">= 1", "0"),
    "hardware.dtype=int8": ("hardware.dtype", "bfloat16", "'int8'"),
    "kernels.mode=best": ("kernels.mode", "reference", "'best'"),
    "sampling.logit_bias={a: 1}": ("sampling.logit_bias", "a mapping of integers to numbers", "{a: 1}"),
    "sampling.logit_bias={4: x}": ("sampling.logit_bias", "a mapping of integers to numbers", "{4: x}"),
    "sampling.min_tokens=-1": ("sampling.min_tokens", ">= 0", "-1"),
    "accept=luck": ("accept", "one of match, rejection, synthetic, target_only", "'luck'"),
    "accept.threshold_acc=0.5": ("accept.threshold_single, accept.threshold_acc", "rule match"),
    "format=xml": ("format", "text, json", "'xml'"),
    "left=sideways": ("left", "eager", "'sideways'"),
    "prompt=[a, b]": ("prompt", "JSON list of strings", "[a, b]"),
    "prompt=[]": ("prompt", "JSON list of strings", "[]"),
    "sampling.max_tokens=1,2": ("sampling.max_tokens", "Ambiguous value", "1,2", "add --multirun"),
    "+sampling.top_p=1": ("+sampling.top_p=1", "without +"),
    "~variant": ("~variant", "without +"),
    "sampling": ("arguments", "overrides such as sampling.max_tokens=64", "'sampling'", "a prompt is prompt=TEXT"),
    "variant=eagle3,mtp": ("variant", "one of assistant, dflash, eagle", "Ambiguous value", "eagle3,mtp", "add --multirun"),
    "hardware.dtype=fp16": ("hardware.dtype", "float16", "'fp16'", "did you mean float16?"),
    "url=localhost:8000": ("url", "an address such as http://localhost:8000/v1", "'localhost:8000'"),
    "sampling.seed=${oc.env:NO_SUCH}": ("sampling.seed",),
}


@pytest.mark.parametrize("word", BAD)
def test_bad_words_name_key_expected_and_found(word):
    with pytest.raises(ConfigError) as caught:
        load_config(word)
    key, *parts = BAD[word]
    assert caught.value.key.split("=")[0] == key.split("=")[0]
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["variant=eagle9", "variant.topkk=1", "temprature=1", "hardware.dtype=fp16", "model=dmeo"])
def test_a_hint_stands_before_a_list(word):
    with pytest.raises(ConfigError, match=r"^[\w.]+: found \S+ \(did you mean .*\?.*\), expected one of [\w-]+, ") as caught:
        load_config(word)
    assert str(caught.value).count("\n") == 0 and str(caught.value.expected).startswith("one of ")


@pytest.mark.parametrize("name", ["org/name", "/no/such folder", "./mine", "../mine/v1.0", "mine"])
@pytest.mark.parametrize(
    "more", [(), ("experiment=demo_tree",), pytest.param(("hardware=cpu", "model.max_context=64"), marks=pytest.mark.full)]
)
def test_a_checkpoint_is_taken_as_the_model(tmp_path, monkeypatch, name, more):
    """A name of the Hub, or anything with a slash, or what exists; before and after other words."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = load_config(f"model.path={name}", *more)
    for words in dict.fromkeys(((f"model={name}", *more), (*more, f"model={name}"))):
        assert load_config(*words) == expected


def test_a_preset_comes_before_a_folder_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "llama-3.1-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert take_checkpoint(["model=llama-3.1-8b", "model=demo,demo_hybrid"]) == ["model=llama-3.1-8b", "model=demo,demo_hybrid"]
    assert take_checkpoint(["model=demo,org/a", "x=org/a"]) == ["model.path=demo,org/a", "x=org/a"]


def test_overrides_are_texts():
    with pytest.raises(ConfigError, match=r"overrides: expected texts such as 'runtime=eager', found {'variant': 'none'} \(dict\)"):
        load_config({"variant": "none"})


def test_prompt_and_prompt_file_exclude_each_other():
    with pytest.raises(ConfigError, match="prompt_file"):
        load_config("prompt=a", "prompt_file=b")
    with pytest.raises(ConfigError, match="once"):
        load_config("prompt=a", "prompt=b")


@given(st.text().filter(lambda text: not (text.startswith("[") and text.endswith("]"))))
def test_a_prompt_is_taken_word_for_word(text):
    assert split_prompts(["variant=none", f"prompt={text}"]) == ([text], ["variant=none"])


@pytest.mark.parametrize("text", ["def fib(n):", "${model.path}", "???", "a,b", "'quoted'", "x=1 # c\n\ty", "null", "[1, 2"])
def test_prompts_with_meaning_elsewhere(text):
    assert load_config(f"prompt={text}").prompt == [text]


def test_several_prompts():
    assert load_config('prompt=["a", "b\\n[c]"]').prompt == ["a", "b\n[c]"]


def test_inside_another_hydra_application(tmp_path: Path):
    (tmp_path / "theirs.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert load_config("variant=none").variant.name == "none"
        with pytest.raises(ConfigError):
            load_config("variant=eagle9")
        assert compose("theirs").answer == 42
    assert not GlobalHydra.instance().is_initialized()


def test_composing_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    load_config("experiment=demo_chain")
    assert list(tmp_path.iterdir()) == []


def test_python_construction_equals_composition():
    built = engine_config(Config(), {"num_steps": 4, "topk": 1, "num_draft_tokens": 5, "device": "cpu", "dtype": "float32"})
    built.hardware.name, built.sampling = "cpu", built.sampling.stated()
    composed = asdict(load_config("experiment=demo_chain"))
    assert asdict(built) == {key: composed[key] for key in asdict(built)}
