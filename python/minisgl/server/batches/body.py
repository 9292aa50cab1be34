"""Request and response bodies of /v1/files and /v1/batches, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr

from minisgl.server.core.answers import Answer, Listed
from minisgl.server.core.fields import Body, described

MIN_KEEP_S, MAX_KEEP_S = 3600, 2_592_000
MAX_METADATA = 16


class ExpiresAfter(Body):
    anchor: Literal["created_at"] = Field(description="The time counts from when the file is made.")
    seconds: Annotated[int, Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)] = Field(description="Seconds until it is deleted.")


class FileUpload(Body):
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})] = Field(
        description="JSONL: a request a line, `{custom_id, method, url, body}`."
    )
    purpose: Literal["batch"] = Field(description="What it is for.")
    expires_after: ExpiresAfter | None = described("When it is deleted. Default: never.")


class BatchRequest(Body):
    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=256)] = Field(
        description="A file of requests, uploaded with the purpose `batch`."
    )
    endpoint: StrictStr = Field(description="The one that the file's lines name as `url`.")
    completion_window: StrictStr = Field(
        description="Hours or days, such as `24h` (at most `14d`): what has no answer by then is reported as expired."
    )
    metadata: (
        Annotated[
            dict[Annotated[StrictStr, Field(min_length=1, max_length=64)], Annotated[StrictStr, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = described("Up to 16 texts by name, shown again with the batch.")
    output_expires_after: ExpiresAfter | None = described("When its files are deleted. Default: after 30 days.")


class FileAnswer(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Listed):
    data: list[FileAnswer]


class FileDeleted(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(Answer):
    total: int
    completed: int
    failed: int


class InputDetails(Answer):
    cached_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class BatchUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchAnswer(Answer):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None  # null unless the batch failed
    input_file_id: str
    completion_window: str
    status: Literal["in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None  # sum over results so far
    metadata: dict[str, str] | None


class BatchList(Listed):
    data: list[BatchAnswer]
