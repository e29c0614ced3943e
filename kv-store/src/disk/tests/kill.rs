//! Real processes that are killed while they write.

use std::{env, path::Path, sync::Arc, thread, time::Duration};

use baton_random::Random;

use crate::{
    disk::DiskSlots,
    slots::Slots,
    testing::{body, record, run_again, shape},
};

const DIR: &str = "BATON_TEST_KILLED_WRITER";
const ROOM: u64 = 256 << 10;

/// Not a test of its own: the process that [`kill`] kills.
#[test]
#[ignore = "the child of another test"]
fn killed_writer() {
    let Ok(dir) = env::var(DIR) else { return };
    let slots = DiskSlots::open(Path::new(&dir), ROOM, shape()).expect("the last writer is dead");
    let records: Vec<_> = (0..32).map(|idx| Arc::new(record(idx % 4, idx as u64 / 4))).collect();
    let mut random = Random::new(u64::from(std::process::id()));
    loop {
        let slot = random.below(u64::from(slots.num_slots())) as u32;
        slots.write(slot, &records[random.below(32) as usize]).expect("there is room");
    }
}

fn kill(num_kills: u64) -> usize {
    let dir = tempfile::tempdir().expect("a directory");
    let mut random = Random::new(1);
    let mut num_right = 0;
    for nth in 0..num_kills {
        let mut child = run_again("disk::tests::kill::killed_writer", DIR, dir.path());
        thread::sleep(Duration::from_micros(20_000 + random.below(30_000)));
        child.kill().expect("it writes until it is killed");
        child.wait().expect("it is killed");
        let mut slots = DiskSlots::open(dir.path(), ROOM, shape()).expect("the lock went with the process");
        assert_eq!(slots.num_damaged(), 0, "kill {nth}: the kernel completes what it was given");
        for (slot, name, _) in slots.take_found() {
            // A head is written after its body, so a slot that has one is whole.
            let read = slots.read(&[(slot, name.hash)]).pop().expect("one is wanted").expect("whole");
            assert!(read.body() == body(name.hash), "kill {nth}: wrong KV");
            num_right += 1;
        }
    }
    num_right
}

#[test]
fn a_killed_process_leaves_whole_records() {
    // A slow machine may kill some before they write, not all.
    assert!(kill(20) > 0);
}

#[test]
#[ignore = "a minute; by hand"]
fn a_thousand_killed_processes_leave_whole_records() {
    println!("{} records were read after 1000 kills", kill(1000));
}
