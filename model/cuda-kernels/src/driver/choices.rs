//! The algorithms that were chosen by time, in memory and in a file. A later start takes them from the file, so that
//! the bits of products are the same.
//!
//! A file holds the choices of one card, driver and version of the library; its first lines say which. Its last line is
//! a hash of the rest.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::shape::{Numbers, Shape};

/// `cublasLtMatmulAlgo_t`: cuBLASLt guarantees that it can be kept, for the same version.
pub type Algorithm = [u64; 8];

/// The first line of a file.
const FORMAT: &str = "baton products 1";

pub struct Choices {
    algorithms: BTreeMap<Shape, Algorithm>,
    /// Those that serve this process alone: there was no time to choose, and the next start may have it.
    untimed: BTreeMap<Shape, Algorithm>,
    /// `None`: nothing is kept.
    path: Option<PathBuf>,
    /// What the choices are for: card, driver, library.
    machine: String,
    has_new: bool,
}

impl Choices {
    /// The choices that a file in `dir` holds for this machine.
    pub fn load(dir: Option<&Path>, machine: String) -> Choices {
        let name = blake3::hash(machine.as_bytes()).to_hex();
        let path = dir.map(|dir| dir.join(format!("products-{}.txt", &name[..16])));
        let (algorithms, untimed) = (BTreeMap::new(), BTreeMap::new());
        let mut choices = Choices { algorithms, untimed, path, machine, has_new: false };
        choices.algorithms = choices.in_file();
        choices
    }

    /// The algorithm for a [padded](Shape::padded) shape.
    pub fn get(&self, shape: &Shape) -> Option<Algorithm> {
        self.algorithms.get(shape).or_else(|| self.untimed.get(shape)).copied()
    }

    pub fn insert(&mut self, shape: Shape, algorithm: Algorithm) {
        self.algorithms.insert(shape, algorithm);
        self.has_new = true;
    }

    /// As `insert`, but the file does not get it.
    pub fn insert_untimed(&mut self, shape: Shape, algorithm: Algorithm) {
        self.untimed.insert(shape, algorithm);
    }

    pub fn len(&self) -> usize {
        self.algorithms.len()
    }

    /// Adds the new choices to the file. Where another process has chosen meanwhile, its choice counts.
    pub fn keep(&mut self) {
        let Some(path) = self.path.clone().filter(|_| self.has_new) else { return };
        self.has_new = false;
        if let Err(error) = self.add_to(&path) {
            tracing::warn!(path = %path.display(), %error, "the choice of algorithms could not be kept: the next start chooses again, and last bits may differ");
        }
    }

    fn add_to(&mut self, path: &Path) -> io::Result<()> {
        let dir = path.parent().expect("it is in a directory");
        std::fs::create_dir_all(dir)?;
        // Ranks and workers of a host start together. The lock ends with the file.
        let lock = File::create(path.with_extension("lock"))?;
        lock.lock()?;
        let earlier = self.in_file();
        self.algorithms.extend(earlier);
        let new = path.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
        let written = std::fs::write(&new, self.text()).and_then(|()| std::fs::rename(&new, path));
        written.inspect_err(|_| {
            // The first error is the one to report.
            let _ = std::fs::remove_file(&new);
        })
    }

    /// The choices in the file. Empty if there is none, or if it is damaged or for another machine.
    fn in_file(&self) -> BTreeMap<Shape, Algorithm> {
        let Some(text) = self.path.as_ref().and_then(|path| std::fs::read(path).ok()) else {
            return BTreeMap::new();
        };
        let parsed = std::str::from_utf8(&text).ok().and_then(|text| parse(text, &self.machine));
        if parsed.is_none() {
            let path = self.path.as_ref().expect("it was read").display();
            tracing::warn!(%path, "the file of chosen algorithms is damaged or of another machine and is ignored");
        }
        parsed.unwrap_or_default()
    }

    fn text(&self) -> String {
        let mut text = format!("{FORMAT}\n{}\n", self.machine);
        for (shape, algorithm) in &self.algorithms {
            let Shape { num_rows, num_out, num_in, left_stride, out_stride, .. } = shape;
            let numbers = Numbers::ALL.iter().position(|it| *it == shape.numbers).expect("all are listed");
            let flags = [shape.is_out_f32, shape.is_added].map(u8::from);
            let words = algorithm.map(|word| format!("{word:x}")).join(" ");
            writeln!(
                text,
                "{num_rows} {num_out} {num_in} {left_stride} {out_stride} {} {} {numbers} {words}",
                flags[0], flags[1]
            )
            .expect("a string has room");
        }
        let hash = blake3::hash(text.as_bytes()).to_hex();
        text + &hash + "\n"
    }
}

fn parse(text: &str, machine: &str) -> Option<BTreeMap<Shape, Algorithm>> {
    let body_len = text.strip_suffix('\n')?.rfind('\n')? + 1;
    let (body, hash) = text.split_at(body_len);
    if blake3::hash(body.as_bytes()).to_hex().as_str() != hash.trim_end() {
        return None;
    }
    let choices = body.strip_prefix(FORMAT)?.strip_prefix('\n')?.strip_prefix(machine)?.strip_prefix('\n')?;
    choices.lines().map(choice).collect()
}

fn choice(line: &str) -> Option<(Shape, Algorithm)> {
    fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> Option<T> {
        words.next()?.parse().ok()
    }
    let words = &mut line.split(' ');
    let shape = Shape {
        num_rows: next(words)?,
        num_out: next(words)?,
        num_in: next(words)?,
        left_stride: next(words)?,
        out_stride: next(words)?,
        is_out_f32: next::<u8>(words)? != 0,
        is_added: next::<u8>(words)? != 0,
        numbers: *Numbers::ALL.get(next::<usize>(words)?)?,
    };
    let algorithm: Option<Vec<u64>> = words.map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some((shape, algorithm?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Fp8Scaling;

    fn shape(num_rows: u64, numbers: Numbers) -> Shape {
        Shape {
            num_rows,
            num_out: 4096,
            num_in: 1024,
            left_stride: 1024,
            out_stride: 4096,
            is_out_f32: numbers == Numbers::Bf16,
            is_added: false,
            numbers,
        }
    }

    fn load(dir: &Path) -> Choices {
        Choices::load(Some(dir), "an H100, driver 12.9".to_owned())
    }

    #[test]
    fn choices_are_kept_and_the_first_one_counts() {
        let dir = tempfile::tempdir().unwrap();
        let shapes = Numbers::ALL.map(|numbers| shape(64, numbers));
        let algorithm = |first| [first, 2, 3, u64::MAX, 5, 6, 7, 8];
        let (mut choices, mut other) = (load(dir.path()), load(dir.path()));
        shapes.iter().for_each(|shape| choices.insert(*shape, algorithm(1)));
        choices.keep();
        other.insert(shapes[0], algorithm(9));
        other.insert(shape(2, Numbers::Bf16), algorithm(9));
        other.keep();
        for kept in [&load(dir.path()), &other] {
            assert!(shapes.iter().all(|shape| kept.get(shape) == Some(algorithm(1))));
            assert_eq!(kept.get(&shape(2, Numbers::Bf16)), Some(algorithm(9)));
            assert_eq!(kept.len(), 5);
        }
        assert_eq!(Choices::load(Some(dir.path()), "an A100".to_owned()).len(), 0);
    }

    #[test]
    fn what_was_not_timed_serves_this_process_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut choices = load(dir.path());
        choices.insert(shape(1, Numbers::Bf16), [1; 8]);
        choices.insert_untimed(shape(64, Numbers::Bf16), [2; 8]);
        choices.keep();
        assert_eq!(choices.get(&shape(64, Numbers::Bf16)), Some([2; 8]));
        let next = load(dir.path());
        assert_eq!(next.get(&shape(1, Numbers::Bf16)), Some([1; 8]));
        assert_eq!(next.get(&shape(64, Numbers::Bf16)), None);
    }

    #[test]
    fn damaged_and_foreign_files_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let mut choices = load(dir.path());
        choices.insert(shape(8, Numbers::Fp8(Fp8Scaling::Rows)), [7; 8]);
        choices.keep();
        let path = choices.path.clone().unwrap();
        let whole = std::fs::read_to_string(&path).unwrap();
        let hashed = |body: &str| format!("{body}{}\n", blake3::hash(body.as_bytes()).to_hex());
        let body = &whole[..whole.trim_end().rfind('\n').unwrap() + 1];
        assert_eq!(hashed(body), whole);
        for damaged in [
            String::new(),
            "\n".to_owned(),
            whole[..whole.len() / 2].to_owned(),
            whole.replacen("1024", "1025", 1),
            hashed(&body.replace("H100", "H200")),
            hashed(&body.replace("products 1", "products 2")),
            hashed(&body.replacen(" 7\n", "\n", 1)),
            hashed(&format!("{body}x\n")),
        ] {
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(load(dir.path()).len(), 0, "{damaged:?}");
        }
        // The next start replaces it.
        let mut again = load(dir.path());
        again.insert(shape(8, Numbers::Bf16), [3; 8]);
        again.keep();
        assert_eq!(load(dir.path()).len(), 1);
    }
}
