//! `minisgl._rust.ControlPlane`: the core's scheduler behind the Python Protocol, with the step arrays bound once.
//!
//! Invariants: a panic is caught in the call, poisons the object and is raised as `ControlPlaneError`. The GIL stays
//! held: a call takes microseconds, while regaining the GIL from a busy thread takes milliseconds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use minisgl_core::{CachePolicy, Config, Error, SchedulePolicy, Scheduler, TreeView};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arrays::Int32s;
use crate::buffers::{Ring, View};
use crate::errors::{panic_text, to_python};
use crate::events;
use crate::step::{StepOutput, StepPlan};

/// Cargo features of this crate that are on, except `extension-module`, which every built module has.
const FEATURES: &[&str] = if cfg!(feature = "test-panics") {
    &["test-panics"]
} else {
    &[]
};

/// Fields of a tree node: id, parent, tokens, depth, locks, age, children, is pinned, has saved state, first tokens.
type TreeNode = (u64, u64, usize, usize, u32, u64, u32, bool, bool, Vec<i32>);
pub(crate) type ShownTree = (usize, usize, Vec<TreeNode>);

/// Converts a tree view to the tuples of `minisgl.scheduler.api.TreeView`.
pub(crate) fn tree_to_python(view: TreeView) -> ShownTree {
    let nodes = view.nodes.into_iter().map(|node| {
        (
            node.id,
            node.parent,
            node.num_tokens,
            node.depth,
            node.lock,
            node.age,
            node.num_children,
            node.is_pinned,
            node.has_state,
            node.begins,
        )
    });
    (view.num_nodes, view.num_tokens, nodes.collect())
}

/// Scheduler that implements `minisgl.scheduler.api.ControlPlane`; `minisgl.scheduler.backend` checks the settings.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct ControlPlane {
    scheduler: Scheduler,
    ring: Ring,
    #[pyo3(get)]
    buffers: Py<PyAny>,
    #[pyo3(get)]
    config: Py<PyAny>,
    /// Nanoseconds spent writing the last step's arrays, without the columns that decode rows write in the decision.
    #[pyo3(get)]
    metadata_ns: u64,
}

impl ControlPlane {
    /// Runs a call of the core. Errors and panics become Python exceptions.
    fn run<T>(&mut self, py: Python<'_>, call: impl FnOnce(&mut Self) -> Result<T, Error>) -> PyResult<T> {
        match catch_unwind(AssertUnwindSafe(|| call(self))) {
            Ok(result) => result.map_err(|error| to_python(py, &error)),
            Err(panic) => {
                let what = panic_text(&*panic);
                self.scheduler.poison(what.clone());
                Err(to_python(py, &Error::Broken(what)))
            }
        }
    }
}

#[pymethods]
impl ControlPlane {
    #[new]
    fn new(config: &Bound<'_, PyAny>, buffers: &Bound<'_, PyAny>) -> PyResult<Self> {
        let settings = read_config(config)?;
        let largest = settings.graph_sizes.last().copied().unwrap_or(0);
        let scheduler = Scheduler::new(settings);
        let ring = Ring::bind(&buffers.getattr("ring")?, scheduler.limits(), largest)?;
        Ok(Self {
            scheduler,
            ring,
            buffers: buffers.clone().unbind(),
            config: config.clone().unbind(),
            metadata_ns: 0,
        })
    }

    /// Applies `events`, decides step `step`, writes its arrays and returns its plan.
    fn schedule(&mut self, step: i64, events: &Bound<'_, PyAny>) -> PyResult<StepPlan> {
        let py = events.py();
        let items = events.getattr(intern!(py, "items"))?;
        let items = items.cast::<PyList>()?;
        let checked = events::read(items, &self.scheduler)?;
        self.run(py, |this| {
            let index = this.ring.index(step);
            let mut entry = this.ring.entry(index);
            let mut began = None;
            let decided = || began = Some(Instant::now());
            let plan = this.scheduler.schedule(step, checked, &mut entry, index, decided);
            let elapsed = began.map_or(Duration::ZERO, |at: Instant| at.elapsed());
            this.metadata_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
            plan
        })
        .map(StepPlan::from)
    }

    /// Commits the sampled tokens of `step`, one for each row.
    fn commit(&mut self, step: i64, tokens: &Bound<'_, PyAny>) -> PyResult<StepOutput> {
        let py = tokens.py();
        let view = View::of(tokens);
        self.run(py, |this| {
            let mut entries = Vec::new();
            let tokens = view.as_ref().map(|view| view.as_slice(py));
            match tokens {
                Some(tokens) => this.scheduler.commit(step, tokens, &mut entries)?,
                None => {
                    let what = format!("commit({step}): tokens of step {step}: not an int32 array of one dimension");
                    this.scheduler.poison(what.clone());
                    return Err(Error::Broken(what));
                }
            }
            Ok(StepOutput::new(step, entries))
        })
    }

    /// Returns the current counters and gauges as `minisgl.scheduler.api.Stats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.scheduler.stats();
        let kind = py.import("minisgl.scheduler.api")?.getattr("Stats")?;
        macro_rules! counts {
            ($($name:ident)*) => { [$(stats.$name.into_pyobject(py)?),*] };
        }
        let counts = counts! {
            num_waiting num_running num_draining num_free_pages num_evictable_pages num_protected_pages num_held_pages
            num_retracted_total num_prompt_tokens_total num_cached_tokens_total num_pinned_pages
            num_inserted_pages_total num_evicted_pages_total num_hits_total num_misses_total num_drafted_total
            num_accepted_total num_checkpoints num_saved_total num_cut_short_total num_computed_again_total
            num_loaded_pages_total
        };
        kind.call1(PyTuple::new(py, counts)?)
    }

    /// Returns how many full pages of `tokens` the prefix cache has in `namespace`.
    fn cached_pages(&self, tokens: Int32s<'_>, namespace: u32) -> usize {
        self.scheduler.cached_pages(tokens.as_slice(), namespace)
    }

    /// Returns (request id, number of draft tokens) for requests that can use a `Draft`.
    fn drafts_wanted(&self) -> Vec<(i64, usize)> {
        self.scheduler.drafts_wanted()
    }

    /// Returns the `limit` largest nodes of the prefix cache, as `minisgl.scheduler.api.TreeView`.
    fn tree_view(&self, limit: usize) -> ShownTree {
        tree_to_python(self.scheduler.tree_view(limit))
    }

    /// Checks every invariant and raises `ControlPlaneError` at the first broken one. O(everything).
    fn check(&mut self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |this| this.scheduler.check())
    }

    /// Returns each cached page with all tokens of its path up to the page's end. For tests.
    fn tree_pages<'py>(&self, py: Python<'py>) -> PyResult<Paths<'py>> {
        paths(py, self.scheduler.tree_pages())
    }

    /// Returns each state checkpoint's slot with the tokens of its path, in the format of `tree_pages`. For tests.
    fn tree_states<'py>(&self, py: Python<'py>) -> PyResult<Paths<'py>> {
        paths(py, self.scheduler.tree_states())
    }

    /// Returns the page table of a live request (empty while it waits). Raises `KeyError` if it is not live. For tests.
    fn page_table(&self, req_id: i64) -> PyResult<Vec<u32>> {
        match self.scheduler.page_table(req_id) {
            Some(pages) => Ok(pages),
            None => Err(PyKeyError::new_err(req_id)),
        }
    }

    /// Returns the stack of free pages. The last element is allocated next. For tests.
    fn free_pages(&self) -> Vec<u32> {
        self.scheduler.free_pages().to_vec()
    }

    /// Requests a panic in the "schedule" or "commit" of a step, "before", "amid" or "after" it takes effect.
    #[cfg(feature = "test-panics")]
    fn panic_at(&mut self, call: &str, step: i64, moment: &str) -> PyResult<()> {
        use minisgl_core::{Call, Moment};
        let call = match call {
            "schedule" => Call::Schedule,
            "commit" => Call::Commit,
            other => return Err(PyValueError::new_err(format!("call: {other:?}: unknown"))),
        };
        let moment = match moment {
            "before" => Moment::Before,
            "amid" => Moment::Amid,
            "after" => Moment::After,
            other => return Err(PyValueError::new_err(format!("moment: {other:?}: unknown"))),
        };
        self.scheduler.panic_at(call, step, moment);
        Ok(())
    }

    /// Expected share of the possible output of requests, in 1/1024. Tests set it.
    #[getter]
    fn get_reserve_ratio(&mut self) -> usize {
        *self.scheduler.reserve_ratio_mut()
    }

    #[setter]
    fn set_reserve_ratio(&mut self, value: usize) {
        *self.scheduler.reserve_ratio_mut() = value;
    }
}

/// Pages or checkpoint slots, each with the tokens up to its end.
pub(crate) type Paths<'py> = Vec<(Bound<'py, PyTuple>, u32)>;

pub(crate) fn paths(py: Python<'_>, entries: Vec<(Vec<i32>, u32)>) -> PyResult<Paths<'_>> {
    let entries = entries.into_iter();
    entries
        .map(|(tokens, number)| Ok((PyTuple::new(py, tokens)?, number)))
        .collect()
}

/// Returns the eviction policy `name`. Raises `ValueError`, with `field` in the message, if it is unknown.
pub(crate) fn policy_of(field: &str, name: &str) -> PyResult<CachePolicy> {
    match name {
        "lru" => Ok(CachePolicy::Lru),
        "lfu" => Ok(CachePolicy::Lfu),
        "naive" => Ok(CachePolicy::Naive),
        other => Err(PyValueError::new_err(format!("{field}: {other:?}: lru, lfu or naive"))),
    }
}

fn read_config(config: &Bound<'_, PyAny>) -> PyResult<Config> {
    let number = |name: &str| config.getattr(name)?.extract::<usize>();
    let cache = policy_of("cache", &config.getattr("cache")?.extract::<String>()?)?;
    let schedule_policy = match config.getattr("schedule_policy")?.extract::<String>()?.as_str() {
        "fcfs" => SchedulePolicy::Fcfs,
        "lpm" => SchedulePolicy::Lpm,
        "srpf" => SchedulePolicy::Srpf,
        other => return Err(PyValueError::new_err(format!("schedule_policy: {other:?}: unknown"))),
    };
    Ok(Config {
        num_pages: number("num_pages")?,
        page_size: number("page_size")?,
        max_running_requests: number("max_running_requests")?,
        max_prefill_length: number("max_prefill_length")?,
        context_len: number("context_len")?,
        eos_ids: config.getattr("eos_ids")?.extract()?,
        cache,
        graph_sizes: config.getattr("graph_sizes")?.extract()?,
        max_pinned_pages: number("max_pinned_pages")?,
        cache_token_budget: number("cache_token_budget")?,
        cache_max_prompt: number("cache_max_prompt")?,
        max_draft_len: number("max_draft_len")?,
        checkpoint_interval: number("checkpoint_interval")?,
        num_checkpoints: number("num_checkpoints")?,
        schedule_policy,
    })
}

/// Returns the build: `{"version": str, "profile": "release" | "debug", "features": list[str]}`.
#[pyfunction]
pub(crate) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("features", FEATURES.to_vec())?;
    Ok(info)
}
