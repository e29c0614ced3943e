//! Blending: the KV of passages of text that were computed on their own becomes the KV of a prompt that contains them.
//!
//! CacheBlend (Yao et al., EuroSys 2025, arXiv:2405.16444). A passage's keys and values depend on the text before it from
//! layer 1 on. Most tokens hardly change; a few do. So the first layer is computed for all tokens, which gives the true
//! keys and values of layers 0 and 1. The tokens whose keys of layer 1 deviate most from the passage's own are
//! [selected](select) and computed in the remaining layers, too. The other tokens keep the KV of their passage.
//!
//! ```text
//! tokens    | text | passage 1 | text | passage 2 |          every token of a blended prompt
//! layer 0   |xxxxxx|xxxxxxxxxxx|xxxxxx|xxxxxxxxxxx|          computed
//! layer 1   |xxxxxx|xxxxxxxxxxx|xxxxxx|xxxxxxxxxxx|          KV computed, tokens selected
//! layer 2.. |xxxxxx|x..x..xx...|xxxxxx|x.x....x...|          x computed; . the passage's values, its keys rotated
//! ```
//!
//! This module says what is blended. It does not know how a device computes it, or where passages are kept.

mod passage;
mod refusal;
mod selection;

pub use passage::{BlendPassage, Blended, BlendedPrompt, PassageKv};
pub use refusal::BlendRefusal;
pub use selection::{BlendRatio, InvalidRatio, SELECTING_LAYER, Selection, SelectionOrder, select};
