//! Sizes and times as people write them: `64GiB`, `1.5 GB`, `250ms`, `3d`; plain numbers are bytes and seconds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _, Visitor};

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// A length of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub Duration);

/// A number that is not negative and its unit, in lower case.
fn split(text: &str) -> Option<(f64, String)> {
    let text = text.trim();
    let end = text.find(|sign: char| !sign.is_ascii_digit() && sign != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    Some((number, text[end..].trim().to_ascii_lowercase()))
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is no size: give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let factor: u64 = match unit.as_str() {
            "" | "b" => 1,
            "kb" => 1000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            _ => return Err(wrong()),
        };
        let bytes = number * factor as f64;
        // 2^63 and above would not fit everywhere.
        if bytes < 9.2e18 && bytes.fract() == 0.0 { Ok(Self(bytes as u64)) } else { Err(wrong()) }
    }
}

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no time: give seconds, or a number with ms, s, m, h or d");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let factor = match unit.as_str() {
            "ms" => 0.001,
            "" | "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return Err(wrong()),
        };
        // Some 136 years: what fits the seconds of a record.
        let seconds = number * factor;
        if seconds <= f64::from(u32::MAX) { Ok(Self(Duration::from_secs_f64(seconds))) } else { Err(wrong()) }
    }
}

struct Written<T>(&'static str, std::marker::PhantomData<T>);

impl<T: FromStr<Err = String>> Visitor<'_> for Written<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Written("a size, as \"64GiB\"", std::marker::PhantomData)).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Written("a time, as \"3d\"", std::marker::PhantomData)).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_and_times_are_read() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("64GiB", 64 << 30), ("1.5 kib", 1536), ("10MB", 10_000_000), ("2 TiB", 2 << 40)]
        {
            assert_eq!(text.parse::<Size>().unwrap().0, bytes, "{text}");
        }
        for (text, millis) in [
            ("0", 0),
            ("90", 90_000),
            ("250ms", 250),
            ("1.5s", 1500),
            ("3d", 259_200_000),
            ("2 h", 7_200_000),
            ("1m", 60_000),
        ] {
            assert_eq!(text.parse::<Time>().unwrap().0, Duration::from_millis(millis), "{text}");
        }
    }

    #[test]
    fn what_is_neither_is_refused() {
        for text in ["", "GiB", "-1", "1.5", "1e9", "5 apples", "99999999999 TiB", "nan", "inf"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        for text in ["", "s", "-1", "5 weeks", "99999999999d", "nan", "∞"] {
            assert!(text.parse::<Time>().is_err(), "{text}");
        }
    }
}
