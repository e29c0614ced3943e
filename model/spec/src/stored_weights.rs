//! How most weights of a model's layers are stored, as far as it decides how they are multiplied.
//!
//! This module does not know files or kernels.

use crate::float::FloatDtype;
use crate::integers::{IntegerFormat, IntegerWidth, MAX_GROUP, MIN_GROUP};
use crate::precision::Backend;
use crate::weight_format::WeightFormat;

/// How most weights of a model's layers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredWeights {
    /// Floats.
    Floats(FloatDtype),
    /// E4M3, with scales of rows or large blocks.
    Fp8,
    /// Integers, in the format in which they are multiplied.
    Integers(IntegerFormat),
}

impl StoredWeights {
    /// Bytes that a weight takes in the memory of a backend, with its share of scales and zero points of groups. The
    /// kernels' formats decide, not the file.
    pub fn bytes_in_memory(self, backend: Backend) -> f64 {
        match (self, backend) {
            (StoredWeights::Floats(dtype), Backend::Cpu) => dtype.size_bytes() as f64,
            // Rounded to bf16.
            (StoredWeights::Floats(_), Backend::Cuda) | (StoredWeights::Fp8, Backend::Cpu) => 2.0,
            (StoredWeights::Fp8, Backend::Cuda) => 1.0,
            (StoredWeights::Integers(format), _) => {
                let num_tables = if format.has_zeros { 2.0 } else { 1.0 };
                let table_bytes = match backend {
                    Backend::Cpu => 2.0,
                    Backend::Cuda => 4.0,
                };
                format.width.bits() as f64 / 8.0 + num_tables * table_bytes / format.group as f64
            }
        }
    }

    /// Of a directory whose configuration states this format, and `dtype` for floats. Only the tensors show zero points: none
    /// are assumed.
    pub(crate) fn stated(weights: WeightFormat, dtype: FloatDtype) -> StoredWeights {
        match weights {
            WeightFormat::Bf16 => StoredWeights::Floats(dtype),
            WeightFormat::Fp8 => StoredWeights::Fp8,
            WeightFormat::Integers { num_bits, group, lists_groups } => {
                let width = if num_bits <= 4 { IntegerWidth::Four } else { IntegerWidth::Eight };
                let group = group.unwrap_or(IntegerFormat::GROUP_OF_ROW);
                let has_kernels = !lists_groups && group.is_multiple_of(MIN_GROUP) && group <= MAX_GROUP;
                let format = IntegerFormat { width, group, has_zeros: false };
                StoredWeights::Integers(if has_kernels { format } else { IntegerFormat::OF_OTHER_GROUPS })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_the_groups_in_which_they_are_multiplied() {
        let stated = |num_bits, group, lists_groups| {
            let weights = WeightFormat::Integers { num_bits, group, lists_groups };
            let StoredWeights::Integers(format) = StoredWeights::stated(weights, FloatDtype::Bf16) else {
                panic!("not integers")
            };
            (format.width.bits(), format.group)
        };
        let of = |num_bits, group| stated(num_bits, group, false);
        assert_eq!(of(4, Some(128)), (4, 128));
        assert_eq!(of(8, Some(64)), (8, 64));
        assert_eq!(of(8, None), (8, 128), "a scale for each row");
        assert_eq!(of(4, Some(16)), (8, 32), "groups that no kernel has");
        assert_eq!(of(4, Some(2048)), (8, 32), "groups that no kernel has");
        assert_eq!(stated(4, Some(128), true), (8, 32), "groups that are not in order");
    }

    #[test]
    fn weights_take_what_kernels_hold() {
        for (stored, on_processors, on_gpus) in [
            (StoredWeights::Floats(FloatDtype::F32), 4.0, 2.0),
            (StoredWeights::Floats(FloatDtype::Bf16), 2.0, 2.0),
            (StoredWeights::Fp8, 2.0, 1.0),
            (StoredWeights::Integers(IntegerFormat::OF_OTHER_GROUPS), 1.0625, 1.125),
        ] {
            let bytes = [Backend::Cpu, Backend::Cuda].map(|backend| stored.bytes_in_memory(backend));
            assert_eq!(bytes, [on_processors, on_gpus], "{stored:?}");
        }
    }

    #[test]
    fn floats_are_of_the_stated_type() {
        for dtype in [FloatDtype::F32, FloatDtype::F16, FloatDtype::Bf16] {
            assert_eq!(StoredWeights::stated(WeightFormat::Bf16, dtype), StoredWeights::Floats(dtype));
            assert_eq!(StoredWeights::stated(WeightFormat::Fp8, dtype), StoredWeights::Fp8);
        }
    }
}
