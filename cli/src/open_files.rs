//! The limit of files that a router or a worker may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files as far as this process may: each connection is one, and shells often allow 1,024. Says in
/// the log if that is less than `num_wanted`, which `wanted_by` may need. Returns the limit.
pub(crate) fn allow(num_wanted: usize, wanted_by: &str) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    let allowed = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    if allowed.is_some_and(|allowed| allowed < num_wanted as u64) {
        tracing::info!(
            allowed,
            num_wanted,
            "this process may open fewer files than {wanted_by} need; `ulimit -n` raises that"
        );
    }
    allowed.map_or(usize::MAX, |allowed| allowed as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_becomes_what_this_process_may_have() {
        let allowed = allow(1024, "this test");
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        assert_eq!(limit.current.unwrap_or(u64::MAX), allowed as u64);
    }
}
