"""Builds a loaded engine, and a scheduler that fits it, from a configuration.

Invariants: the two agree on every size, because both get them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from minisgl.config import ConfigError, EngineConfig, Limits, Unsupported
from minisgl.distributed import ALONE, Group, GroupError
from minisgl.engine.api import Drafts, Engine, EngineInfo
from minisgl.engine.choice import choose_engine, may_fall_back
from minisgl.extension import NEEDS, why_missing
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.runner.drafting import DraftModel, MtpDrafts, Proposer, check_vocabulary, draft_config
from minisgl.runner.step_time import StepTime
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import ChosenScheduler, choose
from minisgl.scheduler.policies import RUST_PARTS
from minisgl.scheduler.rust_parts import parse_parts
from minisgl.scheduler.shadow import ShadowControlPlane
from minisgl.scheduler.trace import RecordingControlPlane
from minisgl.scheduler.wrapped import Describe, Narrate, NarratingControlPlane, make_faulty
from minisgl.utils.installed import need, need_torch_engine
from minisgl.utils.progress import Report
from minisgl.weights.sources import find_tokenizer

if TYPE_CHECKING:
    from minisgl.engine.cpu_engine import CpuEngine

Say = Callable[[str], None]
ECHO_CONTEXT_LEN = 8192
ECHO_NUM_PAGES = 8192
CHECKPOINT_INTERVAL = 256  # tokens
CPU_STEP_MS = 250


def build_engines(
    config: EngineConfig,
    report: Report,
    *,
    folder: Path | None = None,
    on_rank_death: Callable[[str], None] | None = None,
    step_timeout: float = Limits().step_timeout,
) -> tuple[Engine, Proposer | None]:
    """Build the engine (see `build_engine`) and what drafts for it, `None` if nothing does. A draft model is loaded
    first; the engine gets the rest of the memory."""
    if config.draft_model is None:
        engine = build_engine(config, report, folder=folder, on_rank_death=on_rank_death, step_timeout=step_timeout)
        return engine, MtpDrafts(engine.draft_tokens) if isinstance(engine, Drafts) and config.uses_mtp else None
    config.check()
    small, own = _build_small(config, report), draft_config(config)
    try:
        if config.memory is not None:
            left = max(1, config.memory - small.pool_bytes)  # the engine's part, not allocated yet
            config = msgspec.structs.replace(config, memory=left)
        engine = build_engine(config, report, folder=folder, on_rank_death=on_rank_death, step_timeout=step_timeout)
        try:
            check_vocabulary(config, engine.info, small.info)
        except BaseException:
            engine.close()
            raise
    except BaseException:
        small.close()
        raise
    return engine, DraftModel(small, build_control_plane(own, small.info), engine.info.vocab_size)


def _build_small(config: EngineConfig, report: Report) -> CpuEngine:
    """Load the draft model. Raises `ConfigError` if it is no decoder or has recurrent layers."""

    def say(text: str, done: int = 0, total: int = 0) -> None:
        report(f"draft model: {text}", done, total)

    try:
        engine = _build_cpu(draft_config(config), say)
        if engine.info.kind != "decoder" or engine.info.num_checkpoints is not None:
            engine.close()
            text = "must generate text" if engine.info.kind != "decoder" else "must not have recurrent layers"
            raise ConfigError(f"a draft model {text}")
    except ConfigError as error:
        raise ConfigError(f"--speculative {config.speculative}: {error}") from error
    return engine


def build_engine(
    config: EngineConfig,
    report: Report,
    *,
    folder: Path | None = None,
    on_rank_death: Callable[[str], None] | None = None,
    step_timeout: float = Limits().step_timeout,
) -> Engine:
    """Load the engine that `config` requests, on all its ranks. `folder`, `on_rank_death` and `step_timeout` are passed
    to `Ranks`. Raises `ConfigError` and the errors of weights/, which say what to change, and `RankDied`."""
    config.check()
    if config.engine == "sim":
        if config.num_ranks != 1:
            raise ConfigError(f"--tp {config.tp}: a simulated engine has no ranks: choose its --sim-profile instead")
        from minisgl.engine.sim import build_sim

        return build_sim(config, report)
    requested = config
    name, reason = choose_engine(requested)
    if reason:
        report(f"engine: {name}: {reason}")
    config = msgspec.structs.replace(config, engine=name)
    if config.tp == "auto":
        config = msgspec.structs.replace(config, tp=_auto_ranks(config, report))
    if name == "cpu":
        try:
            return _build_cpu(config, report)
        except Unsupported as error:
            if not may_fall_back(requested):
                raise
            need_torch_engine(f"{error}; the torch engine, which may know it,", requested.device)
            report(f"engine: torch: {error}")
            config = msgspec.structs.replace(config, engine="torch")
    if config.num_ranks == 1:
        return build_rank(config, ALONE, report)
    need(f"--tp {config.num_ranks}: a group of ranks", "torch", "zmq")
    from minisgl.runner.ranks import RankEngine, Ranks

    config = _resolve(config, report)
    ranks = Ranks(config, folder, on_rank_death, step_timeout)
    try:
        report(f"tensor parallelism: {config.num_ranks} ranks")
        group = join_group(config, 0, ranks.rendezvous)
        ranks.joined(group)
        engine = build_rank(config, group, report)
        ranks.wait_ready()
    except GroupError as error:
        died = ranks.explain(error)
        ranks.close()
        raise died from error
    except BaseException:
        ranks.close()
        raise
    return RankEngine(engine, group, ranks)


def _auto_ranks(config: EngineConfig, report: Report) -> int:
    """Choose the number of ranks for `--tp auto` and report it with its reason. Raises `ConfigError`."""
    num_ranks, reason = 1, f"--engine {config.engine} computes in one process"
    if config.engine == "torch":
        from minisgl.engine.loading import fitting_ranks  # imports torch

        num_ranks, reason = fitting_ranks(config, report)
    report(f"--tp auto: {num_ranks}: {reason}")
    return num_ranks


def _resolve(config: EngineConfig, report: Report) -> EngineConfig:
    """Check and resolve what all ranks share before they start: model shape, download, device, tokenizer."""
    if config.engine != "torch":
        return config
    from minisgl.engine.loading import check_ranks, device_of, folder_of  # imports torch

    model = folder_of(config, report)
    check_ranks(model, config.num_ranks, config.model_impl)
    device = device_of(config, say=report)
    if config.device == "auto":
        config = msgspec.structs.replace(config, device=str(device))
    tokenizer = None if config.tokenizer is None else str(find_tokenizer(config.tokenizer, report))
    return msgspec.structs.replace(config, model=str(model), tokenizer=tokenizer)


def join_group(config: EngineConfig, rank: int, rendezvous: Path) -> Group:
    """Join the group of ranks through the file `rendezvous`; blocks for all. Raises `GroupError`, `ConfigError`."""
    import torch

    from minisgl.distributed.torch_group import TorchGroup

    device = torch.device("cpu")
    if config.engine == "torch":
        from minisgl.engine.loading import device_of

        device = device_of(config, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before a context is created on another device
    return TorchGroup(rendezvous, rank, config.num_ranks, device)


def build_rank(config: EngineConfig, group: Group, report: Report) -> Engine:
    """Build the engine of one rank. Ranks above 0 run their forwards in the calling thread."""
    if config.engine == "echo":
        return _build_echo(config, group)
    from minisgl.engine.loading import load_engine  # imports torch

    return load_engine(config, report, group)


def _build_cpu(config: EngineConfig, report: Report) -> CpuEngine:
    if why := why_missing():
        raise Unsupported(f"the CPU engine {NEEDS}: {why}")
    from minisgl.engine.cpu_loading import load_cpu_engine

    engine = load_cpu_engine(config, report)
    for flag in config.of_cuda_only():
        report(f"{flag}: without an effect on cpu: for CUDA devices only")
    return engine


def _build_echo(config: EngineConfig, group: Group) -> Engine:
    from minisgl.engine.echo import EchoEngine

    context_len = config.max_seq_len or ECHO_CONTEXT_LEN
    num_pages = config.num_pages or ECHO_NUM_PAGES
    engine = EchoEngine(
        num_pages=num_pages,
        page_size=config.page_size,
        max_rows=config.rows_on("cpu"),
        max_seq_len=min(context_len, num_pages * config.page_size + 1),
        context_len=context_len,
        worker_thread=group.rank == 0,
        group=group,
        checkpoints=config.debug.echo_states,
    )
    engine.fail_steps.update(config.debug.echo_fail_steps)
    return engine


def control_plane_config(config: EngineConfig, info: EngineInfo) -> ControlPlaneConfig:
    """Return the scheduler's configuration for an engine. Raises `ConfigError` for unsupported settings."""
    config.check_states(info.num_checkpoints is not None)
    interval = 0
    if info.num_checkpoints is not None:
        interval = -(-(config.checkpoint_interval or CHECKPOINT_INTERVAL) // info.page_size) * info.page_size
    cache = config.cache if info.shares_prefixes else "naive"
    plain = ControlPlaneConfig(
        num_pages=info.num_pages,
        page_size=info.page_size,
        max_running_requests=config.rows_on(info.device),
        max_prefill_length=config.prefill_on(info.device),
        context_len=info.context_len,
        eos_ids=info.eos_ids,
        cache=cache,
        graph_sizes=info.graph_sizes,
        cache_token_budget=config.cache_token_budget or 0,
        cache_max_prompt=config.cache_max_prompt or 0,
        max_draft_len=config.max_draft_len,
        checkpoint_interval=interval,
        num_checkpoints=info.num_checkpoints or 0,
        schedule_policy=config.schedule_policy,
    )
    pinnable = min(int(config.max_pinned_ratio * info.num_pages), plain.num_pinnable_pages)
    return replace(plain, max_pinned_pages=0 if cache == "naive" else max(0, pinnable))


def choose_control_plane(
    config: EngineConfig,
    info: EngineInfo,
    say: Say = lambda line: None,
    narrate: Narrate | None = None,
    describe: Describe | None = None,
) -> ChosenScheduler:
    """Create the scheduler that `config` requests. A shadow's lines go to `say`. At log level debug, each step is
    described to `narrate`, with the token texts of `describe`. Raises `ConfigError`."""
    if config.max_seq_len is not None and config.max_seq_len > info.context_len:
        raise ConfigError(f"--max-seq-len {config.max_seq_len}: must be at most {info.context_len}, the context")
    settings = control_plane_config(config, info)
    try:
        chosen = choose(config.cpu_backend, settings)
    except ValueError as error:
        raise ConfigError(f"--cpu-backend {config.cpu_backend}: {error}") from error
    chosen = _wrapped(config, chosen, settings, say)
    return replace(chosen, control_plane=_narrated(config, chosen.control_plane, narrate, describe))


def _wrapped(config: EngineConfig, chosen: ChosenScheduler, settings: ControlPlaneConfig, say: Say) -> ChosenScheduler:
    """Wrap the scheduler as `config` requests: fault injection, shadow and trace recorder, from the inside out."""
    plane, summary = chosen.control_plane, None
    if config.debug.faulty_control_plane:
        plane = make_faulty(plane, config.debug.faulty_control_plane)
    if config.debug.shadow:
        other = choose("python" if chosen.name == "rust_hotpath" else "rust_hotpath", settings)
        if other.fallback:
            say(f"shadow: nothing is compared: {other.fallback}")
        else:
            every_n = config.debug.shadow_every_n
            steps = "every step" if every_n == 1 else f"one step of {every_n}"
            say(
                f"shadow: {other.name} gets the calls of {chosen.name}; plan, arrays and counts of {steps} are compared"
            )
            plane = shadow = ShadowControlPlane(
                plane,
                other.control_plane,
                report=Path(config.debug.shadow_report) if config.debug.shadow_report else None,
                every_n=every_n,
                max_diffs=config.debug.shadow_max_diffs,
                notify=say,
            )
            summary = shadow.summary
    if config.debug.record_trace:
        try:
            file = Path(config.debug.record_trace).open("wb")  # noqa: SIM115  (open as long as the process)
        except OSError as error:
            raise ConfigError(f"--record-trace {config.debug.record_trace}: {error.strerror}") from error
        plane = RecordingControlPlane(plane, settings, file)
    return replace(chosen, control_plane=plane, shadow=summary)


def _narrated(
    config: EngineConfig, plane: ControlPlane, narrate: Narrate | None, describe: Describe | None = None
) -> ControlPlane:
    return plane if narrate is None or config.log_level != "debug" else NarratingControlPlane(plane, narrate, describe)


def build_step_time(config: EngineConfig, info: EngineInfo, *, serves: bool = False) -> StepTime | None:
    """Return the controller of step times; `None` if nothing limits them. Without --max-step-ms only a server on a CPU
    limits a step: GPU steps are short. Every server limits what low-priority requests add to a step."""
    step_ms = config.max_step_ms
    if step_ms is None and serves and info.device == "cpu" and info.name != "echo":
        step_ms = CPU_STEP_MS
    if not (step_ms or serves):
        return None
    return StepTime(step_ms / 1000 if step_ms else None, config.prefill_on(info.device), info.page_size)


def build_control_plane(
    config: EngineConfig, info: EngineInfo, narrate: Narrate | None = None, describe: Describe | None = None
) -> ControlPlane:
    return choose_control_plane(config, info, narrate=narrate, describe=describe).control_plane


def build_compiler(info: EngineInfo, wake: Callable[[], None] = lambda: None) -> GrammarCompiler | None:
    """Return the grammar compiler; `None` for an engine without a real tokenizer."""
    return None if info.simulated else GrammarCompiler(info.model_dir, info.vocab_size, info.eos_ids, wake=wake)


def build_fallback(config: EngineConfig, info: EngineInfo, narrate: Narrate | None = None) -> ControlPlane:
    """Create the scheduler that takes over, with an empty cache, when the current one breaks: the reference. The Rust
    parts other than the prefix cache are kept, because their failures are handled in place."""
    backend = "python"
    if config.cpu_backend.startswith(RUST_PARTS) and (left := set(parse_parts(config.cpu_backend)) - {"radix"}):
        backend = f"{RUST_PARTS}:{','.join(sorted(left))}"
    return _narrated(config, choose(backend, control_plane_config(config, info)).control_plane, narrate)
