//! Runs kernels where there is no GPU: their files compiled by g++ over `emulator/emulator.h`, with the address sanitizer
//! around every buffer, in a process of their own.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::kernel::{Address, Kernel, Source};

/// Buffers and launches, to be run one after the other.
pub(crate) struct Emulator {
    program: PathBuf,
    buffers: Vec<Vec<u8>>,
    launches: Vec<u8>,
    num_launches: u32,
}

/// What buffers hold in the end.
pub(crate) struct Memory {
    buffers: Vec<Vec<u8>>,
}

/// What an address that stands for a place in a buffer begins with.
const MARK: u64 = 0xba7 << 52;

impl Emulator {
    /// Compiles `source`, unless that has been done.
    pub(crate) fn new(source: Source) -> Emulator {
        Emulator { program: compile(&source), buffers: vec![], launches: vec![], num_launches: 0 }
    }

    /// A buffer that holds `bytes`.
    pub(crate) fn buffer(&mut self, bytes: &[u8]) -> Address {
        self.buffers.push(bytes.to_vec());
        Address(MARK | (self.buffers.len() as u64 - 1) << 40)
    }

    /// A buffer full of NaN.
    pub(crate) fn poisoned(&mut self, num_bytes: usize) -> Address {
        self.buffer(&vec![0xff; num_bytes])
    }

    /// Runs the kernel after those before it.
    pub(crate) fn launch<K: Kernel>(&mut self, kernel: &K) {
        let shape = kernel.shape();
        self.launches.extend((K::NAME.len() as u32).to_le_bytes());
        self.launches.extend(K::NAME.as_bytes());
        for word in shape.grid.into_iter().chain([shape.threads, shape.shared_bytes]) {
            self.launches.extend(word.to_le_bytes());
        }
        let num_bytes = size_of::<K>();
        self.launches.extend((num_bytes as u32).to_le_bytes());
        // SAFETY: a kernel's arguments are plain data without padding.
        self.launches
            .extend(unsafe { std::slice::from_raw_parts((&raw const *kernel).cast::<u8>(), num_bytes) });
        self.num_launches += 1;
    }

    /// Runs all launches, threads in order and then in an order drawn at random, with the same results.
    ///
    /// # Panics
    /// When a kernel leaves its buffers, waits for nobody, or depends on the order of its threads.
    pub(crate) fn run(&self) -> Memory {
        let [in_order, shuffled] = [0, 1].map(|seed| self.run_once(seed));
        assert!(in_order.buffers == shuffled.buffers, "the result depends on the order of threads");
        in_order
    }

    fn run_once(&self, seed: u32) -> Memory {
        let mut input = Vec::new();
        input.extend(seed.to_le_bytes());
        input.extend((self.buffers.len() as u32).to_le_bytes());
        for buffer in &self.buffers {
            input.extend((buffer.len() as u64).to_le_bytes());
            input.extend(buffer);
        }
        input.extend(self.num_launches.to_le_bytes());
        input.extend(&self.launches);
        let mut child = Command::new(&self.program)
            // Stacks of fibers are not those of the thread.
            .env("ASAN_OPTIONS", "detect_stack_use_after_return=0:detect_leaks=0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the emulator starts");
        let mut stdin = child.stdin.take().expect("piped");
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().expect("the emulator ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the emulator: {}\n{stderr}", output.status);
        writer.join().expect("no panic").expect("the emulator reads all");
        let mut left = &output.stdout[..];
        let mut buffers = Vec::new();
        for buffer in &self.buffers {
            let (bytes, rest) = left.split_at(buffer.len());
            buffers.push(bytes.to_vec());
            left = rest;
        }
        Memory { buffers }
    }
}

impl Memory {
    /// The buffer that `address` lies in, from there on.
    pub(crate) fn of(&self, address: Address) -> &[u8] {
        let (buffer_idx, offset) = (address.0 >> 40 & 0xfff, address.0 & ((1 << 40) - 1));
        &self.buffers[buffer_idx as usize][offset as usize..]
    }
}

/// The program that holds `source`'s kernels. Kept beside the build's other products, by a hash of all that it is made of.
fn compile(source: &Source) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let mut hasher = blake3::Hasher::new();
    for file in ["kernels/common.cuh", "emulator/emulator.h", "emulator/run.h"] {
        hasher.update(&std::fs::read(here.join(file)).expect("it is in the source tree"));
    }
    hasher.update(source.text.as_bytes());
    hasher.update(format!("{:?}", source.defines).as_bytes());
    let target = std::env::current_exe().expect("this is a program");
    let dir = target.parent().expect("in a folder").join("emulated-kernels");
    std::fs::create_dir_all(&dir).expect("the build's folder can be written");
    let name = format!("{}-{}", source.file, &hasher.finalize().to_hex()[..16]);
    let program = dir.join(&name);
    if program.exists() {
        return program;
    }
    // Tests are threads, and processes.
    let new = dir.join(format!("{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    // Sums of products are what the source says, on every machine.
    command.args(["-ffp-contract=off", "-DBATON_EMULATED", "-Wall", "-Wno-unused", "-Wno-unknown-pragmas"]);
    command.arg("-I").arg(here.join("emulator")).arg("-I").arg(here.join("kernels"));
    command.args(source.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    command.arg("-include").arg(here.join("kernels").join(source.file)).args(["-x", "c++"]);
    let output = command.arg(here.join("emulator/run.h")).arg("-o").arg(&new).output();
    let output = output.expect("g++ is there: `cargo xtask setup` installs it");
    assert!(output.status.success(), "{}: {}", source.file, String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&new, &program).expect("the build's folder can be written");
    program
}
