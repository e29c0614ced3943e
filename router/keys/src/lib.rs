//! API keys: the file of their hashes, verification, quotas.
//!
//! Pure: the clock, randomness and the file's text are passed in. It knows neither HTTP nor requests.
#![forbid(unsafe_code)]

mod api_key;
mod date;
mod file;
mod holder;
mod quota;
mod ring;
mod shares;

pub use api_key::{ApiKey, BadKeyHash, KeyHash};
pub use file::KeyFileError;
pub use holder::{CallPermit, KeyHolder, KeyRole};
pub use quota::{Allowance, Quota, QuotaExceeded, QuotaLimits};
pub use ring::{BadKey, KeyRing};
pub use shares::{ShareExceeded, SharePermit, TenantShares};
