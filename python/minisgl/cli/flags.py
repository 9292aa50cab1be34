"""The settings of the commands that load an engine: one table of flags, and the way from flags to `EngineConfig`.

Invariants: raw arguments become one immutable configuration here and nowhere else; a flag's destination is the name of
the field that it sets, and its type and default are the field's; flags that `--help` does not show work all the same,
also in `--config`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from minisgl import envs
from minisgl.cli import aliases
from minisgl.cli.parser import Number, Parser, one_of
from minisgl.config import (
    ENGINE_SETTINGS,
    AdaptiveMaxTokens,
    ConfigError,
    DebugConfig,
    EngineConfig,
    ImageLimits,
    Limits,
    ServerConfig,
)
from minisgl.extension import NEEDS, why_missing
from minisgl.utils import spellings

if TYPE_CHECKING:
    from minisgl.llm import LLM

T = TypeVar("T")
# the type that `add_subparsers` returns; a string, because the class takes no parameters at run time
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
_ADAPTIVE = re.compile(r"([0-9]{1,9}):([0-9]*\.?[0-9]{1,6}|[0-9]+\.)")


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that adds the default to each flag, unless the default is None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return action.help
        if action.help is not None and " (default: " in action.help:  # replaced, as a command or a file may set another
            return action.help.rpartition(" (default: ")[0] + " (default: %(default)s)"
        return super()._get_help_string(action)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table of flags. `how` has further arguments for argparse's `add_argument`."""

    flags: tuple[str, ...]
    help: str
    how: Mapping[str, Any]
    shown: bool

    @property
    def dest(self) -> str:
        return str(self.how.get("dest") or self.flags[0].removeprefix("--").replace("-", "_"))

    def add_to(self, group: argparse._ActionsContainer, shown: bool, **default: Any) -> argparse.Action:
        how = {**default, **_of_field(self.dest), **self.how}
        return group.add_argument(*self.flags, help=self.help if shown else argparse.SUPPRESS, **how)


def setting(*flags: str, help: str, **how: Any) -> Setting:
    return Setting(flags, help, how, shown=True)


def hidden(*flags: str, help: str, **how: Any) -> Setting:
    """Return a row for a flag that `--help` does not show."""
    return Setting(flags, help, how, shown=False)


def _defaults(*structs: type[Any]) -> dict[str, Any]:
    """Return the defaults of the structs' fields whose default is a string or a number."""
    defaults: dict[str, Any] = {}
    for struct in structs:
        fields = struct.__struct_fields__
        defaults |= dict(zip(fields[-len(struct.__struct_defaults__) :], struct.__struct_defaults__, strict=True))
    return {name: value for name, value in defaults.items() if isinstance(value, str | int | float)}


_STRUCTS = (ServerConfig, Limits, ImageLimits, DebugConfig, EngineConfig)
_DEFAULTS = _defaults(*_STRUCTS)
_FIELDS = {name: kind for struct in _STRUCTS for name, kind in get_type_hints(struct).items()}


def _of_field(name: str) -> dict[str, Any]:
    """Return argparse's arguments for the type of a field: a switch, a number or a choice; {} for other types."""
    kind: Any = _FIELDS.get(name)
    if get_origin(kind) in (Union, UnionType):
        *others, kind = (member for member in get_args(kind) if member is not NoneType)
        if others:
            return {}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"action": "store_true"} if kind is bool else {"type": Number(kind, name)} if kind in (int, float) else {}


def checked(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `convert`, which raises `ConfigError`, as an argparse type."""

    def value(text: str) -> T:
        try:
            return convert(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def tool_call_parser(text: str) -> str:
    from minisgl.parsers.choice import tool_call_parsers

    return _one_of(text, tool_call_parsers())


def reasoning_parser(text: str) -> str:
    from minisgl.parsers.choice import reasoning_parsers

    return _one_of(text, reasoning_parsers())


def _one_of(text: str, names: list[str]) -> str:
    if text not in names:
        if why := why_missing():
            raise argparse.ArgumentTypeError(f"{text}: {NEEDS}: {why}")
        raise argparse.ArgumentTypeError(one_of(names))
    return text


def adaptive_max_tokens(text: str) -> AdaptiveMaxTokens:
    """Parse `THRESHOLD:FACTOR`, such as `64:0.5`. Raises `ConfigError`."""
    match = _ADAPTIVE.fullmatch(text)
    millionths = 0 if match is None else int(Decimal(match[2]) * 1_000_000)
    if match is None or not 0 < millionths <= 1_000_000:
        raise ConfigError(
            f"{text!r}: must be THRESHOLD:FACTOR, a number of answers and a factor above 0, at most 1, of at most 6 "
            'decimals, such as 64:0.5 (in a file in quotes: "64:0.5")'
        )
    return AdaptiveMaxTokens(int(match[1]), millionths)


class _Model(argparse.Action):
    """Action for the model, given as an argument or as a flag; both are refused unless they are equal."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, "model_given", {})
        given["flag" if option_string else "word"] = values
        if len(set(given.values())) > 1:
            raise argparse.ArgumentError(
                None, f"--model {given['flag']}: is also given as {given['word']}: give one of them"
            )
        namespace.model, namespace.model_given = values, given
        if option_string:
            namespace.each_model = [*getattr(namespace, "each_model", ()), values]


MODEL = (
    setting(
        "--model",
        "--model-path",
        action=_Model,
        help="folder, GGUF file, smollm2 (embedded), hub id OWNER/REPO[:QUANT], URL, or short name like qwen3:4b",
    ),
    setting(
        "--engine",
        help="auto: torch on CUDA, else cpu if it has the model, else torch; echo and sim: no model, for tests",
    ),
    setting(
        "--model-impl",
        help="layers: native (minisgl's), transformers (torch engine), or auto: native if it has the architecture",
    ),
    hidden(
        "--sim-profile",
        metavar="NAME|FILE",
        help="step times of --engine sim: null (none), slow-motion, qwen3-8b-h200 and other names, or a file",
    ),
    hidden("--model-source", help="hub of the model's name; auto: Hugging Face, unless the name is a URL"),
    setting("--revision", help="branch, tag or commit on the hub (default: its main branch)"),
    setting(
        "--tokenizer",
        "--tokenizer-path",
        metavar="FOLDER|ID",
        help="the tokenizer of another folder, GGUF file or hub id (default: the model's own)",
    ),
    hidden(
        "--mmproj",
        metavar="FILE",
        help="GGUF file of the vision tower, or none (default: mmproj-*.gguf beside a GGUF model)",
    ),
    setting("--load-format", help="auto: the model's own weights; dummy: random weights by --seed"),
    hidden(
        "--generation-config",
        help="auto: default sampling parameters from generation_config.json; none: without that file",
    ),
    setting("--chat-template", metavar="FILE", help="a jinja file, or the template as text (default: the tokenizer's)"),
    setting(
        "--dtype",
        type=spellings.dtype,
        help="dtype of torch weights and KV; auto: the checkpoint's, or float32 on a CPU that would emulate it",
    ),
    setting(
        "--device",
        type=checked(spellings.device),
        help="device that computes: auto, cpu, cuda, or cuda:N",
    ),
    hidden("--seed", "--random-seed", help="seed of dummy weights"),
    setting(
        "--max-seq-len",
        "--max-model-len",
        "--context-length",
        help="tokens of a prompt with its answer at most (default: the model's context)",
    ),
)
CPU = (
    setting(
        "--activations",
        help="activations in matmuls: exact (float32), bf16 (faster with AMX), int8 (fastest, least exact)",
    ),
    setting(
        "--kv-dtype",
        type=spellings.kv_dtype,
        help="dtype of the CPU engine's KV cache; q8: 8 bits; q4: 4 bits, which lose much in small models",
    ),
    setting(
        "--quantization",
        type=spellings.quantization,
        help="quantize unquantized weights while they are loaded (default: load them as they are)",
    ),
    setting("--num-threads", help="compute threads, also of torch (default: one per core)"),
)
CUDA = (
    setting(
        "--attention-backend",
        type=checked(spellings.attention_backend),
        metavar="NAME|PREFILL,DECODE",
        help=f"{', '.join(spellings.ATTENTION_BACKENDS)}, or two of them; auto: the fastest",
    ),
    hidden(
        "--cuda-graph-max-bs",
        metavar="N",
        help="rows of the largest CUDA graph; 0: no graphs (default: 256, or --max-running-requests)",
    ),
    hidden("--torch-compile", help="compile the forwards outside of CUDA graphs"),
)
CACHE = (
    setting(
        "--page-size", default=None, help="tokens per page (default: 16, with --attention-backend flash_attention 256)"
    ),
    setting("--num-pages", help="pages of the KV pool (default: from --memory-ratio)"),
    setting(
        "--memory-ratio",
        "--mem-fraction",
        "--mem-fraction-static",
        help="fraction of the memory free after loading, for the KV pool (default: 0.5, on a CUDA device 0.85)",
    ),
    setting(
        "--memory",
        type=checked(spellings.size),
        metavar="SIZE",
        help="CPU memory for weights and KV pools (several models: in total), such as 6GB (default: what is free)",
    ),
    setting(
        "--cache",
        "--cache-type",
        choices=("radix", "lru", "lfu", "naive"),
        help="prefix cache, by its eviction policy (radix is lru); naive: no cache",
    ),
    hidden(
        "--cache-token-budget",
        metavar="N",
        help="tokens that the cache keeps without a request, except pinned ones (default: as many as fit)",
    ),
    hidden(
        "--cache-max-prompt", metavar="N", help="tokens of the longest prompt that stays cached (default: all stay)"
    ),
    hidden(
        "--max-pinned-ratio",
        metavar="R",
        help="fraction of the KV pages that prefixes may pin; less if the longest request would not fit then",
    ),
    setting(
        "--cache-dir",
        metavar="DIR",
        help="folder for KV pages, reused after restarts; its readers can read the prompts (default: none)",
    ),
    hidden(
        "--cache-size",
        type=checked(spellings.size),
        metavar="SIZE",
        help="bytes in --cache-dir at most, such as 500MiB; least recently used pages go first (default: 20GiB)",
    ),
    hidden(
        "--weights-cache",
        type=checked(spellings.size),
        metavar="SIZE",
        help="bytes of packed CPU weights kept in MINISGL_CACHE for fast starts, such as 20GiB (default: none)",
    ),
    setting(
        "--warm-prefix",
        dest="warm_prefixes",
        action="append",
        type=checked(spellings.text_or_file),
        metavar="TEXT|@FILE",
        help="prefix to compute at the start and pin: text, file or exported prefix; repeatable (default: none)",
    ),
    setting(
        "--lora",
        "--lora-modules",
        dest="lora",
        action="extend",
        nargs="+",
        type=checked(spellings.adapter),
        metavar="NAME=PATH",
        help="LoRA adapter, a folder as peft saves it, that requests may name; repeatable (default: none)",
    ),
)
STEPS = (
    setting(
        "--max-running-requests",
        help="requests that run at once; the others wait (default: 64, on a CUDA device 256; bench offline: all)",
    ),
    setting(
        "--max-prefill-length",
        "--chunked-prefill-size",
        help="tokens per step at most; longer prompts are split into chunks (default: 2048, on a CUDA device 8192)",
    ),
    hidden(
        "--max-step-ms",
        metavar="MS",
        help="target milliseconds of a step while rows decode; 0: no limit (default: 250 on a CPU, else 0)",
    ),
    hidden(
        "--checkpoint-interval",
        metavar="TOKENS",
        help="tokens between saved states of a sequence, for models with recurrent layers (default: 256)",
    ),
    hidden(
        "--state-memory",
        metavar="BYTES",
        help="bytes for saved recurrent states on the CPU engine (default: an eighth of the KV pool's)",
    ),
    setting(
        "--speculative",
        metavar="ngram:K|model:FILE[:K]|mtp",
        help="draft up to K tokens by n-grams or a small model (K: 4), or one by the model's MTP layer; answers stay "
        "the same (default: none)",
    ),
    setting(
        "--schedule-policy",
        help="waiting request to start: first come (fcfs), longest cached prefix (lpm), shortest prefill (srpf)",
    ),
    hidden(
        "--disable-overlap-schedule",
        action="store_true",
        default=False,
        help="schedule each step only after the previous one has ended",
    ),
    hidden(
        "--profile-steps",
        metavar="N",
        help="write Chrome traces of the first N steps to minisgl-profile-*.json in this folder; 0: none",
    ),
    setting(
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        type=checked(spellings.number_or_auto),
        metavar="N|auto",
        help="processes that share each layer (tensor parallelism); auto: as many as devices and model allow",
    ),
)
AB = (
    setting(
        "--cpu-backend",
        type=checked(spellings.cpu_backend),
        metavar="NAME",
        default=None,
        help="scheduler: python, rust_hotpath, rust_parts[:PART] (default: MINISGL_CPU_BACKEND, else rust_hotpath)",
    ),
    setting(
        "--shadow",
        help="run the other scheduler too, and compare its decisions (default: MINISGL_CPU_BACKEND_SHADOW)",
    ),
    setting(
        "--shadow-report",
        metavar="FILE",
        default=None,
        help="file of differences, for minisgl replay --report (default: MINISGL_CPU_BACKEND_SHADOW_REPORT)",
    ),
    setting(
        "--shadow-every-n",
        metavar="N",
        default=None,
        help="compare one step of N (default: MINISGL_CPU_BACKEND_SHADOW_EVERY_N, else 1)",
    ),
    setting(
        "--shadow-max-diffs",
        metavar="N",
        default=None,
        help="stop comparing after N differences (default: MINISGL_CPU_BACKEND_SHADOW_MAX_DIFFS, else 100)",
    ),
    setting(
        "--record-trace",
        metavar="FILE",
        help="file of all scheduler calls, with prompt tokens, for minisgl replay (default: none)",
    ),
)
ENGINE = {
    "model": MODEL,
    "CPU engine": CPU,
    "CUDA": CUDA,
    "KV cache": CACHE,
    "scheduling": STEPS,
    "scheduler: A/B, shadow and traces": AB,
}
"""Flags of every command that loads an engine: the fields of `EngineConfig`, by group title."""
HTTP = (
    setting("--host", help="address to listen on; 0.0.0.0: all interfaces"),
    setting("--port", help="port to listen on; 0: any free port"),
    setting(
        "--frontend",
        choices=("rust", "python"),
        default=None,
        help="HTTP front end: rust (a gateway) or python (default: MINISGL_FRONTEND, else rust if available)",
    ),
    setting("--served-model-name", help="model name in the API (default: --model; of a file or folder its base name)"),
    hidden("--any-model-name", help="accept any model name in requests; answers have the served one"),
    setting("--api-key", help="key for all routes but /livez and /readyz (default: MINISGL_API_KEY, else none)"),
    setting(
        "--api-key-file",
        metavar="FILE",
        help="YAML file of API keys, each with a name, a share of the engines, and limits (default: none)",
    ),
    hidden(
        "--lora-folder",
        metavar="DIR",
        help="folder below which adapters may be loaded over HTTP, by keys with `lora` (default: none)",
    ),
    hidden("--max-loras", help="adapters that may be loaded at once, including those of --lora"),
    hidden(
        "--state-dir",
        metavar="DIR",
        help="folder for uploaded files and batches; its readers can read the prompts (default: no batches)",
    ),
    hidden(
        "--state-quota",
        type=checked(spellings.size),
        metavar="SIZE",
        help="bytes of --state-dir for each API key at most, such as 500MiB (default: 4GiB)",
    ),
    setting(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        metavar="ORIGIN",
        help="origin of web pages that may use the server; *: any; repeatable (default: none)",
    ),
    setting(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help="host name for clients; *: any; repeatable (default: on loopback localhost and the address, else any)",
    ),
    setting(
        "--tool-call-parser",
        type=tool_call_parser,
        metavar="NAME",
        help="format of the model's tool calls; auto: by its chat template and tokenizer",
    ),
    setting(
        "--reasoning-parser",
        type=reasoning_parser,
        metavar="NAME",
        help="markers of reasoning, for reasoning_content; auto: by the chat template; none: it stays content",
    ),
    hidden(
        "--resumable",
        help="send marks with which another server can continue a stream; for servers behind a router only",
    ),
)
SEVERAL = (
    setting(
        "--dp",
        "--dp-size",
        "--data-parallel-size",
        type=checked(spellings.number_or_auto),
        metavar="N|auto",
        help="engine processes, each with the whole model (data parallelism); auto: as many as CUDA devices allow",
    ),
    setting(
        "--routing",
        type=spellings.routing,
        help="how a request gets its engine; cache_aware: longest cached prefix, unless that is much busier",
    ),
    setting(
        "--max-inflight",
        metavar="N",
        help="requests in all engines at once; others wait (default: no limit)",
    ),
    hidden(
        "--max-inflight-per-engine",
        metavar="N",
        help="requests in one engine at once (default: no limit; with API keys twice --max-running-requests)",
    ),
)
MODELS = (
    setting(
        "--models",
        metavar="FILE",
        help="YAML file of models that load on demand; or give --model several times (default: one model)",
    ),
    setting(
        "--models-dir", metavar="DIR", help="serve all GGUF files and model folders in it, by name (default: none)"
    ),
    hidden(
        "--load-timeout",
        type=Number(float, "load_timeout"),
        default=300.0,
        metavar="S",
        help="seconds that a request waits for its model to load; then 503",
    ),
)
LIMITS = (
    setting("--max-queued-requests", help="requests that may wait for their first step; beyond that 429"),
    hidden("--max-queued-tokens", help="prompt tokens that may wait for their first step; beyond that 429"),
    setting("--max-body-bytes", help="bytes of a request's body at most; beyond that 413"),
    hidden(
        "--max-encoding-bytes", help="bytes of large bodies that are parsed and encoded at once; others wait in order"
    ),
    hidden("--max-images", help="images of a conversation at most; notes replace the oldest ones beyond"),
    hidden("--max-image-pixels", help="pixels of an image at most; beyond that 400, before any is decoded"),
    hidden("--max-image-tokens", help="tokens that an image takes at most; larger ones are made smaller"),
    hidden(
        "--image-hosts",
        type=checked(spellings.image_hosts),
        metavar="HOST,HOST",
        help="hosts from which images are fetched by URL (default: none; requests have images as data URLs)",
    ),
    setting("--request-timeout", help="seconds for one request; then 504 (default: no limit)"),
    setting(
        "--slow-client-timeout",
        help="seconds for a client to read what was sent, or to send its request; then it is disconnected",
    ),
    hidden("--keep-alive-timeout", help="whole seconds that an idle connection stays open"),
    hidden(
        "--step-timeout",
        help="seconds of one forward at most; then /livez fails, and a hung rank of --tp ends the server",
    ),
    setting("--drain-timeout", help="seconds for open requests to end after SIGTERM"),
    hidden(
        "--adaptive-max-tokens",
        type=checked(adaptive_max_tokens),
        metavar="THRESHOLD:FACTOR",
        help="multiply default lengths by FACTOR while over THRESHOLD answers run, as 64:0.5 (default: never)",
    ),
    hidden(
        "--context-margin",
        metavar="N",
        help="tokens of the context that default answer lengths leave free",
    ),
    hidden(
        "--demo-load",
        help="let the server send itself a small demonstration load until it ends",
    ),
)
LOG_LEVEL = setting("--log-level", help="lowest level to log; debug: also what each step computes and sends")
LOGS = (
    LOG_LEVEL,
    setting("--log-format", help="text, or json: one object per line"),
    setting("--access-log", action=argparse.BooleanOptionalAction, help="log a line for each request"),
    hidden("--access-log-probes", help="log lines for /health, /livez, /readyz, /metrics and files of the page, too"),
    hidden("--metrics-aliases", help="vllm: /metrics also has the names that vLLM dashboards use"),
    setting("--log-prompts", help="include prompts and answers in the access lines"),
    hidden(
        "--receipt-key",
        metavar="FILE",
        help="file of the Ed25519 private key (PEM) that signs receipts of answers (default: not signed)",
    ),
)
SERVER = {"HTTP": HTTP, "several models": MODELS, "several engines": SEVERAL, "limits": LIMITS, "logs": LOGS}
"""Flags of `minisgl serve` only: the fields of `ServerConfig` and `Limits`, by group title."""


def command(commands: Commands, name: str, run: Callable[[argparse.Namespace], int], **how: Any) -> Parser:
    """Add the parser of a command. Its help shows defaults, and flags cannot be abbreviated."""
    parser = commands.add_parser(name, formatter_class=Formatter, **how)
    parser.set_defaults(run=run)
    return parser


def add_settings(
    parser: argparse.ArgumentParser, groups: Mapping[str, Iterable[Setting]], show: Collection[str] = ()
) -> None:
    """Add groups of settings to a parser. `show` has destinations of hidden flags that its `--help` shows."""
    for title, settings in groups.items():
        group = parser.add_argument_group(title)
        for row in settings:
            row.add_to(group, row.shown or row.dest in show, default=_DEFAULTS.get(row.dest))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument of `COMMAND MODEL`. A `--config` file sets the default of `--model` alone."""
    parser.add_argument("MODEL", nargs="?", action=_Model, default=argparse.SUPPRESS, help="the model, as with --model")


def notices(args: argparse.Namespace) -> list[str]:
    """Return a notice for each flag and variable without an effect. Raises `ConfigError` for an unsupported value."""
    return [*aliases.notices(args), *envs.notices()]


VARIABLES = {
    "cpu_backend": envs.CPU_BACKEND,
    "frontend": envs.FRONTEND,
    "api_key": envs.API_KEY,
    "shadow": envs.SHADOW,
    "shadow_report": envs.SHADOW_REPORT,
    "shadow_every_n": envs.SHADOW_EVERY_N,
    "shadow_max_diffs": envs.SHADOW_MAX_DIFFS,
    "faulty_control_plane": envs.FAULTY_CONTROL_PLANE,
}
"""Environment variables of flags, by the flag's destination."""


def sources(typed: Mapping[str, str], in_file: Mapping[str, str]) -> dict[str, str]:
    """Return, by destination, how each flag was set: as typed, else by a line of a file, else by a variable."""
    variables = {dest: f"{name}=" for dest, name in VARIABLES.items() if envs.set_variables([name])}
    return {**variables, **in_file, **{dest: f"{flag} " for dest, flag in typed.items()}}


def say(lines: Iterable[str], command: str) -> None:
    for line in lines:
        print(f"minisgl {command}: {line}", file=sys.stderr, flush=True)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Build the engine's configuration from flags, environment and defaults. Raises `ConfigError` or `EnvError`."""
    envs.check()
    fields = {name: getattr(args, name) for name in ENGINE_SETTINGS if hasattr(args, name)}
    fields["warm_prefixes"] = tuple(getattr(args, "warm_prefixes", None) or ())
    fields["lora"] = tuple(getattr(args, "lora", None) or ())
    fields["cache"] = spellings.CACHES.get(args.cache, args.cache)
    fields["cpu_backend"] = args.cpu_backend or envs.cpu_backend() or EngineConfig().cpu_backend
    fields["overlap"] = not (args.disable_overlap_schedule or envs.disable_overlap_scheduling())
    fields |= {name: value for name, value in envs.shadow().items() if not getattr(args, name, None)}
    fields["transport_stats"] = envs.transport_latency_stats()
    fields["faulty_control_plane"] = envs.faulty_control_plane()
    fields["step_delay_file"] = envs.step_delay_file()
    fields["echo_fail_steps"] = tuple(sorted(envs.echo_fail_steps()))
    fields["echo_states"] = envs.echo_states()
    return EngineConfig.of(fields)


def loaded(config: EngineConfig, **changes: Any) -> LLM:
    """Load the model of a command that needs no server. Raises `ConfigError`."""
    from minisgl.supervisor.start import check_files
    from minisgl.utils.memory import no_collections

    check_files(config)
    settings = {**msgspec.structs.asdict(config), **msgspec.structs.asdict(config.debug), **changes}
    del settings["debug"]
    with no_collections():
        from minisgl.llm import LLM

        return LLM(**settings)
