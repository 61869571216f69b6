"""Train the demo target and its drafts from nothing: ``python -m recipes.train_demo [--work DIR]``.

Stages run in order; a stage whose artefact lies in the work folder is skipped, one that was interrupted goes on where it stopped.

    corpus      corpus.json, tokenizer/, data.npz     the standard library's source, tokenized
    target      target.pt, target.json, target/       the target model
    text        text_<length>.npz                     text written by the target
    <draft>     <draft>.pt, <draft>.json              a draft, for each of the configuration's ``drafts``
    acceptance  acceptance.json                       greedy acceptance of every draft on held-out prompts
    export      OUT/target, OUT/<draft>, OUT/training.json, OUT/README.md

Settings come from ``recipes/conf/<config>.yaml``; ``key=value`` arguments override them (``drafts.eagle.lr=0.002``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer

from graphspec.errors import ConfigError

from .acceptance import AcceptanceConfig, describe, greedy_text, measure_acceptance
from .card import model_card
from .corpus import load_corpus
from .draft import DraftConfig, Texts, load_draft, train_draft
from .drafter import Target, load_target
from .export import export_draft, export_target, size_in_megabytes, write_json
from .generate import TextConfig, generate_text, text_file
from .target import TargetConfig, bits_per_byte, train_target, trained_target
from .tokenizer import END_OF_TEXT, encode_documents, train_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class RecipeConfig:
    """Everything a run can be told."""

    corpus_root: str | None = None
    """Folder of Python sources; None: this interpreter's standard library."""
    target: TargetConfig = field(default_factory=TargetConfig)
    text: TextConfig = field(default_factory=TextConfig)
    drafts: dict[str, DraftConfig] = field(default_factory=dict)
    """By name, which is also the name of the folder."""
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        written = {length for _, _, length in self.text.sets}
        for name, draft in self.drafts.items():
            if name in ("corpus", "target", "text", "acceptance", "export"):
                raise ConfigError("drafts", "names that are no stage's", name)
            for _, _, length in draft.phases:
                if length not in written:
                    raise ConfigError(f"drafts.{name}.phases", f"a sequence length among text.sets {sorted(written)}", length)
            for layer in draft.network.get("tap_layers") or []:
                if not 1 <= layer < self.target.num_hidden_layers:
                    raise ConfigError(f"drafts.{name}.network.tap_layers", f"layers in 1..{self.target.num_hidden_layers - 1}", layer)


def load_config(name: str, overrides: list[str]) -> RecipeConfig:
    """``recipes/conf/<name>.yaml`` over the defaults, ``overrides`` (``key=value``) over both.

    Raises:
        ConfigError: no such file, a key that does not exist, or settings that contradict each other.
    """
    folder = REPOSITORY / "recipes" / "conf"
    file = folder / f"{name}.yaml"
    if not file.exists():
        raise ConfigError("config", "one of " + ", ".join(sorted(f.stem for f in folder.glob("*.yaml"))), name)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RecipeConfig), OmegaConf.load(file), OmegaConf.from_dotlist(overrides))
        return cast("RecipeConfig", OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "overrides", "a setting of recipes.train_demo", str(error).splitlines()[0]) from error


class Recipe:
    """The stages over one work folder."""

    def __init__(self, config: RecipeConfig, work: Path, out: Path) -> None:
        self.config, self.work, self.out = config, work, out
        work.mkdir(parents=True, exist_ok=True)
        self.stages: dict[str, tuple[Callable[[], None], list[Path]]] = {
            "corpus": (self.corpus, [work / "corpus.json", work / "data.npz", work / "tokenizer" / "tokenizer.json"]),
            "target": (self.target, [work / "target.json", work / "target" / "model.safetensors"]),
            "text": (self.text, [text_file(work, length) for _, _, length in config.text.sets]),
            **{name: (partial(self.draft, name), [work / f"{name}.json"]) for name in config.drafts},
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
        export_target(trained_target(self.config.target, self.work), self.work / "tokenizer", self.work / "target")

    def text(self) -> None:
        generate_text(self.config.text, load_target(self.work / "target"), np.load(self.work / "data.npz")["train"], self.work)

    def draft(self, name: str) -> None:
        written = {length: np.load(text_file(self.work, length))["tokens"] for _, _, length in self.config.text.sets}
        texts = Texts(np.load(self.work / "data.npz")["train"], written)
        train_draft(self.config.drafts[name], load_target(self.work / "target"), texts, self.work, name)

    def acceptance(self) -> None:
        # The target as published: everything after its own training saw its weights rounded to bfloat16, and so is it measured.
        model, data, settings = load_target(self.work / "target"), np.load(self.work / "data.npz"), self.config.acceptance
        target, end = Target(model), model.config.eos_token_id
        text = greedy_text(settings, target, data["held_out"])
        drafts: dict[str, object] = {}
        for name, config in self.config.drafts.items():
            drafter = load_draft(config, model, self.work / f"{name}.pt")
            drafter.round_to_bfloat16()
            drafts[name] = figures = measure_acceptance(settings, target, drafter, text, end)
            print(f"{name}: held-out tokens per cycle (S, K, N): {describe(figures)}", flush=True)
        tokenizer = Tokenizer.from_file(str(self.work / "tokenizer" / "tokenizer.json"))
        stop, begin = tokenizer.token_to_id(END_OF_TEXT), settings.prompt_length
        samples = []
        for row in text[: settings.samples].tolist():
            continuation = row[begin : row.index(stop, begin) if stop in row[begin:] else None]
            samples.append({"prompt": tokenizer.decode(row[:begin]), "continuation": tokenizer.decode(continuation)})
        nats, bits = bits_per_byte(model, data["held_out"], int(data["held_out_bytes"]))
        facts = {"held_out_loss": nats, "held_out_bits_per_byte": bits, "samples": samples}
        write_json(self.work / "acceptance.json", {"drafts": drafts, **facts})

    def export(self) -> None:
        model, measured = load_target(self.work / "target"), self.read("acceptance")
        acceptance = cast("dict[str, dict[str, object]]", measured.pop("drafts"))
        shutil.copytree(self.work / "target", self.out / "target", dirs_exist_ok=True)
        drafts: dict[str, object] = {}
        for name, config in self.config.drafts.items():
            drafter = load_draft(config, model, self.work / f"{name}.pt")
            export_draft(drafter, model, self.out / name, self.work / "tokenizer")
            drafts[name] = {**self.read(name), "megabytes": round(size_in_megabytes(self.out / name), 2), "acceptance": acceptance[name]}
        target = {**self.read("target"), "parameters": sum(p.numel() for p in model.parameters()), "published": measured}
        figures: dict[str, object] = {"corpus": self.read("corpus"), "target": target, "drafts": drafts}
        figures["megabytes"] = round(size_in_megabytes(self.out), 2)
        figures["config"] = settings = asdict(self.config)
        for name, config in self.config.drafts.items():
            settings["drafts"][name] = config.resolved()
        write_json(self.out / "training.json", figures)
        (self.out / "README.md").write_text(model_card(figures))


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(prog="python -m recipes.train_demo", description="Train the demo target and its drafts from nothing.")
    work = Path("outputs") / "train-demo"
    parser.add_argument("--work", type=Path, default=work, help=f"folder of everything made on the way, where runs resume ({work})")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "graphspec" / "demo", help="where the finished models go")
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
