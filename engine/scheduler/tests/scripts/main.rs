//! The scheduler, by scripts: what a step computes, which sequences are admitted, and which are preempted.

mod script;

mod adopt;
mod drafts;
mod handoffs;
mod preemption;
mod prefix_cache;
mod priority;
mod steps;
