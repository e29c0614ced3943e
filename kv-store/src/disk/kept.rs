//! How the blocks on disk are to be kept, for the next life of the store: a word for each slot.
//!
//! Nothing proves a word. A wrong one costs the order in which blocks make room, and nothing else.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use baton_kv_events::Keep;

/// Nothing was said.
const NORMAL: u64 = 0;
const LOW: u64 = u64::MAX;
/// No request may ask for more. A clock that went back keeps no block for longer.
const MAX_TTL: Duration = Duration::from_hours(24);

/// The words of all slots. Other words than those two are seconds since 1970: until then the block is high.
#[derive(Debug)]
pub(super) struct KeptFile(pub(super) File);

impl KeptFile {
    pub(super) fn write(&self, slot: u32, keep: Keep, now: SystemTime) -> io::Result<()> {
        self.0.write_all_at(&word(keep, now).to_le_bytes(), u64::from(slot) * 8)
    }

    /// Of each slot.
    pub(super) fn read(&self, num_slots: u32, now: SystemTime) -> io::Result<Vec<Keep>> {
        let mut bytes = vec![0; num_slots as usize * 8];
        self.0.read_exact_at(&mut bytes, 0)?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Ok(words.map(|word| keep(word, now)).collect())
    }
}

fn seconds(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

pub(crate) fn word(keep: Keep, now: SystemTime) -> u64 {
    match keep {
        Keep::Normal => NORMAL,
        Keep::Low => LOW,
        // A part of a second counts as a whole one.
        Keep::High(ttl) => seconds(now) + ttl.as_secs() + 1,
    }
}

pub(crate) fn keep(word: u64, now: SystemTime) -> Keep {
    match word {
        NORMAL => Keep::Normal,
        LOW => Keep::Low,
        until => match Duration::from_secs(until.saturating_sub(seconds(now))) {
            Duration::ZERO => Keep::Normal,
            left => Keep::High(left.min(MAX_TTL)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_what_was_said_also_when_the_clock_jumps() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(5 * 8).expect("room");
        let kept = KeptFile(file);
        let at = |secs| UNIX_EPOCH + Duration::from_secs(secs);
        let high = |secs| Keep::High(Duration::from_secs(secs));
        for (slot, keep) in [(1, Keep::Low), (2, high(300)), (3, high(3600)), (4, high(60))] {
            kept.write(slot, keep, at(1_000_000)).expect("written");
        }
        kept.write(4, Keep::Normal, at(1_000_000)).expect("written");
        let read = |now| kept.read(5, at(now)).expect("read");
        assert_eq!(read(1_000_100), [Keep::Normal, Keep::Low, high(201), high(3501), Keep::Normal]);
        assert_eq!(read(1_000_301), [Keep::Normal, Keep::Low, Keep::Normal, high(3300), Keep::Normal]);
        assert_eq!(read(9_000_000)[2..4], [Keep::Normal, Keep::Normal]);
        assert_eq!(read(1)[2..4], [Keep::High(MAX_TTL); 2]);
    }
}
