//! What a control plane decides by, and the sizes that follow from it.

/// Which prefix cache, and in which order it gives pages back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePolicy {
    /// Least recently used first.
    Lru,
    /// Least often used first, then least recently.
    Lfu,
    /// No cache.
    Naive,
}

/// The same fields as `ControlPlaneConfig` of the Python side, which checks them.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pages of the KV pool.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Rows of a step.
    pub max_running_requests: usize,
    /// Token budget of a step.
    pub max_prefill_length: usize,
    /// Prompt and generated tokens of a request.
    pub context_len: usize,
    /// Ids that end every request that does not ignore them.
    pub eos_ids: Vec<i32>,
    /// The prefix cache.
    pub cache: CachePolicy,
    /// Padded row counts, ascending.
    pub graph_sizes: Vec<usize>,
}

/// The same as `StepLimits` of the Python side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Request slots; the scratch slot has this number.
    pub max_rows: usize,
    /// Tokens of a step.
    pub max_tokens: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Pages; the scratch page has this number.
    pub num_pages: usize,
    /// Total length of a request.
    pub max_seq_len: usize,
}

impl Config {
    /// Decode rows are scheduled whatever the budget, and the first prefill gets a page whatever is left.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            max_rows: self.max_running_requests,
            max_tokens: self.max_running_requests + self.max_prefill_length.max(self.page_size),
            page_size: self.page_size,
            num_pages: self.num_pages,
            max_seq_len: self.context_len.min(self.num_pages * self.page_size + 1),
        }
    }
}

impl Limits {
    /// Page-table entries of one step.
    #[must_use]
    pub fn max_page_changes(&self) -> usize {
        let per_request = self.max_seq_len.div_ceil(self.page_size);
        self.max_rows + per_request.max(self.num_pages.min(65_536))
    }
}

/// Divides by the page size, by a shift where it is a power of two.
#[derive(Clone, Copy)]
pub(crate) struct PageSize {
    size: u32,
    mask: u32, // of a power of two, else 0
    shift: u32,
}

impl PageSize {
    pub fn new(tokens: usize) -> Self {
        let size = tokens as u32;
        Self {
            size,
            mask: if size.is_power_of_two() { size - 1 } else { 0 },
            shift: size.trailing_zeros(),
        }
    }

    pub fn size(self) -> u32 {
        self.size
    }

    /// Pages of so many tokens.
    pub fn count(self, tokens: u32) -> u32 {
        let (full, rest) = self.split(tokens);
        full + u32::from(rest > 0)
    }

    /// Column and offset of a position.
    pub fn split(self, position: u32) -> (u32, u32) {
        if self.mask + 1 == self.size {
            (position >> self.shift, position & self.mask)
        } else {
            (position / self.size, position % self.size)
        }
    }
}

impl Limits {
    pub(crate) fn pages(&self) -> PageSize {
        PageSize::new(self.page_size)
    }
}
