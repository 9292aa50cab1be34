"""OpenAI's Agents SDK with one tool, a shell in the folder that it was started for: prints its last words."""

import os
import subprocess
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
folder, task = sys.argv[1:]


@function_tool
def run(command: str) -> str:
    """Run a command in the folder."""
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


client = AsyncOpenAI(base_url=os.environ["MINISGL_URL"] + "/v1", api_key="none")
model = OpenAIResponsesModel(model="scripted", openai_client=client)
agent = Agent(name="worker", instructions="You work in a folder.", model=model, tools=[run])
print(Runner.run_sync(agent, task).final_output)
