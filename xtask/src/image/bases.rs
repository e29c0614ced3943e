//! The images that the Dockerfile builds on, under the names that it has for them, without a registry.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::buildah::Buildah;
use crate::{tools, workspace::Workspace};

/// Debian without what only its packages' manager needs.
pub(super) const SYSTEM: &str = "docker.io/library/debian:bookworm-slim";
const RELEASE: &str = "bookworm";
const MIRROR: &str = "http://deb.debian.org/debian";

/// As the image of that name has it: without it, apt leaves its indexes in layers.
const APT: &str = "Dir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\nDPkg::Post-Invoke { \"rm -f /var/cache/apt/archives/*.deb\"; };\n";

/// What `rust:…-bookworm` has for this build. Certificates are this host's: a proxy may have added its own.
const TOOLCHAIN: &str = "FROM debian:bookworm-slim
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev \\
    && rm -rf /var/lib/apt/lists/* \\
    && cp /tmp/certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY . /usr/local/rustup/toolchain
ENV CARGO_HOME=/usr/local/cargo \\
    PATH=/usr/local/rustup/toolchain/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
";
/// Parts of a toolchain that no build reads.
const IGNORED: &str = "share/doc\nlib/rustlib/src\n";

/// Makes the system unless it is there.
pub(super) fn system(buildah: &Buildah) -> Result<String> {
    if buildah.has(SYSTEM) {
        return Ok(format!("{SYSTEM} is there"));
    }
    let files = buildah.mount("scratch")?;
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", RELEASE]).arg(&files.path).arg(MIRROR);
    let output = debootstrap.output().context("run debootstrap")?;
    let last = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
    ensure!(output.status.success(), "`{}`: {last}", tools::shown(&debootstrap));
    for folder in ["var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"]
    {
        empty(&files.path.join(folder))?;
    }
    fs::write(files.path.join("etc/apt/apt.conf.d/docker-clean"), APT)?;
    files.commit(SYSTEM)?;
    Ok(format!("{SYSTEM} of {MIRROR}"))
}

fn empty(folder: &Path) -> Result<()> {
    fs::remove_dir_all(folder)?;
    Ok(fs::create_dir(folder)?)
}

/// Makes the compiler's image unless it is there.
pub(super) fn toolchain(buildah: &Buildah, workspace: &Workspace) -> Result<String> {
    let sysroot =
        tools::said(Command::new("rustc").args(["--print", "sysroot"]).current_dir(&workspace.root));
    let sysroot = PathBuf::from(sysroot.context("run rustc")?);
    let pinned: toml::Table = fs::read_to_string(workspace.root.join("rust-toolchain.toml"))?.parse()?;
    let version = pinned["toolchain"]["channel"].as_str().context("rust-toolchain.toml names a channel")?;
    let image = format!("docker.io/library/rust:{version}-{RELEASE}");
    if buildah.has(&image) {
        return Ok(format!("{image} is there"));
    }
    let place = workspace.root.join("target/image");
    let (file, ignored) = (place.join("toolchain.Dockerfile"), place.join("toolchain.ignore"));
    fs::write(&file, TOOLCHAIN)?;
    fs::write(&ignored, IGNORED)?;
    let certificates =
        env::var("SSL_CERT_FILE").unwrap_or_else(|_| "/etc/ssl/certs/ca-certificates.crt".to_owned());
    let more = [
        format!("--ignorefile={}", ignored.display()),
        format!("--volume={certificates}:/tmp/certificates.crt:ro"),
    ];
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    buildah.build(&image, &file.display().to_string(), &more, &sysroot)?;
    Ok(format!("{image} of {}", sysroot.display()))
}
