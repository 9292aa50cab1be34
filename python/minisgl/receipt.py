"""Receipts: all that an answer's tokens depend on, and digests of them, so that anybody who has the model can compute
the answer once more, alone, and compare (`minisgl verify`).

Invariants: a receipt has no text and no tokens, only how many there are and their SHA-256; two receipts of the same
request to the same model are the same bytes but for `minisgl` and `signature`, whatever else the engine computed beside
it. That holds for engines whose numbers depend on nothing else: the CPU engine, and the echo engine, which has no
probabilities.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import msgspec
import numpy as np

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.extension import _rust
from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.utils.installed import need, own_version
from minisgl.weights.sources import find_model
from minisgl.weights.stored import weight_files

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ENGINES = ("cpu", "echo")
_PLAIN = SamplingParams()


class Tokens(msgspec.Struct, frozen=True):
    """So many ids; `sha256` of them as little-endian int32."""

    count: int
    sha256: str

    @classmethod
    def of(cls, ids: Iterable[int]) -> Tokens:
        array = np.fromiter(ids, np.dtype("<i4"))
        return cls(len(array), hashlib.sha256(array.tobytes()).hexdigest())


class Model(msgspec.Struct, frozen=True):
    """Digests: of the files of weights and of the adapter (None: none), of tokenizer.json, of the chat template."""

    weights: str
    adapter: str | None
    tokenizer: str
    template: str


class Numerics(msgspec.Struct, frozen=True):
    """How it was computed. `instructions`: the class of instruction sets whose bits are equal; AMX's tiles add up in
    an order of their own. `number`: of the rules of the engine's arithmetic."""

    engine: str
    activations: str
    kv_dtype: str
    quantization: str | None
    instructions: Literal["exact", "amx"]
    number: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling`: of the one answer, the seed included; an adapter has a digest, no number. `logprobs`: the SHA-256 of
    the natural logarithms of the sampled tokens' probabilities, as little-endian float32; None where none were
    computed. `sha256`: of all of these but `minisgl`. `signature`: Ed25519 over that digest, in base64, by the key
    `signer`."""

    receipt: Literal[1] = 1
    minisgl: str
    model: Model
    numerics: Numerics
    sampling: SamplingParams
    prompt: Tokens
    answer: Tokens
    finish_reason: str
    logprobs: str | None
    sha256: str = ""
    signer: str | None = None
    signature: str | None = None

    def digest(self) -> bytes:
        """The digest of what is claimed, whether its numbers were read from JSON or not: 1 and 1.0 are the same
        there."""
        bare = msgspec.structs.replace(self, minisgl="", sha256="", signer=None, signature=None)
        plain = msgspec.to_builtins(msgspec.json.decode(msgspec.json.encode(bare), type=Receipt), str_keys=True)
        return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).digest()


def make(
    model: Model,
    numerics: Numerics,
    sampling: SamplingParams,
    prompt: Iterable[int],
    answer: Iterable[int],
    finish_reason: str,
    logprobs: str | None,
    key: Ed25519PrivateKey | None = None,
) -> Receipt:
    """`sampling` as the engine had it: one answer, with its seed and its limit."""
    found = Receipt(
        minisgl=own_version(),
        model=model,
        numerics=numerics,
        sampling=_of_one_answer(sampling),
        prompt=Tokens.of(prompt),
        answer=Tokens.of(answer),
        finish_reason=finish_reason,
        logprobs=logprobs,
    )
    digest = found.digest()
    found = msgspec.structs.replace(found, sha256=digest.hex())
    if key is None:
        return found
    signer = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    signature = base64.b64encode(key.sign(digest)).decode()
    return msgspec.structs.replace(found, signer=signer, signature=signature)


def _of_one_answer(sampling: SamplingParams) -> SamplingParams:
    """Without what changes no token, a server numbers for itself, or is the default: whether that was asked for
    changes no token either."""
    bare = msgspec.structs.replace(sampling, n=1, adapter=0, logprobs=None, prompt_logprobs=None, embedding=None)
    fields = msgspec.structs.asdict(bare)
    return SamplingParams(**{name: value for name, value in fields.items() if value != getattr(_PLAIN, name)})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises `ValueError` for a name that is given twice: readers differ in which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the field {twice} is given twice")
    return found


def _check_known(given: dict[str, Any], kind: type[msgspec.Struct], place: str) -> None:
    """Raises `ConfigError` for a field that `kind` does not have, or a structure in it."""
    kinds = get_type_hints(kind)
    for name, value in given.items():
        if name not in kind.__struct_encode_fields__:
            raise ConfigError(f"receipt: {place}{name}: is no field of a receipt, so that nothing vouches for it")
        inner = kinds.get(name)
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _check_known(value, inner, f"{place}{name}.")


def parse(data: bytes) -> Receipt:
    """Raises `ConfigError` for what is no receipt, has a field that nobody signed, or was changed: then its own digest
    or signature says so."""
    try:
        found = msgspec.json.decode(data, type=Receipt)
        given = json.loads(data, object_pairs_hook=_once)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"receipt: {error}") from error
    if "receipt" not in given:
        raise ConfigError("receipt: the field receipt, which numbers the form, is missing")
    _check_known(given, Receipt, "")
    digest = found.digest()
    if found.sha256 != digest.hex():
        raise ConfigError(f"receipt: sha256: is not that of the fields, {digest.hex()}: they were changed")
    if (found.signature is None) != (found.signer is None):
        raise ConfigError("receipt: signature and signer: one is missing")
    if (
        found.signature is not None
        and found.signer is not None
        and not _is_signed(digest, found.signer, found.signature)
    ):
        raise ConfigError("receipt: signature: is not one of the signer over these fields")
    try:
        if found.sampling.check() != _of_one_answer(found.sampling):
            raise ConfigError("receipt: sampling: is not of one answer")
    except ParamError as error:
        raise ConfigError(f"receipt: sampling: {error}") from error
    return found


def _is_signed(digest: bytes, signer: str, signature: str) -> bool:
    need("a signed receipt", "cryptography")
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(_bytes_of(signer)).verify(_bytes_of(signature), digest)
    except (InvalidSignature, ValueError):
        return False
    return True


def _bytes_of(text: str) -> bytes:
    """The bytes of the one form that base64 has for them: bits that no byte needs are 0. Raises `ValueError`."""
    found = base64.b64decode(text, validate=True)
    if base64.b64encode(found).decode() != text:
        raise ValueError("not the usual form")
    return found


def _public_key(raw: bytes) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(raw)


def read_key(path: str) -> Ed25519PrivateKey:
    """A private key in PEM, as openssl's `genpkey` writes it. Raises `ConfigError`."""
    need(f"--receipt-key {path}", "cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(Path(path).expanduser().read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--receipt-key {path}: {error}") from error
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(f"--receipt-key {path}: is no key of Ed25519")
    return found


class LogprobDigest:
    """A digest of log probabilities as they come."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, logprobs: Sequence[float]) -> None:
        self._digest.update(np.array(logprobs, "<f4").tobytes())

    def shown(self) -> str:
        return self._digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- the model


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def weights_digest(config: EngineConfig) -> str:
    """The digest of the model's own files, whatever is made of them. It reads them once; what it found is remembered as
    long as they are what they were. Raises `ConfigError`."""
    if config.engine == "echo" or config.load_format == "dummy":
        return text_digest(f"{config.engine} {'' if config.engine == 'echo' else config.model} {config.seed}")
    found = find_model(config.model, _say_nothing, source=config.model_source, revision=config.revision)
    try:
        return _remembered(_rust.gguf_parts(found) if found.is_file() else weight_files(found))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config.model}: {error}") from error


def folder_digest(folder: str) -> str:
    """The digest of an adapter's folder. Raises `ConfigError`."""
    try:
        return _remembered(sorted(one for one in Path(folder).iterdir() if one.suffix in (".safetensors", ".json")))
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _remembered(files: Sequence[Path]) -> str:
    from minisgl.engine.page_store import digest_of

    return digest_of(files, envs.cache_dir() / "digests").hex()


def numerics(config: EngineConfig, engine: str, details: str) -> Numerics:
    """`engine`, `details`: what the engine says of itself. Raises `ConfigError` for one that is not exact."""
    if engine not in ENGINES:
        raise ConfigError(f"receipts: the engine {engine} sums in an order that depends on the batch: use --engine cpu")
    from minisgl.engine.page_store import NUMERICS

    parts = details.split(", ")
    return Numerics(
        engine=engine,
        activations=config.activations,
        kv_dtype=config.kv_dtype,
        quantization=config.quantization,
        instructions="amx" if "amx" in parts else "exact",
        number=NUMERICS,
    )


def _say_nothing(text: str, done: int = 0, total: int = 0) -> None:
    """The server has told it."""
