//! Which decoding rows look at the same pages.
//!
//! Rows are divided page by page like the branches of a tree: rows with the same pages so far stay together, what all of
//! them share is a segment if reading it once is worth a merge, and where they part each branch goes on alone.
//!
//! Invariants: each page of each row is compared once with a neighbour's; a row's chunks are in shared segments up to some
//! chunk and in its own from there on.

use std::ops::Range;

use super::kernel::CHUNK;
use super::rows::Rows;

/// Chunks that several rows see through the same pages.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    /// Which of [`Finder::members`].
    pub members: Range<usize>,
    pub chunks: Range<u32>,
}

/// A row's chunks from `from` on, which it sees alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    pub row: u32,
    pub from: u32,
}

/// Rows that agree in their first pages.
#[derive(Debug)]
struct Branch {
    members: Range<usize>,
    /// Pages that all of them share for sure.
    depth: usize,
    /// The first chunk that is in no segment yet.
    from: u32,
}

/// Finds what rows share; keeps its allocations.
#[derive(Debug, Default)]
pub(super) struct Finder {
    pub members: Vec<u32>,
    pub shared: Vec<Shared>,
    pub own: Vec<Own>,
    branches: Vec<Branch>,
}

impl Finder {
    pub fn clear(&mut self) {
        self.members.clear();
        self.shared.clear();
        self.own.clear();
        self.branches.clear();
    }

    /// A row of one token.
    pub fn add(&mut self, row: u32) {
        self.members.push(row);
    }

    /// Divide the rows added since `clear` into shared and own chunks.
    pub fn find(&mut self, rows: &Rows<'_>, page_size: usize, window: Option<usize>, sharing: bool) {
        if !sharing || self.members.len() < 2 {
            let own = self.members.iter().map(|row| Own { row: *row, from: 0 });
            self.own.extend(own);
            return;
        }
        self.branches.push(Branch {
            members: 0..self.members.len(),
            depth: 0,
            from: 0,
        });
        while let Some(branch) = self.branches.pop() {
            self.follow(branch, rows, page_size, window);
        }
    }

    fn follow(&mut self, branch: Branch, rows: &Rows<'_>, page_size: usize, window: Option<usize>) {
        let Branch {
            members,
            depth,
            mut from,
        } = branch;
        let full = |row: u32| {
            let row = row as usize;
            &rows.pages(row)[..rows.seq_lens[row] as usize / page_size]
        };
        let group = &mut self.members[members.clone()];
        if let [row] = *group {
            self.own.push(Own { row, from });
            return;
        }
        let model = full(group[0]);
        let mut common = model.len();
        for row in &group[1..] {
            common = depth + agreement(&model[depth..common], &full(*row)[depth..]);
        }
        let end = (common * page_size / CHUNK) as u32;
        if worth(group, from..end, rows, window) {
            self.shared.push(Shared {
                members: members.clone(),
                chunks: from..end,
            });
            from = end;
        }
        // Rows that end here are branches of their own: no page has their key.
        let key = |row: u32| {
            full(row)
                .get(common)
                .map_or(u64::MAX - u64::from(row), |p| u64::from(*p))
        };
        group.sort_unstable_by_key(|row| (key(*row), *row));
        let mut start = members.start;
        for part in group.chunk_by(|a, b| key(*a) == key(*b)) {
            self.branches.push(Branch {
                members: start..start + part.len(),
                depth: common,
                from,
            });
            start += part.len();
        }
    }
}

/// How many pages two tables have in common from the start.
fn agreement(a: &[u32], b: &[u32]) -> usize {
    const STEP: usize = 32;
    let n = a.len().min(b.len());
    let mut same = 0;
    while same + STEP <= n && a[same..same + STEP] == b[same..same + STEP] {
        same += STEP;
    }
    let rest = a[same..n].iter().zip(&b[same..n]);
    same + rest.take_while(|(x, y)| x == y).count()
}

/// Whether reading these chunks once for all these rows saves more than merging costs.
fn worth(group: &[u32], chunks: Range<u32>, rows: &Rows<'_>, window: Option<usize>) -> bool {
    let (mut seeing, mut longest, mut alone) = (0u64, 0u64, 0u64);
    for row in group {
        let len = rows.seq_lens[*row as usize];
        let lo = window.map_or(0, |w| (len as usize).saturating_sub(w.max(1)) / CHUNK) as u32;
        let seen = u64::from(chunks.end.saturating_sub(chunks.start.max(lo)));
        seeing += seen;
        longest = longest.max(seen);
        alone += u64::from(len.div_ceil(CHUNK as u32) - chunks.end);
    }
    (seeing - longest) * 8 > alone + 16
}
