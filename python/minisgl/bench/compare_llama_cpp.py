"""The llama.cpp server as a variant of `minisgl bench compare`: a separate program, run by an interpreter that has the
package xllamacpp. Arguments: GGUF file, threads, sequences at once, tokens of each, and the file of a vision tower.

The first line of stdout is JSON with its address; it ends with its standard input.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any


def main() -> None:
    file, threads, parallel, length = sys.argv[1], *map(int, sys.argv[2:5])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its log goes to stderr
    package: Any = importlib.import_module("xllamacpp")
    params = package.CommonParams()
    params.model.path = file
    params.mmproj.path, params.mmproj_use_gpu = "".join(sys.argv[5:]), False
    params.n_ctx, params.n_parallel, params.warmup = parallel * length, parallel, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    server = package.Server(params)
    ready = {"url": server.listening_address, "version": importlib.metadata.version("xllamacpp")}
    print(json.dumps(ready), file=out, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
