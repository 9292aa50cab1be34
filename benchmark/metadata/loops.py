"""Step metadata built request by request in Python, as servers of the family do it.

Invariants: `build` writes the same live arrays as a scheduler does for a step of these rows (a test compares them).
It is the kind form of such code: flat lists and one array made of each; no tensor operation per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.step import Int32Array


@dataclass(slots=True)
class Row:
    """A request of the step: `num_tokens` tokens up to `kv_len` are computed; `pages` hold all of `kv_len`."""

    slot: int
    tokens: list[int]  # ids; the input of a decoding row whose token is not known yet is -(slot + 1)
    pages: list[int]
    kv_len: int
    num_tokens: int


def build(rows: Sequence[Row], page_size: int) -> dict[str, Int32Array]:
    """The arrays of `step.RingEntry` by name, without padding and page-table updates; decode rows come first."""
    input_ids: list[int] = []
    positions: list[int] = []
    out_loc: list[int] = []
    req_slots: list[int] = []
    seq_lens: list[int] = []
    extend_lens: list[int] = []
    last_page_len: list[int] = []
    qo_indptr, kv_indptr = [0], [0]
    for row in rows:
        for position in range(row.kv_len - row.num_tokens, row.kv_len):
            input_ids.append(row.tokens[position])
            positions.append(position)
            out_loc.append(row.pages[position // page_size] * page_size + position % page_size)
        req_slots.append(row.slot)
        seq_lens.append(row.kv_len)
        extend_lens.append(row.num_tokens)
        last_page_len.append((row.kv_len - 1) % page_size + 1)
        qo_indptr.append(qo_indptr[-1] + row.num_tokens)
        kv_indptr.append(kv_indptr[-1] + (row.kv_len - 1) // page_size + 1)
    lists = {
        "input_ids": input_ids,
        "positions": positions,
        "out_loc": out_loc,
        "req_slots": req_slots,
        "seq_lens": seq_lens,
        "extend_lens": extend_lens,
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "last_page_len": last_page_len,
    }
    return {name: np.array(values, np.int32) for name, values in lists.items()}
