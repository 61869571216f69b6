"""Words and lines that the command line must refuse."""

from __future__ import annotations

LINES = (
    '{"prompt": 5}', "{", "[1]", "5", "null", "true", '{"prompt": "w1", "nope": 1}', '{"prompt": "w1", "max_tokens": "5"}',
    '{"prompt": "w1", "max_tokens": true}', '{"prompt": "w1", "max_tokens": 1e3}', '{"prompt": "w1", "temperature": NaN}',
    '{"prompt": "w1", "temperature": Infinity}', '{"prompt": "w1", "temperature": 1e39}', '{"prompt": "w1", "seed": 1e400}',
    '{"prompt": "w1", "temperature": 0.5, "top_k": 9223372036854775808}', '{"prompt": "w1", "seed": 99999999999999999999999}',
    '{"prompt": "w1", "stop_token_ids": ["a"]}', '{"prompt": "w1", "stop_token_ids": [1.5]}',
    '{"prompt": "w1", "stop_token_ids": [null]}', '{"prompt": "w1", "stop_token_ids": {"a": 1}}',
    '{"prompt": "w1", "logit_bias": {"a": 1}}', '{"prompt": "w1", "logit_bias": {"1": null}}',
    '{"prompt": "w1", "logit_bias": {"1": "nan"}}', '{"prompt": "w1", "logit_bias": {"1": "2"}}',
    '{"prompt": "w1", "logit_bias": {"1_0": 2}}', '{"prompt": "w1", "logit_bias": [1]}', '{"prompt": "w1", "repetition_penalty": 1e39}',
    '{"prompt": "w1", "repetition_penalty": -1}', '{"prompt": "w1", "logprobs": 1000}', '{"prompt": "w1", "logprobs": true}',
    '{"prompt": "w1", "ignore_eos": 1}', '{"prompt": "\\ud800"}', '{"prompt": ""}', '{"prompt": "w1", "prompt": 5}', "[" * 100000,
    '{"prompt": "w1", "max_tokens": ' + "9" * 5000 + "}", '"w1"\u2028"w2"', '{"prompt": "w1", "min_tokens": 5, "max_tokens": 2}',
    '{"prompt": null}', '{"prompt": "w1", "logprobs": -1}', '{"messages": 5}', '{"messages": []}', '{"messages": ["w1"]}',
    '{"messages": [{"role": "user"}]}', '{"messages": [{"role": 1, "content": "w1"}]}',
    '{"messages": [{"role": "user", "content": "\\ud800"}]}', '{"messages": [{"role": "user", "content": "w1"}], "prompt": "w1"}', "{}",
    '{"prompt": "' + "w1 " * 600 + '"}', '{"messages": [{"role": "user", "content": "w1"}]}',
    '{"prompt": "w1", "seed": ' + "9" * 4000 + "}",
)  # fmt: skip
"""Of these no request can be made, or none that a checkpoint of 512 positions and without a chat template can serve."""

REFUSED: tuple[tuple[str, ...], ...] = (
    ("nope",), ("--nope",), ("generate", "--nope"), ("generate", "=5"), ("generate", "a b c"), ("generate", "\udcff=1"),
    ("generate", "x" * 100000 + "=1"), ("generate", "+x=1"), ("generate", "~variant"), ("generate", "variant=nope"),
    ("generate", "variant=../../x"), ("generate", "model=../../../etc/passwd"), ("generate", "model=/etc/passwd"),
    ("generate", "experiment=/etc/passwd"), ("generate", "experiment=/etc/passwd.yaml"), ("generate", "experiment=d"),
    ("generate", "variant.name=nope"), ("generate", "variant=[eagle3,ngram]"), ("generate", "variant="), ("generate", "sampling.nope=1"),
    ("generate", "sampling=5"), ("generate", "hydra.run.dir=/x", "prompt=a"), ("generate", "hydra/launcher=basic", "prompt=a"),
    ("generate", "--multirun", "variant=nope,none", "prompt=a"), ("generate", "--multirun", "sampling.seed=[", "prompt=a"),
    ("generate", "--cfg", "nope"), ("generate", "--cfg", "job", "sampling.nope=1"), ("generate", "--info", "nope"),
    ("generate", "--config-name", "nope", "prompt=a"), ("generate", "--config-dir", "/nope", "prompt=a"),
    ("generate", "prompt=a", "prompt=b"), ("generate", "system=w1", "prompt=w1"), ("generate", "prompt=" + "[" * 50000 + "]" * 50000),
    ("generate", "prompt=[]"), ("generate", "prompt=[5]"), ("generate", "prompt=x", "prompt_file=x"),
    ("generate", "model.path=org/name", "model.revision=[1]"), ("convert",), ("convert", "/nope", "c"), ("convert", "TARGET", "TARGET"),
    ("convert", "DRAFT", "/proc/x", "layout=speculators"), ("convert", "DRAFT", "cc", "layout=nope"), ("convert", "DRAFT", "a", "b", "c"),
    ("convert", "TARGET", "cc", "layout=sglang"), ("convert", "a" * 5000, "cc", "layout=sglang"),
    ("convert", "DRAFT", "a" * 5000, "layout=sglang"), ("convert", "DRAFT", "cc", "layout=sglang", "target=" + "a" * 5000),
    ("convert", "a\0b", "c", "layout=sglang"), ("convert", "DRAFT", "/dev/null/x", "layout=sglang"), ("report", "report.files=[nope]"),
    ("report", "report.files=[]"), ("report", "report.files=[/etc/passwd]"), ("report", "report.files=[/proc/self/mem]"),
    ("report", "report.files=[/dev/null]"), ("report", "report.files=[" + "a" * 5000 + "]"),
    ("plan", "model=demo", "plan.measured=/etc/passwd"), ("plan", "model=demo", "plan.measured=/proc/self/mem"),
    ("plan", "model=demo", "hardware=h200", "plan.out=/proc/x/y"), ("plan", "model=demo", "hardware=h200", "plan.out=."),
    ("plan", "model=demo", "hardware.memory_gib=1e-9"), ("plan", "model=demo", "plan.context=99999999999"),
    ("plan", "model=demo", "hardware.bandwidth_gbs=nan"), ("plan", "model=demo", "hardware.tflops=inf"),
    ("plan", "model=demo", "plan.acceptance=[nan]"), ("plan", "model.path=nope"), ("plan", "model.path=./org/name"), ("diff", "left=x"),
    ("diff", "prompt="), ("diff", "prompt_file=nope"), ("diff", "chat=true"), ("inspect", "prompt="),
    ("inspect", "runtime=eager", "chat=true"), ("inspect", 'prompt=["a", "b"]'), ("profile", "baseline=nope"),
    ("profile", "baseline=openai"), ("profile", "results=/proc/x"), ("profile", "results=/dev/null"), ("profile", "results=/dev/null/x"),
    ("profile", "profile.trace=/nope/x"), ("profile", "profile.trace=."), ("profile", "workload=file"),
    ("profile", "workload=file", "workload.file=/dev/zero"), ("tune", "tune.out=/x/y.txt"), ("tune", "tune.out=../../x"),
    ("tune", "variant=none"), ("tune", "tune.out=/proc/x.yaml"), ("tune", "results=/dev/null"), ("demo", "prompt_file=/dev/zero"),
    ("demo", "variant=none"), ("demo", "prompt=\udcff"), ("train",), ("generate", "prompt_file=x", "chat=5"),
)  # fmt: skip
"""``TARGET`` and ``DRAFT`` stand for the folders of the tiny checkpoints."""
