//! Work that is asked for again and again, as graphs.

use std::collections::HashMap;
use std::sync::Arc;

use baton_cuda::{CudaError, failed};
use cudarc::driver::{CudaGraph, CudaStream, DriverError, sys};

/// Graphs that are kept: as many as there are sizes of a step, and some.
const MAX_GRAPHS: usize = 512;

/// Work on one stream, by its key.
pub struct Graphs {
    repeated: HashMap<u64, Repeated>,
    stream: Arc<CudaStream>,
}

/// Work that was asked for under one key.
enum Repeated {
    /// Once: what it needed at first is there, such as plans of products.
    Seen,
    Captured(CudaGraph),
    /// Twice, and there was no memory for a graph: as if it was not repeated.
    Plain,
}

impl Graphs {
    pub fn new(stream: &Arc<CudaStream>) -> Graphs {
        Graphs { repeated: HashMap::new(), stream: Arc::clone(stream) }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.repeated.clear();
    }

    fn insert(&mut self, key: u64, repeated: Repeated) {
        if self.repeated.len() >= MAX_GRAPHS && !self.repeated.contains_key(&key) {
            self.repeated.clear();
        }
        self.repeated.insert(key, repeated);
    }

    fn begin_capture(&self) -> Result<(), CudaError> {
        // Other threads of this process, such as those of handoffs, may allocate meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(|error| failed("cuStreamBeginCapture", error))
    }

    /// What was asked for since, as a graph, if there is memory for it.
    fn end_capture(&self) -> Result<Option<CudaGraph>, CudaError> {
        match self.stream.end_capture(sys::CUgraphInstantiate_flags(0)) {
            Ok(Some(graph)) => Ok(Some(graph)),
            Ok(None) => Err(CudaError::Failed { call: "cuStreamEndCapture", why: "no graph".into() }),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(failed("cuStreamEndCapture", error)),
        }
    }
}

/// [`KernelDevice::repeat`](crate::device::KernelDevice::repeat) of an owner of graphs: the second time that work is asked for under a key it
/// becomes a graph.
///
/// # Errors
/// When the work fails, or the driver.
pub fn repeat<D>(
    owner: &mut D,
    graphs: fn(&mut D) -> &mut Graphs,
    key: u64,
    work: &mut dyn FnMut(&mut D) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    match graphs(owner).repeated.get(&key) {
        None => {
            work(owner)?;
            graphs(owner).insert(key, Repeated::Seen);
            return Ok(());
        }
        Some(Repeated::Seen) => {
            graphs(owner).begin_capture()?;
            let asked = work(owner);
            // Also after a failure: the stream is of no use while it is captured.
            let graph = graphs(owner).end_capture();
            asked?;
            let repeated = graph?.map_or(Repeated::Plain, Repeated::Captured);
            if let Repeated::Plain = repeated {
                tracing::warn!("no memory for a graph: these steps are launched kernel by kernel");
            }
            graphs(owner).insert(key, repeated);
        }
        Some(Repeated::Captured(_) | Repeated::Plain) => {}
    }
    match graphs(owner).repeated.get(&key) {
        Some(Repeated::Captured(graph)) => graph.launch().map_err(|error| failed("cuGraphLaunch", error)),
        _ => work(owner),
    }
}
