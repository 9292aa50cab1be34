//! A template's source before it is parsed: what jinja's lexer and minijinja's would read differently is refused.
//!
//! Invariants: what comes out means to minijinja's lexer, with the same white space, what the source means to jinja's.

use super::value::{Result, refuse};

/// What a tag has at most: it may be as deep as it has tokens.
const MAX_TOKENS: usize = 1000;
/// One `elif` is inside the one before it.
const MAX_ELIFS: usize = 100;

/// The source for minijinja's parser. `{% generation %}` marks assistant text for training; all that is left of it is
/// that names set in it end with it.
pub(super) fn prepared(source: &str) -> Result<String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source
        .chars()
        .any(|char| char.is_ascii_control() && !matches!(char, '\n' | '\t'))
    {
        return refuse("control characters");
    }
    if source.matches("elif").count() > MAX_ELIFS {
        return refuse("very many branches");
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = find_tag(rest) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let len = match rest.as_bytes()[1] {
            b'#' => match rest[2..].find("#}") {
                Some(end) => end + 4,
                None => return refuse("a comment without an end"),
            },
            kind => tag_len(rest, kind)?,
        };
        push_tag(&rest[..len], &mut out)?;
        rest = &rest[len..];
    }
    out.push_str(rest);
    Ok(out)
}

fn find_tag(text: &str) -> Option<usize> {
    text.as_bytes()
        .windows(2)
        .position(|pair| pair[0] == b'{' && matches!(pair[1], b'{' | b'%' | b'#'))
}

/// Up to its end outside of strings and brackets.
fn tag_len(tag: &str, kind: u8) -> Result<usize> {
    let end = if kind == b'{' { b"}}" } else { b"%}" };
    let bytes = tag.as_bytes();
    let mut depth = 0_usize;
    let mut num_tokens = 0;
    let mut at = 2;
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    while at < bytes.len() {
        if depth == 0 && bytes[at..].starts_with(end) {
            return Ok(at + 2);
        }
        num_tokens += usize::from(!is_word(bytes[at]) || !is_word(bytes[at - 1]));
        if num_tokens > MAX_TOKENS {
            return refuse("a very long tag");
        }
        match bytes[at] {
            quote @ (b'"' | b'\'') => at = string_end(bytes, at, quote)?,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => match depth.checked_sub(1) {
                Some(less) => depth = less,
                None => return refuse("a bracket too many"),
            },
            _ => {}
        }
        at += 1;
    }
    refuse("a tag without an end")
}

fn string_end(bytes: &[u8], begin: usize, quote: u8) -> Result<usize> {
    let mut at = begin + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            byte if byte == quote => return Ok(at),
            _ => {}
        }
        at += 1;
    }
    refuse("a string without an end")
}

fn push_tag(tag: &str, out: &mut String) -> Result<()> {
    if tag.starts_with("{{") && tag.ends_with("+}}") {
        return refuse("+}}");
    }
    if tag.starts_with("{%") {
        let inside = &tag[2..tag.len() - 2];
        let signs = ['-', '+'];
        let trimmed = inside.strip_prefix(signs).unwrap_or(inside);
        let name = trimmed.strip_suffix(signs).unwrap_or(trimmed).trim();
        let new = match name {
            "raw" | "endraw" => return refuse("a raw block"),
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => "",
        };
        if !new.is_empty() {
            out.push_str(&tag.replacen(name, new, 1));
            return Ok(());
        }
    }
    out.push_str(tag);
    Ok(())
}

/// The text of a string literal, or of several one after the other, as Python reads its escapes.
pub(super) fn unescaped(literal: &str) -> Result<String> {
    let mut out = String::new();
    let mut chars = literal.chars();
    while let Some(quote) = chars.find(|char| !char.is_whitespace()) {
        if !matches!(quote, '"' | '\'') {
            return refuse("a string that is none");
        }
        loop {
            match chars.next() {
                None => return refuse("a string without an end"),
                Some('\\') => out.push(match chars.next() {
                    Some('n') => '\n',
                    Some('t') => '\t',
                    Some('r') => '\r',
                    Some('b') => '\u{8}',
                    Some('f') => '\u{c}',
                    Some(char @ ('\\' | '\'' | '"')) => char,
                    Some('x') => from_hex(&mut chars, 2)?,
                    Some('u') => from_hex(&mut chars, 4)?,
                    Some('\n') => continue,
                    _ => return refuse("an unusual escape in a string"),
                }),
                Some(char) if char == quote => break,
                Some(char) => out.push(char),
            }
        }
    }
    Ok(out)
}

fn from_hex(chars: &mut std::str::Chars<'_>, count: usize) -> Result<char> {
    let digits: String = chars.by_ref().take(count).collect();
    let code = if digits.len() == count && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        u32::from_str_radix(&digits, 16).ok()
    } else {
        None
    };
    match code.and_then(char::from_u32) {
        Some(char) => Ok(char),
        None => refuse("an unusual escape in a string"),
    }
}
