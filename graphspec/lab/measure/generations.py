"""A generation recorded cycle by cycle: every draft tree as it was verified, and its text, for the tree viewer."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...api.llm import LLM, generate_through
from ...api.outputs import OutputText
from ...engine.launcher import Forwarding
from ...engine.request import ResolvedParams
from ...graphs.cycle import Cycle, RingEntry
from ...graphs.programs import Key
from ...graphs.stages.mailbox import Message
from ...plan.buffers import Views
from ...shapes import GraphKey


class TreeRecorder(Forwarding):
    """A launcher that copies lane 0's tree after every cycle, before the next one overwrites it.

    Args:
        scored: whether candidates' scores are log-probabilities of the drafter.
    """

    def __init__(self, cycle: Cycle, *, scored: bool) -> None:
        super().__init__(cycle)
        self.scored = scored
        self.trees: list[list[dict[str, Any]]] = []
        self.emitted: list[list[int]] = []
        self.first: list[int] = []
        self._cycles: dict[int, bool] = {}

    def launch(self, key: Key, message: Message) -> int:
        ticket = super().launch(key, message)
        self._cycles[ticket] = isinstance(key, GraphKey)
        if isinstance(key, GraphKey):
            if self.cycle.plan.device == "cuda":
                torch.cuda.synchronize(self.cycle.arena.device)
            self.trees.append(read_tree(self.cycle.views(key), scored=self.scored and key.shape.num_steps > 0))
        return ticket

    def read(self, ticket: int) -> RingEntry:
        entry = super().read(ticket)
        if self._cycles.pop(ticket):
            self.emitted.append(entry.tokens[0])
        else:
            self.first += entry.tokens[0]
        return entry


def read_tree(v: Views, *, scored: bool) -> list[dict[str, Any]]:
    """Nodes of lane 0 after a cycle: ``token``, ``parent`` (-1: the root), ``depth``, ``probability`` of the whole path, ``accepted``.

    Unused nodes are omitted. The probability is the drafter's, ``exp`` of its candidate's score, and 1 for the root; None without
    ``scored``.
    """
    token_N, parent_N, depth_N = (slot[0].tolist() for slot in (v.node_token_BN, v.node_parent_BN, v.node_depth_BN))
    accepted = set(v.path_BA[0, : int(v.accept_len_B[0])].tolist())
    scores = candidate_scores(v) if scored else {}
    used = [node for node, token in enumerate(token_N) if token >= 0 or node == 0]
    place = {node: index for index, node in enumerate(used)}
    paths: dict[int, tuple[int, ...]] = {0: ()}
    nodes: list[dict[str, Any]] = []
    for node in used:
        if node:
            paths[node] = (*paths[parent_N[node]], token_N[node])
        score = scores.get(paths[node]) if node else 0.0
        nodes.append({
            "token": token_N[node],
            "parent": place[parent_N[node]] if node else -1,
            "depth": depth_N[node],
            "probability": math.exp(score) if scored and score is not None else None,
            "accepted": node in accepted,
        })  # fmt: skip
    return nodes


def candidate_scores(v: Views) -> dict[tuple[int, ...], float]:
    """Sum of log-probabilities of every candidate of lane 0, by the tokens of its path from the root."""
    score_M, token_M, parent_M = (slot[0].tolist() for slot in (v.candidate_score_BM, v.candidate_token_BM, v.candidate_parent_BM))
    paths: list[tuple[int, ...]] = []
    found: dict[tuple[int, ...], float] = {}
    for candidate, (score, token, parent) in enumerate(zip(score_M, token_M, parent_M, strict=True)):
        above = () if parent < 0 else paths[parent] if parent < candidate else ()
        paths.append((*above, token))
        if math.isfinite(score):
            found[paths[-1]] = max(score, found.get(paths[-1], -math.inf))
    return found


def record_generation(llm: LLM, prompt: list[int], params: ResolvedParams) -> dict[str, Any]:
    """Generate and record every cycle.

    Returns:
        ``prompt``, the text that the first cycle continues (the prompt and the token of its prefill), and ``cycles``, each with ``nodes``
        (:func:`read_tree`, with ``text``) and ``emitted``, the texts of the tokens it committed, which together are the output's text.
    """
    # The scores of a coupled drafter contain the sampler's noise, so they are not log-probabilities.
    accept = llm.plan.accept
    scored = llm.plan.variant.has_network and not accept.sampled_drafts and not (params.sampling_class.noise and accept.coupled)
    recorder = TreeRecorder(llm.cycle, scored=scored)
    [output] = generate_through(llm, recorder, [prompt], params)
    for tree in recorder.trees:
        for node in tree:
            node["text"] = llm.tokenizer.token_text(node["token"]) if node["token"] >= 0 else ""
    text = OutputText(llm.tokenizer, params, prompt)
    left = len(output.token_ids)
    emitted: list[list[str]] = []
    for run in (recorder.first, *recorder.emitted):
        left -= len(run)
        emitted.append([text.push([token], last=left == 0 and i == len(run) - 1) for i, token in enumerate(run)])
    shown = llm.tokenizer.decode(prompt, skip_special_tokens=True) + "".join(emitted[0])
    cycles = [{"nodes": tree, "emitted": run} for tree, run in zip(recorder.trees, emitted[1:], strict=False) if run]
    return {"prompt": shown, "cycles": cycles}
