//! White space as Python defines it.

/// Returns true for the characters that Python's `str.isspace` accepts.
pub fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}')
}
