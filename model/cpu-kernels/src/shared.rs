//! A pointer that several threads write disjoint parts through.

/// A pointer that items of work write disjoint parts through.
#[derive(Clone, Copy)]
pub struct SharedMut<T>(pub(crate) *mut T);

// SAFETY: the code that makes one keeps its users' parts disjoint.
unsafe impl<T> Sync for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T> Send for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// To the first element.
    #[inline]
    pub fn new(slice: &mut [T]) -> SharedMut<T> {
        SharedMut(slice.as_mut_ptr())
    }

    /// The first element.
    #[inline]
    pub fn ptr(&self) -> *mut T {
        self.0
    }
}
