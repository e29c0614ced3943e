//! Why a model cannot blend.

use super::selection::FIRST_KEPT_LAYER;
use crate::decoder::DecoderSpec;
use crate::rope::RopeScaling;

/// Why prompts of a model are never blended. They are computed in full instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlendRefusal {
    /// A layer sees a window only.
    #[error("layer {layer_idx} has a sliding window of {window} tokens")]
    SlidingWindow {
        /// The first such layer.
        layer_idx: usize,
        /// Its window.
        window: usize,
    },
    /// A layer has LongRoPE.
    #[error("layer {layer_idx} has LongRoPE, whose frequencies change with the length of the context")]
    LongRope {
        /// The first such layer.
        layer_idx: usize,
    },
    /// There is no layer that passages have KV of.
    #[error("the model has {num_layers} layers; blending needs at least 2")]
    TooFewLayers {
        /// Layers of the model.
        num_layers: usize,
    },
    /// The executor does not implement blending.
    #[error("this backend does not blend")]
    Backend,
}

impl DecoderSpec {
    /// Whether prompts of this model may be blended.
    ///
    /// # Errors
    /// When they may not.
    pub fn check_blending(&self) -> Result<(), BlendRefusal> {
        if self.layers.len() <= FIRST_KEPT_LAYER {
            return Err(BlendRefusal::TooFewLayers { num_layers: self.layers.len() });
        }
        for (layer_idx, layer) in self.layers.iter().enumerate() {
            if let Some(window) = layer.window {
                return Err(BlendRefusal::SlidingWindow { layer_idx, window });
            }
            // Keys can be rotated from position 0 only if the frequencies do not depend on the length of the prompt.
            // LongRoPE's are those of the whole context here, but such models are trained to switch them: what a passage
            // on its own gives under those of a long context is not measured.
            match self.ropes[layer.rope_idx].scaling {
                RopeScaling::None
                | RopeScaling::Linear { .. }
                | RopeScaling::Llama3 { .. }
                | RopeScaling::Yarn { .. }
                | RopeScaling::Divided { .. } => {}
                RopeScaling::LongRope { .. } => return Err(BlendRefusal::LongRope { layer_idx }),
            }
        }
        Ok(())
    }
}
