use baton_cpu_kernels::testing::Unpacked;
use baton_cpu_kernels::{PANEL, PanelFormat, pack_integers};
use baton_cpu_simd::tiles::tested_isas;
use baton_model_spec::{IntegerFormat, IntegerRow, IntegerWidth};
use baton_model_testing::noise;

#[test]
fn unpacked_panels_are_panels_of_bytes_with_the_same_levels() {
    for (group, has_zeros, k) in [(32, false, 256), (32, true, 96), (128, false, 301), (64, true, 7)] {
        let packed = IntegerFormat { width: IntegerWidth::Four, group, has_zeros };
        let rows: Vec<_> = (0..PANEL as u64)
            .map(|row| {
                let row = IntegerRow::quantise(&noise(row, k), IntegerFormat { has_zeros: false, ..packed });
                let zeros =
                    if has_zeros { row.scales.iter().map(|scale| scale * 3.0).collect() } else { vec![] };
                IntegerRow { zeros, ..row }
            })
            .collect();
        let mut panel = vec![0; PanelFormat::Integers(packed).panel_bytes(k)];
        pack_integers(&rows, packed, k, &mut panel);
        let unpacked = Unpacked::new(packed, k);
        let bytes = IntegerFormat { width: IntegerWidth::Eight, ..packed };
        let mut expected = vec![0; PanelFormat::Integers(bytes).panel_bytes(k)];
        pack_integers(&rows, bytes, k, &mut expected);

        for isa in tested_isas() {
            let mut both = vec![0xff; 2 * unpacked.panel_bytes];
            // SAFETY: there is room for both panels.
            unsafe { unpacked.write(isa, &[&panel[..], &panel].concat(), both.as_mut_ptr()) };
            for got in both.chunks(unpacked.panel_bytes) {
                assert!(got[..expected.len()] == expected, "{isa:?}: groups of {group}, {k} columns");
            }
        }
    }
}
