#[cfg(target_arch = "x86_64")]
mod hardware;

use super::*;

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
    let out = product(&mut TileModel::default(), &shapes, 0, &operands);
    let expected = (10.0 + 3000.0) + (200.0 + half::bf16::from_f32(10000.0).to_f32() * 4.0) + 0.5;
    let got: Vec<u32> = words(&out).collect();
    assert_eq!(f32::from_bits(got[16 + 3]), expected);
    assert!(got[..32].iter().enumerate().all(|(idx, word)| *word == 0 || idx == 16 + 3));
    assert!(got[32..].iter().all(|word| *word == 0xaaaa_aaaa), "rows beyond the shape are not stored");
}
