//! Search for stop strings in a growing text.
//!
//! Invariants: text that may be the beginning of a stop string is held back until that is decided. The first match is
//! the one that ends first; of those that end together, the one that begins first. Bytes work as well as characters:
//! text arrives in whole characters, and no character's bytes begin inside another's.

use memchr::memchr;

/// Knuth-Morris-Pratt search for one stop string: linear for any stop string and text. The table grows with the matched
/// length, so that a long stop string costs nothing before text resembles it.
struct Search {
    stop: Box<[u8]>,
    /// Bytes of the stop string that the text ends with now.
    matched_len: usize,
    /// Failure table: `[n]` is the length of the longest proper prefix of the first n bytes that is also their suffix.
    borders: Vec<usize>,
}

impl Search {
    fn new(stop: &str) -> Self {
        Self {
            stop: stop.as_bytes().into(),
            matched_len: 0,
            borders: vec![0, 0],
        }
    }

    /// Searches the next `text`. Returns the offset at which the first match ends. Must not be called after a match.
    fn push(&mut self, text: &[u8]) -> Option<usize> {
        let mut matched = self.matched_len;
        let mut at = 0;
        while at < text.len() {
            if matched == 0 {
                let Some(skipped) = memchr(self.stop[0], &text[at..]) else {
                    break;
                };
                at += skipped;
            }
            while matched > 0 && self.stop[matched] != text[at] {
                matched = self.borders[matched];
            }
            if self.stop[matched] == text[at] {
                matched += 1;
                self.extend(matched);
                if matched == self.stop.len() {
                    self.matched_len = matched;
                    return Some(at + 1);
                }
            }
            at += 1;
        }
        self.matched_len = matched;
        None
    }

    /// Extends the failure table to the first `len` bytes; it must cover `len - 1`.
    fn extend(&mut self, len: usize) {
        if self.borders.len() > len {
            return;
        }
        let byte = self.stop[len - 1];
        let mut border = self.borders[len - 1];
        while border > 0 && self.stop[border] != byte {
            border = self.borders[border];
        }
        self.borders.push(border + usize::from(self.stop[border] == byte));
    }
}

/// Truncates a growing text at the first of its stop strings. Empty ones are ignored.
pub(super) struct StopMatcher {
    searches: Vec<Search>,
    held: String,
    /// Index of the search that matched.
    found: Option<usize>,
}

impl StopMatcher {
    pub(super) fn new(stops: &[String]) -> Self {
        let searches = stops
            .iter()
            .filter(|stop| !stop.is_empty())
            .map(|stop| Search::new(stop))
            .collect();
        Self {
            searches,
            held: String::new(),
            found: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.searches.is_empty()
    }

    /// Returns the stop string that matched.
    pub(super) fn matched(&self) -> Option<&str> {
        let search = &self.searches[self.found?];
        std::str::from_utf8(&search.stop).ok()
    }

    /// Appends the text that is final: all before the match, or all that no later match can include.
    pub(super) fn push(&mut self, text: &str, out: &mut String) {
        if self.searches.is_empty() {
            out.push_str(text);
            return;
        }
        let before = self.held.len();
        let ends = self.searches.iter_mut().enumerate().filter_map(|(at, search)| {
            let end = search.push(text.as_bytes())?;
            Some((end, std::cmp::Reverse(search.stop.len()), at))
        });
        // every search consumes the text, so that the next push continues there
        let first = ends.min();
        self.held.push_str(text);
        let cut = match first {
            Some((end, std::cmp::Reverse(len), at)) => {
                self.found = Some(at);
                before + end - len
            }
            None => self.held.len() - self.searches.iter().map(|search| search.matched_len).max().unwrap_or(0),
        };
        out.push_str(&self.held[..cut]);
        if self.found.is_some() {
            self.held.clear();
        } else {
            self.held.drain(..cut);
        }
    }

    /// Appends text without searching it. The search restarts after it.
    pub(super) fn skip(&mut self, text: &str, out: &mut String) {
        for search in &mut self.searches {
            search.matched_len = 0;
        }
        self.flush(out);
        out.push_str(text);
    }

    /// Appends the held-back text. Call at the end of the text.
    pub(super) fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::StopMatcher;

    /// A quadratic search would take minutes here.
    #[test]
    fn stop_search_is_linear() {
        let mut matcher = StopMatcher::new(&["a".repeat(200_000) + "b"]);
        let (text, mut out) = ("a".repeat(1_000_000), String::new());
        matcher.push(&text, &mut out);
        matcher.flush(&mut out);
        assert!(out == text);
    }
}
