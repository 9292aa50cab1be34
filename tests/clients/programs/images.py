"""Client libraries send a picture to the model: `SHOW` has a function for each. `images.py NAME FILE` calls one
function and prints how many tokens each prompt with the picture had, as the library reports it. Where a tool returns
the picture, the request forces the model to call the tool, or the conversation already contains the call."""

import base64
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

URL = os.environ["MINISGL_URL"]
FILE = sys.argv[2]
DATA = Path(FILE).read_bytes()
BASE64 = base64.b64encode(DATA).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
BEFORE, ASKED = "Look at this picture.", "Look at the screen."
"""The user's message with a picture, and the one that precedes a tool's picture."""
OPENAI = {"base_url": f"{URL}/v1", "api_key": "none"}
CHAT_PARTS = [{"type": "text", "text": BEFORE}, {"type": "image_url", "image_url": {"url": DATA_URL}}]


def _of_langchain(model: object) -> list[int]:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    block = {"type": "image", "base64": BASE64, "mime_type": "image/png"}
    call = AIMessage("", tool_calls=[{"name": "screenshot", "args": {}, "id": "call_1"}])
    conversations = (
        [HumanMessage([{"type": "text", "text": BEFORE}, block])],
        [HumanMessage(CHAT_PARTS)],
        [HumanMessage(ASKED), call, ToolMessage([block], tool_call_id="call_1")],
    )
    return [model.invoke(one).usage_metadata["input_tokens"] for one in conversations]


def langchain() -> list[int]:
    from langchain_openai import ChatOpenAI

    ways = (ChatOpenAI(model="seer", max_tokens=16, use_responses_api=way, **OPENAI) for way in (False, True))
    return [count for model in ways for count in _of_langchain(model)]


def langchain_ollama() -> list[int]:
    from langchain_ollama import ChatOllama

    return _of_langchain(ChatOllama(model="seer", base_url=URL, num_predict=8))


def ollama() -> list[int]:
    from ollama import Client

    client, few = Client(host=URL), {"num_predict": 8}
    shown = [[FILE], [DATA], [BASE64]]
    chats = [client.chat("seer", [{"role": "user", "content": BEFORE, "images": one}], options=few) for one in shown]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "screenshot", "arguments": {}}}]}
    result = {"role": "tool", "tool_name": "screenshot", "content": "", "images": [DATA]}
    chats.append(client.chat("seer", [{"role": "user", "content": ASKED}, call, result], options=few))
    chats.append(client.generate("seer", BEFORE, images=[DATA], options=few))
    return [one.prompt_eval_count for one in chats]


def litellm() -> list[int]:
    from litellm import completion

    call = {"id": "call_1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": CHAT_PARTS}
    tool = {"type": "function", "function": {"name": "screenshot", "parameters": {"type": "object", "properties": {}}}}
    talk = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    counts = []
    for kind, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL), ("ollama_chat", URL)):
        way = {"model": f"{kind}/seer", "api_base": base, "api_key": "none", "max_tokens": 8}
        for messages, more in (([{"role": "user", "content": CHAT_PARTS}], {}), (talk, {"tools": [tool]})):
            counts.append(completion(messages=messages, **way, **more).usage.prompt_tokens)
    return counts


def llama_index() -> list[int]:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.ollama import Ollama

    llm = Ollama(model="seer", base_url=URL, request_timeout=60.0, additional_kwargs={"num_predict": 8})
    blocks = [TextBlock(text=BEFORE), ImageBlock(image=DATA, image_mimetype="image/png")]
    return [llm.chat([ChatMessage(blocks=blocks)]).raw["prompt_eval_count"]]


def openai_agents() -> list[int]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        ToolOutputImage,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    set_tracing_disabled(True)
    taken = []

    class Seen(BaseModel):
        """Schema of the answer. The SDK raises an error if a limit of tokens cuts the answer off."""

        seen: bool

    @function_tool(is_enabled=lambda context, agent: not taken)
    def screenshot() -> ToolOutputImage:
        """Take a picture of the screen."""
        taken.append(True)
        return ToolOutputImage(image_url=DATA_URL)

    chats, responses = (
        kind(model="seer", openai_client=AsyncOpenAI(**OPENAI))
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    )
    parts = [{"type": "input_text", "text": BEFORE}, {"type": "input_image", "image_url": DATA_URL}]
    shown = [{"role": "user", "content": parts}]
    found = [Runner.run_sync(Agent(name="a", model=one, output_type=Seen), shown) for one in (chats, responses)]
    # The SDK shows a tool's picture over responses only: in chats it replaces the picture by a text.
    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="a", model=responses, output_type=Seen, model_settings=forced, tools=[screenshot])
    found.append(Runner.run_sync(agent, ASKED))
    return [one.raw_responses[-1].usage.input_tokens for one in found]


def pydantic_ai() -> list[int]:
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    counts, image = [], BinaryContent(DATA, media_type="image/png")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("seer", provider=OpenAIProvider(**OPENAI))
        agent = Agent(model, model_settings={"max_tokens": 16})
        call = ModelResponse([ToolCallPart("screenshot", {}, "call_1")])
        result = ModelRequest([ToolReturnPart("screenshot", image, "call_1")])
        talk = [ModelRequest([UserPromptPart(ASKED)]), call, result]
        for found in (agent.run_sync([BEFORE, image]), agent.run_sync(message_history=talk)):
            counts.append(found.all_messages()[-1].usage.input_tokens)
    return counts


def smolagents() -> list[int]:
    from PIL import Image
    from smolagents import OpenAIServerModel
    from smolagents.models import ChatMessage, MessageRole

    model = OpenAIServerModel("seer", api_base=f"{URL}/v1", api_key="none", max_tokens=8)
    parts = [{"type": "text", "text": BEFORE}, {"type": "image", "image": Image.open(FILE)}]
    return [model.generate([ChatMessage(role=MessageRole.USER, content=parts)]).token_usage.input_tokens]


def instructor() -> list[int]:
    import instructor as package
    from openai import OpenAI

    client = package.from_openai(OpenAI(**OPENAI))
    messages = [{"role": "user", "content": [BEFORE, package.Image.from_path(FILE)]}]
    return [client.create(model="seer", response_model=None, messages=messages, max_tokens=8).usage.prompt_tokens]


def llm() -> list[int]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model = {"model_id": "seer", "model_name": "seer", "api_base": f"{URL}/v1", "vision": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([model]))
        os.environ["LLM_USER_PATH"] = folder
        import llm as package

        found = package.get_model("seer").prompt(BEFORE, attachments=[package.Attachment(path=FILE)], max_tokens=8)
        return [found.usage().input]


SHOW: dict[str, Callable[[], list[int]]] = {
    one.__name__: one
    for one in (
        *(langchain, langchain_ollama, ollama, litellm, llama_index),
        *(openai_agents, pydantic_ai, smolagents, instructor, llm),
    )
}

if __name__ == "__main__":
    print(json.dumps(SHOW[sys.argv[1]]()))
