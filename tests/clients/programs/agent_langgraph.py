"""LangGraph's graph of a model and its tools, streamed, with one tool, a shell in the folder that it was started for:
prints its last words."""

import os
import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

folder, task = sys.argv[1:]


@tool
def run(command: str) -> str:
    """Run a command in the folder."""
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


model = ChatOpenAI(model="scripted", base_url=os.environ["MINISGL_URL"] + "/v1", api_key="none").bind_tools([run])


def ask(state: MessagesState) -> MessagesState:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([run]))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")
said = [""]
for piece, _ in graph.compile().stream({"messages": [("user", task)]}, stream_mode="messages"):
    said.append("\n" if piece.type == "tool" else str(piece.text))
print("".join(said).rpartition("\n")[2])
