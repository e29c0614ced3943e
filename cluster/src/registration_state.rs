//! How a worker's registration stands, and where a registrar reports it.

use tokio::sync::watch;

/// How registration stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationState {
    /// Not known to the discovery service, and why if that is known; being tried for ever.
    Searching {
        /// What went wrong last.
        problem: Option<String>,
    },
    /// Known.
    Registered,
    /// The router does not want this worker, in its words. Tried again from time to time.
    Refused(String),
}

/// Where a registrar says how it stands; changes go to the log once.
#[derive(Debug)]
pub(crate) struct StateReport {
    sender: watch::Sender<RegistrationState>,
}

impl StateReport {
    pub(crate) fn new(sender: watch::Sender<RegistrationState>) -> StateReport {
        StateReport { sender }
    }

    pub(crate) fn set(&mut self, state: RegistrationState) {
        self.sender.send_if_modified(|current| {
            if *current == state {
                return false;
            }
            match (&*current, &state) {
                (_, RegistrationState::Registered) => tracing::info!("registered"),
                (_, RegistrationState::Refused(reason)) => tracing::error!("registration refused: {reason}"),
                (RegistrationState::Registered, RegistrationState::Searching { problem }) => {
                    tracing::warn!(problem, "discovery lost; registering again as soon as it returns");
                }
                (_, RegistrationState::Searching { problem }) => {
                    tracing::info!(problem, "not registered yet; trying on");
                }
            }
            *current = state;
            true
        });
    }

    pub(crate) fn searching(&mut self, problem: impl std::fmt::Display) {
        self.set(RegistrationState::Searching { problem: Some(problem.to_string()) });
    }
}
