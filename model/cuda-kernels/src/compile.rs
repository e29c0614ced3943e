//! Finds the compiled code of kernels for a GPU's architecture, or compiles it with NVRTC.
//!
//! Code has a name, which covers everything that affects it. The look-up asks for that name in two places: among the
//! kernels that are installed with the program ([`crate::shipped`]), and in a cache on disk. NVRTC is loaded only for code that
//! neither has, so it need not be installed.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use baton_cuda::nvrtc::{Compiled, Nvrtc, NvrtcError};
use baton_cuda::{CudaVersion, NoLibrary, majors};
use thiserror::Error;

use crate::kernel::{KernelCode, KernelFiles, KernelSource};
use crate::shipped::ShippedCubins;

/// An architecture with NVRTC's name for it, "sm_90a".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Architecture {
    /// Compute capability.
    major: u32,
    minor: u32,
}

impl Architecture {
    /// `cuda-check` compiles for these, and releases install the code: A100, L4 and L40, H100 and H200, B200, and GeForce
    /// and RTX PRO of Blackwell.
    pub const CHECKED: [Architecture; 5] = [
        Architecture::new(8, 0),
        Architecture::new(8, 9),
        Architecture::new(9, 0),
        Architecture::new(10, 0),
        Architecture::new(12, 0),
    ];

    /// The architecture of a GPU with this compute capability.
    pub const fn new(major: u32, minor: u32) -> Architecture {
        Architecture { major, minor }
    }

    /// The major number of the compute capability.
    pub fn major(self) -> u32 {
        self.major
    }

    /// The architectures whose code runs on this one, the best first: this one, and the first of its major version
    /// ("CUDA C++ Programming Guide", binary compatibility).
    fn runs(self) -> impl Iterator<Item = Architecture> {
        let first = Architecture { minor: 0, ..self };
        [self].into_iter().chain((first != self).then_some(first))
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)?;
        // wgmma exists on Hopper only and needs the suffix `a`. Such code runs on no later GPU.
        if (self.major, self.minor) == (9, 0) { f.write_str("a") } else { Ok(()) }
    }
}

/// Why there is no code for a GPU.
#[derive(Debug, Error)]
pub enum CompileError {
    /// The library is missing, or the driver cannot run its code.
    #[error("kernels cannot be compiled: {0}")]
    NoNvrtc(#[from] NoLibrary),
    /// NVRTC is older than the GPU.
    #[error("NVRTC {version} does not support {architecture}: install a newer version")]
    UnknownArchitecture {
        /// The architecture that was requested.
        architecture: String,
        /// NVRTC's version.
        version: CudaVersion,
    },
    /// NVRTC rejected the text of a kernel.
    #[error("{file} does not compile for {architecture}: {log}")]
    Refused {
        /// The kernel file.
        file: &'static str,
        /// The architecture that was requested.
        architecture: String,
        /// NVRTC's log.
        log: String,
    },
    /// A call to NVRTC failed.
    #[error(transparent)]
    Failed(NvrtcError),
}

/// Code for one architecture.
pub struct Cubin {
    pub code: Vec<u8>,
    /// The assembler's report on the kernels. Empty when the code was in the cache.
    pub log: String,
}

/// The look-up of compiled code. Names cover the source, its options and NVRTC's major version: older drivers cannot
/// run code of a newer NVRTC.
#[derive(Debug)]
pub struct CubinCache {
    files: KernelFiles,
    /// The cache on disk. `None`: nothing is cached.
    dir: Option<PathBuf>,
    /// `None`: no kernels are installed with the program.
    shipped: Option<ShippedCubins>,
    /// The version of the driver that will run the code, if there is one.
    driver: Option<CudaVersion>,
}

impl CubinCache {
    /// Reads the file of installed kernels. One that cannot be read only logs a warning.
    pub fn new(code: KernelCode, driver: Option<CudaVersion>) -> CubinCache {
        let open = |path: PathBuf| {
            ShippedCubins::open(&path).inspect_err(|error| {
                tracing::warn!(path = %path.display(), %error, "the installed kernels are not used");
            })
        };
        let shipped = code.shipped.and_then(|path| open(path).ok());
        CubinCache { files: code.files, dir: code.cache_dir, shipped, driver }
    }

    /// The code of `source`. It is compiled if it is neither installed nor in the cache.
    ///
    /// # Errors
    /// When the compiler is missing or fails. A cache that cannot be written only logs a warning.
    pub fn get(&self, source: &KernelSource, architecture: Architecture) -> Result<Cubin, CompileError> {
        if let Some(code) = self.found(source, architecture) {
            return Ok(Cubin { code, log: String::new() });
        }
        let nvrtc = Nvrtc::load(None, self.driver)?;
        let cubin = compile(&nvrtc, &self.files, source, architecture)?;
        let name = name(&self.files, source, architecture, nvrtc.version().major);
        if let Some(path) = self.dir.as_ref().map(|dir| dir.join(name))
            && let Err(error) = keep(&path, &cubin.code)
        {
            tracing::warn!(path = %path.display(), %error, "a compiled kernel could not be cached: it is compiled again at the next start");
        }
        Ok(cubin)
    }

    /// Code that was compiled before. The newest version that the driver runs comes first.
    fn found(&self, source: &KernelSource, architecture: Architecture) -> Option<Vec<u8>> {
        let of_major = |major| {
            let name = |architecture| name(&self.files, source, architecture, major);
            let shipped = |shipped: &ShippedCubins| architecture.runs().find_map(|it| shipped.get(&name(it)));
            let cached = |dir: &PathBuf| kept_at(&dir.join(name(architecture)));
            self.shipped.as_ref().and_then(shipped).or_else(|| self.dir.as_ref().and_then(cached))
        };
        majors(self.driver).find_map(of_major)
    }
}

/// Code of one source for one architecture.
pub struct NamedCubin {
    pub source: KernelSource,
    pub architecture: Architecture,
    /// The name by which [`CubinCache`] looks it up.
    pub name: String,
    pub cubin: Cubin,
}

/// Compiles all `sources` for all `architectures`, on all processors. Code that `code` has is not compiled again. The
/// result is in the order of the sources.
///
/// # Errors
/// When NVRTC is missing, or a kernel does not compile.
pub fn compile_all(
    code: &KernelCode,
    sources: &[KernelSource],
    architectures: &[Architecture],
) -> Result<Vec<NamedCubin>, CompileError> {
    let version = Nvrtc::load(None, None)?.version();
    let cache = CubinCache::new(code.clone(), Some(version));
    let jobs: Vec<(&KernelSource, Architecture)> = sources
        .iter()
        .flat_map(|source| architectures.iter().map(move |&architecture| (source, architecture)))
        .collect();
    let next = AtomicUsize::new(0);
    let compile = || {
        let take = || {
            let idx = next.fetch_add(1, Ordering::Relaxed);
            jobs.get(idx).map(|job| (idx, *job))
        };
        let mut compiled = Vec::new();
        while let Some((idx, (source, architecture))) = take() {
            let name = name(&code.files, source, architecture, version.major);
            let cubin = cache.get(source, architecture)?;
            compiled.push((idx, NamedCubin { source: source.clone(), architecture, name, cubin }));
        }
        Ok::<_, CompileError>(compiled)
    };
    let compiled = thread::scope(|scope| {
        let num_threads = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(compile)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
    })?;
    let mut compiled: Vec<(usize, NamedCubin)> = compiled.into_iter().flatten().collect();
    compiled.sort_by_key(|(idx, _)| *idx);
    Ok(compiled.into_iter().map(|(_, cubin)| cubin).collect())
}

/// Code that [`keep`] wrote. Returns `None` for a damaged file, for example after a crash of the machine.
fn kept_at(path: &Path) -> Option<Vec<u8>> {
    let mut code = std::fs::read(path).ok()?;
    let hash = code.split_off(code.len().saturating_sub(blake3::OUT_LEN));
    if blake3::hash(&code).as_bytes() != hash.as_slice() {
        tracing::warn!(path = %path.display(), "a cached kernel is damaged and is compiled again");
        return None;
    }
    Some(code)
}

/// Writes the code and its hash. The file appears complete or not at all.
fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().expect("it is in the cache's directory");
    std::fs::create_dir_all(dir)?;
    let new = path.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    let mut file = std::fs::File::create(&new)?;
    let written = file.write_all(code).and_then(|()| file.write_all(blake3::hash(code).as_bytes()));
    written.and_then(|()| std::fs::rename(&new, path)).inspect_err(|_| {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&new);
    })
}

/// The name of code: of its file in the cache, and of its entry among installed kernels.
fn name(files: &KernelFiles, source: &KernelSource, architecture: Architecture, major: u32) -> String {
    format!("{}.cuda{major}.cubin", key(files, source, architecture))
}

/// The hash of everything that affects the code.
fn key(files: &KernelFiles, source: &KernelSource, architecture: Architecture) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(files.text(source.file));
    files.headers().iter().for_each(|(_, header)| add(header));
    options(source, architecture).iter().for_each(|option| add(option));
    hasher.finalize().to_hex()[..32].to_owned()
}

fn options(source: &KernelSource, architecture: Architecture) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".into(),
        // Adds registers and spills to the log.
        "--ptxas-options=-v".into(),
    ];
    options.extend(source.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

fn compile(
    nvrtc: &Nvrtc,
    files: &KernelFiles,
    source: &KernelSource,
    architecture: Architecture,
) -> Result<Cubin, CompileError> {
    let options = options(source, architecture);
    let architecture = || architecture.to_string();
    match nvrtc.compile(source.file, files.text(source.file), &files.headers(), &options) {
        Ok(Compiled { cubin: code, log }) => Ok(Cubin { code, log }),
        Err(NvrtcError::Program(log)) => {
            Err(CompileError::Refused { file: source.file, architecture: architecture(), log })
        }
        Err(NvrtcError::Option(log)) if log.contains("gpu-architecture") => {
            Err(CompileError::UnknownArchitecture { architecture: architecture(), version: nvrtc.version() })
        }
        Err(error) => Err(CompileError::Failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped;

    #[test]
    fn architectures_are_named_as_nvrtc_does() {
        let names = Architecture::CHECKED.map(|architecture| architecture.to_string());
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]);
    }

    const ARCHITECTURE: Architecture = Architecture::new(9, 0);

    /// A source that does not compile.
    fn broken() -> KernelSource {
        KernelSource { file: "x.cu", defines: vec![("HEAD_DIM", 64)] }
    }

    const FILES: KernelFiles = KernelFiles::new(&[("x.cu", "not C++"), ("x.cuh", "a header")]);

    fn code(cache_dir: Option<PathBuf>) -> KernelCode {
        KernelCode { files: FILES, cache_dir, shipped: None }
    }

    fn name_of(major: u32) -> String {
        name(&FILES, &broken(), ARCHITECTURE, major)
    }

    #[test]
    fn cached_code_needs_no_compiler() {
        let dir = tempfile::tempdir().unwrap();
        let cubins = dir.path().join("cubins");
        let cache = CubinCache::new(code(Some(cubins.clone())), None);
        let key_of_source = key(&FILES, &broken(), ARCHITECTURE);
        keep(&cubins.join(name_of(12)), b"code").unwrap();
        assert_eq!(cache.get(&broken(), ARCHITECTURE).unwrap().code, b"code");
        let others = [
            key(&FILES, &broken(), Architecture::new(8, 0)),
            key(&FILES, &KernelSource { defines: vec![("HEAD_DIM", 128)], ..broken() }, ARCHITECTURE),
            key(&KernelFiles::new(&[("x.cu", "other C++"), ("x.cuh", "a header")]), &broken(), ARCHITECTURE),
            key(&KernelFiles::new(&[("x.cu", "not C++"), ("x.cuh", "another")]), &broken(), ARCHITECTURE),
        ];
        assert!(others.iter().all(|other| *other != key_of_source));
    }

    #[test]
    fn code_of_a_newer_compiler_is_not_for_an_older_driver() {
        let dir = tempfile::tempdir().unwrap();
        let cache =
            |major| CubinCache::new(code(Some(dir.path().to_owned())), Some(CudaVersion { major, minor: 4 }));
        let kept = |major| cache(major).get(&broken(), ARCHITECTURE).ok().map(|cubin| cubin.code);
        let keep_of = |major| {
            keep(&dir.path().join(name_of(major)), format!("of {major}").as_bytes()).unwrap();
        };
        keep_of(13);
        assert_eq!([kept(12), kept(13), kept(14)], [None, Some(b"of 13".into()), Some(b"of 13".into())]);
        std::fs::remove_dir_all(dir.path()).unwrap();
        keep_of(12);
        assert_eq!([kept(12), kept(13)], [Some(b"of 12".into()), Some(b"of 12".into())]);
    }

    #[test]
    fn installed_code_needs_neither_compiler_nor_cache() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(shipped::FILE_NAME);
        let of = |architecture, major| {
            let code = format!("{architecture} of {major}").into_bytes();
            (name(&FILES, &broken(), architecture, major), code)
        };
        let [ampere, hopper] = [Architecture::new(8, 0), Architecture::new(9, 0)];
        let cubins = [of(ampere, 12), of(hopper, 12), of(hopper, 13)];
        shipped::write(&path, cubins.iter().map(|(name, code)| (name.as_str(), code.as_slice()))).unwrap();
        let found = |driver, architecture| {
            let code = KernelCode { shipped: Some(path.clone()), ..code(None) };
            let cache = CubinCache::new(code, Some(CudaVersion { major: driver, minor: 4 }));
            cache.get(&broken(), architecture).ok().map(|it| String::from_utf8(it.code).unwrap())
        };
        assert_eq!(found(12, hopper).as_deref(), Some("sm_90a of 12"));
        assert_eq!(found(13, hopper).as_deref(), Some("sm_90a of 13"));
        assert_eq!(found(13, ampere).as_deref(), Some("sm_80 of 12"));
        // A10 runs code of A100, B300 none of H100.
        assert_eq!(found(12, Architecture::new(8, 6)).as_deref(), Some("sm_80 of 12"));
        assert_eq!(found(12, Architecture::new(10, 3)), None);
        std::fs::write(&path, "damaged").unwrap();
        assert_eq!(found(12, hopper), None);
    }

    #[test]
    fn damaged_code_is_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("code.cubin");
        keep(&path, b"code").unwrap();
        assert_eq!(kept_at(&path).as_deref(), Some(&b"code"[..]));
        let whole = std::fs::read(&path).unwrap();
        let inverted = [&[!whole[0]], &whole[1..]].concat();
        for damaged in [&[][..], &whole[..10], &whole[..whole.len() - 1], &inverted] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(kept_at(&path), None);
        }
    }

    #[test]
    fn broken_kernels_and_missing_compilers_are_reported() {
        let Err(error) = CubinCache::new(code(None), None).get(&broken(), ARCHITECTURE) else {
            panic!("it compiles");
        };
        let text = error.to_string();
        match error {
            CompileError::NoNvrtc { .. } => {
                let words = ["nvidia-cuda-nvrtc)", "nvidia-cuda-nvrtc-cu12)", "BATON_NVRTC"];
                assert!(words.iter().all(|word| text.contains(word)), "{text}");
            }
            CompileError::Refused { .. } => {
                assert!(text.starts_with("x.cu does not compile for sm_90a: "), "{text}");
            }
            other => panic!("{other}"),
        }
    }
}
