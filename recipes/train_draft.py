"""Train a draft for any target: ``python -m recipes.train_draft variant=eagle target=DIR data='[a.txt,dir]' work=DIR out=DIR``.

The command reads the texts, lets the target continue prompts cut from them, trains, measures acceptance on held-out text and writes
``out`` in the published layout of the variant. Every artefact lies in the work folder; given again, a run goes on where it stopped.

    data        data.npz, data.json       the texts in the target's ids, some documents held out
    text        text_<length>.npz         text written by the target
    train       draft.pt, draft.json      the draft
    acceptance  acceptance.json           greedy acceptance on held-out prompts
    export      OUT/config.json, OUT/model.safetensors, OUT/training.json

Settings come from ``recipes/conf/draft.yaml`` over ``conf/draft/<variant>.yaml``; ``key=value`` arguments override both
(``draft.phases=[[1000,8,512]]``, ``draft.network.bias=true``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import AutoTokenizer

from graphspec.errors import ConfigError

from .acceptance import AcceptanceConfig, describe, greedy_text, measure_acceptance
from .draft import DraftConfig, Texts, load_draft, train_draft
from .drafter import Target, load_target
from .export import export_draft, size_in_megabytes, write_json
from .generate import TextConfig, generate_text, text_file
from .networks import NETWORKS
from .texts import encode_stream, read_documents, split_documents

CONF = Path(__file__).resolve().parent / "conf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TrainConfig:
    """Everything a run can be told."""

    variant: str = MISSING
    """What is trained: a name of ``recipes/networks``."""
    target: str = MISSING
    """Folder of the target, in Hugging Face format."""
    data: list[str] = MISSING
    """Text files, or folders of them."""
    work: str = MISSING
    """Folder of everything made on the way; given again, the run resumes."""
    out: str = MISSING
    """Where the finished draft goes."""
    held_out: list[str] = field(default_factory=list)
    """Text files, or folders, for measuring acceptance; empty: ``held_out_share`` of ``data``."""
    held_out_share: float = 0.05
    device: str = "cpu"
    target_dtype: str = "float32"
    """The draft itself is trained in fp32."""
    threads: int = 0
    """CPU threads; 0: torch's own choice."""
    text: TextConfig = field(default_factory=TextConfig)
    """``text.sets=[]`` trains on the texts alone (with ``draft.raw_share=1``)."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.target_dtype not in DTYPES:
            raise ConfigError("target_dtype", "one of " + ", ".join(DTYPES), self.target_dtype)
        if not 0.0 < self.held_out_share < 0.5:
            raise ConfigError("held_out_share", "a share between 0 and 0.5", self.held_out_share)


def load_config(arguments: list[str]) -> TrainConfig:
    """The files under ``recipes/conf`` and ``key=value`` arguments as one configuration.

    Raises:
        ConfigError: a key that does not exist, a missing one, or settings that contradict each other. Names the key.
    """
    wrong = [argument for argument in arguments if "=" not in argument]
    if wrong:
        raise ConfigError("command line", "key=value arguments", " ".join(wrong))
    given = OmegaConf.from_dotlist(arguments)
    variant = given.get("variant")
    if variant not in NETWORKS:
        raise ConfigError("variant", "one of " + ", ".join(NETWORKS), variant)
    layers = [OmegaConf.load(CONF / "draft.yaml"), OmegaConf.load(CONF / "draft" / f"{variant}.yaml")]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), *layers, given, {"draft": {"variant": variant}})
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(missing[0], "a value", "none given")
        return cast("TrainConfig", OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "command line", "a setting of recipes.train_draft", str(error).splitlines()[0]) from error


class TrainDraft:
    """The stages over one work folder."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.work, self.out = config, Path(config.work), Path(config.out)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model = load_target(config.target, DTYPES[config.target_dtype], config.device)

    def run(self) -> dict[str, object]:
        """Every stage whose artefact does not exist; returns what ``training.json`` holds."""
        config, target = self.config, Target(self.model)
        end = self.data()
        data = np.load(self.work / "data.npz")
        if config.draft.raw_share < 1.0:
            generate_text(config.text, self.model, data["train"], self.work)
        written = {length: text_file(self.work, length) for _, _, length in config.text.sets}
        texts = Texts(data["train"], {length: np.load(file)["tokens"] for length, file in written.items() if file.exists()})
        if (self.work / "draft.json").exists():
            drafter = load_draft(config.draft, self.model, self.work / "draft.pt")
            print("train: done before", flush=True)
        else:
            drafter = train_draft(config.draft, self.model, texts, self.work, "draft")
        drafter.round_to_bfloat16()
        measured = measure_acceptance(config.acceptance, target, drafter, greedy_text(config.acceptance, target, data["held_out"]), end)
        write_json(self.work / "acceptance.json", measured)
        print("held-out tokens per cycle (S, K, N): " + describe(measured), flush=True)
        export_draft(drafter, self.model, self.out, Path(config.target))
        figures: dict[str, object] = {
            "data": json.loads((self.work / "data.json").read_text()),
            "training": json.loads((self.work / "draft.json").read_text()),
            "acceptance": measured,
            "megabytes": round(size_in_megabytes(self.out), 3),
            "config": asdict(config),
        }
        write_json(self.out / "training.json", figures)
        print(f"{config.variant} draft written to {self.out} ({figures['megabytes']} MB)", flush=True)
        return figures

    def data(self) -> int | None:
        """Encode the texts once; returns the id that ends a document."""
        config, facts = self.config, self.work / "data.json"
        sources = {"target": config.target, "data": config.data, "held_out": config.held_out, "share": config.held_out_share}
        if facts.exists():
            stored = json.loads(facts.read_text())
            for key, value in sources.items():
                if stored[key] != value:
                    raise ConfigError(f"{facts}: {key}", value, stored[key], "made from other sources; use a new work folder")
            return stored["end"]
        tokenizer = AutoTokenizer.from_pretrained(config.target, trust_remote_code=False)
        ends = self.model.config.eos_token_id
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0] if isinstance(ends, list) else ends
        documents = read_documents(config.data)
        if config.held_out:
            held_out = read_documents(config.held_out, "held_out")
            train = {name: text for name, text in documents.items() if name not in held_out}
        else:
            train, held_out = split_documents(documents, config.held_out_share)
        streams = {name: encode_stream(tokenizer, list(side.values()), end) for name, side in (("train", train), ("held_out", held_out))}
        highest = max(int(stream.max(initial=0)) for stream in streams.values())
        if highest >= self.model.config.vocab_size:
            raise ConfigError("target", f"a tokenizer with ids below vocab_size = {self.model.config.vocab_size}", highest)
        np.savez(self.work / "data.npz", train=streams["train"], held_out=streams["held_out"])
        counts = {"train_documents": len(train), "train_tokens": len(streams["train"])}
        counts.update(held_out_documents=len(held_out), held_out_tokens=len(streams["held_out"]))
        write_json(facts, {**sources, "end": end, **counts})
        print(f"data: {counts['train_tokens']} tokens to train on, {counts['held_out_tokens']} held out", flush=True)
        return end


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or {"-h", "--help"} & set(given):
        print(__doc__)
        return
    config = load_config(given)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)
    TrainDraft(config).run()


if __name__ == "__main__":
    main()
