//! Keys and values in their blocks: where a position is stored, and writing and reading a row.
//!
//! It does not know how numbers are quantised ([`KvDtype::store_vector`](baton_kv_cache::KvDtype::store_vector)) or
//! how attention uses them.

use std::slice;

use baton_kv_cache::{BlockId, BlockStorage, KvLayout, VectorCodec};

use baton_cpu_simd::{Bf16, Stored};

/// The keys and values of one KV head of one sequence in one layer.
#[derive(Clone, Copy)]
pub(crate) struct HeadKv<'a> {
    storage: &'a BlockStorage,
    layer_idx: usize,
    blocks: &'a [BlockId],
    /// Offsets of the head's keys and values in a block's piece.
    halves: [usize; 2],
}

impl<'a> HeadKv<'a> {
    pub(crate) fn new(
        storage: &'a BlockStorage,
        layer_idx: usize,
        blocks: &'a [BlockId],
        kv_head: usize,
    ) -> HeadKv<'a> {
        let layout = storage.layout();
        let halves = [0, layout.half_bytes()].map(|half| half + layout.head_offset(kv_head));
        HeadKv { storage, layer_idx, blocks, halves }
    }

    pub(crate) fn layout(&self) -> &'a KvLayout {
        self.storage.layout()
    }

    /// The addresses of a position's key and value, and how many positions, at most `len`, are contiguous from there.
    #[inline(always)]
    pub(crate) fn run(&self, position: usize, len: usize) -> ([*const u8; 2], usize) {
        let layout = self.layout();
        let (heads, slot) = self.place(position);
        let offset = layout.token_offset(slot);
        // SAFETY: the slot's elements are inside the head.
        (heads.map(|head| unsafe { head.add(offset) }), (layout.block_size - slot).min(len))
    }

    /// Copies the scales of `len` keys from `first` on to `to[0]`, those of the values to `to[1]`, and fills both with zeros up
    /// to `room`: weights of zero are multiplied by them, too.
    ///
    /// # Safety
    /// The type has scales; each of `to` is valid for `room` numbers; no other code writes these positions during the
    /// call.
    #[inline(always)]
    pub(crate) unsafe fn scales(&self, first: usize, len: usize, room: usize, to: [*mut f32; 2]) {
        let layout = self.layout();
        debug_assert_eq!(layout.dtype.scale_bytes(), Bf16::SIZE);
        let mut done = 0;
        while done < len {
            let (heads, slot) = self.place(first + done);
            let (run, offset) = ((layout.block_size - slot).min(len - done), layout.scale_offset(slot));
            for (head, to) in heads.into_iter().zip(to) {
                for idx in 0..run {
                    // SAFETY: the slots' scales are inside the head; `done + idx` is below `len`.
                    unsafe { *to.add(done + idx) = Bf16::load_one(head.add(offset + idx * Bf16::SIZE)) };
                }
            }
            done += run;
        }
        for to in to {
            // SAFETY: guaranteed by the caller.
            unsafe { slice::from_raw_parts_mut(to.add(len), room - len).fill(0.0) };
        }
    }

    /// The head's keys and values in the block of a position, and the position's slot in the block.
    #[inline(always)]
    fn place(&self, position: usize) -> ([*const u8; 2], usize) {
        let block_size = self.layout().block_size;
        let piece = self.storage.layer_ptr(self.blocks[position / block_size], self.layer_idx);
        // SAFETY: both are inside the piece.
        (self.halves.map(|half| unsafe { piece.as_ptr().add(half).cast_const() }), position % block_size)
    }
}

/// Quantises a row's keys and values to the type of KV and writes them to the position's slot in the heads from
/// `first_head` on.
///
/// # Safety
/// No other code reads or writes that slot of the layer.
///
/// # Panics
/// When the layout has fewer heads.
pub unsafe fn store_rows(
    storage: &BlockStorage,
    layer_idx: usize,
    blocks: &[BlockId],
    position: usize,
    first_head: usize,
    keys: &[f32],
    values: &[f32],
) {
    let layout = storage.layout();
    let KvLayout { block_size, num_kv_heads, head_dim, dtype, .. } = *layout;
    let (block_idx, slot) = (position / block_size, position % block_size);
    let piece = storage.layer_ptr(blocks[block_idx], layer_idx).as_ptr();
    for (half, row) in [keys, values].into_iter().enumerate() {
        assert!(row.len() <= (num_kv_heads - first_head) * head_dim && row.len().is_multiple_of(head_dim));
        for (head_idx, vector) in (first_head..).zip(row.chunks_exact(head_dim)) {
            // SAFETY: head and slot are inside the piece; the caller guarantees exclusive access.
            let (elements, scale) = unsafe {
                let head = piece.add(half * layout.half_bytes() + layout.head_offset(head_idx));
                let (elements, scale) =
                    (head.add(layout.token_offset(slot)), head.add(layout.scale_offset(slot)));
                (
                    slice::from_raw_parts_mut(elements, head_dim * dtype.size_bytes()),
                    slice::from_raw_parts_mut(scale, dtype.scale_bytes()),
                )
            };
            dtype.store_vector(vector, elements, scale);
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use baton_kv_cache::KvDtype;

    use super::*;
    use baton_cpu_simd::{E4m3, F16, F32, I8};

    /// The dequantised key and value of a position, read one by one.
    ///
    /// # Safety
    /// No other code writes the position during the call.
    pub(crate) unsafe fn read_vectors(kv: &HeadKv<'_>, position: usize) -> [Vec<f32>; 2] {
        let KvLayout { dtype, head_dim, .. } = *kv.layout();
        let (vectors, _) = kv.run(position, 1);
        // SAFETY: all elements are inside the position's slot.
        unsafe {
            let mut scales = [1.0; 2];
            if dtype.scale_bytes() > 0 {
                kv.scales(position, 1, 1, scales.each_mut().map(std::ptr::from_mut));
            }
            let code = |vector: *const u8, i: usize| {
                let at = vector.add(i * dtype.size_bytes());
                match dtype {
                    KvDtype::F32 => F32::load_one(at),
                    KvDtype::F16 => F16::load_one(at),
                    KvDtype::Bf16 => Bf16::load_one(at),
                    KvDtype::Fp8 => E4m3::load_one(at),
                    KvDtype::Int8 => I8::load_one(at),
                }
            };
            [0, 1].map(|half| (0..head_dim).map(|i| code(vectors[half], i) * scales[half]).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::KvDtype;

    use super::testing::read_vectors;
    use super::*;
    use baton_model_testing::noise;

    /// Stores one token's KV in a block and reads it back.
    fn round_trip(dtype: KvDtype, keys: &[f32], values: &[f32]) -> [Vec<f32>; 2] {
        let layout =
            KvLayout { block_size: 5, num_layers: 2, num_kv_heads: 2, head_dim: keys.len() / 2, dtype };
        let storage = BlockStorage::new(layout, 3).unwrap();
        let blocks = [BlockId(2), BlockId(0)];
        let position = 8;
        // SAFETY: no other code uses the storage.
        unsafe { store_rows(&storage, 1, &blocks, position, 0, keys, values) };
        let mut read = [Vec::new(), Vec::new()];
        for kv_head in 0..2 {
            let kv = HeadKv::new(&storage, 1, &blocks, kv_head);
            assert_eq!(kv.run(position, 10).1, 2, "to the end of the block");
            // SAFETY: no other code writes.
            let vectors = unsafe { read_vectors(&kv, position) };
            read.iter_mut().zip(vectors).for_each(|(read, vector)| read.extend(vector));
        }
        read
    }

    #[test]
    fn stored_vectors_are_read_back_from_the_layouts_slots() {
        for dtype in KvDtype::ALL {
            let vectors = [1, 2].map(|seed| noise(seed, 14));
            let read = round_trip(dtype, &vectors[0], &vectors[1]);
            for (read, vector) in read.iter().zip(&vectors) {
                for (read, head) in read.chunks(7).zip(vector.chunks(7)) {
                    let (mut elements, mut scale) =
                        (vec![0; 7 * dtype.size_bytes()], vec![0; dtype.scale_bytes()]);
                    dtype.store_vector(head, &mut elements, &mut scale);
                    let mut expected = [0.0; 7];
                    dtype.load_vector(&elements, &scale, &mut expected);
                    assert_eq!(read, expected, "{dtype:?}");
                }
            }
        }
    }

    #[test]
    fn heads_without_a_usable_scale_are_zero_or_nan() {
        for dtype in [KvDtype::Fp8, KvDtype::Int8] {
            let mut keys = vec![0.0; 8];
            keys[5] = 1e-42;
            let mut values = noise(3, 8);
            values[2] = f32::NAN;
            values[7] = f32::INFINITY;
            let [keys, values] = round_trip(dtype, &keys, &values);
            assert_eq!(keys, [0.0; 8], "{dtype:?}");
            assert!(values.iter().all(|x| x.is_nan()), "{dtype:?}: {values:?}");
        }
    }
}
