"""LiteLLM before each API of the server: text, streams, tools, forms, an error that it knows by its words."""

import json
import os

import litellm
from pydantic import BaseModel, Field

URL = os.environ["MINISGL_URL"]
litellm.drop_params = False
litellm.num_retries = 0
ASK = {
    "model": "openai/smollm2",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "Tell me about Paris."}],
    "temperature": 0,
    "max_tokens": 100,
}
PARAMETERS = {
    "type": "object",
    "properties": {"rank": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["rank"],
}
TOOL = {"type": "function", "function": {"name": "rate", "description": "Rate a city.", "parameters": PARAMETERS}}


class City(BaseModel):
    name: str = Field(max_length=20)
    rank: int


found = {"text": litellm.completion(**ASK).choices[0].message.content}
found["streamed"] = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**ASK, stream=True))
formed = litellm.completion(**ASK, response_format=City)
found["form"] = json.loads(formed.choices[0].message.content)
called = litellm.completion(**ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
call, *_ = called.choices[0].message.tool_calls
found["call"] = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
found["finish_reason"] = called.choices[0].finish_reason
parts = list(litellm.completion(**ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True))
whole = litellm.stream_chunk_builder(parts)
found["streamed_call"] = json.loads(whole.choices[0].message.tool_calls[0].function.arguments)
answer = litellm.responses(
    model="openai/smollm2",
    api_base=f"{URL}/v1",
    api_key="none",
    input="Say hello.",
    temperature=0,
    max_output_tokens=50,
)
found["responses"] = "".join(part.text for item in answer.output for part in item.content)
other = ASK | {"model": "anthropic/smollm2", "api_base": URL}
found["anthropic"] = litellm.completion(**other).choices[0].message.content
other_call, *_ = (
    litellm.completion(**other, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    .choices[0]
    .message.tool_calls
)
found["anthropic_call"] = json.loads(other_call.function.arguments)
try:
    litellm.completion(**ASK | {"messages": [{"role": "user", "content": "many words " * 9000}]})
except litellm.ContextWindowExceededError:
    found["too_long"] = True
print(json.dumps(found))
