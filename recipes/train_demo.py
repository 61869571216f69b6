"""Trains a demo target and its drafts from scratch: ``python -m recipes.train_demo [--config NAME] [--work DIR]``.

``graphspec train`` does everything between text and weights, once for the target and once for each draft, with the experiments of
``recipes/conf/<config>``. Finished stages are not run again, and an interrupted one resumes when the same command is given again.

    corpus      WORK/corpus         train/, held_out/ and NOTICE (recipes.corpus)
    target      WORK/target         graphspec train experiment=recipes/conf/<config>/target.yaml
    <draft>     WORK/<draft>        graphspec train experiment=recipes/conf/<config>/<draft>.yaml, and drafts.yaml for all
    export      OUT                 target/, <draft>/, training.json, README.md and NOTICE

Further arguments ``key=value`` go to every ``graphspec train`` (``train.dtype=bfloat16``), ``corpus.*`` to the corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphspec.config.command_options import LaunchConfig
from graphspec.config.compose import load_config
from graphspec.errors import ConfigError
from graphspec.host.progress import progress_bars
from graphspec.train.draft import Recipe
from graphspec.train.drafter import trained_variants
from graphspec.train.export import TOKENIZER_FILES, size_in_megabytes
from graphspec.train.memory import keep_freed_memory
from graphspec.train.run import RECORD, headline, run

from .card import model_card
from .corpus import CorpusConfig, build, write

REPOSITORY = Path(__file__).resolve().parent.parent
CONF = REPOSITORY / "recipes" / "conf"


class Demo:
    """The stages over one work folder.

    Args:
        name: of a folder in ``recipes/conf``.
        work: folder of intermediate files.
        out: folder of the finished models.
        words: arguments ``key=value``.
    """

    def __init__(self, name: str, work: Path, out: Path, words: list[str]) -> None:
        self.folder, self.work, self.out = CONF / name, work, out
        if not (self.folder / "target.yaml").exists():
            raise ConfigError("--config", "one of " + ", ".join(sorted(f.name for f in CONF.iterdir())), repr(name))
        self.corpus_config = self._corpus_config([word for word in words if word.startswith("corpus.")])
        self.words = [word for word in words if not word.startswith("corpus.")]
        self.drafts = {name: self.config(name) for name in trained_variants() if (self.folder / f"{name}.yaml").exists()}
        self.target = self.config("target")

    def _corpus_config(self, words: list[str]) -> CorpusConfig:
        file = self.folder / "corpus.yaml"
        given = OmegaConf.from_dotlist([word.removeprefix("corpus.") for word in words])
        try:
            return cast(
                "CorpusConfig", OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CorpusConfig), OmegaConf.load(file), given))
            )
        except OmegaConfBaseException as error:
            raise ConfigError(f"corpus.{error.full_key or '?'}", "a setting of the corpus", str(error).splitlines()[0]) from error

    def _of_every_draft(self) -> list[str]:
        """The settings of ``drafts.yaml``, if the folder has one, as words."""
        file = self.folder / "drafts.yaml"
        shared = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
        return [f"{key}={json.dumps(value)}" for key, value in cast("dict[str, Any]", shared).items()]

    def config(self, name: str) -> LaunchConfig:
        """The options of ``graphspec train`` for the target or one draft."""
        corpus = self.work / "corpus"
        words = [f"experiment={self.folder / name}.yaml", f"train.data=['{corpus / 'train'}']", f"train.held_out=['{corpus / 'held_out'}']"]
        words += [f"train.out='{self.work / name}'", f"train.work='{self.work / ('target.work' if name == 'target' else 'drafts.work')}'"]
        if name != "target":
            words += [f"model.path='{self.work / 'target'}'", *self._of_every_draft()]
        config = load_config(*words, *self.words)
        if name != "target":
            Recipe(config.variant.name, config.train)
        return config

    def train(self, names: list[str]) -> None:
        """Run the stages ``names``, or all if there are none, except finished ones."""
        stages = ["corpus", "target", *self.drafts, "export"]
        unknown = [name for name in names if name not in stages]
        if unknown:
            raise ConfigError("--stage", "one of " + ", ".join(stages), ", ".join(unknown))
        for name in names or stages:
            if name == "export":
                self.export()
            elif (self.work / name / ("corpus.json" if name == "corpus" else RECORD)).exists():
                print(f"{name}: done before", flush=True)
            elif name == "corpus":
                facts = write(build(self.corpus_config), self.work / name)
                print(f"corpus: {facts['train_modules']} modules, {facts['train_bytes']:,} bytes", flush=True)
            else:
                config = self.target if name == "target" else self.drafts[name]
                with progress_bars(lines=True) as watch:
                    figures = run(config, watch)
                print(headline(figures, str(config.train.out)), flush=True)

    def record(self, name: str) -> dict[str, Any]:
        """The figures that ``graphspec train`` wrote."""
        return dict(json.loads((self.work / name / RECORD).read_text(encoding="utf-8")))

    def trained(self) -> list[str]:
        """The drafts whose training is finished."""
        return [name for name in self.drafts if (self.work / name / RECORD).exists()]

    def figures(self) -> dict[str, Any]:
        """All figures of the card."""
        target, corpus = self.record("target"), json.loads((self.work / "corpus" / "corpus.json").read_text(encoding="utf-8"))
        corpus |= {key: target["data"][key] for key in ("train_tokens", "held_out_tokens")}
        drafts: dict[str, Any] = {}
        for name in self.trained():
            record = self.record(name)
            drafts[name] = {**record["training"], "megabytes": round(record["megabytes"], 2), "acceptance": record["acceptance"]}
        settings = self.settings()
        return {
            "corpus": corpus,
            "target": {**target["training"], "published": target["published"]},
            "drafts": drafts,
            "megabytes": round(size_in_megabytes(self.out), 2),
            "config": {**settings, "drafts": {name: settings["drafts"][name] for name in drafts}},
        }

    def settings(self) -> dict[str, Any]:
        """The training settings of all models."""
        target = self.target.train
        some = next(iter(self.drafts.values())).train
        return {
            "target": {**target.target.shape(), **shown(target)},
            "text": asdict(some.text),
            "drafts": {
                name: {"variant": name, **shown(config.train), "network": asdict(Recipe(name, config.train).network())}
                for name, config in self.drafts.items()
            },
            "acceptance": asdict(some.acceptance),
        }

    def export(self) -> None:
        """Copy what ``graphspec`` loads to ``out``, with the record, the card and the NOTICE; drafts that are not trained are left out."""
        trained = self.trained()
        if not trained:
            raise ConfigError("--stage", "a draft that is trained before export", "none of " + ", ".join(self.drafts))
        if left := [name for name in self.drafts if name not in trained]:
            print("not trained, left out: " + ", ".join(left), flush=True)
        for name in ("target", *trained):
            self.record(name)
            (self.out / name).mkdir(parents=True, exist_ok=True)
            for file in ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES):
                if (self.work / name / file).exists():
                    shutil.copyfile(self.work / name / file, self.out / name / file)
        figures = self.figures()
        shutil.copyfile(self.work / "corpus" / "NOTICE", self.out / "NOTICE")
        (self.out / RECORD).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        (self.out / "README.md").write_text(model_card(figures), encoding="utf-8")
        print(f"exported to {self.out}", flush=True)


DRAFT_KEYS = ("unroll", "decay", "feature_weight", "raw_share")
SHOWN = ("lr", "adamw_lr", "schedule", "warmup", "cooldown", "restarts", "clip", "dtype", "seed", *DRAFT_KEYS)


def shown(train: Any) -> dict[str, Any]:
    """The settings of one training that determine its result."""
    return {"phases": train.schedule_phases, **{key: getattr(train, key) for key in SHOWN}}


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(prog="python -m recipes.train_demo", description="Train a demo target and its drafts from nothing.")
    work = Path("outputs") / "train-demo"
    parser.add_argument(
        "--work", type=Path, help=f"folder of everything made on the way, where runs resume ({work}, of hybrids {work}_hybrid)"
    )
    parser.add_argument("--out", type=Path, help="where the finished models go (graphspec/demo, of hybrids graphspec/demo_hybrid)")
    parser.add_argument("--config", default="demo", help="a folder of recipes/conf")
    parser.add_argument("--stage", action="append", default=[], help="run only this stage (repeatable)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("words", nargs="*", help="key=value for every graphspec train; corpus.key=value for the corpus")
    options = parser.parse_args(arguments)
    words = [f"hardware.threads={options.threads}", *options.words]
    # Each kind of model has its own folders.
    kind = "_hybrid" if "hybrid" in options.config else ""
    work = (options.work or work.with_name(work.name + kind)).resolve()
    Demo(options.config, work, options.out or REPOSITORY / "graphspec" / f"demo{kind}", words).train(options.stage)


if __name__ == "__main__":
    keep_freed_memory()
    main()
