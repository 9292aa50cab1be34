"""pydantic-ai: agents over both of OpenAI's APIs, with tools, typed answers, streams, usage, errors."""

from checks import CALL, CITY, MODEL, PARIS, URL, City, called, check, raises, tell
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput, capture_run_messages
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS = (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider))


@check
def texts():
    for model in MODELS:
        found = Agent(model, instructions="Be brief.").run_sync("say:Hello")
        usage = found.usage() if callable(found.usage) else found.usage
        assert found.output == "Hello" and usage.output_tokens == 6, model


@check
async def streams():
    for model in MODELS:
        async with Agent(model).run_stream("say:Hello") as stream:
            assert [text async for text in stream.stream_text(delta=True)]
            assert await stream.get_output() == "Hello"


@check
def typed_answers():
    for model in MODELS:
        by_tool = Agent(model, output_type=ToolOutput(City, name="city"))
        assert by_tool.run_sync(f"say:{called('city', PARIS.model_dump())}").output == PARIS, model
        for way in (NativeOutput(City), PromptedOutput(City)):
            assert Agent(model, output_type=way).run_sync(f"say:{CITY}").output == PARIS, (model, way)


@check
async def streamed_typed_answers():
    for model in MODELS:
        async with Agent(model, output_type=NativeOutput(City)).run_stream(f"say:{CITY}") as stream:
            assert await stream.get_output() == PARIS
        by_tool = Agent(model, output_type=ToolOutput(City, name="city"))
        async with by_tool.run_stream(f"say:{called('city', PARIS.model_dump())}") as stream:
            assert await stream.get_output() == PARIS


@check
def tools():
    for model in MODELS:
        agent, rated = Agent(model), []

        @agent.tool_plain
        def rate(rank: int) -> str:
            """Rate."""
            rated.append(rank)  # noqa: B023
            return "say:done"

        assert agent.run_sync(f"say:{CALL}").output == "done" and rated == [7], model


@check
def a_talk_goes_on():
    for model in MODELS:
        first = Agent(model).run_sync("say:Hello")
        second = Agent(model).run_sync("say:again", message_history=first.new_messages())
        assert second.output == "again" and len(second.all_messages()) == 4


@check
def thoughts():
    for model in MODELS:
        with capture_run_messages() as messages:
            assert Agent(model).run_sync("say:<think>Hm.</think>Yes").output == "Yes"
        kinds = [part.part_kind for part in messages[-1].parts]
        assert kinds == ["thinking", "text"], (model, kinds)


@check
def settings():
    for model in MODELS:
        more = {"temperature": 0.5, "max_tokens": 100, "top_p": 0.5}
        assert Agent(model).run_sync("say:Hello", model_settings=more).output == "Hello"


@check
def errors():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        error = raises(ModelHTTPError, lambda: Agent(kind("other", provider=provider)).run_sync("say:x"))  # noqa: B023
        assert error.status_code == 404


tell()
