//! Compares the software model with the hardware.

use super::*;

/// Random bits: xorshift.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A bf16: of any bits, or near one, or of one of few exponents, so that sums cancel or leave subnormal numbers.
    fn bf16(&mut self, kind: u64) -> u16 {
        let bits = self.next();
        let mantissa = (bits & 0x807f) as u16;
        match kind {
            0 => bits as u16,
            1 => mantissa | (120 + (bits >> 20 & 7) as u16) << 7,
            2 => mantissa | (60 + (bits >> 20 & 7) as u16) << 7,
            _ => mantissa | (127 + (bits >> 20 & 1) as u16) << 7,
        }
    }
}

/// Whether two results are the same bits; every NaN is the same.
fn same(kind: u8, a: u32, b: u32) -> bool {
    a == b || kind == 0 && f32::from_bits(a).is_nan() && f32::from_bits(b).is_nan()
}

/// Every shape and many kinds of numbers: random, of few exponents, subnormal, infinite and NaN.
#[test]
fn the_model_agrees_with_the_hardware_to_the_bit() {
    if !baton_cpu_threads::has_tiles() {
        eprintln!("skipped: this CPU has no tiles");
        return;
    }
    let mut bits = Bits(0x9e37_79b9_7f4a_7c15);
    for case in 0..3000u64 {
        let rows = if case % 3 == 0 { ROWS } else { 1 + (bits.next() % 16) as usize };
        let depth = if case % 2 == 0 { ROW_BYTES } else { 4 * (1 + bits.next() as usize % 16) };
        let shapes = TileShapes::of_product([rows, 0], depth);
        let kind = (case % 3) as u8;
        let mut operands = [[0; TILE_BYTES]; 3];
        for (idx, operand) in operands.iter_mut().enumerate() {
            let few = bits.next() % 5;
            for word in operand.as_chunks_mut::<4>().0 {
                *word = match (kind, idx) {
                    (0, 0) => u32::from(bits.bf16(few)) << 16 | bits.next() as u32 & 0xffff,
                    (0, _) => u32::from(bits.bf16(few)) << 16 | u32::from(bits.bf16(few)),
                    _ => bits.next() as u32,
                }
                .to_le_bytes();
            }
        }
        let model = product(&mut TileModel::default(), &shapes, kind, &operands);
        let hardware = product(&mut Amx, &shapes, kind, &operands);
        for (idx, (model, hardware)) in words(&model).zip(words(&hardware)).enumerate() {
            assert!(
                same(kind, model, hardware),
                "case {case}, kind {kind}, {rows} rows, depth {depth}, element {idx}: \
                 the model says {model:#x}, the hardware {hardware:#x}"
            );
        }
    }
}
