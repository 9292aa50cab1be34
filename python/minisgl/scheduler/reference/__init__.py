"""The reference scheduler in Python: readable and complete; other schedulers are compared with it. Read `scheduler` for
a step, `admission` for what may start, `radix` for the prefix cache. The Rust crate has the same modules."""

from minisgl.scheduler.parts import Parts
from minisgl.scheduler.reference.scheduler import PYTHON, ReferenceControlPlane

__all__ = ["PYTHON", "Parts", "ReferenceControlPlane"]
