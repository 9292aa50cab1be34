"""The way of grammars' masks to the device.

Invariants: nothing is allocated before the first grammar; a buffer is written again only when the step that had it has
ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.engine.device_buffers import copy
from minisgl.engine.device_streams import Device
from minisgl.engine.logits_processors import Mask
from minisgl.grammar.slots import TokenMasks
from minisgl.kernels.token_mask import mask_tokens


class DeviceMasks:
    """Steps take turns with `num_buffers`, for at most `max_rows` each."""

    def __init__(self, device: Device, place: torch.device, vocab_size: int, max_rows: int, num_buffers: int) -> None:
        self._device = device
        self._place = place
        self._num_words = -(-vocab_size // 32)
        self._size = max_rows * (1 + self._num_words)  # which row, and its bits
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_buffers

    def copy_in(self, turn: int, masks: TokenMasks) -> Mask:
        """Queue the copy; the forward stream waits for it. What is returned belongs into that stream."""
        found = self._buffers[turn]
        if found is None:
            on_device = torch.zeros(self._size, dtype=torch.int32, device=self._place)
            found = self._buffers[turn] = (self._device.host_buffer(self._size), on_device)
        host, on_device = found
        count, size = len(masks.rows), len(masks.rows) * (1 + self._num_words)
        array = host.numpy()
        array[:count] = masks.rows
        array[count:size] = masks.bits.reshape(-1)
        self._device.copy_in.run("copy masks", lambda: copy(on_device[:size], host[:size]))
        self._device.forward.wait_event(self._device.copy_in.record_event())
        rows, bits = on_device[:count], on_device[count:size].view(count, self._num_words)
        return lambda logits: mask_tokens(logits, rows, bits)
