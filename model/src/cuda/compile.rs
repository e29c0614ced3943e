//! Compiles kernels for a card's architecture by NVRTC, and keeps what came of it.
//!
//! NVRTC is loaded when the first kernel is compiled that is not kept yet: with a filled cache it need not be there.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::sys;
use thiserror::Error;

use super::kernel::{HEADERS, Source};

/// An architecture as NVRTC names it, "sm_90a".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Architecture {
    /// Compute capability.
    major: u32,
    minor: u32,
}

impl Architecture {
    /// Those that every change of a kernel is compiled for: A100, L4 and L40, H100 and H200, B200.
    pub const CHECKED: [Architecture; 4] =
        [Architecture::new(8, 0), Architecture::new(8, 9), Architecture::new(9, 0), Architecture::new(10, 0)];

    /// Of a card with this compute capability.
    pub const fn new(major: u32, minor: u32) -> Architecture {
        Architecture { major, minor }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)?;
        // wgmma is Hopper's own, and asks for the `a`: such code runs on no later card.
        if (self.major, self.minor) == (9, 0) { f.write_str("a") } else { Ok(()) }
    }
}

/// Why there is no code for a card.
#[derive(Debug, Error)]
pub enum CompileError {
    /// The library is not there, or cannot be loaded.
    #[error(
        "kernels cannot be compiled without NVRTC: {why}; install CUDA 12's NVRTC (Debian, Ubuntu: cuda-nvrtc-12-8; \
         PyPI: nvidia-cuda-nvrtc-cu12) and give its libnvrtc.so.12 or the folder of it as BATON_NVRTC"
    )]
    NoNvrtc {
        /// The loader's words.
        why: String,
    },
    /// NVRTC is older than the card.
    #[error("NVRTC {}.{} knows no {architecture}: a newer one is needed", .version.0, .version.1)]
    UnknownArchitecture {
        /// Asked for.
        architecture: String,
        /// NVRTC's.
        version: (i32, i32),
    },
    /// A kernel is broken.
    #[error("{file} does not compile for {architecture}: {log}")]
    Refused {
        /// Of the kernels.
        file: &'static str,
        /// Compiled for.
        architecture: String,
        /// NVRTC's words.
        log: String,
    },
    /// A call failed.
    #[error("{call} failed: {code:?}")]
    Failed {
        /// Of NVRTC.
        call: &'static str,
        /// Its result.
        code: sys::nvrtcResult,
    },
}

/// Code for one architecture.
pub(crate) struct Cubin {
    pub(crate) code: Vec<u8>,
    /// What the assembler said of its kernels; empty when the code was kept.
    pub(crate) log: String,
}

/// Compiled code, by what it was compiled of.
#[derive(Debug)]
pub(crate) struct CubinCache {
    /// Nothing is kept without it.
    dir: Option<PathBuf>,
}

impl CubinCache {
    pub(crate) fn new(dir: Option<PathBuf>) -> CubinCache {
        CubinCache { dir }
    }

    /// The code of `source`, compiled if it is not kept.
    ///
    /// # Errors
    /// When it must be compiled and cannot be. A cache that cannot be written is warned of.
    pub(crate) fn get(&self, source: &Source, architecture: Architecture) -> Result<Cubin, CompileError> {
        let kept = self.dir.as_ref().map(|dir| dir.join(format!("{}.cubin", key(source, architecture))));
        if let Some(code) = kept.as_ref().and_then(|path| std::fs::read(path).ok()) {
            return Ok(Cubin { code, log: String::new() });
        }
        let cubin = compile(source, architecture)?;
        if let Some(path) = kept
            && let Err(error) = keep(&path, &cubin.code)
        {
            tracing::warn!(path = %path.display(), %error, "a compiled kernel cannot be kept");
        }
        Ok(cubin)
    }
}

/// Written whole or not at all.
fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().expect("it is in the cache's directory");
    std::fs::create_dir_all(dir)?;
    let new = path.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    let mut file = std::fs::File::create(&new)?;
    file.write_all(code).and_then(|()| std::fs::rename(&new, path)).inspect_err(|_| {
        // The error that is told is the one before.
        let _ = std::fs::remove_file(&new);
    })
}

/// Of all that the code is made of.
fn key(source: &Source, architecture: Architecture) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(source.text);
    HEADERS.iter().for_each(|(_, header)| add(header));
    options(source, architecture).iter().for_each(|option| add(option));
    hasher.finalize().to_hex()[..32].to_owned()
}

fn options(source: &Source, architecture: Architecture) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".into(),
        // Register use and spills, in the log.
        "--ptxas-options=-v".into(),
    ];
    options.extend(source.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// A program of NVRTC's.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, and destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn compile(source: &Source, architecture: Architecture) -> Result<Cubin, CompileError> {
    load()?;
    let text = |text: &str| CString::new(text).expect("sources have no zeroes");
    let (program_text, name) = (text(source.text), text(source.file));
    let (header_names, headers): (Vec<CString>, Vec<CString>) =
        HEADERS.iter().map(|(name, header)| (text(name), text(header))).unzip();
    let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let options_text: Vec<CString> =
        options(source, architecture).iter().map(|option| text(option)).collect();
    let options = pointers(&options_text);
    let mut program = Program(ptr::null_mut());
    // SAFETY: all strings end in zero and outlive the calls; NVRTC is there.
    unsafe {
        let created = sys::nvrtcCreateProgram(
            &mut program.0,
            program_text.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            pointers(&headers).as_ptr(),
            pointers(&header_names).as_ptr(),
        );
        check("nvrtcCreateProgram", created)?;
        let compiled = sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr());
        let log = read(&program, sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog)
            .map_err(|code| CompileError::Failed { call: "nvrtcGetProgramLog", code })?;
        let log = CStr::from_bytes_until_nul(&log).map_or(String::new(), |log| log.to_string_lossy().into());
        match compiled {
            sys::nvrtcResult::NVRTC_SUCCESS => {}
            sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION if log.contains("gpu-architecture") => {
                let (architecture, version) = (architecture.to_string(), version()?);
                return Err(CompileError::UnknownArchitecture { architecture, version });
            }
            sys::nvrtcResult::NVRTC_ERROR_COMPILATION => {
                let (file, architecture) = (source.file, architecture.to_string());
                return Err(CompileError::Refused { file, architecture, log });
            }
            code => return Err(CompileError::Failed { call: "nvrtcCompileProgram", code }),
        }
        let code = read(&program, sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
            .map_err(|code| CompileError::Failed { call: "nvrtcGetCUBIN", code })?;
        Ok(Cubin { code, log })
    }
}

/// Something of a program, of a size that it is asked for first.
///
/// # Safety
/// The functions belong together: the second writes as many bytes as the first says.
unsafe fn read(
    program: &Program,
    size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
    get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
) -> Result<Vec<u8>, sys::nvrtcResult> {
    let ok = |code| match code {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        code => Err(code),
    };
    let mut num_bytes = 0;
    // SAFETY: the program is alive, and the out pointers have room, by the caller's word.
    unsafe {
        ok(size(program.0, &mut num_bytes))?;
        let mut bytes = vec![0u8; num_bytes];
        ok(get(program.0, bytes.as_mut_ptr().cast()))?;
        Ok(bytes)
    }
}

fn version() -> Result<(i32, i32), CompileError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the out pointers are valid, and NVRTC is there.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major, minor))
}

fn check(call: &'static str, code: sys::nvrtcResult) -> Result<(), CompileError> {
    match code {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        code => Err(CompileError::Failed { call, code }),
    }
}

/// Sees to it that NVRTC can be called: cudarc panics where it is absent, and looks for it by its name only.
fn load() -> Result<(), CompileError> {
    if let Some(path) = std::env::var_os("BATON_NVRTC") {
        let path = PathBuf::from(path);
        let path = if path.is_dir() { path.join("libnvrtc.so.12") } else { path };
        let name = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| CompileError::NoNvrtc { why: "BATON_NVRTC is not a path".into() })?;
        // SAFETY: the path ends in zero. It stays loaded: who asks for its name from now on gets it.
        let library: *mut c_void = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if library.is_null() {
            // SAFETY: `dlopen` has failed in this thread, and left its words.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(CompileError::NoNvrtc { why: why.to_string_lossy().into_owned() });
        }
    }
    // SAFETY: loads the library, if there is one, as any program does that compiles for CUDA.
    match unsafe { sys::is_culib_present() } {
        true => Ok(()),
        false => Err(CompileError::NoNvrtc { why: "libnvrtc.so.12 not found".into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_named_as_nvrtc_does() {
        let names = Architecture::CHECKED.map(|architecture| architecture.to_string());
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100"]);
    }

    #[test]
    fn what_is_kept_needs_no_compiler() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(Some(dir.path().join("cubins")));
        // Nobody compiles this.
        let source = Source { file: "x.cu", text: "not C++", defines: vec![("HEAD_DIM", 64)] };
        let architecture = Architecture::new(9, 0);
        let path = dir.path().join("cubins").join(format!("{}.cubin", key(&source, architecture)));
        keep(&path, b"code").unwrap();
        assert_eq!(cache.get(&source, architecture).unwrap().code, b"code");
        let others = [
            key(&source, Architecture::new(8, 0)),
            key(&Source { defines: vec![("HEAD_DIM", 128)], ..source.clone() }, architecture),
            key(&Source { text: "other C++", ..source.clone() }, architecture),
        ];
        assert!(others.iter().all(|other| *other != key(&source, architecture)));
    }

    #[test]
    fn what_is_broken_or_missing_is_said() {
        let source = Source { file: "x.cu", text: "not C++", defines: vec![] };
        let Err(error) = CubinCache::new(None).get(&source, Architecture::new(9, 0)) else {
            panic!("it compiles");
        };
        let text = error.to_string();
        match error {
            CompileError::NoNvrtc { .. } => assert!(text.contains("nvidia-cuda-nvrtc-cu12"), "{text}"),
            CompileError::Refused { .. } => {
                assert!(text.starts_with("x.cu does not compile for sm_90a: "), "{text}");
            }
            other => panic!("{other}"),
        }
    }
}
