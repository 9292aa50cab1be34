"""Flags of the commands that load an engine, and from flags to `EngineConfig`.

Invariants: raw arguments become one immutable configuration here and nowhere else; a flag's destination is the name of
the field it sets, and its default is the field's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar, get_args

from minisgl import envs
from minisgl.cli import aliases
from minisgl.config import ENGINE_SETTINGS, MODEL_SMOLLM2, ConfigError, EngineConfig, ModelImpl
from minisgl.utils import spellings

T = TypeVar("T")
TP_HELP = "processes that share each layer (tensor parallelism)"
# what `add_subparsers` returns; a string, because the class takes no parameters while running
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where None means that it depends."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def _default(name: str) -> Any:
    return EngineConfig.__struct_defaults__[EngineConfig.__struct_fields__.index(name)]


def checked(convert: Callable[[str], T]) -> Callable[[str], T]:
    """A flag's type from a function that raises `ConfigError`."""

    def value(text: str) -> T:
        try:
            return convert(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def notices(args: argparse.Namespace) -> list[str]:
    """A line for each flag and variable without an effect. Raises `ConfigError` for one that cannot be."""
    return [*aliases.said(args), *envs.notices()]


def say(lines: Iterable[str], command: str) -> None:
    for line in lines:
        print(f"minisgl {command}: {line}", file=sys.stderr, flush=True)


def add_log_level(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-level",
        choices=("error", "warning", "info", "debug"),
        default=_default("log_level"),
        help="what to tell, and worse; debug: what each step computes and sends",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags behind `EngineConfig`, by their usual names; the destinations are its field names."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        "--model-path",
        default=MODEL_SMOLLM2,
        help="a local folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B, or smollm2 (embedded)",
    )
    model.add_argument(
        "--engine",
        choices=("auto", "cpu", "torch", "echo", "sim"),
        default=_default("engine"),
        help="auto: torch with a CUDA device, else cpu where it knows the model, else torch; echo: no model, exact; "
        "sim: no model, simulated step times",
    )
    model.add_argument(
        "--model-impl",
        choices=get_args(ModelImpl),
        default=_default("model_impl"),
        help="whose layers compute the model; native: minisgl's, which know few architectures; transformers: those of "
        "the package transformers, on the torch engine; auto: native ones where they are known",
    )
    model.add_argument(
        "--sim-profile",
        metavar="NAME|FILE",
        default=_default("sim_profile"),
        help="step times of --engine sim: null (none), qwen3-0.6b-h200, qwen3-8b-h200, qwen3-32b-tp4-h200, or a file",
    )
    model.add_argument(
        "--model-source",
        choices=("auto", "huggingface", "modelscope"),
        default="auto",
        help="hub of a model id; auto: Hugging Face, then ModelScope if it is installed",
    )
    model.add_argument("--revision", help="branch, tag or commit on the hub (default: its main branch)")
    model.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: seeded random weights")
    model.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default=_default("generation_config"),
        help="auto: what requests leave out is sampled as the model's generation_config.json says; none: without it",
    )
    model.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a jinja file, or the template as text (default: the tokenizer's)",
    )
    model.add_argument(
        "--dtype",
        type=spellings.dtype,
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the torch engine's weights and KV; auto: the checkpoint's, or float32 on a CPU that would emulate it",
    )
    model.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:N, or mps (torch on an Apple GPU; unseen)"
    )
    model.add_argument("--seed", "--random-seed", type=int, default=0, help="of dummy weights")
    model.add_argument(
        "--max-seq-len",
        "--max-model-len",
        "--context-length",
        type=int,
        help="limit of prompt + generated tokens (default: the model's context); rope_type dynamic: up to factor "
        "times that, all texts with the frequencies of this length",
    )
    cpu = parser.add_argument_group("CPU engine")
    cpu.add_argument(
        "--activations",
        choices=("exact", "bf16", "int8"),
        default=_default("activations"),
        help="what a matrix is multiplied with; exact: float32; bf16: rounded to bfloat16, faster where the CPU has AMX"
        "; int8: with 4- and 8-bit weights rounded to 8 bits in blocks of 32, as in llama.cpp, fastest and least exact",
    )
    cpu.add_argument(
        "--kv-dtype",
        type=spellings.kv_dtype,
        choices=("f16", "f32", "q8"),
        default=_default("kv_dtype"),
        help="of the KV cache; q8: 8 bits in blocks of 32",
    )
    cpu.add_argument(
        "--quantization",
        type=spellings.quantization,
        choices=("q8", "q4"),
        help="of weights that are not quantised, when they are loaded (default: as they are)",
    )
    cpu.add_argument("--num-threads", type=int, help="compute threads, of torch, too (default: one a core)")
    cuda = parser.add_argument_group("CUDA")
    cuda.add_argument(
        "--attention-backend",
        type=checked(spellings.attention_backend),
        metavar="NAME|PREFILL,DECODE",
        default=_default("attention_backend"),
        help=f"{', '.join(spellings.ATTENTION_BACKENDS)}, or two of them; auto: the fastest that is there, with its "
        "reason in the log",
    )
    cuda.add_argument(
        "--cuda-graph-max-bs",
        type=int,
        metavar="N",
        help="rows of the largest CUDA graph; 0: no graphs (default: 256, or --max-running-requests)",
    )
    cuda.add_argument("--torch-compile", action="store_true", help="compile the forwards outside of graphs")
    memory = parser.add_argument_group("KV cache")
    memory.add_argument("--page-size", type=int, default=_default("page_size"), help="tokens per page")
    memory.add_argument("--num-pages", type=int, help="pages of the KV pool (default: from --memory-ratio)")
    memory.add_argument(
        "--memory-ratio",
        "--mem-fraction",
        "--mem-fraction-static",
        type=float,
        default=_default("memory_ratio"),
        help="share of the memory that is free after loading, for the KV pool (default: 0.5, on a CUDA device 0.85)",
    )
    memory.add_argument(
        "--cache",
        "--cache-type",
        choices=("radix", "lru", "lfu", "naive"),
        default=_default("cache"),
        help="prefix cache and its eviction order (radix is lru); naive: none",
    )
    memory.add_argument(
        "--cache-token-budget",
        type=int,
        metavar="N",
        help="tokens that the cache keeps while no request uses them, pinned ones not counted (default: what fits)",
    )
    memory.add_argument(
        "--cache-max-prompt",
        type=int,
        metavar="N",
        help="prompts of more tokens are not kept after their end (default: all are)",
    )
    memory.add_argument(
        "--max-pinned-ratio",
        type=float,
        metavar="R",
        default=_default("max_pinned_ratio"),
        help="share of the pages that prefixes may pin; less if the longest request would not fit beside them",
    )
    memory.add_argument(
        "--warm-prefix",
        dest="warm_prefixes",
        action="append",
        type=checked(spellings.text_or_file),
        metavar="TEXT|@FILE",
        help="a prefix to compute before the server is ready, and to pin; may be given several times (default: none)",
    )
    memory.add_argument(
        "--lora",
        "--lora-modules",
        dest="lora",
        action="extend",
        nargs="+",
        type=checked(spellings.adapter),
        metavar="NAME=PATH",
        help="an adapter (a folder as peft saves it) that requests may name as their model; several may be given "
        "(default: none)",
    )
    steps = parser.add_argument_group("scheduling")
    steps.add_argument(
        "--max-running-requests",
        type=int,
        default=_default("max_running_requests"),
        help="requests computed at once; the others wait",
    )
    steps.add_argument(
        "--max-prefill-length",
        "--chunked-prefill-size",
        type=int,
        default=_default("max_prefill_length"),
        help="tokens that one step computes at most; longer prompts are cut into chunks",
    )
    steps.add_argument(
        "--speculative",
        metavar="ngram:K",
        help="guess up to K tokens a row from the text so far and the prefix cache, and compute them with it; answers "
        "stay the same (default: none)",
    )
    steps.add_argument(
        "--cpu-backend",
        choices=("python", "rust_hotpath"),
        help="scheduler (default: MINISGL_CPU_BACKEND, else rust_hotpath if the extension loads)",
    )
    steps.add_argument(
        "--disable-overlap-schedule", action="store_true", help="schedule a step only after the one before it"
    )
    steps.add_argument(
        "--record-trace",
        metavar="FILE",
        help="write every call of the scheduler, for minisgl replay (default: none)",
    )
    steps.add_argument(
        "--profile-steps",
        type=int,
        metavar="N",
        default=0,
        help="write Chrome traces of the first N steps to minisgl-profile-*.json in the current folder (0: none)",
    )
    steps.add_argument("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=_default("tp"), help=TP_HELP)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Resolve flags, then environment, then defaults. Raises `ConfigError`, `EnvError`."""
    fields = {name: getattr(args, name) for name in ENGINE_SETTINGS if hasattr(args, name)}
    fields["warm_prefixes"] = tuple(getattr(args, "warm_prefixes", None) or ())
    fields["lora"] = tuple(getattr(args, "lora", None) or ())
    fields["cache"] = spellings.CACHES.get(args.cache, args.cache)
    fields["cpu_backend"] = args.cpu_backend or envs.cpu_backend() or _default("cpu_backend")
    fields["overlap"] = not (args.disable_overlap_schedule or envs.disable_overlap_scheduling())
    fields |= envs.shadow()
    fields["transport_stats"] = envs.transport_latency_stats()
    fields["faulty_control_plane"] = envs.faulty_control_plane()
    fields["echo_fail_steps"] = tuple(sorted(envs.echo_fail_steps()))
    return EngineConfig.of(fields)
