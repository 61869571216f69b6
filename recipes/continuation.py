"""Text that a target in training writes: by transformers, since its weights change and an engine reads them from files."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from graphspec.train.facts import RECURRENT


class PreallocatedLayer(DynamicLayer):
    """A cache layer of fixed capacity that returns views, so that a generated token does not copy the whole cache."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.is_initialized = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values ``[B, G, T, D]``; returns all up to and including them."""
        if not self.is_initialized:
            batch, heads, _, dim = key_states.shape
            self.keys = key_states.new_empty(batch, heads, self.capacity, dim)
            self.values = torch.empty_like(self.keys)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        begin, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, begin : self.length] = key_states
        self.values[:, :, begin : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length


def preallocated_cache(model: PreTrainedModel, capacity: int) -> Cache:
    """A cache for ``capacity`` tokens; recurrent layers have a state of fixed size instead."""
    kinds = getattr(model.config, "layer_types", None) or [None] * model.config.num_hidden_layers
    return Cache(layers=[LinearAttentionLayer() if kind == RECURRENT else PreallocatedLayer(capacity) for kind in kinds])


@torch.inference_mode()
def continue_text(model: PreTrainedModel, prompt_BL: torch.Tensor, length: int, temperature: float, seed: int) -> torch.Tensor:
    """Continue prompts of equal length to ``length`` tokens: ``[B, length]`` int64 on the CPU, prompt included.

    An end-of-text token does not stop a row: it is followed by the beginning of another document, as in the training stream.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    prompt_BL = prompt_BL.to(device)
    cache = preallocated_cache(model, length)
    out_BT = torch.empty(len(prompt_BL), length, dtype=torch.int64, device=device)
    begin = prompt_BL.shape[1]
    out_BT[:, :begin] = prompt_BL
    step_BT = prompt_BL
    for position in range(begin, length):
        logits_BV = model(step_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if temperature == 0.0:
            step_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            step_BT = torch.multinomial(torch.softmax(logits_BV.float() / temperature, -1), 1, generator=generator)
        out_BT[:, position] = step_BT[:, 0]
    return out_BT.cpu()
