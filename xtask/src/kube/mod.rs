//! `cargo xtask kube`: the chart on a real API server, controller manager and scheduler.
//!
//! The programs are built through the Go module proxy into `target/kube`, which takes half an hour once. kwok plays the
//! kubelets of nodes with GPUs and RDMA devices: there pods are scheduled and count as running, but nothing in them runs, so
//! this shows what Kubernetes makes of the chart. Then comes a node whose pods run, for what Baton does there.

mod build;
mod cluster;
mod control_plane;
mod http;
mod json;
mod load;
mod namespaces;
mod node;
mod nodes;
mod ports;
mod releases;
mod serving;
mod steps;

use anyhow::{Context, Result, ensure};
use clap::Args;

use self::{build::Programs, cluster::Cluster, control_plane::ControlPlane, node::Node, steps::Steps};
use crate::{chart, tools, workspace::Workspace};

/// The arguments of `cargo xtask kube`.
#[derive(Args)]
pub(crate) struct Options {
    /// Run only steps whose name contains this: those of values files have their names, those of pods that run begin with
    /// "serving".
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// It runs in namespaces of its own.
    #[arg(long, hide = true)]
    inside: bool,
}

/// Returns whether every step succeeded.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<bool> {
    let root = &workspace.root;
    let place = root.join("target/kube");
    namespaces::can_be_made()?;
    let programs = Programs::build(&place)?;
    if !options.inside {
        build_baton(workspace)?;
        return namespaces::run_again("--inside");
    }
    let helm =
        tools::helm(root).context("no helm here; `cargo xtask setup` builds it where Go is installed")?;
    println!("kube: {programs}");
    let mut steps = Steps::new(&options.only);
    node::set_up_network(control_plane::SERVICES)?;
    let run = place.join("run");
    let mut control_plane = steps.must("control plane", || ControlPlane::start(&programs, &run))?;
    let cluster = Cluster::new(root, &helm, &programs.kubectl, control_plane.kubeconfig());
    steps.must("definitions", || nodes::add_definitions(&cluster, &programs.definitions))?;
    steps.must("nodes", || nodes::add(&cluster))?;
    for values in &chart::accepted(root)? {
        steps.try_to(chart::name_of(values), || releases::live(&cluster, values));
    }
    steps.try_to("two releases", || releases::share_a_namespace(&cluster));
    steps.try_to("autoscaling on", || releases::keep_their_workers_when_they_scale(&cluster));
    steps.try_to("restricted", || releases::are_refused_where_restricted(&cluster));

    nodes::close_simulated(&cluster)?;
    // Where cargo leaves the program.
    let baton = workspace.target_folder().join("debug/baton");
    let node = Node::start(&cluster, &mut control_plane, &programs, &baton, &run.join("node"))?;
    serving::run(&mut steps, &cluster, &node, &baton)?;
    drop(node);
    drop(control_plane);
    Ok(steps.summary())
}

fn build_baton(workspace: &Workspace) -> Result<()> {
    let mut cargo = workspace.cargo();
    // The features of all crates together, as for the tests: so nothing is compiled twice.
    cargo.args(["build", "--locked", "--workspace", "--bin", "baton"]);
    ensure!(cargo.status().context("run cargo")?.success(), "baton was not built");
    Ok(())
}
