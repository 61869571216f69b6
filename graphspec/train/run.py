"""The stages of ``graphspec train`` over one work folder; files that exist are not made again.

data        data.json, train.npy, held_out.npy, for a new target tokenizer/     the texts in the target's ids
text        text_<length>.npy                                                   drafts: text written by the target
training    <variant>.pt or target.pt, and .jsonl                               the network, and a record for each interval
figures     OUT/training.json                                                   measurements on held-out text
export      OUT/config.json, OUT/model.safetensors, ...                         the checkpoint
"""

from __future__ import annotations

from dataclasses import asdict
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
from . import unlikelihood
from .acceptance import check_acceptance, continue_held_out, measure_acceptance, small_engine
from .checkpoint import write_json
from .draft import Recipe, Texts, train_draft
from .drafter import load_target, network_of, trained_variants
from .export import OUT, export_draft, export_target, size_in_megabytes
from .generate import generate_text, repetition, text_sets
from .loop import Watch, unwatched
from .target import NAME, bits_per_byte, train_target
from .texts import Documents, encode
from .tokenizer import END_OF_TEXT, train_tokenizer

RECORD = "training.json"


def run(config: LaunchConfig, watch: Watch = unwatched) -> dict[str, Any]:
    """Train the draft of ``variant``, or a target, resuming an interrupted run; returns the content of ``training.json``.

    Raises:
        ConfigError: settings that contradict each other or the data, or folders that can't be written.
        CheckpointError: a target that drafts can't be trained for, or a checkpoint of another run in the work folder.
        ResourceError: too little memory.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    variant, train = resolve_variant(config.variant.name), config.train
    recipe = Recipe(variant.name, train) if variant.speculates else None
    documents = Documents.read(train)
    work, out = folders(train)
    device = _set_up(config)
    if not train.resume:
        _clear(work, NAME if recipe is None else variant.name)
    figures: dict[str, Any] = {"variant": variant.name, "graphspec": __version__}
    if recipe is None:
        figures |= _target(config, documents, work, out, device, watch)
    else:
        dtype: torch.dtype | str = config.hardware.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "auto"
        folder = model_folder(config.model.path, config.model.revision)
        hybrids = network_of(recipe.variant).reads_hybrids
        model = load_target(folder, dtype if dtype == "auto" else getattr(torch, str(dtype)), device, hybrids=hybrids)
        figures |= _draft(config, recipe, model, folder, documents, work, out, watch)
    figures["megabytes"] = round(size_in_megabytes(out), 3)
    figures["config"] = asdict(train)
    write_json(out / RECORD, figures, OUT)
    return figures


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


def _set_up(config: LaunchConfig) -> str:
    hardware = config.hardware
    has_cuda = torch.cuda.is_available()
    if hardware.device == "cuda" and not has_cuda:
        raise ConfigError("hardware.device", "cpu or auto (torch sees no CUDA device)", "cuda")
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)
    # Denormals make CPU kernels many times slower and don't matter here.
    torch.set_flush_denormal(True)
    return "cuda" if hardware.device == "auto" and has_cuda else "cpu" if hardware.device == "auto" else hardware.device


def _clear(work: Path, name: str) -> None:
    """Remove the files from which a run would resume."""
    own = [f"{name}.*"] + ([f"{unlikelihood.NAME}*"] if name == NAME else [])
    for pattern in (*own, "data.json", "train.npy", "held_out.npy", "text_*.npy", "text_*.json", "text_parts/*.npy", "tokenizer/*"):
        for file in work.glob(pattern):
            file.unlink()


def _target(config: LaunchConfig, documents: Documents, work: Path, out: Path, device: str, watch: Watch) -> dict[str, Any]:
    train, vocab, folder = config.train, config.train.target.vocab_size, work / "tokenizer"
    if not (folder / "tokenizer_config.json").exists():
        watch("tokenizer", 0, 1)
        train_tokenizer(documents.train.values(), vocab, folder)
        watch("tokenizer", 1, 1)
    tokenizer = Tokenizer(folder)
    end = tokenizer.special_tokens[END_OF_TEXT]
    streams = encode(documents, tokenizer, end, vocab, {"model.path": None, "train.target.vocab_size": vocab}, work, watch)
    check_acceptance(train.acceptance, train.target.max_position_embeddings, streams.held_out)
    model, figures = train_target(train, streams, work, device, watch)
    export_target(model, folder, out)
    # Measure the published weights, which are rounded to bfloat16.
    nats, bits = bits_per_byte(load_target(out, torch.float32, device), streams.held_out, streams.facts["held_out_bytes"])
    outputs = continue_held_out(small_engine(config, str(out), config.variant), train.acceptance, streams.held_out)
    return {
        "data": streams.facts,
        "training": figures,
        "published": {
            "held_out_loss": nats,
            "held_out_bits_per_byte": bits,
            "repeated_16_grams": round(repetition([output.token_ids for output in outputs]), 4),
            "samples": [
                {"prompt": tokenizer.decode(output.prompt_token_ids), "continuation": output.text}
                for output in outputs[: train.acceptance.samples]
            ],
        },
    }


def _draft(
    config: LaunchConfig, recipe: Recipe, model: PreTrainedModel, folder: Path, documents: Documents, work: Path, out: Path, watch: Watch
) -> dict[str, Any]:
    train, tokenizer, ends = recipe.train, Tokenizer(folder), model.config.eos_token_id
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0] if isinstance(ends, list) else ends
    streams = encode(documents, tokenizer, end, model.config.vocab_size, {"model.path": str(folder.resolve())}, work, watch)
    check_acceptance(train.acceptance, model.config.max_position_embeddings, streams.held_out)
    texts = Texts(streams.train, generate_text(train.text, text_sets(train), model, streams.train, work, watch))
    drafter, figures = train_draft(recipe, model, texts, work, watch)
    export_draft(drafter, model, out, folder)
    # The measuring engine loads the target again, and two copies may not fit on the device.
    model.to("cpu")
    most = drafter.most_steps if drafter.most_steps is not None else max((s[0] for s in train.acceptance.shapes), default=0)
    # A network with one head per step drafts chains.
    shapes = [s for s in train.acceptance.shapes if s[0] <= most and (drafter.num_heads == 1 or s[1] == 1)]
    measured = measure_acceptance(config, shapes, streams.held_out, watch)
    return {"target": folder.name, "data": streams.facts, "training": figures, "acceptance": measured}


def headline(figures: dict[str, Any], out: str) -> str:
    """Last lines of the command's output."""
    lines = []
    if figures["variant"] in trained_variants():
        acceptance = figures["acceptance"]
        groups = [("greedy", acceptance["shapes"])]
        if "sampled" in acceptance:
            groups.append((f"at temperature {acceptance['sampled']['temperature']:g}", acceptance["sampled"]["shapes"]))
        for name, shapes in groups:
            text = ", ".join(f"({s['num_steps']}, {s['topk']}, {s['num_draft_tokens']}) {s['tokens_per_cycle']:.2f}" for s in shapes)
            lines.append(f"held-out tokens per cycle, {name} (S, K, N): {text}")
    else:
        published = figures["published"]
        lines.append(
            f"held out: {published['held_out_bits_per_byte']:.3f} bits per byte; "
            f"{100 * published['repeated_16_grams']:.1f} % of 16-grams repeated in greedy text"
        )
    what = f"{figures['variant']} draft" if figures["variant"] in trained_variants() else "target"
    return "\n".join([*lines, f"{what} written to {out} ({figures['megabytes']} MB)"])
