"""The command `minisgl verify RECEIPT.json --model M`, which checks an answer against its receipt."""

from __future__ import annotations

import argparse

from minisgl.cli.flags import Commands, command


def add_parser(commands: Commands) -> None:
    parser = command(
        commands,
        "verify",
        _run,
        help="whether an answer is what its receipt says",
        description="Compute the answer of a receipt once more: alone, with nothing cached. Exit code 0: it is the "
        "same, bit for bit; 1: it is not, and what differs; 2: something is missing or wrong.",
    )
    parser.add_argument("receipt", metavar="RECEIPT.json", help="the field `receipt` of an answer, or the answer")
    parser.add_argument("--prompt", metavar="FILE", required=True, help="the request's body in JSON, or a text")
    parser.add_argument(
        "--answer",
        metavar="FILE",
        help="the answer's text, or its token ids in JSON: says where it first differs, and by how much",
    )
    parser.add_argument("--lora", metavar="FOLDER", help="the adapter that answered")
    parser.add_argument("--index", type=int, default=0, metavar="N", help="which choice of an answer")
    parser.add_argument("--signer", metavar="KEY", help="it must be signed by this public key (base64)")
    parser.add_argument("--model", required=True, help="the model that answered: a folder, a GGUF file, an id, smollm2")


def _run(args: argparse.Namespace) -> int:
    from minisgl.cli import verify_run  # imports numpy

    return verify_run.run(args)
