//! Reading the files of a model directory, with errors that name the file.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

use crate::TokenizerError;

pub(crate) fn read(path: &Path) -> Result<String, TokenizerError> {
    std::fs::read_to_string(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })
}

/// `None` when there is no such file.
pub(crate) fn read_if_present(path: &Path) -> Result<Option<String>, TokenizerError> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(TokenizerError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// `None` when there is no such file.
pub(crate) fn read_json_if_present<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TokenizerError> {
    let Some(text) = read_if_present(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| invalid(path, error))
}

pub(crate) fn invalid(path: impl Into<PathBuf>, message: impl ToString) -> TokenizerError {
    TokenizerError::Invalid { path: path.into(), message: message.to_string() }
}
