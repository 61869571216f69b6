"""GPU measurement tools without a GPU: they build and count bytes, and README agrees with the result files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.shapes import CycleShape
from perf import gpu_check
from perf.gpu import checks, readme, warm
from perf.gpu.bench import EAGLE3_8B, JETSPEC_8B, LLAMA_8B, QWEN3_8B, Bench, Case, measure, write_configs
from perf.gpu.latency import PARALLEL
from perf.gpu.results import Evidence
from perf.gpu.static_decode import compiled_step
from perf.none_cost import DenseLoop, PlainLoop
from tests.support.codegen import pretended_gpu
from tests.support.gpu_configs import small_jetspec

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    draft = {**EAGLE3_8B, **SMALL, "num_hidden_layers": 1, "draft_vocab_size": 31}
    return write_configs(tmp_path_factory.mktemp("configs"), {**LLAMA_8B, **SMALL}, draft)


def test_a_bench_cycle_moves_every_row_by_the_forced_length(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "cycles_before_rewind", lambda bench: 2)
    case = Case("tree", CycleShape(3, 2, 6), lanes=2, context=40, length=3.0)
    bench = Bench(case, *folders, device="cpu", runtime="eager")
    bench.rewind()
    before = bench.cycle.arena["seq_len_R"][:2].tolist()
    for _ in range(8):
        bench.cycle.read(bench.cycle.launch(bench.key, bench.message))
    moved = [now - then for now, then in zip(bench.cycle.arena["seq_len_R"][:2].tolist(), before, strict=True)]
    assert before == [40, 40] and moved == [24, 24]
    assert bench.host_microseconds(cycles=3) > 0
    assert list(bench.stage_milliseconds(seconds=0.0)) == [stage.name for stage in bench.cycle.programs[bench.key].stages]
    # The same weights serve another case.
    plain = Bench(Case("none", CycleShape(0, 1, 1), context=40), *folders, device="cpu", runtime="eager", networks=bench.networks)
    assert plain.networks[0] is bench.networks[0]


def test_a_block_drafters_cycle_accepts_runs_as_deep_as_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trees are narrow, or the published lengths could not be forced; and the same bench counts its floor."""
    monkeypatch.setattr(Bench, "cycles_before_rewind", lambda bench: 4)
    folders = write_configs(tmp_path, *small_jetspec(SMALL))
    case = Case("jetspec", CycleShape(16, 7, 128, "marginals"), context=40, length=9.0, variant="dflash")
    bench = Bench(case, *folders, device="cpu", runtime="eager")
    assert bench.accepted_length(4) == 9.0
    weights = sum(parameter.numel() for network in bench.networks for parameter in network.parameters())
    assert 4 * weights * 0.9 < bench.floor_bytes() < 4 * weights * 3


def test_the_cycles_of_jetspecs_shape_need_no_host(tmp_path: Path) -> None:
    """The programs that would be captured, at the real sizes over fake CUDA tensors: 36 target layers and 5 of the draft, in one pass."""
    folders = write_configs(tmp_path, QWEN3_8B, JETSPEC_8B)
    cases = (PARALLEL[0], PARALLEL[-1])
    with pretended_gpu():
        found = [Counter(launch.kernel.fn.__name__ for launch in warm.launches_of(case, *folders)) for case in cases]
    assert [case.shape.numbers for case in cases] == [[8, 7, 64], [16, 7, 128]]
    # 64 nodes keep the law of numerics, 128 are more than it serves.
    assert [(kernels["_position_attention"], kernels["_tree_attention"]) for kernels in found] == [(36, 5), (0, 41)]
    for kernels in found:
        assert kernels["_marginal_pool"] == kernels["_draft_topk"] == kernels["_tree_build"] == 1
        assert not {"_draft_level", "_take_last"} & set(kernels)
    # Four products a layer and the target's head are ours for 64 nodes, and the library's for 128.
    assert found[0]["_linear"] - found[1]["_linear"] == 4 * 36 + 1


def test_the_floor_of_llama_8b_is_the_one_computed_by_hand(tmp_path: Path) -> None:
    """7.505e9 streamed parameters of two bytes; keys and values of 2048 tokens, 131072 bytes each; 0.374e9 in every draft pass."""
    target, draft = write_configs(tmp_path)
    with torch.device("meta"):
        bench = object.__new__(Bench)
        bench.case = Case("tree", CycleShape(5, 4, 8))
        bench.plan = _plan(bench, target, draft)
        bench.networks = _networks(target, draft)
    weights, kv = 2 * 7.505e9, 2048 * 131072
    head = 2 * (8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 * 32000)
    expected = weights + kv + 2 * 3 * 4096 * 4096 + 5 * (head + 2048 * 4096)
    assert bench.floor_bytes() == pytest.approx(expected, rel=1e-3)


def _plan(bench: Bench, target: Path, draft: Path) -> Any:
    from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
    from graphspec.facts import read_model_facts
    from graphspec.plan.plan import make_plan

    facts = read_model_facts(target)
    config = Bench.config_of(bench.case, target, draft, "cuda", "captured")
    return make_plan(config, facts, read_eagle3_facts(draft, facts), device="cuda")


def _networks(target: Path, draft: Path) -> Any:
    from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
    from graphspec.drafters.heads.eagle3_network import Eagle3Draft
    from graphspec.facts import read_model_facts
    from graphspec.models.decoder import Decoder

    facts = read_model_facts(target)
    head = read_eagle3_facts(draft, facts)
    model = Decoder(facts, head.tap_layers, 16).bfloat16()
    return model, Eagle3Draft(head, 16, embed_tokens=model.embed_tokens).bfloat16()


def test_the_shortest_loop_decodes_greedily(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same network under the engine's own attention, from an empty cache."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    bench = Bench(Case("none", CycleShape(0, 1, 1), context=1), *folders, device="cpu", runtime="eager")
    step, cache, token = compiled_step(bench.networks[0], 16)
    found = []
    with torch.no_grad():
        for _ in range(6):
            step()
            found.append(int(token))
    from tests.support.checkpoints import DenseAttention

    sequence = [1]
    with torch.no_grad():
        for _ in range(6):
            hidden = bench.networks[0](torch.tensor([sequence]), DenseAttention.prompt(1, len(sequence)))[0]
            sequence.append(int(bench.networks[0].logits(hidden)[0, -1].argmax()))
    assert found == sequence[1:]
    assert cache.position_BT.item() == 6


def test_the_plain_loops_give_the_engines_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sides of ``python -m perf.none_cost``."""
    from graphspec.engine.request import SamplingParams
    from tests.support.engines import mirror_pair, prompts

    pair = mirror_pair(tmp_path)
    llm = pair.llm(variant="none", max_rows=1, buckets=[1])
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    prompt = prompts(1)[0]
    for loop in (PlainLoop(llm), DenseLoop(llm, len(prompt) + 8)):
        found, seconds = loop.run(prompt, 8, pair.hf.generation_config.eos_token_id)
        assert found == pair.greedy(prompt, 8) == llm.generate(prompt, SamplingParams(max_tokens=8))[0].token_ids
        assert seconds > 0


def test_measure_reports_the_median_of_blocks() -> None:
    calls: list[str] = []
    found = measure(lambda: calls.append("run"), lambda: calls.append("rewind"), 4, "cpu", 0.01, 0.0)
    assert calls[:5] == ["rewind", "run", "run", "run", "run"]
    assert found["p10"] <= found["median"] <= found["p90"] and found["blocks"] >= 1


def rows(**changes: float) -> list[dict[str, Any]]:
    case = {"kind": "cycle", "case": "tree (5,4,8)", "lanes": 1, "milliseconds": 5.0, "floor_milliseconds": 4.5, "percent_of_floor": 90.0,
            "tokens_per_second": 800.0, "acceptance_length": 4.0, "synthetic": True, "host_microseconds": 30.0}  # fmt: skip
    return [{"kind": "bandwidth", "bytes_per_second": 4.3e12}, {**case, **changes}]


def test_readme_says_what_the_files_say() -> None:
    assert readme.main(["--check"]) == 0, "run python -m perf.gpu.readme"


def test_a_missed_bound_is_marked() -> None:
    met, missed = ("\n".join(readme.target_lines([("", rows(milliseconds=ms))])) for ms in (5.0, 6.0))
    assert "1.11x (5.00 ms) |" in met and "1.33x (6.00 ms), not met |" in missed
    assert met.count(readme.NOT_RUN) == 6
    assert "(synthetic)" in "\n".join(readme.cycle_lines(rows()))


def test_without_files_nothing_is_claimed() -> None:
    text = readme.section([])
    assert "No GPU has run this code yet" in text and text.count(readme.NOT_RUN) == len(readme.TARGETS) + 2


def test_missing_packages_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    arguments, names = zip(*checks.left_out(), strict=True)
    ignored, deselected = (Path(argument.partition("=")[2].partition("::")[0]) for argument in arguments)
    assert (gpu_check.ROOT / ignored).is_file()
    assert f"def {checks.SANITIZER.partition('::')[2]}(" in (gpu_check.ROOT / deselected).read_text()
    summary = {"kind": "summary", "part": "tests", "green": True, "selected": [], "not_installed": names}
    evidence = Evidence({"date": "2026-01-01", "revision": "abc"}, [summary])
    assert "Left out, not installed there: FlashInfer, compute-sanitizer." in readme.section([evidence])
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    monkeypatch.setattr(checks.shutil, "which", lambda name: name)
    assert checks.left_out() == []
