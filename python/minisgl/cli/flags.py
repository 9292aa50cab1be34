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
    Limits,
    ServerConfig,
)
from minisgl.extension import NEEDS, why_missing
from minisgl.utils import spellings

if TYPE_CHECKING:
    from minisgl.llm import LLM

T = TypeVar("T")
# what `add_subparsers` returns; a string, because the class takes no parameters while running
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
_ADAPTIVE = re.compile(r"([0-9]{1,9}):([0-9]*\.?[0-9]{1,6}|[0-9]+\.)")


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that adds the default to each flag, unless the default is None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return action.help
        if action.help is not None and " (default: " in action.help:  # a command or a file has one of its own
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
    found: dict[str, Any] = {}
    for struct in structs:
        fields = struct.__struct_fields__
        found |= dict(zip(fields[-len(struct.__struct_defaults__) :], struct.__struct_defaults__, strict=True))
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


_STRUCTS = (ServerConfig, Limits, DebugConfig, EngineConfig)
_DEFAULTS = _defaults(*_STRUCTS)
_FIELDS = {name: kind for struct in _STRUCTS for name, kind in get_type_hints(struct).items()}


def _of_field(name: str) -> dict[str, Any]:
    """Return argparse's arguments for the type of a field: a switch, a number or a choice; {} for other types."""
    kind: Any = _FIELDS.get(name)
    if get_origin(kind) in (Union, UnionType):
        *others, kind = (one for one in get_args(kind) if one is not NoneType)
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
    """Parse `THRESHOLD:FACTOR`. Raises `ConfigError`."""
    found = _ADAPTIVE.fullmatch(text)
    millionths = 0 if found is None else int(Decimal(found[2]) * 1_000_000)
    if found is None or not 0 < millionths <= 1_000_000:
        raise ConfigError(
            f"{text!r}: must be THRESHOLD:FACTOR, a number of answers and a number above 0 and at most 1 of at most 6 "
            'decimals, such as 64:0.5 (in a file in quotes: "64:0.5")'
        )
    return AdaptiveMaxTokens(int(found[1]), millionths)


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
                None, f"--model {given['flag']}: the model is given as {given['word']} already: give one of them"
            )
        namespace.model, namespace.model_given = values, given
        if option_string:
            namespace.each_model = [*getattr(namespace, "each_model", ()), values]


MODEL = (
    setting(
        "--model",
        "--model-path",
        action=_Model,
        help="a local folder, a GGUF file, smollm2 (embedded), or of a hub OWNER/REPO, OWNER/REPO:QUANT, "
        "OWNER/REPO/FILE.gguf, a page's address, or a short name such as qwen3:4b",
    ),
    setting(
        "--engine",
        help="auto: torch with a CUDA device, else cpu where it knows the model, else torch; echo: no model, exact; "
        "sim: no model, simulated step times",
    ),
    setting(
        "--model-impl",
        help="whose layers compute the model; native: minisgl's own, for the architectures of docs/features.md; "
        "transformers: those of the package transformers, on the torch engine; auto: native ones where they are known",
    ),
    hidden(
        "--sim-profile",
        metavar="NAME|FILE",
        help="step times of --engine sim: null (none), slow-motion, qwen3-0.6b-h200, qwen3-8b-h200, "
        "qwen3-32b-tp4-h200, or a file",
    ),
    hidden("--model-source", help="hub of a model's name; auto: Hugging Face, unless the name is an address"),
    setting("--revision", help="branch, tag or commit on the hub (default: its main branch)"),
    setting(
        "--tokenizer",
        "--tokenizer-path",
        metavar="FOLDER|ID",
        help="the tokenizer of another folder, GGUF file or hub id (default: the model's own)",
    ),
    setting("--load-format", help="dummy: seeded random weights"),
    hidden(
        "--generation-config",
        help="auto: what requests leave out is sampled as the model's generation_config.json says; none: without it",
    ),
    setting("--chat-template", metavar="FILE", help="a jinja file, or the template as text (default: the tokenizer's)"),
    setting(
        "--dtype",
        type=spellings.dtype,
        help="of the torch engine's weights and KV; auto: the checkpoint's, or float32 on a CPU that would emulate it",
    ),
    setting(
        "--device",
        type=checked(spellings.device),
        help="auto, cpu, cuda, or cuda:N",
    ),
    hidden("--seed", "--random-seed", help="of dummy weights"),
    setting(
        "--max-seq-len",
        "--max-model-len",
        "--context-length",
        help="limit of prompt + generated tokens (default: the model's context); rope_type dynamic: up to factor "
        "times that, all texts with the frequencies of this length",
    ),
)
CPU = (
    setting(
        "--activations",
        help="what a matrix is multiplied with; exact: float32; bf16: rounded to bfloat16, faster where the CPU has AMX"
        "; int8: with 4- and 8-bit weights rounded to 8 bits in blocks of 32, as in llama.cpp, fastest and least exact",
    ),
    setting(
        "--kv-dtype",
        type=spellings.kv_dtype,
        help="of the KV cache; q8: 8 bits in blocks of 32; q4: 4 bits of turned heads, which lose much in small models",
    ),
    setting(
        "--quantization",
        type=spellings.quantization,
        help="of weights that are not quantised, when they are loaded (default: as they are)",
    ),
    setting("--num-threads", help="compute threads, of torch, too (default: one a core)"),
)
CUDA = (
    setting(
        "--attention-backend",
        type=checked(spellings.attention_backend),
        metavar="NAME|PREFILL,DECODE",
        help=f"{', '.join(spellings.ATTENTION_BACKENDS)}, or two of them; auto: the fastest that is there, with its "
        "reason in the log",
    ),
    hidden(
        "--cuda-graph-max-bs",
        metavar="N",
        help="rows of the largest CUDA graph; 0: no graphs (default: 256, or --max-running-requests)",
    ),
    hidden("--torch-compile", help="compile the forwards outside of graphs"),
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
        help="share of the memory that is free after loading, for the KV pool (default: 0.5, on a CUDA device 0.85)",
    ),
    setting(
        "--memory",
        type=checked(spellings.size),
        metavar="SIZE",
        help="of a CPU's memory for weights and KV pool, such as 6GB; of several models for all of them, processes "
        "included (default: what is free, or a control group leaves)",
    ),
    setting(
        "--cache",
        "--cache-type",
        choices=("radix", "lru", "lfu", "naive"),
        help="prefix cache and its eviction order (radix is lru); naive: none",
    ),
    hidden(
        "--cache-token-budget",
        metavar="N",
        help="tokens that the cache keeps while no request uses them, pinned ones not counted (default: what fits)",
    ),
    hidden(
        "--cache-max-prompt", metavar="N", help="prompts of more tokens are not kept after their end (default: all are)"
    ),
    hidden(
        "--max-pinned-ratio",
        metavar="R",
        help="share of the pages that prefixes may pin; less if the longest request would not fit beside them",
    ),
    setting(
        "--cache-dir",
        metavar="DIR",
        help="a folder that keeps pages of the KV pool: what was computed once is read from there, by whatever serves "
        "the same model next; who can read it can read the prompts (default: none)",
    ),
    hidden(
        "--cache-size",
        type=checked(spellings.size),
        metavar="SIZE",
        help="what --cache-dir may hold, such as 500MiB: what was not used for longest goes (default: 20GiB)",
    ),
    hidden(
        "--weights-cache",
        type=checked(spellings.size),
        metavar="SIZE",
        help="what the CPU engine may keep of packed weights in MINISGL_CACHE, such as 20GiB: a model's next start "
        "maps them, and servers of one model share them; what was not used for longest goes (default: nothing is kept)",
    ),
    setting(
        "--warm-prefix",
        dest="warm_prefixes",
        action="append",
        type=checked(spellings.text_or_file),
        metavar="TEXT|@FILE",
        help="a prefix to compute before the server is ready, and to pin, or one that minisgl cache export made; may "
        "be given several times (default: none)",
    ),
    setting(
        "--lora",
        "--lora-modules",
        dest="lora",
        action="extend",
        nargs="+",
        type=checked(spellings.adapter),
        metavar="NAME=PATH",
        help="an adapter (a folder as peft saves it) that requests may name as their model; several may be given "
        "(default: none)",
    ),
)
STEPS = (
    setting(
        "--max-running-requests",
        help="requests computed at once; the others wait (default: 64, on a CUDA device 256; of bench offline: all)",
    ),
    setting(
        "--max-prefill-length",
        "--chunked-prefill-size",
        help="tokens that one step computes at most; longer prompts are cut into chunks (default: 2048, on a CUDA "
        "device 8192)",
    ),
    hidden(
        "--max-step-ms",
        metavar="MS",
        help="about how long a step takes while answers are written: it computes fewer tokens of prompts than "
        "--max-prefill-length, as measured; 0: any time (default: 250 on a CPU, 0 on other devices)",
    ),
    hidden(
        "--checkpoint-interval",
        metavar="TOKENS",
        help="of a model whose layers have states: a text saves its state as often, for others to begin with "
        "(default: 256)",
    ),
    hidden(
        "--state-memory",
        metavar="BYTES",
        help="of such a model on the CPU engine: memory for saved states (default: an eighth of the KV pool's)",
    ),
    setting(
        "--speculative",
        metavar="ngram:K|model:FILE[:K]",
        help="guess up to K tokens a row from the text so far and the prefix cache, and where these know nothing by a "
        "small model of the same vocabulary (K: 4), and compute them with it; answers stay the same (default: none)",
    ),
    setting(
        "--schedule-policy",
        help="which waiting request starts next: the first that came, that with the longest cached prefix (lpm), that "
        "with the shortest prefill (srpf); nobody is overtaken by more than 63 later ones, with srpf 1023 short ones "
        "(default: fcfs)",
    ),
    hidden(
        "--disable-overlap-schedule",
        action="store_true",
        default=False,
        help="schedule a step only after the one before it",
    ),
    hidden(
        "--profile-steps",
        metavar="N",
        help="write Chrome traces of the first N steps to minisgl-profile-*.json in the current folder (0: none)",
    ),
    setting(
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        type=checked(spellings.number_or_auto),
        metavar="N|auto",
        help="processes that share each layer (tensor parallelism); auto: as many as there are CUDA devices that the "
        "model can be cut for, a power of two; 1 on a CPU",
    ),
)
AB = (
    setting(
        "--cpu-backend",
        type=checked(spellings.cpu_backend),
        metavar="NAME",
        default=None,
        help="scheduler: python, rust_hotpath, rust_parts (that in Python with its parts in Rust) or "
        "rust_parts:radix,metadata (default: MINISGL_CPU_BACKEND, else rust_hotpath if the extension loads)",
    ),
    setting(
        "--shadow",
        help="let the other scheduler get the same calls, and compare its decisions; the first one serves (default: "
        "MINISGL_CPU_BACKEND_SHADOW)",
    ),
    setting(
        "--shadow-report",
        metavar="FILE",
        default=None,
        help="write each difference with the calls before it, for minisgl replay --report (default: "
        "MINISGL_CPU_BACKEND_SHADOW_REPORT, else none)",
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
        help="end the comparison after N differences (default: MINISGL_CPU_BACKEND_SHADOW_MAX_DIFFS, else 100)",
    ),
    setting(
        "--record-trace",
        metavar="FILE",
        help="write every call of the scheduler, for minisgl replay; the file has the prompts' tokens (default: none)",
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
"""The flags of every command that loads an engine: the fields of `EngineConfig`, by the titles of their groups."""
HTTP = (
    setting("--host", help="address to listen on; 0.0.0.0: every interface"),
    setting("--port", help="0: any free port"),
    setting(
        "--frontend",
        choices=("rust", "python"),
        default=None,
        help="who owns the port; rust: a gateway, which answers usual requests by itself and passes on the others "
        "(default: MINISGL_FRONTEND, else rust if the extension loads)",
    ),
    setting("--served-model-name", help="the name clients ask for (default: --model; of a file or folder its name)"),
    hidden("--any-model-name", help="requests may ask for any name; answers say the served one"),
    setting("--api-key", help="clients must show it, but for /livez and /readyz (default: MINISGL_API_KEY, else none)"),
    setting(
        "--api-key-file",
        metavar="FILE",
        help="YAML file of several API keys, each with a name, a share of the engines and limits (default: none)",
    ),
    hidden(
        "--lora-folder",
        metavar="DIR",
        help="adapters below this folder may be loaded over HTTP; by keys with `lora` (default: none may)",
    ),
    hidden("--max-loras", help="adapters at once, those of --lora among them"),
    hidden(
        "--state-dir",
        metavar="DIR",
        help="a folder for uploaded files and batches (/v1/files, /v1/batches), which go on after a restart; who can "
        "read it can read the prompts (default: none, and no batches)",
    ),
    hidden(
        "--state-quota",
        type=checked(spellings.size),
        metavar="SIZE",
        help="what the files of one API key may take of --state-dir, such as 500MiB (default: 4GiB)",
    ),
    setting(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        metavar="ORIGIN",
        help="a web page from there may use the server, *: any; may be given several times (default: none)",
    ),
    setting(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help="clients may call the server by this name, *: by any; may be given several times (default: on loopback "
        "only localhost and the address, else any)",
    ),
    setting(
        "--tool-call-parser",
        type=tool_call_parser,
        metavar="NAME",
        help="the format in which the model writes calls of tools; auto: as its chat template and tokenizer have it",
    ),
    setting(
        "--reasoning-parser",
        type=reasoning_parser,
        metavar="NAME",
        help="the markers around what the model thinks before it answers, which becomes reasoning_content; auto: those "
        "of its chat template; none: it is content",
    ),
    hidden(
        "--resumable",
        help="for a server that only a router reaches: streams tell it what another server needs to go on with them, "
        "and the Python front end answers",
    ),
)
SEVERAL = (
    setting(
        "--dp",
        "--dp-size",
        "--data-parallel-size",
        type=checked(spellings.number_or_auto),
        metavar="N|auto",
        help="engine processes, each with the whole model, or with --tp that many devices; one that dies is started "
        "again, and its requests go on in another; auto: as many as there are CUDA devices for",
    ),
    setting(
        "--routing",
        type=spellings.routing,
        help="which engine gets a request; cache_aware: whose prefix cache has the most of its prompt, unless it is "
        "much busier than others; short: rr, fsfs (least_load)",
    ),
    setting(
        "--max-inflight",
        metavar="N",
        help="requests that all engines together have at once; others wait (default: any number)",
    ),
    hidden(
        "--max-inflight-per-engine",
        metavar="N",
        help="requests that one engine has at once; others wait (default: any number; with --api-key-file twice "
        "--max-running-requests)",
    ),
)
MODELS = (
    setting(
        "--models",
        metavar="FILE",
        help="YAML file of several models behind this port, each loaded when a request asks for it; --model A --model "
        "B: the same without a file (default: one model)",
    ),
    setting(
        "--models-dir", metavar="DIR", help="all GGUF files and model folders in it, by their names (default: none)"
    ),
    hidden(
        "--load-timeout",
        type=Number(float, "load_timeout"),
        default=300.0,
        metavar="S",
        help="seconds that a request waits for its model to be loaded, then 503",
    ),
)
LIMITS = (
    setting("--max-queued-requests", help="answers that may wait for their first step; beyond it 429"),
    hidden("--max-queued-tokens", help="prompt tokens that may wait for their first step; beyond it 429"),
    setting("--max-body-bytes", help="beyond it 413"),
    hidden(
        "--max-encoding-bytes", help="of large bodies that are read, parsed and encoded at once; others wait, in order"
    ),
    setting("--request-timeout", help="seconds for one request; then 504 (default: none)"),
    setting(
        "--slow-client-timeout",
        help="seconds that a client may take to read what is sent of its stream, or to send its request",
    ),
    hidden("--keep-alive-timeout", help="whole seconds that a connection without a request stays open"),
    hidden(
        "--step-timeout",
        help="seconds that one forward may take before /livez says no; a rank of --tp that hangs for longer ends the "
        "server",
    ),
    setting("--drain-timeout", help="seconds that open requests have to end after SIGTERM"),
    hidden(
        "--adaptive-max-tokens",
        type=checked(adaptive_max_tokens),
        metavar="THRESHOLD:FACTOR",
        help="while more than THRESHOLD answers are in flight, the length of an answer whose request names none is "
        "FACTOR of what it is else, such as 64:0.5 (default: never)",
    ),
    hidden(
        "--context-margin",
        metavar="N",
        help="tokens of the context that an answer leaves free if its request names no length",
    ),
    hidden(
        "--demo-load",
        help="let the server send itself a small load until it ends (chats, shared prefixes, long prompts, bursts), to "
        "watch what it does",
    ),
)
LOG_LEVEL = setting("--log-level", help="what to tell, and worse; debug: what each step computes and sends")
LOGS = (
    LOG_LEVEL,
    setting("--log-format", help="json: an object a line"),
    setting("--access-log", action=argparse.BooleanOptionalAction, help="a line for each request"),
    hidden("--access-log-probes", help="a line for each /health, /livez, /readyz, /metrics and file of the page, too"),
    hidden("--metrics-aliases", help="vllm: /metrics also has the names that dashboards for vLLM ask for"),
    setting("--log-prompts", help="prompts and answers in the access lines"),
    hidden(
        "--receipt-key",
        metavar="FILE",
        help="private key (Ed25519, PEM) that signs the receipts of answers (default: they are not signed)",
    ),
)
SERVER = {"HTTP": HTTP, "several models": MODELS, "several engines": SEVERAL, "limits": LIMITS, "logs": LOGS}
"""The flags of `minisgl serve` alone: the fields of `ServerConfig` and `Limits`."""


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
        for one in settings:
            one.add_to(group, one.shown or one.dest in show, default=_DEFAULTS.get(one.dest))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument of `COMMAND MODEL`. A `--config` file sets the default of `--model` alone."""
    parser.add_argument("MODEL", nargs="?", action=_Model, default=argparse.SUPPRESS, help="the model, as with --model")


def notices(args: argparse.Namespace) -> list[str]:
    """Return a notice for each flag and variable without an effect. Raises `ConfigError` for an unsupported value."""
    return [*aliases.said(args), *envs.notices()]


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
"""The variable of each flag that has one."""


def sources(typed: Mapping[str, str], in_file: Mapping[str, str]) -> dict[str, str]:
    """Return, by destination, how each flag was set: as typed, else by a line of a file, else by a variable."""
    variables = {dest: f"{name}=" for dest, name in VARIABLES.items() if envs.set_of([name])}
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

    check_files(config)
    from minisgl.llm import LLM  # imports torch

    settings = {**msgspec.structs.asdict(config), **msgspec.structs.asdict(config.debug), **changes}
    del settings["debug"]
    return LLM(**settings)
