pub(crate) mod model;

use super::*;

/// The instruction sets to test: those of this CPU, and the software model of tiles.
pub(crate) fn tested() -> Vec<Isa> {
    let mut all = Isa::available();
    #[cfg(target_arch = "x86_64")]
    if all.contains(&Isa::Avx2) {
        all.push(Isa::TileModel);
    }
    all
}

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

/// The operands of one product, and what a tile unit makes of them.
fn product<T: Tiles>(
    tiles: &mut T,
    shapes: &TileShapes,
    kind: u8,
    operands: &[[u8; TILE_BYTES]; 3],
) -> [u8; TILE_BYTES] {
    let mut out = [0xaa; TILE_BYTES];
    let [c, a, b] = operands;
    // SAFETY: the buffers are whole tiles.
    unsafe {
        tiles.configure(shapes);
        tiles.zero::<0>();
        tiles.load::<0>(c.as_ptr(), ROW_BYTES);
        tiles.load::<4>(a.as_ptr(), ROW_BYTES);
        tiles.load::<6>(b.as_ptr(), ROW_BYTES);
        match kind {
            0 => tiles.dot_bf16::<0, 4, 6>(),
            1 => tiles.dot_i8::<0, 4, 6>(),
            _ => tiles.dot_i8_u8::<0, 4, 6>(),
        }
        tiles.store::<0>(out.as_mut_ptr(), ROW_BYTES);
        tiles.release();
    }
    out
}

fn words(bytes: &[u8; TILE_BYTES]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

/// Whether two results are the same bits; every NaN is the same.
fn same(kind: u8, a: u32, b: u32) -> bool {
    a == b || kind == 0 && f32::from_bits(a).is_nan() && f32::from_bits(b).is_nan()
}

#[test]
fn the_model_computes_what_the_manual_says() {
    let shapes = TileShapes::of_product([2, 0], 8);
    let mut operands = [[0; TILE_BYTES]; 3];
    let put = |tile: &mut [u8; TILE_BYTES], row: usize, at: usize, numbers: &[f32]| {
        for (i, number) in numbers.iter().enumerate() {
            let bits = half::bf16::from_f32(*number).to_le_bytes();
            tile[row * ROW_BYTES + (at + i) * 2..][..2].copy_from_slice(&bits);
        }
    };
    put(&mut operands[1], 1, 0, &[1.0, 2.0, 3.0, 4.0]);
    put(&mut operands[2], 0, 6, &[10.0, 100.0]);
    put(&mut operands[2], 1, 6, &[1000.0, 10000.0]);
    operands[0][ROW_BYTES + 12..][..4].copy_from_slice(&0.5f32.to_le_bytes());
    let out = product(&mut TileModel::new(), &shapes, 0, &operands);
    let expected = (10.0 + 3000.0) + (200.0 + half::bf16::from_f32(10000.0).to_f32() * 4.0) + 0.5;
    let got: Vec<u32> = words(&out).collect();
    assert_eq!(f32::from_bits(got[16 + 3]), expected);
    assert!(got[..32].iter().enumerate().all(|(idx, word)| *word == 0 || idx == 16 + 3));
    assert!(got[32..].iter().all(|word| *word == 0xaaaa_aaaa), "rows beyond the shape are not stored");
}

/// Every shape and many kinds of numbers: random, of few exponents, subnormal, infinite and NaN.
#[test]
#[cfg(target_arch = "x86_64")]
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
        let model = product(&mut TileModel::new(), &shapes, kind, &operands);
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
