"""Engines over tiny checkpoints: a pair whose draft equals its target, greedy decoding by transformers, and schedulers to inspect."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphspec.api.llm import LLM
from graphspec.engine import engine as engine_module
from graphspec.engine.request import SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.graphs.cycle import Cycle
from graphspec.plan.buffers import Status
from tests.support.checkpoints import eagle3_tensors, write_eagle3, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest
    from torch import Tensor

    from graphspec.api.outputs import Output
    from graphspec.engine.request import Request

CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
WIDE = {"num_steps": 5, "topk": 4, "num_draft_tokens": 16}
SMALL = {"prefill_chunks": [8, 16], "runtime": "eager"}


@dataclass
class Pair:
    """A target, a draft for it, and the target as transformers runs it."""

    target: Path
    draft: Path
    hf: Any
    _greedy: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def llm(self, **overrides: Any) -> LLM:
        """An engine; ``eagle3`` by default."""
        values = {"variant": "eagle3", **SMALL, **overrides}
        return LLM(self.target, draft=self.draft if values["variant"] == "eagle3" else None, **values)

    def greedy(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False, stop: Sequence[int] = ()) -> list[int]:
        """What ``generate(do_sample=False)`` of transformers emits."""
        key = (*prompt, max_tokens, ignore_eos, *stop)
        if key not in self._greedy:
            # Dynamic RoPE scaling keeps the longest sequence so far; a copy starts without one.
            model = copy.deepcopy(self.hf)
            eos = [] if ignore_eos else [model.generation_config.eos_token_id]
            model.generation_config.eos_token_id = [*eos, *stop] or None
            with torch.no_grad():
                token_BT = torch.tensor([list(prompt)])
                # Without a mask, transformers treats token 0 in the prompt as padding.
                mask_BT = torch.ones_like(token_BT)
                out = model.generate(token_BT, attention_mask=mask_BT, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
            self._greedy[key] = out[0, len(prompt) :].tolist()
        return self._greedy[key]


def assert_tokens_of(model: Any, path: Path, prompt_ids: Sequence[list[int]], tokens: int, *shapes: dict[str, Any]) -> None:
    """Engines of these shapes over a checkpoint emit the greedy tokens of transformers' ``model``."""
    pair = Pair(path, path, model)
    expected = [pair.greedy(prompt, tokens, ignore_eos=True) for prompt in prompt_ids]
    for shape in shapes:
        with LLM(path, runtime="eager", max_context=64, page_size=8, max_rows=2, buckets=[2], **shape) as llm:
            assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=tokens, ignore_eos=True))) == expected, shape


def random_pair(path: Path, model: Any, **head: Any) -> Pair:
    """``model`` as a target, and a random EAGLE-3 head that fits it."""
    config = model.config
    tensors = eagle3_tensors(
        hidden_size=config.hidden_size, target_hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_taps=2
    )
    layers = config.num_hidden_layers
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, layers - 2], "use_aux_hidden_state": True}}
    target = write_hf(model, path / "target")
    return Pair(target, write_eagle3(path / "eagle3", tensors, **{"max_position_embeddings": 512, **taps, **head}), model)


BLOCK, CONST, HIDDEN, HEAD_DIM = 8, 24, 32, 16
CONST_VALUE = 2.0
EXCLUDED = (3, 11, 12, 30)
MIRROR_VOCAB = 44


def _pointer(distance: int, rms: float) -> tuple[Tensor, Tensor]:
    """Query and key columns (over the constant channel) of a head that attends the token ``distance`` back, with weight exactly 1.

    Slow and fast rotary frequencies together leave every other distance more than 104 below, where float32 softmax is 0.
    """
    frequency = 10000.0 ** (-torch.arange(HEAD_DIM // 2, dtype=torch.float64) * 2 / HEAD_DIM)
    size = math.sqrt(1100 * math.sqrt(HEAD_DIM)) * rms / CONST_VALUE
    query = torch.cat((torch.full((HEAD_DIM // 2,), size, dtype=torch.float64), torch.zeros(HEAD_DIM // 2, dtype=torch.float64)))
    phase = frequency * distance
    return query.float(), torch.cat((size * phase.cos(), size * phase.sin())).float()


def mirror_pair(path: Path, *, noise: float = 0.0, seed: int = 1, max_positions: int = 96, eos: int = MIRROR_VOCAB - 1) -> Pair:
    """A target, and an EAGLE-3 head that computes the same function; ``noise`` on its output layer makes it miss now and then.

    Token t is a unit vector e_t in the first of three blocks of the residual stream. The target's first layer copies e of the token before
    into the second block and e of the one before that into the third, by attention heads that point one and two positions back; its second
    layer adds nothing. The next token thus depends on the last three tokens. The head takes the same three from three different places: the
    token itself, the target's feature (or its own hidden state), and the feature of the token before, kept in its own KV. A slot, position
    or feature that is off by one shows as a miss.
    """
    generator = torch.Generator().manual_seed(seed)
    eps = 1e-5
    config = LlamaConfig(
        vocab_size=MIRROR_VOCAB, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=HEAD_DIM, max_position_embeddings=max_positions, rms_norm_eps=eps, bos_token_id=0, eos_token_id=eos,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    embedding = torch.zeros(MIRROR_VOCAB, HIDDEN)
    embedding[:, :BLOCK] = torch.nn.functional.normalize(torch.randn(MIRROR_VOCAB, BLOCK, generator=generator), dim=-1)
    embedding[:, CONST] = CONST_VALUE
    head = torch.randn(MIRROR_VOCAB, HIDDEN, generator=generator) * 2.5
    head[:, CONST] = 0
    head[list(EXCLUDED)] = 0
    head[list(EXCLUDED), CONST] = -50
    rms_e = math.sqrt((1 + CONST_VALUE**2) / HIDDEN + eps)
    rms_h = math.sqrt((3 + CONST_VALUE**2) / HIDDEN + eps)
    eye = torch.eye(BLOCK)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
        attention = model.model.layers[0].self_attn
        for index, distance in enumerate((1, 2)):
            rows = slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)
            query, key = _pointer(distance, rms_e)
            attention.q_proj.weight[rows, CONST], attention.k_proj.weight[rows, CONST] = query, key
            attention.v_proj.weight[index * HEAD_DIM : index * HEAD_DIM + BLOCK, :BLOCK] = eye * rms_e
            attention.o_proj.weight[(index + 1) * BLOCK : (index + 2) * BLOCK, index * HEAD_DIM : index * HEAD_DIM + BLOCK] = eye
    target = write_hf(model, path / "target")

    # Heads 0 and 1 point at the token itself: 32 value channels, one per channel of the residual stream. Head 2 points one back.
    q, k, v = (torch.zeros(3 * HEAD_DIM, 2 * HIDDEN) for _ in range(3))
    o = torch.zeros(HIDDEN, 3 * HEAD_DIM)
    for index, distance in enumerate((0, 0, 1)):
        rows = slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)
        q[rows, CONST], k[rows, CONST] = _pointer(distance, rms_e)
    hidden = slice(HIDDEN, HIDDEN + BLOCK)
    v[:BLOCK, :BLOCK], v[:BLOCK, hidden] = eye * rms_e, -eye * rms_h
    v[BLOCK : 2 * BLOCK, hidden], v[BLOCK : 2 * BLOCK, HIDDEN + BLOCK : HIDDEN + 2 * BLOCK] = eye * rms_h, -eye * rms_h
    v[2 * BLOCK : 3 * BLOCK, HIDDEN + 2 * BLOCK : HIDDEN + 3 * BLOCK] = -eye * rms_h
    o[:, : 2 * HEAD_DIM] = torch.eye(HIDDEN)
    v[2 * HEAD_DIM : 2 * HEAD_DIM + BLOCK, hidden] = eye * rms_h
    o[2 * BLOCK : 3 * BLOCK, 2 * HEAD_DIM : 2 * HEAD_DIM + BLOCK] = eye
    kept = torch.tensor([t for t in range(MIRROR_VOCAB) if t not in EXCLUDED])
    mask = torch.zeros(MIRROR_VOCAB, dtype=torch.bool)
    mask[kept] = True
    ones = torch.ones(HIDDEN)
    tensors = {
        "fc.weight": torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)), 1),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": o,
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.mlp.gate_proj.weight": torch.zeros(8, HIDDEN),
        "midlayer.mlp.up_proj.weight": torch.zeros(8, HIDDEN),
        "midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, 8),
        "norm.weight": ones.clone(),
        "lm_head.weight": (head + noise * torch.randn(head.shape, generator=generator))[kept],
        "d2t": kept - torch.arange(len(kept)),
        "t2d": mask,
    }
    eagle = {"eagle_aux_hidden_state_layer_ids": [-1, 0], "use_aux_hidden_state": True}
    draft = write_eagle3(
        path / "eagle3", tensors, rms_norm_eps=eps, rope_theta=10000.0, max_position_embeddings=max(512, max_positions), eagle_config=eagle
    )
    return Pair(target, draft, model)


def prompts(count: int, lengths: Sequence[int] = (5, 3, 17, 8, 1, 9, 16, 24), vocab: int = MIRROR_VOCAB, seed: int = 0) -> list[list[int]]:
    """Random prompts, with lengths below, at and above those of chunks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab - 1, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


def add_tokenizer(folder: Path, *, bos: int | None = None, chat_template: str | None = None) -> None:
    """A word for every id (``w0`` to ``w43``), one space between words.

    Args:
        folder: of the checkpoint.
        bos: id that every text begins with; None: none.
        chat_template: jinja; None: the checkpoint has none.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(MIRROR_VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos is not None:
        words.post_processor = processors.TemplateProcessing(single=f"w{bos} $A", special_tokens=[(f"w{bos}", bos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=None if bos is None else f"w{bos}")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def words(tokens: Sequence[int]) -> str:
    """Text of ``tokens`` by that tokenizer."""
    return " ".join(f"w{token}" for token in tokens)


def continued(tokens: Sequence[int]) -> str:
    """What ``tokens`` add to a text by that tokenizer."""
    return "".join(f" w{token}" for token in tokens)


def ids(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


class Watched(Scheduler):
    """A scheduler that keeps a list of its requests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Request] = []

    def add(self, request: Request) -> None:
        super().add(request)
        self.seen.append(request)

    @property
    def preempted(self) -> int:
        return sum(request.preempted for request in self.seen)


def idle_rows(cycle: Cycle, scheduler: Scheduler) -> torch.Tensor:
    """Bool ``[R]``: rows without a request that decodes or whose prompt is being read, the dummy row included."""
    idle_R = cycle.arena["status_R"] != Status.LIVE
    rows = [request.row for request in scheduler.running]
    idle_R[[row.index for row in rows if row.prefilled and not row.ready]] = False
    return idle_R


def watch_schedulers(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """A list to which every scheduler that an engine makes from now on is added."""
    made: list[Watched] = []

    class Listed(Watched):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(engine_module, "Scheduler", Listed)
    return made
