//! Azure's traces of LLM inference (Patel et al., ISCA 2024): CSV with a time and two lengths. They know no prefixes.

use crate::request::{LineError, Trace};

const HEADER: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

pub(crate) fn parse(text: &str) -> Result<Trace, LineError> {
    let mut lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
    let header: Vec<&str> = lines.next().map_or("", |(_, line)| line).split(',').map(str::trim).collect();
    let place = |name: &str| header.iter().position(|column| column.eq_ignore_ascii_case(name));
    let [Some(time), Some(prompt), Some(output)] = HEADER.map(place) else {
        let what = format!(
            "it is neither a JSON object, as in Mooncake's traces, nor the header {} of Azure's",
            HEADER.join(",")
        );
        return Err((1, what));
    };
    let mut rows = Vec::new();
    for (idx, line) in lines {
        let fail = |what: String| (idx + 1, what);
        let columns: Vec<&str> = line.split(',').map(str::trim).collect();
        if columns.len() != header.len() {
            return Err(fail(format!("it has {} columns, not {}", columns.len(), header.len())));
        }
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| fail(format!("{text:?} is no number of tokens")));
        let text = columns[time];
        let seconds = seconds(text)
            .ok_or_else(|| fail(format!("{text:?} is no time like 2023-11-16 18:15:46.6805900")))?;
        rows.push((idx, seconds, number(columns[prompt])?, number(columns[output])?));
    }
    let first = rows.iter().map(|&(_, seconds, ..)| seconds).fold(f64::INFINITY, f64::min);
    let mut trace = Trace::default();
    for (idx, seconds, prompt, output) in rows {
        trace.push(seconds - first, prompt, output, &[]).map_err(|what| (idx + 1, what))?;
    }
    Ok(trace)
}

/// Seconds since the year 0 of `2023-11-16 18:15:46.6805900`, also with `T`, and with `Z` or `+00:00`.
fn seconds(text: &str) -> Option<f64> {
    let text = text.trim_end_matches('Z').trim_end_matches("+00:00");
    let (date, clock) = text.split_once([' ', 'T'])?;
    let numbers = |text: &str, separator: char| -> Option<Vec<u32>> {
        text.split(separator).map(|part| part.parse().ok()).collect()
    };
    let [year, month, day] = numbers(date, '-')?[..] else { return None };
    let (hms, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let [hour, minute, second] = numbers(hms, ':')?[..] else { return None };
    let is_time = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && (1..10_000).contains(&year)
        && hour < 24
        && minute < 60
        && second < 61
        && fraction.bytes().all(|digit| digit.is_ascii_digit());
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    is_time.then(|| {
        let whole = days(year, month, day) * 86_400 + u64::from(hour * 3600 + minute * 60 + second);
        whole as f64 + fraction
    })
}

/// Days of the Gregorian calendar, from the year 1 on (H. Hinnant, "chrono-compatible low-level date algorithms").
fn days(year: u32, month: u32, day: u32) -> u64 {
    let year = u64::from(year) - u64::from(month <= 2);
    let month = u64::from((month + 9) % 12);
    365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + u64::from(day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leap_days_count() {
        let between = |from, to| seconds(to).expect("a time") - seconds(from).expect("a time");
        assert_eq!(between("2024-02-28T00:00:00Z", "2024-03-01 00:00:00"), 2.0 * 86_400.0);
        assert_eq!(between("2023-02-28 00:00:00", "2023-03-01 00:00:00"), 86_400.0);
        assert_eq!(between("2023-12-31 00:00:00", "2024-01-01 00:00:00"), 86_400.0);
        for text in [
            "",
            "yesterday",
            "2023-13-01 00:00:00",
            "2023-11-16",
            "2023-11-16 25:00:00",
            "0-1-1 0:0:0",
            "0-1-1 0:0:0:0",
            "2023-11-16 4294967295:00:00",
        ] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }
}
