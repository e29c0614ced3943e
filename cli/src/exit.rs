//! Exit codes of routers and workers, for whatever restarts them: systemd, Kubernetes and `baton up`.

use std::{error::Error, io, process::ExitCode};

use baton_model::{CudaError, CudaStartError};
use baton_router::JournalOpenError;
use baton_worker::{EngineBroke, StoreOpenError, TierOpenError};
use tokio::{sync::oneshot, task::JoinError};

/// It cannot start, and would not the next time: a wrong setting or model. `EX_CONFIG` of sysexits.h.
pub(crate) const CANNOT_START: u8 = 78;

/// It cannot start now: a port, a directory or memory is in use, for example. `EX_TEMPFAIL`.
pub(crate) const CANNOT_START_NOW: u8 = 75;

/// It has served, or a thread panicked: another start may help.
const FAILED: u8 = 1;

/// The code for the error of a router or worker.
pub(crate) fn of_server(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(status(error))
}

fn status(error: &anyhow::Error) -> u8 {
    if error.is::<EngineBroke>() {
        return FAILED;
    }
    error.chain().find_map(of_cause).unwrap_or(CANNOT_START)
}

/// `None`: this cause is wrong settings, or says nothing of them.
fn of_cause(cause: &(dyn Error + 'static)) -> Option<u8> {
    if let Some(error) = cause.downcast_ref::<io::Error>() {
        return of_io(error);
    }
    if cause.is::<JoinError>() || cause.is::<oneshot::error::RecvError>() {
        return Some(FAILED);
    }
    let is_passing = is_in_use(cause)
        || cause.downcast_ref::<CudaError>().is_some_and(is_passing_on_device)
        || cause.downcast_ref::<CudaStartError>().is_some_and(is_passing_at_start);
    is_passing.then_some(CANNOT_START_NOW)
}

/// Another process, such as the one before this, may have what is missing.
fn is_in_use(cause: &(dyn Error + 'static)) -> bool {
    let journal = cause.downcast_ref::<JournalOpenError>();
    let tier = cause.downcast_ref::<TierOpenError>();
    matches!(journal, Some(JournalOpenError::InUse { .. }))
        || matches!(
            tier,
            Some(TierOpenError::Dir(StoreOpenError::InUse { .. } | StoreOpenError::Full { .. }))
        )
}

fn of_io(error: &io::Error) -> Option<u8> {
    use io::ErrorKind as Kind;
    match error.kind() {
        // The next start would meet them, too.
        Kind::NotFound
        | Kind::PermissionDenied
        | Kind::NotADirectory
        | Kind::IsADirectory
        | Kind::AlreadyExists
        | Kind::InvalidInput
        | Kind::InvalidData
        | Kind::UnexpectedEof
        | Kind::Unsupported => None,
        Kind::Other => {
            let device = error.get_ref().and_then(|inner| inner.downcast_ref::<CudaError>());
            device.is_some_and(is_passing_on_device).then_some(CANNOT_START_NOW)
        }
        _ => Some(CANNOT_START_NOW),
    }
}

/// Whether a GPU may do later what it does not do now. The driver's library does not come by itself; a driver without a device may be one
/// whose kernel module is not loaded yet, as after a start of the host.
fn is_passing_on_device(error: &CudaError) -> bool {
    matches!(error, CudaError::NoDevice | CudaError::OutOfMemory { .. } | CudaError::Failed { .. })
}

fn is_passing_at_start(error: &CudaStartError) -> bool {
    match error {
        CudaStartError::NoRoom { .. } => true,
        CudaStartError::Cuda(error) => is_passing_on_device(error),
        CudaStartError::Rank { why, .. } => is_passing_at_start(why),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};
    use baton_worker::ConfigError;

    use super::*;

    #[test]
    fn only_what_the_next_start_would_meet_again_is_78() {
        let io = |kind: io::ErrorKind| anyhow::Error::from(io::Error::from(kind)).context("what was done");
        let device = |error: CudaError| anyhow::Error::from(error).context("no GPU");
        let no_room = || CudaError::OutOfMemory { num_bytes: 2, num_free: 1 };
        let in_use = StoreOpenError::InUse { dir: "/kv".into() };
        let foreign = StoreOpenError::Foreign { dir: "/kv".into() };
        let cases = [
            (anyhow!("--etcd-user and --etcd-password-file belong together"), 78),
            (ConfigError::Zero("--max-running").into(), 78),
            (io(io::ErrorKind::PermissionDenied), 78),
            (io(io::ErrorKind::InvalidInput), 78),
            (io(io::ErrorKind::NotFound), 78),
            (io(io::ErrorKind::AddrInUse), 75),
            (io(io::ErrorKind::AddrNotAvailable), 75),
            (io(io::ErrorKind::StorageFull), 75),
            (io::Error::other(no_room()).into(), 75),
            (io::Error::other("no NIXL").into(), 78),
            (device(no_room()), 75),
            (device(CudaError::NoDriver), 78),
            (device(CudaError::NoDevice), 75),
            (device(CudaError::NoSuchDevice { device: 8, num_devices: 8 }), 78),
            (CudaStartError::Cuda(no_room()).into(), 75),
            (anyhow::Error::from(TierOpenError::Dir(in_use)).context("the tiers"), 75),
            (anyhow::Error::from(TierOpenError::Dir(foreign)).context("the tiers"), 78),
            (JournalOpenError::InUse { dir: "/journal".into() }.into(), 75),
        ];
        for (error, expected) in cases {
            assert_eq!(status(&error), expected, "{error:#}");
        }
        let broke: anyhow::Result<()> = Err(io(io::ErrorKind::InvalidData)).context(EngineBroke);
        assert_eq!(status(&broke.unwrap_err()), 1);
    }

    #[test]
    fn units_of_systemd_wait_for_remote_models_and_give_up_only_where_a_restart_is_no_use() {
        for unit in [
            include_str!("../../deploy/systemd/baton-router.service"),
            include_str!("../../deploy/systemd/baton-worker@.service"),
        ] {
            let line = |start: &str| unit.lines().find_map(|line| line.strip_prefix(start)).expect(start);
            assert!(line("After=").split(' ').any(|other| other == "remote-fs.target"), "{unit}");
            // 2: a flag that does not exist.
            assert_eq!(line("RestartPreventExitStatus="), format!("2 {CANNOT_START}"));
        }
    }

    #[tokio::test]
    async fn a_panic_is_no_wrong_setting() {
        async fn load() {
            panic!("a defect")
        }
        let error = tokio::spawn(load()).await.context("the loading task failed").unwrap_err();
        assert_eq!(status(&error), 1);
    }
}
