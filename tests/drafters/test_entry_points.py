"""A variant from another package: found through its entry point, selected by name, and the output stays the target's own."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config import catalog
from graphspec.config.catalog import Variant, all_variants
from graphspec.config.compose import config_groups, load_config
from graphspec.errors import ConfigError
from graphspec.lab.floor import FloorModel
from graphspec.shapes import GREEDY
from tests.support.engines import Pair, ids, mirror_pair, prompts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def install(folder: Path, points: str, *modules: Path) -> Path:
    """What ``pip install`` leaves on disk: modules, and a ``dist-info`` folder with entry points."""
    info = folder / "other_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    for module in modules:
        shutil.copy(module, folder)
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is read once per process; these tests change what it would find."""
    catalog.all_variants.cache_clear()
    yield
    monkeypatch.undo()
    catalog.all_variants.cache_clear()


def example(name: str, folder: Path) -> Path:
    """A site folder with one of the examples installed."""
    line = f"graphspec_{name}:VARIANT"
    assert f'{name} = "{line}"' in (EXAMPLES / name / "pyproject.toml").read_text()
    return install(folder, f"[graphspec.variants]\n{name} = {line}\n", EXAMPLES / name / f"graphspec_{name}.py")


@pytest.fixture
def early_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.syspath_prepend(example("early_exit", tmp_path / "site"))


@pytest.fixture
def mask_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.syspath_prepend(example("mask_tokens", tmp_path / "site"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"))


def test_the_example_is_a_variant_like_ours(early_exit: None):
    assert all_variants()[-1].name == "early_exit"
    assert "early_exit" in config_groups()["variant"]
    config = load_config("variant=early_exit", "variant.num_steps=2", "variant.topk=1")
    assert (config.variant.name, config.variant.num_steps) == ("early_exit", 2)


@pytest.mark.parametrize("shape", [{}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}], ids=["chain", "tree"])
def test_the_example_gives_the_targets_own_tokens(early_exit: None, pair: Pair, shape: dict[str, int]):
    llm = LLM(pair.target, variant="early_exit", runtime="eager", prefill_chunks=[8, 16], **shape)
    prompt_ids = prompts(3)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == [pair.greedy(prompt, 16) for prompt in prompt_ids]
    # The twin's second layer adds nothing, so one layer of two drafts perfectly.
    llm.generate(prompt_ids, SamplingParams(max_tokens=24, ignore_eos=True))
    assert llm.metrics is not None
    assert llm.metrics.acceptance_length == llm.plan.shape.num_steps + 1


@pytest.mark.parametrize("shape", [{}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}, {"num_steps": 1, "topk": 1}])
def test_an_algorithm_from_outside_gives_the_targets_own_tokens(mask_tokens: None, pair: Pair, shape: dict[str, int]):
    llm = LLM(pair.target, variant="mask_tokens", runtime="eager", prefill_chunks=[8, 16], **shape)
    prompt_ids = prompts(3)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == [pair.greedy(prompt, 16) for prompt in prompt_ids]
    key = llm.plan.key(llm.plan.buckets[0], GREEDY)
    names = [stage.name for stage in llm.cycle.stages(key)]
    assert names[:2] == ["mailbox", "mask_tokens"], "one stage fills the pool"
    assert llm.plan.draft is not None
    floor = FloorModel.of(llm.plan.target, llm.plan.draft, "float32", llm.plan.variant).stages(llm.plan.shape, 1, 32)
    assert [(stage.name, stage.passes) for stage in floor] == [("mask_tokens", 1), ("verify", 1)]


def test_an_algorithm_from_outside_drafts_what_one_dense_pass_drafts(mask_tokens: None, pair: Pair):
    """Cycle by cycle: later ones find keys and values of masks in the slots of tokens that were committed since."""
    steps, prompt = 4, prompts(1)[0]
    llm = LLM(pair.target, variant="mask_tokens", runtime="eager", prefill_chunks=[8, 16], num_steps=steps, topk=1)
    layers = llm.plan.draft.decoder.num_layers
    dense = copy.deepcopy(pair.hf)
    dense.model.layers = dense.model.layers[:layers]
    embedding_VH = dense.model.embed_tokens.weight
    mask_1SH = embedding_VH.mean(0).expand(1, steps - 1, -1)
    greedy = pair.greedy(prompt, 40, ignore_eos=True)
    known = 1
    for cycle in range(1, 5):
        token_1T = torch.tensor([[*prompt, *greedy[:known]]])
        with torch.no_grad():
            logits_1TV = dense(inputs_embeds=torch.cat((embedding_VH[token_1T], mask_1SH), 1)).logits
        drafted = logits_1TV[0, -steps:].argmax(-1).tolist()
        tree = llm.draft_tree(prompt, cycle)
        assert tree.token_N == [greedy[known - 1], *drafted]
        matches = [a == b for a, b in zip(drafted, greedy[known:], strict=False)]
        known += 1 + (matches.index(False) if False in matches else steps)


def test_the_command_line_finds_it(tmp_path: Path):
    site = example("early_exit", tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from graphspec.cli.main import main; main()"
    command = [sys.executable, "-c", code, "generate", "variant=early_exit", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "name: early_exit" in done.stdout


@pytest.mark.parametrize(
    ("points", "module", "found"),
    [
        ("none = broken:VARIANT", 'VARIANT = Variant(name="none", summary="", drafter="none")', "next to the variant of that name"),
        ("mine = broken:VARIANT", 'VARIANT = Variant(name="other", summary="", drafter="none")', "name='other'"),
        ("mine = broken:VARIANT", "VARIANT = 3", "broken:VARIANT: 3"),
    ],
)
def test_a_bad_entry_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, points: str, module: str, found: str):
    site = install(tmp_path / "site", f"[graphspec.variants]\n{points}\n")
    (site / "broken.py").write_text(f"from graphspec.config.catalog import Variant\n{module}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigError, match=r"graphspec\.variants") as caught:
        all_variants()
    assert found in caught.value.found
    assert Variant.__module__ == "graphspec.config.catalog"
