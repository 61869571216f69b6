"""``train.qat``: a draft computes with rounded weights, its updates go to exact ones, and its codes are found again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from graphspec.config.compose import load_config
from graphspec.config.train_options import QAT_FORMATS, QatConfig
from graphspec.errors import ConfigError
from graphspec.kernels.linear.packed import dequantise
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.quantise import quantise
from graphspec.train.qat import SHARES, RoundedWeights
from graphspec.train.run import run
from graphspec.weights.rounding import MINMAX, MSE, ROUNDED, round_to
from tests.support.drafts import build, tiny_target
from tests.train.test_train import FAST, save_target, texts  # noqa: F401

MODULES = ["layers", "fc", "lm_head"]
NAMES = r"train\.qat\.modules: expected layers or names of linear layers: down_proj, fc, gate_up_proj, lm_head, o_proj, qkv_proj"


def network() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = build("eagle3", tiny_target(), draft_vocab_size=64).network
    return made


def rounded_names(one: nn.Module, other: nn.Module) -> set[str]:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return {name for (name, before), (_, after) in pairs if not torch.equal(before, after)}


@pytest.mark.parametrize("code", QAT_FORMATS)
def test_what_a_network_computes_with_is_what_it_will_be_published_with(code: str) -> None:
    exact, applied = network(), network()
    RoundedWeights(applied, QatConfig(format=code, group=None if code == "fp8" else 16, modules=MODULES)).apply()
    layer = "layers.0."
    projections = {f"{layer}self_attn.qkv_proj.weight", f"{layer}self_attn.o_proj.weight", f"{layer}mlp.gate_up_proj.weight"}
    assert rounded_names(exact, applied) == {*projections, f"{layer}mlp.down_proj.weight", "fc.weight", "lm_head.weight"}
    row, scale = ROUNDED[code], exact.get_submodule("fc").get_buffer("input_scale")
    for name in ("fc.weight", "lm_head.weight"):
        before, after = exact.get_parameter(name).detach(), applied.get_parameter(name).detach()
        factor = scale if name == "fc.weight" else torch.ones(before.shape[1])
        # The checkpoint has fc's weight times the scale of its inputs, and a format that rounds rows whole must see that.
        published = (before * factor).bfloat16()
        group = 16 if row.group is None else published.shape[1]
        shares = SHARES if code == "int4" else ()
        expected = dequantise(round_to(published, row, group, MSE if shares else MINMAX, shares), torch.float32)
        assert torch.equal(after * factor, expected)


def test_gradients_are_those_of_the_rounded_network_and_updates_go_to_the_exact_one() -> None:
    trained, reference = network(), network()
    rounded = RoundedWeights(trained, QatConfig(format="int4", group=16, modules=MODULES))
    RoundedWeights(reference, QatConfig(format="int4", group=16, modules=MODULES)).apply()
    begun = copy.deepcopy(trained.state_dict())
    features_F = torch.randn(1, 5, trained.get_parameter("fc.weight").shape[1])

    def backward(made: nn.Module) -> dict[str, torch.Tensor]:
        made.logits(made.fuse(features_F)).square().mean().backward()
        return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}

    with rounded.applied():
        assert rounded_names(trained, reference) == set()
        found = backward(trained)
    expected = backward(reference)
    assert {"fc.weight", "lm_head.weight"} <= found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].any() for name in found)
    assert all(torch.equal(begun[name], value) for name, value in trained.state_dict().items())


def test_weights_come_back_if_a_step_fails() -> None:
    trained, untouched = network(), network()
    with pytest.raises(ZeroDivisionError), RoundedWeights(trained, QatConfig(format="int8", group=16)).applied():
        assert rounded_names(trained, untouched)
        raise ZeroDivisionError
    assert rounded_names(trained, untouched) == set()


@pytest.mark.parametrize(
    ("variant", "network"), [("eagle3", ["train.network.draft_vocab_size=64", "train.network.tap_layers=[1,2]"]), ("standalone", [])]
)
def test_the_codes_of_a_finished_draft_are_found_again(tmp_path: Path, texts: Path, variant: str, network: list[str]) -> None:  # noqa: F811
    target, out = save_target(tmp_path / "target", "llama"), tmp_path / "out"
    words = [f"variant={variant}", f"model.path={target}", f"train.data=[{texts}]", f"train.out={out}", *FAST, *network]
    record = run(load_config(*words, "train.qat.format=int4", "train.qat.group=8"))
    assert record["config"]["qat"]["format"] == "int4"
    written, packed = Checkpoint(out), Checkpoint(quantise(out, tmp_path / "packed", "int4", group=8, observer="mse").folder)
    names = [name for name in packed.names() if packed.is_packed(name)]
    assert len(names) >= 7
    for name in names:
        # Products of a code and a scale, rounded to bfloat16; another code is an eighth off, or more.
        torch.testing.assert_close(packed.raw(name), written.raw(name).float(), rtol=2**-6, atol=0)
    without = run(load_config(*words[:3], f"train.out={tmp_path / 'without'}", *FAST, *network))
    assert without["training"]["loss_by_depth"] != record["training"]["loss_by_depth"]


def test_a_resumed_run_has_the_same_bits(tmp_path: Path, texts: Path) -> None:  # noqa: F811
    target = save_target(tmp_path / "target", "llama")
    words = ["variant=eagle3", f"model.path={target}", f"train.data=[{texts}]", *FAST, "train.schedule=constant", "train.warmup=0"]
    words += ["train.network.draft_vocab_size=64", "train.network.tap_layers=[1,2]", "train.qat.format=int4", "train.qat.group=8"]
    run(load_config(*words, f"train.out={tmp_path / 'whole'}"))
    for steps in (2, 6):
        run(load_config(*words, f"train.out={tmp_path / 'parts'}", f"train.phases=[[{steps},4,24]]"))
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_what_cannot_be_rounded() -> None:
    for message, settings in (
        (r"train\.qat\.format: found .int3. .*expected one of int4, int8, fp8", {"format": "int3"}),
        (r"train\.qat\.group: expected a multiple of 8, found 12", {"format": "int4", "group": 12}),
        (r"train\.qat\.group: expected none, as the format fixes it, found 32", {"format": "fp8", "group": 32}),
        (r"train\.qat\.group: expected a divisor of the \d+ channels of \S+, found 4096", {"format": "int4", "group": 4096}),
        (rf"{NAMES}, found 'embed_tokens'", {"format": "int4", "modules": ["embed_tokens"]}),
        (rf"{NAMES}, found 'experts'", {"format": "int4", "modules": ["layers", "experts"]}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            RoundedWeights(network(), QatConfig(**settings))


def test_a_tied_head_is_no_layer_of_its_own() -> None:
    made = build("standalone", tiny_target())
    with pytest.raises(ConfigError, match=r"linear layers: down_proj, gate_up_proj, o_proj, qkv_proj, found 'lm_head'"):
        RoundedWeights(made.network, QatConfig(format="int4", modules=["lm_head"]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.qat.modules=[layers,head]", rf"{NAMES}, found 'head'"),
        ("train.qat.group=24", r"train\.qat\.group: expected a divisor of the \d+ channels of "),
        ("train.network.tap_layers=[1,2,9]", r"train\.network\.tap_layers: "),
    ],
)
def test_what_does_not_fit_is_refused_before_text_is_written(setting: str, message: str, tmp_path: Path, texts: Path) -> None:  # noqa: F811
    words = ["variant=eagle3", f"model.path={save_target(tmp_path / 'target', 'llama')}", f"train.data=[{texts}]"]
    words += ["train.network.draft_vocab_size=64", "train.network.tap_layers=[1,2]", "train.qat.format=int4"]
    with pytest.raises(ConfigError, match=message):
        run(load_config(*words, *FAST, f"train.out={tmp_path / 'out'}", setting))
    assert not [file for file in (tmp_path / "out.work").rglob("*") if file.is_file()]
