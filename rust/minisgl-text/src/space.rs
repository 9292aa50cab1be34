//! White space as Python has it.

/// What Python calls white space.
pub fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}')
}
