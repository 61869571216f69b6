"""Train the demo pair from nothing: ``python -m recipes.train_demo --work DIR``.

Stages run in order; a stage whose artefact lies in the work folder is skipped, one that was interrupted goes on where it stopped.

    corpus      corpus.json, tokenizer/, data.npz     the standard library's source, tokenized
    target      target.pt, target.json                the target model
    text        text_<length>.npz                     text written by the target
    head        head.pt, head.json                    the EAGLE-3 head
    acceptance  acceptance.json                       greedy acceptance on held-out prompts
    export      OUT/target, OUT/eagle3, OUT/training.json, OUT/README.md

Settings come from ``recipes/conf/<config>.yaml``; ``key=value`` arguments override them (``head.lr=0.002``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from graphspec.errors import ConfigError

from .acceptance import AcceptanceConfig, measure_acceptance
from .card import model_card
from .corpus import load_corpus
from .eagle3 import HeadConfig, load_head, train_head
from .export import export_head, export_target, size_in_megabytes, write_json
from .generate import TextConfig, generate_text, text_file
from .target import TargetConfig, bits_per_byte, load_target, round_to_bfloat16, train_target
from .tokenizer import END_OF_TEXT, encode_documents, train_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class RecipeConfig:
    """Everything a run can be told."""

    corpus_root: str | None = None
    """Folder of Python sources; None: this interpreter's standard library."""
    target: TargetConfig = field(default_factory=TargetConfig)
    text: TextConfig = field(default_factory=TextConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        written = {length for _, _, length in self.text.sets}
        for _, _, length in self.head.phases:
            if length not in written:
                raise ConfigError("head.phases", f"a sequence length among text.sets {sorted(written)}", length)
        layers = self.target.num_hidden_layers
        if not all(1 <= layer < layers for layer in self.head.tap_layers):
            raise ConfigError("head.tap_layers", f"layers in 1..{layers - 1}", self.head.tap_layers)
        deepest = max(shape[0] for shape in self.acceptance.shapes)
        if deepest > self.head.unroll:
            raise ConfigError("acceptance.shapes", f"depths of at most head.unroll = {self.head.unroll}", deepest)


def load_config(name: str, overrides: list[str]) -> RecipeConfig:
    """``recipes/conf/<name>.yaml`` over the defaults, ``overrides`` (``key=value``) over both.

    Raises:
        ConfigError: no such file, or settings that contradict each other.
    """
    file = REPOSITORY / "recipes" / "conf" / f"{name}.yaml"
    if not file.exists():
        raise ConfigError("config", "one of " + ", ".join(sorted(f.stem for f in file.parent.glob("*.yaml"))), name)
    merged = OmegaConf.merge(OmegaConf.structured(RecipeConfig), OmegaConf.load(file), OmegaConf.from_dotlist(overrides))
    return cast("RecipeConfig", OmegaConf.to_object(merged))


class Recipe:
    """The stages over one work folder."""

    def __init__(self, config: RecipeConfig, work: Path, out: Path) -> None:
        self.config, self.work, self.out = config, work, out
        work.mkdir(parents=True, exist_ok=True)
        self.stages: dict[str, tuple[Callable[[], None], list[Path]]] = {
            "corpus": (self.corpus, [work / "corpus.json", work / "data.npz", work / "tokenizer" / "tokenizer.json"]),
            "target": (self.target, [work / "target.json"]),
            "text": (self.text, [text_file(work, length) for _, _, length in config.text.sets]),
            "head": (self.head, [work / "head.json"]),
            "acceptance": (self.acceptance, [work / "acceptance.json"]),
            "export": (self.export, [out / "README.md"]),
        }

    def run(self, names: list[str]) -> None:
        """Run the named stages (none named: all), skipping those whose artefacts exist."""
        for name, (stage, artefacts) in self.stages.items():
            if names and name not in names:
                continue
            if all(file.exists() for file in artefacts):
                print(f"{name}: done before", flush=True)
                continue
            print(f"{name}: running", flush=True)
            stage()

    def read(self, name: str) -> dict[str, object]:
        """The figures a stage left behind."""
        return dict(json.loads((self.work / f"{name}.json").read_text()))

    def corpus(self) -> None:
        corpus = load_corpus(Path(self.config.corpus_root) if self.config.corpus_root else None)
        folder, data = self.work / "tokenizer", self.work / "data.npz"
        if not (folder / "tokenizer.json").exists():
            train_tokenizer(corpus.train.values(), self.config.target.vocab_size, folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        train, held_out = encode_documents(tokenizer, corpus.train.values()), encode_documents(tokenizer, corpus.held_out.values())
        train_bytes, held_out_bytes = (sum(len(text.encode()) for text in side.values()) for side in (corpus.train, corpus.held_out))
        if not data.exists():
            np.savez(data, train=train, held_out=held_out, held_out_bytes=held_out_bytes)
        else:
            # A work folder may be resumed under another Python, whose standard library is another text.
            stored = np.load(data)
            if not (np.array_equal(stored["train"], train) and np.array_equal(stored["held_out"], held_out)):
                raise ConfigError(str(data), f"the corpus of Python {platform.python_version()}", "another text", "use a new work folder")
        write_json(
            self.work / "corpus.json",
            {
                "python": platform.python_version(),
                "train_modules": len(corpus.train),
                "train_bytes": train_bytes,
                "train_tokens": len(train),
                "held_out_modules": sorted(corpus.held_out),
                "held_out_bytes": held_out_bytes,
                "held_out_tokens": len(held_out),
            },
        )

    def target(self) -> None:
        data = np.load(self.work / "data.npz")
        train_target(self.config.target, data["train"], data["held_out"], int(data["held_out_bytes"]), self.work)

    def text(self) -> None:
        generate_text(self.config.text, load_target(self.config.target, self.work), np.load(self.work / "data.npz")["train"], self.work)

    def head(self) -> None:
        target = load_target(self.config.target, self.work)
        train_head(self.config.head, target, np.load(self.work / "data.npz")["train"], self.work, target.config.eos_token_id)

    def acceptance(self) -> None:
        target = load_target(self.config.target, self.work)
        head = load_head(self.config.head, target, self.work)
        round_to_bfloat16(head)
        data, settings = np.load(self.work / "data.npz"), self.config.acceptance
        figures, text = measure_acceptance(settings, target, head, data["held_out"], target.config.eos_token_id)
        tokenizer = Tokenizer.from_file(str(self.work / "tokenizer" / "tokenizer.json"))
        end, begin = tokenizer.token_to_id(END_OF_TEXT), settings.prompt_length
        samples = []
        for row in text[: settings.samples].tolist():
            continuation = row[begin : row.index(end, begin) if end in row[begin:] else None]
            samples.append({"prompt": tokenizer.decode(row[:begin]), "continuation": tokenizer.decode(continuation)})
        nats, bits = bits_per_byte(target, data["held_out"], int(data["held_out_bytes"]))
        write_json(self.work / "acceptance.json", {**figures, "held_out_loss": nats, "held_out_bits_per_byte": bits, "samples": samples})

    def export(self) -> None:
        target = load_target(self.config.target, self.work)
        export_target(target, self.work / "tokenizer", self.out / "target")
        export_head(load_head(self.config.head, target, self.work), target, self.out / "eagle3")
        figures: dict[str, object] = {name: self.read(name) for name in ("corpus", "target", "head", "acceptance")}
        figures["target"] = {**self.read("target"), "parameters": sum(p.numel() for p in target.parameters())}
        figures["megabytes"] = round(size_in_megabytes(self.out), 2)
        figures["config"] = asdict(self.config)
        write_json(self.out / "training.json", figures)
        (self.out / "README.md").write_text(model_card(figures))


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(prog="python -m recipes.train_demo", description="Train the demo pair from nothing.")
    parser.add_argument("--work", type=Path, required=True, help="folder of everything made on the way; give it again to resume")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "graphspec" / "demo", help="where the finished pair goes")
    parser.add_argument("--config", default="demo", help="a file of recipes/conf, without .yaml")
    parser.add_argument("--stage", action="append", default=[], help="run only this stage (repeatable)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("overrides", nargs="*", help="settings as key=value")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    recipe = Recipe(load_config(options.config, options.overrides), options.work, options.out)
    unknown = [name for name in options.stage if name not in recipe.stages]
    if unknown:
        raise ConfigError("--stage", "one of " + ", ".join(recipe.stages), ", ".join(unknown))
    recipe.run(options.stage)


if __name__ == "__main__":
    main()
