"""Reading result files: errors name file and line, repeated measurements are shown once, labels distinguish sides."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.errors import ConfigError
from graphspec.lab.measure import results
from tests.support.report_records import provenance, read, side, write

SIDE = '{"kind": "side", "case": "c", "side": "s", "role": "subject", "batch": 1, "equal": true, '


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"kind": "side", "case": ', "a JSON object"),
        ("[1, 2]", "a JSON object"),
        ('{"kind": "plan", "batch": NaN}', "NaN"),
        ("[" * 100_000, "a JSON object"),
        ('{"kind": "side", "case": "c", "side": "s", "role": "subject", "batch": 1}', "equal: expected bool or null"),
        ('{"kind": "side", "case": "c", "side": "s", "role": "subject", "batch": "1", "equal": true}', "batch: expected int"),
        (SIDE + '"shape": [1]}', "shape: expected"),
        (SIDE + '"ratio": 3}', "ratio: expected an"),
        (SIDE + '"stages": [{"ms": 1}]}', "stages: expected a list of objects with the text name"),
        (SIDE + '"stages": [{"name": "x", "ms": "1"}]}', "stages: expected"),
        (SIDE + '"memory": {"name": "x"}}', "memory: expected a list"),
        (SIDE + '"itl_samples_ms": [1, "2"]}', "itl_samples_ms: expected a list of numbers"),
        (SIDE + '"burst_tokens": {"one": 1}}', "burst_tokens: expected an object"),
        (SIDE + '"ratio": {"to": "none", "median": 1, "rounds": [null]}}', "ratio: expected an object whose rounds are a list of numbers"),
        (SIDE + '"acceptance_along_text": [1, true]}', "acceptance_along_text: expected a list of numbers"),
        (SIDE + '"acceptance_by_request": {"first": 1}}', "acceptance_by_request: expected an object of numbers by request"),
        (SIDE + '"acceptance_by_request": {"0": null}}', "acceptance_by_request: expected an object of numbers by request"),
        (SIDE + '"first_request": [[1]]}', "first_request: expected a list of pairs of milliseconds and tokens"),
        (SIDE + '"stretch_tokens": "8"}', "stretch_tokens: expected a number"),
        ('{"kind": "provenance", "trace": 1}', "trace: expected a path relative to the file"),
        (SIDE + '"floor_ms": 1e999}', "1e999, which is no JSON"),
        ('{"kind": "prediction", "predicted_ms": 1, "measured_ms": null}', "measured_ms: expected a number"),
        ('{"kind": "generation"}', "cycles: expected a list"),
        ('{"kind": "generation", "cycles": [{"nodes": []}]}', "cycles[0]: expected an object"),
        ('{"kind": "generation", "cycles": [{"nodes": [{"parent": -1}, {"parent": 1}], "emitted": []}]}', "cycles[0].nodes[1].parent"),
        ('{"kind": "generation", "cycles": [{"nodes": [{"parent": 0}], "emitted": []}]}', "cycles[0].nodes[0].parent"),
    ],
)  # fmt: skip
def test_a_broken_line_is_one_error_that_names_file_and_line(tmp_path, line, expected):
    file = tmp_path / "broken.jsonl"
    file.write_text(json.dumps(provenance()) + "\n\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        results.read_results([str(file)])
    assert f"{file}:3" in str(caught.value)
    assert expected in str(caught.value)


def test_files_and_folders_are_read_once_each_and_strange_lines_ignored(tmp_path):
    file = write(
        tmp_path / "a" / "deep", [provenance(), {"kind": "other"}, {"no": "kind"}, {"kind": ["list"]}, side("x", "subject", 1, 10.0)]
    )
    write(tmp_path / "a", [provenance(), side("y", "subject", 1, 10.0)], "two.jsonl")
    (tmp_path / "a" / "notes.txt").write_text("not read", encoding="utf-8")
    found = results.read_results([str(tmp_path / "a"), str(file)])
    assert sorted(side.label for side in found.sides) == ["x", "y"]
    assert len(found.provenances) == 2


def test_nothing_to_read_or_to_show_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no file or folder"):
        results.read_results([str(tmp_path / "absent")])
    with pytest.raises(ConfigError, match=r"no \.jsonl file"):
        results.read_results([str(tmp_path)])
    with pytest.raises(ConfigError, match="side, generation, prediction or plan"):
        read(tmp_path, [provenance(), {"kind": "settings"}])


def test_a_side_measured_again_is_shown_once_and_the_newest_counts(tmp_path):
    old, new = provenance(date="2026-01-01T00:00:00+00:00"), provenance(date="2026-02-01T00:00:00+00:00")
    found = read(tmp_path, [new, side("x", "subject", 1, 222.0), old, side("x", "subject", 1, 111.0)])
    [only] = found.sides
    assert only.provenance["date"].startswith("2026-02")
    assert found.replaced == 1


FIELDS = st.fixed_dictionaries({
    "side": st.sampled_from(["a", "b"]), "batch": st.sampled_from([1, 2]), "temperature": st.sampled_from([0.0, 1.0]),
    "dtype": st.sampled_from(["float32", "bfloat16"]), "case": st.sampled_from(["c", "d"]), "role": st.sampled_from(["subject", "none"]),
    "shape": st.sampled_from([None, [5, 4, 16]]), "attention": st.sampled_from(["torch", None]),
})  # fmt: skip


@given(st.lists(FIELDS, min_size=1, max_size=8))
def test_labels_distinguish_sides_and_begin_with_their_name(fields):
    sides = [results.SideRecord("f:1", {"equal": True, **record}, {}) for record in fields]
    results._label(sides)
    assert len({(side.label, side.batch) for side in sides}) == len(sides)
    assert all(side.label.startswith(side.record["side"]) for side in sides)


def test_a_label_says_only_what_differs(tmp_path):
    lines = [side("x", "subject", 1, 10.0, temperature=temperature) for temperature in (0.0, 1.0)] + [side("y", "subject", 1, 10.0)]
    assert [one.label for one in read(tmp_path, [provenance(), *lines]).sides] == ["x, T=0", "x, T=1", "y"]
