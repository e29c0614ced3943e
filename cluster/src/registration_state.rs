//! The state of a worker's registration, and where a registrar reports it.

use tokio::sync::watch;

/// The state of a worker's registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationState {
    /// Not registered. It is tried until it succeeds.
    Searching {
        /// The last error, if there was one.
        problem: Option<String>,
    },
    /// Registered.
    Registered,
    /// The router rejects this worker, for this reason. It is tried again from time to time.
    Refused(String),
}

/// Where a registrar reports the state. Each change is logged once.
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
                (_, RegistrationState::Refused(reason)) => {
                    tracing::error!("registration rejected; it will be tried again: {reason}")
                }
                (RegistrationState::Registered, RegistrationState::Searching { problem }) => {
                    tracing::warn!(
                        problem,
                        "discovery lost; requests go on, and the worker registers again when it returns"
                    );
                }
                (_, RegistrationState::Searching { problem }) => {
                    tracing::info!(problem, "not registered yet; trying again");
                }
            }
            *current = state;
            true
        });
    }

    /// The router of an embedded registry has ended in good order.
    pub(crate) fn router_left(&mut self) {
        tracing::info!("the router has left; requests go on, and the worker registers again when it returns");
        self.sender.send_replace(RegistrationState::Searching { problem: None });
    }

    pub(crate) fn searching(&mut self, problem: impl std::fmt::Display) {
        self.set(RegistrationState::Searching { problem: Some(problem.to_string()) });
    }
}
