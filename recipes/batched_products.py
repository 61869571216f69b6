"""Causal attention for training on a CPU in bfloat16: batched products over whole score matrices.

PyTorch's flash attention for CPUs multiplies small blocks, and its backward pass takes a third of a training step of a narrow model on a
processor with a matrix unit (amx_bf16). As batched products, a layer takes a third of the time. The probabilities are kept for the backward
pass, ``2 * batch * heads * length ** 2`` bytes per layer. Each pass is an operator, so that a compiler does not decompose it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "graphspec_causal"


@torch.library.custom_op("graphspec_train::causal_attention", mutates_args=())
def causal_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, D]`` and probabilities ``[B * G, H / G * T, T]`` of unpadded sequences, all of one dtype."""
    B, H, T, D = q_BHTD.shape
    G = k_BGTD.shape[1]
    future = torch.full((T, T), float("-inf"), dtype=q_BHTD.dtype, device=q_BHTD.device).triu_(1)
    rows = (q_BHTD * scale).reshape(B * G, H // G * T, D)
    scores = torch.bmm(rows, k_BGTD.reshape(B * G, T, D).mT).view(B * H, T, T).add_(future)
    probabilities = torch.softmax(scores, -1).view(B * G, H // G * T, T)
    return torch.bmm(probabilities, v_BGTD.reshape(B * G, T, D)).view(B, H, T, D), probabilities


@causal_attention.register_fake
def _(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    B, H, T, D = q_BHTD.shape
    G = k_BGTD.shape[1]
    return q_BHTD.new_empty(B, H, T, D), q_BHTD.new_empty(B * G, H // G * T, T)


@torch.library.custom_op("graphspec_train::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    gradient_BHTD: Tensor, probabilities: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    B, H, T, D = q_BHTD.shape
    G = k_BGTD.shape[1]
    gradient = gradient_BHTD.reshape(B * G, H // G * T, D)
    of_v = torch.bmm(probabilities.mT, gradient)
    of_probabilities = torch.bmm(gradient, v_BGTD.reshape(B * G, T, D).mT)
    backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001
    of_scores = backward(of_probabilities, probabilities, -1, probabilities.dtype)
    of_q = torch.bmm(of_scores, k_BGTD.reshape(B * G, T, D)).mul_(scale)
    of_k = torch.bmm(of_scores.mT, q_BHTD.reshape(B * G, H // G * T, D)).mul_(scale)
    return of_q.view(B, H, T, D), of_k.view(B, G, T, D), of_v.view(B, G, T, D)


@causal_attention_backward.register_fake
def _(
    gradient_BHTD: Tensor, probabilities: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BHTD.new_empty(q_BHTD.shape), k_BGTD.new_empty(k_BGTD.shape), v_BGTD.new_empty(v_BGTD.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(output[1], q, k, v)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    of_q, of_k, of_v = causal_attention_backward(gradient, *ctx.saved_tensors, ctx.scale)
    return of_q, of_k, of_v, None


causal_attention.register_autograd(_backward, setup_context=_save)


def _forward(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **rest: Any) -> tuple[Tensor, None]:
    output, _ = causal_attention(q.to(v.dtype), k.to(v.dtype), v, scaling)
    return output.transpose(1, 2), None


def use_batched_products(model: PreTrainedModel) -> None:
    """Make ``model`` use this attention; its sequences must have no padding and no cache."""
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, lambda *arguments, **rest: None)
    model.set_attn_implementation(NAME)
