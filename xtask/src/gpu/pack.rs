//! One archive with everything that a check runs, for machines without Rust, network, NVRTC and a checkout.
//!
//! ```text
//! baton-gpu-check/run              runs the check
//!                 xtask, baton, …  the programs, without debug information
//!                 kernels.cubins   compiled kernels of all tests, for every card
//!                 repository/      files that tests read
//!                 commit           what it was built of
//! ```

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use super::programs::Programs;
use crate::{kernels, tools, workspace::Workspace};

/// The name of the archive's folder.
const FOLDER: &str = "baton-gpu-check";

/// The archive has to fit where files are carried to a borrowed machine.
const MAX_BYTES: u64 = 40 << 20;

/// What tests read from the repository.
const FILES: [&str; 5] = [
    "LICENSE",
    "model/cuda-kernels/kernels",
    "models/tiny/eval/recall-512.jsonl",
    "tests/gguf/fixtures",
    "tests/parity/fixtures",
];

/// Code of branches in programs becomes equal where it calls the same function (`--x86`). The window covers all programs, which
/// share much.
#[cfg(target_arch = "x86_64")]
const COMPRESSION: [&str; 4] = ["--threads=1", "--check=crc32", "--x86", "--lzma2=preset=9,dict=128MiB"];
#[cfg(not(target_arch = "x86_64"))]
const COMPRESSION: [&str; 3] = ["--threads=1", "--check=crc32", "--lzma2=preset=9,dict=128MiB"];

const RUN: &str = "#!/bin/sh\nexec \"$(dirname \"$0\")/xtask\" gpu-check --packed \"$@\"\n";

/// Builds the programs, compiles the kernels, and writes the archive.
pub(super) fn pack(workspace: &Workspace, profile: &str, archive: &Path) -> Result<()> {
    let programs = Programs::build(workspace, profile)?;
    let stage = workspace.root.join("target/gpu-check/pack");
    if stage.exists() {
        std::fs::remove_dir_all(&stage).context("remove the last pack")?;
    }
    let folder = stage.join(FOLDER);
    programs.copy(&folder)?;
    compile_kernels(workspace, &programs, &folder)?;
    for file in FILES {
        copy_all(&workspace.root.join(file), &folder.join("repository").join(file))?;
    }
    let describe = ["describe", "--always", "--dirty", "--exclude=*"];
    let commit = tools::said(Command::new("git").args(describe).current_dir(&workspace.root));
    std::fs::write(folder.join("commit"), commit.unwrap_or_else(|| "unknown".to_owned()))?;
    std::fs::write(folder.join("run"), RUN)?;
    make_executable(&folder.join("run"))?;

    compress(&stage, archive)?;
    let size_bytes = std::fs::metadata(archive)?.len();
    let unpacked: u64 = sizes(&folder)?.iter().map(|(_, size)| size).sum();
    for (path, size) in sizes(&folder)?.iter().filter(|(_, size)| *size >= 1 << 20) {
        println!("{:>6.1} MiB  {}", mebibytes(*size), path.strip_prefix(&stage)?.display());
    }
    println!(
        "{}: {:.1} MiB, {:.1} MiB unpacked; needs glibc {} or newer",
        archive.display(),
        mebibytes(size_bytes),
        mebibytes(unpacked),
        newest_glibc(&folder)?
    );
    println!("on the machine with the GPU: tar xf {} && {FOLDER}/run", file_name(archive));
    ensure!(
        size_bytes < MAX_BYTES,
        "the archive is too large: at most {:.0} MiB are wanted",
        mebibytes(MAX_BYTES)
    );
    Ok(())
}

fn mebibytes(num_bytes: u64) -> f64 {
    num_bytes as f64 / f64::from(1 << 20)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Compiles the kernels of all tests beside the programs. Compiled code is kept in target/ for the next pack, apart from that of
/// another NVRTC: the fake one compiles for processors.
fn compile_kernels(workspace: &Workspace, programs: &Programs, folder: &Path) -> Result<()> {
    let nvrtc = kernels::nvrtc(workspace).context(kernels::NO_NVRTC)?;
    let compiler = nvrtc.to_string_lossy().replace(['/', '.'], "-");
    let cache = workspace.root.join("target/gpu-check/cubins").join(compiler.trim_matches('-'));
    let program = programs.tested_cubins.as_ref().context("programs that were just built")?;
    let mut command = Command::new(program);
    let status = command.arg(folder.join("kernels.cubins")).arg(cache).env("BATON_NVRTC", nvrtc).status();
    let status = status.with_context(|| format!("run {}", program.display()))?;
    ensure!(status.success(), "{}: {status}", tools::shown(&command));
    Ok(())
}

/// tar and xz of the system, so that both are certain to read what they write. The same files give the same bytes: neither times
/// nor rights of this machine are in the archive.
fn compress(stage: &Path, archive: &Path) -> Result<()> {
    let new = archive.with_extension("new");
    let file = std::fs::File::create(&new).with_context(|| format!("make {}", new.display()))?;
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    tar.args(["--mode=u=rwX,go=rX", "--directory"]);
    let mut tar = tar.arg(stage).arg(FOLDER).stdout(Stdio::piped()).spawn().context("run tar")?;
    let from = tar.stdout.take().context("tar's output")?;
    let compressed =
        Command::new("xz").args(COMPRESSION).stdin(from).stdout(file).status().context("run xz")?;
    ensure!(tar.wait()?.success() && compressed.success(), "tar or xz failed");
    std::fs::rename(&new, archive)?;
    Ok(())
}

fn copy_all(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            copy_all(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let parent = to.parent().context("a file is in a folder")?;
    std::fs::create_dir_all(parent)?;
    std::fs::copy(from, to).with_context(|| format!("copy {}", from.display()))?;
    Ok(())
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// All files of a folder, in the order of their paths.
fn sizes(folder: &Path) -> Result<BTreeSet<(PathBuf, u64)>> {
    let mut sizes = BTreeSet::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        match entry.metadata()? {
            of_folder if of_folder.is_dir() => sizes.extend(self::sizes(&entry.path())?),
            of_file => drop(sizes.insert((entry.path(), of_file.len()))),
        }
    }
    Ok(sizes)
}

/// The newest version of glibc that a program asks for: the machine with the GPU must have it.
fn newest_glibc(folder: &Path) -> Result<String> {
    let mut newest = (0, 0);
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_file() {
            newest = newest.max(glibc_of(&std::fs::read(path)?));
        }
    }
    Ok(format!("{}.{}", newest.0, newest.1))
}

/// The names of versions are strings in the file: "GLIBC_2.34".
fn glibc_of(program: &[u8]) -> (u32, u32) {
    const NAME: &[u8] = b"GLIBC_";
    if !program.starts_with(b"\x7fELF") {
        return (0, 0);
    }
    let versions = program.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    let version = |at: usize| {
        let text = program[at + NAME.len()..].split(|byte| *byte == 0).next()?;
        let (major, minor) = std::str::from_utf8(text).ok()?.split_once('.')?;
        Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
    };
    versions.filter_map(|(at, _)| version(at)).max().unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_glibc_is_found() {
        let program = b"\x7fELF..\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_PRIVATE\0";
        assert_eq!(glibc_of(program), (2, 34));
        assert_eq!(glibc_of(&program[1..]), (0, 0), "no program");
    }

    #[test]
    fn the_same_files_give_the_same_archive() {
        let dir = std::env::temp_dir().join(format!("baton-xtask-pack-{}", std::process::id()));
        let archive = |name: &str, mode: u32, files: [&str; 2]| {
            use std::os::unix::fs::PermissionsExt;
            let stage = dir.join(name);
            std::fs::create_dir_all(stage.join(FOLDER)).unwrap();
            for file in files {
                let path = stage.join(FOLDER).join(file);
                std::fs::write(&path, format!("the bytes of {file}")).unwrap();
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
                let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(u64::from(mode));
                std::fs::File::open(&path).unwrap().set_modified(long_ago).unwrap();
            }
            let packed = dir.join(format!("{name}.tar.xz"));
            compress(&stage, &packed).unwrap();
            std::fs::read(packed).unwrap()
        };
        let first = archive("first", 0o644, ["a", "b"]);
        assert_eq!(first, archive("second", 0o600, ["b", "a"]), "other times, rights and order");
        assert_ne!(first, archive("third", 0o755, ["a", "b"]), "programs stay programs");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_tests_read_is_in_the_repository() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for file in FILES {
            assert!(root.join(file).exists(), "{file}");
        }
    }
}
