"""The command line: `minisgl serve|generate|doctor`, and `minisgl --model X` for serve.

Keeps true: raw arguments become one immutable configuration here and nowhere else; every bad setting ends with one line
that says what to change and exit code 2; importing this module brings no torch.
Doesn't know: how anything is served or computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl import envs
from minisgl.config import MODEL_SMOLLM2, ConfigError, EngineConfig, ServerConfig
from minisgl.sampling_params import ParamError, SamplingParams


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where None means that it depends."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def _default(name: str) -> Any:
    return EngineConfig.__struct_defaults__[EngineConfig.__struct_fields__.index(name)]


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags behind `EngineConfig`, by their usual names; the destinations are its field names."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        "--model-path",
        default=MODEL_SMOLLM2,
        help="a local folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B, or smollm2 (embedded)",
    )
    model.add_argument("--engine", choices=("torch", "echo"), default=_default("engine"), help="echo: no model, exact")
    model.add_argument("--model-source", choices=("auto", "huggingface", "modelscope"), default="auto")
    model.add_argument("--revision", help="branch, tag or commit on the hub")
    model.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: seeded random weights")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    model.add_argument("--device", default="auto", help="auto, cpu or cuda")
    model.add_argument("--seed", "--random-seed", type=int, default=0, help="of dummy weights")
    model.add_argument(
        "--max-seq-len",
        "--max-model-len",
        "--context-length",
        type=int,
        help="limit of prompt + generated tokens (default: the model's context)",
    )
    memory = parser.add_argument_group("KV cache")
    memory.add_argument("--page-size", type=int, default=_default("page_size"), help="tokens per page")
    memory.add_argument("--num-pages", type=int, help="pages of the KV pool (default: from --memory-ratio)")
    memory.add_argument(
        "--memory-ratio", "--mem-fraction-static", type=float, default=_default("memory_ratio"), help="for the KV pool"
    )
    memory.add_argument(
        "--cache",
        "--cache-type",
        choices=("radix", "lru", "lfu", "naive"),
        default=_default("cache"),
        help="prefix cache and its eviction order (radix is lru); naive: none",
    )
    steps = parser.add_argument_group("scheduling")
    steps.add_argument("--max-running-requests", type=int, default=_default("max_running_requests"))
    steps.add_argument(
        "--max-prefill-length",
        "--chunked-prefill-size",
        type=int,
        default=_default("max_prefill_length"),
        help="token budget of a step",
    )
    steps.add_argument("--cpu-backend", choices=("python", "rust_hotpath"), help="control plane (default: python)")
    steps.add_argument(
        "--disable-overlap-schedule", action="store_true", help="schedule a step only after the one before it"
    )
    steps.add_argument("--num-threads", type=int, help="compute threads (default: torch decides)")
    steps.add_argument("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=1, help="only 1 so far")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Resolve flags, then environment, then defaults. Raises `ConfigError`, `EnvError`."""
    if args.tp != 1:
        raise ConfigError(f"--tp {args.tp}: tensor parallelism is not in this version: use --tp 1")
    fields = {name: getattr(args, name) for name in EngineConfig.__struct_fields__ if hasattr(args, name)}
    fields["cache"] = "lru" if args.cache == "radix" else args.cache
    fields["cpu_backend"] = args.cpu_backend or envs.cpu_backend() or _default("cpu_backend")
    fields["overlap"] = not (args.disable_overlap_schedule or envs.disable_overlap_scheduling())
    return EngineConfig(**fields).check()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minisgl", description="A compact LLM inference server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the OpenAI-compatible server", formatter_class=_Formatter)
    http = serve.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1")
    http.add_argument("--port", type=int, default=1919, help="0: any free port")
    http.add_argument("--served-model-name", help="the name clients ask for (default: the value of --model)")
    add_engine_arguments(serve)

    generate = commands.add_parser("generate", help="one answer, without a server", formatter_class=_Formatter)
    generate.add_argument("prompt")
    generate.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=-1)
    generate.add_argument("--sampling-seed", type=int)
    add_engine_arguments(generate)

    commands.add_parser("doctor", help="what is installed, what works here, and why not", add_help=False)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from minisgl.supervisor import run_server

    config = ServerConfig(
        engine=engine_config(args), host=args.host, port=args.port, served_model_name=args.served_model_name
    )
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port {config.port}: must be between 0 and 65535")
    return run_server(config)


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.sampling_seed,
    ).check()
    config = engine_config(args)
    from minisgl.llm import LLM  # imports torch

    settings = msgspec.structs.asdict(config)
    with LLM(settings.pop("model"), **settings) as llm:
        if args.raw:
            output = llm.generate(args.prompt, params, progress=False)[0]
        else:
            output = llm.chat([{"role": "user", "content": args.prompt}], params, progress=False)[0]
    if error := output.outputs[0].error:
        raise ConfigError(error)
    print(output.text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        arguments.insert(0, "serve")
    if arguments[:1] == ["doctor"]:
        from minisgl import doctor

        return int(doctor.main(arguments[1:]))
    args = _parser().parse_args(arguments)
    try:
        return _serve(args) if args.command == "serve" else _generate(args)
    except (ConfigError, envs.EnvError, ParamError) as error:
        print(f"minisgl {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
