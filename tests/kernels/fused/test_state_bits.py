"""A state has the same bits from every kernel: sums of walk, scan and commit are added in one order, as compiled for sm_90.

``python -m tests.kernels.fused.test_state_bits`` prints JSON, in a process in which Triton does not interpret.
"""

from __future__ import annotations

import json
import re

from tests.kernels.fused._compiled import without_interpreter

KERNELS = ("walk_nodes", "scan_tokens", "commit_states")
_LAYOUT = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
_REDUCED = re.compile(r"^\s*\}\) : \((tensor<[^>]*>)\) ->", re.MULTILINE)


def reductions(ttgir: str) -> list[str]:
    """What a kernel sums: type and layout of each tensor, with the layout's name resolved. The layout fixes the order of a sum."""
    layouts = dict(_LAYOUT.findall(ttgir))
    found = set()
    for tensor in _REDUCED.findall(ttgir):
        name = tensor.rpartition(", ")[2].removesuffix(">")
        found.add(tensor.replace(name, layouts.get(name, name)))
    return sorted(found)


def main() -> None:
    from graphspec.kernels.fused.launch import recording
    from tests.kernels.proof.aot import aot_cases, lowered

    table = {}
    for file, case in aot_cases():
        if not file.startswith("state_"):
            continue
        with recording() as launches:
            case.launcher(**case.arguments())
        (launch,) = launches
        if (kernel := launch.kernel.fn.__name__.strip("_")) in KERNELS:
            table[f"{kernel}/{case.name}"] = reductions(lowered(launch))
    print(json.dumps(table))


def test_sums_of_a_state_are_added_in_one_order() -> None:
    """The scan of a prompt sums what a walk sums, the commit as much of it as the state takes."""
    table = json.loads(without_interpreter("tests.kernels.fused.test_state_bits"))
    for model, rule in (("qwen3-next", "delta"), ("nemotron-h", "ssm"), ("wide-state", "ssm")):
        walks, scans, commits = ({name: sums for name, sums in table.items() if name.startswith(f"{kernel}/{model}")} for kernel in KERNELS)
        assert walks and scans and commits, model
        (walked,) = {tuple(sums) for sums in walks.values()}
        assert {tuple(sums) for sums in scans.values()} == {walked}
        assert all(set(sums) <= set(walked) for sums in commits.values())
        assert walked and all(sums or rule == "ssm" for sums in commits.values())


def test_another_layout_is_another_order() -> None:
    text = '#a = #ttg.blocked<{{sizePerThread = [{0}]}}>\n  %s = "tt.reduce"(%x) ({{\n  }}) : (tensor<128xf32, #a>) -> f32 loc(#loc)\n'
    assert reductions(text.format(1)) == ["tensor<128xf32, #ttg.blocked<{sizePerThread = [1]}>>"] != reductions(text.format(2))


if __name__ == "__main__":
    main()
