"""The reference scheduler: readable first, complete, and the oracle that others are compared with.

Read `scheduler` for the step, `admission` for what may start, `radix` for the cache. One module here is one module of
the Rust crate.
"""

from minisgl.scheduler.parts import Parts
from minisgl.scheduler.reference.scheduler import PYTHON, ReferenceControlPlane

__all__ = ["PYTHON", "Parts", "ReferenceControlPlane"]
