//! A host by the files below its root.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// A host, and where it may have what is looked for.
pub(in crate::doctor) struct Host {
    /// `/`, or a folder that stands for it.
    pub(in crate::doctor) root: PathBuf,
    /// Folders of libraries besides the system's: those of `LD_LIBRARY_PATH`.
    pub(in crate::doctor) library_path: Option<OsString>,
    /// Paths of libraries that flags or variables name: files or folders.
    pub(in crate::doctor) libraries: Vec<PathBuf>,
    pub(in crate::doctor) clock: Clock,
    /// Ports that Baton is to listen on.
    pub(in crate::doctor) ports: Vec<u16>,
    /// The model to be served.
    pub(in crate::doctor) model: Option<PathBuf>,
}

/// Whether something keeps the clock right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::doctor) enum Clock {
    Synchronised,
    Unsynchronised,
    Unknown,
}

impl Host {
    /// A path of the host as one of this process.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file without the space around it; empty if it cannot be read.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> String {
        fs::read_to_string(self.path(path)).map(|text| text.trim().to_owned()).unwrap_or_default()
    }

    /// Names in a folder, sorted; none if it cannot be read.
    pub(super) fn names(&self, folder: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}
