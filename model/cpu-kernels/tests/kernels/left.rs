use baton_cpu_kernels::bf16_bits;
use baton_cpu_kernels::testing::tiles_of_rows;

#[test]
fn tiles_hold_all_rows_with_little_padding() {
    for max_rows in [2, 6, 14] {
        for num_rows in 1..200 {
            let (tiles, total) = tiles_of_rows(num_rows, max_rows);
            assert!(total >= num_rows && total < num_rows + 2, "{num_rows} rows in {total}");
            for tile in tiles {
                let rows = tile.len();
                assert!(
                    rows <= max_rows && (rows == 1 || rows.is_multiple_of(2)),
                    "{num_rows}: a tile of {rows}"
                );
                assert!(tile.start < num_rows, "an empty tile");
            }
        }
    }
}

#[test]
fn bf16_rounds_to_nearest_even() {
    for (value, expected) in [
        (1.0f32, 0x3f80),
        (f32::from_bits(0x3f80_8000), 0x3f80),
        (f32::from_bits(0x3f81_8000), 0x3f82),
        (f32::from_bits(0x3f80_8001), 0x3f81),
        (f32::MAX, 0x7f80),
        (f32::INFINITY, 0x7f80),
        (f32::NEG_INFINITY, 0xff80),
        (-0.0, 0x8000),
    ] {
        assert_eq!(bf16_bits(value), expected, "{value}");
        assert_eq!(half::bf16::from_f32(value).to_bits(), expected);
    }
    assert!(half::bf16::from_bits(bf16_bits(f32::NAN)).is_nan());
}
