"""Process-wide request ids for several front ends: the connection's id in the upper bits, the front end's own id in the
lower.

Invariants: of a step, a front end gets its own rows, in order, with its own ids; no work is done per token.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.message import ID_BITS, ID_LIMIT, StepTokens
from minisgl.step import Int64Array

MAX_CONNECTIONS = 1 << (63 - ID_BITS)  # over the process's life; ids are below
_OWN = ID_LIMIT - 1
_Mask = npt.NDArray[np.bool_]


def within(number: int, req_id: int) -> int:
    """Return the process-wide id for a front end's own request id."""
    return number << ID_BITS | req_id


def owner(req_id: int) -> int:
    """Return the id of the connection that a request came from."""
    return req_id >> ID_BITS


def split(message: StepTokens) -> dict[int, StepTokens]:
    """Split a step's message by connection id."""
    ids = np.frombuffer(message.req_ids, np.int64)
    admitted = np.frombuffer(message.admitted_ids, np.int64)
    owners, admitted_owners = ids >> ID_BITS, admitted >> ID_BITS
    first = int(owners[0]) if len(owners) else -1
    if (
        first >= 0
        and (owners == first).all()
        and (admitted_owners == first).all()
        and all(owner(req_id) == first for req_id in _prompt_request_ids(message))
    ):
        return {first: _renamed(message, ids, admitted) if first else message}
    numbers = {*owners.tolist(), *admitted_owners.tolist()}
    numbers.update(map(owner, _prompt_request_ids(message)))
    return {
        number: _renamed(
            *_selected(message, number, ids, owners == number, admitted, admitted_owners == number),
        )
        for number in sorted(numbers)
    }


def _prompt_request_ids(message: StepTokens) -> list[int]:
    """Return the ids of requests with prompt log probabilities or an embedding in the message."""
    return [item.req_id for item in message.prompt_logprobs] + [item.req_id for item in message.embeddings]


def _renamed(message: StepTokens, ids: Int64Array, admitted: Int64Array) -> StepTokens:
    """Return the message with the front end's own ids. `ids` and `admitted` are the arrays of `message`."""
    return msgspec.structs.replace(
        message,
        req_ids=(ids & _OWN).tobytes(),
        admitted_ids=(admitted & _OWN).tobytes(),
        errors={req_id & _OWN: text for req_id, text in message.errors.items()},
        prompt_logprobs=tuple(
            msgspec.structs.replace(item, req_id=item.req_id & _OWN) for item in message.prompt_logprobs
        ),
        embeddings=tuple(msgspec.structs.replace(item, req_id=item.req_id & _OWN) for item in message.embeddings),
    )


def _selected(
    message: StepTokens, number: int, ids: Int64Array, rows: _Mask, admitted: Int64Array, new: _Mask
) -> tuple[StepTokens, Int64Array, Int64Array]:
    """Return one connection's part of the message and its id arrays, by the masks `rows` and `new` (admissions)."""
    tokens, reasons = np.frombuffer(message.tokens, np.int32), np.frombuffer(message.reasons, np.int32)
    cached = np.frombuffer(message.cached_lens, np.int32)
    index = np.cumsum(rows) - 1  # new index of each row
    part = StepTokens(
        step=message.step,
        req_ids=b"",
        tokens=tokens[rows].tobytes(),
        reasons=reasons[rows].tobytes(),
        cached_lens=cached[new].tobytes(),
        errors={req_id: text for req_id, text in message.errors.items() if owner(req_id) == number},
        logprobs=tuple(
            msgspec.structs.replace(item, index=int(index[item.index])) for item in message.logprobs if rows[item.index]
        ),
        prompt_logprobs=tuple(item for item in message.prompt_logprobs if owner(item.req_id) == number),
        embeddings=tuple(item for item in message.embeddings if owner(item.req_id) == number),
    )
    return part, ids[rows], admitted[new]
