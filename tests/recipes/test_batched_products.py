"""Attention of training on a CPU in bfloat16, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.batched_products import causal_attention, use_batched_products


@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(4, 4, 1), (4, 2, 7), (6, 1, 16)])
def test_values_and_gradients_are_those_of_causal_attention(heads, kv_heads, length):
    torch.manual_seed(heads)
    q = torch.randn(2, heads, length, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    output, probabilities = causal_attention(q, k, v, 8**-0.5)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, expected)
    assert torch.allclose(probabilities.sum(-1), torch.ones((), dtype=torch.float64))
    gradient = torch.randn_like(output)
    for ours, theirs in zip(*(torch.autograd.grad(out, (q, k, v), gradient) for out in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    # Views: heads come out of one projection, transposed.
    torch.library.opcheck(causal_attention, (q, k.mT.contiguous().mT, v, 8**-0.5))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_model_has_the_same_loss_and_gradients(compiled):
    torch.manual_seed(0)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    tokens = torch.randint(0, 64, (3, 12))

    def gradients() -> list[torch.Tensor]:
        forward = torch.compile(model, dynamic=False) if compiled else model
        loss = forward(tokens, labels=tokens, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    before = gradients()
    use_batched_products(model)
    for ours, theirs in zip(gradients(), before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
