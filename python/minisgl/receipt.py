"""Receipts: everything that an answer's tokens depend on, with digests, so that anybody who has the model can recompute
the answer alone and compare (`minisgl verify`).

Invariants: a receipt has no text and no tokens, only their count and SHA-256; two receipts of the same request to the
same model are the same bytes except for `minisgl` and `signature`, whatever else the engine computed at that time. That
holds for engines whose results do not depend on the batch: the CPU engine, and the echo engine, which has no
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
from minisgl.weights.gguf_folder import seeing_folder, tower_file
from minisgl.weights.sources import find_model
from minisgl.weights.stored import weight_files

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ENGINES = ("cpu", "echo")
_PLAIN = SamplingParams()


class Tokens(msgspec.Struct, frozen=True):
    """The count and the SHA-256 (hex) of a sequence of token ids, hashed as little-endian int32."""

    count: int
    sha256: str

    @classmethod
    def of(cls, ids: Iterable[int]) -> Tokens:
        array = np.fromiter(ids, np.dtype("<i4"))
        return cls(len(array), hashlib.sha256(array.tobytes()).hexdigest())


class Model(msgspec.Struct, frozen=True):
    """SHA-256 digests of weight files, LoRA adapter (None without one), tokenizer.json and chat template."""

    weights: str
    adapter: str | None
    tokenizer: str
    template: str


class Numerics(msgspec.Struct, frozen=True):
    """The arithmetic that computed an answer. `instructions` is a class of instruction sets with equal bits (AMX tiles
    sum in another order). `number` is the version of the engine's arithmetic rules."""

    engine: str
    activations: str
    kv_dtype: str
    quantization: str | None
    instructions: Literal["exact", "amx"]
    number: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt of one answer. `images` has the digests (hex) of the prompt's images, on which their ids in the prompt
    depend (`minisgl.prompt_image`); receipts of prompts without images leave it out. `sampling` includes the seed, and
    no adapter id, since the adapter has a digest. `logprobs` is the SHA-256 of the sampled tokens' log probabilities
    (natural logarithm, little-endian float32), or None if none were computed. `sha256` covers all fields before it but
    `minisgl`. `signature` is Ed25519 over that digest, in base64, by the public key `signer`."""

    receipt: Literal[1] = 1
    minisgl: str
    model: Model
    numerics: Numerics
    sampling: SamplingParams
    prompt: Tokens
    images: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    answer: Tokens
    finish_reason: str
    logprobs: str | None
    sha256: str = ""
    signer: str | None = None
    signature: str | None = None

    def digest(self) -> bytes:
        """Return the SHA-256 of the receipt's claims, the same whether its numbers come from JSON or not (1 and 1.0 are
        equal there)."""
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
    images: Sequence[bytes] = (),
) -> Receipt:
    """Build a receipt, signed if `key` is given. `sampling` is the engine's, of one answer, with its seed. `images` are
    the digests of the prompt's images, in order."""
    receipt = Receipt(
        minisgl=own_version(),
        model=model,
        numerics=numerics,
        sampling=_plain_sampling(sampling),
        prompt=Tokens.of(prompt),
        images=tuple(digest.hex() for digest in images) or msgspec.UNSET,
        answer=Tokens.of(answer),
        finish_reason=finish_reason,
        logprobs=logprobs,
    )
    digest = receipt.digest()
    receipt = msgspec.structs.replace(receipt, sha256=digest.hex())
    if key is None:
        return receipt
    signer = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    signature = base64.b64encode(key.sign(digest)).decode()
    return msgspec.structs.replace(receipt, signer=signer, signature=signature)


def _plain_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return `sampling` without fields that change no token, differ by server, or have their default value."""
    bare = msgspec.structs.replace(sampling, n=1, adapter=0, logprobs=None, prompt_logprobs=None, embedding=None)
    fields = msgspec.structs.asdict(bare)
    return SamplingParams(**{name: value for name, value in fields.items() if value != getattr(_PLAIN, name)})


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary of pairs. Raises `ValueError` for a repeated name: readers differ in which one counts."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the field {twice} is given twice")
    return fields


def _check_fields(given: dict[str, Any], kind: type[msgspec.Struct], place: str) -> None:
    """Raise `ConfigError` for a field that `kind`, or a struct in it, does not have. `place`: the path before it."""
    kinds = get_type_hints(kind)
    for name, value in given.items():
        if name not in kind.__struct_encode_fields__:
            raise ConfigError(f"receipt: {place}{name}: is no field of a receipt, so no signature covers it")
        inner = kinds.get(name)
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _check_fields(value, inner, f"{place}{name}.")


def parse(data: bytes) -> Receipt:
    """Parse a receipt from JSON and check its digest and signature. Raises `ConfigError` for an invalid receipt, an
    unknown (and so unsigned) field, or a field that was changed."""
    try:
        receipt = msgspec.json.decode(data, type=Receipt)
        given = json.loads(data, object_pairs_hook=_unique_fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"receipt: {error}") from error
    if "receipt" not in given:
        raise ConfigError("receipt: the field receipt, the version of the format, is missing")
    _check_fields(given, Receipt, "")
    digest = receipt.digest()
    if receipt.sha256 != digest.hex():
        raise ConfigError(f"receipt: sha256: does not match the fields' digest, {digest.hex()}: they were changed")
    if (receipt.signature is None) != (receipt.signer is None):
        raise ConfigError("receipt: signature and signer: both or none must be given")
    if (
        receipt.signature is not None
        and receipt.signer is not None
        and not _is_signed(digest, receipt.signer, receipt.signature)
    ):
        raise ConfigError("receipt: signature: does not match the signer and the fields")
    try:
        if receipt.sampling.check() != _plain_sampling(receipt.sampling):
            raise ConfigError("receipt: sampling: must have only the fields that a receipt of one answer has")
    except ParamError as error:
        raise ConfigError(f"receipt: sampling: {error}") from error
    return receipt


def _is_signed(digest: bytes, signer: str, signature: str) -> bool:
    need("a signed receipt", "cryptography")
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(_decode_base64(signer)).verify(_decode_base64(signature), digest)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decode_base64(text: str) -> bytes:
    """Decode base64. Raises `ValueError` unless `text` is canonical (unused bits are 0)."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("must be canonical base64")
    return data


def _public_key(raw: bytes) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(raw)


def read_key(path: str) -> Ed25519PrivateKey:
    """Read an Ed25519 private key from a PEM file, as `openssl genpkey` writes it. Raises `ConfigError`."""
    need(f"--receipt-key {path}", "cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(Path(path).expanduser().read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--receipt-key {path}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"--receipt-key {path}: must be an Ed25519 key")
    return key


class LogprobDigest:
    """An incremental SHA-256 of log probabilities, hashed as little-endian float32."""

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
    """Return the digest of the model's weight files, before any conversion, with that of its vision tower. It reads the
    files once; the digest is cached while they are unchanged. Raises `ConfigError`."""
    if config.engine == "echo" or config.load_format == "dummy":
        return text_digest(f"{config.engine} {'' if config.engine == 'echo' else config.model} {config.seed}")
    path = find_model(
        config.model,
        _say_nothing,
        source=config.model_source,
        revision=config.revision,
        mmproj=config.mmproj is None,
    )
    try:
        if not path.is_file():
            return _cached_digest(weight_files(path))
        tower = tower_file(seeing_folder(path, config.mmproj, own_tokenizer=config.tokenizer is None)[0])
        return _cached_digest([*_rust.gguf_parts(path), *([] if tower is None else [tower])])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config.model}: {error}") from error


def folder_digest(folder: str) -> str:
    """Return the digest of a LoRA adapter's folder (its .safetensors and .json files). Raises `ConfigError`."""
    try:
        return _cached_digest(sorted(one for one in Path(folder).iterdir() if one.suffix in (".safetensors", ".json")))
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _cached_digest(files: Sequence[Path]) -> str:
    from minisgl.engine.page_store import digest_of

    return digest_of(files, envs.cache_dir() / "digests").hex()


def numerics(config: EngineConfig, engine: str, details: str) -> Numerics:
    """Return an engine's arithmetic by its name and details. Raises `ConfigError` if it depends on the batch."""
    if engine not in ENGINES:
        raise ConfigError(f"receipts: the engine {engine} computes results that depend on the batch: use --engine cpu")
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
    """Drop a progress message, since the server has shown it already."""
