"""Ollama's client before the small model: text, streams, a form, a tool, and what it says of itself."""

import json
import os

import ollama
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    rank: int = Field(ge=0, le=99)


client = ollama.Client(host=os.environ["MINISGL_URL"])
ask = {"model": "smollm2", "options": {"temperature": 0, "num_predict": 60}}
messages = [{"role": "user", "content": "Tell me about Paris."}]
found = {"text": client.chat(messages=messages, **ask).message.content}
found["streamed"] = "".join(part.message.content for part in client.chat(messages=messages, stream=True, **ask))
found["generated"] = client.generate(prompt=messages[0]["content"], **ask).response
found["form"] = json.loads(client.chat(messages=messages, format=City.model_json_schema(), **ask).message.content)
found["vectors"] = [len(one) for one in client.embed("smollm2", ["Paris", "London"]).embeddings]
found["again"] = client.embeddings("smollm2", "Paris").embedding == list(client.embed("smollm2", "Paris").embeddings[0])
found["models"] = [model.model for model in client.list().models]
shown = client.show("smollm2")
found["family"], found["capabilities"] = shown.details.family, shown.capabilities
found["size"] = client.ps().models[0].size
print(json.dumps(found))
