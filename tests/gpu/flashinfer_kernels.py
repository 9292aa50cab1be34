"""FlashInfer's kernels that tests/gpu and benchmark/gpu use, compiled ahead: `python tests/gpu/flashinfer_kernels.py`.

FlashInfer compiles a module when it is first used, one after the other; here ninja has the sources of all at once. It
needs nvcc and no GPU, so it can run on another machine, whose result travels: `--save FILE` packs what is compiled, and
`--take FILE` puts such a file where FlashInfer looks before it compiles.

A module that does not compile is named, and the others are made.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import torch

_HEADS = ((64, False), (64, True), (128, False))  # values of a head, whether a window limits what it attends to
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def specs(fa3: bool) -> dict[str, Any]:
    """Name -> FlashInfer's description of the module."""
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.sampling import gen_sampling_module

    found: dict[str, Any] = {"sampling": gen_sampling_module()}
    for dtype_name, dtype in _DTYPES.items():
        for dim, window in _HEADS:
            name = f"{dtype_name} heads of {dim}{' window' if window else ''}"
            types = (dtype, dtype, dtype, torch.int32, dim, dim, 0, window, False)
            found[f"decode {name}"] = gen_batch_decode_module(*types)
            found[f"fa2 {name}"] = gen_batch_prefill_module("fa2", *types, False)
            if fa3 and dtype_name == "bf16" and dim == 128:
                found[f"fa3 {name}"] = gen_batch_prefill_module("fa3", *types, False)
    return found


def build(wanted: dict[str, Any]) -> list[str]:
    """Compile what is not there. The names of those that could not be."""
    from flashinfer.jit.core import build_jit_specs

    missing = {name: spec for name, spec in wanted.items() if not spec.is_compiled}
    print(f"{len(wanted)} modules, {len(wanted) - len(missing)} there", flush=True)
    began = time.monotonic()
    try:
        build_jit_specs(list(missing.values()))
    except RuntimeError as error:
        print(f"all at once: {str(error)[-2000:]}", flush=True)
    failed = []
    for name, spec in missing.items():
        try:
            spec.build(verbose=False)
        except RuntimeError as error:
            failed.append(name)
            print(f"{name}: FAILED: {str(error)[-2000:]}", flush=True)
    print(
        f"{len(missing) - len(failed)} compiled in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True
    )
    for name, spec in wanted.items():
        if name not in failed:
            print(f"  {name}: {spec.get_library_path().stat().st_size // 1024} KiB", flush=True)
    return failed


def save(wanted: dict[str, Any], file: Path) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for spec in wanted.values():
            if spec.is_compiled:
                archive.add(spec.get_library_path(), f"{spec.name}/{spec.name}.so")
    print(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB", flush=True)


def take(file: Path) -> None:
    from flashinfer.jit.env import FLASHINFER_AOT_DIR

    with tarfile.open(file) as archive:
        archive.extractall(FLASHINFER_AOT_DIR, filter="data")
        print(f"{len(archive.getnames())} modules taken from {file.name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-fa3", action="store_true", help="without the kernels for Hopper, which take longest")
    parser.add_argument("--save", type=Path, metavar="FILE", help="a .tar.gz of what is compiled")
    parser.add_argument("--take", type=Path, metavar="FILE", help="put what --save packed where FlashInfer finds it")
    args = parser.parse_args()
    if args.take:
        take(args.take)
    wanted = specs(fa3=not args.no_fa3)
    failed = build(wanted)
    if args.save:
        save(wanted, args.save)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
