//! Libraries out of Python's wheels, which `setup` unpacks below target/. Programs load them from there; they are installed into
//! no environment.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::tools;

/// A wheel of PyPI, and where it is unpacked.
pub(crate) struct Wheel {
    /// Its name and version.
    spec: &'static str,
    /// The folder of this checkout that holds what it brings.
    folder: fn(&Path) -> PathBuf,
    /// The library in there.
    library: fn(&Path) -> PathBuf,
    /// Parts that are not used.
    extras: &'static [&'static str],
}

/// NCCL's library. Neither a device nor CUDA is needed to load it.
pub(crate) const NCCL: Wheel = Wheel {
    spec: "nvidia-nccl-cu12==2.32.3",
    folder: tools::nccl,
    library: tools::nccl_library,
    extras: &[],
};

/// CUDA's compiler as a library. It compiles for any card, and needs none.
pub(crate) const NVRTC: Wheel = Wheel {
    spec: "nvidia-cuda-nvrtc-cu12==12.9.86",
    folder: |root| root.join("target/nvrtc"),
    library: tools::nvrtc,
    extras: &[],
};

/// NIXL's libraries, with the UCX that belongs to them. CUDA is not needed to use them. The library is that with the C API.
pub(crate) const NIXL: Wheel = Wheel {
    spec: "nixl-cu12==1.5.1",
    folder: tools::nixl,
    library: |root| tools::nixl(root).join(".nixl_cu12.mesonpy.libs/libnixl_capi.so"),
    extras: &["nixl_ep_cu12", "nixl_cu12"],
};

/// The file that says what was unpacked into a folder.
const STAMP: &str = "wheel.installed";

impl Wheel {
    /// The library, if it is of this version.
    pub(crate) fn find(&self, root: &Path) -> Option<String> {
        let unpacked = fs::read_to_string((self.folder)(root).join(STAMP)).ok();
        let library = (self.library)(root);
        let is_found = unpacked.as_deref() == Some(self.spec) && library.exists();
        is_found.then(|| library.display().to_string())
    }

    /// Unpacks it without the parts that are not used.
    pub(crate) fn install(&self, root: &Path) -> Result<()> {
        let (spec, folder) = (self.spec, (self.folder)(root));
        println!("setup: unpacking {spec} from PyPI into {}", folder.display());
        let python = tools::venv(root).join("bin/python");
        let new = folder.with_extension("new");
        remove(&new)?;
        let pip =
            ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"];
        tools::run_shown(Command::new(python).args(pip).arg("--target").arg(&new).arg(spec))
            .context("skipped")?;
        for extra in self.extras {
            fs::remove_dir_all(new.join(extra)).with_context(|| format!("remove {extra}"))?;
        }
        fs::write(new.join(STAMP), spec)?;
        // Until now, another version stays: tests can still load it if this one cannot be fetched.
        remove(&folder)?;
        // The last step, so that the folder exists only if every step before succeeded.
        fs::rename(&new, &folder).with_context(|| format!("rename {}", new.display()))
    }
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_of_another_version_is_missing() {
        let root = std::env::temp_dir().join(format!("baton-xtask-wheels-{}", std::process::id()));
        for wheel in [NCCL, NVRTC, NIXL] {
            let library = (wheel.library)(&root);
            fs::create_dir_all(library.parent().expect("it is in a folder")).unwrap();
            fs::write(&library, "").unwrap();
            assert_eq!(wheel.find(&root), None, "{}: it is not known which one", wheel.spec);
            let stamp = (wheel.folder)(&root).join(STAMP);
            fs::write(&stamp, format!("{}.1", wheel.spec)).unwrap();
            assert_eq!(wheel.find(&root), None, "{}: another one", wheel.spec);
            fs::write(&stamp, wheel.spec).unwrap();
            assert_eq!(wheel.find(&root), Some(library.display().to_string()));
            fs::remove_file(&library).unwrap();
            assert_eq!(wheel.find(&root), None, "{}: without its library", wheel.spec);
        }
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn images_have_the_libraries_that_are_tested() {
        let dockerfile = include_str!("../../deploy/Dockerfile");
        for wheel in [NIXL, NVRTC, NCCL] {
            assert!(dockerfile.contains(wheel.spec), "deploy/Dockerfile has not {}", wheel.spec);
        }
    }
}
