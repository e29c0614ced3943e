//! Azure's traces of LLM inference (Patel et al., ISCA 2024): CSV with a time and two lengths. They know no prefixes.

use super::request::{LineError, Trace};

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

pub(super) fn parse(text: &str) -> Result<Trace, LineError> {
    let mut trace = Trace::default();
    let mut first: Option<f64> = None;
    for (idx, line) in text.lines().enumerate() {
        let line = line.trim().trim_start_matches('\u{feff}');
        let fail = |what: String| (idx + 1, what);
        if idx == 0 {
            if line != HEADER {
                return Err(fail(format!(
                    "it is neither a JSON object, as in Mooncake's traces, nor the header {HEADER} of Azure's"
                )));
            }
            continue;
        }
        if line.is_empty() {
            continue;
        }
        let columns: Vec<&str> = line.split(',').map(str::trim).collect();
        let [time, prompt, output] = columns[..] else {
            return Err(fail(format!("it has {} columns, not 3 columns", columns.len())));
        };
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| fail(format!("{text:?} is no number of tokens")));
        let seconds = seconds(time)
            .ok_or_else(|| fail(format!("{time:?} is no time like 2023-11-16 18:15:46.6805900")))?;
        let since_first = seconds - *first.get_or_insert(seconds);
        trace.push(since_first, number(prompt)?, number(output)?, &[]).map_err(fail)?;
    }
    Ok(trace)
}

/// Seconds since the year 0 of `2023-11-16 18:15:46.6805900`.
fn seconds(text: &str) -> Option<f64> {
    let (date, clock) = text.split_once([' ', 'T'])?;
    let numbers = |text: &str, separator: char| -> Option<Vec<u32>> {
        text.split(separator).map(|part| part.parse().ok()).collect()
    };
    let [year, month, day] = numbers(date, '-')?[..] else { return None };
    let (hms, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let [hour, minute, second] = numbers(hms, ':')?[..] else { return None };
    let is_time = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && year < 10_000
        && hour < 24
        && minute < 60
        && second < 61
        && fraction.bytes().all(|digit| digit.is_ascii_digit());
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    let seconds = f64::from(hour * 3600 + minute * 60 + second) + fraction;
    is_time.then(|| days(year, month, day) as f64 * 86_400.0 + seconds)
}

/// Days of the Gregorian calendar (H. Hinnant, "chrono-compatible low-level date algorithms").
fn days(year: u32, month: u32, day: u32) -> u64 {
    let year = u64::from(year) - u64::from(month <= 2 && year > 0);
    let month = u64::from((month + 9) % 12);
    365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + u64::from(day)
}
