"""The keys of a decoder's ``config.json``, in a form that old and new readers accept."""

from __future__ import annotations

from transformers import PreTrainedModel

from .hybrid import hybrid_facts, is_hybrid


def decoder_facts(model: PreTrainedModel) -> dict[str, object]:
    """The decoder keys of ``model``, with RoPE as ``rope_theta`` and ``rope_scaling`` unless it has recurrent layers."""
    if is_hybrid(model.config):
        return hybrid_facts(model)
    config, layer = model.config, model.model.layers[0]
    rope = dict(config.rope_parameters)
    theta = float(rope.pop("rope_theta"))
    facts: dict[str, object] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": layer.self_attn.q_proj.out_features // config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": layer.self_attn.q_proj.bias is not None,
        "mlp_bias": layer.mlp.gate_proj.bias is not None,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "initializer_range": config.initializer_range,
        "torch_dtype": "bfloat16",
    }
    if hasattr(config, "sliding_window"):
        # Draft networks see their whole prefix; without this key, a family with sliding windows would use its default.
        facts["sliding_window"] = None
    return facts
