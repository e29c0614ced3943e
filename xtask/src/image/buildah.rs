//! buildah with images and caches in a folder of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::tools;

pub(super) struct Buildah {
    root: PathBuf,
    place: PathBuf,
}

impl Buildah {
    /// `root` is the workspace's, where commands run.
    pub(super) fn new(root: &Path, place: &Path) -> Result<Buildah> {
        fs::create_dir_all(place.join("tmp"))?;
        let buildah = Buildah { root: root.to_owned(), place: place.to_owned() };
        buildah.remove_containers()?;
        Ok(buildah)
    }

    /// A build that was interrupted leaves its own.
    fn remove_containers(&self) -> Result<()> {
        self.run(&["rm", "--all"]).map(drop)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("buildah");
        command.current_dir(&self.root);
        command.arg("--root").arg(self.place.join("storage")).arg("--runroot").arg(self.place.join("run"));
        // The caches of `RUN --mount=type=cache` are there, too.
        command.env("TMPDIR", self.place.join("tmp"));
        command
    }

    /// Runs a subcommand; what it says.
    pub(super) fn run(&self, args: &[&str]) -> Result<String> {
        Ok(tools::output(self.command().args(args))?.trim().to_owned())
    }

    pub(super) fn has(&self, image: &str) -> bool {
        self.run(&["inspect", "--type=image", "--format={{.FromImageID}}", image]).is_ok()
    }

    /// Builds a Dockerfile; says how. The build's own output goes to the terminal.
    pub(super) fn build(&self, tag: &str, file: &str, more: &[&str], context: &Path) -> Result<String> {
        let mut command = self.command();
        // Without a runtime that makes cgroups; steps that are unchanged are not run again.
        command.args(["bud", "--isolation=chroot", "--pull=never", "--layers", "--tag", tag, "--file", file]);
        command.args(more).arg(context);
        let status = command.status().context("run buildah")?;
        ensure!(status.success(), "`{}` failed with {status}", tools::shown(&command));
        Ok(format!("{file} as {tag}"))
    }

    /// The image's configuration as the OCI image specification has it: user, environment, entry point.
    pub(super) fn config(&self, image: &str) -> Result<Value> {
        let inspected: Value = serde_json::from_str(&self.run(&["inspect", "--type=image", image])?)?;
        Ok(inspected["OCIv1"]["config"].clone())
    }

    /// The bytes of its files.
    pub(super) fn size_bytes(&self, image: &str) -> Result<u64> {
        let container = self.mount(image)?;
        let mut du = Command::new("du");
        du.args(["--summarize", "--bytes", "--one-file-system"]).arg(&container.path);
        let said = tools::said(&mut du).context("run du")?;
        said.split_whitespace().next().and_then(|size| size.parse().ok()).context("du names no size")
    }

    /// Mounts a container of the image, until that is dropped.
    pub(super) fn mount(&self, image: &str) -> Result<Mounted<'_>> {
        let name = self.run(&["from", "--pull=never", image])?;
        let mut mounted = Mounted { buildah: self, name, path: PathBuf::new() };
        mounted.path = PathBuf::from(self.run(&["mount", &mounted.name])?);
        Ok(mounted)
    }

    /// Writes an image as an OCI archive.
    pub(super) fn write(&self, image: &str, archive: &Path) -> Result<()> {
        // An archive of the same name would be added to.
        let _ = fs::remove_file(archive);
        self.run(&["push", "--quiet", image, &format!("oci-archive:{}:{image}", archive.display())])?;
        Ok(())
    }
}

impl Drop for Buildah {
    fn drop(&mut self) {
        if let Err(error) = self.remove_containers() {
            eprintln!("image: {error:#}");
        }
        // buildah leaves this folder mounted on itself; it is not mounted if nothing was.
        let _ = tools::said(Command::new("umount").arg("--quiet").arg(self.place.join("storage/overlay")));
    }
}

/// A container that does not run: files of an image that can be changed.
pub(super) struct Mounted<'a> {
    buildah: &'a Buildah,
    name: String,
    pub(super) path: PathBuf,
}

impl Mounted<'_> {
    /// Makes an image of the files.
    pub(super) fn commit(self, tag: &str) -> Result<()> {
        self.buildah.run(&["commit", "--quiet", &self.name, tag])?;
        Ok(())
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.buildah.run(&["rm", &self.name]) {
            eprintln!("image: {error:#}");
        }
    }
}
