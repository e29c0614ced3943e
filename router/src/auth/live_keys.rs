//! The keys of a file that may change: it is read again every second.
//!
//! A file of 10,000 keys takes milliseconds, and reading it misses no change. Notifications would: a mounted secret of Kubernetes
//! changes by a link, and network file systems send none. A change counts when it was read twice: a file that is being written is
//! short, and a short one, even an empty one, may be valid.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context;
use baton_keys::{KeyHash, KeyHolder, KeyRing};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::refusal::Refusal;

const INTERVAL: Duration = Duration::from_secs(1);

/// The newest keys that could be read.
#[derive(Debug)]
pub(crate) struct LiveKeys {
    path: PathBuf,
    worker_key: Option<KeyHash>,
    /// Locked for a copy of the pointer.
    ring: RwLock<Arc<KeyRing>>,
    /// What was read first.
    first: String,
}

/// What the file held, or why it could not be read.
struct SeenTexts {
    /// What was entered, or refused.
    known: Result<String, String>,
    newest: Result<String, String>,
}

impl LiveKeys {
    /// Reads the file.
    ///
    /// # Errors
    /// When it cannot be read, or is wrong: a router does not start without its keys.
    pub(crate) fn read(path: &Path, worker_key: Option<KeyHash>) -> anyhow::Result<Arc<LiveKeys>> {
        let which = || format!("key file {} of --api-keys (BATON_API_KEYS)", path.display());
        let first = std::fs::read_to_string(path).with_context(which)?;
        let keys = LiveKeys { path: path.to_owned(), worker_key, ring: RwLock::default(), first };
        keys.enter(&keys.first).with_context(which)?;
        Ok(Arc::new(keys))
    }

    /// The holder of the key that a caller shows.
    pub(super) fn find(&self, shown: Option<&str>) -> Result<KeyHolder, Refusal> {
        Ok(self.ring().find(shown.ok_or(Refusal::NoKey)?, SystemTime::now())?.clone())
    }

    /// The keys that are valid now.
    fn ring(&self) -> Arc<KeyRing> {
        self.ring.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again whenever it has changed, until `stop`.
    pub(crate) async fn follow(self: Arc<Self>, stop: CancellationToken) {
        let mut seen = SeenTexts { known: Ok(self.first.clone()), newest: Ok(self.first.clone()) };
        while stop.run_until_cancelled(sleep(INTERVAL)).await.is_some() {
            let keys = self.clone();
            let reread = tokio::task::spawn_blocking(move || keys.reread(seen));
            seen = reread.await.expect("reading a file does not panic");
        }
    }

    /// Enters the file's keys if its text is not the known one and was read before. A file that is wrong changes nothing.
    fn reread(&self, seen: SeenTexts) -> SeenTexts {
        let read = std::fs::read_to_string(&self.path).map_err(|error| error.to_string());
        if read == seen.known || read != seen.newest {
            return SeenTexts { newest: read, ..seen };
        }
        let entered = read.clone().and_then(|text| self.enter(&text).map_err(|error| error.to_string()));
        let path = self.path.display();
        match entered {
            Ok(()) => tracing::info!(%path, num_keys = self.ring().num_keys(), "key file read again"),
            Err(error) => {
                tracing::error!(%path, error, "key file cannot be used: the keys stay as they were")
            }
        }
        SeenTexts { known: read, ..seen }
    }

    fn enter(&self, text: &str) -> Result<(), baton_keys::KeyFileError> {
        let mut ring = KeyRing::read(text)?;
        if let Some(hash) = self.worker_key {
            ring.add_worker_key(hash);
        }
        ring.continue_from(&self.ring(), Instant::now());
        *self.ring.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(ring);
        Ok(())
    }

    /// Waits until the holder's key is no longer valid.
    pub(super) async fn revoked(self: Arc<Self>, holder: KeyHolder) {
        while self.ring().is_valid(&holder, SystemTime::now()) {
            sleep(INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use baton_keys::{ApiKey, Quota};

    use super::*;

    #[test]
    fn a_file_that_is_wrong_or_gone_leaves_the_keys_as_they_were() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [first, second, worker] = [1, 2, 3].map(|number| ApiKey::from_random([number; 32]));
        let entry =
            |key: &ApiKey| format!("[[key]]\nname = \"k\"\ntenant = \"t\"\nhash = \"{}\"\n", key.hash());
        fs::write(file.path(), entry(&first)).unwrap();
        let keys = LiveKeys::read(file.path(), Some(worker.hash())).unwrap();
        let is_valid = |key: &ApiKey| keys.find(Some(key.secret())).is_ok();
        let reread = || {
            let seen = SeenTexts { known: Ok(String::new()), newest: Ok(String::new()) };
            keys.reread(keys.reread(seen)).known
        };
        assert!(reread().is_ok());
        assert_eq!([&first, &second, &worker].map(is_valid), [true, false, true]);
        for text in ["[[key]]\nname = 1\n", "[[", "nothing"] {
            fs::write(file.path(), text).unwrap();
            assert_eq!(reread().as_deref(), Ok(text));
            assert!(is_valid(&first), "{text}");
        }
        fs::remove_file(file.path()).unwrap();
        assert!(reread().is_err());
        assert!(is_valid(&first));
        fs::write(file.path(), entry(&second)).unwrap();
        assert!(reread().is_ok());
        assert_eq!([&first, &second, &worker].map(is_valid), [false, true, true]);
    }

    #[test]
    fn a_file_that_is_caught_half_written_revokes_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let key = ApiKey::from_random([1; 32]);
        let text = format!("[[key]]\nname = \"k\"\ntenant = \"t\"\nhash = \"{}\"\nstreams = 1\n", key.hash());
        fs::write(file.path(), &text).unwrap();
        let keys = LiveKeys::read(file.path(), None).unwrap();
        let find = || keys.find(Some(key.secret())).ok();
        let call = find().unwrap().begin_call(Instant::now()).unwrap();
        let mut seen = SeenTexts { known: Ok(text.clone()), newest: Ok(text.clone()) };
        for part in ["", &text, "# half", "", "# more", &text, &text, ""] {
            fs::write(file.path(), part).unwrap();
            seen = keys.reread(seen);
            assert!(find().is_some(), "{part:?}");
        }
        seen = keys.reread(seen);
        assert!(find().is_none(), "it stays empty");
        fs::write(file.path(), &text).unwrap();
        keys.reread(keys.reread(seen));
        let exceeded = find().unwrap().begin_call(Instant::now()).unwrap_err();
        assert_eq!(exceeded.quota, Quota::Streams, "the call is still open");
        drop(call);
    }
}
