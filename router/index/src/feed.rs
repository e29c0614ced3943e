//! What one worker says of its cache, and how far that can be relied on.

use std::{fmt, sync::Arc};

use baton_kv_events::{BatchKind, BlockKey, CacheEvent, CacheLevel, EventBatch, MAX_TIERS};

use crate::{
    belief::{Beliefs, Reason},
    index::{IndexFull, KvIndex},
    member::Member,
};

/// How far the index knows what a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceState {
    /// Every change up to the newest batch has come.
    Exact,
    /// A change was missed, or what the worker says cannot be. It is believed to hold what it held before.
    Degraded,
    /// It says nothing. It is believed to hold the prompts that were sent to it last.
    Approximate,
}

impl SourceState {
    /// All of them.
    pub const ALL: [SourceState; 3] = [SourceState::Exact, SourceState::Degraded, SourceState::Approximate];

    /// "exact", "degraded" or "approximate".
    pub fn name(self) -> &'static str {
        match self {
            SourceState::Exact => "exact",
            SourceState::Degraded => "degraded",
            SourceState::Approximate => "approximate",
        }
    }
}

impl fmt::Display for SourceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a batch was not taken whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeedError {
    /// Events are missing. They are to be asked for from [`CacheFeed::resume_from`] on.
    #[error("events {expected} to {first} are missing")]
    Gap {
        /// The next one that is needed.
        expected: u64,
        /// The first one that came.
        first: u64,
    },
    /// Events came before a dump. A dump is to be asked for.
    #[error("events from {first} on came without what was cached before")]
    NoBeginning {
        /// The first one that came.
        first: u64,
    },
    /// A dump contained a removal. Another one is to be asked for.
    #[error("a dump contains removed blocks")]
    NoDump,
    /// The rest was taken.
    #[error("{num} blocks are more than the {max} that the worker has room for, or follow themselves")]
    Refused {
        /// Blocks that were not taken.
        num: usize,
        /// What the worker announced.
        max: usize,
    },
    /// It goes on as an approximate source.
    #[error(transparent)]
    Full(#[from] IndexFull),
}

impl FeedError {
    /// Whether the worker is to be asked again.
    pub fn wants_replay(&self) -> bool {
        match self {
            FeedError::Gap { .. } | FeedError::NoBeginning { .. } | FeedError::NoDump => true,
            FeedError::Refused { .. } | FeedError::Full(_) => false,
        }
    }
}

/// In the name of an owner: the level, above this bit.
const LEVEL_BIT: u32 = 30;
const _: () = assert!(MAX_TIERS < 1 << (u32::BITS - LEVEL_BIT));

/// The name of an owner in lookups, of what it has at a level.
fn name_at(owner: u32, level: CacheLevel) -> u32 {
    owner | u32::from(level.0) << LEVEL_BIT
}

/// Whose a name is, and the level.
pub(crate) fn owner_and_level(name: u32) -> (u32, CacheLevel) {
    (name & ((1 << LEVEL_BIT) - 1), CacheLevel((name >> LEVEL_BIT) as u8))
}

/// The source of one life of a worker. Dropping it makes the worker hold nothing, at once.
#[derive(Debug)]
pub struct CacheFeed {
    index: Arc<KvIndex>,
    owner: u32,
    room: Room,
    /// By events.
    held: Option<Holding>,
    /// The parts of a dump that have come, and the event that it is followed by.
    dump: Option<(u64, Holding)>,
    /// The next event. `None`: a dump is needed.
    next: Option<u64>,
    state: SourceState,
    /// Blocks were refused since the last dump.
    lacks_blocks: bool,
    /// What was sent to it and no event can tell yet; of a silent worker, all that is known.
    beliefs: Option<Beliefs>,
    /// Counts prompts of a silent worker, reports of another one.
    now: u64,
}

/// Blocks that a worker has room for.
#[derive(Clone, Copy, Debug)]
struct Room {
    pool: usize,
    tiers: [usize; MAX_TIERS],
}

impl Room {
    /// At a level.
    fn at(&self, level: CacheLevel) -> usize {
        let tiers = &self.tiers[..level.tier().unwrap_or(MAX_TIERS)];
        tiers.iter().fold(self.pool, |room, &num| room.saturating_add(num))
    }
}

/// What a worker holds, as it says.
#[derive(Debug)]
struct Holding {
    index: Arc<KvIndex>,
    owner: u32,
    room: Room,
    all: Member,
    /// Above each tier, if it tells that.
    above: [Option<Member>; MAX_TIERS],
}

impl Holding {
    fn join(feed: &CacheFeed) -> Result<Holding, IndexFull> {
        let CacheFeed { index, owner, room, .. } = feed;
        let all = Member::join(index, *owner, room.at(CacheLevel::ALL))?;
        Ok(Holding { index: index.clone(), owner: *owner, room: *room, all, above: Default::default() })
    }

    fn set_room(&mut self, room: Room) {
        self.room = room;
        self.all.allow(room.at(CacheLevel::ALL));
        for (tier, member) in self.above.iter_mut().enumerate() {
            member.iter_mut().for_each(|member| member.allow(room.at(CacheLevel::above(tier))));
        }
    }

    /// Returns how many blocks were refused. What is said of a level that there cannot be means nothing.
    fn take(&mut self, event: &CacheEvent) -> Result<usize, IndexFull> {
        let level = event.level();
        let member = match level.tier() {
            None if level == CacheLevel::ALL => &mut self.all,
            None => return Ok(0),
            Some(tier) => match &mut self.above[tier] {
                Some(member) => member,
                none => {
                    let name = name_at(self.owner, level);
                    none.insert(Member::join(&self.index, name, self.room.at(level))?)
                }
            },
        };
        match event {
            CacheEvent::Stored { parent, blocks, .. } => Ok(member.store(*parent, blocks)),
            CacheEvent::Removed { blocks, .. } => {
                member.remove(blocks);
                Ok(0)
            }
        }
    }
}

/// In reports, for how long a prompt that was sent is believed to be cached soon, with events that do not say so yet. A report
/// comes every second at least, and 20 times a second under load.
const UNTIL_COMPUTED: u64 = 64;
/// As long after its end.
const UNTIL_REPORTED: u64 = 2;

impl CacheFeed {
    /// Of a worker that has said nothing so far and whose pool has so many blocks. Lookups call it `owner`, which is below 2^30, and what
    /// it has at a level, if it tells that apart, `owner` + 2^30 times the level.
    pub fn new(index: Arc<KvIndex>, owner: u32, max_blocks: usize) -> CacheFeed {
        let state = SourceState::Approximate;
        CacheFeed {
            index,
            owner,
            room: Room { pool: max_blocks, tiers: [0; MAX_TIERS] },
            held: None,
            dump: None,
            next: None,
            state,
            lacks_blocks: false,
            beliefs: None,
            now: 0,
        }
    }

    /// How far the index knows what it holds.
    pub fn state(&self) -> SourceState {
        self.state
    }

    /// There is room for so many blocks in each tier below its pool.
    pub fn set_tier_blocks(&mut self, num_blocks: [usize; MAX_TIERS]) {
        self.room.tiers = num_blocks;
        for holding in self.held.iter_mut().chain(self.dump.as_mut().map(|(_, dump)| dump)) {
            holding.set_room(self.room);
        }
    }

    /// Tiers of which it tells what it holds above them. 0: all that it holds is in its pool.
    pub fn num_tiers(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.above.iter().take_while(|member| member.is_some()).count())
    }

    /// Blocks that it holds, or is believed to.
    pub fn num_blocks(&self) -> usize {
        let held = self.held.as_ref().map_or(0, |held| held.all.num_held());
        held.max(self.beliefs.as_ref().map_or(0, Beliefs::num_held))
    }

    /// The first event that is lacking. `None`: all of them; a dump is needed.
    pub fn resume_from(&self) -> Option<u64> {
        self.next
    }

    /// Takes what the worker says. After a gap nothing is taken before what is missing has come, or a dump.
    ///
    /// # Errors
    /// When something is missing or impossible; the source is degraded then.
    pub fn take(&mut self, batch: &EventBatch) -> Result<(), FeedError> {
        let result = match batch.kind {
            BatchKind::Events => self.take_events(batch),
            BatchKind::DumpPart | BatchKind::DumpEnd => self.take_dump(batch),
        };
        if let Err(error) = &result {
            if self.state == SourceState::Degraded && error.wants_replay() {
                // Asking for events did not help.
                self.next = None;
            }
            if self.held.is_some() {
                self.state = SourceState::Degraded;
            }
        }
        result
    }

    fn take_events(&mut self, batch: &EventBatch) -> Result<(), FeedError> {
        let first = batch.first;
        let expected = match self.next {
            Some(next) => next,
            None if first == 0 && self.held.is_none() => 0,
            None => return Err(FeedError::NoBeginning { first }),
        };
        if first > expected {
            return Err(FeedError::Gap { expected, first });
        }
        let num_known = usize::try_from(expected - first).unwrap_or(usize::MAX);
        let Some(new) = batch.events.get(num_known..).filter(|new| !new.is_empty()) else {
            // A replay: all of it is known, and so the gap is closed as far as it goes.
            return Ok(());
        };
        if self.held.is_none() {
            self.begin(Holding::join(self)?);
        }
        let held = self.held.as_mut().expect("it has begun");
        let mut num_refused = 0;
        for event in new {
            num_refused += held.take(event)?;
        }
        self.next = Some(batch.next());
        self.finish(num_refused)
    }

    fn take_dump(&mut self, batch: &EventBatch) -> Result<(), FeedError> {
        // A part of one that broke off has another number, unless nothing has changed since.
        let begun = self.dump.take().filter(|(first, _)| *first == batch.first);
        let mut dump = match begun {
            Some((_, dump)) => dump,
            None => Holding::join(self)?,
        };
        let mut num_refused = 0;
        for event in &batch.events {
            if let CacheEvent::Removed { .. } = event {
                return Err(FeedError::NoDump);
            }
            num_refused += dump.take(event)?;
        }
        if batch.kind == BatchKind::DumpPart {
            self.dump = Some((batch.first, dump));
            return Ok(());
        }
        self.begin(dump);
        self.lacks_blocks = false;
        self.next = Some(batch.first);
        self.finish(num_refused)
    }

    /// What it held before is gone, and so is what it was believed to hold.
    fn begin(&mut self, held: Holding) {
        if self.held.replace(held).is_none() {
            self.beliefs = None;
            self.now = 0;
        }
    }

    fn finish(&mut self, num: usize) -> Result<(), FeedError> {
        if num > 0 {
            self.lacks_blocks = true;
            return Err(FeedError::Refused { num, max: self.room.at(CacheLevel::ALL) });
        }
        self.state = if self.lacks_blocks { SourceState::Degraded } else { SourceState::Exact };
        Ok(())
    }

    /// A report has come: what was believed for so long and no event said is not believed any more.
    pub fn on_report(&mut self) {
        if self.held.is_some() {
            self.now += 1;
            if let Some(beliefs) = &mut self.beliefs {
                beliefs.expire(self.now);
                if beliefs.num_held() == 0 {
                    self.beliefs = None;
                }
            }
        }
    }

    /// A prompt is sent to it, and will be cached.
    ///
    /// # Errors
    /// When the index has no room for another worker.
    pub fn expect(&mut self, chain: impl Iterator<Item = BlockKey>) -> Result<(), IndexFull> {
        self.believe(chain, UNTIL_COMPUTED, Reason::Sent)
    }

    /// A request has ended there, and its whole sequence is cached.
    ///
    /// # Errors
    /// When the index has no room for another worker.
    pub fn finished(&mut self, chain: impl Iterator<Item = BlockKey>) -> Result<(), IndexFull> {
        self.believe(chain, UNTIL_REPORTED, Reason::Finished)
    }

    fn believe(
        &mut self,
        chain: impl Iterator<Item = BlockKey>,
        num_reports: u64,
        reason: Reason,
    ) -> Result<(), IndexFull> {
        let time = if self.held.is_some() {
            self.now + num_reports
        } else {
            self.now += 1;
            self.now
        };
        if self.beliefs.is_none() {
            // It will be computed, or recalled, into the pool.
            let level = if self.num_tiers() > 0 { CacheLevel::POOL } else { CacheLevel::ALL };
            self.beliefs = Some(Beliefs::new(&self.index, name_at(self.owner, level), self.room.pool)?);
        }
        let beliefs = self.beliefs.as_mut().expect("it was made");
        beliefs.add(chain, time, reason);
        Ok(())
    }
}
