//! The requests of a trace. It does not know files.

/// Requests with more tokens than this are no requests.
pub const MAX_TOKENS: u64 = 16 << 20;
/// A trace lasts no longer than a year.
pub const MAX_SECONDS: f64 = 366.0 * 86_400.0;

/// Requests in the order of their times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// The requests.
    pub requests: Vec<TraceRequest>,
    /// Tokens of the blocks that `hash_ids` name; 0: the trace knows no prefixes.
    pub block_tokens: usize,
    /// Times are multiples of so many seconds: requests in truth come somewhere in between. 0: they are exact.
    pub quantum_seconds: f64,
    pub(crate) hash_ids: Vec<u32>,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TraceRequest {
    /// Seconds since the first one.
    pub seconds: f64,
    /// Tokens of the prompt, at least one.
    pub num_prompt_tokens: u32,
    /// Tokens of the answer, at least one.
    pub num_output_tokens: u32,
    /// Its part of the ids of all blocks.
    first_hash: u32,
    num_hashes: u32,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read trace {path}")]
    Io {
        /// The file.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A line is not what the format says.
    #[error("trace {path}, line {line}: {what}")]
    Line {
        /// The file.
        path: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// No request is in it.
    #[error("trace {path} holds no request")]
    Empty {
        /// The file.
        path: String,
    },
}

/// The number of a line, counted from 1, and what is wrong with it.
pub(crate) type LineError = (usize, String);

impl Trace {
    /// Requests without prefixes of the given lengths, all at the start.
    pub fn of_lengths(lengths: impl IntoIterator<Item = (u32, u32)>) -> Trace {
        let request = |(prompt, output): (u32, u32)| TraceRequest {
            num_prompt_tokens: prompt.max(1),
            num_output_tokens: output.max(1),
            ..TraceRequest::default()
        };
        Trace { requests: lengths.into_iter().map(request).collect(), ..Trace::default() }
    }

    /// The ids of the blocks of a request's prompt, the last one partial. Equal ids are equal prefixes.
    pub fn hash_ids(&self, request: &TraceRequest) -> &[u32] {
        let first = request.first_hash as usize;
        &self.hash_ids[first..first + request.num_hashes as usize]
    }

    /// Seconds from the first to the last request.
    pub fn seconds(&self) -> f64 {
        self.requests.last().map_or(0.0, |request| request.seconds)
    }

    pub(crate) fn push(
        &mut self,
        seconds: f64,
        prompt: u64,
        output: u64,
        hash_ids: &[u32],
    ) -> Result<(), String> {
        if !(-1e-9..MAX_SECONDS).contains(&seconds) {
            return Err(format!("its time is {seconds} s; times are 0 to {MAX_SECONDS:.0} s"));
        }
        for (what, num) in [("prompt", prompt), ("answer", output)] {
            if num > MAX_TOKENS {
                return Err(format!("its {what} has {num} tokens; at most {MAX_TOKENS} are possible"));
            }
        }
        if prompt == 0 {
            return Err("its prompt is empty".to_owned());
        }
        self.requests.push(TraceRequest {
            seconds: seconds.max(0.0),
            num_prompt_tokens: prompt as u32,
            // An answer has at least the token that ends it.
            num_output_tokens: output.max(1) as u32,
            first_hash: self.hash_ids.len() as u32,
            num_hashes: hash_ids.len() as u32,
        });
        self.hash_ids.extend_from_slice(hash_ids);
        Ok(())
    }
}
