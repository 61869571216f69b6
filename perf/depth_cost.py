"""What a depth that may change costs where drafting can't pay: ``python -m perf.depth_cost``.

The demo's EAGLE-3 head gets random weights, so that nothing it drafts is accepted, and ``graphspec profile`` runs it with
``adaptive.depths`` beside plain decoding. The ratio in the table is what is left of plain decoding's speed: the first trial, probes,
catching up and the host's share of choosing are all in it. Further words go to the launcher (``profile.rounds=15``).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from graphspec.cli import main as launcher
from graphspec.engine.llm import DEMO, model_folder

SETTINGS = (
    "variant=eagle3", "variant.num_steps=4", "variant.topk=1", "variant.num_draft_tokens=5", "adaptive.depths=[0,2]", "hardware=cpu",
    "workload.output_tokens=256", "baseline=none", "profile.rounds=9", "profile.stages=false", "profile.generations=0",
)  # fmt: skip


def useless_draft(folder: Path) -> Path:
    """The demo's EAGLE-3 head in ``folder``, every matrix replaced by noise of the same size."""
    shutil.copytree(model_folder(DEMO).parent / "eagle3", folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim > 1:
                tensors[name] = (torch.randn(tensor.shape, generator=generator) * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, file)
    return folder


def main(words: Sequence[str] | None = None) -> None:
    """Run the profile; exits with its code."""
    draft = useless_draft(Path("build") / "useless_draft")
    launcher(["profile", *SETTINGS, f"variant.draft={draft}", *(sys.argv[1:] if words is None else words)])


if __name__ == "__main__":
    main()
