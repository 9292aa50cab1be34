"""Loads adapters, and computes and pins prefixes, before a server accepts requests.

Invariants: either all are there, or an error names the one that failed and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from minisgl.frontend.engine_client import ProcessClient
from minisgl.step import Int32Array
from minisgl.tokenizer import NotEncodable, Tokenizer, TooManyTokens


class NotKept(RuntimeError):
    """Error for a prefix that cannot be kept, or an adapter that cannot be loaded."""


async def load_adapters(
    client: ProcessClient, adapters: Sequence[tuple[str, str]], report: Callable[[str, int, int], None]
) -> None:
    """Load adapters (names, folders) on all engines. `report`: a `progress.Report`. Raises `NotKept`, `EngineGone`."""
    book = client.adapters
    loading = [book.load(name, path) for name, path in adapters]
    for i, adapter in enumerate(loading):
        report("loading adapters", i, len(loading))
        await client.until(lambda adapter=adapter: book.is_settled(adapter))  # type: ignore[misc]
        if (refusal := adapter.refusal) is not None:
            raise NotKept(f"--lora {adapter.name}={adapter.path}: {refusal}")
    report("loading adapters", len(loading), len(loading))


async def warm(
    client: ProcessClient,
    tokenizer: Tokenizer,
    texts: Sequence[str | Int32Array],
    max_seq_len: int,
    report: Callable[[str, int, int], None],
) -> None:
    """Compute and pin prefixes (texts or token ids) on all engines. Raises `NotKept`, `EngineGone`."""
    book, prefixes = client.prefixes, []
    for i, text in enumerate(texts):
        try:
            encode = partial(tokenizer.encode, most=max_seq_len)
            ids = await asyncio.to_thread(encode, text) if isinstance(text, str) else text
            if len(ids) >= max_seq_len:
                raise TooManyTokens(len(ids))
        except TooManyTokens as error:
            raise NotKept(_about(i, texts, f"{error}: at most {max_seq_len - 1} fit")) from error
        except NotEncodable as error:
            raise NotKept(_about(i, texts, str(error))) from error
        prefixes.append(book.insert(ids, pin=True))
    for i, prefix in enumerate(prefixes):
        report("computing prefixes", i, len(prefixes))
        await client.until(lambda prefix=prefix: book.is_settled(prefix))  # type: ignore[misc]
        if (refusal := prefix.refusal) is not None:
            more = " (--max-pinned-ratio)" if refusal.reason.startswith("pin:") else ""
            raise NotKept(_about(i, texts, refusal.reason + more))
    report("computing prefixes", len(prefixes), len(prefixes))


def _about(index: int, texts: Sequence[object], reason: str) -> str:
    which = f", number {index + 1} of {len(texts)}" if len(texts) > 1 else ""
    return f"--warm-prefix{which}: {reason}"
