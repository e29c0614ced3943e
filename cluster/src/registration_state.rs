//! The state of a worker's registration, and where a registrar reports it.

use std::fmt;

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
    /// The lease of an earlier process still holds the worker's id, in words. It is tried again until that lease has ended.
    Held(String),
    /// The router rejects this worker, for this reason. It is tried again from time to time.
    Refused(String),
}

/// Where a worker registers, as log lines name it.
#[derive(Debug)]
pub(crate) enum Service {
    /// At the router of this URL.
    Router(String),
    /// In the etcd of these endpoints.
    Etcd(Vec<String>),
    /// Nowhere: the router has a list.
    List,
}

/// Where a registrar reports the state. Each change is logged once.
#[derive(Debug)]
pub(crate) struct StateReport {
    sender: watch::Sender<RegistrationState>,
    service: Service,
    /// Whether a warning has told that the worker is not registered.
    has_warned: bool,
}

/// What the log says of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Registered,
    /// A warning: an earlier process has its id.
    Held,
    Refused,
    /// A warning: it was registered.
    Lost,
    /// A warning: it never was.
    Unregistered,
    /// A warning: one of the two before, for another reason.
    StillUnregistered,
    /// A router that may start later.
    NotYet,
}

impl StateReport {
    pub(crate) fn new(sender: watch::Sender<RegistrationState>, service: Service) -> StateReport {
        StateReport { sender, service, has_warned: false }
    }

    pub(crate) fn set(&mut self, state: RegistrationState) {
        let Some(line) = self.line(&state) else { return };
        let service = &self.service;
        let problem = match &state {
            RegistrationState::Registered => None,
            RegistrationState::Searching { problem } => problem.as_deref(),
            RegistrationState::Held(reason) | RegistrationState::Refused(reason) => Some(reason.as_str()),
        };
        match line {
            Line::Registered => tracing::info!(%service, "registered"),
            Line::Held => tracing::warn!(%service, "not registered yet: {}", problem.unwrap_or_default()),
            Line::Refused => {
                let reason = problem.unwrap_or_default();
                tracing::error!(%service, "registration rejected; it will be tried again: {reason}");
            }
            Line::Lost => tracing::warn!(
                %service,
                problem,
                "discovery lost; requests go on, and the worker registers again when it returns"
            ),
            Line::Unregistered => tracing::warn!(
                %service,
                problem,
                "not registered: no router knows this worker; it is tried until it succeeds"
            ),
            Line::StillUnregistered => tracing::warn!(%service, problem, "still not registered"),
            Line::NotYet => tracing::info!(%service, problem, "not registered yet; trying again"),
        }
        self.has_warned = match line {
            Line::Registered => false,
            Line::Lost | Line::Unregistered | Line::StillUnregistered => true,
            Line::Held | Line::Refused | Line::NotYet => self.has_warned,
        };
        self.sender.send_replace(state);
    }

    /// `None`: nothing has changed.
    fn line(&self, state: &RegistrationState) -> Option<Line> {
        let current = self.sender.borrow();
        if *current == *state {
            return None;
        }
        Some(match (&*current, state, &self.service) {
            (_, RegistrationState::Registered, _) => Line::Registered,
            (_, RegistrationState::Held(_), _) => Line::Held,
            (_, RegistrationState::Refused(_), _) => Line::Refused,
            (RegistrationState::Registered, RegistrationState::Searching { .. }, _) => Line::Lost,
            (_, RegistrationState::Searching { .. }, _) if self.has_warned => Line::StillUnregistered,
            (_, RegistrationState::Searching { .. }, Service::Etcd(_)) => Line::Unregistered,
            (_, RegistrationState::Searching { .. }, _) => Line::NotYet,
        })
    }

    /// The router of an embedded registry has ended in good order.
    pub(crate) fn router_left(&mut self) {
        let service = &self.service;
        tracing::info!(
            %service,
            "the router has left; requests go on, and the worker registers again when it returns"
        );
        self.sender.send_replace(RegistrationState::Searching { problem: None });
    }

    pub(crate) fn searching(&mut self, problem: impl fmt::Display) {
        self.set(RegistrationState::Searching { problem: Some(problem.to_string()) });
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Service::Router(url) => write!(f, "router {url}"),
            Service::Etcd(endpoints) => write!(f, "etcd {}", endpoints.join(",")),
            Service::List => f.write_str("list of the router"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log lines of changes.
    fn lines(service: Service, states: &[RegistrationState]) -> Vec<Option<Line>> {
        let mut report =
            StateReport::new(watch::Sender::new(RegistrationState::Searching { problem: None }), service);
        let told = states.iter().map(|state| {
            let line = report.line(state);
            report.set(state.clone());
            line
        });
        told.collect()
    }

    fn searching(problem: &str) -> RegistrationState {
        RegistrationState::Searching { problem: Some(problem.to_owned()) }
    }

    #[test]
    fn a_worker_without_etcd_warns_of_each_problem_until_it_is_registered() {
        let states = [
            searching("a"),
            searching("a"),
            searching("b"),
            RegistrationState::Registered,
            searching("b"),
            searching("a"),
            RegistrationState::Registered,
        ];
        let expected = [
            Some(Line::Unregistered),
            None,
            Some(Line::StillUnregistered),
            Some(Line::Registered),
            Some(Line::Lost),
            Some(Line::StillUnregistered),
            Some(Line::Registered),
        ];
        let etcd = Service::Etcd(vec!["http://a:2379".into(), "http://b:2379".into()]);
        assert_eq!(etcd.to_string(), "etcd http://a:2379,http://b:2379");
        assert_eq!(lines(etcd, &states), expected);
    }

    #[test]
    fn an_id_that_an_earlier_process_holds_is_a_warning_before_it_is_an_error() {
        let held = || RegistrationState::Held("held".to_owned());
        let states = [held(), held(), RegistrationState::Refused("taken".to_owned())];
        let expected = [Some(Line::Held), None, Some(Line::Refused)];
        assert_eq!(lines(Service::Etcd(vec!["http://a:2379".into()]), &states), expected);
    }

    #[test]
    fn a_router_may_start_after_its_workers() {
        let states = [searching("a"), RegistrationState::Registered, searching("a")];
        let expected = [Some(Line::NotYet), Some(Line::Registered), Some(Line::Lost)];
        assert_eq!(lines(Service::Router("http://r:8080".into()), &states), expected);
    }
}
