"""Write the tables of docs/files.md from the file formats that the code reads: `python -m tools.write_files_page`.

Text between a `begin` and an `end` mark is generated, the rest of the page is written by hand; a test fails when the
page differs. Each name is listed with the test that read a file written by another program.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from minisgl import _rust
from minisgl.weights import gguf_config, gguf_tokenizer, hub_names

PAGE = Path(__file__).parents[1] / "docs" / "files.md"
MARKED = re.compile(r"(<!-- begin (\S+) gguf -->\n).*?(<!-- end -->)", re.DOTALL)
OUR_FILE = "`tests/weights/test_gguf_tokenizer_llama_cpp.py` (our file, llama.cpp's ids)"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def by_test(names: Iterable[tuple[str, str]]) -> str:
    """Return a bullet for each test, with the names that it proves; `names` are pairs of a name and its test."""
    tests: dict[str, list[str]] = {}
    for name, test in names:
        tests.setdefault(test, []).append(name)
    items = (f"- {test}: {', '.join(names)}" for test, names in tests.items())
    wrapped = (textwrap.wrap(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items)
    return "".join(f"{line}\n" for lines in wrapped for line in lines)


def architectures() -> str:
    return by_test(
        (f"`{name}`", OF_ENCODERS if reader.encoder else CONVERTED) for name, reader in gguf_config.READERS.items()
    )


CONVERTED = "`tests/weights/test_gguf_folder_llama_cpp.py`"
OF_ENCODERS = "`tests/weights/test_gguf_folder_encoders.py`"
SEEN_TYPES: dict[str, str] = {
    **dict.fromkeys(_rust.GGUF_TYPES, CONVERTED),
    **dict.fromkeys(("Q8_0", "F32", "Q4_1"), "`tests/e2e/test_smollm2.py`"),
}
PUBLISHED = "`tests/weights/test_gguf_folder_published.py`"
SEEN_TOKENIZERS: dict[str, str] = {"smollm": "`tests/e2e/test_smollm2.py`", "deepseek-r1-qwen": PUBLISHED}


def types() -> str:
    return by_test((f"`{name}`", SEEN_TYPES[name]) for name in _rust.GGUF_TYPES)


def tokenizers() -> str:
    """Return the tokenizer names by test; names that split text the same way are joined by `=`."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, pre in gguf_tokenizer.PRE.items():
        alike.setdefault(pre.patterns, []).append(name)
    return by_test(
        (
            " = ".join(f"`{name}`" for name in names),
            next((SEEN_TOKENIZERS[n] for n in names if n in SEEN_TOKENIZERS), OUR_FILE),
        )
        for names in alike.values()
    )


def short_names() -> str:
    return table(("short name", "stands for"), ((f"`{name}`", f"`{full}`") for name, full in hub_names.SHORT.items()))


PARTS: dict[str, Callable[[], str]] = {
    "short_names": short_names,
    "architectures": architectures,
    "types": types,
    "tokenizers": tokenizers,
}


def written(page: str) -> str:
    return MARKED.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
