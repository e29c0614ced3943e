//! Registered memory for assembling pieces that are not the same bytes on both sides.

use std::{io, sync::Arc};

use baton_handoff::PieceWrite;
use baton_kv_cache::{BlockId, BlockStorage, KvLayout};

use crate::sender::{Assembly, RouteState, max_pieces};

/// The most frames on the wire whose pieces are assembled here.
const NUM_PLACES: usize = 4;

/// The assembly memory of one connection, in slots of one frame each.
pub struct StagingSlots {
    /// The memory, which the network device or the GPU reads.
    pub memory: Arc<BlockStorage>,
    /// The slots that no flight uses.
    free: Vec<usize>,
    num_per_place: usize,
    assembly: Assembly,
}

impl StagingSlots {
    /// Memory for pieces of this layout, in frames of `frame_bytes`.
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

    /// Takes a slot for a frame, if the route's pieces need one.
    pub fn place_for(&mut self, route: &RouteState) -> Option<usize> {
        (route.room_bytes() > 0).then(|| self.free.pop().expect("a frame is taken only while there is room"))
    }

    /// Whether a slot is free for one more frame.
    pub fn has_place(&self) -> bool {
        !self.free.is_empty()
    }

    /// Gives a slot back that no flight uses any more.
    pub fn give_back(&mut self, place: Option<usize>) {
        self.free.extend(place);
    }

    /// The bytes of a frame's pieces, in memory that a device can read.
    ///
    /// # Errors
    /// When the device that has them fails.
    ///
    /// # Safety
    /// As of [`RouteState::bytes`]. Only this frame uses the slot while the bytes are used.
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
