"""The demo pair's model card, written from the figures of the run and from nothing else."""

from __future__ import annotations

from typing import Any


def percent(value: float) -> str:
    """A share with one digit."""
    return f"{100 * value:.1f} %"


def acceptance_table(acceptance: dict[str, Any]) -> str:
    """One Markdown row per measured shape."""
    shapes = acceptance["shapes"]
    deepest = max(shape["num_steps"] for shape in shapes)
    titles = ["depth S", "fan-out K", "verify nodes N", "cycles", "new tokens per cycle", *(f"depth {d}" for d in range(1, deepest + 1))]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for shape in shapes:
        rates = [f"{rate:.3f}" for rate in shape["conditional_acceptance"]]
        rates += [""] * (deepest - len(rates))
        cells = [shape["num_steps"], shape["topk"], shape["num_draft_tokens"], shape["cycles"], f"{shape['tokens_per_cycle']:.2f}", *rates]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def longest(phases: list[list[int]]) -> int:
    """Longest sequence of ``[steps, batch, length]`` phases."""
    return max(length for _, _, length in phases)


def model_card(figures: dict[str, Any]) -> str:
    """Markdown from the figures of one run (``training.json`` of the demo folder).

    Raises:
        KeyError: a figure is missing; a card with holes is not written.
    """
    corpus, target, head, acceptance, config = (figures[key] for key in ("corpus", "target", "head", "acceptance", "config"))
    shape, phases = config["target"], config["target"]["phases"]
    phase_text = ", then ".join(f"{steps} steps of {batch} x {length} tokens" for steps, batch, length in phases)
    head_phases = ", then ".join(f"{steps} steps of {batch} x {length} tokens" for steps, batch, length in config["head"]["phases"])
    temperatures = ", ".join(f"{t:g}" for t in config["text"]["temperatures"])
    sequences = " and ".join(f"{count} sequences of {length} tokens" for length, count in head["sequences"].items())
    taps = ", ".join(str(layer) for layer in config["head"]["tap_layers"])
    held_out = ", ".join(f"`{name}`" for name in corpus["held_out_modules"])
    sample = acceptance["samples"][0]
    return f"""---
license: psf-2.0
language: code
library_name: graphspec
tags: [eagle3, speculative-decoding]
---

# The demo pair

A small Llama that writes Python (`target/`) and its EAGLE-3 head (`eagle3/`), both trained from nothing by
`python -m recipes.train_demo`. They exist so that every feature of graphspec can be tried, tested and measured on any machine, offline,
with weights small enough to lie in the repository ({figures["megabytes"]:.1f} MB in bfloat16). The target is not a useful programmer.

## Target

| | |
| --- | --- |
| architecture | Llama, {shape["num_hidden_layers"]} layers, hidden {shape["hidden_size"]}, intermediate {shape["intermediate_size"]}, \
{shape["num_attention_heads"]} query and {shape["num_key_value_heads"]} key/value heads, tied embedding |
| parameters | {target["parameters"]:,} |
| vocabulary | {shape["vocab_size"]} (byte-level BPE trained on the same text) |
| context | {shape["max_position_embeddings"]} tokens |
| training | {target["tokens"]:,} tokens: {phase_text} |
| training loss at the end | {target["train_loss"]:.3f} nats per token |
| held-out loss | {target["held_out_loss"]:.3f} nats per token, **{target["held_out_bits_per_byte"]:.3f} bits per byte** |
| held-out loss, bfloat16 weights | {acceptance["held_out_loss"]:.3f} nats per token, \
{acceptance["held_out_bits_per_byte"]:.3f} bits per byte |

Data: the source of the standard library of CPython {corpus["python"]}, without tests and generated tables:
{corpus["train_modules"]} modules, {corpus["train_bytes"]:,} bytes, {corpus["train_tokens"]:,} tokens. Held out whole, never trained on:
{held_out}
({corpus["held_out_bytes"]:,} bytes, {corpus["held_out_tokens"]:,} tokens).

## Head

| | |
| --- | --- |
| architecture | EAGLE-3: one decoder layer over `[embedding; hidden]`, intermediate {config["head"]["intermediate_size"]}, \
taps entering layers {taps} |
| parameters | {head["parameters"]:,}, the target's embedding not counted |
| draft vocabulary | {head["draft_vocab_size"]} of {shape["vocab_size"]}, {percent(head["draft_vocab_coverage"])} of the generated text |
| training text | written by the target itself: {sequences}, temperatures {temperatures} in turn |
| training | {head["rows"]:,} rows: {head_phases}; {head["unroll"]} draft steps unrolled (training-time test) |
| agreement with the target's argmax at each unrolled step, end of training | {", ".join(f"{x:.3f}" for x in head["agreement_by_depth"])} |

## Acceptance

Greedy, on {acceptance["prompts"]} prompts of {acceptance["prompt_tokens"]} tokens from the held-out modules, \
{acceptance["new_tokens"]} new tokens each.
New tokens per cycle include the target's own token and leave out the prefill's; `depth d` is the share of cycles that accepted a token
at depth d among those that accepted one at d - 1.

{acceptance_table(acceptance)}

## Limits

- {target["parameters"] / 1e6:.1f} million parameters and {corpus["train_tokens"] / 1e6:.1f} million tokens of one kind of text:
  it knows the look of Python and little of its sense.
- Under greedy decoding it repeats itself: {percent(acceptance["repeated_16_grams"])} of the 16-token runs in the measured text had
  occurred earlier in the same continuation. Repetition is easy to draft: these acceptance figures show how the runtime behaves, not what
  EAGLE-3 reaches on a real model.
- The longest text was {longest(config["head"]["phases"])} tokens when the head was trained, and {longest(phases)} for the target.
- The training text is under the Python Software Foundation License; the weights are offered under the same terms.

A greedy continuation of a held-out prompt (the prompt ends at the mark `⟩⟩⟩`):

````python
{sample["prompt"]}⟩⟩⟩{sample["continuation"]}
````
"""
