"""The parts of the torch engine on the device: streams and copies, Triton kernels, sampling, captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.engine import sampler
from minisgl.engine.building import open_device
from minisgl.engine.device import DeviceMasks, DeviceSampler, Stream
from minisgl.engine.graphs import Outputs
from minisgl.grammar.slots import TokenMasks
from minisgl.sampling_params import SamplingParams
from tests.helpers.gpu import PLACE, REHEARSAL, only_on_a_gpu
from tests.helpers.samplers import assign_all, assignment
from tests.kernels.test_ops import check_mask, check_store, check_tables


def _do(stream: Stream, job: Callable[[], object]) -> None:
    def run() -> None:
        job()

    stream.run("job", run)


def test_streams_keep_their_order() -> None:
    """Slow work in the forward stream: the copy that waits for it brings its result."""
    device, _ = open_device(PLACE)
    host = device.host_buffer(4)
    inputs_device, out = (torch.zeros(4, dtype=torch.int32, device=PLACE) for _ in range(2))
    back = device.host_buffer(4)
    matrix = torch.randn(*[64 if REHEARSAL else 4096] * 2, device=PLACE)
    device.synchronize()
    for turn in range(1, 20):
        host.fill_(turn)
        _do(device.copy_in, lambda: inputs_device.copy_(host, non_blocking=True))
        device.forward.wait_event(device.copy_in.record_event())
        start = device.forward.record_event()
        _do(device.forward, lambda: matrix @ matrix)
        _do(device.forward, lambda: torch.add(inputs_device, 1, out=out))
        computed = device.forward.record_event()
        device.copy_out.wait_event(computed)
        _do(device.copy_out, lambda: back.copy_(out, non_blocking=True))
        end = device.copy_out.record_event()
        end.synchronize()
        assert end.query() and back.tolist() == [turn + 1] * 4
        assert computed.seconds_since(start) >= 0


def test_a_graph_does_its_forward_again_with_what_is_there_then() -> None:
    device, capture = open_device(PLACE)
    place = torch.zeros(8, 4, device=PLACE)
    weight = torch.randn(4, 4, device=PLACE)
    device.synchronize()
    with torch.inference_mode():
        graph = capture(lambda: Outputs(place @ weight, place.isfinite().all().reshape(1)))
        for turn in range(5):
            _do(device.forward, partial(place.fill_, turn))
            device.forward.run("graph", graph.replay)
            device.forward.record_event().synchronize()
            assert torch.allclose(graph.outputs.logits, torch.full_like(place, turn) @ weight, atol=1e-4)
            assert bool(graph.outputs.finite)
        _do(device.forward, partial(place.fill_, float("nan")))
        device.forward.run("graph", graph.replay)
        device.forward.record_event().synchronize()
        assert not bool(graph.outputs.finite)


def test_noise_is_that_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    seed = torch.from_numpy(rng.integers(-(2**63), 2**63, 4096))
    position = torch.from_numpy(rng.integers(0, 2**31, 4096))
    on_device = sampler.uniforms(seed.to(PLACE), position.to(PLACE)).cpu()
    assert torch.equal(on_device, sampler.uniforms(seed, position))


@pytest.mark.parametrize(("vocab", "may_differ"), [(300, 1), (32_000, 8), (151_936, 24)])
def test_equal_logits_give_the_draws_of_the_cpu(vocab: int, may_differ: int) -> None:
    """But where a draw falls on the border of two tokens within rounding: of the sums, or by whether the last token of
    a nucleus, as likely as 150,000 others, is in it."""
    rng = np.random.default_rng(vocab)
    rows = 64
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32) * 3)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.7])),
            top_k=int(rng.choice([-1, 1, 7, 1000])),
            top_p=float(rng.choice([1.0, 0.6])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(-(2**63), 2**63)),
        )
        for _ in range(rows)
    ]
    slots = rng.permutation(rows).astype(np.int32)
    position = torch.from_numpy(rng.integers(0, 1000, rows))
    found = []
    for place in (PLACE, torch.device("cpu")):
        on_device = DeviceSampler(rows + 1, place)
        assign_all(on_device, [assignment(i, one, [1]) for i, one in enumerate(params)], place)
        slots_device = torch.from_numpy(slots).long().to(place)
        chosen = on_device.sample(logits.to(place), slots_device, position.to(place), on_device.needs(slots))
        found.append(chosen.cpu().tolist())
    differ = [row for row in range(rows) if found[0][row] != found[1][row]]
    assert len(differ) <= may_differ
    for row in differ:
        _assert_on_a_border(logits[row], params[int(slots[row])], int(position[row]), found[0][row], found[1][row])


def _assert_on_a_border(logits: torch.Tensor, params: SamplingParams, position: int, a: int, b: int) -> None:
    probabilities = (logits.double() / params.temperature).softmax(-1)[None]
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    kept = sampler.truncate(probabilities, torch.tensor([params.top_k]), torch.tensor([params.top_p]))[0]
    cumulated = kept.cumsum(0) / kept.sum()
    assert params.seed is not None
    drawn = float(sampler.uniforms(torch.tensor([params.seed]), torch.tensor([position])))
    assert abs(float(cumulated[min(a, b)]) - drawn) < 3e-5


@only_on_a_gpu("compiled Triton kernels")
@pytest.mark.parametrize("seed", range(20))
def test_triton_kernels(seed: int) -> None:
    from minisgl.kernels import ops_triton

    check_tables(_OnDevice(ops_triton), seed)
    check_store(_OnDevice(ops_triton), seed)
    check_mask(_OnDevice(ops_triton), seed)


@only_on_a_gpu("torch's own stream")
def test_masks_are_not_wiped_by_a_stream_that_is_late() -> None:
    """The first of an engine: torch's own stream has work for longer than the copy takes, the forward for longer."""
    device, _ = open_device(PLACE)
    masks = DeviceMasks(device, PLACE, 70, 4, 2)
    logits = torch.zeros(2, 70, device=PLACE)
    bits = np.array([[0b1011, 0, 0]], np.int32)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    _do(device.forward, lambda: torch.cuda._sleep(1_000_000_000))
    mask = masks.copy_in(0, TokenMasks(np.array([1], np.int32), bits))
    _do(device.forward, lambda: mask(logits))
    device.forward.record_event().synchronize()
    torch.cuda.synchronize()
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [0, 1, 3]


def _same_strides(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=PLACE)
    return found.copy_(tensor)


class _OnDevice:
    """A module whose functions are called with copies on the device, written back after."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        def call(*tensors: torch.Tensor) -> None:
            copies = [_same_strides(tensor) for tensor in tensors]
            getattr(self._module, name)(*copies)
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

        return call
