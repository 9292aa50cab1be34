"""Receipts: the same bytes for the same answer, and no change that is not found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from minisgl import receipt
from minisgl.config import ConfigError, EngineConfig
from minisgl.receipt import LogprobDigest, Model, Numerics, Receipt, Tokens
from minisgl.sampling_params import SamplingParams

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
MODEL = Model(weights="a" * 64, adapter=None, tokenizer="b" * 64, template="c" * 64)
NUMERICS = Numerics("cpu", "exact", "f16", None, "exact", 1)


def made(key: Ed25519PrivateKey | None = KEY, **sampling: Any) -> Receipt:
    params = SamplingParams(**{"max_tokens": 9, "seed": 4, "temperature": 0.7, "stop": ("x",), **sampling})
    return receipt.make(MODEL, NUMERICS, params, [1, 2, 3], [4, 5], "stop", "d" * 64, key)


def test_it_says_the_same_whoever_numbers_choices_and_adapters() -> None:
    assert made() == made(logprobs=3, adapter=2)
    assert made().sha256 == made(None).sha256 and made(None).signature is None
    assert receipt.parse(msgspec.json.encode(made(logit_bias={5: 1.5}))).sampling.logit_bias == {5: 1.5}
    assert made(temperature=1).digest() == made(temperature=1.0).digest() != made(temperature=0.5).digest()
    data = msgspec.json.encode(made())
    assert msgspec.json.encode(receipt.parse(data)) == data
    assert Tokens.of([1, 2]) != Tokens.of([1, 3]) and Tokens.of([]).count == 0


def test_log_probabilities_are_compared_by_their_bits() -> None:
    one, other, again = LogprobDigest(), LogprobDigest(), LogprobDigest()
    one.add([-0.1, -2.5])
    again.add([-0.1])
    again.add([-2.5])
    other.add([-0.1, -2.5000002])
    assert one.shown() == again.shown() != other.shown()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [one for name, inner in items for one in leaves(inner, (*path, name))]
    return found or [path]


def otherwise(draw: random.Random, value: Any) -> Any:
    if isinstance(value, str):
        at = draw.randrange(len(value))
        return value[:at] + ("0" if value[at] != "0" else "1") + value[at + 1 :]
    if isinstance(value, (int, float)):
        return value + draw.choice((1, -1, 100))
    return "e" * 64


def test_every_change_of_a_signed_receipt_is_found() -> None:
    """2,000 of one field, also with the digest made anew, by who has no key or signs with another."""
    draw, whole = random.Random(3), msgspec.to_builtins(made())
    places = [path for path in leaves(whole) if path != ("minisgl",)]
    for _ in range(2000):
        found = json.loads(json.dumps(whole))
        *names, last = draw.choice(places)
        at = found
        for name in names:
            at = at[name]
        at[last] = otherwise(draw, at[last])
        if draw.randrange(2) and last != "sha256":
            try:
                found["sha256"] = msgspec.convert(found, Receipt).digest().hex()
            except msgspec.ValidationError:
                continue
        with pytest.raises(ConfigError, match="receipt: "):
            receipt.parse(json.dumps(found).encode())


def test_base64_has_one_form_of_a_signature() -> None:
    found = made()
    assert found.signature is not None and found.signature.endswith("==")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = alphabet[alphabet.index(found.signature[-3]) ^ 1]  # the same bytes, to whoever is not strict
    with pytest.raises(ConfigError, match="signature"):
        receipt.parse(msgspec.json.encode(msgspec.structs.replace(found, signature=f"{found.signature[:-3]}{other}==")))


def test_who_signs_with_another_key_is_another_signer() -> None:
    other = receipt.parse(msgspec.json.encode(made(Ed25519PrivateKey.generate())))
    assert other.sha256 == made().sha256 and other.signer != made().signer


def test_what_is_the_default_is_not_said() -> None:
    """An object of its own would be: whoever asks for it gets the receipt of who does not."""
    default = float("1")
    assert msgspec.json.encode(made(top_p=default, frequency_penalty=0.0 * default)) == msgspec.json.encode(made())


@pytest.mark.parametrize("place", [(), ("model",), ("numerics",), ("sampling",), ("prompt",), ("answer",)])
def test_a_field_that_nobody_signed_is_refused(place: tuple[str, ...]) -> None:
    found = json.loads(msgspec.json.encode(made()))
    at = found
    for name in place:
        at = at[name]
    at["note"] = "computed by another model"
    with pytest.raises(ConfigError, match=rf"^receipt: {'.'.join([*place, 'note'])}: is no field"):
        receipt.parse(json.dumps(found).encode())


def test_a_field_is_there_once_and_the_form_has_a_number() -> None:
    whole = msgspec.json.encode(made())
    with pytest.raises(ConfigError, match="finish_reason is given twice"):
        receipt.parse(b'{"finish_reason": "stop",' + whole[1:])
    found = json.loads(whole)
    del found["receipt"]
    with pytest.raises(ConfigError, match="receipt, the version of the format, is missing"):
        receipt.parse(json.dumps(found).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"receipt": 2}', b'{"receipt": 1, "minisgl": 5}', b"[" * 10**5]
)
def test_what_is_no_receipt(data: bytes) -> None:
    with pytest.raises(ConfigError, match="receipt: "):
        receipt.parse(data)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=-1), SamplingParams(n=2), SamplingParams(adapter=1)])
def test_sampling_that_cannot_be(sampling: SamplingParams) -> None:
    bad = msgspec.structs.replace(made(None), sampling=sampling)
    with pytest.raises(ConfigError, match="receipt: sampling: "):
        receipt.parse(msgspec.json.encode(msgspec.structs.replace(bad, sha256=bad.digest().hex())))


def test_an_engine_that_is_not_exact_gives_none() -> None:
    with pytest.raises(ConfigError, match="--engine cpu"):
        receipt.numerics(EngineConfig(), "torch", "")
    classes = [receipt.numerics(EngineConfig(), "cpu", f"{isa}, 2 threads").instructions for isa in ("avx2", "amx")]
    assert classes == ["exact", "amx"]


def test_a_folder_is_what_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    first = receipt.folder_digest(str(folder))
    assert receipt.folder_digest(str(folder)) == first
    (folder / "adapter_model.safetensors").write_bytes(b"weightz")
    assert receipt.folder_digest(str(folder)) != first
    with pytest.raises(ConfigError, match="nowhere"):
        receipt.folder_digest(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "nothing in PEM"])
def test_a_key_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match="--receipt-key"):
        receipt.read_key(str(tmp_path / "key"))
