"""The listed damaged and hostile checkpoints."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save, save_file

from ._bench import DRAFT, MAP, SMALL, Bench, Evil, header, instead, keys, mapped, pickled, raw, sharded, tensors, vocabularies, write
from ._harness import Case

NORM = "model.norm.weight"
NAN, INF = float("nan"), float("inf")


def _shift(values: dict[str, Any]) -> None:
    values[NORM]["data_offsets"] = [offset + 4 for offset in values[NORM]["data_offsets"]]


def _twice(data: bytes) -> bytes:
    """The same tensor name two times in a header."""
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].rstrip()
    entry = json.dumps({NORM: json.loads(text)[NORM]}).encode()
    text = text[:-1] + b"," + entry[1:]
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def weight_cases(bench: Bench) -> list[Case]:
    """A safetensors file that is damaged, or holds other tensors."""
    sizes = (0, 1, 7, 8, 9, 100, 1000, 20000, 52000)
    bytes_ = {
        **{f"cut to {size} bytes": lambda data, size=size: data[:size] for size in sizes},
        "a header of 2^63 bytes": lambda data: struct.pack("<Q", 2**63) + data[8:],
        "a header of 2^64 - 1 bytes": lambda data: b"\xff" * 8 + data[8:],
        "a header of 10^9 bytes": lambda data: struct.pack("<Q", 10**9) + data[8:],
        "a header that is no json": lambda data: data[:8] + b"\xff" * 100 + data[108:],
        "trailing bytes": lambda data: data + b"x" * 100,
        "a deep header": lambda data: struct.pack("<Q", 100000) + b"[" * 100000,
    }
    entries = {
        "overlapping offsets": _shift,
        "negative offsets": lambda values: values[NORM].update(data_offsets=[-4, 10]),
        "huge offsets": lambda values: values[NORM].update(data_offsets=[0, 2**62]),
        "a huge shape": lambda values: values[NORM].update(shape=[2**40, 2**40]),
        "an unknown dtype": lambda values: values[NORM].update(dtype="X9"),
        "an integer dtype": lambda values: values[NORM].update(dtype="I32"),
        "a shape of no numbers": lambda values: values[NORM].update(shape=["a"]),
    }
    fair = {
        "float64": lambda t: {name: value.double() for name, value in t.items()},
        "float16": lambda t: {name: value.half() for name, value in t.items()},
        "NaN everywhere": lambda t: {name: value * NAN for name, value in t.items()},
        "NaN in the head": lambda t: t | {"lm_head.weight": t["lm_head.weight"] * NAN},
        "infinite norms": lambda t: t | {NORM: t[NORM] * INF},
        "huge values": lambda t: {name: value * 1e38 for name, value in t.items()},
    }
    unfit = {
        "int8": lambda t: {name: value.to(torch.int8) for name, value in t.items()},
        "bool": lambda t: {name: value.bool() for name, value in t.items()},
        "float8": lambda t: {name: value.to(torch.float8_e4m3fn) for name, value in t.items()},
        "no tensors": lambda t: {},
        "one missing": lambda t: {name: value for name, value in t.items() if name != NORM},
        "one more": lambda t: t | {"evil": torch.ones(2)},
        "one without elements": lambda t: t | {NORM: torch.ones(0)},
        "the head transposed": lambda t: t | {"lm_head.weight": t["lm_head.weight"].t().contiguous()},
    }
    heads = {
        "d2t out of range": lambda t: t | {"d2t": t["d2t"] + 1000},
        "d2t negative": lambda t: t | {"d2t": t["d2t"] - 1000},
        "d2t at the edge of int64": lambda t: t | {"d2t": torch.full_like(t["d2t"], 2**63 - 1)},
        "d2t float": lambda t: t | {"d2t": t["d2t"].float()},
        "d2t twice the same": lambda t: t | {"d2t": -torch.arange(len(t["d2t"]))},
        "t2d inverted": lambda t: t | {"t2d": ~t["t2d"]},
    }
    fair_heads = {
        "NaN everywhere": lambda t: {name: value * NAN if value.is_floating_point() else value for name, value in t.items()},
        "an infinite head": lambda t: t | {"lm_head.weight": t["lm_head.weight"] * INF},
    }
    return [
        *(bench.case(name, raw(change), wrong=True) for name, change in bytes_.items()),
        bench.case("a name twice, alike", raw(_twice)),
        *(bench.case(name, header(change), wrong=True) for name, change in entries.items()),
        *(bench.case(f"tensors: {name}", tensors(change)) for name, change in fair.items()),
        *(bench.case(f"tensors: {name}", tensors(change), wrong=True) for name, change in unfit.items()),
        *(bench.case(f"tensors: {name}", tensors(change), DRAFT, wrong=True) for name, change in heads.items()),
        *(bench.case(f"tensors: {name}", tensors(change), DRAFT) for name, change in fair_heads.items()),
    ]


WRONG_KEYS: list[tuple[str, Any]] = [
    *(("vocab_size", value) for value in (10**12, 43, -1, "44", 44.0, True, [44])),
    *(("hidden_size", value) for value in (0, 10**15, 33, 10**400)),
    *(("num_hidden_layers", value) for value in (10**6, 3, 1, 1000)),
    *(("num_attention_heads", value) for value in (3, 10**6)),
    *(("num_key_value_heads", value) for value in (0, 7, 2.0)),
    *(("head_dim", value) for value in (15, 10**9, 4096, {})),
    *(("intermediate_size", value) for value in (None, 10**9)),
    *(("rms_norm_eps", value) for value in (0, NAN, "x", 1e300, -1e-5, 10**400, INF)),
    *(("max_position_embeddings", value) for value in (10**12, 10**7, 0, 512.0)),
    *(("rope_theta", value) for value in (-1, 1e308, 20000.0, "10000", NAN, 1, True)),
    *(("rope_scaling", value) for value in (5, "linear", False, [], {"type": ["linear"]}, {"type": "linear"})),
    ("rope_parameters", 5),
    ("rope_parameters", {"rope_type": "evil"}),
    *(("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": value}) for value in (INF, 1e-30, 0.5, "2", True, 1e300)),
    *(("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": value}) for value in (True, 0.5, [])),
    *(("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "beta_fast": value}) for value in ("", [], -1, 0.5, 1e300)),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1, "factor": 2}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "truncate": 1}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "original_max_position_embeddings": 10**30}),
    ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
    *(("architectures", value) for value in (None, [], ["os.system"], "LlamaForCausalLM", ["LlamaForCausalLM", "X"], [["x"]], {}, [{}])),
    *(("eos_token_id", value) for value in (10**9, -1, "x", [1.5], [[1]], {}, True, [True], [0] * 10**5)),
    *(("bos_token_id", value) for value in ("x", [1], 1.0, -1, True)),
    *(("tie_word_embeddings", value) for value in ("yes", 1, 0, [])),
    *(("attention_bias", value) for value in (1, "true")),
    *(("hidden_act", value) for value in ("__import__('os')", None, ["silu"])),
    *(("quantization_config", value) for value in ({"quant_method": "x"}, 5, False, [])),
    *(("torch_dtype", value) for value in ("evil", ["float32"])),
    *(("dtype", value) for value in (5, ["float32"], {}, "float8_e4m3fn")),
    ("sliding_window", -5),
    ("sliding_window", "4096"),
]
FAIR_KEYS: list[tuple[str, Any]] = [
    *(("eos_token_id", value) for value in (list(range(44)), None, [])),
    ("max_position_embeddings", 1),
    ("auto_map", {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.C"}),
    ("model_type", "../../x"),
    ("time_step_limit", [0.0, INF]),
    ("architecture\x1b[31m", "\ud800"),
]


def config_cases(bench: Bench) -> list[Case]:
    """A ``config.json`` with odd values, or that is no such file."""
    contents: dict[str, bytes | str] = {
        "empty": b"",
        "an open brace": b"{",
        "a list": b"[]",
        "null": b"null",
        "no UTF-8": b"\xff\xfe",
        "UTF-16": json.dumps({"a": 1}).encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + (bench.good / "target" / "config.json").read_bytes(),
        "hardly any keys": b'{"architectures": ["LlamaForCausalLM"]}',
        "deep lists": b"[" * 200000,
        "deep objects": b'{"a":' * 100000,
        "an integer of 10000 digits": b'{"vocab_size": ' + b"9" * 10000 + b"}",
        "a float of 10000 digits": b'{"vocab_size": 1.' + b"9" * 10000 + b"}",
        "a key twice": b'{"vocab_size": 44, ' + (bench.good / "target" / "config.json").read_bytes().strip()[1:].replace(b" 44", b" 45"),
        "17 MiB": b'{"a": "' + b"x" * (17 << 20) + b'"}',
        "zeros": bytes(1000),
    }
    # with the ids of generation_config.json an unfit one in config.json would go unseen
    alone = [*(("eos_token_id", value) for value in (10**9, [1.5], "x")), ("architectures", [5])]
    generation = {
        "a list": b"[]",
        "deep": b"[" * 200000,
        "an id outside": b'{"eos_token_id": 44}',
        "a temperature of text": b'{"temperature": "0.6"}',
        "half a token": b'{"do_sample": true, "top_k": 20.5}',
        "a share above 1": b'{"do_sample": true, "top_p": 95}',
        "a penalty of 0": b'{"repetition_penalty": 0}',
        "perhaps": b'{"do_sample": "perhaps"}',
        "ids of no numbers": b'{"eos_token_id": {"a": 1}}',
        "cut": b'{"eos',
        "no UTF-8": b"\xff",
    }
    return [
        *(bench.case(f"{key} = {value!r:.120}", keys({key: value}), wrong=True) for key, value in WRONG_KEYS),
        *(bench.case(f"{key} = {value!r:.120}", keys({key: value})) for key, value in FAIR_KEYS),
        *(
            bench.case(f"{key} = {value!r} without generation_config.json", _without_generation({key: value}), wrong=True)
            for key, value in alone
        ),
        *(bench.case(f"config.json: {name}", write(content), wrong=True) for name, content in contents.items()),
        *(
            bench.case(f"generation_config.json: {name}", write(text, "generation_config.json"), wrong=True)
            for name, text in generation.items()
        ),
    ]


def _without_generation(changes: dict[str, Any]) -> Any:
    def mutate(folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        keys(changes)(folder)

    return mutate


def file_cases(bench: Bench) -> list[Case]:
    """Something else where a file should be, and an index that leads astray."""

    def link(target: str) -> Any:
        return lambda file: file.symlink_to(target)

    others = {
        "a folder": lambda file: file.mkdir(),
        "missing": lambda file: None,
        "a named pipe": os.mkfifo,
        "a link to itself": lambda file: file.symlink_to(file),
        "a link to nowhere": link("nowhere"),
        "a link to /etc/passwd": link("/etc/passwd"),
        "a link to /dev/zero": link("/dev/zero"),
        "a link to /dev/stdin": link("/dev/stdin"),
        "a link to /proc/self/environ": link("/proc/self/environ"),
    }
    optional = {"missing", "a link to /dev/stdin"}
    cases = [
        bench.case(f"{file} is {name}", instead(file, make), which, wrong=True)
        for file, which in (("config.json", "target"), ("model.safetensors", "target"), ("model.safetensors", SMALL))
        for name, make in others.items()
    ]
    for name, make in others.items():
        cases.append(bench.case(f"generation_config.json is {name}", instead("generation_config.json", make), wrong=name not in optional))
        speaker = instead("tokenizer.json", make)
        cases.append(bench.case(f"tokenizer.json is {name}", speaker, SMALL, wrong=name not in optional, use=vocabularies))

    def blobs(folder: Path) -> None:
        """As the Hugging Face cache has it: every file a link into another folder."""
        shutil.move(folder, folder.parent / "blobs")
        folder.mkdir()
        for blob in (folder.parent / "blobs").iterdir():
            (folder / blob.name).symlink_to(Path("..") / "blobs" / blob.name)

    astray = {
        "../../../../../etc/passwd": None,
        "/etc/passwd": None,
        "../outside.safetensors": "../outside.safetensors",
        "sub/../../outside.safetensors": "../outside.safetensors",
        "b.safetensors": "a.safetensors",
        "a\0.safetensors": "a.safetensors",
        "model.safetensors.index.json": "a.safetensors",
        ".": "a.safetensors",
        "": "a.safetensors",
        "a.safetensors/": "b.safetensors",
        "config.json": "a.safetensors",
        "weights": "weights",
        "evil.pt": "a.safetensors",
    }
    maps: dict[str, Any] = {"a text": "x", "numbers": {NORM: 5}, "a list": [1], "empty": {}, "deep": None}
    return [
        *cases,
        bench.case("all files are links", blobs),
        bench.case("all files are links", blobs, DRAFT),
        bench.case("index", sharded("a.safetensors", place="a.safetensors")),
        bench.case("index into a folder below", sharded("sub/a.safetensors", place="sub/a.safetensors")),
        bench.case("index of pickles", sharded("a.bin", lambda weights: weights)),
        *(bench.case(f"index: {name!r}", sharded(name, place=place), wrong=True) for name, place in astray.items()),
        bench.case("index of safetensors that leads to a pickle", _to_pickle, wrong=True),
        bench.case("index of safetensors that leads to an evil pickle", _to_evil_pickle, wrong=True),
        bench.case("index of pickles that leads to safetensors", _to_safetensors, wrong=True),
        *(bench.case(f"index: weight_map is {name}", _index(content), wrong=True) for name, content in maps.items()),
    ]


def _index(content: Any) -> Any:
    def mutate(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        text = json.dumps({"weight_map": content}) if content is not None else '{"weight_map":' * 100000
        (folder / "model.safetensors.index.json").write_text(text)

    return mutate


def _to_pickle(folder: Path) -> None:
    sharded("a.bin", lambda weights: weights)(folder)
    (folder / "pytorch_model.bin.index.json").rename(folder / "model.safetensors.index.json")


def _to_evil_pickle(folder: Path) -> None:
    sharded("a.bin", lambda weights: dict.fromkeys(weights, Evil(folder)))(folder)
    (folder / "pytorch_model.bin.index.json").rename(folder / "model.safetensors.index.json")


def _to_safetensors(folder: Path) -> None:
    sharded("a.safetensors", place="a.safetensors")(folder)
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")


def program(body: bytes) -> bytes:
    """A file as ``torch.save`` would write it, around another pickle."""
    whole, parts = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.ones(2)}, parts)
    with zipfile.ZipFile(parts) as source, zipfile.ZipFile(whole, "w") as target:
        for member in source.infolist():
            target.writestr(member.filename, body if member.filename.endswith("data.pkl") else source.read(member))
    return whole.getvalue()


def bomb(size: int) -> bytes:
    """A pickle of ``bytearray(size)``, which torch's own list of harmless names has."""
    return b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + size.to_bytes(8, "little") + b"\x85R."


def _deflated(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def pickle_cases(bench: Bench) -> list[Case]:
    """A ``pytorch_model.bin`` that would run something, is something else, or holds other tensors."""
    marks = b"\x80\x02" + b"(" * 10**6 + b"."
    evil = {
        "a bare evil pickle": pickled(lambda t, folder: Evil(folder), plain=True),
        "an evil tensor": pickled(lambda t, folder: t | {NORM: Evil(folder)}),
        "an evil tensor, legacy": pickled(lambda t, folder: t | {NORM: Evil(folder)}, legacy=True),
        "an evil name": pickled(lambda t, folder: t | {Evil(folder): t[NORM]}),
    }
    files = {
        "empty": b"",
        "a bare list": [1, 2],
        "a million marks": marks,
        "marks in an archive": program(marks),
        "marks after a legacy head": LEGACY + marks,
        "marks without an end": LEGACY + marks[:-1] * 5,
        "zeros": bytes(10**5),
        "a bytearray of 2^62 bytes": program(bomb(2**62)),
        "a bytearray of 3 GiB": program(bomb(3 << 30)),
        "the beginning of an archive": b"PK\x03\x04" + bytes(100),
        "an archive with a deep pickle": program(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
        "an archive without a pickle": _deflated({"a/b": b"x"}),
        "an archive that unfolds": _deflated({"archive/data.pkl": bytes(50_000_000)}),
        "safetensors": save({"a": torch.ones(2)}),
    }
    contents = {
        "a list": lambda t, _: [1, 2],
        "a number": lambda t, _: 5,
        "numpy arrays": lambda t, _: {name: value.numpy() for name, value in t.items()},
        "numpy objects": lambda t, _: {"a": np.array([object], dtype=object)},
        "numbers as names": lambda t, _: dict(enumerate(t.values())),
        "tensors as names": lambda t, _: {value: value for value in t.values()},
        "sparse tensors": lambda t, _: {name: value.to_sparse() for name, value in t.items()},
        "tensors without data": lambda t, _: {name: value.to("meta") for name, value in t.items()},
        "nested": lambda t, _: {"state_dict": t},
        "a list in itself": lambda t, _: _endless(),
        "complex tensors": lambda t, _: {name: value.to(torch.complex64) for name, value in t.items()},
    }
    fair = {
        "parameters": lambda t, _: {name: torch.nn.Parameter(value) for name, value in t.items()},
        "tensors that want gradients": lambda t, _: {name: value.requires_grad_() for name, value in t.items()},
        "strided views": lambda t, _: {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in t.items()},
        "plain tensors": lambda t, _: t,
    }
    return [
        *(bench.case(f"bin: {name}", mutate, wrong=True) for name, mutate in evil.items()),
        *(bench.case(f"bin: {name}", pickled(lambda t, _, c=content: c, plain=True), wrong=True) for name, content in files.items()),
        *(bench.case(f"bin: {name}", pickled(make), wrong=True) for name, make in contents.items()),
        *(bench.case(f"bin: {name}", pickled(make)) for name, make in fair.items()),
        *(bench.case(f"bin, legacy: {name}", pickled(make, legacy=True)) for name, make in fair.items()),
    ]


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def map_cases(bench: Bench) -> list[Case]:
    """Token maps."""
    claimed = torch.zeros(1, dtype=torch.int64).expand(2**40)
    contents: dict[str, Any] = {
        "negative": [-1],
        "outside": [44],
        "huge": [10**30],
        "int64": [2**63],
        "floats": [1.5],
        "twice": [1, 1],
        "texts": ["a"],
        "empty": [],
        "NaN": torch.tensor([NAN]),
        "two dimensions": torch.ones(2, 2, dtype=torch.int64),
        "booleans": [True],
        "a dictionary": {"a": 1},
        "a boolean tensor": torch.ones(3, dtype=torch.bool),
        "one element declared as 2^40": claimed,
        "nested": [[1]],
        "a tuple": (1, 2),
        "no dimension": torch.tensor(5),
        "in itself": _endless(),
        "None": None,
        "sparse": torch.eye(3, dtype=torch.int64).to_sparse(),
        "without data": torch.ones(3, dtype=torch.int64, device="meta"),
    }
    plain = {"empty file": b"", "a bare pickle": [1, 2], "a bytearray": program(bomb(2**62)), "zeros": bytes(1000)}
    evil = {"evil": Evil, "an evil element": lambda folder: [Evil(folder)]}
    return [
        *(bench.case(name, mapped(lambda _, c=content: c), MAP, wrong=True) for name, content in contents.items()),
        *(bench.case(name, mapped(lambda _, c=content: c, plain=True), MAP, wrong=True) for name, content in plain.items()),
        *(bench.case(name, mapped(make), MAP, wrong=True) for name, make in evil.items()),
        bench.case("a bare evil pickle", mapped(Evil, plain=True), MAP, wrong=True),
        bench.case("a named pipe", lambda folder: os.mkfifo(folder / "map.pt"), MAP, wrong=True),
        bench.case("a folder", lambda folder: (folder / "map.pt").mkdir(), MAP, wrong=True),
        bench.case(
            "safetensors cut", lambda folder: (folder / "map.safetensors").write_bytes(save({"a": torch.ones(2)})[:20]), MAP, wrong=True
        ),
        bench.case("safetensors", lambda folder: save_file({"token_map": torch.tensor([5, 2])}, folder / "map.safetensors"), MAP),
        bench.case("ids", mapped(lambda _: [1, 2, 5]), MAP),
        bench.case("one id", mapped(lambda _: torch.tensor([7], dtype=torch.uint8)), MAP),
    ]


def draft_cases(bench: Bench) -> list[Case]:
    """A draft that is odd, or doesn't fit."""
    taps = "eagle_aux_hidden_state_layer_ids"
    wrong: list[tuple[str, Any]] = [
        *(("eagle_config", {taps: ids}) for ids in ([99, 0], ["a"], [], [-1, -1], [True], [0.0], 5, [10**400], list(range(10**5)), {})),
        *(
            ("eagle_config", value)
            for value in (5, [], "x", {"evil\x1b[31m": 1}, {"use_aux_hidden_state": 1}, {"parallel_draft_step": True})
        ),
        *(("draft_vocab_size", value) for value in (10**9, 0, 40.0, "40", True)),
        *(("target_hidden_size", value) for value in (31, 10**9, "32")),
        *(("num_aux_hidden_states", value) for value in (3, 2.0, 10**9)),
        ("hidden_size", 31),
        ("num_hidden_layers", 2),
        ("num_hidden_layers", 10**6),
        ("architectures", ["X"]),
        ("vocab_size", 45),
        ("speculators_model_type", ["eagle3"]),
        ("norm_before_residual", 1),
        ("fc_norm", "no"),
        ("use_mtp_layernorm", 0.0),
        ("is_causal", 1),
        ("logit_scale", True),
        ("bias", 2),
        ("use_aux_hidden_state", 1),
        *(("max_position_embeddings", value) for value in (0, -1, 1.5, "8", True, 10**10)),
        *(("partial_rotary_factor", value) for value in (0, -1, 1.5, 0.01, "x", True, NAN, 1e400)),
        *(("rope_scaling", {"type": "mrope", key: value}) for key, value in (("rope_theta", 1), ("partial_rotary_factor", 2))),
        *(("layer_types", value) for value in (["sliding_attention"] * 3, ["sliding_attention", 5], ["sliding_attention", []])),
        *(("sliding_window", value) for value in (0, -1, 1.5, "x", True, {})),
        ("use_sliding_window", "x"),
        *(("dtype", value) for value in ("torch.", "torch.torch.float32", "torch.int8", 5, [], {"torch.float32": 1})),
    ]
    latent = {"kv_lora_rank": 4, "q_lora_rank": None, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2}
    deepseek = {"architectures": ["DeepseekV3ForCausalLMEagle3"], "num_key_value_heads": None, **latent}
    wrong_latent = [{key: value} for key in latent for value in (0, -1, 2.0, "x", 10**10)]
    wrong_latent += [{"qk_rope_head_dim": 3}, {"num_key_value_heads": 1}, {"rope_interleave": 1}, {"partial_rotary_factor": 0.5}, {}]
    # What a head never reads.
    unread: list[tuple[str, Any]] = [
        *((key, value) for key in ("eos_token_id", "bos_token_id", "pad_token_id") for value in (-1, 10**9, [1.5], "x", {}, NAN)),
        *((key, value) for key in ("num_experts", "n_routed_experts", "kv_lora_rank", "target_model_type") for value in (8, 0.0, "x", [])),
        ("layer_types", "x"),
        ("max_position_embeddings", None),
    ]
    vocab = {
        "a number for a text": '{"model": {"vocab": [[1, 0.5]]}}',
        "no ids": '{"model": {"vocab": {"a": [1]}}}',
        "texts as ids": '{"model": {"vocab": {"a": "1"}}}',
        "a list as added id": '{"model": {"vocab": {}}, "added_tokens": [{"id": [], "content": 5}]}',
        "another": '{"model": {"vocab": {"a": 1}}}',
        "booleans as ids": '{"model": {"vocab": {"a": true}}}',
        "added_tokens false": '{"model": {"vocab": {}}, "added_tokens": 0}',
        "deep": "[" * 200000,
        "a list": "[]",
        "a byte": b"\xff",
        "huge ids": '{"model": {"vocab": {"w0": 1e400}}}',
    }
    return [
        *(bench.case(f"{key} = {value!r:.120}", keys({key: value}), DRAFT, wrong=True) for key, value in wrong),
        # These tensors are of another attention.
        *(bench.case(f"latent attention with {change!r:.120}", keys({**deepseek, **change}), DRAFT, wrong=True) for change in wrong_latent),
        *(bench.case(f"unread {key} = {value!r:.120}", keys({key: value}), DRAFT) for key, value in unread),
        bench.case("max_position_embeddings = 8", keys({"max_position_embeddings": 8}), DRAFT),
        *(
            bench.case(f"tokenizer.json: {name}", write(content, "tokenizer.json"), DRAFT, wrong=True, use=vocabularies)
            for name, content in vocab.items()
        ),
        bench.case("quantised", write("x", "hf_quant_config.json"), DRAFT, wrong=True),
        bench.case(
            "a target as head", lambda folder: shutil.copytree(folder.parent / SMALL, folder, dirs_exist_ok=True), DRAFT, wrong=True
        ),
        bench.case("vocab_size = 45", keys({"vocab_size": 45}), SMALL, wrong=True),
        bench.case("an evil tensor", pickled(lambda t, folder: t | {NORM: Evil(folder)}), SMALL, wrong=True),
    ]


def listed_cases(bench: Bench) -> list[Case]:
    makers = (weight_cases, config_cases, file_cases, pickle_cases, map_cases, draft_cases)
    return [case for make in makers for case in make(bench)]
