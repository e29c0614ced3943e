//! An object store in memory that does as it is told: also what no store should.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, memory::InMemory,
    path::Path,
};

/// What is wrong with the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Lie {
    #[default]
    Nothing,
    /// Every range lacks its last byte.
    Short,
    /// A bit of every range of more than so many bytes is wrong.
    FlippedBit(usize),
    /// Ranges are those of the object before.
    OtherRange,
    /// No object can be read: it was deleted after it was listed.
    Vanished,
    /// Every request fails.
    Fails,
    /// No object of this worker can be read.
    Withholds(&'static str),
    /// Reads never end.
    Hangs,
    /// Reads take so long.
    Slow(Duration),
}

/// The store. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct LyingStore {
    inner: Arc<InMemory>,
    lie: Arc<Mutex<Lie>>,
    num_puts: Arc<AtomicUsize>,
}

impl LyingStore {
    pub(super) fn tell(&self, lie: Lie) {
        *self.lie.lock().unwrap() = lie;
    }

    /// Writes that were tried.
    pub(super) fn num_puts(&self) -> usize {
        self.num_puts.load(Ordering::Relaxed)
    }

    fn lie(&self) -> Lie {
        *self.lie.lock().unwrap()
    }
}

fn refused<T>() -> Result<T> {
    Err(object_store::Error::Generic { store: "lying", source: "503 slow down".into() })
}

#[async_trait]
impl ObjectStore for LyingStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.num_puts.fetch_add(1, Ordering::Relaxed);
        if self.lie() == Lie::Fails {
            return refused();
        }
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, mut options: GetOptions) -> Result<GetResult> {
        let lie = self.lie();
        match (lie, &mut options.range) {
            (Lie::Fails, _) => return refused(),
            (Lie::Withholds(worker), _) if location.parts().any(|part| part.as_ref() == worker) => {
                return refused();
            }
            (Lie::Vanished, _) => {
                let (path, source) = (location.to_string(), "404".into());
                return Err(object_store::Error::NotFound { path, source });
            }
            (Lie::Hangs, _) => std::future::pending::<()>().await,
            (Lie::Slow(time), _) => tokio::time::sleep(time).await,
            (Lie::Short, Some(GetRange::Bounded(range))) => range.end -= 1,
            (Lie::OtherRange, Some(GetRange::Bounded(Range { start, end }))) if *start > 0 => {
                (*start, *end) = (*start - 1, *end - 1);
            }
            _ => {}
        }
        let mut result = self.inner.get_opts(location, options).await?;
        if let Lie::FlippedBit(min_bytes) = lie {
            let (range, meta) = (result.range.clone(), result.meta.clone());
            let mut bytes = result.bytes().await?.to_vec();
            if bytes.len() > min_bytes {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
            }
            let payload = GetResultPayload::Stream(stream::iter([Ok(bytes.into())]).boxed());
            result = GetResult {
                payload,
                meta,
                range,
                attributes: Default::default(),
                extensions: Default::default(),
            };
        }
        Ok(result)
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.lie() {
            Lie::Fails => stream::once(async { refused() }).boxed(),
            Lie::Hangs => stream::pending().boxed(),
            _ => self.inner.list(prefix).into_stream().boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

impl fmt::Display for LyingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LyingStore")
    }
}
