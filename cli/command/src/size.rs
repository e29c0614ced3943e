//! Numbers of bytes, such as 512M, and other numbers as flags give them.

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(
    /// The number.
    pub usize,
);

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Parses a number of bytes with an optional unit: powers of 1024.
///
/// # Errors
/// When it is not a whole number of bytes above 0, or has an unknown unit.
pub fn parse_size(text: &str) -> Result<Size, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        unit => return Err(format!("unknown unit '{unit}'; use K, M, G or T (powers of 1024)")),
    };
    let number: usize = digits.parse().map_err(|_| format!("'{digits}' is not a whole number"))?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if bytes > 0 => Ok(Size(bytes)),
        Some(_) => Err("must be more than 0".to_owned()),
        None => Err("is more than this machine can address".to_owned()),
    }
}

/// Parses a number of at least 1.
///
/// # Errors
/// When it is 0 or no whole number.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let cases = [
            ("1", Ok(Size(1))),
            ("512M", Ok(Size(512 << 20))),
            ("4GiB", Ok(Size(4 << 30))),
            ("2k", Ok(Size(2048))),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_size(text), expected, "{text}");
        }
        for text in ["", "M", "0", "4X", "1.5G", "-1", "99999999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
