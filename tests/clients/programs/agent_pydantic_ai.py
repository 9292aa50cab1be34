"""pydantic-ai's agent with one tool, a shell in the folder that it was started for: prints its last words."""

import os
import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

folder, task = sys.argv[1:]
provider = OpenAIProvider(base_url=os.environ["MINISGL_URL"] + "/v1", api_key="none")
agent = Agent(OpenAIChatModel("scripted", provider=provider), instructions="You work in a folder.")


@agent.tool_plain
def run(command: str) -> str:
    """Run a command in the folder."""
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


print(agent.run_sync(task).output)
