//! One supervised process: start it, forward its log lines, start it again when it ends.

use std::{
    io,
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use baton_keys::ApiKey;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::Command,
};
use tokio_util::sync::CancellationToken;

use super::logs::Logs;
use crate::exit::{CANNOT_START, CANNOT_START_NOW};

/// A process to keep running: a subcommand of this program.
pub(super) struct Child {
    /// Its name in the log.
    pub name: String,
    /// Arguments of `baton`.
    pub args: Vec<String>,
    /// With which it registers. In its environment, which other users do not see.
    pub api_key: Option<ApiKey>,
    /// How long it may take to end after SIGTERM.
    pub stop_timeout: Duration,
}

/// Why supervision of a process has ended.
pub(super) enum Supervised {
    /// It was told to stop, and has ended.
    Stopped,
    /// It cannot be started, for this reason.
    GaveUp(String),
}

/// A process that ran this long has started; it is restarted without delay.
const SETTLED: Duration = Duration::from_secs(10);
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// How long a child that has never served is started again while what keeps it from starting may pass.
const PATIENCE: Duration = Duration::from_secs(30);

/// Keeps `child` running until `stop`. A child that has served is started again whatever its end: requests run on the
/// others. A child that cannot start ends everything, as long as it has never served and another start is of no use.
pub(super) async fn supervise(child: Child, logs: Logs, stop: CancellationToken) -> Supervised {
    let mut delay = FIRST_DELAY;
    let mut has_served = false;
    let first_start = Instant::now();
    loop {
        let started = Instant::now();
        let ended = match run_once(&child, &logs, &stop).await {
            Ok(Some(ended)) => ended,
            Ok(None) => return Supervised::Stopped,
            Err(error) => return Supervised::GaveUp(format!("cannot start {}: {error}", child.name)),
        };
        let is_settled = started.elapsed() >= SETTLED;
        if let Some(failure) = failure(ended.status) {
            let reason = ended.error.unwrap_or_else(|| ended.status.to_string());
            if !has_served && failure.is_final(first_start.elapsed()) {
                return Supervised::GaveUp(format!("{} cannot start: {reason}", child.name));
            }
            logs.note(&format!("{} cannot start ({reason}); trying once more", child.name));
        } else {
            // A process that could not start says so; a signal comes from outside at any time.
            has_served |= ended.status.code().is_some() || is_settled;
            logs.note(&format!("{} ended ({}); starting it again", child.name, ended.status));
        }
        if is_settled {
            delay = FIRST_DELAY;
        }
        tokio::select! {
            () = stop.cancelled() => return Supervised::Stopped,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

struct Ended {
    status: ExitStatus,
    /// The error that it printed last.
    error: Option<String>,
}

/// How a process failed to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartFailure {
    /// The next start would fail, too.
    Lasting,
    /// The next start may succeed.
    Passing,
}

impl StartFailure {
    /// Whether a process that has never served is given up, so long after its first start.
    fn is_final(self, since_first_start: Duration) -> bool {
        match self {
            StartFailure::Lasting => true,
            StartFailure::Passing => since_first_start >= PATIENCE,
        }
    }
}

/// By its own words: of the command line (2), or of anything else that it needs to serve.
fn failure(status: ExitStatus) -> Option<StartFailure> {
    match u8::try_from(status.code()?).ok()? {
        2 | CANNOT_START => Some(StartFailure::Lasting),
        CANNOT_START_NOW => Some(StartFailure::Passing),
        _ => None,
    }
}

/// `None` when it ended because it was told to.
async fn run_once(child: &Child, logs: &Logs, stop: &CancellationToken) -> io::Result<Option<Ended>> {
    let mut process = command(child)?.spawn()?;
    let stdout = process.stdout.take().expect("stdout is piped");
    let stderr = process.stderr.take().expect("stderr is piped");
    let lines = async { tokio::join!(forward(child, logs, stdout), forward(child, logs, stderr)).1 };
    let stopped = async {
        tokio::select! {
            status = process.wait() => return Ok::<_, io::Error>(Some(status?)),
            () = stop.cancelled() => {}
        }
        terminate(&process);
        if tokio::time::timeout(child.stop_timeout, process.wait()).await.is_err() {
            logs.note(&format!("{} does not end; killing it", child.name));
            process.kill().await?;
        }
        Ok(None)
    };
    let (status, error) = tokio::join!(stopped, lines);
    let ended = status?.map(|status| Ended { status, error });
    let has_run = ended.as_ref().filter(|ended| failure(ended.status).is_none());
    if let Some(Ended { error: Some(error), .. }) = has_run {
        logs.line(&child.name, &logs.style().error(error));
    }
    Ok(ended)
}

fn terminate(process: &tokio::process::Child) {
    if let Some(pid) = process.id() {
        // SAFETY: a plain system call; the child is not reaped yet, so the id is its own.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGTERM) };
    }
}

fn command(child: &Child) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    if let Some(key) = &child.api_key {
        command.env("BATON_API_KEY", key.secret());
    }
    command
        .args(&child.args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C reaches the supervisor alone, which stops the parts in order.
        .process_group(0)
        .kill_on_drop(true);
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| {
            // When the supervisor is killed, its processes drain and end, too.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    Ok(command)
}

/// Forwards lines until the pipe closes. Returns the error that the process ends with, which is not forwarded: three
/// processes may have the same.
async fn forward(child: &Child, logs: &Logs, pipe: impl AsyncRead + Unpin) -> Option<String> {
    let mut lines = BufReader::new(pipe).lines();
    let mut error = None;
    while let Ok(Some(line)) = lines.next_line().await {
        match logs.style().error_in(&line) {
            Some(text) => error = Some(text),
            None => logs.line(&child.name, &line),
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_child_that_may_start_later_is_tried_for_a_while() {
        let is_final = |code: i32, seconds| {
            let failure = failure(ExitStatus::from_raw(code << 8))?;
            Some(failure.is_final(Duration::from_secs(seconds)))
        };
        for (code, at_once, later) in [
            (2, Some(true), Some(true)),
            (78, Some(true), Some(true)),
            (75, Some(false), Some(true)),
            (1, None, None),
            (101, None, None),
        ] {
            assert_eq!((is_final(code, 1), is_final(code, 31)), (at_once, later), "{code}");
        }
        let killed = ExitStatus::from_raw(libc::SIGKILL);
        assert_eq!(failure(killed), None);
    }
}
