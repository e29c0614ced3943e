//! Object tiers over stores that are good, slow, or lie.

mod lying;
mod tier;
