//! Conversions and comparisons of numbers in kernel tests.

/// `values` rounded to bf16, as bytes and as numbers.
pub fn bf16(values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let rounded: Vec<half::bf16> = values.iter().map(|&value| half::bf16::from_f32(value)).collect();
    let bytes = rounded.iter().flat_map(|value| value.to_le_bytes()).collect();
    (bytes, rounded.iter().map(|value| value.to_f32()).collect())
}

/// The bf16 numbers in `bytes`.
pub fn widened(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32()).collect()
}

/// The f32 numbers in `bytes`.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect()
}

/// The u32 numbers in `bytes`.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)).collect()
}

/// Asserts that each number is within `relative` of its expected size, or within `absolute`.
pub fn assert_close(found: &[f32], expected: &[f32], relative: f32, absolute: f32) {
    assert_eq!(found.len(), expected.len());
    for (idx, (found, expected)) in found.iter().zip(expected).enumerate() {
        let allowed = (expected.abs() * relative).max(absolute);
        // NaN fails the comparison.
        assert!((found - expected).abs() <= allowed, "{idx}: {found}, expected {expected}");
    }
}
