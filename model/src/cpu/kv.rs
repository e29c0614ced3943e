//! Keys and values in their blocks: how a row's are rounded and written, and where positions lie.
//!
//! Types of eight bits have a scale for each head and token: an element is its code times the scale. The scale is
//! the smallest bf16 that keeps the largest element in range, so it depends on that head and token alone.
//!
//! It does not know what attention does with them.

use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};

use super::e4m3;
use super::simd::{Bf16, E4m3, F16, F32, I8, Stored};

/// K or V of one kv head of one sequence, in one layer.
#[derive(Clone, Copy)]
pub(super) struct HeadKv<'a> {
    storage: &'a BlockStorage,
    layer_idx: usize,
    blocks: &'a [BlockId],
    /// Of the head in a piece.
    offset: usize,
}

impl<'a> HeadKv<'a> {
    /// Its keys, and its values.
    pub(super) fn both(
        storage: &'a BlockStorage,
        layer_idx: usize,
        blocks: &'a [BlockId],
        kv_head: usize,
    ) -> [HeadKv<'a>; 2] {
        let layout = storage.layout();
        [0, layout.half_bytes()].map(|half| {
            let offset = half + layout.head_offset(kv_head);
            HeadKv { storage, layer_idx, blocks, offset }
        })
    }

    pub(super) fn layout(&self) -> &'a KvLayout {
        self.storage.layout()
    }

    /// Where a position lies, and how many positions follow each other from there, of at most `len`.
    #[inline(always)]
    pub(super) fn run(&self, position: usize, len: usize) -> (*const u8, usize) {
        let layout = self.layout();
        let (head, slot) = self.place(position);
        // SAFETY: the slot's elements lie in the head.
        (unsafe { head.add(layout.token_offset(slot)) }, (layout.block_size - slot).min(len))
    }

    /// Copies the scales of `len` positions from `first`, where the type has scales.
    ///
    /// # Safety
    /// `to` is valid for `len`; nobody writes these positions meanwhile.
    #[inline(always)]
    pub(super) unsafe fn scales(&self, first: usize, len: usize, to: *mut f32) {
        let layout = self.layout();
        let mut done = 0;
        while done < len {
            let (head, slot) = self.place(first + done);
            let run = (layout.block_size - slot).min(len - done);
            for idx in 0..run {
                // SAFETY: the slots' scales lie in the head; `done + idx` is below `len`.
                unsafe {
                    let from = head.add(layout.scale_offset(slot) + idx * layout.dtype.scale_bytes());
                    *to.add(done + idx) = Bf16::load_one(from);
                }
            }
            done += run;
        }
    }

    /// The head in the block of a position, and the position's slot there.
    #[inline(always)]
    fn place(&self, position: usize) -> (*const u8, usize) {
        let block_size = self.layout().block_size;
        let piece = self.storage.layer_ptr(self.blocks[position / block_size], self.layer_idx);
        // SAFETY: the head lies in the piece.
        (unsafe { piece.as_ptr().add(self.offset) }, position % block_size)
    }
}

/// Rounds a row's keys and values to the type of KV and writes them to their place.
///
/// # Safety
/// Nobody else reads or writes that place of the layer.
///
/// # Panics
/// When a row has not the layout's number of heads.
pub(super) unsafe fn store_rows(
    storage: &BlockStorage,
    layer_idx: usize,
    blocks: &[BlockId],
    position: usize,
    keys: &[f32],
    values: &[f32],
) {
    let layout = storage.layout();
    let (block_idx, slot) = (position / layout.block_size, position % layout.block_size);
    let piece = storage.layer_ptr(blocks[block_idx], layer_idx).as_ptr();
    for (half, row) in [keys, values].into_iter().enumerate() {
        assert_eq!(row.len(), layout.num_kv_heads * layout.head_dim);
        for (head_idx, vector) in row.chunks_exact(layout.head_dim).enumerate() {
            // SAFETY: head and slot lie in the piece; the caller vouches for the place.
            unsafe {
                let head = piece.add(half * layout.half_bytes() + layout.head_offset(head_idx));
                let to = head.add(layout.token_offset(slot));
                let scale = head.add(layout.scale_offset(slot));
                match layout.dtype {
                    KvDtype::F32 => store_vector::<F32>(vector, to),
                    KvDtype::F16 => store_vector::<F16>(vector, to),
                    KvDtype::Bf16 => store_vector::<Bf16>(vector, to),
                    KvDtype::Fp8 => store_scaled::<E4m3>(vector, e4m3::MAX, to, scale),
                    KvDtype::Int8 => store_scaled::<I8>(vector, 127.0, to, scale),
                }
            }
        }
    }
}

/// # Safety
/// `to` is valid for the elements.
unsafe fn store_vector<T: Stored>(vector: &[f32], to: *mut u8) {
    for (i, &x) in vector.iter().enumerate() {
        // SAFETY: passed on to the caller.
        unsafe { T::store_one(to.add(i * T::SIZE), x) };
    }
}

/// # Safety
/// `to` is valid for the elements, `scale` for one bf16.
unsafe fn store_scaled<T: Stored>(vector: &[f32], largest_code: f32, to: *mut u8, scale: *mut u8) {
    let rounded = scale_of(vector, largest_code);
    let inverse = 1.0 / rounded;
    // SAFETY: passed on to the caller.
    unsafe {
        Bf16::store_one(scale, rounded);
        for (i, &x) in vector.iter().enumerate() {
            T::store_one(to.add(i * T::SIZE), x * inverse);
        }
    }
}

/// The smallest bf16 by which `vector` can be divided to lie within `largest_code`; NaN when a number is not finite,
/// so that all of the vector reads back as NaN, whatever its codes are.
fn scale_of(vector: &[f32], largest_code: f32) -> f32 {
    if vector.iter().any(|x| !x.is_finite()) {
        return f32::NAN;
    }
    let largest = vector.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    // Small enough scales have no inverse; then all codes are zero.
    let scale = (largest / largest_code).max(f32::MIN_POSITIVE);
    f32::from_bits((scale.to_bits() + 0xffff) & 0xffff_0000)
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// What a position's elements stand for, read one by one.
    ///
    /// # Safety
    /// Nobody writes the position meanwhile.
    pub(in crate::cpu) unsafe fn read_vector(kv: &HeadKv<'_>, position: usize) -> Vec<f32> {
        let KvLayout { dtype, head_dim, .. } = *kv.layout();
        let (at, _) = kv.run(position, 1);
        // SAFETY: all lies in the position's place.
        unsafe {
            let mut scale = 1.0;
            if dtype.scale_bytes() > 0 {
                kv.scales(position, 1, &mut scale);
            }
            let code = |i: usize| {
                let at = at.add(i * dtype.size_bytes());
                match dtype {
                    KvDtype::F32 => F32::load_one(at),
                    KvDtype::F16 => F16::load_one(at),
                    KvDtype::Bf16 => Bf16::load_one(at),
                    KvDtype::Fp8 => E4m3::load_one(at),
                    KvDtype::Int8 => I8::load_one(at),
                }
            };
            (0..head_dim).map(|i| code(i) * scale).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::read_vector;
    use super::*;
    use crate::cpu::testing::noise;

    /// Stores one token's KV in a block and reads it back.
    fn round_trip(dtype: KvDtype, keys: &[f32], values: &[f32]) -> [Vec<f32>; 2] {
        let layout =
            KvLayout { block_size: 5, num_layers: 2, num_kv_heads: 2, head_dim: keys.len() / 2, dtype };
        let storage = BlockStorage::new(layout, 3).unwrap();
        let blocks = [BlockId(2), BlockId(0)];
        let position = 8;
        // SAFETY: the test is the only user.
        unsafe { store_rows(&storage, 1, &blocks, position, keys, values) };
        let mut read = [Vec::new(), Vec::new()];
        for kv_head in 0..2 {
            for (half, kv) in HeadKv::both(&storage, 1, &blocks, kv_head).into_iter().enumerate() {
                assert_eq!(kv.run(position, 10).1, 2, "to the end of the block");
                // SAFETY: nobody writes.
                read[half].extend(unsafe { read_vector(&kv, position) });
            }
        }
        read
    }

    #[test]
    fn what_is_stored_reads_back_within_half_a_step() {
        for dtype in KvDtype::ALL {
            for magnitude in [1e-30, 1e-3, 1.0, 300.0, 6e4] {
                if dtype == KvDtype::F16 && magnitude < 1e-3 {
                    continue;
                }
                let vectors = [1, 2].map(|seed| noise(seed, 14).iter().map(|x| x * magnitude).collect());
                let [keys, values]: &[Vec<f32>; 2] = &vectors;
                let read = round_trip(dtype, keys, values);
                for (read, vector) in read.iter().zip(&vectors) {
                    for (read, head) in read.chunks(7).zip(vector.chunks(7)) {
                        let largest = head.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                        for (&read, &x) in read.iter().zip(head) {
                            let step = match dtype {
                                KvDtype::F32 => 0.0,
                                KvDtype::F16 => (x.abs() / 1024.0).max(2f32.powi(-24)),
                                KvDtype::Bf16 => x.abs() / 128.0,
                                // Scales are up to 1/128 too large; denormals have steps of 1/512.
                                KvDtype::Fp8 => (x.abs() / 8.0).max(largest / 448.0 / 512.0 * 1.01),
                                KvDtype::Int8 => largest / 127.0 * 1.01,
                            };
                            assert!((read - x).abs() <= step / 2.0, "{dtype:?}: {read} for {x} of {largest}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn heads_without_a_scale_are_zero_or_nan() {
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
