//! CUDA graphs of repeated work.

use std::collections::HashMap;
use std::sync::Arc;

use baton_cuda::{CudaError, failed};
use cudarc::driver::{CudaGraph, CudaStream, DriverError, sys};

/// Graphs that are kept: enough for all sizes of a step, with some to spare.
const MAX_GRAPHS: usize = 512;

/// Repeated work of one stream, by key.
pub struct Graphs {
    repeated: HashMap<u64, Repeated>,
    stream: Arc<CudaStream>,
    mode: sys::CUstreamCaptureMode,
}

/// State of the work of one key.
enum Repeated {
    /// It ran once. Resources of a first run, such as plans of products, now exist.
    Seen,
    Captured(CudaGraph),
    /// It ran twice, and there was no memory for a graph. It runs without one from now on.
    Plain,
}

impl Graphs {
    pub fn new(stream: &Arc<CudaStream>) -> Graphs {
        // Other threads of this process, such as those of handoffs, may allocate during a capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        Graphs { repeated: HashMap::new(), stream: Arc::clone(stream), mode }
    }

    /// Captures also what other threads queue: a communicator of NCCL that does not block queues its operations from
    /// a thread of NCCL. Without this call, work that allocates or waits during a capture is an error.
    pub fn capture_all_threads(&mut self) {
        self.mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    }

    /// Drops all graphs.
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
        self.stream.begin_capture(self.mode).map_err(|error| failed("cuStreamBeginCapture", error))
    }

    /// The captured graph. `None`: there was no memory for it.
    fn end_capture(&self) -> Result<Option<CudaGraph>, CudaError> {
        match self.stream.end_capture(sys::CUgraphInstantiate_flags(0)) {
            Ok(Some(graph)) => Ok(Some(graph)),
            Ok(None) => Err(CudaError::Failed { call: "cuStreamEndCapture", why: "no graph".into() }),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(failed("cuStreamEndCapture", error)),
        }
    }
}

/// Implements [`KernelDevice::repeat`](crate::device::KernelDevice::repeat) for an owner of graphs. The second run of
/// a key records a graph.
///
/// # Errors
/// When the work or the driver fails.
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
            // The capture ends also after a failure: a stream cannot be used while it is captured.
            let graph = graphs(owner).end_capture();
            asked?;
            let repeated = graph?.map_or(Repeated::Plain, Repeated::Captured);
            if let Repeated::Plain = repeated {
                tracing::warn!(
                    "no memory for a CUDA graph: steps of this size launch their kernels one by one"
                );
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
