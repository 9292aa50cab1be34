"""What a step means for clients, as messages.

Invariants: log probabilities stand beside the token that they are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from minisgl.engine import api as engine_api
from minisgl.engine.api import StepLogprobs, StepResult
from minisgl.message import Embedding, PromptLogprobs, StepTokens, TokenLogprobs
from minisgl.runner.request_tracker import RequestTracker
from minisgl.step import FinishReason, Int32Array, StepOutput, step_output


def reply(
    output: StepOutput,
    result: StepResult,
    admitted: Sequence[int],
    cached_lens: Sequence[int],
    errors: dict[int, str],
) -> StepTokens:
    """`admitted`: ids of requests, `cached_lens` of them."""
    return StepTokens(
        step=output.step,
        req_ids=output.req_ids.tobytes(),
        tokens=output.tokens.tobytes(),
        reasons=output.reasons.tobytes(),
        admitted_ids=np.array(admitted, np.int64).tobytes(),
        cached_lens=np.array(cached_lens, np.int32).tobytes(),
        errors=errors,
        logprobs=_join_logprobs(output.rows, result.logprobs) if result.logprobs is not None else (),
        prompt_logprobs=tuple(map(_prompt_logprobs, result.prompt_logprobs)),
        embeddings=tuple(Embedding(one.req_id, one.numbers.tobytes()) for one in result.embeddings),
    )


def ended(step: int, req_id: int, reason: FinishReason, error: str = "") -> StepTokens:
    """The end of a request of which no scheduler knows; `error`: why it was not taken."""
    output = step_output(step, [(req_id, -1, reason, -1)])
    return StepTokens(
        step=output.step,
        req_ids=output.req_ids.tobytes(),
        tokens=output.tokens.tobytes(),
        reasons=output.reasons.tobytes(),
        errors={req_id: error} if reason is FinishReason.ERROR else {},
    )


def failed_rows(output: StepOutput, failures: Mapping[int, str]) -> tuple[StepOutput, dict[int, str]]:
    """`output` with errors instead of the ends in the rows of `failures`, and the texts by request."""
    texts: dict[int, str] = {}
    entries = []
    columns = output.req_ids.tolist(), output.tokens.tolist(), output.reasons.tolist(), output.rows.tolist()
    for req_id, token, reason, row in zip(*columns, strict=True):
        if row in failures:
            texts[req_id] = failures[row]
            entries.append((req_id, -1, FinishReason.ERROR, -1))
        else:
            entries.append((req_id, token, reason, row))
    return step_output(output.step, entries), texts


def errors_of(
    output: StepOutput, requests: RequestTracker, of_rows: Mapping[int, str], of_step: str, max_seq_len: int
) -> dict[int, str]:
    """Why requests ended with an error: `of_rows` by request, `of_step` whatever it has no other reason for."""
    errors = {}
    for req_id in output.req_ids[output.reasons == FinishReason.ERROR].tolist():
        request = requests.peek(req_id)
        if req_id in of_rows:
            errors[req_id] = of_rows[req_id]
        elif request is not None and not request.admitted:
            errors[req_id] = f"a prompt of {request.num_prompt} tokens does not fit: the limit is {max_seq_len - 1}"
        else:
            errors[req_id] = of_step
    return errors


def _join_logprobs(rows: Int32Array, logprobs: StepLogprobs) -> tuple[TokenLogprobs, ...]:
    """Log probabilities by row of the step -> by index of the output."""
    index_of = {row: index for index, row in enumerate(rows.tolist()) if row >= 0}
    return tuple(
        TokenLogprobs(
            index_of[row],
            logprobs.token_logprobs[i],
            tuple(logprobs.top_ids[i]),
            tuple(logprobs.top_logprobs[i]),
        )
        for i, row in enumerate(logprobs.rows.tolist())
        if row in index_of
    )


def _prompt_logprobs(found: engine_api.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        found.req_id,
        found.first,
        tuple(found.token_logprobs),
        tuple(map(tuple, found.top_ids)),
        tuple(map(tuple, found.top_logprobs)),
    )
