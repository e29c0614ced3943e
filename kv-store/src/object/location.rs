//! From a URL to an object store.

use std::{
    fs::{self, DirBuilder, DirEntry},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use object_store::{
    ClientConfigKey, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
    path::Path,
};

/// A segment takes as long over 300 kB/s.
const REQUEST_TIMEOUT: &str = "120s";
const CONNECT_TIMEOUT: &str = "5s";
/// A file that was not written to for so long is written no more.
const MIN_LEFT_AGE: Duration = Duration::from_secs(60);

/// Why an object store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ObjectOpenError {
    /// Not a location.
    #[error("{0:?} is no location of an object store; expected s3://bucket/prefix or file:///directory")]
    Url(String),
    /// Not encrypted, which was not allowed.
    #[error("{0} is reached without TLS; AWS_ALLOW_HTTP=true allows that")]
    PlainHttp(String),
    /// Not one segment fits.
    #[error(
        "{max_bytes} bytes are too few for an object store: a segment of this model takes at least {segment_bytes}"
    )]
    TooSmall {
        /// What was given.
        max_bytes: u64,
        /// A segment of one record.
        segment_bytes: u64,
    },
    /// The directory cannot be made.
    #[error("{}: cannot make the directory", dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// Its settings contradict each other, or lack something.
    #[error("the settings of the object store cannot be used")]
    Settings(#[source] object_store::Error),
}

/// The store that a URL names, and the path in it. Nothing is sent. Regions, endpoints and credentials are those of the usual
/// variables of the environment (`AWS_*`).
pub(super) fn open(url: &str) -> Result<(Arc<dyn ObjectStore>, Path), ObjectOpenError> {
    let bad = || ObjectOpenError::Url(url.to_owned());
    if let Some(dir) = url.strip_prefix("file://").filter(|dir| dir.starts_with('/')) {
        let dir = PathBuf::from(dir);
        // Prompts can be read from KV.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.map_err(|source| ObjectOpenError::Directory { dir: dir.clone(), source })?;
        let store = LocalFileSystem::new_with_prefix(dir).map_err(ObjectOpenError::Settings)?;
        return Ok((Arc::new(store), Path::default()));
    }
    let (bucket, prefix) = url
        .strip_prefix("s3://")
        .map(|rest| rest.split_once('/').unwrap_or((rest, "")))
        .filter(|(bucket, _)| !bucket.is_empty())
        .ok_or_else(bad)?;
    let prefix = Path::parse(prefix.trim_matches('/')).map_err(|_| bad())?;
    let client = |key| AmazonS3ConfigKey::Client(key);
    let builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint).unwrap_or_default();
    let allows_http = builder.get_config_value(&client(ClientConfigKey::AllowHttp));
    if endpoint.starts_with("http://") && allows_http.is_none_or(|allows| allows != "true") {
        return Err(ObjectOpenError::PlainHttp(endpoint));
    }
    baton_tls::compute_with_ring();
    // What is asked for again is asked for here, off the path of requests.
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let store = builder
        .with_config(client(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
        .with_config(client(ClientConfigKey::ConnectTimeout), CONNECT_TIMEOUT)
        .with_retry(retry)
        .build()
        .map_err(ObjectOpenError::Settings)?;
    Ok((Arc::new(store), prefix))
}

/// Removes what earlier lives of this worker left in its directory when they were killed during a write: `<segment>#<digits>`, which no
/// listing shows. A worker is refused only later if another one has its name, so what that one may be writing stays; a later start
/// removes it. In a bucket there is nothing to remove.
pub(super) fn remove_left(url: &str, own_dir: &Path) {
    let Some(root) = url.strip_prefix("file://") else { return };
    // There is no directory before the first segment.
    let files = fs::read_dir(PathBuf::from(root).join(own_dir.to_string())).into_iter().flatten();
    for file in files.flatten().filter(is_left) {
        match fs::remove_file(file.path()) {
            Ok(()) => tracing::info!(file = ?file.path(), "removed what a killed worker left of a segment"),
            Err(error) => {
                tracing::warn!(%error, file = ?file.path(), "cannot remove what is left of a segment; it takes room")
            }
        }
    }
}

fn is_left(file: &DirEntry) -> bool {
    let name = file.file_name();
    let digits = name.to_str().and_then(|name| name.rsplit_once('#')).map_or("", |(_, digits)| digits);
    let is_staged = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let written = file.metadata().and_then(|metadata| metadata.modified());
    is_staged && written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= MIN_LEFT_AGE))
}

/// What a URL names, for this process: the same text in all that reach the same place. A directory is that of this machine.
pub(super) fn place(url: &str) -> String {
    let (at, id) = match url.strip_prefix("file://") {
        Some(dir) => {
            let machine = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            let id = fs::metadata(dir).map_or((0, 0), |found| (found.dev(), found.ino()));
            (machine, id)
        }
        None => {
            let builder = AmazonS3Builder::from_env();
            (builder.get_config_value(&AmazonS3ConfigKey::Endpoint).unwrap_or_default(), (0, 0))
        }
    };
    format!("{} {} {id:?}", url.trim_end_matches('/'), at.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_a_bucket_or_a_directory() {
        for bad in ["", "s3://", "s3:///prefix", "/dir", "file://dir", "gs://bucket", "https://host/bucket"] {
            assert!(matches!(open(bad), Err(ObjectOpenError::Url(_))), "{bad}");
        }
        let (_, prefix) = open("s3://bucket/one/two/").expect("a bucket");
        assert_eq!(prefix.as_ref(), "one/two");
        let (_, prefix) = open("s3://bucket").expect("a bucket");
        assert_eq!(prefix, Path::default());
        let dir = tempfile::tempdir().expect("a directory");
        let url = |name: &str| format!("file://{}", dir.path().join(name).display());
        open(&url("new/kv")).expect("a directory");
        std::fs::write(dir.path().join("file"), "").expect("a file");
        assert!(matches!(open(&url("file")), Err(ObjectOpenError::Directory { .. })));
    }
}
