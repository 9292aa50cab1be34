"""The encoders that are native: what people call them, and how near their tiny random checkpoints come to transformers.
The figures are those of a run, which `our_encoders.json` keeps; docs/features.md has them as a table.

`python -m tests.helpers.our_encoders` measures all and writes the table.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from minisgl.engine.heads import CLASSIFIES
from minisgl.models.architectures import ENCODERS as NATIVE
from minisgl.sampling_params import SamplingParams
from tests.helpers.encoders import ENCODERS, hidden_states, pooled, tiny_encoder
from tests.helpers.engines import Collector, load
from tests.helpers.models import save
from tests.helpers.our_models import PAGE, written

RECORD = Path(__file__).with_suffix(".json")
BEGIN = "<!-- encoders -->\n"
CALLED = {
    "bert": "BERT, all-MiniLM, bge, e5, gte v1, Arctic Embed",
    "roberta": "RoBERTa",
    "xlm-roberta-masked": "XLM-R: bge-m3, multilingual-e5, Arctic Embed L v2",
    "nomic-bert": "nomic-embed-text v1, v1.5",
    "nomic-moe": "nomic-embed-text-v2-moe",
    "jina-bert": "jina-embeddings-v2",
    "modernbert": "ModernBERT: gte-modernbert, modernbert-embed",
    "mpnet": "all-mpnet-base-v2, multi-qa-mpnet",
    "embedding-gemma": "EmbeddingGemma",
}
"""By variant of tests/helpers/encoders.py."""
IDS = torch.randint(6, 131, (90,), generator=torch.Generator().manual_seed(3)).tolist()


def vector(folder: Path, ids: list[int], pooling: str) -> torch.Tensor:
    """What the CPU engine gives for a prompt, with exact arithmetic."""
    engine, config = load("cpu", folder, num_pages=40, num_threads=1)
    collector = Collector(engine, config)
    collector.run({0: (ids, SamplingParams(max_tokens=1, temperature=0, seed=0, embedding=pooling))})
    collector.close()
    return torch.from_numpy(np.frombuffer(collector.embeddings[0], np.float32).copy())


def seen_of(variant: str, folder: Path) -> float:
    """The largest difference of a number of the vectors of one prompt."""
    model = tiny_encoder(variant)
    save(model, folder)
    hidden = hidden_states(model, IDS)
    return max(float((vector(folder, IDS, how) - pooled(hidden, how)).abs().max()) for how in ("mean", "cls"))


def names_of(variant: str) -> list[str]:
    """The native architectures that differ in their heads alone."""
    return [name for name in NATIVE if _stem(name) == _stem(ENCODERS[variant][0])]


def _stem(architecture: str) -> str:
    return architecture.removesuffix("Model").removesuffix("ForMaskedLM").removesuffix(CLASSIFIES)


def table(figures: Mapping[str, float]) -> str:
    lines = [("models", "architectures", "safetensors"), ("---",) * 3]
    for variant, called in CALLED.items():
        names = ", ".join(f"`{name}`" for name in names_of(variant))
        lines.append((called, names, f"{figures[variant]:.0e}"))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recorded() -> dict[str, float]:
    found: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def main() -> None:
    figures = {}
    for variant in CALLED:
        with tempfile.TemporaryDirectory() as folder:
            figures[variant] = seen_of(variant, Path(folder))
        print(variant, figures[variant], flush=True)
    RECORD.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(figures), BEGIN), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
