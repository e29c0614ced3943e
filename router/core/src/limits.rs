//! How much a request may ask for, where neither the model nor the configuration decides it.

use baton_request::Request;

use super::CoreError;

const MAX_ID_BYTES: usize = 128;
const MAX_STOPS: usize = 16;
/// Every choice looks for each after every token.
const MAX_STOP_BYTES: usize = 1 << 10;
/// It travels with every attempt of every choice.
const MAX_SALT_BYTES: usize = 256;
/// An answer in one piece has them in memory, each about 150 bytes.
const MAX_PROMPT_LOGPROBS: usize = 4_000_000;

/// An answer in one piece has them in memory once more, as JSON. One prompt of any length fits.
const MAX_ECHO_BYTES: usize = 32 << 20;

/// Whether a client may choose this id. It is logged as it is: any other character could make another line of it.
pub fn is_request_id(id: &[u8]) -> bool {
    (1..=MAX_ID_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

pub(crate) fn check_id(id: &str) -> Result<(), CoreError> {
    if is_request_id(id.as_bytes()) {
        return Ok(());
    }
    let message = format!("request_id must have 1 to {MAX_ID_BYTES} characters of graphic ASCII");
    Err(CoreError::invalid("request_id", message))
}

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

/// The client's own salt of cached prefixes.
pub(crate) fn check_cache_salt(salt: &str) -> Result<(), CoreError> {
    if salt.len() <= MAX_SALT_BYTES {
        return Ok(());
    }
    let message = format!("cache_salt has {} bytes, at most {MAX_SALT_BYTES} are possible", salt.len());
    Err(CoreError::invalid("cache_salt", message))
}

/// Log-probabilities of prompts, of all choices together. `param` is what asks for them.
pub(crate) fn check_prompt_logprobs(param: &str, prompts: &[Request], n: u32) -> Result<(), CoreError> {
    let of_prompt = |request: &Request| {
        let num_top = request.sampling.prompt_logprobs?;
        Some(request.prompt.len() * (1 + num_top as usize) * n as usize)
    };
    let num: usize = prompts.iter().filter_map(of_prompt).sum();
    if num <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let message = format!(
        "{param}: {num} log-probabilities of prompts were requested, at most {MAX_PROMPT_LOGPROBS} are possible. \
         They are the tokens of the prompts, times the choices of each, times 1 and the number of most likely \
         tokens; lower one of these, or send several requests"
    );
    Err(CoreError::invalid(param, message))
}

/// Texts of prompts that answers begin with, of all choices together.
pub(crate) fn check_echo(num_bytes: usize) -> Result<(), CoreError> {
    if num_bytes <= MAX_ECHO_BYTES {
        return Ok(());
    }
    let message = format!(
        "echo: the answer would begin with more than {MAX_ECHO_BYTES} bytes of prompts, which are the texts of the \
         prompts, times the choices of each; lower one of these, or send several requests"
    );
    Err(CoreError::invalid("echo", message))
}

#[cfg(test)]
mod tests {
    use baton_request::SamplingParams;

    use super::*;

    #[test]
    fn what_evaluations_ask_of_prompts_is_below_the_limit() {
        for (num_prompts, num_tokens, num_top, n, fits) in [
            (1, 32_000, Some(5), 1, true),
            (64, 1_000, Some(1), 1, true),
            (1, 125_000, Some(0), 32, true),
            (1, 125_001, Some(0), 32, false),
            (1, 32_000, Some(20), 128, false),
            (32, 10_000, Some(20), 1, false),
            (1, 32_000, None, 128, true),
        ] {
            let sampling = SamplingParams { prompt_logprobs: num_top, ..SamplingParams::default() };
            let request = Request { prompt: vec![1; num_tokens].into(), sampling, ..Request::default() };
            let checked = check_prompt_logprobs("echo", &vec![request; num_prompts], n);
            assert_eq!(checked.is_ok(), fits, "{num_prompts} {num_tokens} {num_top:?} {n}: {checked:?}");
        }
    }
}
