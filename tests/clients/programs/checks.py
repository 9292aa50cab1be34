"""Checks of a client, one for each call of its documentation: `check` takes a function, `tell` runs all of them and
prints what failed. The model is scripted: what it says stands in the prompt after `say:`."""

import asyncio
import inspect
import json
import os
import traceback

from pydantic import BaseModel

URL = os.environ["MINISGL_URL"]
MODEL = "scripted"
CITY = '{"name": "Paris", "rank": 1}'
CALL = '<tool_call>{"name": "rate", "arguments": {"rank": 7}}</tool_call>'
_CHECKS = {}


class City(BaseModel):
    """A city."""

    name: str
    rank: int


PARIS = City(name="Paris", rank=1)


def check(function):
    _CHECKS[function.__name__] = function
    return function


def tell():
    found = {}
    with asyncio.Runner() as runner:
        for name, function in _CHECKS.items():
            try:
                result = function()
                if inspect.iscoroutine(result):
                    runner.run(result)
                found[name] = None
            except Exception:
                found[name] = traceback.format_exc()[-2000:]
    print(json.dumps(found))


def said(text="Hello"):
    return [{"role": "user", "content": f"say:{text}"}]


def called(name, arguments):
    """What a model says that calls."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
