"""The command `minisgl generate PROMPT`, which prints one answer without a server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from minisgl.cli import aliases
from minisgl.cli.flags import ENGINE, LOG_LEVEL, Commands, add_settings, command, engine_config, loaded, say, setting
from minisgl.cli.narration import Narration
from minisgl.config import ConfigError
from minisgl.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minisgl.llm import RequestOutput


NARRATE = setting(
    "--narrate",
    action="store_true",
    default=False,
    help="log the answer's life step by step: ids, texts and times of tokens; steps do not overlap",
)


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(commands, "generate", run, help="one answer, without a server")
    parser.add_argument("prompt", help="a user message, or with --raw the text to complete")
    asked = parser.add_argument_group("prompt")
    asked.add_argument("--raw", action="store_true", help="complete the prompt as it is, without the chat template")
    asked.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="image before the prompt; with --raw, that of the next placeholder in it; may be repeated",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, help="generated tokens at most")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    sampling.add_argument("--top-p", type=float, default=1.0, help="sample from tokens of this total probability")
    sampling.add_argument("--top-k", type=int, default=-1, help="sample from this many most likely tokens; -1: all")
    sampling.add_argument("--sampling-seed", type=int, help="seed for repeatable answers (default: random)")
    add_settings(parser, {**ENGINE, "logs": (LOG_LEVEL, NARRATE)})
    return aliases.add_to(parser)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.sampling_seed,
    ).check()
    config = engine_config(args)
    say(aliases.notices(args), "generate")  # `LLM` itself warns about variables
    narration = Narration() if args.narrate else None
    changes: dict[str, Any] = {} if narration is None else narration.settings
    # no streaming while the log shows each step
    on_text = None if narration is not None or config.log_level == "debug" else _show
    try:
        args.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt: must be UTF-8 text: byte {error.start} is invalid") from error
    from minisgl.tokenizer import ChatTemplateError

    with loaded(config, **changes) as llm:
        try:
            if not args.raw and not llm.tokenizer.template_source():
                say(["this model has no chat template: the text is completed, as with --raw"], "generate")
                args.raw = True
            if narration is not None:
                narration.begin(llm)
            if args.raw:
                prompt = {"prompt": args.prompt, "images": args.image}
                output = llm.generate(prompt, params, progress=False, on_text=on_text)[0]
            else:
                images = [{"type": "image", "image": file} for file in args.image]
                text: Any = [*images, {"type": "text", "text": args.prompt}] if images else args.prompt
                message = {"role": "user", "content": text}
                output = llm.chat([message], params, progress=False, on_text=on_text)[0]
            if failure := output.outputs[0].error:
                raise ConfigError(failure)
            if narration is not None:
                narration.end()
            print(output.text if on_text is None else "", flush=True)
        except ChatTemplateError as error:
            raise ConfigError(f"{error}: --raw completes the text without it") from error
    return 0


def _show(output: RequestOutput, text: str) -> None:
    print(text, end="", flush=True)
