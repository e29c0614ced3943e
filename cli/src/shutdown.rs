//! The signals that end the program.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that the first Ctrl-C or SIGTERM cancels. The second signal ends the process at once.
pub(crate) fn on_signal() -> anyhow::Result<CancellationToken> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    // Lives as long as the process: a signal may come at any time.
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if cancelled.is_cancelled() {
                std::process::exit(130);
            }
            cancelled.cancel();
        }
    });
    Ok(token)
}
