"""Names of models on hubs, and the files of a repository that a name means. No hub is asked and no file is read here.

A name is OWNER/REPO, OWNER/REPO:QUANT, OWNER/REPO/FILE.gguf, a page's address, or a short name of the table below.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile

from minisgl.config import ConfigError, ModelSource

SHORT = {
    "gemma3:4b": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:270m": "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma3:12b": "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
    "gemma3:27b": "ggml-org/gemma-3-27b-it-GGUF:Q4_K_M",
    "llama3.1:8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama3.2:3b": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama3.3:70b": "bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M",
    "mistral:7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:14b": "Qwen/Qwen2.5-14B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:32b": "Qwen/Qwen2.5-32B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:Q4_K_M",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3:8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:14b": "Qwen/Qwen3-14B-GGUF:Q4_K_M",
    "qwen3:32b": "Qwen/Qwen3-32B-GGUF:Q4_K_M",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    "qwen3-coder:30b": "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q4_K_M",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "smollm3:3b": "ggml-org/SmolLM3-3B-GGUF:Q4_K_M",
}
"""Short names of models, and their repositories. A name without a size means the first row with that name."""

PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "MXFP4", "IQ4_XS")
"""Order of preference of GGUF quantizations if none is named; then the first file by name, and last a type that the CPU
engine cannot read."""

HOSTS: dict[str, ModelSource] = {
    "huggingface.co": "huggingface",
    "hf.co": "huggingface",
    "modelscope.cn": "modelscope",
    "www.modelscope.cn": "modelscope",
}
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "[0-9]_*/config.json")
INDEX = "model.safetensors.index.json"
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_REPO = re.compile(rf"{_PART}/{_PART}")
_NAMED = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<quant>[\w.-]+)|/(?P<file>\S+\.gguf))?", re.ASCII)
_ADDRESS = re.compile(r"(?:https?://)?(?P<host>[^/\s:]+(?::\d+)?)/(?P<path>\S+)")
_PAGE = re.compile(rf"(?P<repo>{_PART}/{_PART})/(?:resolve|blob|tree)/(?P<revision>[^/]+)(?:/(?P<file>\S+))?", re.ASCII)
SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_QUANT = re.compile(
    r"(?:^|[-_./])((?:UD-)?(?:I?Q\d(?:_\w+?)*|TQ\d_\d|MXFP4(?:_\w+?)*|NVFP4|BF16|FP?16|FP?32))(?=[-./]|$)",
    re.IGNORECASE,
)
_UNREAD = re.compile(r"(?:UD-)?IQ[1-3]")
_BESIDE = re.compile(r"(?:^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
_OF_TOWERS = ("F16", "FP16", "BF16", "F32", "FP32", "Q8_0")  # types of files with vision towers, the preferred first


@dataclass(frozen=True, slots=True)
class HubRequest:
    """A requested repository of a hub, and the GGUF file in it: by `quant` or by `file`, not both. `mmproj`: also the
    file of that model's vision tower. `or_modelscope`: neither hub nor revision was named, so ModelScope may be tried
    if Hugging Face does not answer."""

    source: ModelSource
    repo: str
    revision: str | None = None
    quant: str | None = None
    file: str | None = None
    mmproj: bool = False
    or_modelscope: bool = field(default=False, compare=False)


def parse(model: str, source: ModelSource, revision: str | None) -> HubRequest | None:
    """Parse a hub name or address; None if `model` is neither. Raises `ConfigError` if it contradicts other flags."""
    model = full_name(model)
    request = _address(model, source, revision) if "://" in model or model.split("/")[0] in HOSTS else None
    if request is None and (named := _NAMED.fullmatch(model)):
        request = HubRequest(source, named["repo"], revision, named["quant"], named["file"])
    if request is not None and request.source == "auto":
        request = replace(request, source="huggingface", or_modelscope=revision is None)
    return request


def _address(model: str, source: ModelSource, revision: str | None) -> HubRequest:
    """Parse the URL of a repository's page or file, as a browser shows it. Raises `ConfigError` if it is not one."""
    address = _ADDRESS.fullmatch(model.partition("?")[0].partition("#")[0])
    host = address["host"] if address else ""
    if address is None or host not in HOSTS:
        raise ConfigError(f"--model {model}: must be an address of a hub: {', '.join(HOSTS)}")
    path = address["path"].removeprefix("models/").rstrip("/")
    at = HOSTS[host]
    if source not in ("auto", at):
        raise ConfigError(f"--model-source {source}: --model {model} is on another hub: leave one of them out")
    if page := _PAGE.fullmatch(path):
        if revision not in (None, page["revision"]):
            raise ConfigError(f"--revision {revision}: --model {model} names another one: leave one of them out")
        file = page["file"]
        if file is not None and not file.endswith(".gguf"):
            raise ConfigError(f"--model {model}: no GGUF file: name the repository, {page['repo']}")
        return HubRequest(at, page["repo"], page["revision"], file=file)
    if named := _NAMED.fullmatch(path):
        return HubRequest(at, named["repo"], revision, named["quant"], named["file"])
    raise ConfigError(f"--model {model}: must be the address of a repository (OWNER/REPO) or of a file in one")


def full_name(model: str) -> str:
    """Return the full name of a short name, else `model`; `qwen3:4b-q8_0` is another quantization of `qwen3:4b`."""
    name = model.lower()
    for short, full in SHORT.items():
        if name in (short, short.partition(":")[0]):
            return full
        if name.startswith(f"{short}-"):
            return f"{full.partition(':')[0]}:{model[len(short) + 1 :].upper()}"
    return model


def similar_names(model: str) -> str:
    """Return a hint for an error text: the short names that are most similar to `model`; empty if there are none."""
    close = difflib.get_close_matches(model.lower(), SHORT, 3, 0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def quant_of(path: str) -> str:
    """Return the quantization in a file's path, such as `Q4_K_M`, in capitals; the file's name if it has none."""
    split = SPLIT.fullmatch(path)
    stem = split["stem"] if split else path.removesuffix(".gguf")
    quants = _QUANT.findall(stem.rpartition("/")[2]) or _QUANT.findall(stem)
    return str(quants[-1]).upper() if quants else stem.rpartition("/")[2]


def is_model(path: str) -> bool:
    """Return whether a file is a GGUF model or a part of one, by its name."""
    return path.endswith(".gguf") and not _BESIDE.search(path.rpartition("/")[2])


def gguf_models(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the models among the GGUF files of a repository: first part of each to all its parts that exist."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        if is_model(path):
            split = SPLIT.fullmatch(path)
            first = f"{split['stem']}-00001-of-{split['parts']}.gguf" if split else path
            models.setdefault(first, []).append(path)
    return models


def mmprojs(model: str, paths: Iterable[str]) -> list[str]:
    """Return the files of vision towers in the folder of a GGUF model or above it, by preference: the nearest folder,
    the name that begins most like the model's, then the type."""

    def stem(path: str) -> str:
        name = path.rpartition("/")[2].removesuffix(".gguf")
        return _BESIDE.sub("", _QUANT.sub("", name)).strip("-_.").lower()

    def rank(path: str) -> tuple[int, int, int, str]:
        pairs, quant = zip(stem(path), stem(model), strict=False), quant_of(path)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kind = _OF_TOWERS.index(quant) if quant in _OF_TOWERS else len(_OF_TOWERS)
        return -path.count("/"), -alike, kind, path

    def fits(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        named = path.endswith(".gguf") and (found := _BESIDE.search(name)) and found[1].lower() == "mmproj"
        return bool(named) and (not folder or model.startswith(f"{folder}/"))

    return sorted(filter(fits, paths), key=rank)


def choose(wanted: HubRequest, paths: Iterable[str], *, weights: bool = True) -> tuple[str | None, list[str]]:
    """Return the GGUF file of a repository to open (None for a folder of safetensors) and all files to fetch, the parts
    of that file first. `weights` False leaves out the weights of safetensors. Raises `ConfigError` whose text begins
    with the repository."""
    paths = sorted(paths)
    models = gguf_models(paths)
    top = [path for path in paths if "/" not in path and path.endswith(".safetensors")]
    is_folder = "config.json" in paths and bool(top or not models or not weights)
    is_folder = is_folder or (not weights and "tokenizer.json" in paths)  # some repositories have only a tokenizer
    if wanted.quant is None and wanted.file is None and is_folder:
        texts = [path for path in paths if any(_matches(path, pattern) for pattern in TEXT_FILES)]
        if not weights:
            return None, texts
        if not top:
            raise ConfigError(f"{wanted.repo}: has neither safetensors nor GGUF files, which is what minisgl reads")
        if INDEX in paths:
            top = [path for path in top if not path.startswith("consolidated")]
        elif "model.safetensors" in top:
            top = ["model.safetensors"]
        return None, [*texts, *top]
    first = _file(wanted, models)
    if (split := SPLIT.fullmatch(first)) and (absent := _absent(split, models[first])):
        raise ConfigError(f"{wanted.repo}: {len(absent)} of {int(split['parts'])} parts are missing: {absent[0]}")
    return first, models[first] + (mmprojs(first, paths)[:1] if wanted.mmproj else [])


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def _absent(split: re.Match[str], present: list[str]) -> list[str]:
    names = (f"{split['stem']}-{i + 1:05}-of-{split['parts']}.gguf" for i in range(int(split["parts"])))
    return [name for name in names if name not in present]


def _file(wanted: HubRequest, models: dict[str, list[str]]) -> str:
    if not models:
        raise ConfigError(f"{wanted.repo}: has neither a config.json with safetensors nor GGUF files")
    if wanted.file is not None:
        owner = next((first for first, parts in models.items() if wanted.file in (first, *parts)), None)
        if owner is None:
            raise ConfigError(f"{wanted.repo}: has no file {wanted.file}: there are {', '.join(models)}")
        return owner
    quants = {first: quant_of(first) for first in models}
    for preferred in PREFERRED if wanted.quant is None else (wanted.quant,):
        named = re.compile(rf"(?:^|[-_./]){re.escape(preferred)}(?=[-./])", re.IGNORECASE)
        for found in (
            next((first for first, quant in quants.items() if quant == preferred.upper()), None),
            next((first for first in models if named.search(first)), None),
        ):
            if found is not None:
                return found
    if wanted.quant is not None:
        available = ", ".join(dict.fromkeys(quants.values()))
        raise ConfigError(f"{wanted.repo}: has no GGUF file in {wanted.quant}: there are {available}")
    return min(models, key=lambda first: _UNREAD.match(quants[first]) is not None)
