"""instructor: a model out of each of its modes, whole and as it grows."""

import json
import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]
    rank: int = Field(ge=0, le=99)


raw = openai.OpenAI(base_url=os.environ["MINISGL_URL"] + "/v1", api_key="none", max_retries=0)
asked = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me about Paris."}],
    "temperature": 0,
    "max_tokens": 600,
    "max_retries": 0,
}
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(raw, mode=mode)
    found[mode.name] = client.create(response_model=City, **asked).model_dump()
    *grown, last = client.create_partial(response_model=City, **asked)
    assert len(grown) > 1 and all(last.name.startswith(one.name or "") for one in grown), grown
    found[f"{mode.name}_partial"] = last.model_dump()
print(json.dumps(found))
