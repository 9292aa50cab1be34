"""Measure the tiny checkpoints of tests/helpers/variants.py. `our_models.json` stores the figures of a run;
docs/features.md shows them in two tables and a list.

`python -m tests.helpers.our_models NAME...` measures names of the table, of `CASES`, and rows of
tests/helpers/gguf_rows.py against llama.cpp, or `all`, and everything never measured; then it writes the tables.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl import envs
from minisgl.engine.heads import CLASSIFIES
from minisgl.models.architectures import ENCODERS as NATIVE_ENCODERS
from minisgl.sampling_params import SamplingParams
from tests.helpers.encoders import hidden_states, pooled, tiny_encoder
from tests.helpers.engines import Collector, load
from tests.helpers.gguf_rows import ROWS
from tests.helpers.models import LOGITS_WITHIN, reference_logits, save, tiny_case, tiny_model
from tests.helpers.their_models import WITHIN, compare
from tests.helpers.variants import CASES, ENCODERS, MODELS

RECORD = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "features.md"
IDS = torch.randint(3, 131, (100,), generator=torch.Generator().manual_seed(3)).tolist()
Figures = dict[str, dict[str, Any]]
"""Largest differences. `safetensors`, `theirs`: of a logit, by variant and by case. `encoders`: of an embedding's
element. `gguf`: by row, its `variant`, the type of its `file`, and by tensor type that of a log probability."""


def by_safetensors(variant: str, folder: Path) -> float:
    """Return the largest difference between logits of the CPU engine and of transformers."""
    reference = tiny_model(variant)
    engine: Any = load("cpu", save(reference, folder), num_pages=64)[0]
    ours = np.frombuffer(engine.rust.prompt_logits(np.array(IDS, np.int32)), np.float32)
    engine.close()
    worst = float((torch.from_numpy(ours.reshape(len(IDS), -1).copy()) - reference_logits(reference, IDS)).abs().max())
    assert worst <= LOGITS_WITHIN, variant
    return float(f"{worst:.1e}")


def by_transformers(name: str, folder: Path) -> float:
    model = tiny_case(next(case for case in CASES if case.name == name))
    worst = compare(model, save(model, folder))
    assert worst <= WITHIN, name
    return float(f"{worst:.1e}")


def by_vectors(variant: str, folder: Path) -> float:
    """Return the largest difference between the CPU engine's (exact) and transformers' embeddings of one prompt."""
    model = tiny_encoder(variant)
    ids = torch.randint(6, 131, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    hidden, worst = hidden_states(model, ids), 0.0
    save(model, folder)
    for pooling in ("mean", "cls"):
        collector = Collector(*load("cpu", folder, num_pages=40, num_threads=1))
        collector.run({0: (ids, SamplingParams(max_tokens=1, temperature=0, seed=0, embedding=pooling))})
        collector.close()
        ours = torch.from_numpy(np.frombuffer(collector.embeddings[0], np.float32).copy())
        worst = max(worst, float((ours - pooled(hidden, pooling)).abs().max()))
    return float(f"{worst:.1e}")


def recorded() -> Figures:
    figures: Figures = json.loads(RECORD.read_text(encoding="utf-8"))
    return figures


def native(figures: Figures) -> list[tuple[str, ...]]:
    lines = [("models", "architecture", "with", "safetensors", "GGUF", "torch")]
    theirs = {case.architecture for case in CASES}
    for variant, model in MODELS.items():
        other = "transformers' layers" if model.architecture in theirs else "no"
        rows = [row for row in figures["gguf"].values() if row["variant"] == variant]
        cells = [f"`{kind}`: {_types(rows, kind)}" for kind in dict.fromkeys(row["file"] for row in rows)]
        figure = f"{figures['safetensors'][variant]:.0e}" if model.called else ""
        torch_cell = "native" if model.torch else other
        lines.append((model.called, f"`{model.architecture}`", model.notes, figure, "; ".join(cells), torch_cell))
    return [line for line in lines if line[0]]


def _types(rows: Iterable[Mapping[str, Any]], kind: str) -> str:
    """Return the largest differences by quantization type, of rows whose files have type `kind`."""
    worst = dict[str, float]()
    for row in rows:
        for name, difference in row["types"].items() if row["file"] == kind else ():
            worst[name] = max(worst.get(name, 0.0), difference)
    return ", ".join(f"{name} {difference:.0e}" for name, difference in worst.items())


def encoders(figures: Figures) -> list[tuple[str, ...]]:
    lines = [("models", "architectures", "safetensors")]
    for variant, figure in figures["encoders"].items():
        names = ", ".join(f"`{name}`" for name in names_of(variant))
        lines.append((ENCODERS[variant].called, names, f"{figure:.0e}"))
    return lines


def names_of(variant: str) -> list[str]:
    """Return the native architectures that differ from the variant's in their heads only."""
    return [name for name in NATIVE_ENCODERS if _stem(name) == _stem(ENCODERS[variant].architecture)]


def _stem(architecture: str) -> str:
    return architecture.removesuffix("Model").removesuffix("ForMaskedLM").removesuffix(CLASSIFIES)


def theirs(figures: Figures) -> str:
    """Return the cases as a paragraph, each with its notes and the largest difference of a logit."""
    known = ((one.architecture, one.notes, f"{figures['theirs'][one.name]:.0e}") for one in CASES)
    items = (f"`{name}` ({', '.join(filter(None, (notes, figure)))})" for name, notes, figure in known)
    return textwrap.fill("; ".join(items) + ".", 120, break_on_hyphens=False) + "\n"


TABLES = {"native models": native, "encoders": encoders}
"""Tables by the mark before each in the page."""


def written(page: str, figures: Figures) -> str:
    """Return the page with its tables and its list updated from the figures."""
    parts = {"seen through transformers": theirs(figures)}
    for mark, table in TABLES.items():
        head, *lines = table(figures)
        parts[mark] = "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines))
    for mark, text in parts.items():
        before, begin, rest = page.partition(f"<!-- {mark} -->\n")
        page = before + begin + text + "<!-- end -->\n" + rest.partition("<!-- end -->\n")[2]
    return page


def main() -> None:
    from tests.weights.test_gguf_folder_llama_cpp import seen_of

    kinds: dict[str, tuple[Iterable[str], Callable[[str, Path], Any]]] = {
        "safetensors": ([name for name, model in MODELS.items() if model.called], by_safetensors),
        "gguf": (ROWS, seen_of),
        "encoders": ([name for name, model in ENCODERS.items() if model.called], by_vectors),
        "theirs": ([case.name for case in CASES], by_transformers),
    }
    figures = recorded()
    for kind, (names, measure) in kinds.items():
        known = figures[kind]
        for name in names:
            if name in known and not {name, "all"} & set(sys.argv[1:]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.environ[envs.CACHE] = folder
                known[name] = measure(name, Path(folder))
            print(name, known[name], flush=True)
            RECORD.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        figures[kind] = {name: known[name] for name in names}
    RECORD.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
