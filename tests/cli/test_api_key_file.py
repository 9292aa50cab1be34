"""`--api-key-file`: what it says becomes keys; a mistake is told with file, line, entry and field; no key is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl import cli
from minisgl.cli import api_key_file
from minisgl.config import ApiKey, ConfigError
from tests.helpers.deploy import served

SECRET = "sk-never-shown"
GOOD = f"""
keys:
  - name: team-a
    key: "{SECRET}"
    share: 3
    max_inflight: 16
    max_queued_requests: 100
    tokens_per_minute: 60000
  - {{name: b.2, key: other, own_cache: true, max_priority: 9}}
"""


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """What `minisgl serve` says about this file; the exit code must be 2."""

    def run(text: str, *flags: str) -> str:
        file = tmp_path / "keys.yaml"
        file.write_text(text)
        assert cli.main(["serve", "--engine", "echo", "--api-key-file", str(file), *flags]) == 2
        said = capsys.readouterr().err.replace(f"{tmp_path}/", "").strip()
        assert SECRET not in said
        return said

    return run


def test_a_file_becomes_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(GOOD)
    config = served(monkeypatch, ["serve", "--engine", "echo", "--api-key-file", str(tmp_path / "keys.yaml")])
    first, second = config.api_keys
    assert first == ApiKey(
        name="team-a", key=SECRET, share=3, max_inflight=16, max_queued_requests=100, tokens_per_minute=60000
    )
    assert second == ApiKey(name="b.2", key="other", own_cache=True, max_priority=9)
    assert config.engine.own_cache_keys == ((2, api_key_file.digest(second)),)
    assert SECRET not in repr(config)


def test_another_name_or_secret_has_another_digest() -> None:
    """And the same key the same one, whatever else is said of it."""
    one = ApiKey(name="a", key="x", own_cache=True)
    others = [ApiKey(name="b", key="x"), ApiKey(name="a", key="y"), ApiKey(name="ax", key=" ")]
    assert len({api_key_file.digest(each) for each in (one, *others)}) == 4
    assert api_key_file.digest(ApiKey(name="a", key="x", share=5)) == api_key_file.digest(one)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "keys.yaml:1: must be one list, `keys:`"),
        ("a: 1", "keys.yaml:1: must be one list, `keys:`"),
        ("keys: []", "keys.yaml:1: keys: must have 1 to 256 entries, not 0"),
        ("keys:\n- 5", "keys.yaml:2: keys.0: must be fields"),
        (f"keys:\n- key: {SECRET}", "keys.yaml:2: keys.0: name: missing"),
        ("keys:\n- name: a", "keys.yaml:2: keys.0 (a): key: missing"),
        (f"keys:\n- name: a b\n  key: {SECRET}", "keys.yaml:2: keys.0: name: 'a b': must be text of 1 to 64 letters"),
        ("keys:\n- name: default\n  key: x", "keys.yaml:2: keys.0: name: default: that is how the key of --api-key is"),
        (f"keys:\n- name: a\n  key: [{SECRET}]", "keys.yaml:3: keys.0 (a): key: must be text of 1 to 512 printable"),
        (f"keys:\n- name: a\n  key: {SECRET} x", "keys.yaml:3: keys.0 (a): key: must be text of 1 to 512 printable"),
        ("keys:\n- name: a\n  key: 7", "keys.yaml:3: keys.0 (a): key: must be text"),
        (f"keys:\n- name: a\n  key: *{SECRET}", "keys.yaml:3: not valid YAML (put what has special characters"),
        (f"keys:\n- name: a\n  key: !{SECRET} x", "keys.yaml:3: not valid YAML (put what has special characters"),
        ("keys:\n- name: a\n  key: x\n  share: 0", "keys.yaml:4: keys.0 (a): share: 0: must be a whole number from 1"),
        ("keys:\n- {name: a, key: x, share: 1.5}", "keys.0 (a): share: 1.5: must be a whole number from 1 to 1000"),
        ("keys:\n- {name: a, key: x, max_inflight: true}", "max_inflight: True: must be a whole number from 0"),
        ("keys:\n- {name: a, key: x, tokens_per_minute: -1}", "tokens_per_minute: -1: must be a whole number from 0"),
        ("keys:\n- {name: a, key: x, own_cache: 1}", "keys.0 (a): own_cache: 1: must be true or false"),
        ("keys:\n- {name: a, key: x, limit: 5}", "keys.0 (a): limit: unknown field: there are name, key, share"),
        ("keys:\n- {name: a, key: x, share: 1, share: 2}", "keys.0 (a): share: given twice"),
        (
            f"keys:\n- {{name: a, key: {SECRET}}}\n- {{name: a, key: y}}",
            "keys.yaml:3: keys.1 (a): name: a is that of a",
        ),
        (
            f"keys:\n- {{name: a, key: {SECRET}}}\n- {{name: b, key: {SECRET}}}",
            "keys.yaml:3: keys.1 (b): key: is that of a already: give each its own",
        ),
    ],
)
def test_invalid_key_files_are_rejected(refused: Callable[..., str], text: str, said: str) -> None:
    assert said in refused(text)


def test_the_key_of_the_flag_is_not_in_the_file(refused: Callable[..., str]) -> None:
    said = refused(f"keys:\n- {{name: a, key: {SECRET}}}", "--api-key", SECRET)
    assert "--api-key-file: the key of a equals that of --api-key" in said


@given(st.text(alphabet=st.sampled_from("keysnam:- \n\"'{}[]&*!?|>%@0a"), max_size=40))
def test_random_files_give_keys_or_an_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("any") / "keys.yaml"
    file.write_text("keys:\n- {name: a, key: x}\n" + text)
    try:
        assert api_key_file.read(str(file))
    except ConfigError as error:
        assert str(error).startswith(f"{file}")
