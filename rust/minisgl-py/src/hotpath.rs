//! `minisgl.hotpath`: the core's building blocks for schedulers in Python. Arrays are lists or int32 arrays.
//!
//! Invariants: a panic is caught in the call and raised as `ControlPlaneError`, like a broken invariant; a cache that
//! raised either refuses every later call. An invalid argument is a `ValueError` and changes nothing.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minisgl_core::{CachePolicy, Candidate, ChunkLimits, Error, Handle, Match, Metadata, RadixCacheManager as Cache};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::arrays::to_numpy;
use crate::buffers::View;
use crate::control_plane::{Paths, ShownTree, paths, policy_of, tree_to_python};
use crate::errors::{panic_text, to_python};

/// Reads elements `from` .. `to` (or the end) of a list or an int32 array. An error has `name` in its message.
fn part(name: &str, numbers: &Bound<'_, PyAny>, from: usize, to: Option<usize>) -> PyResult<Vec<i32>> {
    let refuse = |reason: String| PyValueError::new_err(format!("{name}: {reason}"));
    let too_few = |len: usize, to: usize| refuse(format!("{len} numbers, not {to}"));
    if let Ok(list) = numbers.cast::<PyList>() {
        let to = to.unwrap_or(list.len());
        if from > to || to > list.len() {
            return Err(too_few(list.len(), to));
        }
        let wanted = list
            .iter()
            .skip(from)
            .take(to - from)
            .map(|number| number.extract::<i32>());
        let parsed: PyResult<Vec<i32>> = wanted.collect();
        return parsed.map_err(|error| refuse(format!("not a list of int32 numbers: {error}")));
    }
    let Some(view) = View::of(numbers) else {
        return Err(refuse("not a list of numbers or a contiguous int32 array".into()));
    };
    let array = view.as_slice(numbers.py());
    let to = to.unwrap_or(array.len());
    array
        .get(from..to)
        .map(<[i32]>::to_vec)
        .ok_or_else(|| too_few(array.len(), to))
}

fn whole(name: &str, numbers: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    part(name, numbers, 0, None)
}

fn pages_of(pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let pages = whole("pages", pages)?.into_iter().map(u32::try_from);
    pages
        .collect::<Result<_, _>>()
        .map_err(|_| PyValueError::new_err("pages: a page below 0"))
}

/// Converts an integer argument to a count. Raises `ValueError` if it is out of range.
fn count<T: TryFrom<i64>>(name: &str, number: i64) -> PyResult<T> {
    T::try_from(number).map_err(|_| PyValueError::new_err(format!("{name}: {number}: out of range")))
}

fn namespace_of(namespace: i64) -> PyResult<u32> {
    count::<i32>("namespace", namespace)?;
    count("namespace", namespace)
}

/// Runs a call of the core. A panic becomes `Error::Broken`.
fn caught<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let result = catch_unwind(AssertUnwindSafe(call));
    result.unwrap_or_else(|panic| Err(Error::Broken(panic_text(&*panic))))
}

fn guarded<T>(py: Python<'_>, call: impl FnOnce() -> Result<T, Error>) -> PyResult<T> {
    caught(call).map_err(|error| to_python(py, &error))
}

/// Handle of a matched prefix. While unlocked, it is valid until pages are evicted.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct RadixCacheHandle(Handle);

#[pymethods]
impl RadixCacheHandle {
    #[getter]
    fn cached_len(&self) -> usize {
        self.0.cached_len()
    }
}

/// Longest cached continuation of a token sequence below a node.
#[pyclass(frozen, module = "minisgl._rust")]
pub(crate) struct RadixMatch {
    found: Match,
    cache: u64,
    #[pyo3(get)]
    pages: Py<PyList>,
}

impl RadixMatch {
    fn new(py: Python<'_>, found: Match, cache: u64) -> PyResult<Self> {
        let pages = PyList::new(py, &found.pages)?.unbind();
        Ok(Self { found, cache, pages })
    }

    fn of(&self, cache: &Cache) -> PyResult<&Match> {
        match self.cache == cache.id() {
            true => Ok(&self.found),
            false => Err(PyValueError::new_err("match: of another cache, or from before a reset")),
        }
    }
}

#[pymethods]
impl RadixMatch {
    #[getter]
    fn num_unlocked(&self) -> usize {
        self.found.num_unlocked
    }

    /// Node at which the match ends, or `None` if it ends inside an edge.
    #[getter]
    fn end(&self) -> Option<u32> {
        self.found.end()
    }
}

/// Prefix cache with its page pool. Also implements `minisgl.scheduler.parts.PrefixTree`, which schedulers use.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct RadixCacheManager {
    cache: Cache,
    broken: Option<String>,
}

impl RadixCacheManager {
    fn run<T>(&mut self, py: Python<'_>, call: impl FnOnce(&mut Cache) -> Result<T, Error>) -> PyResult<T> {
        if let Some(what) = &self.broken {
            let what = format!("the prefix cache is broken: {what}");
            return Err(to_python(py, &Error::Broken(what)));
        }
        let result = caught(|| call(&mut self.cache));
        if let Err(Error::Broken(what)) = &result {
            self.broken = Some(what.clone());
        }
        result.map_err(|error| to_python(py, &error))
    }
}

fn name_of(policy: CachePolicy) -> &'static str {
    match policy {
        CachePolicy::Lru => "lru",
        CachePolicy::Lfu => "lfu",
        CachePolicy::Naive => "naive",
    }
}

/// Generates the one `#[pymethods]` block that PyO3 requires: properties, methods that forward to the tree, others.
macro_rules! methods {
    (
        $(get $number:ident: $kind:ty = |$of:ident| $value:expr;)*
        $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = |$cache:ident| $call:expr;)*
        others { $($other:tt)* }
    ) => {
        #[pymethods]
        impl RadixCacheManager {
            $(#[getter]
            fn $number(&self) -> $kind {
                let $of = &self.cache;
                $value
            })*
            $(fn $name(&mut self, py: Python<'_>, $($argument: $type),*) -> PyResult<$result> {
                self.run(py, |$cache| $call)
            })*
            $($other)*
        }
    };
}

methods! {
    get root: u32 = |_cache| 0;
    get page_size: usize = |cache| cache.tree.page_size();
    get policy: &'static str = |cache| name_of(cache.tree.policy());
    get has_states: bool = |cache| cache.tree.has_states();
    get num_available: usize = |cache| cache.tree.num_available();
    get num_free: usize = |cache| cache.free_pages().len();
    get num_evictable: usize = |cache| cache.tree.num_evictable();
    get num_protected: usize = |cache| cache.tree.num_protected();
    get num_inserted_total: u64 = |cache| cache.tree.num_inserted_total;
    get num_evicted_total: u64 = |cache| cache.tree.num_evicted_total;
    get num_checkpoints: usize = |cache| cache.tree.num_checkpoints();
    fn release(handle: u32) -> () = |cache| cache.tree.release(handle);
    fn drop(node: u32, depth: usize, keep: usize) -> () = |cache| cache.tree.drop_end(node, depth, keep);
    fn reset() -> () = |cache| { cache.reset(); Ok(()) };
    fn take_slot() -> Option<u32> = |cache| cache.tree.take_slot();
    fn put_checkpoint(node: u32, slot: u32, step: i64) -> () = |cache| cache.tree.put_checkpoint(node, slot, step);
    fn free_slot(slot: u32) -> () = |cache| { cache.tree.free_slot(slot); Ok(()) };
    fn use_checkpoint(node: u32) -> () = |cache| { cache.tree.use_checkpoint(node); Ok(()) };
    fn settle_checkpoints() -> () = |cache| { cache.tree.settle_checkpoints(); Ok(()) };
    fn hold_deepest(handle: u32) -> Option<u32> = |cache| Ok(cache.tree.hold_deepest(handle));
    fn unhold(node: u32) -> () = |cache| { cache.tree.unhold(node); Ok(()) };
    fn checkpoint(node: u32) -> i64 = |cache| Ok(cache.tree.checkpoint(node));
    fn free_pages() -> Vec<u32> = |cache| Ok(cache.free_pages().to_vec());
    fn free_slots() -> Vec<u32> = |cache| Ok(cache.tree.free_slots().to_vec());
    fn held_slots() -> Vec<u32> = |cache| Ok(cache.tree.held_slots());
    fn shape() -> Vec<(u32, u32, u32, Vec<u32>, i64)> = |cache| Ok(cache.tree.shape().collect());
    fn path(node: u32) -> (Vec<i32>, Vec<u32>) = |cache| Ok(cache.tree.path(node));
    fn path_nodes(node: u32) -> Vec<(u32, usize)> = |cache| Ok(cache.tree.path_nodes(node));
    others {
    #[new]
    #[pyo3(signature = (num_pages, page_size=1, policy="lru", num_checkpoints=None))]
    fn new(
        py: Python<'_>,
        num_pages: i64,
        page_size: i64,
        policy: &str,
        num_checkpoints: Option<i64>,
    ) -> PyResult<Self> {
        let policy = policy_of("policy", policy)?;
        let (num_pages, page_size) = (count("num_pages", num_pages)?, count("page_size", page_size)?);
        let num_checkpoints = num_checkpoints.map(|slots| count("num_checkpoints", slots)).transpose()?;
        let cache = guarded(py, || Cache::new(num_pages, page_size, policy, num_checkpoints))?;
        Ok(Self { cache, broken: None })
    }

    fn take(&mut self, py: Python<'_>, num_pages: i64) -> PyResult<Vec<u32>> {
        let num_pages = count("num_pages", num_pages)?;
        self.run(py, |cache| cache.take(num_pages))
    }

    fn free(&mut self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = pages_of(pages)?;
        self.run(py, |cache| cache.free(&pages))
    }

    #[pyo3(signature = (tokens, namespace=0))]
    fn match_prefix(
        &mut self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: i64,
    ) -> PyResult<(RadixCacheHandle, Vec<u32>)> {
        let (tokens, namespace) = (whole("tokens", tokens)?, namespace_of(namespace)?);
        let (handle, pages) = self.run(py, |cache| cache.match_prefix(&tokens, namespace))?;
        Ok((RadixCacheHandle(handle), pages))
    }

    #[pyo3(signature = (handle, unlock=false))]
    fn lock_handle(&mut self, mut handle: PyRefMut<'_, RadixCacheHandle>, unlock: bool) -> PyResult<()> {
        self.run(handle.py(), |cache| cache.lock_handle(&mut handle.0, unlock))
    }

    #[pyo3(signature = (tokens, pages, namespace=0))]
    fn insert_prefix(
        &mut self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        namespace: i64,
    ) -> PyResult<usize> {
        let (tokens, pages, namespace) = (whole("tokens", tokens)?, pages_of(pages)?, namespace_of(namespace)?);
        self.run(py, |cache| cache.insert_prefix(&tokens, &pages, namespace))
    }

    fn evict(&mut self, py: Python<'_>, num_pages: i64) -> PyResult<Vec<u32>> {
        let num_pages = count("num_pages", num_pages)?;
        self.run(py, |cache| cache.evict(num_pages))
    }

    fn size_info(&self) -> (usize, usize) {
        self.cache.size_info()
    }

    fn check_integrity(&mut self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |cache| cache.check_integrity())
    }

    #[pyo3(name = "match", signature = (node, tokens, first_page, max_pages, namespace=0))]
    fn find(
        &mut self,
        node: u32,
        tokens: &Bound<'_, PyAny>,
        first_page: usize,
        max_pages: usize,
        namespace: u32,
    ) -> PyResult<RadixMatch> {
        let (py, size, num_pages) = (tokens.py(), self.cache.tree.page_size(), max_pages.saturating_sub(first_page));
        let (from, to) = (first_page.saturating_mul(size), max_pages.max(first_page).saturating_mul(size));
        let tokens = part("tokens", tokens, from, Some(to))?;
        let matched = self.run(py, |cache| Ok(cache.tree.find(node, namespace, &tokens, 0, num_pages)))?;
        RadixMatch::new(py, matched, self.cache.id())
    }

    fn beginning(&mut self, py: Python<'_>, node: u32, r#match: &RadixMatch, step: i64) -> PyResult<RadixMatch> {
        let matched = r#match.of(&self.cache)?.clone();
        let matched = self.run(py, |cache| Ok(cache.tree.beginning(node, matched, step)))?;
        RadixMatch::new(py, matched, self.cache.id())
    }

    #[pyo3(signature = (node, tokens, column, namespace=0))]
    fn has_page(&mut self, node: u32, tokens: &Bound<'_, PyAny>, column: usize, namespace: u32) -> PyResult<bool> {
        let (py, size) = (tokens.py(), self.cache.tree.page_size());
        let from = column.saturating_mul(size);
        let tokens = part("tokens", tokens, from, Some(from.saturating_add(size)))?;
        self.run(py, |cache| Ok(cache.tree.has_page(node, namespace, &tokens, 0)))
    }

    fn following(
        &mut self,
        node: u32,
        tokens: &Bound<'_, PyAny>,
        first_page: usize,
        count: usize,
        namespace: u32,
    ) -> PyResult<Vec<i32>> {
        let first = first_page.saturating_mul(self.cache.tree.page_size());
        let rest = part("tokens", tokens, first, None)?;
        self.run(tokens.py(), |cache| Ok(cache.tree.following(node, &rest, 0, count, namespace).to_vec()))
    }

    fn descend(&mut self, py: Python<'_>, handle: u32, r#match: &RadixMatch) -> PyResult<u32> {
        let matched = r#match.of(&self.cache)?;
        self.run(py, |cache| cache.tree.descend(handle, matched))
    }

    #[pyo3(signature = (handle, tokens, pages, namespace=0))]
    fn append(
        &mut self,
        py: Python<'_>,
        handle: u32,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        namespace: u32,
    ) -> PyResult<u32> {
        let (tokens, pages) = (whole("tokens", tokens)?, pages_of(pages)?);
        self.run(py, |cache| {
            cache.claim(&pages)?;
            cache.tree.append(handle, namespace, &tokens, &pages)
        })
    }

    #[pyo3(signature = (handle, tokens, pages, first_page, namespace=0))]
    fn insert(
        &mut self,
        py: Python<'_>,
        handle: u32,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        first_page: usize,
        namespace: u32,
    ) -> PyResult<(u32, usize)> {
        let pages = pages_of(pages)?;
        let to = pages.len().saturating_mul(self.cache.tree.page_size());
        let tokens = part("tokens", tokens, 0, Some(to))?;
        self.run(py, |cache| {
            cache.insert(handle, namespace, &tokens, &pages, first_page)
        })
    }

    fn save(&mut self, py: Python<'_>, r#match: &RadixMatch, step: i64) -> PyResult<Option<u32>> {
        let matched = r#match.of(&self.cache)?;
        self.run(py, |cache| cache.tree.save(matched, step))
    }

    fn view(&mut self, py: Python<'_>, limit: usize, pinned: BTreeSet<u32>) -> PyResult<ShownTree> {
        self.run(py, |cache| Ok(tree_to_python(cache.tree.view(limit, &pinned))))
    }

    fn tree_pages<'py>(&self, py: Python<'py>) -> PyResult<Paths<'py>> {
        paths(py, self.cache.tree.tree_pages())
    }

    fn tree_states<'py>(&self, py: Python<'py>) -> PyResult<Paths<'py>> {
        paths(py, self.cache.tree.tree_states())
    }
    }
}

type Row = (usize, usize, usize, usize, usize, usize, bool, u32);
type Planned = (usize, usize, bool, usize, usize, usize, usize);

/// Plans the chunks of waiting prompts, in order.
#[pyfunction]
#[pyo3(signature = (
    candidates, *, budget, available, page_size=1, max_page_changes=65_536, reserve_ratio=716, needed=0
))]
#[allow(clippy::too_many_arguments)] // keywords of a Python function
pub(crate) fn prefill_admission_plan(
    py: Python<'_>,
    candidates: &Bound<'_, PyList>,
    budget: i64,
    available: i64,
    page_size: i64,
    max_page_changes: i64,
    reserve_ratio: i64,
    needed: i64,
) -> PyResult<Vec<Planned>> {
    let read = |(at, row): (usize, Bound<'_, PyAny>)| {
        let row: Row = row
            .extract()
            .map_err(|error| PyValueError::new_err(format!("candidates: {at}: {error}")))?;
        Ok(Candidate {
            length: row.0,
            num_pages: row.1,
            num_matched: row.2,
            num_unlocked: row.3,
            num_found: row.4,
            num_loadable: row.5,
            has_state: row.6,
            num_unscheduled: row.7,
        })
    };
    let rows: Vec<Candidate> = candidates.iter().enumerate().map(read).collect::<PyResult<_>>()?;
    let capacity = ChunkLimits {
        budget,
        available: count("available", available)?,
        page_size: count("page_size", page_size)?,
        max_page_changes: count("max_page_changes", max_page_changes)?,
        reserve_ratio: count("reserve_ratio", reserve_ratio)?,
        needed: count("needed", needed)?,
    };
    let plan = guarded(py, || minisgl_core::prefill_admission_plan(&rows, capacity))?;
    let rows = plan.into_iter();
    let rows = rows.map(|it| {
        let (tokens, pages, lacks) = (it.num_tokens, it.num_new_pages, it.lacks_pages);
        (
            tokens,
            pages,
            lacks,
            it.num_covered,
            it.num_loads,
            it.cost,
            it.num_missing,
        )
    });
    Ok(rows.collect())
}

macro_rules! arrays {
    ($($name:ident($first:ident, $second:ident);)*) => {
        $(#[pyfunction]
        pub(crate) fn $name<'py>(
            $first: &Bound<'py, PyAny>,
            $second: &Bound<'py, PyAny>,
        ) -> PyResult<Bound<'py, PyAny>> {
            let (one, two) = (whole(stringify!($first), $first)?, whole(stringify!($second), $second)?);
            let py = $first.py();
            to_numpy(py, guarded(py, || minisgl_core::$name(&one, &two))?.into_iter())
        })*
    };
}

arrays! {
    make_positions(starts, extend_lens);
    make_input_mapping(req_slots, extend_lens);
    make_write_mapping(seq_lens, samples);
}

/// Returns the arrays of a step, as views of one packed array.
#[pyfunction]
#[pyo3(signature = (starts, extend_lens, pages, page_size=1))]
pub(crate) fn make_metadata_buffers<'py>(
    py: Python<'py>,
    starts: &Bound<'py, PyAny>,
    extend_lens: &Bound<'py, PyAny>,
    pages: &Bound<'py, PyAny>,
    page_size: i64,
) -> PyResult<Bound<'py, PyDict>> {
    let (starts, extend_lens) = (whole("starts", starts)?, whole("extend_lens", extend_lens)?);
    let (pages, page_size) = (whole("pages", pages)?, count("page_size", page_size)?);
    let made = guarded(py, || {
        minisgl_core::make_metadata_buffers(&starts, &extend_lens, &pages, page_size)
    })?;
    let Metadata {
        packed,
        num_tokens,
        num_rows,
    } = made;
    let packed = to_numpy(py, packed.into_iter())?;
    let arrays = PyDict::new(py);
    let mut from = 0;
    for (name, len) in [
        ("positions", num_tokens),
        ("out_loc", num_tokens),
        ("seq_lens", num_rows),
        ("last_page_len", num_rows),
        ("qo_indptr", num_rows + 1),
        ("kv_indptr", num_rows + 1),
    ] {
        arrays.set_item(
            name,
            packed.get_item(pyo3::types::PySlice::new(py, from, from + len as isize, 1))?,
        )?;
        from += len as isize;
    }
    arrays.set_item("packed", packed)?;
    Ok(arrays)
}
