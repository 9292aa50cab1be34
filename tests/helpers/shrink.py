"""The smallest run that still diverges, by leaving out steps, then events, then parts of them.

What is returned diverges; the number of runs is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from minisgl.step import Arrival, Event
from tests.helpers.parity import Divergence, Script, ScriptStep

MAX_RUNS = 1500
Steps = list[ScriptStep]


@dataclass
class Shrinker:
    script: Script
    error: Divergence
    num_runs: int = 0

    def try_steps(self, steps: Steps) -> bool:
        """Keeps `steps` if they diverge."""
        if self.num_runs >= MAX_RUNS:
            return False
        self.num_runs += 1
        candidate = Script(self.script.config, self.script.overlap, steps)
        error = candidate.play()
        if error is None:
            return False
        self.script, self.error = candidate, error
        return True

    def leave_out_steps(self) -> bool:
        """Half of them, then quarters, down to one."""
        changed, size = False, max(1, len(self.script.steps) // 2)
        while size:
            at = 0
            while at < len(self.script.steps):
                steps = self.script.steps
                if self.try_steps(steps[:at] + steps[at + size :]):
                    changed = True
                else:
                    at += size
            size //= 2
        return changed

    def simplify_steps(self) -> bool:
        changed = False
        for at in range(len(self.script.steps)):
            while any(self._try_step(at, one) for one in simpler_steps(self.script.steps[at])):
                changed = True
        return changed

    def _try_step(self, at: int, step: ScriptStep) -> bool:
        steps = self.script.steps
        return self.try_steps([*steps[:at], step, *steps[at + 1 :]])


def simpler_steps(step: ScriptStep) -> Iterator[ScriptStep]:
    if step.failed:
        yield replace(step, failed=False)
    if step.ratio is not None:
        yield replace(step, ratio=None)
    if any(step.tokens):
        yield replace(step, tokens=())
    for i, event in enumerate(step.events):
        before, after = step.events[:i], step.events[i + 1 :]
        yield replace(step, events=before + after)
        for simpler in simpler_events(event):
            yield replace(step, events=(*before, simpler, *after))


def simpler_events(event: Event) -> Iterator[Event]:
    if not isinstance(event, Arrival):
        return
    plain = {
        "priority": 0,
        "no_overlap": False,
        "no_match": False,
        "stop_ids": (),
        "min_tokens": 0,
        "ignore_eos": False,
        "background": False,
        "pin": False,
    }
    for name, value in plain.items():
        if getattr(event, name) != value:
            yield replace(event, **{name: value})
    length = len(event.tokens)
    if event.num_generated:
        yield replace(event, num_generated=0, num_prompt=length)
    else:
        for keep in {length // 2, length - 1} - {0, length}:
            yield replace(event, tokens=np.ascontiguousarray(event.tokens[:keep]), num_prompt=keep)
    for fewer in {1, event.max_tokens // 2, event.max_tokens - 1}:
        if event.num_generated < fewer < event.max_tokens:
            yield replace(event, max_tokens=fewer)


def minimal(script: Script, error: Divergence) -> Shrinker:
    """From `script`, which came to `error`."""
    found = Shrinker(script, error)
    if not found.try_steps(script.steps):  # it does not come again
        return found
    while found.leave_out_steps() | found.simplify_steps():
        pass
    return found


def described(found: Shrinker) -> str:
    """The difference and the steps that lead to it."""
    script = found.script
    lines = [found.error.what, str(script.config), f"overlap={script.overlap}"]
    lines += [f"step {number}: {shown(step)}" for number, step in enumerate(script.steps)]
    return "\n".join(lines)


def shown(step: ScriptStep) -> str:
    """Only what differs from the default."""
    parts = [name(event) for event in step.events]
    if step.ratio is not None:
        parts.append(f"ratio {step.ratio}")
    parts.append("its forward fails" if step.failed else f"tokens {list(step.tokens)}" if any(step.tokens) else "")
    return ", ".join(part for part in parts if part) or "nothing"


def name(event: Event) -> str:
    if not isinstance(event, Arrival):
        return repr(event)
    values = {one.name: (getattr(event, one.name), one.default) for one in fields(event)}
    given = {key: value for key, (value, default) in values.items() if key == "tokens" or value != default}
    given["tokens"] = event.tokens.tolist()
    return f"Arrival({', '.join(f'{key}={value}' for key, value in given.items())})"
