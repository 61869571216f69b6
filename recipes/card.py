"""The demo models' card, generated from the figures of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from graphspec.train.drafter import network_of


def percent(value: float) -> str:
    """A share in percent, with one decimal."""
    return f"{100 * value:.1f} %"


def acceptance_table(drafts: dict[str, Any]) -> str:
    """One Markdown row per draft and measured shape."""
    deepest = max(shape["num_steps"] for draft in drafts.values() for shape in draft["acceptance"]["shapes"])
    titles = ["draft", "depth S", "fan-out K", "verify nodes N", "cycles", "new tokens per cycle"]
    titles += [f"depth {d}" for d in range(1, deepest + 1)]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for name, draft in drafts.items():
        for shape in draft["acceptance"]["shapes"]:
            rates = [f"{rate:.3f}" for rate in shape["conditional_acceptance"]]
            rates += [""] * (deepest - len(rates))
            sizes = [shape["num_steps"], shape["topk"], shape["num_draft_tokens"], shape["cycles"]]
            cells = [f"`{name}`", *sizes, f"{shape['tokens_per_cycle']:.2f}", *rates]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def draft_table(drafts: dict[str, Any]) -> str:
    """One Markdown row per draft: size, and acceptance as a chain and as a tree (the first measured shape of each kind)."""
    shapes = next(iter(drafts.values()))["acceptance"]["shapes"]
    kinds = [(s["num_steps"], s["topk"], s["num_draft_tokens"]) for s in shapes]
    titles = ["draft", "parameters", "MB", *(f"new tokens per cycle, {'chain' if k == 1 else 'tree'} ({s}, {k}, {n})" for s, k, n in kinds)]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for name, draft in drafts.items():
        figures = [f"{shape['tokens_per_cycle']:.2f}" for shape in draft["acceptance"]["shapes"]]
        lines.append("| " + " | ".join([f"`{name}/`", f"{draft['parameters']:,}", f"{draft['megabytes']:.2f}", *figures]) + " |")
    return "\n".join(lines)


def training_table(drafts: dict[str, Any], configs: dict[str, Any]) -> str:
    """One Markdown row per draft: its training, and its agreement with the target afterwards."""
    titles = ["draft", "architecture", "sequences", "rows", "phases", "unrolled draft steps", "agreement with the target's argmax, by step"]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for name, draft in drafts.items():
        config = configs[name]
        agreement = ", ".join(f"{x:.3f}" for x in draft["agreement_by_depth"])
        about = network_of(draft["variant"]).about.format(**config["network"])
        sequences = " and ".join(f"{count} of {length}" for length, count in draft["sequences"].items())
        again = ", ".join(str(step) for step in config["restarts"])
        schedule = phase_text(config["phases"]) + (f"; learning-rate schedule restarted at step {again}" if again else "")
        cells = [f"`{name}`", about, sequences, f"{draft['rows']:,}", schedule, str(config["unroll"]), agreement]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def data_text(corpus: dict[str, Any]) -> str:
    """The training data in a sentence. Records of a corpus without packages have no key ``packages``."""
    library = f"the source of the standard library of CPython {corpus['python']}"
    packages = corpus.get("packages")
    if packages is None:
        return f"{library}, without tests and generated tables"
    overlapping, near = corpus["documents_overlapping"], corpus["near_duplicates"]
    accepted = f"{len(packages)} packages under MIT, BSD, Apache or PSF licences ([NOTICE](NOTICE))"
    left_out = "tests, vendored trees, generated files"
    return f"""{library} and of {accepted}, without {left_out}, {overlapping} files made up of text from held-out modules and \
{near} near-duplicates"""


def architecture_text(shape: dict[str, Any]) -> str:
    """The target's architecture in one line."""
    sizes = f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, intermediate {shape['intermediate_size']}"
    heads = f"{shape['num_attention_heads']} query and {shape['num_key_value_heads']} key/value heads"
    if is_llama(shape):
        return f"Llama, {sizes}, {heads}, tied embedding"
    states = f"{shape['linear_num_value_heads']} states of {shape['linear_key_head_dim']} x {shape['linear_value_head_dim']} each"
    attention = f"gated attention in every {shape['full_attention_interval']}th with {heads} of {shape['head_dim']}"
    return f"Qwen3.5, {sizes}; gated delta nets with {states}, {attention}; tied embedding"


def is_llama(shape: dict[str, Any]) -> bool:
    """Whether the target is a Llama, whose records have no key ``architecture``."""
    return "architecture" not in shape


def comparison_text(configs: dict[str, Any]) -> str:
    """A list item on whether the drafts can be compared; empty for a single draft."""
    if len(configs) == 1:
        return ""
    schedules = {name: (str(config["phases"]), str(config["restarts"])) for name, config in configs.items()}
    usual, _ = Counter(schedules.values()).most_common(1)[0]
    others = " and ".join(f"`{name}`" for name, schedule in schedules.items() if schedule != usual)
    exception = f", except for {others}," if others else ""
    return f"- The drafts had the same text and{exception} the same schedule; their sizes and peak learning rates differ.\n"


def sampled_text(drafts: dict[str, Any]) -> str:
    """The table of acceptance on sampled text; empty if it was not measured."""
    rows = {name: draft["acceptance"]["sampled"] for name, draft in drafts.items() if "sampled" in draft["acceptance"]}
    if not rows:
        return ""
    temperature = next(iter(rows.values()))["temperature"]
    table = acceptance_table({name: {"acceptance": sampled} for name, sampled in rows.items()})
    about = "Drafts were ranked without the sampler's noise. The default, `variant.draft_noise=coupled`, adds it and accepts more."
    return f"\nOn text sampled at temperature {temperature:g}. {about}\n\n{table}\n"


def against_loops_text(target: dict[str, Any]) -> str:
    """A row of the target's table on unlikelihood training; empty without it."""
    against = target.get("unlikelihood")
    if against is None:
        return ""
    loss = f"unlikelihood of weight {against['weight']:g} where a run of {against['width']} tokens repeats (arXiv 1908.04319)"
    return f"\n| against loops | then {against['steps']} steps on its own greedy text and the data: {loss} |"


def phase_text(phases: list[list[int]]) -> str:
    """``[steps, batch, length]`` phases in words."""
    return ", then ".join(f"{steps} steps of {batch} x {length} tokens" for steps, batch, length in phases)


def longest(phases: list[list[int]]) -> int:
    """Longest sequence of ``[steps, batch, length]`` phases."""
    return max(length for _, _, length in phases)


def model_card(figures: dict[str, Any]) -> str:
    """Markdown from the figures of one run (``training.json`` of the demo folder).

    Raises:
        KeyError: a figure is missing.
    """
    corpus, target, drafts, config = (figures[key] for key in ("corpus", "target", "drafts", "config"))
    shape, published = config["target"], target["published"]
    temperatures = ", ".join(f"{t:g}" for t in config["text"]["temperatures"])
    measured = next(iter(drafts.values()))["acceptance"]
    raw = [f"`{name}` ({percent(draft['raw_share'])})" for name, draft in config["drafts"].items() if draft["raw_share"]]
    raw_text = f" A share of each batch was taken from the training data instead: {', '.join(raw)}." if raw else ""
    vocabularies = [
        f"`{name}` has a draft vocabulary of {draft['draft_vocab_size']} of the {shape['vocab_size']} ids, which cover "
        f"{percent(draft['draft_vocab_coverage'])} of the generated text."
        for name, draft in drafts.items()
        if "draft_vocab_size" in draft
    ]
    names = ", ".join(f"`{name}/`" for name in drafts)
    held_out = ", ".join(f"`{name}`" for name in corpus["held_out_modules"])
    sample = published["samples"][0]
    shared = "embedding, and the output head of all but `eagle3` and `standalone`" if len(drafts) > 1 else "embedding and output head"
    plural = "drafts" if len(drafts) > 1 else "draft"
    title, kind, command = "The demo models", "Llama", "python -m recipes.train_demo"
    if not is_llama(shape):
        title, kind, command = "The hybrid demo model", "hybrid of gated delta nets and attention", f"{command} --config hybrid"
    terms = "- The training data is under the Python Software Foundation License; the weights are offered under the same terms."
    if "packages" in corpus:
        terms = "- The training data is under the licences in [NOTICE](NOTICE)."
    licence = "other" if "packages" in corpus else "psf-2.0"
    return f"""---
license: {licence}
language: code
library_name: graphspec
tags: [{", ".join(drafts)}, speculative-decoding]
---

# {title}

A small {kind} trained on Python source (`target/`) and its {plural} ({names}), all trained from scratch by `{command}`.
With them every feature of graphspec can be tried, tested and measured offline on any machine; the weights are small enough to be part of
the repository ({figures["megabytes"]:.1f} MB in bfloat16). The target is not useful for writing code.

{draft_table(drafts)}

## Target

| | |
| --- | --- |
| architecture | {architecture_text(shape)} |
| parameters | {target["parameters"]:,} |
| vocabulary | {shape["vocab_size"]} (byte-level BPE trained on the same text) |
| context | {shape["max_position_embeddings"]} tokens |
| training | {target["tokens"]:,} tokens: {phase_text(shape["phases"])} |{against_loops_text(target)}
| training loss at the end | {target["train_loss"]:.3f} nats per token |
| held-out loss | {target["held_out_loss"]:.3f} nats per token, **{target["held_out_bits_per_byte"]:.3f} bits per byte** |
| held-out loss, bfloat16 weights | {published["held_out_loss"]:.3f} nats per token, \
{published["held_out_bits_per_byte"]:.3f} bits per byte |

Data: {data_text(corpus)}:
{corpus["train_modules"]} modules, {corpus["train_bytes"]:,} bytes, {corpus["train_tokens"]:,} tokens.
Held-out modules, not used for training:
{held_out}
({corpus["held_out_bytes"]:,} bytes, {corpus["held_out_tokens"]:,} tokens).

## Drafts

{training_table(drafts, config["drafts"])}

Parameter counts exclude what a draft shares with the target ({shared}).
Drafts were trained on text generated by the target, at temperatures {temperatures} in turn; `sequences` gives their number and length.\
{raw_text}
{chr(10).join(vocabularies)}

## Acceptance

Greedy, on {measured["prompts"]} prompts of {measured["prompt_tokens"]} tokens from the held-out modules, \
{measured["new_tokens"]} new tokens each.
New tokens per cycle include the target's own token and exclude the prefill's; `depth d` is the share of cycles that accepted a token
at depth d, among those that accepted one at depth d - 1.

{acceptance_table(drafts)}
{sampled_text(drafts)}
## Limits

- The target has {target["parameters"] / 1e6:.1f} million parameters and saw {target["tokens"] / 1e6:.1f} million tokens of one kind of
  text. Its output looks like Python but is mostly meaningless.
- Under greedy decoding it repeats itself: {percent(measured["repeated_16_grams"])} of the 16-token runs in the measured text had
  occurred earlier in the same continuation. Repetition is easy to draft, so these figures show how the runtime behaves, not what
  the methods achieve on a real model.
{comparison_text(config["drafts"])}\
- The longest training sequence had {longest([p for d in config["drafts"].values() for p in d["phases"]])} tokens for the drafts and \
{longest(shape["phases"])} for the target.
{terms}

A greedy continuation of a held-out prompt, which ends at the mark `⟩⟩⟩`:

````python
{sample["prompt"]}⟩⟩⟩{sample["continuation"]}
````
"""
