//! `/metrics` of a gateway that is a process of its own: what it counted, in the Python server's names, added to what
//! the Python server counted.
//!
//! Keeps true: a series is one number, whoever answered; what is not ours stays as it is, in its order.
//! Doesn't know: how the Python server is asked.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::keys::KeyCounts;
use crate::metrics::{Histogram, Metrics};
use crate::text::CacheStats;

type Count = fn(&KeyCounts) -> u64;
const KEY_FAMILIES: [(&str, &str, Count); 3] = [
    (
        "minisgl:key_requests_total",
        "requests given to the engine, by API key",
        |one| one.num_requests.load(Relaxed),
    ),
    ("minisgl:key_prompt_tokens_total", "tokens of their prompts", |one| {
        one.num_prompt.load(Relaxed)
    }),
    ("minisgl:key_generated_tokens_total", "tokens of their answers", |one| {
        one.num_generated.load(Relaxed)
    }),
];

/// Reasons in the order of [`Metrics::finished`].
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// What the gateway counted; `keys`: by API key, names first.
pub fn exposition(metrics: &Metrics, cache: &CacheStats, keys: &[(String, Arc<KeyCounts>)]) -> String {
    let mut text = String::new();
    let mut counter = |name: &str, help: &str, values: &[(&str, u64)]| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{labels} {:?}", *value as f64);
        }
    };
    let finished: Vec<_> = REASONS
        .iter()
        .map(|reason| format!("{{reason=\"{reason}\"}}"))
        .collect();
    let finished: Vec<_> = finished
        .iter()
        .zip(&metrics.finished)
        .map(|(labels, one)| (labels.as_str(), one.load(Relaxed)))
        .collect();
    let accepted = metrics.accepted.load(Relaxed);
    counter(
        "minisgl:requests_accepted_total",
        "requests given to the engine",
        &[("", accepted)],
    );
    counter("minisgl:requests_finished_total", "by finish reason", &finished);
    let generated = metrics.generated.load(Relaxed);
    counter(
        "minisgl:generated_tokens_total",
        "tokens received from the engine",
        &[("", generated)],
    );
    let shortened = metrics.shortened.load(Relaxed);
    counter(
        "minisgl:requests_shortened_total",
        "requests with less than their default length",
        &[("", shortened)],
    );
    let labels: Vec<_> = keys.iter().map(|(name, _)| format!("{{key=\"{name}\"}}")).collect();
    for (name, help, count) in KEY_FAMILIES {
        let values = labels.iter().zip(keys);
        let values: Vec<_> = values.map(|(label, (_, one))| (label.as_str(), count(one))).collect();
        counter(name, help, &values);
    }
    let (answered, passed_on) = (metrics.answered.load(Relaxed), metrics.passed_on.load(Relaxed));
    counter(
        "minisgl:gateway_requests_total",
        "requests by what the gateway did",
        &[
            ("{outcome=\"answered\"}", answered),
            ("{outcome=\"passed_on\"}", passed_on),
        ],
    );
    counter(
        "minisgl:encode_cache_texts_total",
        "texts between special tokens that the gateway looked up",
        &[("{outcome=\"hit\"}", cache.hits), ("{outcome=\"miss\"}", cache.misses)],
    );
    let saved = ("", cache.bytes_hit);
    counter(
        "minisgl:encode_cache_hit_bytes_total",
        "text that was not encoded again",
        &[saved],
    );
    for (name, help, one) in [
        ("minisgl:ttft_seconds", "arrival to first token", &metrics.ttft),
        ("minisgl:itl_seconds", "between tokens of a request", &metrics.itl),
        ("minisgl:e2e_seconds", "arrival to last token", &metrics.e2e),
        (
            "minisgl:queue_seconds",
            "given to the engine to having a row",
            &metrics.queue,
        ),
        ("minisgl:prompt_length_tokens", "tokens of a prompt", &metrics.prompt),
        (
            "minisgl:answer_length_tokens",
            "generated tokens of a finished request",
            &metrics.answer,
        ),
    ] {
        push_histogram(&mut text, name, help, one);
    }
    text
}

fn push_histogram(text: &mut String, name: &str, help: &str, histogram: &Histogram) {
    let (counts, sum) = histogram.read();
    let ends = histogram
        .bounds()
        .iter()
        .map(|bound| format!("{bound:?}"))
        .chain(["+Inf".to_owned()]);
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
    let mut count = 0;
    for (end, one) in ends.zip(&counts) {
        count += one;
        let _ = writeln!(text, "{name}_bucket{{le=\"{end}\"}} {:?}", count as f64);
    }
    let _ = writeln!(text, "{name}_count {:?}\n{name}_sum {sum:?}", count as f64);
}

/// A family of series: its comments, and its samples that are still to be told.
struct Family<'a> {
    name: &'a str,
    comments: Vec<&'a str>,
    samples: Vec<(&'a str, f64)>,
}

/// `theirs` with `ours` added: series of the same name and labels add up; those that only `ours` has stand at the ends of
/// their families, or at the end.
pub fn merged(ours: &str, theirs: &str) -> String {
    let mut families = families(ours);
    let mut text = String::with_capacity(ours.len() + theirs.len());
    let mut current: Option<&str> = None;
    for line in theirs.lines() {
        if let Some(name) = named(line) {
            if current != Some(name) {
                push_samples(&mut text, current, &mut families);
                current = Some(name);
            }
        } else if let Some((series, value, rest)) = sample(line)
            && let Some(more) = take(&mut families, series)
        {
            let _ = writeln!(text, "{series} {}{rest}", number(value + more));
            continue;
        }
        text.push_str(line);
        text.push('\n');
    }
    push_samples(&mut text, current, &mut families);
    for mut family in families {
        family
            .comments
            .iter()
            .filter(|_| !family.samples.is_empty())
            .for_each(|line| {
                let _ = writeln!(text, "{line}");
            });
        push_all(&mut text, &mut family);
    }
    text
}

fn families(text: &str) -> Vec<Family<'_>> {
    let mut found: Vec<Family<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(name) = named(line) {
            if found.last().is_none_or(|last| last.name != name) {
                found.push(Family {
                    name,
                    comments: Vec::new(),
                    samples: Vec::new(),
                });
            }
            found
                .iter_mut()
                .last()
                .into_iter()
                .for_each(|last| last.comments.push(line));
        } else if let (Some(last), Some((series, value, _))) = (found.last_mut(), sample(line)) {
            last.samples.push((series, value));
        }
    }
    found
}

/// The family of which a comment tells.
fn named(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "))?;
    rest.split(' ').next()
}

/// Name with labels, value, and what stands behind.
fn sample(line: &str) -> Option<(&str, f64, &str)> {
    if line.starts_with('#') {
        return None;
    }
    let end = line.rfind('}').map_or_else(|| line.find(' '), |at| Some(at + 1))?;
    let (series, rest) = line.split_at(end);
    let rest = rest.trim_start();
    let (value, rest) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
    Some((series, value.parse().ok()?, rest))
}

fn take(families: &mut [Family<'_>], series: &str) -> Option<f64> {
    families.iter_mut().find_map(|family| {
        let at = family.samples.iter().position(|(one, _)| *one == series)?;
        Some(family.samples.remove(at).1)
    })
}

fn push_samples(text: &mut String, name: Option<&str>, families: &mut [Family<'_>]) {
    families
        .iter_mut()
        .filter(|family| Some(family.name) == name)
        .for_each(|family| push_all(text, family));
}

fn push_all(text: &mut String, family: &mut Family<'_>) {
    for (series, value) in family.samples.drain(..) {
        let _ = writeln!(text, "{series} {}", number(value));
    }
}

fn number(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".into(),
        f64::NEG_INFINITY => "-Inf".into(),
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THEIRS: &str = "\
# HELP a_total things
# TYPE a_total counter
a_total{kind=\"x y\"} 1.0
a_total{kind=\"z\"} 2.0 1700000000
# HELP t_seconds time
# TYPE t_seconds histogram
t_seconds_bucket{le=\"0.1\"} 1.0
t_seconds_bucket{le=\"+Inf\"} 3.0
t_seconds_count 3.0
t_seconds_sum 1.5
# HELP empty_total nothing yet
# TYPE empty_total counter
# HELP other gauge
# TYPE other gauge
other NaN
more{a=\"}\"} +Inf
";

    #[test]
    fn what_both_have_adds_up_and_the_rest_stays() {
        let ours = "\
# HELP t_seconds time
# TYPE t_seconds histogram
t_seconds_bucket{le=\"0.1\"} 2.0
t_seconds_bucket{le=\"+Inf\"} 2.0
t_seconds_count 2.0
t_seconds_sum 0.25
# HELP a_total things
# TYPE a_total counter
a_total{kind=\"z\"} 40.0
a_total{kind=\"new\"} 1.0
# TYPE empty_total counter
empty_total 7.0
# HELP own_total mine
# TYPE own_total counter
own_total 1e21
";
        let expected = THEIRS
            .replace("2.0 1700000000\n", "42.0 1700000000\na_total{kind=\"new\"} 1.0\n")
            .replace("le=\"0.1\"} 1.0", "le=\"0.1\"} 3.0")
            .replace("le=\"+Inf\"} 3.0", "le=\"+Inf\"} 5.0")
            .replace("t_seconds_count 3.0", "t_seconds_count 5.0")
            .replace("t_seconds_sum 1.5", "t_seconds_sum 1.75")
            .replace("empty_total counter\n", "empty_total counter\nempty_total 7.0\n")
            + "# HELP own_total mine\n# TYPE own_total counter\nown_total 1e21\n";
        assert_eq!(merged(ours, THEIRS), expected);
        assert_eq!(merged("", THEIRS), THEIRS);
        assert_eq!(
            merged(THEIRS, "").lines().count(),
            THEIRS.lines().count() - 2,
            "families without samples"
        );
    }

    #[test]
    fn what_is_counted_is_told() {
        let metrics = Metrics::new();
        metrics.accepted.fetch_add(3, Relaxed);
        metrics.finished[1].fetch_add(2, Relaxed);
        metrics.ttft.observe(0.02, 5);
        metrics.prompt.observe(1e9, 1);
        let counts = Arc::new(KeyCounts::default());
        counts.num_prompt.fetch_add(9, Relaxed);
        let text = exposition(&metrics, &CacheStats::default(), &[("a.b".to_owned(), counts)]);
        for line in [
            "minisgl:requests_accepted_total 3.0",
            "minisgl:requests_shortened_total 0.0",
            "minisgl:key_prompt_tokens_total{key=\"a.b\"} 9.0",
            "minisgl:requests_finished_total{reason=\"length\"} 2.0",
            "minisgl:ttft_seconds_bucket{le=\"0.01\"} 0.0",
            "minisgl:ttft_seconds_bucket{le=\"0.025\"} 5.0",
            "minisgl:ttft_seconds_bucket{le=\"+Inf\"} 5.0",
            "minisgl:ttft_seconds_count 5.0",
            "minisgl:prompt_length_tokens_bucket{le=\"131072.0\"} 0.0",
            "minisgl:prompt_length_tokens_sum 1000000000.0",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
        let twice = merged(&text, &text);
        assert_eq!(twice.lines().count(), text.lines().count());
        assert!(twice.contains("minisgl:ttft_seconds_count 10.0\n"));
    }
}
