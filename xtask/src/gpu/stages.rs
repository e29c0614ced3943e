//! The stages of a check in their order: what tells most comes first, because the machine may go away.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::Result;

use super::{
    bench::Bench,
    checks::{Checks, too_small},
    handoff,
    outcomes::{self, Tally},
    report::StageReport,
    sanitizer,
};
use crate::check::Outcome;

/// A part of the check, with its share of the time.
pub(super) struct Stage {
    pub(super) name: &'static str,
    /// Its share of [`ALL_SECONDS`].
    pub(super) seconds: u64,
    /// Not part of a whole run: `--only` asks for it.
    pub(super) is_extra: bool,
    pub(super) about: &'static str,
    run: fn(&Bench, &mut Checks<'_>),
}

/// The time of a whole run.
pub(super) const ALL_SECONDS: u64 = 540;

pub(super) const STAGES: [Stage; 9] = [
    Stage {
        name: "card",
        seconds: 35,
        is_extra: false,
        about: "the card, and the rates of a large copy and a large product",
        run: card,
    },
    Stage {
        name: "smoke",
        seconds: 45,
        is_extra: false,
        about: "two simple kernels, the trials of wgmma and fp8, a graph",
        run: smoke,
    },
    Stage {
        name: "figures",
        seconds: 120,
        is_extra: false,
        about: "attention, products and steps of the shape of Llama 3.1 8B",
        run: figures,
    },
    Stage {
        name: "kernels",
        seconds: 110,
        is_extra: false,
        about: "every kernel against a plain reference, one process for each module",
        run: kernels,
    },
    Stage {
        name: "models",
        seconds: 90,
        is_extra: false,
        about: "whole models against processors, and through the engine",
        run: models,
    },
    Stage {
        name: "racecheck",
        seconds: 40,
        is_extra: false,
        about: "attention under compute-sanitizer",
        run: |bench, checks| sanitizer::run(bench, checks, "racecheck", &["attention::"]),
    },
    Stage {
        name: "handoff",
        seconds: 75,
        is_extra: false,
        about: "two workers on one GPU over shm and tcp, and what a handoff exposes",
        run: handoff,
    },
    Stage { name: "nccl", seconds: 20, is_extra: false, about: "NCCL's operations in a graph", run: nccl },
    Stage {
        name: "memcheck",
        seconds: 120,
        is_extra: true,
        about: "some tests of each file of kernels under compute-sanitizer",
        run: |bench, checks| sanitizer::run(bench, checks, "memcheck", &sanitizer::SOME_OF_EACH),
    },
];

impl Stage {
    pub(super) fn run(&self, bench: &Bench, report: &mut StageReport) {
        (self.run)(bench, &mut Checks::of(report));
    }
}

/// Tests of models and engines that need the emulator: tests of it, or of several devices.
const NOT_ON_DEVICE: [&str; 5] =
    ["measure::", "ranks::", "fake_libraries::", "a_model_that_does_not_fit", "several_ranks"];

/// The same for kernels. NCCL has a stage of its own.
const NOT_OF_KERNELS: [&str; 2] = ["nccl::", "fake_libraries::"];

fn card(bench: &Bench, checks: &mut Checks<'_>) {
    checks.add("ceilings", || measured(bench, "ceilings"));
    checks.add("state of the card", || {
        let ended = bench.finish("nvidia-smi", Command::new("nvidia-smi").arg("-q"));
        Ok(Tally::of(match ended {
            Ok(ended) if ended.code == Some(0) => Outcome::Passed("nvidia-smi.log".to_owned()),
            _ => Outcome::Skipped("no nvidia-smi here".to_owned()),
        }))
    });
}

fn figures(bench: &Bench, checks: &mut Checks<'_>) {
    checks.add("figures", || measured(bench, "all"));
}

fn measured(bench: &Bench, scope: &str) -> Result<Tally> {
    let mut command = bench.command(&bench.programs.figures);
    Ok(match too_small(bench) {
        Some(skipped) => skipped,
        None => outcomes::of_figures(&bench.finish(&format!("figures-{scope}"), command.arg(scope))?),
    })
}

fn smoke(bench: &Bench, checks: &mut Checks<'_>) {
    let (kernels, models) = (&bench.programs.kernels, &bench.programs.models);
    bench.share(4);
    let mut smoke = |name: &str, program: &Path, filters: &[&str]| {
        checks.add(name, || tests(bench, &format!("smoke-{name}"), program, filters, &[], 1));
    };
    smoke("norm and blocks", kernels, &["norm::", "blocks::"]);
    smoke("wgmma trials", kernels, &["attention::warpgroup", "expert_products::warpgroup_products"]);
    smoke("fp8 trial", kernels, &["fp8_trial::"]);
    smoke("graph", models, &["sampling::a_step_is_launched_before_the_last_one_is_collected"]);
}

fn kernels(bench: &Bench, checks: &mut Checks<'_>) {
    by_module(bench, checks, "kernels", &bench.programs.kernels, &NOT_OF_KERNELS, 0);
}

fn models(bench: &Bench, checks: &mut Checks<'_>) {
    let program = &bench.programs.engine;
    let num_tests = bench.tests_of(program).map_or(1, |names| names.len());
    by_module(bench, checks, "models", &bench.programs.models, &NOT_ON_DEVICE, num_tests);
    checks.add("engine", || tests(bench, "engine", program, &[], &NOT_ON_DEVICE, num_tests));
}

/// One process for each module: after an illegal access, every later test of that process fails. Its time is a share by its
/// number of tests. `num_others`: tests that the stage runs after them.
fn by_module(
    bench: &Bench,
    checks: &mut Checks<'_>,
    stage: &str,
    program: &Path,
    skipped: &[&str],
    num_others: usize,
) {
    let names = match bench.tests_of(program) {
        Ok(names) => names,
        Err(error) => return checks.add(stage, || Err(error)),
    };
    let taken = names.iter().filter(|name| !skipped.iter().any(|skipped| name.contains(skipped)));
    let mut modules = BTreeMap::<&str, usize>::new();
    for (module, _) in taken.filter_map(|name| name.split_once("::")) {
        *modules.entry(module).or_default() += 1;
    }
    if modules.is_empty() {
        return checks.add(stage, || Ok(Tally::of(Outcome::Failed(vec!["it has no tests".to_owned()]))));
    }
    bench.share(modules.values().sum::<usize>() + num_others);
    for (module, num_tests) in modules {
        let filter = format!("{module}::");
        let name = format!("{stage}-{module}");
        checks.add(module, || tests(bench, &name, program, &[filter.as_str()], skipped, num_tests));
    }
}

fn handoff(bench: &Bench, checks: &mut Checks<'_>) {
    handoff::run(bench, checks);
    // Tests of transports that use a device where there is one.
    let programs = &bench.programs;
    for (name, program, filter) in [
        ("shm", &programs.shm, "tests::devices::"),
        ("rdma", &programs.rdma, "tests::devices::blocks_go_between_a_gpu"),
        ("nccl", &programs.nccl, "cuda::"),
    ] {
        checks.add(format!("tests of {name}"), || {
            tests(bench, &format!("transport-{name}"), program, &[filter], &[], 1)
        });
    }
}

fn nccl(bench: &Bench, checks: &mut Checks<'_>) {
    let names = bench.tests_of(&bench.programs.kernels);
    checks.add("nccl in a graph", || {
        let names = names?;
        let with_graphs: Vec<&str> = names
            .iter()
            .map(String::as_str)
            .filter(|name| name.starts_with("nccl::") && name.contains("graph"))
            .collect();
        if with_graphs.is_empty() {
            let why = "the programs have no test nccl::*graph*".to_owned();
            return Ok(Tally::of(Outcome::Skipped(why)));
        }
        tests(bench, "nccl-graph", &bench.programs.kernels, &with_graphs, &[], 1)
    });
}

/// Tests whose names have one of `filters` in them; `weight` as in [`Bench::finish_one_of_several`].
fn tests(
    bench: &Bench,
    log: &str,
    program: &Path,
    filters: &[&str],
    skipped: &[&str],
    weight: usize,
) -> Result<Tally> {
    let mut command = bench.command(program);
    command.args(filters).args(skipped.iter().flat_map(|name| ["--skip", name])).arg("--show-output");
    Ok(outcomes::of_tests(&bench.finish_one_of_several(log, &mut command, weight)?))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::gpu::{libraries::Libraries, programs::Programs};

    #[test]
    fn a_whole_run_takes_nine_minutes_at_most() {
        let whole: u64 = STAGES.iter().filter(|stage| !stage.is_extra).map(|stage| stage.seconds).sum();
        assert!(whole < ALL_SECONDS, "{whole} s leave no time for the report");
        assert_eq!(ALL_SECONDS, 9 * 60);
    }

    /// The device is lost for the process of one module only.
    #[test]
    fn a_crash_in_one_module_leaves_the_others() {
        let dir = std::env::temp_dir().join(format!("baton-xtask-modules-{}", std::process::id()));
        let program = dir.join("tests");
        std::fs::create_dir_all(&dir).unwrap();
        let script = "#!/bin/sh\ncase \"$1\" in\n\
                      --list) printf 'a::one: test\\nb::two: test\\nb::three: test\\nnccl::four: test\\n' ;;\n\
                      a::) kill -ABRT $$ ;;\n\
                      *) printf 'test b::two ... ok\\ntest b::three ... ok\\n' ;;\nesac\n";
        let text = dir.join("text");
        std::fs::write(&text, script).unwrap();
        std::fs::set_permissions(&text, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        // A file that this process has written may still be open in a child process of another test, and cannot be run.
        assert!(Command::new("cp").arg("-p").arg(&text).arg(&program).status().unwrap().success());
        let programs = Programs::all_are(&program);
        let libraries = Libraries { path: "".into(), found: vec![] };
        let bench = Bench::new(programs, dir.clone(), dir.join("results"), 0, libraries).unwrap();
        bench.begin(Instant::now() + Duration::from_secs(60));
        let mut report =
            StageReport { name: "kernels", budget: Duration::ZERO, took: Duration::ZERO, checks: vec![] };
        kernels(&bench, &mut Checks::of(&mut report));
        let counts = report.checks.iter().map(|it| (&*it.name, it.tally.num_passed, it.tally.num_failed));
        assert_eq!(counts.collect::<Vec<_>>(), [("a", 0, 1), ("b", 2, 0)]);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
