//! The floating-point types that weights are stored in.

use baton_kv_cache::KvDtype;

/// Type of a stored weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
}

impl FloatDtype {
    /// Bytes of one number.
    #[inline]
    pub fn size_bytes(self) -> usize {
        match self {
            FloatDtype::F32 => 4,
            FloatDtype::F16 | FloatDtype::Bf16 => 2,
        }
    }

    /// "f32", "f16" or "bf16".
    pub fn name(self) -> &'static str {
        self.kv_dtype().name()
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<FloatDtype> {
        [FloatDtype::F32, FloatDtype::F16, FloatDtype::Bf16].into_iter().find(|dtype| dtype.name() == name)
    }

    /// One stored number.
    ///
    /// # Panics
    /// When there are fewer than [`size_bytes`](Self::size_bytes) bytes.
    #[inline]
    pub fn widen(self, bytes: &[u8]) -> f32 {
        match self {
            FloatDtype::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            FloatDtype::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            FloatDtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        }
    }

    /// The type of KV when no other is asked for.
    pub fn kv_dtype(self) -> KvDtype {
        match self {
            FloatDtype::F32 => KvDtype::F32,
            FloatDtype::F16 => KvDtype::F16,
            FloatDtype::Bf16 => KvDtype::Bf16,
        }
    }
}
