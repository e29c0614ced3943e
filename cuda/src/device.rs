//! CUDA devices: their number, and the handle of one device.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaStream, DriverError,
    result::{self, device},
    sys,
};

use crate::{CudaError, CudaVersion, failed};

/// The number of devices that this process can use: at least one.
///
/// # Errors
/// When the driver or a device is missing.
pub fn num_devices() -> Result<usize, CudaError> {
    // SAFETY: loads the driver, if there is one, as any CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let count = result::init().and_then(|()| device::get_count());
    match count {
        Ok(count @ 1..) => Ok(count as usize),
        Ok(_) | Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(CudaError::NoDevice),
        Err(error) => Err(failed("cuInit", error)),
    }
}

/// What the driver calls device `ordinal`.
///
/// # Errors
/// When there is no such device, or the driver fails.
pub fn device_name(ordinal: u32) -> Result<String, CudaError> {
    let num_devices = num_devices()?;
    if ordinal as usize >= num_devices {
        return Err(CudaError::NoSuchDevice { device: ordinal, num_devices });
    }
    let name = device::get(ordinal as i32).and_then(device::get_name);
    name.map_err(|error| failed("cuDeviceGetName", error))
}

/// One device, with its primary context. The CUDA runtime, and therefore NCCL, uses the same context.
#[derive(Clone, Debug)]
pub struct Device(Arc<CudaContext>);

impl Device {
    /// Opens device `ordinal` of those that this process sees.
    ///
    /// # Errors
    /// When there is no such device, or the driver fails.
    pub fn open(ordinal: u32) -> Result<Device, CudaError> {
        let num_devices = num_devices()?;
        if ordinal as usize >= num_devices {
            return Err(CudaError::NoSuchDevice { device: ordinal, num_devices });
        }
        let context =
            CudaContext::new(ordinal as usize).map_err(|error| failed("cuDevicePrimaryCtxRetain", error))?;
        // With event tracking, the first stream would wait for all streams of the device, which ends the captures of
        // other threads with an error, in every mode.
        // SAFETY: the events track only cudarc's slices, which nothing here uses.
        unsafe { context.disable_event_tracking() };
        Ok(Device(context))
    }

    /// The device's index in this process.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal() as u32
    }

    /// cudarc's context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.0
    }

    /// Makes this device the calling thread's current device.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.0.bind_to_thread().map_err(|error| failed("cuCtxSetCurrent", error))
    }

    /// Creates a stream that is not ordered after any other.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.0.new_stream().map_err(|error| failed("cuStreamCreate", error))
    }

    /// Creates such a stream of the highest priority: blocks of threads of its kernels start before waiting blocks of other
    /// streams.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn urgent_stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.bind()?;
        let (_, highest) = result::stream::get_priority_range()
            .map_err(|error| failed("cuCtxGetStreamPriorityRange", error))?;
        let stream = self.0.new_stream_with_priority(highest);
        stream.map_err(|error| failed("cuStreamCreateWithPriority", error))
    }

    /// The newest CUDA version that the driver supports.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn driver_version(&self) -> Result<CudaVersion, CudaError> {
        let mut number = 0;
        // SAFETY: the out pointer is valid, and the driver is loaded.
        let asked = unsafe { sys::cuDriverGetVersion(&mut number) };
        asked.result().map_err(|error| failed("cuDriverGetVersion", error))?;
        Ok(CudaVersion::of_number(number as u32))
    }

    /// Free bytes and total bytes.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        result::mem_get_info().map_err(|error| failed("cuMemGetInfo", error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_drivers_and_devices_are_reported() {
        match num_devices() {
            Ok(num_devices) => {
                let device = num_devices as u32;
                let error = Device::open(device).unwrap_err();
                assert_eq!(error, CudaError::NoSuchDevice { device, num_devices });
            }
            Err(error @ (CudaError::NoDriver | CudaError::NoDevice)) => {
                let text = error.to_string();
                assert!(
                    text.contains("no CUDA driver: libcuda.so.1") || text.contains("no device"),
                    "{text}"
                );
                assert_eq!(Device::open(0).unwrap_err(), error);
            }
            Err(error) => panic!("{error}"),
        }
    }
}
