//! What can go wrong, named for what the caller can do about it.

use std::{io, path::PathBuf, sync::Arc};

/// Why a journal cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalOpenError {
    /// Two routers cannot share a directory.
    #[error("another router uses the journal in {}", dir.display())]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
    /// Written by another version of this software.
    #[error(
        "{} was written in version {found} of the journal's format, this is version {expected}; finish its streams with that \
         router, or choose another directory",
        path.display()
    )]
    Version {
        /// The segment.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// The name is that of a segment, and the content is not.
    #[error("{} is not a segment of a journal", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file system refuses.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What it refuses.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// Why a request is not accepted. It has no journal then, and nothing of it is computed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AcceptError {
    /// A session of this id runs or is parked.
    #[error("a request with the id {id:?} runs or is parked")]
    Exists {
        /// The id.
        id: String,
    },
    /// Sessions that clients read fill half of the journal; the other half is the room to move them.
    #[error(
        "the journal is full: {live_bytes} bytes of requests that have not ended, at most {max_bytes} are possible"
    )]
    Full {
        /// What they take.
        live_bytes: u64,
        /// What they may take.
        max_bytes: u64,
    },
    /// The disk is slower than what is journalled.
    #[error("the journal's disk is behind: {num_bytes} bytes wait to be written")]
    Behind {
        /// They.
        num_bytes: usize,
    },
    /// The file system refuses, or is too slow.
    #[error("the journal cannot be written: {0}")]
    Write(Arc<str>),
}

/// Why a session cannot be resumed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ResumeError {
    /// It never was, has expired, or was dropped after its end.
    #[error("no stream with the id {id:?} is in the journal: it never was, or its time is over")]
    Unknown {
        /// The id.
        id: String,
    },
    /// Another client has taken it meanwhile.
    #[error("another client has resumed the stream with the id {id:?} meanwhile")]
    Replaced {
        /// The id.
        id: String,
    },
    /// Its records are damaged or cannot be read.
    #[error("the journal of {id:?} cannot be read: {reason}")]
    Read {
        /// The id.
        id: String,
        /// Why.
        reason: String,
    },
}
