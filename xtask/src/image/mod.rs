//! `cargo xtask image`: builds the Dockerfile with buildah, runs the image as the chart does, and writes it with its SBOM.
//!
//! It needs no registry: images that the Dockerfile builds on are made of Debian's packages and this toolchain. Everything is
//! in target/image: images, caches of the build, `baton.tar` and `baton.cdx.json`.

mod bases;
mod buildah;
mod container;

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::{buildah::Buildah, container::Container};
use crate::{sbom, tools, workspace::Workspace};

/// What the image may add to the system that it builds on: the program, curl and certificates.
const MOST_ADDED_BYTES: u64 = 160 << 20;
/// Starting takes seconds on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(120);
const QUESTION: &str = r#"{"model": "baton-tiny", "max_tokens": 20, "temperature": 0,
    "messages": [{"role": "user", "content": "Mara keeps the red key. What does Mara keep?"}]}"#;
const ANSWER: &str = "red key";

/// Returns whether every step succeeded.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    ensure!(rustix::process::getuid().is_root(), "it mounts images, which takes root");
    for program in ["buildah", "debootstrap", "crun"] {
        ensure!(
            tools::on_path(program).is_some(),
            "no {program} here: `apt-get install --no-install-recommends buildah debootstrap crun`"
        );
    }
    let place = workspace.root.join("target/image");
    let buildah = Buildah::new(&workspace.root, &place)?;
    step("system", || bases::system(&buildah))?;
    step("toolchain", || bases::toolchain(&buildah, workspace))?;
    step("build", || buildah.build("baton", "deploy/Dockerfile", &["--target=run"], &workspace.root))?;
    step("size", || check_size(&buildah))?;
    let container = Container::new(&buildah, "baton", &place)?;
    step("version", || check_version(&container, workspace))?;
    step("serve", || serve(&container))?;
    drop(container);
    step("write", || {
        let (archive, list) = (place.join("baton.tar"), place.join("baton.cdx.json"));
        buildah.write("baton", &archive)?;
        fs::write(&list, sbom::text(workspace)?)?;
        Ok(format!("{}, {} MB; {}", archive.display(), fs::metadata(&archive)?.len() >> 20, list.display()))
    })?;
    Ok(true)
}

/// Prints what a step did, and how long it took.
fn step(name: &str, step: impl FnOnce() -> Result<String>) -> Result<()> {
    let started = Instant::now();
    let done = step().with_context(|| format!("image {name}"))?;
    println!("image {name:<9} ok {:>7.1} s  {done}", started.elapsed().as_secs_f32());
    Ok(())
}

fn check_size(buildah: &Buildah) -> Result<String> {
    let [all, system] = ["baton", bases::SYSTEM].map(|image| buildah.size_bytes(image));
    let (all, system) = (all?, system?);
    let added = all.saturating_sub(system);
    ensure!(
        added <= MOST_ADDED_BYTES,
        "it adds {} MB to the system, at most {} are wanted",
        added >> 20,
        MOST_ADDED_BYTES >> 20
    );
    Ok(format!("{} MB, of which {} are the system", all >> 20, system >> 20))
}

fn check_version(container: &Container<'_>, workspace: &Workspace) -> Result<String> {
    let said = container.output(&["--version"])?;
    let program = workspace.members().into_iter().find(|member| member.name() == "baton-cli");
    let version = program.context("no baton-cli")?.version();
    ensure!(said.trim() == format!("baton {version}"), "it says {said:?}, not version {version}");
    Ok(said.trim().to_owned())
}

/// The image's own command answers a question, is not root, cannot write to its root, and ends by itself.
fn serve(container: &Container<'_>) -> Result<String> {
    let mut running = container.start()?;
    running.wait_until(START_LIMIT, &["curl", "-fsS", "http://127.0.0.1:8080/readyz"])?;
    let call = [
        "curl",
        "-fsS",
        "http://127.0.0.1:8080/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        QUESTION,
    ];
    let answer: Value = serde_json::from_str(&running.exec(&call)?).context("an answer in JSON")?;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
    ensure!(text.contains(ANSWER), "asked what Mara keeps, it answers {answer}");
    let user = running.exec(&["stat", "--format=%u", "/proc/1"])?;
    ensure!(user.trim() == "10001", "it runs as user {user}");
    let capabilities = running.exec(&["grep", "CapBnd", "/proc/1/status"])?;
    ensure!(capabilities.ends_with("\t0000000000000000\n"), "it may have capabilities: {capabilities}");
    ensure!(running.exec(&["touch", "/var/tmp/x"]).is_err(), "it can write to its root file system");
    running.end()?;
    Ok(format!("user 10001, read-only root, no capability; answers {text:?}; ended by itself after SIGTERM"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_service_of_compose_builds_the_image() {
        let compose = include_str!("../../../deploy/compose.yaml");
        let keys = |key: &str| compose.lines().filter(|line| line.trim_start().starts_with(key)).count();
        assert_eq!(keys("build:"), 1, "two services would build one tag at once");
        assert_eq!((keys("pull_policy: build"), keys("pull_policy: never")), (1, 1));
        let router = compose.split("\n  router:\n").nth(1).and_then(|text| text.split("\n\n").next());
        assert!(router.is_some_and(|router| router.contains("    build:\n")), "the router builds it");
    }

    #[test]
    fn sources_are_newer_than_what_the_cache_holds() {
        let dockerfile = include_str!("../../../deploy/Dockerfile");
        let steps = dockerfile.split("\nRUN ").skip(1).filter(|step| step.contains("target=/src/target"));
        let touched = steps.map(|step| {
            let cargo = step.find("cargo build").or_else(|| step.find("cargo run"));
            step.find("-exec touch {} +").is_some_and(|touch| Some(touch) < cargo)
        });
        assert_eq!(touched.collect::<Vec<_>>(), [true, true]);
    }
}
