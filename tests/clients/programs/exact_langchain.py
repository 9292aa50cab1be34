"""LangChain's chat model, completion model and embeddings of OpenAI, over both of its APIs."""

from checks import CALL, CITY, MODEL, PARIS, URL, City, called, check, raises, tell
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError, NotFoundError

WHERE = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
MODELS = (ChatOpenAI(model=MODEL, **WHERE), ChatOpenAI(model=MODEL, use_responses_api=True, **WHERE))


@tool
def rate(rank: int) -> str:
    """Rate."""
    return f"say:{rank}"


@check
def texts():
    for model in MODELS:
        found = model.invoke("say:Hello")
        assert found.text == "Hello" and found.usage_metadata["output_tokens"] == 6
    assert MODELS[0].invoke("say:Hello").response_metadata["finish_reason"] == "stop"


@check
def talks():
    talk = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("say:yes")]
    assert [model.invoke(talk).text for model in MODELS] == ["yes"] * 2


@check
def streams():
    for model in MODELS:
        assert "".join(part.text for part in model.stream("say:Hello")) == "Hello"


@check
async def asynchronous():
    for model in MODELS:
        assert (await model.ainvoke("say:Hello")).text == "Hello"
        assert "".join([part.text async for part in model.astream("say:Hello")]) == "Hello"


@check
def batches():
    assert [one.text for one in MODELS[0].batch(["say:a", "say:b", "say:c"])] == ["a", "b", "c"]


@check
def chains():
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "say:{word}")])
    assert (prompt | MODELS[0] | StrOutputParser()).invoke({"word": "Hello"}) == "Hello"


@check
def bound_tools():
    for model in MODELS:
        for choice in ("auto", "any", "rate", None):
            [call] = model.bind_tools([rate], tool_choice=choice).invoke(f"say:{CALL}").tool_calls
            assert (call["name"], call["args"]) == ("rate", {"rank": 7}), (model, choice)


@check
def streamed_calls():
    for model in MODELS:
        whole = None
        for part in model.bind_tools([rate]).stream(f"say:{CALL}"):
            whole = part if whole is None else whole + part
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("rate", {"rank": 7})]


@check
def results_of_calls():
    for model in MODELS:
        bound, ask = model.bind_tools([rate]), HumanMessage(f"say:{CALL}")
        first = bound.invoke([ask])
        [call] = first.tool_calls
        result = rate.invoke(call)
        assert isinstance(result, ToolMessage) and bound.invoke([ask, first, result]).text == "7"


@check
def forms():
    for model in MODELS:
        assert model.with_structured_output(City, method="json_schema").invoke(f"say:{CITY}") == PARIS
        text = called("City", PARIS.model_dump())
        assert model.with_structured_output(City, method="function_calling").invoke(f"say:{text}") == PARIS
    assert MODELS[0].with_structured_output(City, method="json_mode").invoke(f"say:{CITY}") == PARIS


@check
def forms_with_what_was_said():
    found = MODELS[0].with_structured_output(City, include_raw=True).invoke(f"say:{CITY}")
    assert found["parsed"] == PARIS and found["raw"].content == CITY and found["parsing_error"] is None


@check
def log_probabilities_and_sampling():
    more = {"temperature": 0.5, "seed": 1, "stop": ["l"], "n": 1, "max_tokens": 50}
    assert MODELS[0].bind(**more).invoke("say:Hello").text == "He"


@check
def completions():
    model = OpenAI(model=MODEL, **WHERE)
    assert model.invoke("say:Hello") == "Hello" == "".join(model.stream("say:Hello"))


@check
def embeddings():
    model = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **WHERE)
    assert len(model.embed_query("abcd")) == 4 and len(model.embed_documents(["abcd", "bcde"])) == 2


@check
def errors():
    raises(NotFoundError, lambda: ChatOpenAI(model="other", **WHERE).invoke("say:x"))
    raises(BadRequestError, lambda: MODELS[0].bind(temperature=9).invoke("say:x"))


tell()
