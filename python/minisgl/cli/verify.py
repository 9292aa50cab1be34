"""The command `minisgl verify RECEIPT.json --model M`, which checks an answer against its receipt."""

from __future__ import annotations

import argparse

from minisgl.cli.flags import Commands, command
from minisgl.cli.parser import Number
from minisgl.config import ImageLimits


def add_parser(commands: Commands) -> None:
    parser = command(
        commands,
        "verify",
        _run,
        help="whether an answer is what its receipt says",
        description="Compute the answer of a receipt once more: alone, with nothing cached. Exit code 0: it is the "
        "same, bit for bit; 1: it is not, and what differs; 2: something is missing or wrong.",
    )
    parser.add_argument("receipt", metavar="RECEIPT.json", help="the field `receipt` of a response, or the response")
    parser.add_argument("--prompt", metavar="FILE", required=True, help="the request's body (JSON), or a text")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="image of the prompt, once for each in order; without it those in the body",
    )
    for name in ("max_images", "max_image_tokens"):
        flag, default = f"--{name.replace('_', '-')}", getattr(ImageLimits(), name)
        parser.add_argument(flag, type=Number(int, name), default=default, metavar="N", help="that of the server")
    parser.add_argument(
        "--answer",
        metavar="FILE",
        help="file with the answer's text or token ids (JSON), to show where it differs and by how much",
    )
    parser.add_argument("--lora", metavar="FOLDER", help="folder of the adapter that answered")
    parser.add_argument("--index", type=int, default=0, metavar="N", help="index of the choice in a response")
    parser.add_argument("--signer", metavar="KEY", help="public key (base64) that must have signed the receipt")
    parser.add_argument("--model", required=True, help="the answer's model: a folder, GGUF file, hub id, or smollm2")
    parser.add_argument("--mmproj", metavar="FILE", help="that of the server")


def _run(args: argparse.Namespace) -> int:
    from minisgl.cli import verify_run  # imports numpy

    return verify_run.run(args)
