//! Registered memory in which pieces are put together that are not the same on both sides.

use std::{io, sync::Arc};

use baton_handoff::PieceWrite;
use baton_kv_cache::{BlockId, BlockStorage, KvLayout};

use crate::sender::{Assembly, RouteState, max_pieces};

/// Frames that may be on the wire whose pieces are put together here.
const NUM_PLACES: usize = 4;

/// Belongs to a connection, as the key does.
pub struct StagingSlots {
    /// For the device that reads it.
    pub memory: Arc<BlockStorage>,
    /// Places of a frame each that no flight uses.
    free: Vec<usize>,
    num_per_place: usize,
    assembly: Assembly,
}

impl StagingSlots {
    /// Room for pieces of this layout, in frames of so many bytes.
    pub fn new(layout: &KvLayout, frame_bytes: usize) -> io::Result<StagingSlots> {
        let num_per_place = max_pieces(frame_bytes, layout.layer_bytes());
        let num_blocks = (NUM_PLACES * num_per_place).div_ceil(layout.num_layers);
        let memory = Arc::new(BlockStorage::new(*layout, num_blocks)?);
        Ok(StagingSlots {
            memory,
            free: (0..NUM_PLACES).collect(),
            num_per_place,
            assembly: Assembly::default(),
        })
    }

    /// A place, if the route's pieces need one.
    pub fn place_for(&mut self, route: &RouteState) -> Option<usize> {
        (route.room_bytes() > 0).then(|| self.free.pop().expect("a frame is taken only while there is room"))
    }

    /// Whether there is a place for one more.
    pub fn has_place(&self) -> bool {
        !self.free.is_empty()
    }

    /// Nobody uses it any more.
    pub fn give_back(&mut self, place: Option<usize>) {
        self.free.extend(place);
    }

    /// The bytes of a frame's pieces, where a device can read them.
    ///
    /// # Errors
    /// When the device that has them fails.
    ///
    /// # Safety
    /// As of [`RouteState::bytes`], and nobody uses the place as long as the bytes.
    pub unsafe fn sources<'a>(
        &mut self,
        route: &'a RouteState,
        pieces: &[PieceWrite],
        place: Option<usize>,
    ) -> io::Result<Vec<&'a [u8]>> {
        let num_layers = self.memory.layout().num_layers;
        let sources = pieces.iter().enumerate().map(|(nth, piece)| {
            let room: &mut [u8] = match place {
                Some(place) => {
                    let nth = place * self.num_per_place + nth;
                    let block = BlockId((nth / num_layers) as u32);
                    // SAFETY: the place is the frame's alone.
                    unsafe { self.memory.layer_mut(block, nth % num_layers) }
                }
                None => &mut [],
            };
            // SAFETY: by the caller's word.
            let bytes = unsafe { route.bytes(piece, room, &mut self.assembly) }?;
            // SAFETY: own blocks are kept by the route, and the place by the caller's word.
            Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) })
        });
        sources.collect()
    }
}
