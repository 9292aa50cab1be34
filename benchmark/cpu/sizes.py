"""How large a GGUF model is: what a token reads and multiplies."""

from __future__ import annotations

from pathlib import Path

import gguf


def model_size(file: Path) -> dict[str, int]:
    """Bytes and numbers of the matrices that a token goes through, those of the head, and KV bytes of a token (f16)."""
    reader = gguf.GGUFReader(file)
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) == 2]
    heads = [tensor for tensor in matrices if tensor.name in ("token_embd.weight", "output.weight")]
    head = int(heads[-1].n_elements)
    inner = [tensor for tensor in matrices if tensor not in heads]
    keys = [tensor for tensor in matrices if ".attn_k.weight" in tensor.name]
    return {
        "weight_bytes": sum(int(tensor.n_bytes) for tensor in [*inner, heads[-1]]),
        "parameters": sum(int(tensor.n_elements) for tensor in inner) + head,
        "head": head,
        "kv_bytes": sum(2 * 2 * int(tensor.shape[1]) for tensor in keys),
    }
