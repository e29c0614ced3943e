//! Models for devices: matrices stay where they are mapped, until a device takes their rows.
//!
//! It knows no device, and in which form one holds a matrix.

use std::path::Path;
use std::sync::Arc;

use baton_model_spec::{Activations, Backend, IntegerFormat, LoadError, Quantisation, Rank};

use crate::integer_choice::{IntegerChoice, SplitGroup, Tolerance};
use crate::load::{LoadOptions, LoadedDecoder, load_decoder};
use crate::matrix::Matrix;
use crate::sink::{MatrixSink, ProductKind};

/// A matrix for a device, where its files are mapped.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    parts: Arc<[Matrix]>,
    integers: Option<IntegerFormat>,
    /// Of all parts.
    pub rows: usize,
    /// Of each part.
    pub cols: usize,
}

impl DeviceSource {
    /// The matrices that it is made of, one after the other.
    pub fn parts(&self) -> &[Matrix] {
        &self.parts
    }

    /// The integers that it is multiplied as; `None` for floats.
    pub fn integer_format(&self) -> Option<IntegerFormat> {
        self.integers
    }
}

/// Keeps matrices where they are mapped.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceSink {
    choice: IntegerChoice,
}

impl DeviceSink {
    /// Weights of layers are quantised to `quantise` when a device takes them.
    pub fn new(quantise: Option<IntegerFormat>) -> DeviceSink {
        DeviceSink { choice: IntegerChoice { quantise, widen: false } }
    }
}

impl MatrixSink for DeviceSink {
    type Matrix = DeviceSource;

    fn add(
        &mut self,
        parts: Vec<Matrix>,
        tolerance: Tolerance,
        _: ProductKind,
    ) -> Result<DeviceSource, SplitGroup> {
        let cols = parts[0].cols;
        assert!(parts.iter().all(|part| part.cols == cols), "parts of one product");
        let integers = self.choice.format_of(&parts, tolerance)?;
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok(DeviceSource { parts: parts.into(), integers, rows, cols })
    }
}

/// A model, or one rank's part of it, that a device has yet to take.
pub type DeviceModel = LoadedDecoder<DeviceSource>;

/// Opens `model`, a Hugging Face directory or a GGUF file, for a device.
///
/// # Errors
/// As [`load_decoder`], and when an option asks for what devices do not do.
///
/// # Panics
/// When `options` are for another backend.
pub fn load_for_device(model: &Path, options: &LoadOptions) -> Result<DeviceModel, LoadError> {
    assert_eq!(options.backend, Backend::Cuda, "options for devices");
    if options.activations == Activations::F32 {
        return Err(LoadError::NotOnDevice { what: "activations in f32" });
    }
    let mut sink = DeviceSink::new(options.quantise.map(Quantisation::format));
    Ok(load_decoder(model, options, &mut sink)?.0)
}

/// Opens the parts of so many ranks. `options` are theirs, but for the rank.
///
/// # Errors
/// As [`load_for_device`], and when the model cannot be divided so.
pub fn load_ranks_for_devices(
    model: &Path,
    num_ranks: usize,
    options: &LoadOptions,
) -> Result<Vec<DeviceModel>, LoadError> {
    let load = |rank| load_for_device(model, &LoadOptions { rank, ..options.clone() });
    Rank::all(num_ranks).map(load).collect()
}
