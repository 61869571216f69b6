"""Hints in errors: the closest key, our name for an option of another engine, how to install an extra. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from importlib import metadata


def _by_name(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names}


_OURS = _by_name({
    "model": ("model_path", "model_name_or_path", "pretrained_model_name_or_path", "checkpoint"),
    "max_context, the longest prompt plus output": ("max_model_len", "context_length", "max_seq_len", "max_position_embeddings"),
    "memory_fraction": ("gpu_memory_utilization", "mem_fraction_static"),
    "max_rows": ("max_num_seqs", "max_running_requests", "max_batch_size", "batch_size"),
    "page_size": ("block_size",),
    "num_pages": ("num_gpu_blocks_override", "max_total_tokens"),
    "prefill_chunks": ("enable_chunked_prefill",),
    "prefill_tokens_per_cycle": ("max_num_batched_tokens", "chunked_prefill_size", "max_prefill_tokens", "long_prefill_token_threshold"),
    "max_queued": ("max_queued_requests",),
    "prefix_cache": ("enable_prefix_caching", "disable_radix_cache"),
    "buckets, the batch sizes for which a cycle exists": (
        "cuda_graph_sizes", "cuda_graph_bs", "cuda_graph_max_bs", "cudagraph_capture_sizes", "compilation_config",
    ),
    "tensor_parallel": ("tensor_parallel_size", "tp_size", "tp"),
    "dtype": ("torch_dtype",),
    "device": ("device_map",),
    "attention": ("attn_implementation", "attention_backend"),
    'runtime="eager"': ("enforce_eager",),
    'runtime="eager" or "compiled"': ("disable_cuda_graph",),
    "variant= and draft=": (
        "speculative_config", "speculative_model", "speculative_algorithm", "speculative_draft_model_path", "assistant_model",
    ),
    'variant="ngram"': ("prompt_lookup_num_tokens",),
    "num_steps": ("speculative_num_steps", "num_speculative_tokens", "num_assistant_tokens"),
    "topk": ("speculative_eagle_topk",),
    "num_draft_tokens": ("speculative_num_draft_tokens",),
    "token_map": ("speculative_token_map",),
    "a field of ngram=NgramSettings(...)": ("min_window", "max_window", "match", "min_breadth", "capacity", "corpus"),
})  # fmt: skip
"""Names that vLLM, SGLang and transformers have for a key of ours."""

_ABSENT = _by_name({
    "a target is spread by tensor_parallel alone": (
        "pipeline_parallel_size", "data_parallel_size", "pp_size", "dp_size", "ep_size", "enable_expert_parallel",
    ),
    "no code of a checkpoint is ever run": ("trust_remote_code",),
    "quantised weights and KV are not supported": (
        "quantization", "quantization_config", "load_in_8bit", "load_in_4bit", "kv_cache_dtype",
    ),
    "the tokenizer is the one in the model's folder": ("tokenizer", "tokenizer_mode", "tokenizer_path", "skip_tokenizer_init"),
    "adapters are not supported": ("enable_lora", "lora_paths"),
    "the cache of the Hugging Face Hub is where HF_HUB_CACHE says": ("download_dir", "cache_dir"),
    "safetensors are read where there are any": ("load_format",),
    "graphspec serve has server.host, port, model_name and api_key_file": (
        "host", "port", "served_model_name", "api_key",
    ),
})  # fmt: skip
"""Options of other engines without an equivalent here, and the reason."""

_PER_REQUEST = _by_name({
    "seed": ("random_seed",),
    "max_tokens": ("max_new_tokens", "max_length", "max_completion_tokens", "n_predict", "num_predict"),
    "min_tokens": ("min_new_tokens", "min_length"),
    "n": ("num_return_sequences", "num_samples"),
    "temperature": ("do_sample", "temp"),
    "repetition_penalty": ("repeat_penalty",),
    "stop_token_ids": ("eos_token_id",),
    "stop": ("stop_strings", "stop_sequences", "stop_words"),
    "bad_words": ("bad_words_ids",),
    "logprobs": ("top_logprobs", "top_k_logprobs", "num_logprobs", "output_scores", "return_logprob", "top_logprobs_num"),
    "logit_bias": ("sequence_bias",),
    "structured": (
        "structured_outputs", "guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format",
        "json_schema", "regex", "ebnf", "grammar", "choice", "structural_tag",
    ),
})  # fmt: skip
"""Names that others have for a field of ``SamplingParams``, and parts of :class:`~graphspec.text.structured.Structured`."""

_NOT_PER_REQUEST = _by_name({
    "beam search is not supported": (
        "num_beams", "use_beam_search", "beam_width", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty",
    ),
    "all n outputs are returned, none is chosen as the best": ("best_of",),
    "no code runs inside the sampler; logit_bias, allowed_token_ids, bad_words and structured are data": (
        "logits_processors", "logits_processor", "custom_logit_processor",
    ),
    "repeated n-grams are not banned; repetition_penalty and frequency_penalty work against them": ("no_repeat_ngram_size",),
    "the filters are top_k, top_p and min_p": ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_a", "tfs_z", "mirostat"),
})  # fmt: skip
"""Sampling parameters of other engines without an equivalent here, and the reason."""

_NOTES = {
    "do_sample": "temperature, which is 0 for greedy",
    **{name: "structured=Structured(...)" for name, key in _PER_REQUEST.items() if key == "structured"},
}
"""What to say instead of the bare field."""


def hint_for_sampling(name: str, known: Collection[str]) -> str:
    """A hint for an unknown sampling parameter of a request; empty where none is near.

    Args:
        name: the parameter.
        known: parameters that exist where it was given.
    """
    field = _PER_REQUEST.get(name)
    if field in known:
        return f"here it is {_NOTES.get(name, f'{field}, as in vLLM')}"
    if field == "structured" and "structured_outputs" in known:
        return "here it is structured_outputs, as in vLLM"
    if name in _NOT_PER_REQUEST:
        return _NOT_PER_REQUEST[name]
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def hint_for(name: str, known: Collection[str], sampling: Collection[str] = ()) -> str:
    """A hint for an unknown key, in a few words.

    Args:
        name: the key.
        known: keys that exist.
        sampling: fields of ``SamplingParams``, where they are no keys.
    """
    if (field := _PER_REQUEST.get(name, name)) in sampling:
        return f"each request has its own: SamplingParams({field}=...)"
    if name in _NOT_PER_REQUEST:
        return _NOT_PER_REQUEST[name]
    if name in _OURS:
        return f"here it is {_OURS[name]}"
    if name in _ABSENT:
        return _ABSENT[name]
    close = difflib.get_close_matches(name, sorted({*known, *sampling}), n=1, cutoff=0.7)
    if close and close[0] not in known:
        return f"did you mean SamplingParams({close[0]}=...), which each request has of its own?"
    return f"did you mean {close[0]}?" if close else "docs/configuration.md lists them"


def hint_for_path(path: str, known: Collection[str]) -> str:
    """A hint for an unknown key of the command line, where keys stand in groups; empty where nothing is near.

    Args:
        path: the key with its group, such as ``sampling.temprature``, or without one, such as ``max_tokens``.
        known: keys that exist, each with its group.
    """
    group, _, leaf = path.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == group]
    near = difflib.get_close_matches(leaf, siblings, n=1)
    elsewhere = sorted(key for key in known if key.rpartition(".")[2] == leaf)
    if elsewhere and not (group and near):
        return f"did you mean {' or '.join(elsewhere)}?"
    if leaf in _PER_REQUEST and (key := f"sampling.{_PER_REQUEST[leaf]}") in known:
        return f"here it is {key}"
    if leaf in _NOT_PER_REQUEST:
        return _NOT_PER_REQUEST[leaf]
    if leaf in _OURS:
        return f"here it is {_with_group(_OURS[leaf], known)}"
    if leaf in _ABSENT:
        return _ABSENT[leaf]
    if near:
        return f"did you mean {near[0]}?"
    close = difflib.get_close_matches(leaf, {key.rpartition(".")[2] for key in known}, n=1, cutoff=0.85)
    return hint_for_path(close[0], known) if close else ""


def _with_group(ours: str, known: Collection[str]) -> str:
    """An entry of :data:`_OURS` as the command line spells it."""
    leaf = re.split(r"\W", ours)[0]
    path = next((key for key in known if key.rpartition(".")[2] == leaf and "." in key), None)
    if path is not None:
        return path + ours.removeprefix(leaf)
    return "model.path" if ours == "model" else ours.replace('"', "").replace("draft=", "variant.draft=")


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra.

    It names the packages: another project has the name graphspec on PyPI, so ``pip install graphspec[extra]`` would install that one.

    Args:
        extra: of ``pyproject.toml``, such as ``serve``.
    """
    try:
        requirements = metadata.requires("graphspec") or []
    except metadata.PackageNotFoundError:
        requirements = []
    wanted = [re.split(r"\s*;", line)[0] for line in requirements if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    return "pip install " + " ".join(f"'{line}'" for line in wanted) if wanted else f"install the packages of the extra {extra}"
