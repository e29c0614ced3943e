//! NVRTC, loaded at run time. This module does not know the programs that callers compile.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    mem::ManuallyDrop,
    path::Path,
    ptr,
};

use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::Library;
use thiserror::Error;

use crate::library::{CudaVersion, NoLibrary, Part, api, text, words};

const PART: Part = Part {
    name: "NVRTC",
    stem: "libnvrtc",
    variable: "BATON_NVRTC",
    packages: [
        "Debian, Ubuntu: cuda-nvrtc-13-0; PyPI: nvidia-cuda-nvrtc",
        "Debian, Ubuntu: cuda-nvrtc-12-8; PyPI: nvidia-cuda-nvrtc-cu12",
    ],
};

const SUCCESS: c_int = 0;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;

api! {
    struct Api {
        version: "nvrtcVersion" fn(*mut c_int, *mut c_int) -> c_int;
        create: "nvrtcCreateProgram" fn(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ) -> c_int;
        destroy: "nvrtcDestroyProgram" fn(*mut nvrtcProgram) -> c_int;
        compile: "nvrtcCompileProgram" fn(nvrtcProgram, c_int, *const *const c_char) -> c_int;
        log_size: "nvrtcGetProgramLogSize" fn(nvrtcProgram, *mut usize) -> c_int;
        log: "nvrtcGetProgramLog" fn(nvrtcProgram, *mut c_char) -> c_int;
        cubin_size: "nvrtcGetCUBINSize" fn(nvrtcProgram, *mut usize) -> c_int;
        cubin: "nvrtcGetCUBIN" fn(nvrtcProgram, *mut c_char) -> c_int;
        error_string: "nvrtcGetErrorString" fn(c_int) -> *const c_char;
    }
}

/// The library.
pub struct Nvrtc {
    api: Api,
    version: CudaVersion,
    _library: ManuallyDrop<Library>,
}

/// Compiled code, and the compiler's log.
pub struct Compiled {
    /// Code for the architecture in the options.
    pub cubin: Vec<u8>,
    /// Warnings, and the assembler's report.
    pub log: String,
}

/// Why NVRTC did not compile a program.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NvrtcError {
    /// The program is broken. Contains NVRTC's log.
    #[error("{0}")]
    Program(String),
    /// An option, or its value, does not exist. Contains NVRTC's log.
    #[error("{0}")]
    Option(String),
    /// A call failed.
    #[error("{call} failed: {why}")]
    Failed {
        /// The function.
        call: &'static str,
        /// NVRTC's message.
        why: String,
    },
}

impl Nvrtc {
    /// Loads the newest version whose code the driver supports: from `place` (a file or a folder), from
    /// `BATON_NVRTC`, from the system's loader, or from a toolkit.
    ///
    /// # Errors
    /// When no version is found, or `place` holds another library.
    pub fn load(place: Option<&Path>, driver: Option<CudaVersion>) -> Result<Nvrtc, NoLibrary> {
        let (library, path) = PART.load(place, driver)?;
        let api = Api::find(&library).map_err(|error| PART.absent(driver, words(&error)))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the out pointers are valid. The function fails for invalid pointers only.
        unsafe { (api.version)(&mut major, &mut minor) };
        let version = CudaVersion { major: major as u32, minor: minor as u32 };
        PART.check(&path, version, driver)?;
        Ok(Nvrtc { api, version, _library: library })
    }

    /// The version of its toolkit.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// Compiles `program` as a file `name` that may include `headers` (names and texts). The options must name a real
    /// architecture, so that the result is machine code.
    ///
    /// # Errors
    /// When the program does not compile.
    pub fn compile(
        &self,
        name: &str,
        program: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Compiled, NvrtcError> {
        let text = |text: &str| CString::new(text).expect("sources have no zeroes");
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (program_text, name) = (text(program), text(name));
        let (header_names, headers): (Vec<CString>, Vec<CString>) =
            headers.iter().map(|(name, header)| (text(name), text(header))).unzip();
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
        let mut program = Program { api: &self.api, program: ptr::null_mut() };
        // SAFETY: all strings end in zero and outlive the calls.
        unsafe {
            let created = (self.api.create)(
                &mut program.program,
                program_text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                pointers(&headers).as_ptr(),
                pointers(&header_names).as_ptr(),
            );
            self.check("nvrtcCreateProgram", created)?;
            let compiled =
                (self.api.compile)(program.program, options.len() as c_int, pointers(&options).as_ptr());
            let log = program.read(self.api.log_size, self.api.log);
            let log = log.map_err(|code| self.failed("nvrtcGetProgramLog", code))?;
            let log =
                CStr::from_bytes_until_nul(&log).map_or(String::new(), |log| log.to_string_lossy().into());
            match compiled {
                INVALID_OPTION => return Err(NvrtcError::Option(log)),
                COMPILATION => return Err(NvrtcError::Program(log)),
                code => self.check("nvrtcCompileProgram", code)?,
            }
            let cubin = program.read(self.api.cubin_size, self.api.cubin);
            Ok(Compiled { cubin: cubin.map_err(|code| self.failed("nvrtcGetCUBIN", code))?, log })
        }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), NvrtcError> {
        match code {
            SUCCESS => Ok(()),
            code => Err(self.failed(call, code)),
        }
    }

    fn failed(&self, call: &'static str, code: c_int) -> NvrtcError {
        // SAFETY: every number has a static text.
        NvrtcError::Failed { call, why: unsafe { text((self.api.error_string)(code)) } }
    }
}

/// A program of NVRTC.
struct Program<'a> {
    api: &'a Api,
    program: nvrtcProgram,
}

impl Program<'_> {
    /// Reads data of the program: one function returns its size, the other copies it.
    ///
    /// # Safety
    /// The functions belong together: the second one writes as many bytes as the first one returns.
    unsafe fn read(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_int,
        get: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let ok = |code| if code == SUCCESS { Ok(()) } else { Err(code) };
        let mut num_bytes = 0;
        // SAFETY: the program is alive. The caller guarantees that the out pointers have room.
        unsafe {
            ok(size(self.program, &mut num_bytes))?;
            let mut bytes = vec![0u8; num_bytes];
            ok(get(self.program, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: `compile` created it, or it is null, which only returns an error. It is destroyed once.
        unsafe { (self.api.destroy)(&mut self.program) };
    }
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, process::Command};

    use tempfile::TempDir;

    use super::*;

    /// A folder of libraries with all of NVRTC's names that report a version.
    struct FakeLibraries(TempDir);

    impl FakeLibraries {
        fn new(majors: &[u32]) -> FakeLibraries {
            let folder = FakeLibraries(TempDir::new().unwrap());
            for major in majors {
                let mut text = format!(
                    "extern \"C\" int nvrtcVersion(int *major, int *minor) {{ *major = {major}; *minor = 4; return 0; }}"
                );
                for name in [
                    "CreateProgram",
                    "DestroyProgram",
                    "CompileProgram",
                    "GetProgramLogSize",
                    "GetProgramLog",
                    "GetCUBINSize",
                    "GetCUBIN",
                    "GetErrorString",
                ] {
                    text += &format!("extern \"C\" int nvrtc{name}() {{ return 11; }}");
                }
                let source = folder.0.path().join("nvrtc.cpp");
                std::fs::write(&source, text).unwrap();
                let mut command = Command::new("g++");
                command.args(["-shared", "-fPIC", "-o"]).arg(folder.file(*major)).arg(source);
                assert!(command.status().expect("g++ is there: `cargo xtask setup` installs it").success());
            }
            folder
        }

        fn file(&self, major: u32) -> PathBuf {
            self.0.path().join(format!("libnvrtc.so.{major}"))
        }
    }

    fn load(place: &Path, driver: Option<u32>) -> Result<u32, String> {
        let driver = driver.map(|major| CudaVersion { major, minor: 2 });
        match Nvrtc::load(Some(place), driver) {
            Ok(nvrtc) => Ok(nvrtc.version().major),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn the_newest_version_that_the_driver_supports_is_loaded() {
        let both = FakeLibraries::new(&[12, 13]);
        for (driver, expected) in [(None, 13), (Some(12), 12), (Some(13), 13), (Some(14), 13)] {
            assert_eq!(load(both.0.path(), driver), Ok(expected), "{driver:?}");
        }
        // A library that the operator names is used if the driver supports its code.
        assert_eq!(load(&both.file(12), Some(13)), Ok(12));
    }

    #[test]
    fn either_version_is_accepted() {
        for major in [12, 13] {
            let one = FakeLibraries::new(&[major]);
            for place in [one.0.path().to_owned(), one.file(major)] {
                assert_eq!(load(&place, Some(13)), Ok(major), "{}", place.display());
            }
        }
    }

    #[test]
    fn versions_that_the_driver_does_not_support_are_rejected() {
        let newer = FakeLibraries::new(&[13]);
        let refused = load(newer.0.path(), Some(12)).unwrap_err();
        assert!(refused.starts_with("no NVRTC for a driver of CUDA 12.2: "), "{refused}");
        assert!(
            refused.contains("libnvrtc.so.12") && refused.contains("nvidia-cuda-nvrtc-cu12)"),
            "{refused}"
        );
        assert!(!refused.contains("nvidia-cuda-nvrtc)"), "of no use: {refused}");
        let refused = load(&newer.file(13), Some(12)).unwrap_err();
        assert!(refused.contains("libnvrtc.so.13 is of CUDA 13.4"), "{refused}");
        // Every host has the C library.
        let refused = load(Path::new("libc.so.6"), None).unwrap_err();
        assert!(refused.contains("nvrtcVersion"), "{refused}");
        for place in [newer.0.path().to_owned(), newer.file(13)] {
            let refused = load(&place, Some(11)).unwrap_err();
            assert!(refused.contains("CUDA 11.2") && refused.contains("driver 525 or newer"), "{refused}");
        }
    }
}
