//! Logs panics as errors, so that they are found in the log.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    panic::{self, PanicHookInfo},
    thread,
};

/// Logs panics as errors from now on. If the filter drops errors, panics are printed as before.
pub(crate) fn log_panics() {
    let previous = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if tracing::enabled!(tracing::Level::ERROR) { log(info) } else { previous(info) }
    }));
}

fn log(info: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    let message = info.payload_as_str().unwrap_or("(no message)");
    let location = info.location().map(ToString::to_string).unwrap_or_default();
    // Captured only if RUST_BACKTRACE asks for it.
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        tracing::error!(thread, location, "panicked: {message}\n{backtrace}");
    } else {
        tracing::error!(thread, location, "panicked: {message}");
    }
}
