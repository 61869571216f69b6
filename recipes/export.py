"""Write the demo pair as Hugging Face style checkpoints in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from .eagle3 import Eagle3Head


def write_json(path: Path, value: dict[str, object]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file that everyone may read (the writer itself leaves it to its owner)."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def llama_facts(model: LlamaForCausalLM) -> dict[str, object]:
    """The keys a Llama ``config.json`` shares between the target and the head, in the spelling both old and new readers know."""
    config = model.config
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": True,
        "initializer_range": config.initializer_range,
        "torch_dtype": "bfloat16",
    }


def export_target(model: LlamaForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write config, generation config, weights (the tied embedding once) and tokenizer to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", {"architectures": ["LlamaForCausalLM"], **llama_facts(model), "use_cache": True})
    ids = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    write_json(out / "generation_config.json", {**ids, "do_sample": False})
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters() if name != "lm_head.weight"}
    save_weights(tensors, out / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


def export_head(head: Eagle3Head, target: LlamaForCausalLM, out: Path) -> None:
    """Write config and weights of the EAGLE-3 head to ``out``.

    ``eagle_aux_hidden_state_layer_ids`` counts layers by their *output*, one less than the layer whose input is tapped.
    """
    out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {"architectures": ["LlamaForCausalLMEagle3"], **llama_facts(target)}
    facts.update(
        intermediate_size=head.midlayer.mlp.gate_proj.out_features,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        draft_vocab_size=head.lm_head.out_features,
        target_hidden_size=target.config.hidden_size,
        num_aux_hidden_states=len(head.tap_layers),
        norm_before_residual=False,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.tap_layers],
            "use_aux_hidden_state": True,
        },
    )
    write_json(out / "config.json", facts)
    tensors = {name: (t.bfloat16() if t.is_floating_point() else t).contiguous() for name, t in head.state_dict().items()}
    save_weights(tensors, out / "model.safetensors")


def size_in_megabytes(folder: Path) -> float:
    """Bytes of all weight files under ``folder`` / 1e6."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / 1e6
