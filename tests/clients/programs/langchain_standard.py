"""LangChain's standard integration tests of a chat model; `MINISGL_URL` says where the server is."""

import os

import openai
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["MINISGL_URL"] + "/v1"
[MODEL] = openai.OpenAI(base_url=URL, api_key="none").models.list()


class TestMinisgl(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {"model": MODEL.id, "base_url": URL, "api_key": "none", "stream_usage": True, "max_tokens": 300}

    @property
    def supports_json_mode(self) -> bool:
        return True
