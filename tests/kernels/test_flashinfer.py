"""The FlashInfer backend without FlashInfer: masks bit by bit, the adapter against the reference, refusals, and the calls it serves."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.api.llm import LLM
from graphspec.engine import kernel_choice
from graphspec.engine.request import SamplingParams
from graphspec.errors import CaptureError, ConfigError
from graphspec.kernels import KernelSet, resolve, select_kernels
from graphspec.kernels import flashinfer as package
from graphspec.kernels.attention.tree_attention import tree_attention
from graphspec.kernels.flashinfer import version, xqa
from graphspec.kernels.flashinfer.kernels import FlashInferKernels
from graphspec.kernels.flashinfer.planner import Planner
from graphspec.kernels.flashinfer.xqa import bind_window, pack_words, scratch_bytes
from graphspec.kernels.formulas import Rotation
from graphspec.models.attention import HeadTransform, TreeAttention
from tests.kernels.cases.attention import random_pool
from tests.support.checkpoints import VOCAB_SIZE, build_hf
from tests.support.engines import CHAIN, SMALL, TREE, Pair, ids, prompts, random_pair
from tests.support.fake_cuda import NoHostTraffic, load_cuda_guard
from tests.support.float_law import widened
from tests.support.xqa import StandIn, install

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch)


def to_words(bits_BTn: Tensor) -> Tensor:
    lanes, tokens, count = bits_BTn.shape
    return (bits_BTn.view(lanes, tokens, count // 64, 64).to(torch.int64) << torch.arange(64)).sum(-1)


@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 31, 32, 33, 63, 64, 65, 128])
def test_packed_words_bit_by_bit(tokens: int) -> None:
    count = 64 * (-(-tokens // 64) + 1)
    bits = torch.rand(3, tokens, count, generator=torch.Generator().manual_seed(tokens)) < 0.5
    bits[0], bits[1] = True, False
    packed = pack_words(to_words(bits))
    assert packed.dtype == torch.int32
    mask = packed.view(torch.uint16)
    assert tuple(mask.shape) == (3, tokens, 2 * -(-tokens // 32))
    for lane in range(3):
        for token in range(tokens):
            words = [int(word) for word in mask[lane, token]]
            found = [words[j // 16] >> (j % 16) & 1 for j in range(16 * len(words))]
            assert found[:tokens] == bits[lane, token, :tokens].int().tolist()
            assert not any(found[tokens:])


def test_too_few_words_are_refused() -> None:
    with pytest.raises(CaptureError, match="65 bits"):
        pack_words(torch.zeros(1, 65, 1, dtype=torch.int64))


def window_case(
    seed: int, ends: list[int], tokens: int, *, queries: int = 4, groups: int = 2, dim: int = 16, words: int | None = None
) -> dict[str, Any]:
    """Random trees over random pages. Slots after the window and unused pages are NaN; unused table entries are -1."""
    generator = torch.Generator().manual_seed(seed)
    lanes, page_size = len(ends), 16
    columns = -(-(max(ends) + tokens) // page_size) + 1
    pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
    count = 64 * (words or -(-tokens // 64))
    place, node = torch.arange(count), torch.arange(tokens)[:, None]
    bits = (torch.rand(lanes, tokens, count, generator=generator) < 0.4) & (place < node) | (place == node)
    for lane, end in enumerate(ends):
        for slot in range(end + tokens, columns * page_size):
            pool[:, :, table[lane, slot // page_size], slot % page_size] = torch.nan
        table[lane, -(-(end + tokens) // page_size) :] = -1
    return {
        "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator),
        "kv_pool": pool,
        "layer": 1,
        "table_BP": table,
        "prefix_begin_BT": torch.zeros(lanes, tokens, dtype=torch.int64),
        "prefix_end_B": torch.tensor(ends),
        "ancestors_BTX": to_words(bits),
        "scale": 0.7 * dim**-0.5,
    }


def attend(case: dict[str, Any]) -> Tensor:
    bound = bind_window(case["table_BP"], case["kv_pool"].shape[3], case["prefix_end_B"], case["ancestors_BTX"])
    return bound(case["query_BTQD"], case["kv_pool"], case["layer"], case["scale"])


@pytest.mark.parametrize(
    ("ends", "tokens", "shape"),
    [
        ([0, 7, 33], 1, {}),
        ([3, 16, 29], 5, {"queries": 6, "groups": 3}),
        ([15], 8, {"queries": 8, "groups": 1, "dim": 32}),
        ([0, 40], 31, {"queries": 2}),
        ([5], 33, {"queries": 2, "groups": 1}),
        ([1], 64, {"queries": 1, "groups": 1}),
        ([30], 65, {"queries": 1, "groups": 1, "words": 3}),
    ],
)
def test_the_adapter_equals_the_reference(stand_in: StandIn, ends: list[int], tokens: int, shape: dict[str, int]) -> None:
    case = window_case(tokens, ends, tokens, **shape)
    expected = tree_attention(**widened(case))
    found = attend(case)
    assert stand_in.calls == [tokens] and found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_lanes_and_nodes_that_hold_nothing(stand_in: StandIn, tokens: int) -> None:
    """A lane without a request has any length and no page; an unused node has no bit. Neither disturbs the others."""
    case = window_case(3, [9, 9, 9], tokens)
    expected = tree_attention(**case)
    case["ancestors_BTX"][1:] = 0
    case["prefix_end_B"][1:] = torch.tensor([-(2**40), 0])
    case["table_BP"][1:] = -1
    case["kv_pool"][:, :, 0] = torch.nan
    found = attend(case)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=2e-6)
    assert not found[1:].any()
    case = window_case(3, [9], tokens)
    case["ancestors_BTX"][0, -1] = 0
    torch.testing.assert_close(attend(case), tree_attention(**case), rtol=2e-6, atol=2e-6)


def test_nothing_is_read_on_the_host() -> None:
    """And FlashInfer is not imported: the operator is opaque to fake tensors."""
    load_cuda_guard()
    for tokens in (1, 8, 65):
        case = window_case(0, [20, 3], tokens)
        tensors = [(k, v.shape, v.dtype) for k, v in case.items() if isinstance(v, Tensor)]
        with FakeTensorMode(), NoHostTraffic() as watch:
            found = attend({**case, **{k: torch.empty(shape, dtype=dtype, device="cuda") for k, shape, dtype in tensors}})
        assert watch.ops > 5 and found.shape == case["query_BTQD"].shape and found.device.type == "cuda"


def test_a_compiled_region_stays_whole(stand_in: StandIn) -> None:
    case = window_case(1, [20, 3], 5)
    torch._dynamo.reset()
    found = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")(case)
    assert torch.equal(found, attend(case)) and stand_in.calls == [5, 5]


def test_workspace_bound() -> None:
    """An H200 has 132 multiprocessors: one lane of 8 groups gives each group 16 splits of 64 * 4 / 32 = 8 blocks of 32 rows."""
    assert scratch_bytes(1, 64, 32, 8, 128, 132) == 8 * 8 * 16 * 32 * (2 * 128 + 8) + 4096
    assert scratch_bytes(64, 64, 32, 8, 128, 132) < xqa.WORKSPACE_BYTES


def test_a_batch_beyond_the_workspace_is_refused(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xqa, "WORKSPACE_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"kernels\.attention.*1000 bytes"):
        attend(window_case(0, [4], 2))


@pytest.mark.parametrize(
    ("found", "supported"),
    [
        ("0.6.18", True), ("0.6.18.post1", True), ("0.7", True), ("0.7.2.post1", True), ("0.7.99", True),
        ("0.6.17", False), ("0.6.17.post9", False), ("0.8", False), ("0.8.0rc1", False), ("1.0.0", False), ("unknown", False),
    ],
)  # fmt: skip
def test_supported_versions(found: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert version.is_supported(found) is supported
    monkeypatch.setattr(version, "installed", lambda: found)
    if supported:
        version.check_version()
        return
    with pytest.raises(ConfigError) as error:
        select_kernels("fused", "flashinfer", "cuda", dtype="bfloat16")
    assert all(word in str(error.value) for word in ("kernels.attention", version.SUPPORTED, found, "pip install 'flashinfer-python"))


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "DISTRIBUTION", "no-such-distribution")
    assert version.installed() is None
    with pytest.raises(ConfigError, match=r"kernels\.attention.*not installed.*pip install"):
        version.check_version()


def test_extra_and_page_state_the_same_range() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
    assert f"flashinfer-python{version.SUPPORTED}" in extra
    assert version.SUPPORTED in (ROOT / "docs" / "kernels.md").read_text()


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: "0.7.2.post1")
    kernels, fused = (select_kernels("fused", name, "cuda", dtype="bfloat16") for name in ("flashinfer", "fused"))
    assert type(kernels) is FlashInferKernels and type(fused) is KernelSet
    # Whatever xqa doesn't serve runs fused; linear layers are picked anew each time.
    for name in {field.name for field in fields(KernelSet)} - {"linear", "packed_linear", "linear_kv_write", "scope"}:
        assert getattr(kernels, name) is getattr(fused, name)
    assert resolve("kernels.attention", "auto", "fused", "cuda", "bfloat16") == "fused"


@pytest.mark.parametrize(
    ("arguments", "keys", "words"),
    [
        (("fused", "flashinfer", "cpu"), {}, ("kernels.attention", "flashinfer", "CUDA")),
        (("reference", "flashinfer", "cuda"), {}, ("kernels.attention", "flashinfer", "kernels.mode=fused")),
        (("fused", "flashinfer", "cuda"), {"numerics": "batch_invariant"}, ("kernels.numerics", "batch_invariant")),
        (("fused", "auto", "cuda"), {"linear": "flashinfer"}, ("kernels.linear", "flashinfer")),
    ],
)
def test_selection_refuses(
    arguments: tuple[str, str, str], keys: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "installed", lambda: "0.7.2")
    with pytest.raises(ConfigError) as error:
        select_kernels(*arguments, dtype="bfloat16", **keys)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_capabilities(capability: tuple[int, int]) -> None:
    version.check_capability(capability)


def test_capability_refused() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.attention.*9\.x, 10\.x, 12\.x, found 8\.6"):
        version.check_capability((8, 6))


LLAMA_8B: dict[str, Any] = {
    "page_size": 16, "dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "windows": (None,) * 32, "latent": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [{}, {"page_size": 128}, {"dtype": "float16"}, {"head_dim": 256}, {"windows": (4096, None)}, {"windows": (4096, 4096)}]
)
def test_shapes_served(change: dict[str, Any]) -> None:
    version.check_pool("target", **{**LLAMA_8B, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 8}, ("runtime.page_size", "16, 32, 64, 128", "found 8")),
        ({"dtype": "float32"}, ("hardware.dtype", "bfloat16", "found float32")),
        ({"head_dim": 264}, ("target", "256", "found 264")),
        ({"head_dim": 72}, ("target", "multiple of 16", "found 72")),
        ({"num_kv_heads": 1}, ("target", "16 query heads", "32 query heads over 1")),
        ({"windows": (4096, 4096), "head_dim": 96}, ("target", "sliding window")),
    ],
)
def test_shapes_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        version.check_pool("target", **{**LLAMA_8B, **change})
    assert all(word in str(error.value) for word in ("flashinfer", *words))


def test_importing_it_imports_nothing() -> None:
    code = f"import sys, {package.__name__}.version; assert not {{'triton', 'flashinfer'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return random_pair(tmp_path_factory.mktemp("random"), build_hf("llama", num_hidden_layers=3, eos_token_id=VOCAB_SIZE - 1))


Engine = Callable[..., LLM]


@pytest.fixture
def engine(pair: Pair, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Engines on references, with the stand-in where a call may go to ``xqa``."""
    references = select_kernels("reference", "reference", "cpu")
    kernels = FlashInferKernels(**{f.name: getattr(references, f.name) for f in fields(references)}, planner=Planner("cpu"))
    monkeypatch.setattr(kernel_choice, "select_kernels", lambda *_, **__: kernels)
    monkeypatch.setattr(version, "DTYPES", ("float32",))

    def build(variant: str, **keys: Any) -> LLM:
        draft = {"eagle3": pair.draft, "standalone": pair.target}.get(variant)
        small = {"max_rows": 1, "buckets": [1], "page_size": 16, "max_context": 48}
        return LLM(pair.target, variant=variant, draft=draft, **{**SMALL, **small, **keys})

    return build


@pytest.mark.parametrize(
    ("variant", "shape", "served"),
    [
        # Nodes of the target. EAGLE's drafter never writes slot 0, which xqa would see.
        ("eagle3", CHAIN, {5}), ("eagle3", TREE, {10}), ("none", {}, {1}),
        # A small model as drafter reads every token: its run (as wide as a cycle can commit) and, in a chain, its single beams.
        ("standalone", CHAIN, {5, 1}), ("standalone", TREE, {10, 4}),
    ],
)  # fmt: skip
def test_engines(
    pair: Pair,
    engine: Engine,
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    shape: dict[str, int],
    served: set[int],
) -> None:
    """Tokens equal transformers', and every call equals the general op's."""
    original = TreeAttention.__call__
    compared = 0

    def both(self: TreeAttention, *arguments: Any) -> Tensor:
        nonlocal compared
        found = original(self, *arguments)
        if self.own_window is not None:
            general = original(replace(self, own_window=None), *arguments)
            torch.testing.assert_close(found[self.valid_BT], general[self.valid_BT], rtol=2e-6, atol=2e-6)
            compared += int(self.valid_BT.any())
        return found

    monkeypatch.setattr(TreeAttention, "__call__", both)
    llm = engine(variant, **shape)
    (prompt,) = prompts(1, lengths=(7,), vocab=VOCAB_SIZE)
    assert ids(llm.generate([prompt], SamplingParams(max_tokens=12))) == [pair.greedy(prompt, 12)]
    assert set(stand_in.calls) == served and compared > 5
    if variant == "standalone" and shape["topk"] == 1:
        # The draft is the target.
        assert llm.metrics is not None and llm.metrics.acceptance_length > 3.9


def test_engines_refuse_shapes(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.page_size.*16, 32, 64, 128.*found 4"):
        engine("none", page_size=4).generate([[1, 2]], SamplingParams(max_tokens=1))


def test_sliding_window_layers_stay_with_the_general_op(stand_in: StandIn) -> None:
    references = select_kernels("reference", "reference", "cpu")
    functions = {f.name: getattr(references, f.name) for f in fields(references)}
    kernels = FlashInferKernels(**{**functions, "rope_kv_write": lambda query_BTQD, *_: query_BTQD}, planner=Planner("cpu"))
    case = window_case(2, [20], 3, queries=2, groups=2)
    position = case["prefix_end_B"][:, None] + torch.arange(3)
    attention = TreeAttention(
        kernels=kernels, kv_pool=case["kv_pool"], table_BP=case["table_BP"], position_BT=position,
        valid_BT=torch.ones(1, 3, dtype=torch.bool), slot_BT=position, begin_BT=torch.zeros_like(position),
        prefix_end_B=case["prefix_end_B"],
        ancestors_BTX=case["ancestors_BTX"],
        own_window=kernels.own_window(case["table_BP"], 16, case["prefix_end_B"], case["ancestors_BTX"]),
    )  # fmt: skip
    query, heads = case["query_BTQD"], HeadTransform(Rotation(torch.ones(1, 16), position))
    narrow = attention(0, query, query, query, heads, 0.25, 4)
    assert stand_in.calls == []
    wide = attention(0, query, query, query, heads, 0.25, None)
    assert stand_in.calls == [3] and not torch.allclose(narrow, wide)
