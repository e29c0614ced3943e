//! The algorithms of a driver's products: chosen by time and kept, or one for any number of rows.

use std::fs;
use std::path::{Path, PathBuf};

use baton_cuda_emulator::fake_libraries::are_fake;
use baton_cuda_emulator::files::kernel_files;
use baton_cuda_emulator::numbers::bf16;
use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::{TestDevice, ordinal};
use baton_cuda_kernels::device::{KernelDevice, Product};
use baton_cuda_kernels::driver::DriverDevice;
use baton_cuda_kernels::kernel::KernelCode;
use baton_model_testing::noise;

const NUM_OUT: usize = 48;
const NUM_IN: usize = 520;

/// The first `num_rows` rows of the same matrix times the same weights, in f32. The product may be computed several
/// times.
fn multiply<D: KernelDevice>(device: &mut D, num_rows: usize) -> Vec<u8> {
    let mut found = vec![0xff; num_rows * NUM_OUT * 4];
    let product = Product {
        left: device.allocate_holding(&bf16(&noise(1, num_rows * NUM_IN)).0).unwrap(),
        right: device.allocate_holding(&bf16(&noise(2, NUM_OUT * NUM_IN)).0).unwrap(),
        out: device.allocate_holding(&found).unwrap(),
        num_rows: num_rows as u64,
        num_out: NUM_OUT as u64,
        num_in: NUM_IN as u64,
        left_stride: NUM_IN as u64,
        out_stride: NUM_OUT as u64,
        is_out_f32: 1,
        beta: 0.0,
    };
    // SAFETY: all were allocated with these shapes.
    unsafe {
        device.multiply(&product).unwrap();
        device.download(product.out, &mut found).unwrap();
    }
    found
}

/// Whether the rows of smaller products have the bits of the same rows of the largest one.
fn are_rows_alike<D: KernelDevice>(device: &mut D) -> bool {
    let all = multiply(device, 300);
    [1, 2, 3, 64, 65, 131, 256].iter().all(|&num_rows| all.starts_with(&multiply(device, num_rows)))
}

#[test]
fn fixed_products_have_the_same_bits_for_any_number_of_rows() {
    let mut device = TestDevice::new(&[], 8 << 20, Threads::Shuffled);
    if are_fake() {
        assert!(!are_rows_alike(&mut device), "the fake has algorithms with other bits");
    }
    device.fix_products();
    assert!(are_rows_alike(&mut device));
}

fn open(cache_dir: &Path) -> DriverDevice {
    let code = KernelCode { files: kernel_files(), cache_dir: Some(cache_dir.to_owned()), shipped: None };
    DriverDevice::open(ordinal().expect("there is a device"), &[], code).unwrap()
}

/// The file of choices.
fn kept(cache_dir: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(cache_dir).ok()?.map(|entry| entry.unwrap().path());
    files.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "txt"))
}

fn products(device: &mut DriverDevice) -> Vec<Vec<u8>> {
    [1, 4, 61, 128].map(|num_rows| multiply(device, num_rows)).into()
}

/// What the first start chooses, the next one uses.
#[test]
fn chosen_algorithms_are_kept() {
    if ordinal().is_none() {
        return println!("SKIPPED: an emulated device has no algorithms");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = open(dir.path());
    let unchosen = products(&mut first);
    assert_eq!(kept(dir.path()), None);
    first.begin_choice();
    let chosen = products(&mut first);
    first.end_choice();
    assert!(products(&mut first) == chosen, "the same algorithms after the start");
    let file = kept(dir.path()).expect("the choices are kept");
    let text = fs::read_to_string(&file).unwrap();
    if are_fake() {
        assert!(chosen != unchosen, "the fastest algorithm of the fake adds in its own order");
        // Two lines before the choices, and the hash after them. The fastest algorithm is number 3: two that seem
        // faster are refused. 61 and 64 rows would share one.
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2 + 4 + 1, "{text}");
        for (line, num_rows) in lines[2..6].iter().zip([1, 4, 64, 128]) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!((words[0], words[9]), (num_rows.to_string().as_str(), "3"), "{line}");
        }
    }

    // Later starts do not choose again, and a product of other rows uses the choice for its size.
    for _ in 0..2 {
        let mut next = open(dir.path());
        next.begin_choice();
        assert!(products(&mut next) == chosen);
        next.end_choice();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert!(chosen[3].starts_with(&multiply(&mut next, 90)) || !are_fake());
    }

    // A damaged file is ignored and replaced.
    fs::write(&file, &text[..text.len() / 2]).unwrap();
    let mut next = open(dir.path());
    if are_fake() {
        assert!(products(&mut next) == unchosen);
    }
    next.begin_choice();
    products(&mut next);
    next.end_choice();
    if are_fake() {
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}
