"""LlamaIndex's agent over its class for Ollama, with one tool, a shell in the folder that it was started for: prints
its last words."""

import asyncio
import os
import subprocess
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.ollama import Ollama

folder, task = sys.argv[1:]


def run(command: str) -> str:
    """Run a command in the folder."""
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


async def work() -> None:
    llm = Ollama(model="scripted", base_url=os.environ["MINISGL_URL"], request_timeout=60.0)
    print(await FunctionAgent(tools=[run], llm=llm).run(task))


asyncio.run(work())
