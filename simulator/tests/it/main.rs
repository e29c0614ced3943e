//! The simulator against what is known without it.

mod cluster;
mod command;
mod queues;
mod sharing;
mod support;
mod tiers;
