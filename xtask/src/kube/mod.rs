//! `cargo xtask kube`: the chart on a real API server, controller manager and scheduler.
//!
//! The programs are built through the Go module proxy into `target/kube`, which takes half an hour once. kwok plays the
//! kubelets of nodes with GPUs and RDMA devices: pods are scheduled and count as running, but nothing in them runs. So this
//! shows what Kubernetes makes of the chart, not what Baton does there; `helm test` would prove nothing here.

mod build;
mod cluster;
mod control_plane;
mod nodes;
mod ports;
mod releases;
mod steps;

use anyhow::{Context, Result};
use clap::Args;

use self::{build::Programs, cluster::Cluster, control_plane::ControlPlane, steps::Steps};
use crate::{chart, tools, workspace::Workspace};

/// The arguments of `cargo xtask kube`.
#[derive(Args)]
pub(crate) struct Options {
    /// Install only values files whose name contains this.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

/// Returns whether every step succeeded.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<bool> {
    let root = &workspace.root;
    let place = root.join("target/kube");
    let helm =
        tools::helm(root).context("no helm here; `cargo xtask setup` builds it where Go is installed")?;
    let mut steps = Steps::default();
    let programs = steps.must("programs", || Programs::build(&place))?;
    let control_plane = steps.must("control plane", || ControlPlane::start(&programs, &place.join("run")))?;
    let cluster = Cluster::new(root, &helm, &programs.kubectl, control_plane.kubeconfig());
    steps.must("definitions", || nodes::add_definitions(&cluster, &programs.definitions))?;
    steps.must("nodes", || nodes::add(&cluster))?;
    for values in chart::accepted(root)?.iter().filter(|values| values.contains(&options.only)) {
        steps.try_to(chart::name_of(values), || releases::live(&cluster, values));
    }
    steps.try_to("two releases", || releases::share_a_namespace(&cluster));
    steps.try_to("restricted", || releases::are_refused_where_restricted(&cluster));
    drop(control_plane);
    Ok(steps.summary())
}
