//! Device memory full of random numbers, for trials and measurements.

use baton_cuda::CudaError;

use crate::device::{KernelDevice, TimedDevice};
use crate::kernel::Address;

/// Bytes of noise that the host generates. The device repeats them.
const NOISE_BYTES: usize = 1 << 20;

/// bf16 numbers in -1/32..1/32. As weights of some thousand columns they keep the magnitude of activations.
pub struct Noise(Address);

impl Noise {
    pub fn new<D: KernelDevice>(device: &mut D) -> Result<Noise, CudaError> {
        Ok(Noise(device.allocate_holding(&bf16(NOISE_BYTES / 2, 1.0 / 32.0))?))
    }

    /// Allocates memory and fills it with noise.
    pub fn fill_new<D: TimedDevice>(&self, device: &mut D, num_bytes: usize) -> Result<Address, CudaError> {
        let at = device.allocate(num_bytes)?;
        for from in (0..num_bytes).step_by(NOISE_BYTES) {
            // SAFETY: both ranges are inside their allocations.
            unsafe { device.copy(at.offset_by(from), self.0, NOISE_BYTES.min(num_bytes - from)) }?;
        }
        Ok(at)
    }
}

/// `num` bf16 numbers in `-magnitude..magnitude`.
pub fn bf16(num: usize, magnitude: f32) -> Vec<u8> {
    numbers(num).flat_map(|number| half::bf16::from_f32(number * magnitude).to_le_bytes()).collect()
}

/// `num` numbers in -1..1.
pub fn numbers(num: usize) -> impl Iterator<Item = f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    (0..num).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}
