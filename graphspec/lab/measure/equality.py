"""No speed for wrong output: compares the tokens of each side with its reference. Imports no torch.

Our sides must give the tokens of plain decoding, greedy or with the same seeds; transformers must where decoding is greedy. Where equality
can't be expected (another sampler, a lossy rule, a server with other numerics) the verdict is None and the sentence says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .sides import API, PLAIN, SideConfig

Tokens = Sequence[Sequence[int] | None]
Texts = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a side's output is correct.

    Attributes:
        equal: None: it can't be decided.
    """

    equal: bool | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Reference:
    """The expected output of every request: plain decoding's."""

    tokens: Tokens
    texts: Texts


def judge(
    side: SideConfig,
    about: Mapping[str, Any],
    rounds: Sequence[tuple[Tokens, Texts]],
    reference: Reference,
    checks: Sequence[Mapping[str, Any]],
) -> Verdict:
    """The verdict on one side.

    Args:
        about: its description of itself (:class:`graphspec.lab.measure.worker.Runner`).
        rounds: per round, the tokens and the texts of each request.
        checks: answers to ``check`` (``equal``, ``sentence``) of a synthetic run, which has no right output.
    """
    if side.ours:
        if about["synthetic"]:
            return Verdict(all(check["equal"] for check in checks), "; ".join(check["sentence"] for check in checks))
        if about["lossy"]:
            return Verdict(
                None, f"rule {about['rule']} with these thresholds does not keep the target's distribution; nothing was compared"
            )
        if about["rule"] != "match" and about["temperature"] > 0:
            return Verdict(
                None, f"rule {about['rule']} keeps the target's distribution, not the tokens of plain decoding; nothing was compared"
            )
        return _compare_tokens(rounds, reference, itself=side.role == PLAIN or about["shape"] is None)
    if about["temperature"] > 0:
        return Verdict(None, "another sampler at a temperature above 0; nothing was compared")
    if side.role != API:
        return _compare_tokens(rounds, reference, itself=False)
    if any(tokens is None for given, _ in rounds for tokens in given):
        return _compare_texts(rounds, reference)
    # Another program's kernels sum in another order, which may flip a near-tie; a difference is reported and decides nothing.
    verdict = _compare_tokens(rounds, reference, itself=False)
    return verdict if verdict.equal else Verdict(None, verdict.sentence)


def _compare_tokens(rounds: Sequence[tuple[Tokens, Texts]], reference: Reference, *, itself: bool) -> Verdict:
    pairs = [(given, right) for tokens, _ in rounds for given, right in zip(tokens, reference.tokens, strict=True)]
    same = [list(given or ()) == list(right or ()) for given, right in pairs]
    right = "its own first run" if itself else "plain decoding"
    sentence = f"tokens of {sum(same)} of {len(same)} outputs equal those of {right}"
    if not all(same):
        number = same.index(False)
        given, expected = (list(side or ()) for side in pairs[number])
        place = next((i for i, (a, b) in enumerate(zip(given, expected, strict=False)) if a != b), min(len(given), len(expected)))
        sentence += f"; request {number % len(reference.tokens)} differs first at token {place}"
    return Verdict(all(same), sentence)


def _compare_texts(rounds: Sequence[tuple[Tokens, Texts]], reference: Reference) -> Verdict:
    """A server without token ids: texts may differ by how they are joined, so agreement is reported and decides nothing."""
    same = [given == right for _, texts in rounds for given, right in zip(texts, reference.texts, strict=True)]
    return Verdict(None, f"texts of {sum(same)} of {len(same)} outputs ({100 * sum(same) / len(same):.0f} %) equal those of plain decoding")
