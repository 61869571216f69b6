"""Names and types of the keyword arguments of ``LLM``, for type checkers and editors; the configuration decides what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from ..config.schema import Config, NgramSettings
from ..host.progress import Progress


class Overrides(TypedDict, total=False):
    """Keys of the configuration by their bare names, those of ``sampling`` apart, which belong to each request."""

    # variant
    draft_revision: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    tree_choices: list[list[int]] | None
    token_map: str | None
    ngram: NgramSettings
    draft_noise: str

    # model
    path: str
    revision: str | None
    family: str
    max_context: int | None
    generation_config: str

    # runtime
    max_rows: int
    buckets: list[int]
    kv_dtype: str
    page_size: int
    num_pages: int | None
    prefill_chunks: list[int] | None
    prefill_lanes: int
    prefill_tokens_per_cycle: int | None
    max_queued: int | None
    cycles_in_flight: int
    depth_per_bucket: dict[int, int]
    memory_fraction: float
    prefix_cache: bool | None
    tensor_parallel: int
    draft_parallel: str
    debug: bool
    max_stop_ids: int
    max_logit_bias: int
    max_logprobs: int
    sampling_classes: list[str] | None
    max_bad_words: int
    max_bad_word_tokens: int

    # kernels
    mode: str
    attention: str
    linear: str
    numerics: str
    programmatic_launch: bool | None
    compile_around: bool
    linear_table: str | None

    # accept
    rule: str
    threshold_single: float
    threshold_acc: float
    block_verification: bool
    synthetic_length: float | None
    synthetic_rates: list[float] | None

    # hardware
    device: str
    dtype: str
    threads: int | None
    memory_gib: float | None
    bandwidth_gbs: float | None
    tflops: float | None
    capacity_gib: float | None
    link_gbs: float | None
    sum_us: float

    # adaptive
    depths: list[int]
    backlog: int
    times: dict[int, dict[int, float]]
    rates: list[float]


class Arguments(Overrides, total=False):
    """All of ``LLM``."""

    model: str | Path
    variant: str
    draft: str | Path | None
    runtime: str
    config: Config | None
    progress: Progress | bool | None
