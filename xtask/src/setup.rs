//! `cargo xtask setup`: installs what the tests need and the machine lacks.
//!
//! It prints each step before it runs it. Outside target/ it changes the machine only through the system's package
//! manager. A second call has nothing to do.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    tools::{self, run_shown},
    wheels::{NCCL, NIXL, NVRTC},
    workspace::Workspace,
};

/// Whether to install, or only to look.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Install,
    Check,
}

/// A tool that `verify` uses besides the Rust toolchain.
struct Need {
    name: &'static str,
    what_for: &'static str,
    /// Whether tests fail without it. If not, a check is skipped with a message.
    required: bool,
    /// Its path, if it is installed.
    find: fn(&Path) -> Result<Option<String>>,
    install: fn(&Path) -> Result<()>,
}

const NEEDS: &[Need] = &[
    Need {
        name: "etcd",
        what_for: "tests of discovery through etcd",
        required: true,
        find: find_etcd,
        install: install_etcd,
    },
    Need {
        name: "python clients",
        what_for: "tests with the official clients of OpenAI and Anthropic, and with grpcio",
        required: true,
        find: find_venv,
        install: install_venv,
    },
    Need {
        name: "node clients",
        what_for: "tests with OpenAI's JavaScript client",
        required: false,
        find: find_node_modules,
        install: install_node_modules,
    },
    Need {
        name: "aiperf",
        what_for: "a test with NVIDIA's load generator",
        required: false,
        find: find_aiperf,
        install: install_aiperf,
    },
    Need {
        name: "g++",
        what_for: "tests that run GPU kernels without a GPU",
        required: true,
        find: |_| Ok(tools::on_path("g++").map(|path| path.display().to_string())),
        install: |_| apt_install("g++"),
    },
    Need {
        name: "nvrtc",
        what_for: "checks that compile GPU kernels",
        required: false,
        find: |root| Ok(NVRTC.find(root)),
        install: |root| NVRTC.install(root),
    },
    Need {
        name: "nixl",
        what_for: "tests of rdma",
        required: false,
        find: |root| Ok(NIXL.find(root)),
        install: |root| NIXL.install(root),
    },
    Need {
        name: "iptables",
        what_for: "tests that drop packets, as root",
        required: false,
        find: |_| Ok(tools::on_path("iptables").map(|path| path.display().to_string())),
        install: |_| apt_install("iptables"),
    },
    Need {
        name: "helm",
        what_for: "checks of the chart",
        required: false,
        find: find_helm,
        install: install_helm,
    },
];

/// Too large to be installed by default.
const NCCL_NEED: Need = Need {
    name: "nccl",
    what_for: "tests of nccl",
    required: false,
    find: |root| Ok(NCCL.find(root)),
    install: |root| NCCL.install(root),
};

/// helm 3, built from source through the Go module proxy. Needs Go 1.26.
const HELM: &str = "helm.sh/helm/v3/cmd/helm";

/// What a build of the workspace with its tests takes, in KiB: 5.5 GB, 9.5 GB with incremental compilation.
const BUILD_KIB: u64 = 8 << 20;

/// The oldest etcd that tests can use.
const OLDEST_ETCD: (u32, u32) = (3, 4);
const ETCD_BY_HAND: &str = "install etcd by hand and put it on PATH (https://etcd.io/docs, 3.4 or newer)";

/// Exits with success if this Python is new enough for the clients that [`REQUIREMENTS`] names.
const IS_PYTHON_NEW: &str = "import sys; sys.exit(sys.version_info < (3, 10))";

const REQUIREMENTS: &str = "tests/clients/requirements.txt";

/// NVIDIA's load generator, and the day whose versions of its 140 packages are installed. 0.8 GB.
const AIPERF: &str = "aiperf==0.13.0";
const AIPERF_DAY: &str = "2026-11-27";

/// What npm installs, with all versions.
const NODE_FILES: [&str; 2] = ["package.json", "package-lock.json"];

/// Whether every required tool is installed at the end.
pub(crate) fn run(workspace: &Workspace, mode: Mode, with_nccl: bool) -> Result<bool> {
    let root = &workspace.root;
    say_room(root)?;
    let mut complete = true;
    for need in NEEDS.iter().chain(with_nccl.then_some(&NCCL_NEED)) {
        let mut problem = None;
        let mut found = (need.find)(root)?;
        if found.is_none() && mode == Mode::Install {
            problem = (need.install)(root).err();
            if problem.is_none() {
                found = (need.find)(root)?;
            }
        }
        match found {
            Some(place) => println!("setup {:<15} ok        {place}", need.name),
            None => {
                let word = if need.required { "MISSING" } else { "missing" };
                let why = problem.map_or_else(String::new, |problem| format!(": {problem:#}"));
                println!("setup {:<15} {word:<8}  {} need it{why}", need.name, need.what_for);
                complete &= !need.required;
            }
        }
    }
    Ok(complete)
}

/// Says whether a build fits: a full disk ends it with errors of the linker that do not tell why.
fn say_room(root: &Path) -> Result<()> {
    let kib = |program: &str, args: &[&str], path: &Path, line: usize, column: usize| -> Result<u64> {
        let output =
            Command::new(program).args(args).arg(path).output().with_context(|| format!("run {program}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let field = text.lines().nth(line).and_then(|line| line.split_whitespace().nth(column));
        field.and_then(|field| field.parse().ok()).with_context(|| format!("{program} printed {text:?}"))
    };
    let target = root.join("target");
    let built = if target.exists() { kib("du", &["-sk"], &target, 0, 0)? } else { 0 };
    let free = kib("df", &["-Pk"], root, 1, 3)?;
    let gib = |kib: u64| kib as f64 / f64::from(1 << 20);
    let word = if enough(free, built) { "ok" } else { "LOW" };
    println!(
        "setup {:<15} {word:<8}  {:.1} GiB free at {}; a build takes {:.0}, of which {:.1} are there",
        "disk",
        gib(free),
        root.display(),
        gib(BUILD_KIB),
        gib(built)
    );
    Ok(())
}

fn enough(free_kib: u64, built_kib: u64) -> bool {
    free_kib.saturating_add(built_kib) >= BUILD_KIB
}

fn find_etcd(_: &Path) -> Result<Option<String>> {
    let Some(path) = tools::on_path("etcd") else { return Ok(None) };
    let said = tools::said(Command::new(&path).arg("--version")).unwrap_or_default();
    if etcd_version(&said).is_some_and(|version| version >= OLDEST_ETCD) {
        return Ok(Some(path.display().to_string()));
    }
    let first = said.lines().next().unwrap_or("no version");
    println!("setup: {} says {first}: {ETCD_BY_HAND}", path.display());
    Ok(None)
}

/// 3 and 4 of "etcd Version: 3.4.23".
fn etcd_version(said: &str) -> Option<(u32, u32)> {
    let version = said.lines().find_map(|line| line.strip_prefix("etcd Version: "))?;
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Debian and Ubuntu package etcd. On other systems the owner of the machine installs it.
fn install_etcd(_: &Path) -> Result<()> {
    if let Some(path) = tools::on_path("etcd") {
        // It is that of the package, or it may stay before that on PATH.
        bail!("{} is too old: {ETCD_BY_HAND}", path.display());
    }
    println!(
        "setup: etcd is not on PATH: installing Debian's etcd-server (the tests start their own instances)"
    );
    apt_install("etcd-server").context(ETCD_BY_HAND)
}

fn find_venv(root: &Path) -> Result<Option<String>> {
    let venv = tools::venv(root);
    let wanted = std::fs::read(root.join(REQUIREMENTS)).with_context(|| format!("read {REQUIREMENTS}"))?;
    let installed = std::fs::read(stamp(&venv)).ok();
    let whole = installed == Some(wanted) && venv.join("bin/python").exists();
    Ok(whole.then(|| venv.display().to_string()))
}

fn install_venv(root: &Path) -> Result<()> {
    let venv = tools::venv(root);
    println!("setup: making {} with what {REQUIREMENTS} names, from PyPI", venv.display());
    let python = tools::on_path("python3").context("python3 is not installed; it must be 3.10 or newer")?;
    let is_new = succeeds(Command::new(&python).args(["-c", IS_PYTHON_NEW]));
    ensure!(is_new, "{} is older than Python 3.10, which the clients need", python.display());
    // Debian splits the part of venv that brings pip into a package of its own.
    if !succeeds(Command::new(&python).args(["-c", "import venv, ensurepip"])) {
        println!("setup: {} has no venv module: installing Debian's python3-venv", python.display());
        apt_install("python3-venv")?;
    }
    if venv.exists() {
        // An incomplete environment, or one of older requirements.
        std::fs::remove_dir_all(&venv).with_context(|| format!("remove {}", venv.display()))?;
    }
    run_shown(Command::new(&python).args(["-m", "venv"]).arg(&venv))?;
    let requirements = root.join(REQUIREMENTS);
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
    run_shown(Command::new(venv.join("bin/python")).args(pip).arg(&requirements))?;
    // Written last, so that it exists only if every step before succeeded.
    std::fs::copy(&requirements, stamp(&venv))?;
    Ok(())
}

/// What was installed into an environment, in the words of its requirements.
fn stamp(venv: &Path) -> PathBuf {
    venv.join("requirements.installed")
}

fn find_aiperf(root: &Path) -> Result<Option<String>> {
    let venv = tools::aiperf(root);
    let installed = std::fs::read_to_string(stamp(&venv)).ok();
    Ok((installed.as_deref() == Some(AIPERF)).then(|| venv.display().to_string()))
}

/// By uv, which takes six seconds where pip takes two minutes.
fn install_aiperf(root: &Path) -> Result<()> {
    let venv = tools::aiperf(root);
    println!("setup: making {} with {AIPERF}, from PyPI", venv.display());
    let clients = tools::venv(root).join("bin");
    let uv = || Command::new(clients.join("uv"));
    run_shown(uv().args(["venv", "--quiet", "--clear", "--python"]).arg(clients.join("python")).arg(&venv))
        .context("skipped")?;
    let install = ["pip", "install", "--quiet", "--no-cache", "--exclude-newer", AIPERF_DAY, "--python"];
    run_shown(uv().args(install).arg(venv.join("bin/python")).arg(AIPERF))
        .context("skipped; it needs Python 3.11 to 3.13")?;
    // Written last, so that it exists only if every step before succeeded.
    std::fs::write(stamp(&venv), AIPERF)?;
    Ok(())
}

fn find_node_modules(root: &Path) -> Result<Option<String>> {
    let node = tools::node(root);
    let wanted = std::fs::read(root.join("tests/clients").join(NODE_FILES[1]))?;
    // npm writes it at the end.
    let is_whole = node.join("node_modules/.package-lock.json").exists();
    let installed = std::fs::read(node.join(NODE_FILES[1])).ok().filter(|_| is_whole);
    let is_found = installed == Some(wanted) && tools::on_path("node").is_some();
    Ok(is_found.then(|| node.display().to_string()))
}

fn install_node_modules(root: &Path) -> Result<()> {
    let npm = tools::on_path("npm").context("skipped, as there is no npm (Node.js 20 or newer)")?;
    let node = tools::node(root);
    println!("setup: making {} with what tests/clients/package.json names, from npm", node.display());
    if node.exists() {
        std::fs::remove_dir_all(&node).with_context(|| format!("remove {}", node.display()))?;
    }
    std::fs::create_dir_all(&node)?;
    for name in NODE_FILES {
        std::fs::copy(root.join("tests/clients").join(name), node.join(name))?;
    }
    let ci = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"];
    run_shown(Command::new(npm).args(ci).arg(&node)).context("skipped")
}

fn find_helm(root: &Path) -> Result<Option<String>> {
    Ok(tools::helm(root).map(|path| path.display().to_string()))
}

fn install_helm(root: &Path) -> Result<()> {
    let go = tools::on_path("go").context("skipped, as there is neither helm nor Go (1.26 or newer)")?;
    let bin = tools::own(root, "helm", tools::HELM_VERSION).join("bin");
    println!(
        "setup: building helm into {} through the Go module proxy; takes some minutes once",
        bin.display()
    );
    std::fs::create_dir_all(&bin)?;
    let package = format!("{HELM}@{}", tools::HELM_VERSION);
    run_shown(Command::new(go).args(["install", package.as_str()]).env("GOBIN", &bin)).context("skipped")
}

/// Installs a package of Debian's or Ubuntu's.
pub(crate) fn apt_install(package: &str) -> Result<()> {
    if tools::on_path("apt-get").is_none() {
        bail!("there is no apt-get here");
    }
    let install = ["install", "--yes", "--no-install-recommends", package];
    if run_shown(as_root("apt-get")?.args(install)).is_ok() {
        return Ok(());
    }
    // A fresh machine or image has no package lists yet.
    run_shown(as_root("apt-get")?.arg("update"))?;
    run_shown(as_root("apt-get")?.args(install))
}

/// The command, through sudo unless we are root.
fn as_root(program: &str) -> Result<Command> {
    let id = Command::new("id").arg("-u").output().context("run id")?;
    let mut command = if id.stdout.trim_ascii() == b"0" {
        Command::new(program)
    } else if tools::on_path("sudo").is_some() {
        let mut sudo = Command::new("sudo");
        sudo.arg(program);
        sudo
    } else {
        bail!("{program} needs root, and there is no sudo");
    };
    command.env("DEBIAN_FRONTEND", "noninteractive");
    Ok(command)
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_found_before_the_build() {
        assert!(!enough(300 << 10, 0));
        assert!(enough(9 << 20, 0));
        assert!(enough(1 << 20, 8 << 20), "what is built already needs no room");
        assert!(say_room(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn an_old_etcd_is_told_by_its_version() {
        let is_new =
            |version: &str| etcd_version(&format!("{version}\nGit SHA: 1")).map(|it| it >= OLDEST_ETCD);
        for (said, wanted) in [
            ("etcd Version: 3.4.23", Some(true)),
            ("etcd Version: 3.6.0-rc.1", Some(true)),
            ("etcd Version: 3.10.0", Some(true)),
            ("etcd Version: 3.3.25", Some(false)),
            ("etcd Version: 2.3.7", Some(false)),
            ("etcd Version: new", None),
            ("", None),
        ] {
            assert_eq!(is_new(said), wanted, "{said}");
        }
    }
}
