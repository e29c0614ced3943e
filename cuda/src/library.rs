//! Libraries that are loaded at run time: how their functions are looked up, and their words.

use std::error::Error as _;

/// The loader's, which name the file.
pub(crate) fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Functions of a library, looked up once. Their types are those of its header; with `int` for its enums, no value of a newer
/// library is a surprise.
macro_rules! api {
    ($vis:vis struct $api:ident { $($name:ident: $symbol:literal fn($($arg:ty),*) -> $result:ty;)* }) => {
        #[doc = "Functions, looked up once."]
        $vis struct $api {
            $(#[doc = concat!("`", $symbol, "`")] $vis $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl $api {
            fn find(library: &std::mem::ManuallyDrop<libloading::Library>) -> Result<$api, libloading::Error> {
                Ok($api {
                    // SAFETY: the types are the header's, and the library is never unloaded.
                    $($name: *unsafe { library.get($symbol.as_bytes()) }?,)*
                })
            }
        }
    };
}
pub(crate) use api;

/// Whatever text a library has for something.
///
/// # Safety
/// Null, or a C string.
pub(crate) unsafe fn text(pointer: *const std::ffi::c_char) -> String {
    match pointer.is_null() {
        true => String::new(),
        // SAFETY: by the caller's word.
        false => unsafe { std::ffi::CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
    }
}
