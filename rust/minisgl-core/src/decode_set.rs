//! The started requests in request order, as dense records: what a decode step visits.
//!
//! Keeps true: a row is scheduled only if the token it makes is within the request's limits, which is known before the
//! token is; its input is the last token of the sequence, known to the host or not.
//! Doesn't know: where a new page comes from, what else runs in the step.
//!
//! While a request decodes, its row is the truth and its record in `Requests` is as old as the last `settle`, which
//! whoever reads the record calls first. While it prefills the record is the truth, and the row only stands for it.
//! A plain decode step so reads and writes one array in order, and the ends of sequences and page tables (`tails`).

use crate::config::PageSize;
use crate::error::{Result, broken};
use crate::page_pool::Page;
use crate::request::{Index, NO_STEP, Requests};
use crate::tails::Tails;

/// A started request. Lengths in tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub req_id: i64,
    pub index: Index,
    pub slot: u32,
    pub kv_len: u32,     // tokens whose KV is computed, or scheduled to be
    pub left: u32,       // tokens that may yet be scheduled to be made
    pub last_page: Page, // of its page table
    pub last_token: i32, // the last committed one
    last_step: u32,      // the low bits of the last step that holds a row of it
    pub num_pending: u8, // tokens scheduled to be made and not committed
    pub prefills: bool,
    pub has_stop_ids: bool,
    no_overlap: bool,
}

impl Row {
    /// Whether it may decode now. Not while it prefills; not once its last token is in flight; a `no_overlap` request not
    /// while any token is.
    pub fn is_eligible(&self) -> bool {
        !self.prefills && self.left > 0 && !(self.no_overlap && self.num_pending > 0)
    }

    /// The row computes the KV of the last token and makes the next one.
    pub fn schedule(&mut self, step: i64) {
        self.kv_len += 1;
        self.left -= 1;
        self.num_pending += 1;
        self.last_step = step as u32;
    }

    /// The input of a row just scheduled. A token that is not committed yet stands as -(slot + 1): the engine takes it
    /// from its own last_token[slot].
    pub fn input_token(&self) -> i32 {
        if self.num_pending == 1 {
            self.last_token
        } else {
            -(self.slot as i32 + 1)
        }
    }

    /// Whether it says the same as the settled record of `index`. For checks.
    pub fn is_of(&self, index: Index, requests: &Requests) -> bool {
        *self == row_of(index, requests)
    }

    /// Committed tokens of a row that decodes: its KV reaches to the last token before the one that it makes last.
    fn len(&self) -> u32 {
        self.kv_len + 1 - u32::from(self.num_pending)
    }
}

const NO_PLACE: u32 = u32::MAX;

/// The started requests, sorted by (priority, arrival).
pub(crate) struct DecodeSet {
    rows: Vec<Row>, // those before `head` have left
    head: usize,
    place: Vec<u32>, // by request index: where in `rows` it stands
    tails: Tails,
    page_size: PageSize,
}

impl DecodeSet {
    pub fn new(max_rows: usize, page_size: PageSize) -> Self {
        Self {
            rows: Vec::with_capacity(2 * max_rows),
            head: 0,
            place: Vec::new(),
            tails: Tails::new(max_rows),
            page_size,
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len() - self.head
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// In request order.
    pub fn rows(&self) -> &[Row] {
        &self.rows[self.head..]
    }

    pub fn rows_mut(&mut self) -> &mut [Row] {
        &mut self.rows[self.head..]
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Index> + '_ {
        self.rows().iter().map(|row| row.index)
    }

    pub fn last(&self) -> Option<Index> {
        self.iter().next_back()
    }

    /// Where in `rows()` the request stands, if it has started.
    pub fn find(&self, index: Index) -> Option<usize> {
        match self.place.get(index as usize) {
            Some(&place) if place != NO_PLACE => Some(place as usize - self.head),
            _ => None,
        }
    }

    // ---------------------------------------------------------------------------------------------- coming, going

    /// A request that has just started, with its first chunk.
    pub fn add(&mut self, index: Index, requests: &Requests) {
        let order = requests.detail(index).order;
        let before = |row: &Row| requests.detail(row.index).order < order;
        let at = if self.rows().last().is_none_or(before) {
            self.rows.len()
        } else {
            self.head + self.rows().partition_point(before)
        };
        let known = self.place.len().max(index as usize + 1);
        self.place.resize(known, NO_PLACE);
        self.rows.insert(at, row_of(index, requests));
        self.number_from(at);
    }

    /// Take a request out. It was settled before, as its record is what is left of it.
    pub fn remove(&mut self, index: Index) -> Result<()> {
        let Some(at) = self.find(index) else {
            return broken("a request that has not started is to leave the decode set");
        };
        self.place[index as usize] = NO_PLACE;
        if at > 0 {
            self.rows.remove(self.head + at);
            self.number_from(self.head + at);
            return Ok(());
        }
        self.head += 1;
        if self.head > self.rows.len() / 2 {
            self.rows.drain(..self.head);
            self.head = 0;
            self.number_from(0);
        }
        Ok(())
    }

    pub fn clear(&mut self) {
        self.rows.clear();
        self.head = 0;
        self.place.fill(NO_PLACE);
    }

    fn number_from(&mut self, at: usize) {
        for (row, place) in self.rows[at..].iter().zip(at as u32..) {
            self.place[row.index as usize] = place;
        }
    }

    // --------------------------------------------------------------------------------------------- row and record

    /// The record has changed (a chunk was scheduled): the row follows.
    pub fn load(&mut self, index: Index, requests: &Requests) {
        if let Some(at) = self.find(index) {
            self.rows_mut()[at] = row_of(index, requests);
        }
    }

    /// Bring the record up to date, its tokens and pages with it. `now` is the last step that was scheduled.
    pub fn settle(&mut self, index: Index, now: i64, requests: &mut Requests) {
        let Some(at) = self.find(index) else {
            return;
        };
        let row = &self.rows[self.head + at];
        if row.prefills {
            return;
        }
        let request = requests.get_mut(index);
        request.kv_len = row.kv_len;
        request.len = row.len();
        request.num_pending = row.num_pending;
        request.last_step = now - i64::from((now as u32).wrapping_sub(row.last_step));
        let body = &mut requests.bodies[index as usize];
        let num_pages = self.page_size.count(row.kv_len);
        self.tails
            .settle_tokens(row.slot, row.len(), &mut body.tokens);
        self.tails
            .settle_pages(row.slot, num_pages, &mut body.pages);
    }

    // ------------------------------------------------------------------------------------------------ a step's part

    /// Whether the next token of the row at `at` begins a page.
    pub fn needs_page(&self, at: usize) -> bool {
        self.page_size.split(self.rows()[at].kv_len).1 == 0
    }

    /// `page` is where the next token of the row at `at` goes.
    pub fn push_page(&mut self, at: usize, page: Page, requests: &mut Requests) {
        let row = &mut self.rows[self.head + at];
        row.last_page = page;
        let column = self.page_size.split(row.kv_len).0;
        if self.tails.push_page(row.slot, column, page) {
            let pages = &mut requests.bodies[row.index as usize].pages;
            self.tails.settle_pages(row.slot, column + 1, pages);
        }
    }

    /// Take the token that the decoding row at `at` made. Returns the row, with its length in tokens.
    pub fn push_token(&mut self, at: usize, token: i32, requests: &mut Requests) -> (&Row, u32) {
        let row = &mut self.rows[self.head + at];
        row.num_pending -= 1;
        row.last_token = token;
        let len = row.len();
        if self.tails.push_token(row.slot, len - 1, token) {
            let tokens = &mut requests.bodies[row.index as usize].tokens;
            self.tails.settle_tokens(row.slot, len, tokens);
        }
        (row, len)
    }

    // ------------------------------------------------------------------------------------------------------ counts

    /// Rows that decode in this step, if there are pages.
    pub fn num_eligible(&self) -> usize {
        self.rows().iter().filter(|row| row.is_eligible()).count()
    }

    pub fn num_pages(&self, row: &Row, requests: &Requests) -> usize {
        if row.prefills {
            requests.pages(row.index).len()
        } else {
            self.page_size.count(row.kv_len) as usize
        }
    }

    /// The page table of a request, copied.
    pub fn page_table(&self, index: Index, requests: &Requests) -> Vec<Page> {
        let mut pages = requests.pages(index).to_vec();
        if let Some(at) = self.find(index) {
            let row = &self.rows()[at];
            let count = self.num_pages(row, requests) as u32;
            self.tails.settle_pages(row.slot, count, &mut pages);
        }
        pages
    }
}

fn row_of(index: Index, requests: &Requests) -> Row {
    let request = requests.get(index);
    debug_assert_ne!(request.last_step, NO_STEP);
    Row {
        req_id: request.req_id,
        index,
        slot: request.slot,
        kv_len: request.kv_len,
        left: request.num_unscheduled(),
        last_page: requests.pages(index).last().copied().unwrap_or(0),
        last_token: requests.tokens(index).last().copied().unwrap_or(0),
        last_step: request.last_step as u32,
        num_pending: request.num_pending,
        prefills: request.is_prefilling(),
        has_stop_ids: request.has_stop_ids,
        no_overlap: request.no_overlap,
    }
}
