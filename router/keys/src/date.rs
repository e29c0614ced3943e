//! When a key expires, from TOML's dates.

use std::time::{Duration, SystemTime};

use toml::value::{Datetime, Offset};

/// A date begins at midnight UTC. `None`: a time without a day, or one without an offset, which would depend on the machine.
pub(crate) fn system_time(datetime: Datetime) -> Option<SystemTime> {
    let date = datetime.date?;
    let seconds = match (datetime.time, datetime.offset) {
        (None, _) => 0,
        (Some(time), Some(offset)) => {
            let minutes = match offset {
                Offset::Z => 0,
                Offset::Custom { minutes } => i64::from(minutes),
            };
            let second = i64::from(time.second.unwrap_or(0));
            (i64::from(time.hour) * 60 + i64::from(time.minute) - minutes) * 60 + second
        }
        (Some(_), None) => return None,
    };
    let days = days_since_1970(date.year.into(), date.month.into(), date.day.into());
    let seconds = u64::try_from(days * 86_400 + seconds).unwrap_or(0);
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// Of the Gregorian calendar. Years are counted from March, so that a leap day ends its year.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_seconds() {
        // As `date -u -d … +%s` has them.
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("2000-02-29", 951_782_400),
            ("2000-03-01", 951_868_800),
            ("2027-01-01T00:00:00Z", 1_798_761_600),
            ("2027-01-01T01:30:00+01:30", 1_798_761_600),
            ("2100-03-01T12:34:56Z", 4_107_587_696),
        ] {
            let time = system_time(text.parse().unwrap()).unwrap();
            assert_eq!(time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs(), seconds, "{text}");
        }
        for text in ["12:00:00", "2027-01-01T00:00:00"] {
            assert_eq!(system_time(text.parse().unwrap()), None, "{text}");
        }
    }
}
