//! The number of queues between the host and each device. The driver takes it from the environment, when it starts.

use std::{env, fs};

/// The driver's variable: 1 to 32 queues, 8 by default.
const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Streams beyond this number share a queue, and work of one then waits behind work of another. A worker has about
/// ten streams on a device: the steps of the model and of a draft model, sums over ranks, two of NCCL for each of two
/// communicators, and for handoffs block kernels, copies and a transport. The maximum would take more of the queues
/// that processes share under MPS.
const NUM_CONNECTIONS: &str = "16";

/// Sets the number of queues for this process, unless the environment has it. `main` calls this first: before the
/// driver starts, and before there are other threads, which might read the environment meanwhile. With other threads
/// it does nothing.
pub fn set_connections() {
    let is_alone = || fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if env::var_os(VARIABLE).is_none() && is_alone() {
        // SAFETY: this process has one thread.
        unsafe { env::set_var(VARIABLE, NUM_CONNECTIONS) };
    }
}
