//! How much a request may ask for, where neither the model nor the configuration decides it.

use super::CoreError;

const MAX_STOPS: usize = 16;
/// Every choice looks for each after every token.
const MAX_STOP_BYTES: usize = 1 << 10;

/// Text at which generation ends. `param` is what the client calls it.
pub(crate) fn check_stops(param: &str, stops: &[String]) -> Result<(), CoreError> {
    let problem = if stops.len() > MAX_STOPS {
        format!("has {} strings, at most {MAX_STOPS} are possible", stops.len())
    } else if stops.iter().any(String::is_empty) {
        "must not contain an empty string".to_owned()
    } else if let Some(long) = stops.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
        format!("has a string of {} bytes, at most {MAX_STOP_BYTES} are possible", long.len())
    } else {
        return Ok(());
    };
    Err(CoreError::invalid(param, format!("{param} {problem}")))
}
