"""goose's own provider, as its development kit has it, and a loop around it, with one tool, a shell in the folder that
it was started for: prints its last words."""

import asyncio
import json
import os
import subprocess
import sys

from goose import (
    MessageContent,
    MessageRole,
    ProviderMessage,
    ProviderModelConfig,
    ProviderTool,
    StreamChunk,
    openai_provider,
)

folder, task = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = ProviderTool(name="run", description="Run a command.", input_schema_json=json.dumps(PARAMETERS))


def run(command: str) -> str:
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


async def work() -> str:
    provider = openai_provider(api_key="none", base_url=os.environ["MINISGL_URL"])
    model = ProviderModelConfig(model_name="scripted", context_limit=32_768, max_tokens=256)
    said = [ProviderMessage(role=MessageRole.USER, content=[MessageContent.TEXT(task)])]
    while True:
        stream = await provider.stream(model, "You work in a folder.", said, [TOOL])
        text, calls = "", []
        while (chunk := await stream.next_chunk()) is not None:
            if isinstance(chunk, StreamChunk.ERROR_CHUNK):
                raise RuntimeError(str(chunk.error))
            if isinstance(chunk, StreamChunk.TEXT_CHUNK):
                text += chunk.text
            if isinstance(chunk, StreamChunk.TOOL_CHUNK):
                calls.append(MessageContent.TOOL_REQUEST(chunk.id, chunk.name, chunk.arguments_json))
        if not calls:
            return text
        said.append(ProviderMessage(role=MessageRole.ASSISTANT, content=calls))
        results = []
        for call in calls:
            content = [{"type": "text", "text": run(json.loads(call.arguments_json)["command"])}]
            results.append(MessageContent.TOOL_RESULT(call.id, True, json.dumps(content)))
        said.append(ProviderMessage(role=MessageRole.USER, content=results))


print(asyncio.run(work()), flush=True)
# The kit's threads live on and call into Python: one that does while the interpreter ends aborts the process.
os._exit(0)
