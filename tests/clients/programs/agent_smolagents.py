"""smolagents' agent that calls tools, with a shell in the folder that it was started for: prints its answer, which is a
call of a tool of its own, too."""

import os
import subprocess
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

folder, task = sys.argv[1:]


@tool
def run(command: str) -> str:
    """Run a command in the folder.

    Args:
        command: What the shell gets.
    """
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


model = OpenAIServerModel("scripted", api_base=os.environ["MINISGL_URL"] + "/v1", api_key="none")
print(ToolCallingAgent(tools=[run], model=model, max_steps=6).run(task))
