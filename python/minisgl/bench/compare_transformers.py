"""transformers' `generate` as a variant of `minisgl bench compare`: a program of its own, run by whatever interpreter
has the package. Arguments: model folder, dtype, threads, `whole` or `stream`.

A line of JSON comes in ({"prompts": [...], "num_out": n}), a line goes out (times in seconds, tokens). `whole`: one
call for all prompts, padded on the left; nothing is there before the end. `stream`: a TextIteratorStreamer, one prompt.

Exactly `num_out` tokens each, greedy; the first line says that the model is loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import Any


class Model:
    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(threads)
        kind = self._transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(folder, dtype=getattr(self._torch, dtype)).eval()
        self._tokenizer = self._transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self.version = str(self._transformers.__version__)

    def generate(self, prompts: list[str], num_out: int, streamer: Any = None) -> tuple[int, int]:
        """Tokens in and out."""
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True)
        with self._torch.inference_mode():
            out = self._model.generate(
                **batch,
                min_new_tokens=num_out,
                max_new_tokens=num_out,
                do_sample=False,
                pad_token_id=self._tokenizer.pad_token_id,
                streamer=streamer,
            )
        width = batch["input_ids"].shape[1]
        return int(batch["attention_mask"].sum()), int((out.shape[1] - width) * len(prompts))

    def stream(self, prompt: str, num_out: int) -> tuple[float | None, int, int]:
        """When the first text was there (None: there was none), tokens in and out."""
        streamer = self._transformers.TextIteratorStreamer(self._tokenizer, skip_prompt=True)
        counted: list[tuple[int, int]] = []
        worker = threading.Thread(target=lambda: counted.append(self.generate([prompt], num_out, streamer)))
        worker.start()
        first = None
        for text in streamer:
            if text and first is None:
                first = time.perf_counter()
        worker.join()
        return first, *counted[0]


def main() -> int:
    folder, dtype, threads, how = sys.argv[1:5]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    model = Model(folder, dtype, int(threads))
    print(json.dumps({"version": model.version}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        first = None
        if how == "stream":
            first, num_in, num_out = model.stream(asked["prompts"][0], asked["num_out"])
        else:
            num_in, num_out = model.generate(asked["prompts"], asked["num_out"])
        answer = {
            "total_s": time.perf_counter() - began,
            "first_s": None if first is None else first - began,
            "num_in": num_in,
            "num_out": num_out,
        }
        print(json.dumps(answer), file=out, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's exit handlers may wait for threads that nobody needs any more
