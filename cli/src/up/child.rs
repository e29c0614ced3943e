//! One supervised process: start it, forward its log lines, start it again when it ends.

use std::{
    io,
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::Command,
};
use tokio_util::sync::CancellationToken;

use super::logs::Logs;

/// A process to keep running: a subcommand of this program.
pub(super) struct Child {
    /// Its name in the log.
    pub name: String,
    /// Arguments of `baton`.
    pub args: Vec<String>,
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
/// Supervision gives up after so many exits in a row before this time.
const MAX_FAILED_STARTS: u32 = 3;
/// How long a process may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(35);

/// Keeps `child` running until `stop`.
pub(super) async fn supervise(child: Child, logs: Logs, stop: CancellationToken) -> Supervised {
    let mut delay = FIRST_DELAY;
    let mut failed_starts = 0;
    loop {
        let started = Instant::now();
        let ended = match run_once(&child, &logs, &stop).await {
            Ok(Some(ended)) => ended,
            Ok(None) => return Supervised::Stopped,
            Err(error) => return Supervised::GaveUp(format!("cannot start {}: {error}", child.name)),
        };
        if started.elapsed() >= SETTLED {
            delay = FIRST_DELAY;
            failed_starts = 0;
        }
        // A signal comes from outside; an exit code is the process's own decision.
        if ended.status.code().is_some() {
            failed_starts += 1;
        }
        if failed_starts == MAX_FAILED_STARTS || ended.status.code() == Some(2) {
            let reason = ended.last_line.unwrap_or_else(|| ended.status.to_string());
            return Supervised::GaveUp(format!("{} does not start: {reason}", child.name));
        }
        logs.note(&format!("{} ended ({}); starting it again", child.name, ended.status));
        tokio::select! {
            () = stop.cancelled() => return Supervised::Stopped,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

struct Ended {
    status: ExitStatus,
    last_line: Option<String>,
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
        if tokio::time::timeout(STOP_TIMEOUT, process.wait()).await.is_err() {
            logs.note(&format!("{} does not end; killing it", child.name));
            process.kill().await?;
        }
        Ok(None)
    };
    let (status, last_line) = tokio::join!(stopped, lines);
    Ok(status?.map(|status| Ended { status, last_line }))
}

fn terminate(process: &tokio::process::Child) {
    if let Some(pid) = process.id() {
        // SAFETY: a plain system call; the child is not reaped yet, so the id is its own.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGTERM) };
    }
}

fn command(child: &Child) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
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

/// Forwards lines until the pipe closes. Returns the last line that is not empty.
async fn forward(child: &Child, logs: &Logs, pipe: impl AsyncRead + Unpin) -> Option<String> {
    let mut lines = BufReader::new(pipe).lines();
    let mut last = None;
    while let Ok(Some(line)) = lines.next_line().await {
        logs.line(&child.name, &line);
        if !line.trim().is_empty() {
            last = Some(line);
        }
    }
    last
}
