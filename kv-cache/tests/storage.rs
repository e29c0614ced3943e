//! The memory of a pool, in the host and on a device.

mod support;

use std::io;

use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use support::FakeDevice;

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };

#[test]
fn a_peer_that_maps_the_descriptor_sees_the_bytes() {
    let ours = BlockStorage::new(LAYOUT, 3).unwrap();
    let fd = ours.fd().try_clone_to_owned().unwrap();
    let theirs = BlockStorage::from_fd(fd, LAYOUT, 3).unwrap();
    // SAFETY: this test is the only user of both mappings.
    unsafe {
        theirs.layer_mut(BlockId(2), 1).fill(7);
        assert!(ours.layer(BlockId(2), 1).iter().all(|&byte| byte == 7));
        assert!(ours.layer(BlockId(2), 0).iter().all(|&byte| byte == 0));
        assert!(ours.layer(BlockId(1), 1).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn populated_memory_keeps_its_content() {
    // Several huge pages, and a remainder.
    let layout = KvLayout { num_kv_heads: 64, head_dim: 128, num_layers: 15, ..LAYOUT };
    let storage = BlockStorage::new(layout, 3).unwrap();
    let size = storage.size_bytes();
    assert!(size > 2 * HUGE_PAGE && !size.is_multiple_of(HUGE_PAGE));
    // SAFETY: this test is the only user of the mapping.
    unsafe { storage.layer_mut(BlockId(1), 0).fill(7) };
    match storage.populate_all() {
        Ok(()) => assert_eq!(resident_pages(&storage), size.div_ceil(4096)),
        // A kernel before 5.14.
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput),
    }
    // SAFETY: as above.
    unsafe {
        assert!(storage.layer(BlockId(1), 0).iter().all(|&byte| byte == 7));
        assert!(storage.layer(BlockId(1), 1).iter().all(|&byte| byte == 0));
        assert!(storage.layer(BlockId(2), 0).iter().all(|&byte| byte == 0));
    }
}

/// Pages of 4 KiB that are in memory.
fn resident_pages(storage: &BlockStorage) -> usize {
    let mut pages = vec![0u8; storage.size_bytes().div_ceil(4096)];
    // SAFETY: the range is mapped, and there is a byte for each page.
    let result = unsafe {
        libc::mincore(storage.address() as *mut libc::c_void, storage.size_bytes(), pages.as_mut_ptr())
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    pages.iter().filter(|page| **page & 1 != 0).count()
}

#[test]
fn memory_of_another_size_is_refused() {
    let ours = BlockStorage::new(LAYOUT, 3).unwrap();
    let fd = ours.fd().try_clone_to_owned().unwrap();
    let error = BlockStorage::from_fd(fd, LAYOUT, 4).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn an_ordinary_file_is_refused() {
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(BlockStorage::from_fd(file.into(), LAYOUT, 3).is_err());
}

#[test]
fn pieces_on_a_device_are_copied_and_have_no_pointer() {
    let size_bytes = BlockStorage::bytes_of(&LAYOUT, 3).unwrap();
    let memory = Box::new(FakeDevice::new(3, size_bytes));
    let storage = BlockStorage::on_device(memory, LAYOUT, 3);
    let device = storage.device().unwrap();
    assert_eq!(device.device(), 3);
    let offset = storage.layer_offset(BlockId(2), 1);
    assert_eq!(offset + LAYOUT.layer_bytes(), size_bytes, "the last piece");
    let mut room = vec![1; LAYOUT.layer_bytes()];
    // SAFETY: this test is the only user of the memory.
    unsafe {
        device.write(offset, &vec![7; LAYOUT.layer_bytes()]).unwrap();
        storage.load_all(&[(BlockId(2), 1)], &mut room).unwrap();
        assert!(room.iter().all(|&byte| byte == 7));
        storage.load_all(&[(BlockId(1), 1)], &mut room).unwrap();
        assert!(room.iter().all(|&byte| byte == 0));
    }
    let pointed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| storage.layer_ptr(BlockId(0), 0)));
    assert!(pointed.is_err());
}

#[test]
#[should_panic(expected = "no piece b3/0")]
fn a_block_that_does_not_exist_has_no_address() {
    BlockStorage::new(LAYOUT, 3).unwrap().layer_ptr(BlockId(3), 0);
}
