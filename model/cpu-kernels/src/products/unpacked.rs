//! Panels of nibbles as panels of bytes, for products of many rows.
//!
//! A tile of rows that reads nibbles separates them with the units that multiply. If many tiles read the same panels,
//! their nibbles are separated once, into memory that stays in the second-level cache. Levels and scales are the same,
//! and so are the results.

use super::levels;
use super::panels::{
    GROUP_SCALE_BYTES, LINE_BYTES, PanelFormat, ROW_SCALE_BYTES, group_head_bytes, per_line,
};
use baton_cpu_simd::{Isa, Simd, kernel};
use baton_model_spec::{IntegerFormat, IntegerWidth};

/// Unpacking takes about as long as a tile of rows, and saves a tenth of each tile.
const MIN_TILES: usize = 16;

/// The panels of a product, unpacked.
#[derive(Clone, Copy)]
pub struct Unpacked {
    packed: IntegerFormat,
    k: usize,
    /// The format for kernels.
    pub(super) format: IntegerFormat,
    /// Bytes of a panel. Each line of nibbles becomes two, also where the second has no numbers.
    pub panel_bytes: usize,
}

impl Unpacked {
    /// For products of so many tiles of rows with such panels of `k` columns, if unpacking makes them faster.
    pub(super) fn if_faster(isa: Isa, packed: IntegerFormat, k: usize, num_tiles: usize) -> Option<Unpacked> {
        let is_faster =
            packed.width == IntegerWidth::Four && num_tiles >= MIN_TILES && levels::reads_bytes_faster(isa);
        is_faster.then(|| Unpacked::new(packed, k))
    }

    /// Panels of `k` columns in that format, which is one of nibbles.
    pub fn new(packed: IntegerFormat, k: usize) -> Unpacked {
        let format = IntegerFormat { width: IntegerWidth::Eight, ..packed };
        let columns = k.next_multiple_of(per_line(packed.width));
        let panel_bytes = PanelFormat::Integers(format).panel_bytes(columns);
        Unpacked { packed, k, format, panel_bytes }
    }

    /// Unpacks panels.
    ///
    /// # Safety
    /// The CPU has `isa`, and `to` has room for them.
    pub unsafe fn write(&self, isa: Isa, panels: &[u8], to: *mut u8) {
        let packed_bytes = PanelFormat::Integers(self.packed).panel_bytes(self.k);
        for (idx, panel) in panels.chunks_exact(packed_bytes).enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { unpack(isa, panel.as_ptr(), self.k, self.packed, to.add(idx * self.panel_bytes)) };
        }
    }
}

kernel! {
    /// Unpacks a panel of nibbles.
    ///
    /// # Safety
    /// `from` is a panel of `k` columns in that format, and `to` has room for it unpacked.
    fn unpack / unpack_groups (from: *const u8, k: usize, format: IntegerFormat, to: *mut u8)
}

#[inline(always)]
#[allow(clippy::extra_unused_type_parameters)] // `kernel` gives it
unsafe fn unpack_groups<S: Simd>(mut from: *const u8, k: usize, format: IntegerFormat, mut to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        copy::<ROW_SCALE_BYTES>(&mut from, &mut to);
        let mut left = k;
        while left > 0 {
            let len = if left < format.group { left } else { format.group };
            left -= len;
            for _ in 0..group_head_bytes(format) / GROUP_SCALE_BYTES {
                copy::<GROUP_SCALE_BYTES>(&mut from, &mut to);
            }
            for _ in 0..len.div_ceil(per_line(IntegerWidth::Four)) {
                let line = from.cast::<[u8; LINE_BYTES]>().read();
                let mut halves = [[0u8; LINE_BYTES]; 2];
                for i in 0..LINE_BYTES {
                    halves[0][i] = line[i] & 15;
                    halves[1][i] = line[i] >> 4;
                }
                to.cast::<[[u8; LINE_BYTES]; 2]>().write(halves);
                from = from.add(LINE_BYTES);
                to = to.add(2 * LINE_BYTES);
            }
        }
    }
}

#[inline(always)]
unsafe fn copy<const BYTES: usize>(from: &mut *const u8, to: &mut *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(*from, *to, BYTES);
        *from = from.add(BYTES);
        *to = to.add(BYTES);
    }
}
