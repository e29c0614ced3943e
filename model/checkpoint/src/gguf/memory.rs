//! What the tensors of GGUF files take in memory, which is often more than in the files: kernels have integers of four
//! and of eight bits only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use baton_gguf::{Tensor, TensorType};
use baton_model_spec::{Backend, FloatDtype, IntegerFormat, IntegerWidth, LoadError, StoredWeights};

use super::files::with_contents;
use crate::blocks;

/// Tensors that are parts of one product if they are of one layer. Integers of different formats get a common one.
const PRODUCTS: [&[&str]; 3] = [
    &[".attn_q.weight", ".attn_k.weight", ".attn_v.weight"],
    &[".ffn_gate.weight", ".ffn_up.weight"],
    &[".ffn_gate_exps.weight", ".ffn_up_exps.weight"],
];

/// Bytes that the weights of a GGUF model take in memory, about. `first` is the first of its files.
///
/// # Errors
/// When a file is missing or malformed.
pub fn gguf_memory_bytes(first: &Path, backend: Backend) -> Result<u64, LoadError> {
    with_contents(first, |contents| {
        Ok(memory_bytes(contents.tensors.iter().map(|(name, (tensor, _))| (*name, *tensor)), backend))
    })
}

/// Logs, once for each type, which integers of the files are held in more bits than they have.
pub(crate) fn log_widened(first: &Path) -> Result<(), LoadError> {
    with_contents(first, |contents| {
        let types = contents.tensors.values().map(|(tensor, _)| tensor.tensor_type);
        for name in widened(types) {
            tracing::info!(
                "the file's {name} is held in 8 bits: only Q4_0, Q4_1 and Q4_K stay at four, unless another part of their product \
                 has another type, and `baton inspect` shows the memory"
            );
        }
        Ok(())
    })
}

fn widened(types: impl Iterator<Item = TensorType>) -> BTreeSet<&'static str> {
    let is_widened = |tensor_type: &TensorType| {
        let bits = tensor_type.block_bytes() * 8 / tensor_type.block_len();
        let StoredWeights::Integers(format) = stored(*tensor_type) else { return false };
        format.width == IntegerWidth::Eight && bits < 8
    };
    types.filter(is_widened).map(TensorType::name).collect()
}

/// How weights of this type are stored, as far as it decides how they are multiplied.
pub(super) fn stored(tensor_type: TensorType) -> StoredWeights {
    match tensor_type {
        TensorType::F32 => StoredWeights::Floats(FloatDtype::F32),
        TensorType::F16 => StoredWeights::Floats(FloatDtype::F16),
        TensorType::Bf16 => StoredWeights::Floats(FloatDtype::Bf16),
        integers => StoredWeights::Integers(
            blocks::integer_format(integers).unwrap_or(IntegerFormat::OF_OTHER_GROUPS),
        ),
    }
}

fn memory_bytes<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor)>, backend: Backend) -> u64 {
    let mut products: BTreeMap<(&str, &str), Vec<(StoredWeights, usize)>> = BTreeMap::new();
    for (name, tensor) in tensors {
        let part = PRODUCTS
            .iter()
            .find_map(|parts| parts.iter().find_map(|part| Some((name.strip_suffix(*part)?, parts[0]))));
        let weight = (stored(tensor.tensor_type), tensor.shape.iter().product());
        products.entry(part.unwrap_or((name, ""))).or_default().push(weight);
    }
    let bytes_of = |parts: Vec<(StoredWeights, usize)>| {
        let first = parts[0].0;
        let are_integers = parts.iter().all(|(stored, _)| matches!(stored, StoredWeights::Integers(_)));
        let differ = are_integers && parts.iter().any(|(stored, _)| *stored != first);
        let common = differ.then_some(StoredWeights::Integers(IntegerFormat::OF_OTHER_GROUPS));
        let bytes = |(stored, len): (StoredWeights, usize)| {
            common.unwrap_or(stored).bytes_in_memory(backend) * len as f64
        };
        parts.into_iter().map(bytes).sum::<f64>()
    };
    products.into_values().map(bytes_of).sum::<f64>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tensors: &[(&str, TensorType, usize)], backend: Backend) -> u64 {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, tensor_type, len)| {
                let (shape, start, size_bytes) = (vec![*len], 0, 0);
                (*name, Tensor { tensor_type: *tensor_type, shape, start, size_bytes })
            })
            .collect();
        memory_bytes(tensors.iter().map(|(name, tensor)| (*name, tensor)), backend)
    }

    #[test]
    fn integers_take_the_bits_in_which_they_are_multiplied() {
        for (tensor_type, on_processors, on_gpus) in [
            (TensorType::Q4_0, 18, 20),
            (TensorType::Q4K, 20, 24),
            (TensorType::Q2K, 34, 36),
            (TensorType::Q6K, 34, 36),
            (TensorType::Q5K, 36, 40),
            (TensorType::Iq4Xs, 34, 36),
            (TensorType::F32, 128, 64),
        ] {
            let weights = [("blk.0.ffn_down.weight", tensor_type, 32 * 256)];
            assert_eq!(of(&weights, Backend::Cpu), on_processors * 256, "{tensor_type:?}");
            assert_eq!(of(&weights, Backend::Cuda), on_gpus * 256, "{tensor_type:?}");
        }
    }

    #[test]
    fn parts_of_a_product_that_differ_take_eight_bits() {
        let [q, v] = ["blk.0.attn_q.weight", "blk.0.attn_v.weight"];
        let of_types = |v, v_type| of(&[(q, TensorType::Q4K, 256), (v, v_type, 256)], Backend::Cpu);
        assert_eq!(of_types(v, TensorType::Q4K), 2 * 160);
        assert_eq!(of_types(v, TensorType::Q6K), 2 * 272);
        assert_eq!(of_types("blk.1.attn_v.weight", TensorType::Q6K), 160 + 272, "of another layer");
    }

    #[test]
    fn only_three_types_below_eight_bits_stay_as_they_are() {
        let names = widened(TensorType::ALL.iter().copied());
        let expected = ["IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"];
        assert!(names.into_iter().eq(expected));
    }
}
