//! All keys of one reading of the file.

use std::{
    collections::HashMap,
    time::{Instant, SystemTime},
};

use crate::{KeyFileError, KeyHash, KeyHolder, KeyRole, QuotaLimits, file::parse, holder::Key};

/// The keys that are valid.
///
/// A key is found by its hash. A caller cannot choose the hash of what it shows, so neither the table, whose order is random, nor
/// the comparison, whose time is constant, tells it how near it is to another key.
#[derive(Debug, Default)]
pub struct KeyRing {
    keys: HashMap<KeyHash, KeyHolder>,
    /// Keys of earlier readings, while what they have used still counts.
    left: HashMap<KeyHash, KeyHolder>,
}

/// Why a key opens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    /// It was never valid, or was revoked: both look alike.
    #[error("this API key is not valid here")]
    Unknown,
    /// It was valid.
    #[error("this API key has expired")]
    Expired,
}

impl KeyRing {
    /// Reads a key file.
    ///
    /// # Errors
    /// When it is not a key file: which line is wrong, and why.
    pub fn read(text: &str) -> Result<KeyRing, KeyFileError> {
        let keys = parse(text)?.into_iter().map(|key| (key.hash, KeyHolder::new(key))).collect();
        Ok(KeyRing { keys, left: HashMap::new() })
    }

    /// Adds a key for workers that is in no file.
    pub fn add_worker_key(&mut self, hash: KeyHash) {
        let (name, tenant) = ("(worker key)".to_owned(), String::new());
        let (role, limits, expires) = (KeyRole::Worker, QuotaLimits::default(), None);
        let key = Key { hash, name, tenant, role, limits, expires };
        self.keys.insert(hash, KeyHolder::new(key));
    }

    /// Takes over what the keys of the earlier readings have used. Of keys that have left it is kept until none of it counts any
    /// more: they may come back.
    pub fn continue_from(&mut self, earlier: &KeyRing, now: Instant) {
        for (hash, earlier) in earlier.left.iter().chain(&earlier.keys) {
            if let Some(holder) = self.keys.get_mut(hash) {
                holder.continue_from(earlier);
            } else if !earlier.has_full_quota(now) {
                self.left.insert(*hash, earlier.clone());
            }
        }
    }

    /// The holder of the key that a caller has shown.
    ///
    /// # Errors
    /// When it is not valid now.
    pub fn find(&self, shown: &str, now: SystemTime) -> Result<&KeyHolder, BadKey> {
        let holder = KeyHash::of(shown).and_then(|hash| self.keys.get(&hash)).ok_or(BadKey::Unknown)?;
        match holder.key().expires {
            Some(expires) if expires <= now => Err(BadKey::Expired),
            _ => Ok(holder),
        }
    }

    /// Whether the key of a holder is still valid, with the role and the tenant that the holder has.
    pub fn is_valid(&self, holder: &KeyHolder, now: SystemTime) -> bool {
        let Some(found) = self.keys.get(&holder.key().hash) else { return false };
        let is_same = found.role() == holder.role() && found.tenant() == holder.tenant();
        is_same && found.key().expires.is_none_or(|expires| expires > now)
    }

    /// How many there are.
    pub fn num_keys(&self) -> usize {
        self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{ApiKey, Quota};

    fn key(number: u8) -> ApiKey {
        ApiKey::from_random([number; 32])
    }

    fn entry(number: u8, rest: &str) -> String {
        format!("[[key]]\nname = \"k{number}\"\nhash = \"{}\"\n{rest}\n", key(number).hash())
    }

    #[test]
    fn a_key_is_valid_until_it_expires_or_leaves_the_file() {
        let until = entry(1, "tenant = \"a\"\nexpires = 2027-01-01");
        let ring = KeyRing::read(&(until + &entry(2, "role = \"worker\""))).unwrap();
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(1_798_761_600);
        let holder = ring.find(key(1).secret(), end - Duration::from_secs(1)).unwrap();
        assert_eq!((holder.name(), holder.tenant(), holder.role()), ("k1", "a", KeyRole::Client));
        assert_eq!(ring.find(key(1).secret(), end).unwrap_err(), BadKey::Expired);
        assert_eq!(ring.find(key(2).secret(), end).unwrap().role(), KeyRole::Worker);
        assert_eq!(ring.find(key(3).secret(), end).unwrap_err(), BadKey::Unknown);
        assert!(ring.is_valid(holder, end - Duration::from_secs(1)) && !ring.is_valid(holder, end));
        assert!(!KeyRing::read("").unwrap().is_valid(holder, SystemTime::UNIX_EPOCH));
    }

    #[test]
    fn a_holder_is_not_valid_once_its_key_has_another_role_or_tenant() {
        let now = SystemTime::UNIX_EPOCH;
        let read = |fields: &str| KeyRing::read(&entry(1, fields)).unwrap();
        let ring = read("tenant = \"a\"\nrole = \"operator\"");
        let holder = ring.find(key(1).secret(), now).unwrap();
        for (fields, is_valid) in [
            ("tenant = \"a\"\nrole = \"operator\"\nstreams = 2", true),
            ("tenant = \"a\"", false),
            ("tenant = \"b\"\nrole = \"operator\"", false),
        ] {
            assert_eq!(read(fields).is_valid(holder, now), is_valid, "{fields}");
        }
    }

    #[test]
    fn quotas_hold_across_readings_with_the_limits_of_the_newest() {
        let now = Instant::now();
        let read = |limits: &str| KeyRing::read(&entry(1, &format!("tenant = \"a\"\n{limits}"))).unwrap();
        let first = read("requests-per-minute = 2\nstreams = 2");
        let find = |ring: &KeyRing| ring.find(key(1).secret(), SystemTime::now()).unwrap().clone();
        let permits = [find(&first).begin_call(now).unwrap(), find(&first).begin_call(now).unwrap()];
        let quota = |ring: &KeyRing| find(ring).begin_call(now).unwrap_err().quota;
        assert_eq!(quota(&first), Quota::Streams);
        let mut second = read("requests-per-minute = 2\nstreams = 3");
        second.continue_from(&first, now);
        assert_eq!(quota(&second), Quota::Requests);
        let mut third = read("streams = 3");
        third.continue_from(&second, now);
        let third_call = find(&third).begin_call(now).unwrap();
        assert_eq!(quota(&third), Quota::Streams);
        drop((permits, third_call));
        assert!(find(&third).begin_call(now).is_ok());
    }

    #[test]
    fn a_key_that_comes_back_has_used_what_it_had_used() {
        let now = Instant::now();
        let text = entry(1, "tenant = \"a\"\nrequests-per-minute = 60\nstreams = 1");
        let read = |text: &str, earlier: &KeyRing, now: Instant| {
            let mut ring = KeyRing::read(text).unwrap();
            ring.continue_from(earlier, now);
            ring
        };
        let begin_call =
            |ring: &KeyRing| ring.find(key(1).secret(), SystemTime::now()).unwrap().begin_call(now);
        let first = read(&text, &KeyRing::default(), now);
        let permit = begin_call(&first).unwrap();
        let gone = read("", &read("", &first, now), now + Duration::from_secs(60));
        assert_eq!((gone.num_keys(), gone.left.len()), (0, 1));
        let back = read(&text, &gone, now);
        assert_eq!(begin_call(&back).unwrap_err().quota, Quota::Streams);
        assert!(back.left.is_empty());
        drop(permit);
        // The call took one of 60 a minute.
        assert_eq!(read("", &back, now).left.len(), 1);
        assert!(read("", &back, now + Duration::from_secs(1)).left.is_empty(), "nothing of it counts");
    }

    #[test]
    fn prompts_are_taken_and_outputs_are_charged() {
        let now = Instant::now();
        let ring = KeyRing::read(&entry(1, "tenant = \"a\"\ntokens-per-minute = 60")).unwrap();
        let holder = ring.find(key(1).secret(), SystemTime::now()).unwrap();
        holder.take_prompt_tokens(50, now).unwrap();
        holder.charge_tokens(20, now);
        let refused = holder.take_prompt_tokens(1, now).unwrap_err();
        assert_eq!(
            (refused.quota, refused.limit, refused.retry_after),
            (Quota::Tokens, 60, Duration::from_secs(11))
        );
        assert_eq!(refused.to_string(), "this key may use 60 tokens a minute, and has; try again in 11 s");
        assert_eq!(holder.allowances(now).1.unwrap().remaining, 0);
        assert_eq!(holder.allowances(now).0, None);
    }

    #[test]
    fn a_file_that_is_wrong_is_refused_with_the_line() {
        let hash = key(1).hash();
        let good = entry(1, "tenant = \"a\"");
        let mut upper = entry(2, "tenant = \"a\"").replace("k2", "k1");
        upper.insert_str(0, &good);
        for (text, line, part) in [
            ("[[key]]\nname = \"a\"\n".to_owned(), 1, "missing field `hash`"),
            ("[[key]\n".to_owned(), 1, ""),
            (entry(1, "tenant = \"a\"\nrequest-per-minute = 1"), 5, "unknown field `request-per-minute`"),
            (entry(1, "tenant = \"a\"\nstreams = 0"), 5, "nonzero"),
            (entry(1, "tenant = \"a b\""), 4, "\"a b\" is no name"),
            (entry(1, "tenant = \"a\"\nrole = \"root\""), 5, "unknown variant `root`"),
            (entry(1, "tenant = \"a\"\nexpires = 12:00:00"), 5, "expires is a date"),
            (entry(1, ""), 2, "\"k1\" has no tenant"),
            ("[[key]]\nname = \"a\"\nhash = \"123\"\n".to_owned(), 3, "a hash of a key is blake3:"),
            (upper, 6, "another key is called \"k1\""),
            (
                format!("{good}[[key]]\nname = \"b\"\nhash = \"{hash}\"\ntenant = \"a\"\n"),
                7,
                "has the hash of \"k1\"",
            ),
            ("keys = []\n".to_owned(), 1, "unknown field `keys`"),
        ] {
            let error = KeyRing::read(&text).unwrap_err();
            assert_eq!(error.line, line, "{text}\n{error}");
            assert!(error.message.contains(part), "{text}\n{error}");
        }
        assert_eq!(KeyRing::read("# none yet\n").unwrap().num_keys(), 0);
    }
}
