//! Segments as files: their names, their heads, reading. A segment is written from its head to its end, once.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::xxh3_64;

use crate::{
    error::JournalOpenError,
    record::{Acceptance, Ending, Found, MAX_BODY, Payload, Position, Record, SessionKey},
};

const MAGIC: &[u8; 8] = b"BATONJNL";
/// Changes with the format of segments and records.
pub(crate) const VERSION: u32 = 1;
/// Magic, version, number, checksum of these.
pub(crate) const HEAD: usize = 8 + 4 + 4 + 8;
/// First read of a record; most are shorter.
const FIRST_READ: usize = 4096;

/// What a segment's head says.
pub(crate) enum Head {
    Whole,
    /// The file was being made when its router died, or the head is damaged.
    Damaged,
}

/// All of a session that is journalled.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) acceptance: Acceptance,
    pub(crate) tokens: Vec<Vec<u8>>,
    /// `None`: it goes on, or tokens before its end are not journalled.
    pub(crate) ending: Option<Ending>,
}

pub(crate) fn path(dir: &Path, segment: u32) -> PathBuf {
    dir.join(format!("{segment:08x}.journal"))
}

/// The segments of a directory, oldest first. Other files are left alone.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<u32>> {
    let mut segments = Vec::new();
    for file in fs::read_dir(dir)? {
        let name = file?.file_name();
        let number = name.to_str().and_then(|name| name.strip_suffix(".journal"));
        let number = number.and_then(|number| u32::from_str_radix(number, 16).ok());
        segments.extend(number.filter(|&number| path(dir, number).file_name() == Some(&name)));
    }
    segments.sort_unstable();
    Ok(segments)
}

/// The head of a segment.
pub(crate) fn head(segment: u32) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&segment.to_le_bytes());
    let checksum = xxh3_64(&head[..16]);
    head[16..].copy_from_slice(&checksum.to_le_bytes());
    head
}

/// Checks a head.
///
/// # Errors
/// When the file is no segment, or of another version.
pub(crate) fn check_head(bytes: &[u8], segment: u32, path: &Path) -> Result<Head, JournalOpenError> {
    let Some(found) = bytes.get(..HEAD) else { return Ok(Head::Damaged) };
    if found[..8] != *MAGIC {
        // A disk that filled up leaves zeros.
        let is_empty = found.iter().all(|&byte| byte == 0);
        return if is_empty {
            Ok(Head::Damaged)
        } else {
            Err(JournalOpenError::Foreign { path: path.to_owned() })
        };
    }
    let checksum = u64::from_le_bytes(found[16..].try_into().expect("eight bytes"));
    let version = u32::from_le_bytes(found[8..12].try_into().expect("four bytes"));
    // A later version may have another head.
    if version != VERSION && (checksum == xxh3_64(&found[..16]) || version.abs_diff(VERSION) < 256) {
        return Err(JournalOpenError::Version { path: path.to_owned(), found: version, expected: VERSION });
    }
    Ok(if found == head(segment) { Head::Whole } else { Head::Damaged })
}

/// Makes the file of a segment, with its head.
pub(crate) fn create(dir: &Path, segment: u32) -> io::Result<File> {
    let path = path(dir, segment);
    // One that could not be filled before is begun anew.
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all_at(&head(segment), 0)?;
    file.sync_all()?;
    // The name must survive, too.
    File::open(dir)?.sync_all()?;
    Ok(file)
}

/// A whole segment.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Why a session's records are not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChainError {
    /// They may be whole.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("segment {:x} is damaged at {}", .0.segment, .0.offset)]
    Damaged(Position),
}

/// Follows a session's records back from its newest one, which is written.
///
/// # Errors
/// When one cannot be read or is damaged.
pub(crate) fn read_chain(dir: &Path, key: SessionKey, last: Position) -> Result<Chain, ChainError> {
    let mut at = last;
    let mut open: Option<(u32, File)> = None;
    let (mut runs, mut ended) = (Vec::new(), None);
    loop {
        let failed = |source| ChainError::Io { path: path(dir, at.segment), source };
        let file = match &open {
            Some((segment, file)) if *segment == at.segment => file,
            _ => {
                let file = File::open(path(dir, at.segment)).map_err(failed)?;
                &open.insert((at.segment, file)).1
            }
        };
        let record = read_record(file, at).map_err(failed)?;
        let record = record.filter(|record| record.session == key).ok_or(ChainError::Damaged(at))?;
        let (acceptance, first) = match record.payload {
            Payload::Accepted(acceptance) => (acceptance, Vec::new()),
            Payload::Snapshot(acceptance, tokens) => (acceptance, tokens),
            Payload::Tokens(_, tokens) => {
                runs.push(tokens);
                at = earlier(record.previous, at)?;
                continue;
            }
            Payload::Ended(ending, num_tokens) => {
                ended = Some((ending, num_tokens as usize));
                at = earlier(record.previous, at)?;
                continue;
            }
        };
        let tokens: Vec<_> = [first].into_iter().chain(runs.into_iter().rev()).flatten().collect();
        let is_end =
            |&(ending, num_tokens): &(Ending, usize)| ending == Ending::Abort || num_tokens == tokens.len();
        let ending = ended.filter(is_end).map(|(ending, _)| ending);
        return Ok(Chain { acceptance, tokens, ending });
    }
}

/// Each step goes back, so that no chain is endless.
fn earlier(previous: Position, at: Position) -> Result<Position, ChainError> {
    if previous < at { Ok(previous) } else { Err(ChainError::Damaged(at)) }
}

/// `None` when there is no whole record.
fn read_record(file: &File, at: Position) -> io::Result<Option<Record>> {
    let mut bytes = vec![0; FIRST_READ];
    let num = read_up_to(file, &mut bytes, at.offset.into())?;
    bytes.truncate(num);
    if let Some(length) = bytes.first_chunk::<4>() {
        let size = (u32::from_le_bytes(*length) as usize).min(MAX_BODY) + 12;
        if size > bytes.len() && num == FIRST_READ {
            bytes.resize(size, 0);
            let more = read_up_to(file, &mut bytes[num..], u64::from(at.offset) + num as u64)?;
            bytes.truncate(num + more);
        }
    }
    match Record::decode(&bytes, at) {
        Found::Record(record, _) => Ok(Some(record)),
        Found::Damaged(_) | Found::End => Ok(None),
    }
}

fn read_up_to(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut num = 0;
    while num < bytes.len() {
        match file.read_at(&mut bytes[num..], offset + num as u64) {
            Ok(0) => break,
            Ok(more) => num += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(num)
}

/// Deletes a segment that no session needs.
pub(crate) fn delete(dir: &Path, number: u32) {
    let file = path(dir, number);
    if let Err(error) = fs::remove_file(&file) {
        tracing::warn!(path = %file.display(), %error, "segment of the journal is not deleted");
    }
}
