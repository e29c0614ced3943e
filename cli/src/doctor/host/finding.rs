//! What came of looking at one thing of a host.

use std::fmt;

use serde::Serialize;

/// One thing that was looked at.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(in crate::doctor) struct Finding {
    pub(super) what: &'static str,
    pub(super) state: State,
    detail: String,
    /// What to do, unless all is well.
    pub(super) fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::doctor) enum State {
    Ok,
    /// Baton works, slower or with less.
    Warning,
    /// Baton cannot use it.
    Broken,
}

impl Finding {
    pub(in crate::doctor) fn ok(what: &'static str, detail: impl Into<String>) -> Finding {
        Finding { what, state: State::Ok, detail: detail.into(), fix: None }
    }

    pub(in crate::doctor) fn warning(
        what: &'static str,
        detail: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        Finding { what, state: State::Warning, detail: detail.into(), fix: Some(fix.into()) }
    }

    pub(in crate::doctor) fn broken(
        what: &'static str,
        detail: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        Finding { what, state: State::Broken, detail: detail.into(), fix: Some(fix.into()) }
    }

    pub(in crate::doctor) fn is_broken(&self) -> bool {
        self.state == State::Broken
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Ok => "ok",
            State::Warning => "WARNING",
            State::Broken => "BROKEN",
        };
        writeln!(f, "  {:<10} {state:<8} {}", self.what, self.detail)?;
        self.fix.iter().try_for_each(|fix| writeln!(f, "  {:<10} {:<8} {fix}", "", "fix"))
    }
}
