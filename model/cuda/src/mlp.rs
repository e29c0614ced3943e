//! The part of the forward pass between two norms that is not attention: an MLP, or routed experts.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::experts::{Combine, RouteToExperts, SortPairs};
use baton_cuda_kernels::gate::{ApplyGate, GateQuantise};
use baton_cuda_kernels::kernel::Address;
use baton_model_spec::MlpSpec;

use crate::forward_pass::ForwardPass;
use crate::multiply::{ExpertPlaces, QuantisedRows, Rows};
use crate::weights::{DeviceLayer, DeviceLinear, DeviceMatrix, DeviceMlp};

impl ForwardPass<'_> {
    /// Queues the MLP of a layer, from the normed rows to their part of the residual stream.
    pub(crate) fn mlp<D: KernelDevice>(
        &self,
        device: &mut D,
        mlp: &MlpSpec,
        layer: &DeviceLayer,
    ) -> Result<(), CudaError> {
        let buffers = self.buffers;
        match &layer.mlp {
            DeviceMlp::Dense { gate_up, down } => {
                self.apply_normed(device, gate_up, layer.attention_post_norm, buffers.gate_up)?;
                let are_quantised = self.gate(device, down)?;
                self.apply_to_sum(device, down, Rows { at: buffers.gated, are_quantised })
            }
            DeviceMlp::Experts { router, gate_up, down } => {
                self.experts(device, mlp, *router, *gate_up, *down)?;
                self.begin_sum(device, 0..self.inputs.num_rows)?;
                self.end_sums(device)
            }
        }
    }

    /// Computes each row's experts. Only the device knows how many rows an expert has, so the step can be repeated.
    fn experts<D: KernelDevice>(
        &self,
        device: &mut D,
        mlp: &MlpSpec,
        router: DeviceMatrix,
        gate_up: DeviceMatrix,
        down: DeviceMatrix,
    ) -> Result<(), CudaError> {
        let MlpSpec::Experts { num_experts, num_active, renormalise, .. } = *mlp else {
            unreachable!("experts by the specification")
        };
        let (buffers, routed) = (self.buffers, &self.buffers.routed);
        let (num_rows, hidden) = (self.inputs.num_rows as u32, self.spec.hidden_size as u32);
        let (num_experts, num_active) = (num_experts as u32, num_active as u32);
        let num_pairs = num_rows * num_active;
        let (offsets, rows, gate_up_rows) = (routed.offsets, routed.rows, buffers.gate_up);
        let places = ExpertPlaces { offsets, rows, gate_up: gate_up_rows, num_pairs, num_experts };
        let in_order = ExpertPlaces { rows: Address::NULL, ..places };
        let scratch = self.scratch;
        // SAFETY: as `ForwardPass` says.
        unsafe {
            let num_all = self.inputs.num_rows;
            scratch.multiply_exactly(device, router, buffers.hidden, routed.logits, num_all)?;
            device.launch(&RouteToExperts {
                logits: routed.logits,
                slots: buffers.slots,
                experts: routed.experts,
                weights: routed.weights,
                num_rows,
                num_experts,
                num_active,
                renormalise: renormalise.into(),
            })?;
            device.launch(&SortPairs {
                experts: routed.experts,
                offsets: routed.offsets,
                rows: routed.rows,
                places: routed.places,
                num_pairs,
                num_active,
                num_experts,
                unused: 0,
            })?;
            scratch.apply_experts(device, gate_up, &places, buffers.hidden, buffers.gated, true)?;
            scratch.apply_experts(device, down, &in_order, buffers.gated, routed.outputs, false)?;
            device.launch(&Combine {
                outputs: routed.outputs,
                places: routed.places,
                weights: routed.weights,
                out: buffers.added,
                hidden,
                num_active,
                is_added: 0,
                num_rows,
            })
        }
    }

    /// Applies the gate of an MLP. Returns whether the result is also quantised, for the product `down`.
    fn gate<D: KernelDevice>(&self, device: &mut D, down: &DeviceLinear) -> Result<bool, CudaError> {
        let num_rows = self.inputs.num_rows;
        let gate = ApplyGate {
            gate_up: self.buffers.gate_up,
            out: self.buffers.gated,
            width: down.weight.num_in as u32,
            num_rows: num_rows as u32,
        };
        // The halves of a divided product are quantised one after the other.
        let quantised = match self.is_sum_divided::<D>() {
            true => None,
            false => self.scratch.quantised_rows(down.weight, num_rows),
        };
        // SAFETY: as `ForwardPass` says.
        unsafe {
            match quantised {
                None => device.launch(&gate)?,
                Some(QuantisedRows { at, scales, stride }) => {
                    device.launch(&GateQuantise { gate, quantised: at, scales, stride, unused: 0 })?;
                }
            }
        }
        Ok(quantised.is_some())
    }
}
