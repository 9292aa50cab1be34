"""Construction of a torch engine from a loaded model: the size of the device's KV pool, the attention backend, CUDA
graphs.

Every failure names the flag to change; every automatic choice is reported with its reason.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl.attention import AttentionBackend, Eager, KVPool, LayerAttention, TorchSdpa
from minisgl.attention.backend import BackendError, Choice, Shape, choose, machine
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import FlashInfer, Heads, renormalise
from minisgl.attention.pair import Pair
from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import ALONE, Group
from minisgl.engine.api import EngineInfo
from minisgl.engine.device import CudaDevice, Device, InlineDevice, Renormalise
from minisgl.engine.graphs import Capture, CudaCapture, RunAgain, graph_sizes
from minisgl.engine.torch_engine import ModelForward, TorchEngine
from minisgl.engine.torch_sight import TorchTower
from minisgl.engine.worker import ForwardThread
from minisgl.models.api import Attend, Model
from minisgl.step import StepLimits
from minisgl.utils.progress import Report

MEMORY_RATIO = 0.85  # default of --memory-ratio; the rest is for activations, workspaces and graphs
INLINE = "inline"  # --device inline, for tests: runs on the CPU what a CUDA device would run, graphs too
_MIB = 2**20
_BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch_sdpa": TorchSdpa,
    "eager": Eager,
    "flashinfer": FlashInfer,
    "flash_attention": FlashAttention,
}


def check_device(name: str, rank: int = 0, ranks: int = 1) -> torch.device:
    """Return the device of `rank`, counted from rank 0's device `name`. Raises `ConfigError` unless all can be used."""
    if torch.version.cuda is None:
        raise ConfigError(f"--device {name}: this torch ({torch.__version__}) is built without CUDA: use --device cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch finds no CUDA device: check nvidia-smi, or use --device cpu")
    first = torch.device(name).index or 0
    count = torch.cuda.device_count()
    if first >= count:
        raise ConfigError(f"--device {name}: must be from cuda:0 to cuda:{count - 1}, the devices that torch finds")
    if first + ranks > count:
        raise ConfigError(
            f"--tp {ranks}: needs {ranks} CUDA devices from cuda:{first} on, there are {count - first}: "
            f"choose at most --tp {count - first}, or --device cpu"
        )
    return torch.device("cuda", first + rank)


def num_pages(config: EngineConfig, page_bytes: int, context_len: int, free_bytes: int) -> int:
    """Return the number of KV pages: --num-pages if given, else the pages that fit into --memory-ratio of `free_bytes`
    (free after loading), at most what all rows at full context could use. Raises `ConfigError` if they do not fit."""
    if config.num_pages is not None:
        if config.num_pages * page_bytes > free_bytes:
            raise ConfigError(
                f"--num-pages {config.num_pages}: the KV pool would take {config.num_pages * page_bytes // _MIB} MiB "
                f"of {free_bytes // _MIB} MiB that are free on the device: at most {free_bytes // page_bytes} pages fit"
            )
        return config.num_pages
    ratio = MEMORY_RATIO if config.memory_ratio is None else config.memory_ratio
    useful = config.rows_on("cuda") * -(-context_len // config.page_size)
    pages = min(int(free_bytes * ratio) // page_bytes, useful)
    if pages < 1:
        raise ConfigError(
            f"--memory-ratio {ratio}: {free_bytes // _MIB} MiB are free on the device after loading, and that share "
            f"does not hold one page of {page_bytes // 1024} KiB: raise it, free the device, or choose a smaller model"
        )
    return pages


def out_of_memory(error: torch.OutOfMemoryError, doing: str, advice: str) -> ConfigError:
    """Return a `ConfigError` for torch's out-of-memory error: what the server was doing, and what to change."""
    return ConfigError(f"out of device memory while {doing}: {str(error).splitlines()[0]} Try {advice}")


def graphs_for(
    config: EngineConfig, model: Model, backend: type[AttentionBackend], say: Report, device: str = "cuda"
) -> tuple[int, ...]:
    """Return the row counts to capture CUDA graphs for. Reports the reason if it returns none."""
    sizes = graph_sizes(config.cuda_graph_max_bs, config.rows_on(device))
    if not sizes:
        say("CUDA graphs: none: --cuda-graph-max-bs 0 asks for eager forwards")
    obstacle = f"{backend.__name__}: {backend.graph_obstacle}" if backend.graph_obstacle else model.graph_obstacle
    if sizes and obstacle:
        say(f"CUDA graphs: none: {obstacle}")
        return ()
    return sizes


def choose_backend(
    config: EngineConfig, layers: Sequence[LayerAttention], dtype: torch.dtype, device: torch.device
) -> Choice:
    """Return the attention backend that serves these layers on `device`. Raises `ConfigError` if none does."""
    try:
        return choose(config.attention_backend, machine(device), Shape.of(layers, dtype, config.page_size))
    except BackendError as error:
        raise ConfigError(str(error)) from error


def build_torch_engine(
    config: EngineConfig,
    model: Model,
    info: EngineInfo,
    pool: KVPool,
    say: Report,
    group: Group = ALONE,
    thread: ForwardThread | None = None,
    tower: TorchTower | None = None,
) -> TorchEngine:
    """Build the engine: choose attention, prepare buffers, then warm up and capture graphs. `thread` runs the forwards
    on a CPU, which skips both warm-up and graphs. Raises `ConfigError`."""
    device, dtype = torch.device(info.device), pool.k[0].dtype
    choice = choose_backend(config, model.attention, dtype, device)
    if thread is not None:
        for flag in config.of_cuda_only():
            say(f"{flag}: without an effect on {device}: for CUDA devices only")
    else:
        pages = f"; it takes pages of multiples of 256 tokens, here of {info.page_size}"
        say(f"attention: {choice.names} ({choice.reason}{pages if 'flash_attention' in choice.names else ''})")
        sizes = graphs_for(config, model, _BACKENDS[choice.decode or choice.name], say, info.device)
        info = replace(info, graph_sizes=sizes)
    check_agreement(group, f"{choice.names} attention, {len(info.graph_sizes)} graphs")
    max_seq_len = min(info.context_len, info.num_pages * info.page_size + 1)
    limits = StepLimits(
        max_rows=config.rows_on(info.device),
        max_tokens=config.rows_on(info.device) + max(config.prefill_on(info.device), info.page_size),
        page_size=info.page_size,
        num_pages=info.num_pages,
        max_seq_len=max_seq_len,
    )
    queues, capture = open_device(device, nvtx=config.debug.profile_steps > 0)
    try:
        made: list[tuple[AttentionBackend, Renormalise | None]] = []

        def make_backend() -> None:
            made.append(_backend(choice, pool, model.attention, dtype, limits, info.graph_sizes))

        queues.forward.run("attention", make_backend)
        queues.forward.record_event().synchronize()
        backend, renormalise = made[0]
        engine = TorchEngine(
            model,
            info,
            pool,
            backend,
            queues,
            limits,
            thread=thread,
            group=group,
            capture=capture,
            renormalise=renormalise,
            forward=compiled(model) if config.torch_compile and thread is None else None,
            tower=tower,
            say=say,
            free_bytes=lambda: torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0,
        )
        if thread is None:
            say("warming up; kernels that are not in the cache yet are compiled")
            engine.warm_up()
        return engine
    except BackendError as error:
        raise ConfigError(f"--attention-backend {config.attention_backend}: {error}") from error
    except torch.OutOfMemoryError as error:
        advice = "a lower --memory-ratio, --cuda-graph-max-bs or --max-prefill-length"
        raise out_of_memory(error, "preparing the engine", advice) from error


def open_device(device: torch.device, *, nvtx: bool = False) -> tuple[Device, Capture]:
    """Return the streams and the graph capture of `device`. The forward stream waits until the weights are loaded."""
    if device.type != "cuda":
        return InlineDevice(), RunAgain
    queues = CudaDevice(device, nvtx=nvtx)
    queues.forward_stream.wait_stream(torch.cuda.current_stream(device))
    return queues, CudaCapture(queues.forward_stream)


def check_agreement(group: Group, what: str) -> None:
    """Raise `ConfigError` on every rank unless all have the same `what`; else different programs would deadlock."""
    checksum = zlib.crc32(what.encode())
    smallest, largest = group.all_reduce_min(checksum), -group.all_reduce_min(-checksum)
    if smallest != largest:
        raise ConfigError(
            f"--tp {group.size}: rank {group.rank} has {what}, another rank does not: use identical devices"
        )


def _backend(
    choice: Choice,
    pool: KVPool,
    layers: Sequence[LayerAttention],
    dtype: torch.dtype,
    limits: StepLimits,
    sizes: tuple[int, ...],
) -> tuple[AttentionBackend, Renormalise | None]:
    if choice.decode:
        prefill, first = _backend(replace(choice, decode=""), pool, layers, dtype, limits, ())
        decode = replace(choice, name=choice.decode, decode="", prefill="fa2")
        backend, second = _backend(decode, pool, layers, dtype, limits, sizes)
        return Pair(pool, prefill, backend), first or second
    device, windows, columns = pool.k[0].device, [layer.window for layer in layers], limits.max_pages_per_request
    if choice.name == "flashinfer":
        heads = Heads(layers[0].heads, layers[0].kv_heads, layers[0].k_dim)
        flashinfer = FlashInfer(
            pool,
            heads,
            dtype,
            device,
            windows,
            max_rows=max(limits.max_rows, *sizes, 1),
            max_pages_per_row=columns,
            graph_sizes=sizes,
            prefill=choice.prefill,
        )
        return flashinfer, renormalise
    if choice.name == "flash_attention":
        return FlashAttention(pool, device, windows, max_pages_per_row=columns, graph_sizes=sizes), None
    return (Eager if choice.name == "eager" else TorchSdpa).of(layers, pool), None


def compiled(model: Model) -> ModelForward:
    """Return the model's forward compiled for any number of tokens, with attention uncompiled and one fixed object."""
    inner = torch.compile(model.forward, dynamic=True)
    wrapped: list[Attend] = []  # one object for all calls: another one would make the compiler compile again

    def forward(ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        if not wrapped:
            wrapped.append(torch.compiler.disable(attend))
        hidden: torch.Tensor = inner(ids, positions, wrapped[0])
        return hidden

    return forward
