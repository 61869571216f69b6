"""The stages of ``graphspec train`` over one work folder; files that exist are not made again.

data        data.json, train.npy, held_out.npy                 the texts in the target's ids
text        text_<length>.npy, conversations/*.jsonl           text written by the target
training    <variant>.pt, <variant>.jsonl                      the network, and a record for each interval
figures     OUT/training.json                                  measurements on held-out text
export      OUT/config.json, OUT/model.safetensors, ...        the checkpoint
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import __version__
from ..config.catalog import resolve_variant
from ..config.command_options import LaunchConfig
from ..config.paths import check_writable, make_folder
from ..config.train_options import TrainConfig
from ..errors import ConfigError
from ..facts.folders import model_folder
from ..text.tokenizer import Tokenizer
from .acceptance import held_out_prompts, measure_acceptance
from .checkpoint import write_json
from .conversations import pack
from .draft import Chats, Recipe, Texts, train_draft
from .drafter import load_target, network_of, trained_variants
from .export import OUT, export_draft, size_in_megabytes
from .generate import generate_text, text_sets
from .loop import Watch, unwatched
from .start import Start
from .texts import Documents, encode
from .written import Gathered, gather

RECORD = "training.json"


def run(config: LaunchConfig, watch: Watch = unwatched) -> dict[str, Any]:
    """Train the draft of ``variant``, resuming an interrupted run; returns the content of ``training.json``.

    Raises:
        ConfigError: settings that contradict each other or the data, or folders that can't be written.
        CheckpointError: a target that drafts can't be trained for, or a checkpoint of another run in the work folder.
        ResourceError: too little memory.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    variant, train, start = resolve_variant(config.variant.name).name, config.train, None
    if train.start_from is not None and variant in trained_variants():
        start = Start.read(variant, train.start_from, model_folder(config.model.path, config.model.revision), train.recount_vocab)
        train = replace(train, network=start.network_settings(train.network))
    recipe = Recipe(variant, train)
    if not train.data:
        raise ConfigError(
            "train.data", "text files, conversations or self", "none", "train.data=self, train.data=[folder,file.txt,chats.jsonl]"
        )
    documents = Documents.read(train) if any(source.is_text for source in train.sources) else Documents({}, {})
    work, out = folders(train)
    device = set_up(config)
    if not train.resume:
        clear(work, f"{recipe.variant}.*")
    dtype: torch.dtype | str = config.hardware.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "auto"
    folder = model_folder(config.model.path, config.model.revision)
    hybrids = network_of(recipe.variant).reads_hybrids
    model = load_target(folder, dtype if dtype == "auto" else getattr(torch, str(dtype)), device, hybrids=hybrids)
    recipe.check(model)
    return record(recipe.variant, _draft(config, recipe, model, folder, documents, work, out, watch, start), asdict(train), out)


def record(name: str, figures: dict[str, Any], config: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write the figures of a finished run to ``training.json``, and return them."""
    whole = {"variant": name, "graphspec": __version__, **figures, "megabytes": round(size_in_megabytes(out), 3), "config": config}
    write_json(out / RECORD, whole, OUT)
    return whole


def folders(train: TrainConfig) -> tuple[Path, Path]:
    """``(work, out)``, both made.

    Raises:
        ConfigError: no ``train.out``, or a folder that can't be written.
    """
    if train.out is None:
        raise ConfigError(OUT, "a folder for the finished checkpoint", None, f"{OUT}=FOLDER")
    out = check_writable(OUT, train.out, folder=True)
    work = check_writable("train.work", train.work if train.work is not None else f"{train.out.rstrip('/')}.work", folder=True)
    make_folder(OUT, out)
    make_folder("train.work", work)
    return work, out


def set_up(config: LaunchConfig) -> str:
    """Set threads and the treatment of denormals; returns the device.

    Raises:
        ConfigError: a device that is not there.
    """
    hardware = config.hardware
    has_cuda = torch.cuda.is_available()
    if hardware.device == "cuda" and not has_cuda:
        raise ConfigError("hardware.device", "cpu or auto (torch sees no CUDA device)", "cuda")
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)
    # Denormals make CPU kernels many times slower and don't matter here.
    torch.set_flush_denormal(True)
    return "cuda" if hardware.device == "auto" and has_cuda else "cpu" if hardware.device == "auto" else hardware.device


def clear(work: Path, *own: str) -> None:
    """Remove the files from which a run would resume: those that ``own`` matches, and the texts."""
    for pattern in (*own, "data.json", "train.npy", "held_out.npy", "text_*.npy", "text_*.json", "text_parts/*.npy", "conversations/*"):
        for file in work.glob(pattern):
            file.unlink()


def _draft(
    config: LaunchConfig,
    recipe: Recipe,
    model: PreTrainedModel,
    folder: Path,
    documents: Documents,
    work: Path,
    out: Path,
    watch: Watch,
    start: Start | None,
) -> dict[str, Any]:
    train, tokenizer, ends = recipe.train, Tokenizer(folder), model.config.eos_token_id
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0] if isinstance(ends, list) else ends
    streams = encode(documents, tokenizer, end, model.config.vocab_size, {"model.path": str(folder.resolve())}, work, watch)
    # The engine that writes loads the target again, and two copies may not fit on the device.
    device, context = model.device, model.config.max_position_embeddings
    model.to("cpu")
    gathered = gather(config, folder, model.config.vocab_size, work, watch)
    held_out = [sample for entry in gathered for sample in entry.held_out]
    prompts = held_out_prompts(train.acceptance, context, streams.held_out, held_out)
    lengths = sorted({length for _, _, length in train.schedule_phases})
    chats = [Chats(entry.share, {length: pack(entry.train, length) for length in lengths}) for entry in gathered]
    texts = Texts(streams.train, generate_text(config, text_sets(train), context, streams.train, work, watch), chats)
    model.to(device)
    drafter, figures = train_draft(recipe, model, texts, work, watch, start)
    export_draft(drafter, model, out, folder)
    # So does the engine that measures.
    model.to("cpu")
    maximum = drafter.max_steps if drafter.max_steps is not None else max((s[0] for s in train.acceptance.shapes), default=0)
    # A network with one head per step drafts chains.
    shapes = [s for s in train.acceptance.shapes if s[0] <= maximum and (drafter.num_heads == 1 or s[1] == 1)]
    measured = measure_acceptance(config, shapes, prompts, watch)
    data = streams.facts | ({"conversations": [_size(entry) for entry in gathered]} if gathered else {})
    return {"target": folder.name, "data": data, "training": figures, "acceptance": measured}


def _size(entry: Gathered) -> dict[str, Any]:
    """How much an entry of conversations is."""
    sides = {"train": entry.train, "held_out": entry.held_out}
    counts = {side: len(samples) for side, samples in sides.items()}
    tokens = {f"{side}_tokens": sum(len(sample.tokens) for sample in samples) for side, samples in sides.items()}
    return {"share": round(entry.share, 4), **counts, **tokens}


def headline(figures: dict[str, Any], out: str) -> str:
    """Last lines of the command's output."""
    acceptance, lines = figures["acceptance"], []
    groups = [("greedy", acceptance["shapes"])]
    if "sampled" in acceptance:
        groups.append((f"at temperature {acceptance['sampled']['temperature']:g}", acceptance["sampled"]["shapes"]))
    for name, shapes in groups:
        text = ", ".join(f"({s['num_steps']}, {s['topk']}, {s['num_draft_tokens']}) {s['tokens_per_cycle']:.2f}" for s in shapes)
        lines.append(f"held-out tokens per cycle, {name} (S, K, N): {text}")
    return "\n".join([*lines, f"{figures['variant']} draft written to {out} ({figures['megabytes']} MB)"])
