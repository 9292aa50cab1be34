"""The `generate` of transformers as a variant of `minisgl bench compare`: a separate program, run by an interpreter
that has the package. Arguments: model folder, dtype, threads, `whole` or `stream`.

Each input line is JSON ({"prompts": [...], "num_out": n}); so is its output line (times in seconds, token counts).
`whole`: one call for all prompts, padded on the left, without output before the end. `stream`: one prompt with a
TextIteratorStreamer. Each prompt gets exactly `num_out` tokens. {"answer": prompt, "num_out": n} returns the text, up
to where the model ends it.
Decoding is greedy; the first output line says that the model is loaded.
"""

from __future__ import annotations

import importlib
import itertools
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
        """Generate, and return the numbers of prompt and output tokens."""
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True)
        out = self._run(batch, num_out, min_new_tokens=num_out, streamer=streamer)
        return int(batch["attention_mask"].sum()), int(out.shape[1] * len(prompts))

    def answer(self, prompt: str, max_out: int) -> tuple[str, int]:
        """Return the answer's text, and the number of prompt tokens."""
        batch = self._tokenizer([prompt], return_tensors="pt")
        out = self._run(batch, max_out)
        return self._tokenizer.decode(out[0], skip_special_tokens=True), int(batch["attention_mask"].sum())

    def _run(self, batch: Any, max_out: int, **more: Any) -> Any:
        pad = self._tokenizer.pad_token_id
        with self._torch.inference_mode():
            out = self._model.generate(**batch, max_new_tokens=max_out, do_sample=False, pad_token_id=pad, **more)
        return out[:, batch["input_ids"].shape[1] :]

    def stream(self, prompt: str, num_out: int) -> tuple[list[float], int, int]:
        """Generate as a stream. Return the time of each piece of text, and the numbers of prompt and output tokens."""
        streamer = self._transformers.TextIteratorStreamer(self._tokenizer, skip_prompt=True)
        counted: list[tuple[int, int]] = []
        worker = threading.Thread(target=lambda: counted.append(self.generate([prompt], num_out, streamer)))
        worker.start()
        at = [time.perf_counter() for text in streamer if text]
        worker.join()
        return at, *counted[0]


def timed(model: Model, request: dict[str, Any], *, streams: bool) -> dict[str, Any]:
    began = time.perf_counter()
    at: list[float] = []
    if streams:
        at, num_in, num_out = model.stream(request["prompts"][0], request["num_out"])
    else:
        num_in, num_out = model.generate(request["prompts"], request["num_out"])
    return {
        "total_s": time.perf_counter() - began,
        "first_s": at[0] - began if at else None,
        "gaps_s": [after - before for before, after in itertools.pairwise(at)],
        "num_in": num_in,
        "num_out": num_out,
    }


def main() -> int:
    folder, dtype, threads, how = sys.argv[1:5]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, which is for answers
    model = Model(folder, dtype, int(threads))
    print(json.dumps({"version": model.version}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "answer" in request:
            text, num_in = model.answer(request["answer"], request["num_out"])
            answer: dict[str, Any] = {"text": text, "num_in": num_in}
        else:
            answer = timed(model, request, streams=how == "stream")
        print(json.dumps(answer), file=out, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's exit handlers may wait for idle threads
