"""The resolved, immutable configuration of one engine process and of one server.

Invariants: it is built and checked once (by cli or llm.py) and never changed; the engine process gets it as JSON.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from minisgl.scheduler.policies import CachePolicy, SchedulePolicy, scheduler_problem

EngineName = Literal["auto", "cpu", "torch", "echo", "sim"]
ModelSource = Literal["auto", "huggingface", "modelscope"]
ModelImpl = Literal["auto", "native", "transformers"]
LoadFormat = Literal["auto", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Activations = Literal["exact", "bf16", "int8"]
KvDtype = Literal["f16", "f32", "q8", "q4"]
Quantization = Literal["q8", "q4"]
GenerationConfig = Literal["auto", "none"]
Frontend = Literal["auto", "rust", "python"]
LogLevel = Literal["error", "warning", "info", "debug"]
Routing = Literal["round_robin", "least_load", "random", "cache_aware"]
MODEL_SMOLLM2 = "smollm2"
_HOST_NAME = re.compile(r"\*|[^\s:/,@\[\]]+|[0-9a-fA-F]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*|\[[0-9a-fA-F:.]+\]")
_FLASH_ATTENTION_PAGE = 256  # tokens of flash-attn's smallest page
_MOST = 2**31 - 1  # upper bound of all counts
_MOST_BYTES = 2**63 - 1
_MOST_TOKENS = 2**52  # tokens of a KV pool
_MOST_SECONDS = 10**9  # upper bound of all times; fits the clocks of both languages
_MOST_ENGINES = 1024
_SPECULATIVE = re.compile(r"mtp|(?:ngram|model:(?P<model>.+?))(?::(?P<count>0|[1-9][0-9]{0,3}))?")
_DRAFT_LEN = 4  # tokens, if --speculative model:FILE has no :K
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)([ :]|$)")
_DEVICE = re.compile(r"auto|cpu|inline|cuda(:[0-9]{1,3})?")  # inline: for tests (engine/building.py)
_ORIGIN = re.compile(r"\*|null|[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@,]+")


class ConfigError(ValueError):
    """An invalid setting. The text names the setting and says what to change."""


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a numeric setting, `low` to `high`; `above`: without `low` itself; `noun`: its unit."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    noun: str = ""

    def problem(self, value: float) -> str:
        """Return what is wrong with `value` ("must be at least 1"), or "" if it lies in the range."""
        bottom, top = f"above {self.low}" if self.above else f"at least {self.low}", f"at most {self.high}"
        if value < self.low or (self.above and value == self.low) or math.isnan(value):
            both = f"{bottom} and {top}" if self.high < 65536 else bottom
            return f"must be a number of {self.noun} {both}" if self.noun else f"must be {both}"
        return f"must be {top}" if value > self.high else ""

    def check(self, flag: str, value: float) -> None:
        """Raise `ConfigError` if `value` lies outside of the range."""
        if problem := self.problem(value):
            raise ConfigError(f"{flag} {value}: {problem}")


def with_source(text: str, sources: Mapping[str, str]) -> str:
    """Return an error's `text` with the flag at its beginning replaced by the way the user set it. `sources` maps a
    flag's destination to the text before its value, such as `MINISGL_CPU_BACKEND=` or `server.yaml:3: tp: `."""
    match = _FLAG.match(text)
    source = match and sources.get(match[1].replace("-", "_"))
    if not match or not source:
        return text
    return (source if match[2] == " " else source.rstrip("=: ") + match[2]) + text[match.end() :]


def device_problem(name: str) -> str | None:
    """Return what a device name must be, or None if `name` is valid."""
    return None if _DEVICE.fullmatch(name) else "must be auto, cpu, cuda or cuda:N"


class Unsupported(ConfigError):
    """A valid model or setting that one engine does not support. Another engine may support it."""


class DebugConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for debugging, profiling and tests. Users set them by name, like those of `EngineConfig`."""

    record_trace: str | None = None  # file for all calls of the scheduler
    shadow: bool = False  # run the other scheduler too, and compare their decisions
    shadow_report: str | None = None
    shadow_every_n: int = 1
    shadow_max_diffs: int = 100
    faulty_control_plane: str = ""  # for tests: where the scheduler fails, such as commit:40:after
    echo_fail_steps: tuple[int, ...] = ()  # for tests: steps whose forward fails on the echo engine
    echo_states: int | None = None  # for tests: state snapshots of an echo engine with states; None: without states
    step_delay_file: str | None = None  # for tests: file with a delay in ms of each step, read at every step
    transport_stats: bool = False  # measure encoding, decoding and queueing of messages
    profile_steps: int = 0  # write a Chrome trace of the first steps; 0: none


class PrefixFile(msgspec.Struct, frozen=True):
    """A prefix file, written by `minisgl cache export`: token ids with their KV pages."""

    path: str


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine: what it loads and how it schedules. None is decided from the model and the machine."""

    model: str = MODEL_SMOLLM2
    engine: EngineName = "auto"  # auto: torch with a CUDA device, else cpu if it has the model, else torch
    model_impl: ModelImpl = "auto"  # layers; auto: native ones, else those of transformers (torch engine)
    model_source: ModelSource = "auto"
    revision: str | None = None
    tokenizer: str | None = None  # folder, GGUF file or hub id; None: the model's own
    mmproj: str | None = None  # GGUF file of the vision tower, or none; None: beside a GGUF model
    load_format: LoadFormat = "auto"
    generation_config: GenerationConfig = "auto"  # auto: the model's default sampling parameters
    chat_template: str | None = None  # a file, or the template; None: the tokenizer's
    dtype: Dtype = "auto"
    device: str = "auto"
    activations: Activations = "exact"  # in CPU matmuls: float32, bfloat16, or int8 in blocks of 32
    kv_dtype: KvDtype = "f16"  # of the CPU engine's KV cache
    quantization: Quantization | None = None  # of weights, at loading, CPU engine; None: as in the file
    weights_cache: int | None = None  # bytes of packed weights cached on disk (CPU engine); None: no cache
    seed: int = 0  # seed of dummy weights
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float | None = None  # fraction of free memory after loading, for the KV pool
    memory: int | None = None  # bytes of CPU memory for weights, states and KV pool; None: what is free
    attention_backend: str = "auto"  # CUDA only; a name, or PREFILL,DECODE
    cuda_graph_max_bs: int | None = None  # rows of the largest CUDA graph; 0: no graphs
    torch_compile: bool = False  # compile forwards outside of CUDA graphs
    max_image_tokens: int = 1024  # of the largest image, for the plan of memory; `ImageLimits` has it, too
    max_seq_len: int | None = None
    max_running_requests: int | None = None  # None: see `rows_on`
    max_prefill_length: int | None = None  # tokens per step; None: see `prefill_on`
    max_step_ms: int | None = None  # target while rows decode; 0: no limit; None: 250 on a CPU, else 0
    cache: CachePolicy = "lru"
    cache_token_budget: int | None = None  # cached tokens that no request uses; None: as many as fit
    cache_max_prompt: int | None = None  # tokens; longer prompts leave the cache at their end; None: none do
    cache_dir: str | None = None  # folder for KV pages; None: they are not stored on disk
    cache_size: int | None = None  # bytes of that folder at most; None: 20 GiB
    checkpoint_interval: int | None = None  # tokens between saved recurrent states; None: 256
    state_memory: int | None = None  # bytes for saved states, CPU engine; None: an eighth of the KV pool
    max_pinned_ratio: float = 0.5  # fraction of KV pages that prefixes may pin
    own_cache_keys: tuple[tuple[int, bytes], ...] = ()  # API keys with `own_cache`: index, digest
    warm_prefixes: tuple[str | PrefixFile, ...] = ()  # computed and pinned at the start
    lora: tuple[tuple[str, str], ...] = ()  # adapters to load at the start: name, folder
    speculative: str | None = None  # ngram:K or model:FILE[:K]: up to K draft tokens per row; mtp: one
    schedule_policy: SchedulePolicy = "fcfs"  # which waiting request starts next; ageing limits its effect
    cpu_backend: str = "auto"  # scheduler; auto: rust_hotpath if the extension loads, else python
    overlap: bool = True
    num_threads: int | None = None
    tp: int | Literal["auto"] = 1  # processes that share each layer; auto: as many as devices and model allow
    log_level: LogLevel = "info"  # debug: every step is logged
    sim_profile: str = "null"  # step times of the simulated engine; null: 0
    debug: DebugConfig = DebugConfig()

    @property
    def shown_model(self) -> str:
        """The model's name as clients may see it: the base name of a local folder or file, not its path."""
        path = os.path.expanduser(self.model)
        return os.path.basename(os.path.abspath(path)) if os.path.exists(path) else self.model

    @staticmethod
    def of(settings: Mapping[str, Any]) -> EngineConfig:
        """Build a checked configuration from flat settings. Raises `ConfigError` or `msgspec.ValidationError`."""
        debug = {name: value for name, value in settings.items() if name in DebugConfig.__struct_fields__}
        others = {name: value for name, value in settings.items() if name not in debug}
        if others.get("page_size") is None:
            others.pop("page_size", None)
            if "flash_attention" in str(others.get("attention_backend")).split(","):
                others["page_size"] = _FLASH_ATTENTION_PAGE
        return msgspec.convert({**others, "debug": debug}, EngineConfig).check()

    def check(self) -> EngineConfig:
        """Return self if every value is valid. Raises `ConfigError` for the first invalid one."""

        check_ranges(self)
        check_ranges(self.debug)
        if not self.model.strip():
            raise ConfigError("--model: is empty: name a folder, a GGUF file, a hub id, or smollm2")

        if self.tokenizer is not None and not self.tokenizer.strip():
            raise ConfigError("--tokenizer: is empty: name a folder, a GGUF file or a hub id")
        if self.tokenizer is not None and self.engine == "echo":
            raise ConfigError(f"--tokenizer {self.tokenizer}: cannot be used with --engine echo, which has its own")
        if (problem := scheduler_problem(self.cpu_backend)) is not None:
            raise ConfigError(f"--cpu-backend {self.cpu_backend}: {problem}")
        if (problem := device_problem(self.device)) is not None:
            raise ConfigError(f"--device {self.device}: {problem}")
        if (self.num_pages or 0) * self.page_size > _MOST_TOKENS:
            raise ConfigError(
                f"--num-pages {self.num_pages}: must be at most {_MOST_TOKENS // self.page_size} with this page size"
            )
        if self.weights_cache is not None and self.load_format == "dummy":
            raise ConfigError(
                f"--weights-cache {self.weights_cache}: cannot be used with --load-format dummy, which reads no file"
            )
        if self.cache_size is not None and self.cache_dir is None:
            raise ConfigError(f"--cache-size {self.cache_size}: needs --cache-dir, the folder to limit")
        files = [one.path for one in self.warm_prefixes if isinstance(one, PrefixFile)]
        if files and self.cache_dir is None:
            raise ConfigError(f"--warm-prefix @{files[0]}: needs --cache-dir, the folder for its pages")
        if self.cache_dir is not None and self.cache == "naive":
            raise ConfigError("--cache-dir: cannot be used with --cache naive, which caches nothing")
        if self.speculative is not None:
            if not 1 <= self.max_draft_len <= 99:
                raise ConfigError(
                    f"--speculative {self.speculative}: must be ngram:K, model:FILE[:K] or mtp, with K from 1 to 99"
                )
            if (self.draft_model is not None or self.uses_mtp) and self.engine in ("echo", "sim"):
                raise ConfigError(f"--speculative {self.speculative}: --engine {self.engine} has no model: use ngram:K")
            if self.max_draft_len >= self.rows_on("cpu"):
                raise ConfigError(
                    f"--speculative {self.speculative}: each draft token takes a row: "
                    f"--max-running-requests must be above {self.max_draft_len}"
                )
        if self.cache == "naive" and self.warm_prefixes:
            raise ConfigError("--warm-prefix: cannot be used with --cache naive, which caches nothing")
        names = [name for name, _ in self.lora]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"--lora: {twice[0]}: is the name of two adapters: give each its own name")
        if self.engine == "cpu":
            for flag in self.not_of_cpu():
                raise ConfigError(f"{flag}: cannot be used with --engine cpu: choose --engine torch, or leave it out")
        elif self.engine != "auto":
            for flag in self.of_cpu_only():
                raise ConfigError(f"{flag}: cannot be used with --engine {self.engine}: use --engine cpu")
        return self

    def check_states(self, has_states: bool) -> None:
        """Raise `ConfigError` for a setting that does not fit a model with, or without, recurrent states."""
        for name in ("checkpoint_interval", "state_memory"):
            if not has_states and (value := getattr(self, name)) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: the model has no recurrent states")
        if has_states and self.max_draft_len:
            raise ConfigError(
                f"--speculative {self.speculative}: cannot be used with recurrent states, which cannot be rolled back"
            )

    @property
    def max_draft_len(self) -> int:
        """Draft tokens of a sequence that one step may verify at most; 0 without speculative decoding."""
        match = _SPECULATIVE.fullmatch(self.speculative or "")
        if match is None:
            return 0
        return int(match["count"] or (_DRAFT_LEN if match["model"] else self.uses_mtp))

    @property
    def uses_mtp(self) -> bool:
        """Whether the model's own MTP layer drafts (`--speculative mtp`)."""
        return self.speculative == "mtp"

    @property
    def draft_model(self) -> str | None:
        """The draft model of `--speculative model:FILE[:K]`, or None without one."""
        match = _SPECULATIVE.fullmatch(self.speculative or "")
        return None if match is None else match["model"]

    @property
    def num_ranks(self) -> int:
        """The number of tensor-parallel processes. It is 1 while `tp` is "auto", until the engine has decided."""
        return 1 if self.tp == "auto" else self.tp

    def rows_on(self, device: str) -> int:
        """Return the most running requests on `device`: `max_running_requests`, or 256 on CUDA and 64 elsewhere."""
        return self.max_running_requests or (256 if device.startswith("cuda") else 64)

    def prefill_on(self, device: str) -> int:
        """Return the most tokens of a step on `device`: `max_prefill_length`, or 8192 on CUDA and 2048 elsewhere."""
        return self.max_prefill_length or (8192 if device.startswith("cuda") else 2048)

    def not_of_cpu(self) -> Iterator[str]:
        """Yield each flag, with its value, that is set and that the CPU engine does not support."""
        if self.model_impl == "transformers":
            yield f"--model-impl {self.model_impl}"
        if self.num_ranks > 1:
            yield f"--tp {self.tp}"
        if self.device not in ("auto", "cpu"):
            yield f"--device {self.device}"
        if self.dtype not in ("auto", "float32"):
            yield f"--dtype {self.dtype}"
        if self.attention_backend != "auto":
            yield f"--attention-backend {self.attention_backend}"

    def of_cuda_only(self) -> Iterator[str]:
        """Yield each flag, with its value, that is set and has no effect on a CPU."""
        if self.cuda_graph_max_bs:
            yield f"--cuda-graph-max-bs {self.cuda_graph_max_bs}"
        if self.torch_compile:
            yield "--torch-compile"

    def of_cpu_only(self) -> Iterator[str]:
        """Yield each flag, with its value, that is set and that only the CPU engine supports."""
        plains = {
            "activations": "exact",
            "kv_dtype": "f16",
            "quantization": None,
            "weights_cache": None,
            "mmproj": None,
            "state_memory": None,
            "cache_dir": None,
        }
        for name, plain in plains.items():
            if (value := getattr(self, name)) != plain:
                yield f"--{name.replace('_', '-')} {value}"
        if self.uses_mtp:
            yield f"--speculative {self.speculative}"


# all settings that users may set
ENGINE_SETTINGS = (*EngineConfig.__struct_fields__[:-1], *DebugConfig.__struct_fields__)


_COUNT, _COUNT_OR_NONE = Range(1, _MOST), Range(0, _MOST)
_BYTES = Range(1, _MOST_BYTES)
_SECONDS = Range(0, _MOST_SECONDS, above=True, noun="seconds")
RANGES: Mapping[str, Range] = {
    "page_size": _COUNT,
    "num_pages": _BYTES,
    "memory_ratio": Range(0, 1, above=True),
    "memory": _BYTES,
    "cache_size": _BYTES,
    "weights_cache": _BYTES,
    "state_memory": Range(0, _MOST_BYTES),
    "seed": _COUNT_OR_NONE,
    "cuda_graph_max_bs": _COUNT_OR_NONE,
    "max_seq_len": Range(2, _MOST),
    "max_running_requests": _COUNT,
    "max_prefill_length": _COUNT,
    "max_step_ms": _COUNT_OR_NONE,
    "cache_token_budget": _COUNT,
    "cache_max_prompt": _COUNT,
    "checkpoint_interval": _COUNT,
    "max_pinned_ratio": Range(0, 1),
    "num_threads": _COUNT,
    "tp": _COUNT,
    "profile_steps": _COUNT_OR_NONE,
    "echo_states": _COUNT_OR_NONE,
    "shadow_every_n": _COUNT,
    "shadow_max_diffs": _COUNT,
    "max_queued_requests": _COUNT,
    "max_queued_tokens": _BYTES,
    "max_body_bytes": _BYTES,
    "max_encoding_bytes": _BYTES,
    "max_images": _COUNT_OR_NONE,
    "max_image_pixels": _COUNT,
    "max_image_tokens": _COUNT,
    "context_margin": _COUNT_OR_NONE,
    "keep_alive_timeout": Range(1, _MOST_SECONDS),
    "request_timeout": _SECONDS,
    "slow_client_timeout": _SECONDS,
    "step_timeout": _SECONDS,
    "drain_timeout": Range(0, _MOST_SECONDS, noun="seconds"),
    "load_timeout": _SECONDS,
    "dp": Range(1, _MOST_ENGINES),
    "max_inflight": _COUNT,
    "max_inflight_per_engine": _COUNT,
    "port": Range(0, 65535),
    "max_loras": _COUNT,
    "state_quota": _BYTES,
}
"""Range of each numeric setting, by name. Settings that are missing here have no bounds."""


def check_ranges(settings: msgspec.Struct) -> None:
    """Raise `ConfigError` for the first setting that lies outside of its range in `RANGES`."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if name in RANGES and isinstance(value, int | float):
            RANGES[name].check(f"--{name.replace('_', '-')}", value)


class AdaptiveMaxTokens(msgspec.Struct, frozen=True):
    """A rule for answer lengths under load: while more than `threshold` answers are in flight, a default length is
    multiplied by `millionths` / 1,000,000. The factor is an integer so that both front ends compute the same."""

    threshold: int
    millionths: int


MAX_PRIORITY = 4
"""Largest absolute priority of a request, unless its key's `max_priority` says otherwise. The best one is worth 256
arrivals."""


def most_of(rows: int) -> int:
    """Return how many of `rows` batch lines or one API key may use: all but a sixteenth, at least one, so that other
    requests find a free row at once."""
    return max(1, rows - max(1, rows // 16))


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """An API key with its share of the engines, its limits and its permissions. A limit of 0 is no limit."""

    name: str
    key: str
    share: int = 1
    max_inflight: int = 0
    max_queued_requests: int = 0
    tokens_per_minute: int = 0
    max_priority: int = MAX_PRIORITY
    lora: bool = False  # may load and unload adapters
    cache: bool = False  # may list, store and remove prefixes, and clear the prefix cache
    models: bool = False  # may load and unload models, if there are several
    own_cache: bool = False  # its cached prefixes are for this key only

    def __repr__(self) -> str:
        return f"ApiKey({self.name})"  # so that a printed configuration shows no keys


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the HTTP server; times are in seconds. `max_queued_*` count requests and prompt tokens that wait for
    their first step, in the engine or for the tokenizer. A forward that takes `step_timeout` counts as hung.
    `context_margin` is the number of tokens of the context that default answer lengths leave free."""

    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    max_body_bytes: int = 32 * 2**20
    max_encoding_bytes: int = 16 * 2**20
    request_timeout: float | None = None
    slow_client_timeout: float = 60.0
    keep_alive_timeout: int = 75  # of an idle connection; proxies often keep it for 60
    step_timeout: float = 300.0
    drain_timeout: float = 30.0
    adaptive_max_tokens: AdaptiveMaxTokens | None = None
    context_margin: int = 0


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of images in requests, for a model that sees. `max_image_tokens`: tokens of the prompt that one image may
    take, to which it is made smaller; `image_hosts`: from which URLs are fetched."""

    max_images: int = 16
    max_image_pixels: int = 16_000_000
    max_image_tokens: int = 1024
    image_hosts: tuple[str, ...] = ()


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Longest silences of a stream, in seconds. (Node clients give up after 300 s without a byte, proxies after 60 s.)
    The response headers wait `head_wait` for the first token, so that an early failure is an HTTP status; after the
    headers something is written at least every `longest` seconds."""

    head_wait: float = 1.0
    longest: float = 15.0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a whole server: one HTTP address in front of one engine process, or of several alike."""

    engine: EngineConfig
    dp: int | Literal["auto"] = 1  # engine processes; auto: as many as the CUDA devices allow
    routing: Routing = "cache_aware"  # how requests get one of several engines
    max_inflight: int | None = None  # requests in all engines at once; others wait; None: no limit
    max_inflight_per_engine: int | None = None
    host: str = "127.0.0.1"
    port: int = 1919
    frontend: Frontend = "auto"  # owner of the port; auto: rust (the gateway) if the extension loads
    served_model_name: str | None = None
    any_model_name: bool = False  # requests may name any model
    limits: Limits = Limits()
    silence: Silence = Silence()
    images: ImageLimits = ImageLimits()
    api_key: str | None = None
    lora_folder: str | None = None  # adapters below it may be loaded over HTTP; None: no loading
    max_loras: int = 16  # loaded adapters at most, including those of the start
    api_keys: tuple[ApiKey, ...] = ()  # of --api-key-file; a request's key index i is `api_keys[i - 1]`
    allowed_hosts: tuple[str, ...] = ()  # Host names that clients may use; *: any
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may use the server; *: any
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    access_log_probes: bool = False  # log lines for /health, /metrics and similar, too
    log_prompts: bool = False
    receipt_key: str | None = None  # file of the private key that signs receipts
    tool_call_parser: str = "auto"  # format of the model's tool calls
    reasoning_parser: str = "auto"  # format of the model's reasoning
    metrics_aliases: Literal["none", "vllm"] = "none"
    state_dir: str | None = None  # folder for files and batches; None: no batches
    state_quota: int = 4 << 30  # bytes of that folder for each API key
    resumable: bool = False  # send marks to routers that ask for them (server/core/resume.py)
    demo_load: bool = False  # send a demonstration load to itself
    managed: bool = False  # started by a program, see supervisor/serving.py
    tells_use: bool = False  # report the use of API keys to it, see registry/keys.py
    takes_lines: bool = False  # answer batch lines for it, see registry/batches.py

    def check(self) -> ServerConfig:
        """Return self if every value is valid. Raises `ConfigError` for the first invalid one."""
        if not self.host.strip():
            raise ConfigError("--host: is empty: give an address, or 0.0.0.0 for every interface")
        check_ranges(self)
        check_ranges(self.limits)
        check_ranges(self.images)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("--api-key: must be printable ASCII and not empty")
        for key in self.api_keys:
            if key.key == self.api_key:
                raise ConfigError(f"--api-key-file: the key of {key.name} equals that of --api-key: give another one")
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(f"--allowed-host {name!r}: must be a name or an address without a port, or *")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors-origin {origin!r}: must be like https://page.example:8080 (no path), or *")
        if self.resumable and self.frontend == "rust":
            raise ConfigError(
                "--resumable: cannot be used with --frontend rust, which writes no marks: use --frontend python"
            )
        if self.lora_folder is not None and not os.path.isdir(self.lora_folder):
            raise ConfigError(f"--lora-folder {self.lora_folder}: no such folder")
        self._check_engines()
        return self

    def _check_engines(self) -> None:
        if self.dp == 1:
            return
        if self.engine.tp == "auto":
            raise ConfigError(f"--tp auto: cannot be used with --dp {self.dp}: give --tp a number")
        if self.engine.device.startswith("cuda:"):
            raise ConfigError(
                f"--device {self.engine.device}: cannot be used with --dp {self.dp}: engines get "
                "devices in order from cuda:0 on; choose them with CUDA_VISIBLE_DEVICES"
            )
        if (path := self.engine.debug.record_trace) is not None:
            raise ConfigError(
                f"--record-trace {path}: cannot be used with --dp {self.dp}: a trace records one scheduler: use --dp 1"
            )

    @property
    def needs_pool(self) -> bool:
        """True if an `EnginePool` must connect front ends and engines (several engines, limits, API keys)."""
        limited = self.max_inflight is not None or self.max_inflight_per_engine is not None
        return self.dp != 1 or limited or bool(self.api_keys)

    @property
    def routing_in_use(self) -> Routing | Literal["none"]:
        """The routing policy, or "none" if there is one engine only. `dp` must be a number by then."""
        return "none" if self.dp == 1 else self.routing

    @property
    def any_key(self) -> str | None:
        """A valid API key, for the server's own requests. None if no key is required."""
        return next((key.key for key in self.api_keys), None) if self.api_key is None else self.api_key

    @property
    def model_name(self) -> str:
        """The model's name in the API: `served_model_name`, else a local folder's or file's name without .gguf."""
        return self.served_model_name or self.engine.shown_model.removesuffix(".gguf").rstrip("/")

    @property
    def model_aliases(self) -> frozenset[str]:
        """Further names that requests may use: the model's path and file name. Empty with `served_model_name`."""
        if self.served_model_name is not None:
            return frozenset()
        given = self.engine.model
        return frozenset({given, given.rstrip("/"), self.engine.shown_model}) - {self.model_name}
