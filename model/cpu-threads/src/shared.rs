//! A pointer through which several threads write disjoint parts.

/// A pointer through which work items write disjoint parts.
#[derive(Clone, Copy)]
pub struct SharedMut<T>(*mut T);

// SAFETY: the code that makes one ensures that its users' parts are disjoint.
unsafe impl<T> Sync for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T> Send for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// A pointer to the first element of `slice`.
    #[inline]
    pub fn new(slice: &mut [T]) -> SharedMut<T> {
        SharedMut(slice.as_mut_ptr())
    }

    /// From a pointer to the first element.
    #[inline]
    pub fn from_ptr(first: *mut T) -> SharedMut<T> {
        SharedMut(first)
    }

    /// The first element.
    #[inline]
    pub fn ptr(&self) -> *mut T {
        self.0
    }

    /// Row `row_idx` of a matrix with rows of `len` elements.
    ///
    /// # Safety
    /// The matrix has the row, and no other code accesses it while the result is used.
    #[inline]
    pub unsafe fn row<'a>(self, row_idx: usize, len: usize) -> &'a mut [T] {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(row_idx * len), len) }
    }
}
