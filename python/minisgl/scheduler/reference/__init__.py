"""The reference scheduler in Python: readable and complete; other schedulers are compared with it. Read `scheduler` for
a step, `admission` for what may start, `radix` for the prefix cache. Each module here has a counterpart in the Rust
crate."""

from minisgl.scheduler.parts import Parts
from minisgl.scheduler.reference.scheduler import PYTHON, ReferenceControlPlane

__all__ = ["PYTHON", "Parts", "ReferenceControlPlane"]
