//! Blending: the KV of passages of text that were computed on their own becomes the KV of a prompt that contains them.
//!
//! CacheBlend (Yao et al., EuroSys 2025, arXiv:2405.16444). A passage's keys and values depend on the text before it from
//! layer 1 on. Most tokens hardly change; a few do. So the layers before a layer s, which is 1 or a later one, are computed
//! for all tokens. That gives the true keys and values of layers 0 to s. The tokens whose keys of layer s deviate most from
//! the passage's own are [selected](select) and computed in the remaining layers, too. The other tokens keep the KV of their
//! passage there.
//!
//! ```text
//! tokens     | text | passage 1 | text | passage 2 |          every token of a blended prompt
//! layers < s |xxxxxx|xxxxxxxxxxx|xxxxxx|xxxxxxxxxxx|          computed
//! layer s    |xxxxxx|xxxxxxxxxxx|xxxxxx|xxxxxxxxxxx|          KV computed, tokens selected
//! layers > s |xxxxxx|x..x..xx...|xxxxxx|x.x....x...|          x computed; . the passage's values, its keys rotated
//! ```
//!
//! This module says what is blended. It does not know how a device computes it, or where passages are kept.

mod passage;
mod refusal;
mod selection;

pub use passage::{BlendPassage, Blended, BlendedPrompt, PassageKv};
pub use refusal::BlendRefusal;
pub use selection::{BlendRatio, FIRST_KEPT_LAYER, InvalidRatio, Selection, SelectionOrder, select};
