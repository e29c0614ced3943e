#[cfg(target_arch = "x86_64")]
mod hardware;

use super::*;

/// The largest distance of a tile's rows in memory, in bytes.
const MAX_STRIDE: usize = 3 * ROW_BYTES;

/// The memory of a tile.
type Memory = [u8; ROWS * MAX_STRIDE];

/// The numbers of rows and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    Bf16,
    /// Signed rows, unsigned weights.
    Integers,
}

/// A product of one or two tiles of rows with two tiles of weights.
struct Product {
    numbers: Numbers,
    rows: usize,
    depth_bytes: usize,
    /// Bytes from row to row of sums, of rows and of weights.
    strides: [usize; 3],
    /// Whether sums start at zero, not at those in memory.
    from_zero: bool,
    /// Whether rows are [loaded once](Tiles::load_once).
    once: bool,
    /// By tile: four of sums, two of rows, two of weights.
    memory: [Memory; 8],
}

impl Product {
    /// Computes it with a tile unit. Returns the memory to which the four tiles of sums are stored.
    fn compute<T: Tiles>(&self, tiles: &mut T) -> [Memory; 4] {
        let mut out: [Memory; 4] = [[0xaa; ROWS * MAX_STRIDE]; 4];
        let [sums, rows, weights] = self.strides;
        // SAFETY: all memory has room for whole tiles; those of no rows are not used.
        unsafe {
            tiles.configure(&TileShapes::of_product(split(self.rows), self.depth_bytes));
            tiles.load::<6>(self.memory[6].as_ptr(), weights);
            tiles.load::<7>(self.memory[7].as_ptr(), weights);
            if self.from_zero {
                tiles.zero::<0>();
                tiles.zero::<1>();
            } else {
                tiles.load::<0>(self.memory[0].as_ptr(), sums);
                tiles.load::<1>(self.memory[1].as_ptr(), sums);
            }
            if self.once {
                tiles.load_once::<4>(self.memory[4].as_ptr(), rows);
            } else {
                tiles.load::<4>(self.memory[4].as_ptr(), rows);
            }
            match self.numbers {
                Numbers::Bf16 => {
                    tiles.dot_bf16::<0, 4, 6>();
                    tiles.dot_bf16::<1, 4, 7>();
                }
                Numbers::Integers => {
                    tiles.dot_i8_u8::<0, 4, 6>();
                    tiles.dot_i8_u8::<1, 4, 7>();
                }
            }
            tiles.store::<0>(out[0].as_mut_ptr(), sums);
            tiles.store::<1>(out[1].as_mut_ptr(), sums);
            if self.rows > ROWS {
                if self.from_zero {
                    tiles.zero::<2>();
                    tiles.zero::<3>();
                } else {
                    tiles.load::<2>(self.memory[2].as_ptr(), sums);
                    tiles.load::<3>(self.memory[3].as_ptr(), sums);
                }
                if self.once {
                    tiles.load_once::<5>(self.memory[5].as_ptr(), rows);
                } else {
                    tiles.load::<5>(self.memory[5].as_ptr(), rows);
                }
                match self.numbers {
                    Numbers::Bf16 => {
                        tiles.dot_bf16::<2, 5, 6>();
                        tiles.dot_bf16::<3, 5, 7>();
                    }
                    Numbers::Integers => {
                        tiles.dot_i8_u8::<2, 5, 6>();
                        tiles.dot_i8_u8::<3, 5, 7>();
                    }
                }
                tiles.store::<2>(out[2].as_mut_ptr(), sums);
                tiles.store::<3>(out[3].as_mut_ptr(), sums);
            }
            tiles.release();
        }
        out
    }
}

fn words(memory: &Memory) -> impl Iterator<Item = u32> {
    memory.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

/// What the model makes of the sum of row 1 and column 3, and the first two words of both. All other numbers are zero.
fn of_two_words(numbers: Numbers, sum: [u8; 4], row: [[u8; 4]; 2], column: [[u8; 4]; 2]) -> u32 {
    let mut memory: [Memory; 8] = [[0; ROWS * MAX_STRIDE]; 8];
    memory[0][ROW_BYTES + 12..][..4].copy_from_slice(&sum);
    memory[4][ROW_BYTES..][..8].copy_from_slice(row.as_flattened());
    for (k, word) in column.iter().enumerate() {
        memory[6][k * ROW_BYTES + 12..][..4].copy_from_slice(word);
    }
    let strides = [ROW_BYTES; 3];
    let product =
        Product { numbers, rows: 2, depth_bytes: 8, strides, from_zero: false, once: false, memory };
    let out = product.compute(&mut TileModel::default());
    let got: Vec<u32> = words(&out[0]).collect();
    assert!(got[..32].iter().enumerate().all(|(idx, word)| *word == 0 || idx == 16 + 3));
    assert!(got[32..].iter().all(|word| *word == 0xaaaa_aaaa), "rows beyond the shape are not stored");
    got[16 + 3]
}

#[test]
fn the_model_computes_what_the_manual_says() {
    let pair = |numbers: [f32; 2]| {
        let [[a, b], [c, d]] = numbers.map(|number| half::bf16::from_f32(number).to_le_bytes());
        [a, b, c, d]
    };
    let row = [pair([1.0, 2.0]), pair([3.0, 4.0])];
    let column = [pair([10.0, 100.0]), pair([1000.0, 10000.0])];
    let expected = (10.0 + 3000.0) + (200.0 + half::bf16::from_f32(10000.0).to_f32() * 4.0) + 0.5;
    let got = of_two_words(Numbers::Bf16, 0.5f32.to_le_bytes(), row, column);
    assert_eq!(f32::from_bits(got), expected);

    let row = [[-2, 3, -128, 127], [5, 0, 0, 6]].map(|word: [i8; 4]| word.map(|level| level as u8));
    let column = [[255, 4, 255, 2], [10, 20, 30, 200]];
    let expected = 1000 + (-2 * 255 + 3 * 4 - 128 * 255 + 127 * 2) + (5 * 10 + 6 * 200);
    let got = of_two_words(Numbers::Integers, 1000i32.to_le_bytes(), row, column);
    assert_eq!(got as i32, expected);
    // Sums that are too large wrap.
    let got = of_two_words(Numbers::Integers, i32::MAX.to_le_bytes(), [[1, 0, 0, 0], [0; 4]], [[1; 4]; 2]);
    assert_eq!(got as i32, i32::MIN);
}
