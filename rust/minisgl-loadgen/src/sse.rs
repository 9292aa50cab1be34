//! Splitting of a byte stream into server-sent events, wherever the bytes were split in transit.
//!
//! Invariants: an event is returned once, when its blank line has arrived; lines end with LF or CR LF.

use memchr::memchr;

/// State of the splitter between two pieces of the stream.
#[derive(Default)]
pub struct Splitter {
    line: Vec<u8>,
    data: Vec<u8>,
    num_data_lines: usize,
}

impl Splitter {
    /// Appends a piece of the stream; `event` is called with the data of each event that it completes. Several `data:`
    /// lines of one event are joined with LF. Other fields and comments are dropped.
    pub fn push(&mut self, mut bytes: &[u8], mut event: impl FnMut(&[u8])) {
        while let Some(end) = memchr(b'\n', bytes) {
            if self.line.is_empty() {
                self.end_of_line(&bytes[..end], &mut event);
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&bytes[..end]);
                self.end_of_line(&line, &mut event);
                line.clear();
                self.line = line; // reuses its memory
            }
            bytes = &bytes[end + 1..];
        }
        self.line.extend_from_slice(bytes);
    }

    fn end_of_line(&mut self, line: &[u8], event: &mut impl FnMut(&[u8])) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            if self.num_data_lines > 0 {
                event(&self.data);
            }
            self.data.clear();
            self.num_data_lines = 0;
        } else if let Some(value) = line.strip_prefix(b"data:") {
            if self.num_data_lines > 0 {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.num_data_lines += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(pieces: &[&[u8]]) -> Vec<String> {
        let (mut splitter, mut events) = (Splitter::default(), Vec::new());
        for piece in pieces {
            splitter.push(piece, |data| {
                events.push(String::from_utf8_lossy(data).into_owned());
            });
        }
        events
    }

    const STREAM: &str = concat!(
        ": hello\n\ndata: {\"a\":\"\u{e4}\u{1f600}\"}\n\n",
        "event: x\ndata:one\ndata: two\n\ndata: [DONE]\n\n"
    );
    const EVENTS: [&str; 3] = ["{\"a\":\"\u{e4}\u{1f600}\"}", "one\ntwo", "[DONE]"];

    #[test]
    fn stream_split_at_any_two_bytes_gives_same_events() {
        for text in [STREAM.to_owned(), STREAM.replace('\n', "\r\n")] {
            let bytes = text.as_bytes();
            for first in 0..=bytes.len() {
                for second in first..=bytes.len() {
                    let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                    assert_eq!(split(&pieces), EVENTS, "cut at {first} and {second}");
                }
            }
        }
    }

    #[test]
    fn stream_read_byte_by_byte_gives_same_events() {
        let pieces: Vec<&[u8]> = STREAM.as_bytes().chunks(1).collect();
        assert_eq!(split(&pieces), EVENTS);
    }

    #[test]
    fn event_without_blank_line_is_not_returned() {
        assert_eq!(split(&[b"data: a\n\ndata: b\n"]), ["a"]);
        assert_eq!(split(&[b"data: a\n\ndata: b"]), ["a"]);
    }

    #[test]
    fn empty_data_is_an_event_and_no_data_is_none() {
        assert_eq!(split(&[b"data:\n\n\n\nid: 7\n\ndata: x\n\n"]), ["", "x"]);
    }
}
