"""`--adaptive-max-tokens` and `--context-margin`: what they mean, and what is said about values that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl import cli
from minisgl.cli.flags import adaptive_max_tokens
from minisgl.config import AdaptiveMaxTokens, ApiKey, EngineConfig, ServerConfig
from minisgl.supervisor import start as supervisor
from tests.helpers.deploy import served

Serve = Callable[..., ServerConfig]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """The configuration that a server with these flags would get."""
    return lambda *flags: served(monkeypatch, ["serve", "--engine", "echo", *flags])


def test_they_are_off_and_can_be_set(serve: Serve, tmp_path: Path) -> None:
    plain = serve().limits
    assert (plain.adaptive_max_tokens, plain.context_margin) == (None, 0)
    found = serve("--adaptive-max-tokens", "64:0.5", "--context-margin", "128").limits
    assert (found.adaptive_max_tokens, found.context_margin) == (AdaptiveMaxTokens(64, 500_000), 128)
    (tmp_path / "server.yaml").write_text('adaptive-max-tokens: "0:.25"\n')
    found = serve("--config", str(tmp_path / "server.yaml")).limits
    assert found.adaptive_max_tokens == AdaptiveMaxTokens(0, 250_000)


@given(st.integers(0, 999_999_999), st.integers(1, 1_000_000))
def test_a_factor_is_exact(threshold: int, millionths: int) -> None:
    text = f"{threshold}:{Decimal(millionths) / 1_000_000:f}"
    assert adaptive_max_tokens(text) == AdaptiveMaxTokens(threshold, millionths)


@pytest.mark.parametrize(
    "value",
    ["", "64", ":0.5", "64:", "64:0", "64:1.1", "64:0.0000001", "-1:0.5", "a:0.5", "64:0,5", "64:nan", "64:.", "²:1"],
)
def test_other_values_are_refused(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert cli.main(["serve", "--engine", "echo", f"--adaptive-max-tokens={value}"]) == 2
    said = capsys.readouterr().err
    assert "--adaptive-max-tokens" in said and "must be THRESHOLD:FACTOR" in said


def test_a_value_without_quotes_in_a_file_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("adaptive-max-tokens: 64:0.5\n")  # to YAML a number to the base 60
    assert cli.main(["serve", "--config", str(tmp_path / "server.yaml")]) == 2
    assert 'in a file in quotes: "64:0.5"' in capsys.readouterr().err


def test_a_key_for_a_chat_with_the_server() -> None:
    """Of the flag, else of the file."""
    engine, keys = EngineConfig(), (ApiKey(name="a", key="x"),)
    assert ServerConfig(engine=engine).any_key is None
    assert ServerConfig(engine=engine, api_keys=keys).any_key == "x"
    assert ServerConfig(engine=engine, api_keys=keys, api_key="y").any_key == "y"


HUGE = "99999999999999999999999"
NUMBERS = {
    "--dp": (HUGE, "2000"),
    "--max-inflight": (HUGE,),
    "--max-inflight-per-engine": (HUGE,),
    "--max-queued-requests": (HUGE,),
    "--max-queued-tokens": (HUGE,),
    "--max-encoding-bytes": (HUGE,),
    "--max-body-bytes": (HUGE,),
    "--max-loras": (HUGE,),
    "--state-quota": (HUGE,),
    "--context-margin": (HUGE,),
    "--keep-alive-timeout": (HUGE, "18446744073709551615"),
    "--load-timeout": (HUGE, "-1", "0", "nan", "inf"),
    "--request-timeout": (HUGE, "nan", "inf"),
    "--slow-client-timeout": (HUGE,),
    "--step-timeout": (HUGE,),
    "--drain-timeout": (HUGE,),
}


@pytest.mark.parametrize(("flag", "number"), [(flag, one) for flag, numbers in NUMBERS.items() for one in numbers])
def test_numbers_that_no_process_can_work_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, number: str
) -> None:
    """The gateway and the pool have 64 bits, and clocks that end."""
    monkeypatch.setattr(supervisor, "run_server", lambda *_: 0)
    assert cli.main(["serve", "--engine", "echo", f"{flag}={number}"]) == 2
    assert f"minisgl serve: {flag} " in (said := capsys.readouterr().err) and ": must be " in said
