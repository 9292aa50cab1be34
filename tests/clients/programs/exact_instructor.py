"""instructor: each mode that this server can serve, partial and iterated answers, what it asks again."""

from collections.abc import Iterable

import instructor
import openai
from checks import CITY, MODEL, PARIS, URL, City, called, check, raises, said, tell
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

raw = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Picky(BaseModel):
    rank: int = Field(ge=50)


CALLED = called("City", PARIS.model_dump())


def of(mode):
    return instructor.from_openai(raw, mode=mode)


def texts(mode, text):
    """Whole, partial, with what the server said."""
    asked = {"model": MODEL, "messages": said(text), "max_retries": 0}
    assert of(mode).create(response_model=City, **asked).model_dump() == PARIS.model_dump()
    *grown, last = of(mode).create_partial(response_model=City, **asked)
    assert last.model_dump() == PARIS.model_dump() and grown
    found, completion = of(mode).create_with_completion(response_model=City, **asked)
    assert found.model_dump() == PARIS.model_dump() and completion.model == MODEL


@check
def tools():
    texts(instructor.Mode.TOOLS, CALLED)


@check
def json_schema():
    texts(instructor.Mode.JSON_SCHEMA, CITY)


@check
def json_object():
    texts(instructor.Mode.JSON, CITY)


@check
def markdown_json():
    texts(instructor.Mode.MD_JSON, f"```json\n{CITY}\n```")


@check
def many():
    asked = {"model": MODEL, "max_retries": 0}
    several = called("IterableCity", {"tasks": [PARIS.model_dump()] * 3})
    found = of(instructor.Mode.TOOLS).create(
        response_model=Iterable[City], messages=said(several), stream=True, **asked
    )
    assert list(found) == [PARIS] * 3


@check
def what_does_not_fit_is_asked_again():
    text = called("Picky", {"rank": 1})
    client = of(instructor.Mode.TOOLS)
    call = lambda: client.create(response_model=Picky, model=MODEL, messages=said(text), max_retries=2)  # noqa: E731
    error = raises(InstructorRetryException, call)
    assert error.n_attempts >= 2


@check
async def asynchronous():
    other = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(other, mode=instructor.Mode.TOOLS)
    found = await client.create(response_model=City, model=MODEL, messages=said(CALLED), max_retries=0)
    assert found.model_dump() == PARIS.model_dump()


tell()
