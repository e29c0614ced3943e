//! The scheduler, by scripts: what a step computes, who is admitted, and who gives way.

mod script;

mod drafts;
mod handoffs;
mod preemption;
mod prefix_cache;
mod steps;
