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

    /// A multiple of four from `least` to `most`, which are multiples, too.
    fn fours(&mut self, least: usize, most: usize) -> usize {
        least + 4 * (self.next() as usize % ((most - least) / 4 + 1))
    }

    /// The product of a case: everything that has a part of the number meets everything else.
    fn product(&mut self, case: u64) -> Product {
        let mut rest = case;
        let mut part = |num: u64| {
            let part = rest % num;
            rest /= num;
            part
        };
        let numbers = if part(2) == 0 { Numbers::Bf16 } else { Numbers::Integers };
        let rows = match part(4) {
            0 => ROWS,
            1 => 2 * ROWS,
            2 => 1 + self.next() as usize % ROWS,
            _ => ROWS + 1 + self.next() as usize % ROWS,
        };
        let depth_bytes = if part(2) == 0 { ROW_BYTES } else { self.fours(4, ROW_BYTES) };
        // Rows one after the other, or any distance apart.
        let mut strides = [ROW_BYTES, depth_bytes, ROW_BYTES];
        if part(2) == 0 {
            strides = strides.map(|least| self.fours(least, MAX_STRIDE));
        }
        let [from_zero, once] = [part(3) == 0, part(2) == 0];
        let mut memory: [Memory; 8] = [[0; ROWS * MAX_STRIDE]; 8];
        for (tile, memory) in memory.iter_mut().enumerate() {
            let few = self.next() % 5;
            for word in memory.as_chunks_mut::<4>().0 {
                *word = match (numbers, tile) {
                    (Numbers::Bf16, 0..4) => u32::from(self.bf16(few)) << 16 | self.next() as u32 & 0xffff,
                    (Numbers::Bf16, _) => u32::from(self.bf16(few)) << 16 | u32::from(self.bf16(few)),
                    (Numbers::Integers, _) => self.next() as u32,
                }
                .to_le_bytes();
            }
        }
        Product { numbers, rows, depth_bytes, strides, from_zero, once, memory }
    }
}

/// Whether two results are the same bits; every NaN is the same.
fn same(numbers: Numbers, a: u32, b: u32) -> bool {
    a == b || numbers == Numbers::Bf16 && f32::from_bits(a).is_nan() && f32::from_bits(b).is_nan()
}

/// Every shape and many kinds of numbers: random, of few exponents, subnormal, infinite and NaN.
#[test]
fn the_model_agrees_with_the_hardware_to_the_bit() {
    if !baton_cpu_threads::has_tiles() {
        eprintln!("skipped: this CPU has no tiles");
        return;
    }
    let mut bits = Bits(0x9e37_79b9_7f4a_7c15);
    for case in 0..3000 {
        let product = bits.product(case);
        let (model, hardware) = (product.compute(&mut TileModel::default()), product.compute(&mut Amx));
        let Product { numbers, rows, depth_bytes, strides, .. } = product;
        for (tile, (model, hardware)) in model.iter().zip(&hardware).enumerate() {
            for (idx, (model, hardware)) in words(model).zip(words(hardware)).enumerate() {
                assert!(
                    same(numbers, model, hardware),
                    "case {case}, {numbers:?}, {rows} rows, {depth_bytes} bytes deep, strides {strides:?}, \
                     tile {tile}, word {idx}: the model says {model:#x}, the hardware {hardware:#x}"
                );
            }
        }
    }
}
