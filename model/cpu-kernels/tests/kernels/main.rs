//! Products and rows beside plain references, with every instruction set of the CPU and the software model of tiles.
//!
//! They are not unit tests: the library would be compiled a second time for them, and its kernels take minutes.

mod cpu;
mod left;
mod multiply;
mod pairs;
mod rows;
mod unpacked;
