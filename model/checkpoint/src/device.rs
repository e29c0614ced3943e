//! Models for GPUs: matrices stay mapped until a GPU backend copies their rows.
//!
//! It does not know GPUs or a GPU's layout of matrices.

use std::path::Path;
use std::sync::Arc;

use baton_kv_cache::KvDtype;
use baton_model_spec::{Activations, IntegerFormat, LoadError, Quantisation, Rank};

use crate::integer_choice::{IntegerChoice, SplitGroup, Tolerance};
use crate::load::{LoadOptions, LoadedDecoder, SharedFindings, load_decoder};
use crate::matrix::Matrix;
use crate::sink::{MatrixSink, ProductKind};

/// A matrix for a GPU, in mapped files.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    parts: Arc<[Matrix]>,
    integers: Option<IntegerFormat>,
    /// Rows of all parts together.
    pub rows: usize,
    /// Columns of each part.
    pub cols: usize,
}

impl DeviceSource {
    /// The parts, one after the other.
    pub fn parts(&self) -> &[Matrix] {
        &self.parts
    }

    /// The integer format in which it is multiplied; `None` for floats.
    pub fn integer_format(&self) -> Option<IntegerFormat> {
        self.integers
    }
}

/// A sink that keeps matrices mapped.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceSink {
    choice: IntegerChoice,
}

impl DeviceSink {
    /// A sink for which layer weights are quantised to `quantise` when they are copied to a GPU.
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
        assert!(parts.iter().all(|part| part.cols == cols), "the parts of a product have equal columns");
        let integers = self.choice.format_of(&parts, tolerance)?;
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok(DeviceSource { parts: parts.into(), integers, rows, cols })
    }
}

/// A model, or one rank's part of it, before it is copied to a GPU.
pub type DeviceModel = LoadedDecoder<DeviceSource>;

/// Opens `model`, a Hugging Face directory or a GGUF file, for a GPU.
///
/// # Errors
/// As [`load_decoder`], and when an option is not supported on GPUs.
pub fn load_for_device(model: &Path, options: &LoadOptions) -> Result<DeviceModel, LoadError> {
    load_rank(model, options, &mut SharedFindings::default())
}

fn load_rank(
    model: &Path,
    options: &LoadOptions,
    findings: &mut SharedFindings,
) -> Result<DeviceModel, LoadError> {
    if options.activations == Activations::F32 {
        return Err(LoadError::NotOnDevice { what: "activations in f32" });
    }
    let options = LoadOptions { kv_dtype: options.kv_dtype.or(Some(KvDtype::Bf16)), ..options.clone() };
    let mut sink = DeviceSink::new(options.quantise.map(Quantisation::format));
    Ok(load_decoder(model, &options, findings, &mut sink)?.0)
}

/// Opens the parts of `num_ranks` ranks. `options` apply to each, except the rank.
///
/// # Errors
/// As [`load_for_device`], and when the model cannot be divided among the ranks.
pub fn load_ranks_for_devices(
    model: &Path,
    num_ranks: usize,
    options: &LoadOptions,
) -> Result<Vec<DeviceModel>, LoadError> {
    let mut findings = SharedFindings::default();
    let load = |rank| load_rank(model, &LoadOptions { rank, ..options.clone() }, &mut findings);
    Rank::all(num_ranks).map(load).collect()
}
