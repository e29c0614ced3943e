//! What Hugging Face adds to Jinja for chat templates, with Python's output to the letter: the
//! models were trained on it.

use std::{
    fmt::Write,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// `raise_exception(message)`: the template refuses its input.
pub(crate) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
}

/// The message of [`raise_exception`], if that is why rendering failed.
pub(crate) fn raised(error: &Error) -> Option<&str> {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message);
        }
        cause = error.source();
    }
    None
}

/// `value|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`, which is
/// Python's `json.dumps`; unlike Jinja's own filter it escapes no HTML.
pub(crate) fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.as_str(), colon.as_str()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts"));
        }
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let writer = JsonWriter {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        comma,
        colon,
    };
    options.assert_all_used()?;
    let mut json = String::new();
    writer.write(value, 0, &mut json)?;
    Ok(json)
}

struct JsonWriter<'a> {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<usize>,
    comma: &'a str,
    colon: &'a str,
}

impl JsonWriter<'_> {
    fn write(&self, value: &Value, depth: usize, json: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => json.push_str("null"),
            ValueKind::Bool => json.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                json.push_str(&value.to_string());
            }
            ValueKind::Number => json.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), json),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect::<Vec<_>>();
                self.write_items('[', ']', items, depth, json, |item, json| {
                    self.write(item, depth + 1, json)
                })?;
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.collect::<Vec<_>>();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_items('{', '}', keys, depth, json, |key, json| {
                    match key.as_str() {
                        Some(text) => self.write_text(text, json),
                        None => self.write_text(&key.to_string(), json),
                    }
                    json.push_str(self.colon);
                    self.write(&value.get_item(key)?, depth + 1, json)
                })?;
            }
            kind => {
                let message = format!("a value of type {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn write_items(
        &self,
        open: char,
        close: char,
        items: Vec<Value>,
        depth: usize,
        json: &mut String,
        write_item: impl Fn(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        json.push(open);
        for (idx, item) in items.iter().enumerate() {
            if idx > 0 {
                json.push_str(self.comma);
            }
            self.begin_line(depth + 1, json);
            write_item(item, json)?;
        }
        if !items.is_empty() {
            self.begin_line(depth, json);
        }
        json.push(close);
        Ok(())
    }

    fn begin_line(&self, depth: usize, json: &mut String) {
        if let Some(indent) = self.indent {
            json.push('\n');
            json.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_text(&self, text: &str, json: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            json.push_str(&quoted);
            return;
        }
        for char in quoted.chars() {
            if char.is_ascii() {
                json.push(char);
            } else {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    write!(json, "\\u{unit:04x}").expect("a String takes everything");
                }
            }
        }
    }
}

/// Python's `repr` of a float. It changes to exponents where Rust's `{:?}` does, and writes them
/// with a sign and two digits.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let text = format!("{value:?}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = match exponent.strip_prefix('-') {
        Some(digits) => ('-', digits),
        None => ('+', exponent),
    };
    format!("{}e{sign}{digits:0>2}", mantissa.trim_end_matches(".0"))
}

/// `strftime_now(format)`: the time in UTC, with the fields of C's locale.
pub(crate) fn strftime(time: SystemTime, format: &str) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let date = Date::of(seconds);
    let mut text = String::new();
    date.write(format, &mut text);
    text
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Date {
    unix_seconds: u64,
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    /// From 1.
    day_of_year: u64,
    /// From Sunday.
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Date {
    fn of(unix_seconds: u64) -> Self {
        let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
        // Years that begin in March, so that the leap day is the last one: Howard Hinnant's
        // `civil_from_days`, for days since 0000-03-01.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_march_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_march_year + 2) / 153;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let day_of_year = if month <= 2 {
            day_of_march_year - 306 + 1
        } else {
            day_of_march_year + 60 + u64::from(is_leap)
        };
        Self {
            unix_seconds,
            year,
            month,
            day: day_of_march_year - (153 * march_month + 2) / 5 + 1,
            day_of_year,
            weekday: ((days + 4) % 7) as usize,
            hour: second / 3_600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    fn write(&self, format: &str, text: &mut String) {
        let mut chars = format.chars().peekable();
        while let Some(char) = chars.next() {
            if char != '%' {
                text.push(char);
                continue;
            }
            // glibc: "-" leaves out padding.
            let pads = chars.next_if_eq(&'-').is_none();
            let Some(field) = chars.next() else {
                text.push('%');
                break;
            };
            self.write_field(field, pads, text);
        }
    }

    fn write_field(&self, field: char, pads: bool, text: &mut String) {
        let month = MONTHS[self.month as usize - 1];
        let weekday = DAYS[self.weekday];
        let hour_12 = (self.hour + 11) % 12 + 1;
        let mut number = |value: u64, width: usize| {
            let width = if pads { width } else { 0 };
            write!(text, "{value:0width$}").expect("a String takes everything");
        };
        match field {
            'Y' => number(self.year, 4),
            'y' => number(self.year % 100, 2),
            'm' => number(self.month, 2),
            'd' => number(self.day, 2),
            'j' => number(self.day_of_year, 3),
            'H' => number(self.hour, 2),
            'I' => number(hour_12, 2),
            'M' => number(self.minute, 2),
            'S' => number(self.second, 2),
            's' => number(self.unix_seconds, 0),
            'w' => number(self.weekday as u64, 1),
            'u' => number((self.weekday as u64 + 6) % 7 + 1, 1),
            'f' => text.push_str("000000"),
            'e' => write!(text, "{:>2}", self.day).expect("a String takes everything"),
            'B' => text.push_str(month),
            'b' | 'h' => text.push_str(&month[..3]),
            'A' => text.push_str(weekday),
            'a' => text.push_str(&weekday[..3]),
            'p' => text.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'Z' => text.push_str("UTC"),
            'z' => text.push_str("+0000"),
            'F' => self.write("%Y-%m-%d", text),
            'T' | 'X' => self.write("%H:%M:%S", text),
            'R' => self.write("%H:%M", text),
            'D' | 'x' => self.write("%m/%d/%y", text),
            'c' => self.write("%a %b %e %H:%M:%S %Y", text),
            'n' => text.push('\n'),
            't' => text.push('\t'),
            '%' => text.push('%'),
            other => text.extend(['%', other]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_written_as_python_does() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let full = "%Y-%m-%d %H:%M:%S %A %j %b %-d %I%p";
        // Expected values: Python's datetime.fromtimestamp(seconds, timezone.utc).strftime(full).
        let cases = [
            (0, "1970-01-01 00:00:00 Thursday 001 Jan 1 12AM"),
            (951_782_399, "2000-02-28 23:59:59 Monday 059 Feb 28 11PM"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060 Feb 29 12AM"),
            (1_709_251_199, "2024-02-29 23:59:59 Thursday 060 Feb 29 11PM"),
            (1_735_689_599, "2024-12-31 23:59:59 Tuesday 366 Dec 31 11PM"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday 060 Mar 1 12AM"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(at(seconds), full), expected);
        }
        assert_eq!(strftime(at(0), "%d %B %Y 100%% %Q %"), "01 January 1970 100% %Q %");
    }

    #[test]
    fn floats_are_written_as_python_does() {
        // Python's repr of each.
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e15, "1000000000000000.0"),
            (1e-5, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (0.0001, "0.0001"),
        ];
        for (value, expected) in cases {
            assert_eq!(python_float(value), expected);
        }
    }
}
