"""An agent of pydantic-ai with typed answers in each of its ways, tools and streams."""

import json
import os
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]
    rank: int = Field(ge=0, le=99)


provider = OpenAIProvider(base_url=os.environ["MINISGL_URL"] + "/v1", api_key="none")
settings = {"temperature": 0, "max_tokens": 200}
model = OpenAIChatModel("smollm2", provider=provider, settings=settings)
found = {}
plain = Agent(model)
found["text"] = plain.run_sync("Say hello.").output
for name, output in (("tool", ToolOutput(City)), ("native", NativeOutput(City))):
    found[name] = Agent(model, output_type=output).run_sync("Tell me about Paris.").output.model_dump()
with plain.run_stream_sync("Say hello.") as stream:
    found["streamed"] = list(stream.stream_text())[-1]
with Agent(model, output_type=NativeOutput(City)).run_stream_sync("Tell me about Paris.") as stream:
    found["streamed_native"] = stream.get_output().model_dump()
answers = OpenAIResponsesModel("smollm2", provider=provider, settings=settings)
found["responses"] = Agent(answers).run_sync("Say hello.").output
for name, output in (("responses_tool", ToolOutput(City)), ("responses_native", NativeOutput(City))):
    found[name] = Agent(answers, output_type=output).run_sync("Tell me about Paris.").output.model_dump()
print(json.dumps(found))
