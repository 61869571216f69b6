"""Models on paper: what ``graphspec plan`` knows of a target and its draft when there may be nothing but a ``config.json``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from ...catalog import Variant, load_object
from ...config import VariantConfig
from ...errors import CheckpointError, ConfigError
from ...facts import DraftFacts, Eagle3Facts, EagleFacts, ModelFacts, MTPFacts, read_model_facts
from ...facts.eagle3 import default_taps
from ...facts.keys import Keys, read_architecture, read_config
from ...facts.model import FAMILIES, read_decoder
from ...facts.mtp import COUNT_KEYS
from ...hub import checkpoint_folder, is_hub_id
from ...paths import user_path

SHAPES = Path(str(files("graphspec"))) / "lab" / "predict" / "models"
"""Published models as their ``config.json`` alone; no weights come with them."""
DRAFT_VOCABULARY = 32000
"""Of the assumed EAGLE-3 head, as in most published ones."""
_HEAD_DIM, _KV_HEADS = 128, 8
_MIMO = "MiMoForCausalLM"


@dataclass(slots=True)
class Paper:
    """Target and draft as facts.

    Attributes:
        name: of the model: its folder's, or what it is called on the Hub.
        folder: of the target's config.
        target: its facts, quantisation left aside.
        draft: facts of the draft; None where the drafter is no network.
        described: the draft in words.
        from_config: the draft is known by a config only, or not even that.
        notes: what was assumed.
    """

    name: str
    folder: Path
    target: ModelFacts
    draft: DraftFacts | None = None
    described: str = ""
    from_config: bool = True
    notes: list[str] = field(default_factory=list)


def shape_names() -> list[str]:
    """Models whose shape comes with the package."""
    return sorted(folder.name for folder in SHAPES.iterdir() if (folder / "config.json").is_file())


def config_folder(path: str, revision: str | None = None) -> Path:
    """Folder of a config: the user's own, the demo model's, one of :func:`shape_names`, or of a model of the Hub, without its weights.

    Raises:
        ConfigError: there is no such folder and no such name.
    """
    from ...engine.llm import DEMO, model_folder

    if path == DEMO:
        return model_folder(path, revision)
    if not user_path("model.path", path).is_dir() and path in shape_names():
        return SHAPES / path
    folder = checkpoint_folder("model.path", path, revision, weights=False)
    if folder.is_dir():
        return folder
    raise ConfigError("model.path", f"a folder with a config.json, or one of demo, {', '.join(shape_names())}", repr(path))


def read_paper(model_path: str, config: VariantConfig, variant: Variant, revision: str | None = None) -> Paper:
    """Facts of the target and of its draft, assumed where there is none.

    Args:
        model_path: ``model.path``.
        config: the ``variant`` group.
        variant: its catalog entry.
        revision: ``model.revision``.

    Raises:
        ConfigError: no such folder; a draft for a drafter that has no network; a drafter whose network can't be guessed.
        CheckpointError: a config that is missing, wrong or not supported.
    """
    folder = config_folder(model_path, revision)
    with _plain_config(folder) as (plain, quantised):
        paper = Paper(model_path if is_hub_id(model_path) else folder.name, folder, replace(read_model_facts(plain), path=folder))
    if quantised:
        paper.notes.append("the checkpoint is quantised: counted as if it were not, which is how this engine would need it")
    if not variant.has_network:
        if config.draft is not None:
            raise ConfigError("variant.draft", f"nothing for variant {variant.name!r}, which has no draft network", config.draft)
        paper.described = "no network"
        return paper
    draft_folder = _draft_folder(folder, model_path, config, variant)
    if draft_folder is not None:
        _read_draft(paper, draft_folder, variant)
    else:
        _assume_draft(paper, variant)
    return paper


@contextmanager
def _plain_config(folder: Path) -> Iterator[tuple[Path, bool]]:
    """The folder, or a copy of its configs without ``quantization_config``; and whether there was one."""
    values = read_config(folder).values
    if not values.get("quantization_config"):
        yield folder, False
        return
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        rest = {key: value for key, value in values.items() if key != "quantization_config"}
        (copy / "config.json").write_text(json.dumps(rest), encoding="utf-8")
        generation = folder / "generation_config.json"
        if generation.is_file():
            (copy / generation.name).write_bytes(generation.read_bytes())
        yield copy, True


def _draft_folder(folder: Path, model_path: str, config: VariantConfig, variant: Variant) -> Path | None:
    from ...engine.llm import DEMO

    if config.draft is not None:
        return checkpoint_folder("variant.draft", config.draft, config.draft_revision, weights=False)
    if model_path == DEMO and variant.demo_draft is not None:
        return folder.parent / variant.demo_draft
    return folder if variant.draft_in_target else None


def _read_draft(paper: Paper, folder: Path, variant: Variant) -> None:
    """From a folder with tensors as the engine reads it, else from its config as far as that goes."""
    paper.described = "in the target's own checkpoint" if folder == paper.folder else str(folder)
    tensors = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"))
    with _plain_config(folder) as (plain, quantised):
        if tensors and not quantised:
            paper.draft, paper.from_config = load_object(variant.facts)(folder, paper.target), False
            return
        if quantised and folder != paper.folder:
            paper.notes.append("the draft is quantised: counted as if it were not")
        try:
            facts = load_object(variant.facts)(plain, paper.target)
        except CheckpointError:
            # Which heads there are is told by the names of tensors; without any, the config's count has to do.
            if not variant.draft_in_target:
                raise
            facts = _heads(plain, paper.target)
            paper.notes.append(f"{facts.num_heads} prediction head(s) of {facts.decoder.architecture}, as config.json counts them")
    paper.draft = replace(facts, path=folder)


def _heads(folder: Path, target: ModelFacts) -> MTPFacts:
    """The prediction heads a config counts, as layers behind the last."""
    keys = read_config(folder)
    architecture = read_architecture(keys, "a model with multi-token-prediction heads")
    family = FAMILIES.get(architecture.removesuffix("NextN"))
    if family is None:
        raise keys.error("architectures", "one of " + ", ".join(FAMILIES))
    count = keys.integer(next((key for key in COUNT_KEYS if keys.present(key)), COUNT_KEYS[0]))
    layers = keys.integer("num_hidden_layers")
    whole = Keys({**keys.values, "num_hidden_layers": layers + count}, keys.where)
    for key in ("hidden_size", "vocab_size"):
        if keys.integer(key) != getattr(target, key):
            raise keys.error(key, f"{getattr(target, key)}, as in {target.path}")
    return MTPFacts(
        path=folder,
        decoder=read_decoder(whole, folder, architecture, family).layers_from(layers),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_size=target.hidden_size,
        num_heads=count,
        layout="mimo" if architecture == _MIMO else "deepseek",
        first_index=layers,
    )


def _one_layer(target: ModelFacts) -> ModelFacts:
    """A plain Llama layer of the target's width. Where the target's attention is latent: heads of 128, eight of keys and values."""
    heads, kv_heads, width = target.num_heads, target.num_kv_heads, target.head_dim
    if target.latent is not None:
        even = target.hidden_size % _HEAD_DIM == 0 and (target.hidden_size // _HEAD_DIM) % _KV_HEADS == 0
        heads = target.hidden_size // _HEAD_DIM if even else target.num_heads
        kv_heads, width = _KV_HEADS if even else heads, target.hidden_size // heads
    return replace(
        target, architecture="LlamaForCausalLM", num_layers=1, sliding_window=(None,), latent=None, experts=None, qk_norm=False,
        attention_bias=False, output_bias=False, mlp_bias=False, attention_gate=False, norm_offset=False,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width,
    )  # fmt: skip


def _assume_draft(paper: Paper, variant: Variant) -> None:
    """A head of the kind that is usually trained for such a target.

    Raises:
        ConfigError: there is no usual one.
    """
    target, path = paper.target, Path("assumed")
    if variant.feature_source == "taps":
        taps = default_taps(target.num_layers)
        if list(taps) != sorted(set(taps)) or taps[0] < 0:
            taps = tuple(range(min(3, target.num_layers)))
        paper.draft = Eagle3Facts(
            path=path,
            decoder=_one_layer(target),
            draft_vocab_size=min(DRAFT_VOCABULARY, target.vocab_size),
            target_hidden_size=target.hidden_size,
            feature_size=len(taps) * target.hidden_size,
            tap_layers=taps,
        )
        paper.described = f"assumed: one layer over {len(taps)} tapped ones, {paper.draft.draft_vocab_size} tokens"
    elif variant.feature_source == "hidden" and not variant.draft_in_target:
        paper.draft = EagleFacts(
            path=path,
            decoder=_one_layer(target),
            draft_vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            feature_size=target.hidden_size,
        )
        paper.described = "assumed: one layer, the target's embedding and head"
    else:
        expected = f"a folder with the config.json of a draft: what variant {variant.name} drafts with can't be guessed"
        raise ConfigError("variant.draft", expected, "no value")
    paper.notes.append(f"no variant.draft was given; {paper.described}; layers of the target's width")
