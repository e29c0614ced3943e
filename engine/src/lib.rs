//! The engine: sequences, scheduler, block pool, prefix cache, sampler, and the loop that drives them.
