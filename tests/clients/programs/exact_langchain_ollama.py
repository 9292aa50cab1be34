"""LangChain's chat model, completion model and embeddings of Ollama."""

from checks import CITY, MODEL, PARIS, URL, City, called, check, raises, tell
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from ollama import ResponseError

model = ChatOllama(model=MODEL, base_url=URL)


@tool
def rate(rank: int) -> str:
    """Rate."""
    return f"say:{rank}"


@check
def texts():
    found = model.invoke([SystemMessage("Be brief."), HumanMessage("say:Hello")])
    assert found.text == "Hello" and found.usage_metadata["output_tokens"] == 6
    assert found.response_metadata["done_reason"] == "stop"


@check
async def streams():
    assert "".join(part.text for part in model.stream("say:Hello")) == "Hello"
    assert "".join([part.text async for part in model.astream("say:Hello")]) == "Hello"


@check
def options():
    limited = ChatOllama(model=MODEL, base_url=URL, num_predict=2, temperature=0, seed=1, num_ctx=2048)
    assert limited.invoke("say:Hello").text == "He"
    assert ChatOllama(model=MODEL, base_url=URL, stop=["l"]).invoke("say:Hello").text == "He"


@check
def tools():
    asked = HumanMessage(f"say:{called('rate', {'rank': 7})}")
    message = model.bind_tools([rate]).invoke([asked])
    [call] = message.tool_calls
    assert (call["name"], call["args"]) == ("rate", {"rank": 7})
    again = model.bind_tools([rate]).invoke([asked, message, ToolMessage("say:7", tool_call_id=call["id"])])
    assert again.text == "7"


@check
def typed_answers():
    assert model.with_structured_output(City).invoke(f"say:{CITY}") == PARIS
    by_call = model.with_structured_output(City, method="function_calling")
    assert by_call.invoke(f"say:{called('City', PARIS.model_dump())}") == PARIS
    assert model.with_structured_output(City, method="json_mode").invoke(f"say:{CITY}") == PARIS


@check
def reasoning():
    found = ChatOllama(model=MODEL, base_url=URL, reasoning=True).invoke("say:<think>Hm.</think>Yes.")
    assert found.text == "Yes." and found.additional_kwargs["reasoning_content"] == "Hm."


@check
def completions():
    assert OllamaLLM(model=MODEL, base_url=URL).invoke("say:Hello") == "Hello"


@check
def vectors():
    embeddings = OllamaEmbeddings(model=MODEL, base_url=URL)
    found = embeddings.embed_documents(["ab", "c"])
    assert len(found) == 2 and embeddings.embed_query("ab") == found[0]


@check
def models():
    assert ChatOllama(model=MODEL, base_url=URL, validate_model_on_init=True).invoke("say:Hello").text == "Hello"


@check
def errors():
    other = ChatOllama(model="other", base_url=URL)
    assert "does not exist here" in str(raises(ResponseError, lambda: other.invoke("say:x")))


tell()
