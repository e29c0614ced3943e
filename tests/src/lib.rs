//! Whole-system tests: a cluster harness, faults, parity.
